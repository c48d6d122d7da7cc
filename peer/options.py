"""What a person says on the command line: the options of each command, but for what
`swarmnet.runtime.options` has of a peer. The common ones come first, in each group of `--help` and
among the groups."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from swarmnet.errors import UsageError
from swarmnet.runtime.options import (
    LOOPBACK,
    MACHINE,
    MAX_PORT,
    NOTIFY_VARIABLE,
    RUN,
    DeviceOption,
    DtypeOption,
    InviteOption,
    LocalChoices,
    PrecisionName,
    RoundsOption,
    SeedOption,
    TransportOption,
)

ScreenName = Literal["auto", "plain", "shared", "quiet"]
"""`auto`: live where there is a terminal, else plain lines. `shared`: plain lines, where one peer
of all prints those about the run. `quiet`: the address only."""

LIMITS, OUTPUT = "Limits", "Output"

DebugOption = Annotated[
    bool, typer.Option(help="Show a traceback with an error, and more of the log.")
]
PlainOption = Annotated[bool, typer.Option(help="Plain lines instead of the live screen.")]
DashboardOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MAX_PORT,
        metavar="PORT",
        help="Show the run as a web page on this port; 0 = any.",
    ),
]
PAGE_ADDRESS = "Show the page at this address. The default is seen on this machine only."
ANY_PEER = "Address of any peer of the run."

DashboardHostOption = Annotated[
    str,
    typer.Option(
        metavar="HOST",
        help=PAGE_ADDRESS,
    ),
]
HOST_NAME = re.compile(r"(\*\.)?\w([-.\w]*\w)?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", re.ASCII)


def _host_names(names: list[str] | None) -> list[str]:
    for name in names or ():
        if HOST_NAME.fullmatch(name) is None:
            raise typer.BadParameter(
                f"{name!r} is no name of a host; one looks like training.example.org, without "
                "https:// and port"
            )
    return list(names or ())


AllowedHostOption = Annotated[
    tuple[str, ...],
    typer.Option(
        metavar="HOST",
        callback=_host_names,
        help="Answer requests to the page that name this host, such as a proxy's; "
        "localhost is answered always. Repeat it for several; *.example.org stands "
        "for all below.",
    ),
]
MetricsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write what happens to this file, one JSON object a line."),
]
NotifyOption = Annotated[
    str,
    typer.Option(
        metavar="URL",
        envvar=NOTIFY_VARIABLE,
        show_envvar=False,
        help="Send a message to this address (ntfy, or a webhook: Slack's, Discord's or "
        "your own) when a stage is about to be lost, when the run stands still, and "
        "when it is done.",
    ),
]
LogToOption = Annotated[
    str,
    typer.Option(
        metavar="KIND:WHERE",
        help="Draw charts of the run, by round: tensorboard:DIR, wandb:PROJECT, mlflow:URI or "
        "trackio:PROJECT. A run that is started again goes on in the same chart.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """What a machine's owner lets its peer take; "none" = no limit."""

    panel: ClassVar[str] = LIMITS

    max_upload: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Send no faster than this: 10Mbit, 2MB (a second)."),
    ] = None
    max_upload_per_month: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Send no more than this in a calendar month: 300GB. The peer then pauses "
            "until the next one.",
        ),
    ] = None
    max_upload_per_day: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Send no more than this in a day: 10GB. The peer then pauses until the next one.",
        ),
    ] = None
    max_download_per_month: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Receive no more than this in a calendar month: 300GB. The peer then pauses "
            "until the next one.",
        ),
    ] = None
    max_download_per_day: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Receive no more than this in a day: 10GB. The peer then pauses until the "
            "next one.",
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Take no more memory than this: 4GB, 512MiB."),
    ] = None
    max_device_share: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Largest part of the time in which the GPU works (without a GPU, the CPU): 50%.",
        ),
    ] = None
    hours: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="SPAN",
            help="Work at these local hours only: 22:00-07:00. Repeat it for several.",
        ),
    ] = ()
    pause_when_busy: Annotated[
        bool | None,
        typer.Option(
            "--pause-when-busy/--no-pause-when-busy",
            help="Pause while other programs keep the machine busy.",
        ),
    ] = None
    pause_on_battery: Annotated[
        bool | None,
        typer.Option(
            "--pause-on-battery/--no-pause-on-battery",
            help="Pause while the machine runs on its battery. Default: it does.",
            show_default=False,
        ),
    ] = None
    pause_on_metered: Annotated[
        bool | None,
        typer.Option(
            "--pause-on-metered/--no-pause-on-metered",
            help="Pause while NetworkManager says that the network is metered. Default: it does.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class PauseOptions:
    """Whose limits `swarmnet limits` changes."""

    panel: ClassVar[str] = MACHINE

    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The peer's state folder. Default: the only one there."),
    ] = None
    pause: Annotated[
        bool | None,
        typer.Option(
            "--pause/--resume", help="--pause: hand over and stand by. --resume: come back."
        ),
    ] = None
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a peer prints, writes and serves."""

    panel: ClassVar[str] = OUTPUT

    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=MACHINE,
            help='Take options from this TOML file, by their names (max-upload = "10Mbit"); those '
            "of the command line win. Default: peer.toml in the state folder, where it has one.",
        ),
    ] = None
    dashboard: DashboardOption = None
    dashboard_host: DashboardHostOption = LOOPBACK
    dashboard_join: Annotated[
        bool,
        typer.Option(
            help="Show on the page the line that joins this run, for copying: with it, this peer's "
            "address."
        ),
    ] = False
    allowed_host: AllowedHostOption = ()
    metrics: MetricsOption = None
    log_to: LogToOption = ""
    notify: NotifyOption = ""
    plain: PlainOption = False
    quiet: Annotated[bool, typer.Option(help="Print the address to join, and nothing else.")] = (
        False
    )
    shared_log: Annotated[
        bool,
        typer.Option(
            help="Print plain lines for a log that all peers of a run share, as with docker "
            "compose: one peer prints those about the whole run.",
        ),
    ] = False
    ready_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write the address of this peer to this file (for --join @FILE). Into a "
            "folder (FOLDER/) each peer writes a file of its own (for --join @FOLDER).",
        ),
    ] = None
    health_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="SWARMNET_HEALTH_FILE",
            show_envvar=False,
            help="Write this file every few seconds. It says whether this peer is well, for "
            "health checks.",
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_PORT, metavar="PORT", help="Serve /metrics for Prometheus on this port."
        ),
    ] = None
    metrics_host: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            help="Serve /metrics at this address. The default is seen on this machine only.",
        ),
    ] = LOOPBACK
    debug: DebugOption = False
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None

    @property
    def screen(self) -> ScreenName:
        """The one that says least of those asked for."""
        if self.quiet:
            return "quiet"
        return "shared" if self.shared_log else "plain" if self.plain else "auto"


@dataclass(frozen=True, kw_only=True)
class LocalOptions(LocalChoices):
    """Options of `swarmnet local`."""

    panel: ClassVar[str] = OUTPUT

    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the peers' checkpoints and logs in this folder, and go on from them the"
            " next time. Default: a temporary folder.",
            rich_help_panel=RUN,
        ),
    ] = None
    chaos: Annotated[
        str,
        typer.Option(
            metavar="RATES",
            help="Harm peers at random while you watch: kill=6/min, or kill=6/min,stop=2/min.",
            rich_help_panel=RUN,
        ),
    ] = ""
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the model to this new folder at the end, also after Ctrl-C.",
        ),
    ] = None
    dtype: DtypeOption = ""
    dashboard: DashboardOption = None
    dashboard_host: DashboardHostOption = LOOPBACK
    allowed_host: AllowedHostOption = ()
    metrics: MetricsOption = None
    log_to: LogToOption = ""
    notify: NotifyOption = ""
    plain: PlainOption = False
    debug: DebugOption = False

    @property
    def screen(self) -> ScreenName:
        return "plain" if self.plain else "auto"


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """What `swarmnet simulate` makes a swarm of."""

    panel: ClassVar[str] = "The swarm"

    peers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Peers that start with the run.")
    ] = 40
    stages: Annotated[int, typer.Option(min=1, metavar="N", help="Number of pipeline stages.")] = 4
    hours: Annotated[
        float, typer.Option(min=0.0, metavar="HOURS", help="Virtual time to simulate, in hours.")
    ] = 0.1
    churn: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="PART", help="Part of the peers that is replaced in an hour."
        ),
    ] = 0.3
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of churn events, one JSON object a line."),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed. One seed makes one history.")
    ] = 0
    links: Annotated[
        str,
        typer.Option(
            metavar="LINKS",
            help="Links of the machines: home, fast, or MBIT/MS, which is Mbit/s up and down, "
            "and ms between two peers.",
        ),
    ] = "home"
    speed_ratio: Annotated[
        float,
        typer.Option(
            min=1.0, metavar="RATIO", help="Speed of the fastest machine over that of the slowest."
        ),
    ] = 10.0
    service_s: Annotated[
        float,
        typer.Option(
            "--service",
            min=0.01,
            metavar="SECONDS",
            help="Time that a sequence takes in a stage, on a machine of middle speed.",
        ),
    ] = 4.0
    sequences: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Sequences of a microbatch. With more of them there is less to simulate.",
        ),
    ] = 1
    microbatches: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Microbatches of a round, for each replica of a stage."
        ),
    ] = 200
    codec: Annotated[
        Literal["none", "bf16", "int8", "int6", "int4"],
        typer.Option(
            help="How stages code what they send each other: [pipeline] codec of the run."
        ),
    ] = "int8"
    update_codec: Annotated[
        Literal["none", "bf16", "int8", "int4", "topk"] | None,
        typer.Option(help="How updates are coded: [sync] codec of the run."),
    ] = None
    topk_density: Annotated[
        float | None,
        typer.Option(
            metavar="PART",
            help="Part of the changes that topk sends, 0.01 to 0.08: [sync] topk_density of the "
            "run. Default: half.",
        ),
    ] = None
    device: Annotated[
        Literal["cpu", "gpu"],
        typer.Option(
            help="Device of the machines. cpu: a core beside it codes. gpu: the GPU codes itself."
        ),
    ] = "cpu"
    coding_speed: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="RATIO",
            help="Speed of coding, compared with one CPU core; 0 = coding takes no time. "
            "Default: 1, and 50 with --device gpu.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """How the simulated swarm goes about it."""

    panel: ClassVar[str] = "Policies"

    sync: Annotated[
        Literal["zero", "delayed", "auto", "local", "gossip"] | None,
        typer.Option(
            help="When replicas exchange what: [sync] mode of the run. Default: delayed; zero "
            "in a sweep.",
        ),
    ] = None
    local_steps: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Rounds between two exchanges, with --sync local or gossip.",
        ),
    ] = 10


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(SwarmOptions, PolicyOptions):
    """What `swarmnet simulate` simulates, what it looks for, and what it prints."""

    panel: ClassVar[str] = OUTPUT

    sweep: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Simulate so many small swarms, with every kind of fault, in place of one.",
        ),
    ] = 0
    replay: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="SEED",
            help="Simulate this seed of the sweep, and print its events.",
        ),
    ] = None
    check_every_s: Annotated[
        float,
        typer.Option(
            "--check-every",
            min=0.0,
            metavar="SECONDS",
            help="Time between two checks of all peers; 0 = the program chooses.",
        ),
    ] = 0.0
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Draw what happened into this file."),
    ] = None
    as_json: JsonOption = False
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What the model is asked to write, and where the run is."""

    panel: ClassVar[str] = "The text"
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to go on with. With --chat: message to answer."),
    ] = None
    join: Annotated[tuple[str, ...], typer.Option(metavar="ADDR", help=ANY_PEER)] = ()
    chat: Annotated[
        bool,
        typer.Option(
            help="Converse, by the model's chat template. The prompt is answered, or else each"
            " line that you type.",
        ),
    ] = False
    system: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="What the model is told before the conversation, with --chat."
        ),
    ] = ""
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A tokenizer.json, where the run has none of its own. The chat template in "
            "its folder is used too.",
        ),
    ] = None
    exact: Annotated[
        bool,
        typer.Option(
            "--exact/--no-exact",
            help="--exact: activations go from stage to stage in fp32, and the text is that of"
            " the exported model. --no-exact: they go as the run codes them, in fewer "
            "bytes.",
        ),
    ] = True
    serve: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_PORT,
            metavar="PORT",
            help="Answer programs on this machine as the OpenAI API does, on this port; 0 = any.",
        ),
    ] = None
    invite: InviteOption = ""
    transport: TransportOption = "auto"
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How each token is chosen: transformers' names. None: as the model's files say."""

    panel: ClassVar[str] = "Each token"
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of the longest answer. Default: 256."),
    ] = None
    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--do-sample/--no-do-sample",
            help="--do-sample: draw each token. --no-do-sample: take the likeliest. Default: "
            "as the model's files say; tokens are drawn where one of the next four "
            "options is given.",
            show_default=False,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Randomness of the draw. Below 1, likely tokens become likelier."
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Draw from the N likeliest tokens; 0 = from all."),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Draw from the likeliest tokens, as many as have the probability X together.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Seed of the draw. The same seed gives the same text."
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Above 1, tokens that were there before become less likely."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """What `swarmnet status` looks at."""

    address: Annotated[str, typer.Argument(metavar="ADDR", help=ANY_PEER)]
    as_json: JsonOption = False
    watch: Annotated[bool, typer.Option(help="Look again and again, until Ctrl-C.")] = False
    transport: TransportOption = "auto"
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What `swarmnet doctor` checks."""

    join: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="ADDR", help="Address of a peer of the run. The way there and back is checked."
        ),
    ] = ()
    spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check this machine against what this run.toml needs."),
    ] = None
    device: DeviceOption = "auto"
    precision: Annotated[
        PrecisionName,
        typer.Option(help="Number format of a peer's passes here. auto: as the run says."),
    ] = "auto"
    port: Annotated[
        int, typer.Option(min=0, max=MAX_PORT, help="The port that peers will listen on.")
    ] = 0
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder where the peer will keep its state.")
    ] = None
    transport: TransportOption = "auto"
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Print only what this machine is and what works on it, for those who maintain"
            " swarmnet. It names nothing personal, and is sent nowhere.",
        ),
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, for programs.")] = (
        False
    )
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class InviteOptions:
    """What `swarmnet invite` is asked for."""

    key: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="File of the owner's secret key. It is made where there is none."
        ),
    ]
    spec: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Invite to the run of this run.toml.")
    ] = None
    join: Annotated[
        tuple[str, ...],
        typer.Option(metavar="ADDR", help="Invite to the live run behind this address."),
    ] = ()
    valid: Annotated[
        str,
        typer.Option(metavar="TIME", help="Time for which the invite is valid: 90m, 12h, 30d, 4w."),
    ] = "30d"
    peer_id: Annotated[
        str,
        typer.Option(
            "--peer",
            metavar="PEER_ID",
            help="Id of the only peer that may use the invite. Default: whoever holds it.",
        ),
    ] = ""
    rounds: RoundsOption = None
    seed: SeedOption = None
    transport: TransportOption = "auto"
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class StopOptions:
    """Which run `swarmnet stop` ends."""

    key: Annotated[
        Path, typer.Option(metavar="FILE", help="The owner's secret key, which closed the run.")
    ]
    join: Annotated[tuple[str, ...], typer.Option(metavar="ADDR", help="Any peer of the run.")]
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait until all peers have left; say how far it is."),
    ] = True
    transport: TransportOption = "auto"
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What `swarmnet state` lists, and what it removes."""

    state_dir: Annotated[
        tuple[Path, ...],
        typer.Option(
            metavar="DIR",
            help="A peer's state folder, or a folder of several; repeat it. Default: those in "
            "~/.local/state/swarmnet.",
        ),
    ] = ()
    remove: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="NAME",
            help="Remove this: something from the list, a folder of it, or all of a run (its "
            "name, or the beginning of its id). Repeat it for several.",
        ),
    ] = ()
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Remove the oldest until no more than this is left: 20GB."
        ),
    ] = None
    as_json: JsonOption = False
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class CountedOptions:
    """Whose counts `swarmnet counted` shows."""

    state_dirs: Annotated[
        tuple[Path, ...],
        typer.Argument(metavar="DIR...", help="State folders of the run's feeders."),
    ]
    run_id: Annotated[
        str, typer.Option(help="Id of the run, where the folders have seen several runs.")
    ] = ""
    by_machine: Annotated[
        bool,
        typer.Option(
            "--by-machine",
            help="Say what each machine has computed that counted, as the feeders saw it.",
        ),
    ] = False
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object a round, with the microbatches' ids, or a machine.",
        ),
    ] = False
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Which data `swarmnet data` shows."""

    spec: Annotated[Path, typer.Argument(metavar="FILE", help="The run's file.")]
    data: Annotated[
        tuple[str, ...],
        typer.Option(metavar="PATH", help="File or folder with the run's data on this machine."),
    ] = ()
    tokenizer: Annotated[
        str, typer.Option(metavar="FILE", help="The run's tokenizer.json on this machine.")
    ] = ""
    samples: Annotated[int, typer.Option(min=0, help="Samples to show of each source.")] = 2
    as_json: JsonOption = False
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What `swarmnet plan` reckons with."""

    spec: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The run's file; or a Hugging Face folder, or ORG/NAME of the hub.",
            show_default=False,
        ),
    ] = None
    join: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="ADDR",
            help="A peer of a live run, which is planned: what one more machine would bring, "
            "and when another cut would pay.",
        ),
    ] = ()
    machines: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="The machines, such as '24GB-gpu*2, rtx4090+64GB, 16GB-cpu*3, mac-32GB' (card or "
            "memory, +main memory, @TFLOPS), or a TOML file. here*4 is four peers on this machine. "
            "Default: eight like this one.",
            show_default=False,
        ),
    ] = ""
    links: Annotated[
        str,
        typer.Option(
            metavar="LINKS",
            help="Links of every machine: upload/download, and the time one way between two "
            "machines. With ,house=4 four machines in a row share one.",
        ),
    ] = "20Mbit/100Mbit,30ms"
    lora: Annotated[bool, typer.Option(help="Train adapters, as with [lora].")] = False
    choose: Annotated[
        bool,
        typer.Option(help="Choose stages, microbatch, batch and mode, whatever the file says."),
    ] = False
    tokens: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Tokens to train on, such as 500M or 1B. The plan says how long that takes.",
        ),
    ] = "1B"
    explain: Annotated[
        bool,
        typer.Option(help="Show the memory of a replica by formula, by policy and by sync mode."),
    ] = False
    schedules: Annotated[
        bool,
        typer.Option(
            help="What known orders of a pipeline (GPipe, 1F1B, zero-bubble and others) would come "
            "to with the plan's stages."
        ),
    ] = False
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw these schedules as SVG.", show_default=False),
    ] = None
    replicas: Annotated[
        int, typer.Option(min=1, help="Replicas of each stage, with --explain.")
    ] = 1
    in_flight: Annotated[
        int,
        typer.Option(
            min=0, help="Microbatches between forward and backward at a replica, with --explain."
        ),
    ] = 4
    cp: Annotated[
        int,
        typer.Option(
            min=1, max=64, metavar="N", help="Ranks that share each sequence, with --explain."
        ),
    ] = 1
    ep: Annotated[
        int,
        typer.Option(
            min=1, max=64, metavar="N", help="Ranks that divide the experts, with --explain."
        ),
    ] = 1
    tp: Annotated[
        int,
        typer.Option(min=1, max=64, metavar="N", help="Ranks that cut layers, with --explain."),
    ] = 1
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "mixed"],
        typer.Option(
            help="Number format of the passes. auto: as the run says. mixed, with --explain: "
            "the 16 bytes a parameter of the ZeRO paper."
        ),
    ] = "auto"
    measure: Annotated[
        bool,
        typer.Option(help="Time the layers on this machine, and print how to cut them."),
    ] = False
    write: Annotated[
        bool,
        typer.Option(
            help="Write the cut and what was chosen into the run's file. Of a folder, make "
            "run.toml."
        ),
    ] = False
    device: DeviceOption = "auto"
    transport: TransportOption = "auto"
    invite: InviteOption = ""
    as_json: JsonOption = False
    debug: DebugOption = False

    @property
    def file(self) -> Path:
        """Of what is planned without a live run. Raises `UsageError`."""
        if self.spec is None:
            raise UsageError("give --spec FILE for a run to plan, or --join ADDR for a live one")
        return self.spec


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """What `swarmnet dashboard` shows, and where."""

    join: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="ADDR",
            help="Show the live run behind this address; repeat it to name several peers. "
            "@FILE: the addresses in a file.",
        ),
    ] = ()
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Show a past run again, from the file that --metrics wrote."
        ),
    ] = None
    port: Annotated[
        int,
        typer.Option(min=0, max=MAX_PORT, help="Show the page on this port; 0 = any that is free."),
    ] = 8080
    host: Annotated[
        str,
        typer.Option(help=PAGE_ADDRESS),
    ] = LOOPBACK
    allowed_host: AllowedHostOption = ()
    transport: TransportOption = "auto"
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class ExampleOptions:
    """Which example `swarmnet example` writes."""

    name: Annotated[
        str | None, typer.Argument(help="Name of the example. Leave it out for a list.")
    ] = None
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """For which shell `swarmnet completion` prints a script."""

    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")
    ]
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class ManOptions:
    """What `swarmnet man` takes."""

    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class ExportSourceOptions:
    """Where `swarmnet export` has the model from, and the folder that it makes."""

    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to make.")]
    join: Annotated[
        tuple[str, ...],
        typer.Option(metavar="ADDR", help="Take the model from the live run behind this address."),
    ] = ()
    state_dir: Annotated[
        tuple[Path, ...],
        typer.Option(
            metavar="DIR",
            help="Take it from the checkpoints in these peers' state folders; repeat it until "
            "every stage is there.",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class ExportLinkOptions:
    """How `swarmnet export` reaches a live run."""

    invite: InviteOption = ""
    transport: TransportOption = "auto"
    debug: DebugOption = False
