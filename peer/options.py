"""What a person says on the command line. The groups of options are the groups of `--help`: the
common ones first, in each group and among the groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from peer.machine.limits import LimitOptions
from swarmnet.runtime.options import (
    ANY_INTERFACE,
    ActivationsName,
    DeviceName,
    LocalName,
    PrecisionName,
    TransportName,
)

ScreenName = Literal["auto", "plain", "shared", "quiet"]
"""`auto`: live where there is a terminal, else plain lines. `shared`: plain lines, where one peer
of all prints those about the run. `quiet`: the address only."""

LOOPBACK = "127.0.0.1"
INVITE_VARIABLE = "SWARMNET_INVITE"
"""Of the environment: what `--invite` says, unseen by the machine's other users."""
MAX_PORT = 65_535

RUN, MODEL, NETWORK = "This run", "Model and data", "Network"
MACHINE, LIMITS, OUTPUT = "This machine", "Limits", "Output"

TransportOption = Annotated[
    TransportName,
    typer.Option(help="What carries the bytes; peers with either train together."),
]
NoDirectOption = Annotated[
    bool,
    typer.Option("--no-direct", help="Move everything over libp2p; no direct TLS connections."),
]
DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show a traceback with an error, and more of the log.")
]
PlainOption = Annotated[
    bool, typer.Option("--plain", help="Plain lines instead of the live screen.")
]
RoundsOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Length of the run, in place of the spec's.")
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Seed of the run, in place of the spec's.")
]
InviteOption = Annotated[
    str,
    typer.Option(
        metavar="INVITE",
        envvar=INVITE_VARIABLE,
        show_envvar=False,
        help="The invite to a closed run, or the file that holds it.",
    ),
]
DeviceOption = Annotated[
    DeviceName,
    typer.Option(help="What computes. auto: the GPUs that torch can use, else the CPU."),
]
DtypeOption = Annotated[
    Literal["", "fp32", "bf16", "fp16"],
    typer.Option(
        metavar="DTYPE",
        help="Of the weights that are written: fp32, bf16 or fp16. Default: that of the model "
        "which the run began from, else fp32.",
        show_default=False,
    ),
]
StateDirsOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="Take it from the checkpoints in these peers' state folders; repeat it until "
        "every stage is there.",
    ),
]
RoundOption = Annotated[
    int | None,
    typer.Option(
        "--round", min=0, help="Of the rounds that were saved, this one. Default: the newest."
    ),
]
MergeOption = Annotated[
    bool,
    typer.Option(
        "--merge",
        help="Where adapters are trained ([lora]), write the whole model: adapters are added "
        "to the weights. Without it they are written alone, as a PEFT adapter.",
    ),
]
ModelFolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="For adapters: where this machine has their model. An adapter names it as its base. "
        "With --merge it is read, else it comes from the peers, or from what they have kept.",
    ),
]
RunIdOption = Annotated[
    str,
    typer.Option(
        "--run-id", help="Of the run (its beginning will do), where the folders hold several."
    ),
]
DashboardOption = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_PORT, metavar="PORT", help="Show the run as a web page; 0 = any."),
]
DashboardHostOption = Annotated[
    str,
    typer.Option(
        metavar="HOST", help="Address to show the page on; by default for this machine only."
    ),
]
MetricsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write what happens to FILE, one JSON object a line."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def default_spec_path() -> Path:
    """The embedded spec of `swarmnet local`."""
    return Path(__file__).with_name("default.toml")


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Which run, and this peer's part in it."""

    panel: ClassVar[str] = RUN

    spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start a new run from this run.toml."),
    ] = None
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Join the run behind this address; repeat it to name several peers. "
            "@FILE: the addresses in a file.",
        ),
    ] = None
    invite: InviteOption = ""
    rounds: RoundsOption = None
    seed: SeedOption = None
    stage: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="K", help="Serve this stage. Default: the one that needs you most."
        ),
    ] = None
    stages: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Serve so many stages. auto: as many as this machine has room for and the swarm "
            "needs.",
        ),
    ] = "1"
    exit_when_done: Annotated[
        bool,
        typer.Option("--exit-when-done", help="End with the run; else stay and serve the model."),
    ] = False
    patience: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Give up when nobody has answered for so long. Default: keep trying.",
        ),
    ] = None
    begin_anew: Annotated[
        bool,
        typer.Option(
            "--begin-anew",
            help="Where nobody is at work in the run: begin from initial parameters, not from the "
            "checkpoints that peers have. They stay on the disks.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """Where this machine has what the run names."""

    panel: ClassVar[str] = MODEL

    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Where this machine has the run's data; repeat it for several. A peer that joins "
            "reads no files that you have not named, but Python's standard library where the run "
            "is about that.",
        ),
    ] = None
    serve_data: Annotated[
        bool,
        typer.Option(
            "--serve-data",
            help="Give the run's data, as tokens, to its members, who can feed when you are gone.",
        ),
    ] = False
    fetch_data: Annotated[
        bool | None,
        typer.Option(
            "--fetch-data/--no-fetch-data",
            help="Get the run's data from peers that give them. Default: up to 2 GiB, while few "
            "peers have them.",
            show_default=False,
        ),
    ] = None
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Where this machine has the run's tokenizer.json, where the run has one.",
        ),
    ] = ""
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where this machine has the model that the run began from: its weights are given "
            "to others, or complete a whole model that is exported.",
        ),
    ] = None
    builder: Annotated[
        str,
        typer.Option(
            metavar="FILE:FUNCTION", help="Where this machine has the code of a custom model."
        ),
    ] = ""
    no_feed: Annotated[
        bool, typer.Option("--no-feed", help="Compute only; start no microbatches.")
    ] = False


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """What carries the bytes."""

    panel: ClassVar[str] = NETWORK

    transport: TransportOption = "p2pd"
    no_direct: NoDirectOption = False


@dataclass(frozen=True, slots=True)
class NetworkGroup:
    """Where a peer listens, and what it tells others of that."""

    panel: ClassVar[str] = NETWORK

    port: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_PORT, metavar="PORT", help="Listen on this port; 0 = any that is free."
        ),
    ] = 0
    announce: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Tell others this address too (port forwarding, for example).",
        ),
    ] = None
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Listen on the interface with this address.")
    ] = ANY_INTERFACE
    direct_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_PORT,
            metavar="PORT",
            help="Listen for direct connections on this port (1024 or above); 0 = any that is "
            "free.",
        ),
    ] = 0
    no_relay: Annotated[
        bool,
        typer.Option(
            "--no-relay", help="Carry nothing between other peers that cannot dial each other."
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class ComputeGroup:
    """How a machine computes."""

    panel: ClassVar[str] = MACHINE

    device: DeviceOption = "auto"
    precision: Annotated[
        PrecisionName,
        typer.Option(
            help="Of this machine's passes; what peers exchange does not depend on it. "
            "auto: as the run says."
        ),
    ] = "auto"
    activations: Annotated[
        ActivationsName,
        typer.Option(
            metavar="POLICY",
            help="Kept between forward and backward: keep, blocks, recompute, offload, or auto "
            "(as the run says, else by free memory).",
        ),
    ] = "auto"
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp",
            min=1,
            max=64,
            metavar="N",
            help="Cut every layer over N ranks of this machine. Default: all GPUs it sees, else 1.",
        ),
    ] = None
    local: Annotated[
        LocalName,
        typer.Option(
            help="What the ranks of --tp share out: the width of layers, or (fsdp) the samples, "
            "with parameters and gradients sharded.",
        ),
    ] = "tensor"
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel", help="With --tp: split norms and residuals by positions too."
        ),
    ] = False
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Compile the layers (torch.compile): slow to start."),
    ] = False


@dataclass(frozen=True, slots=True)
class StateGroup:
    """What a machine keeps, and how many of its cores work."""

    panel: ClassVar[str] = MACHINE

    threads: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Threads to compute with; 0 = torch's choice."),
    ] = 0
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep this peer's identity and checkpoints here. Default: peer-N in "
            "~/.local/state/swarmnet.",
        ),
    ] = None
    checkpoint_every: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Rounds between checkpoints of the stage; 0 = none."),
    ] = 10
    keep_checkpoints: Annotated[
        int,
        typer.Option(
            min=2,
            metavar="N",
            help="Keep the newest so many checkpoints, and up to 3 for slower disks.",
        ),
    ] = 2


@dataclass(frozen=True, slots=True)
class LimitGroup:
    """What a machine's owner lets its peer take."""

    panel: ClassVar[str] = LIMITS

    max_upload: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Send no more than this: 10Mbit, 2MB (a second)."),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Take no more memory than this: 4GB, 512MiB."),
    ] = None
    max_device_share: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Keep the GPU (or the CPU, without one) at work no longer: 50%.",
        ),
    ] = None
    hours: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPAN",
            help="Work at these local hours only: 22:00-07:00. Repeat it for several.",
        ),
    ] = None
    pause_when_busy: Annotated[
        bool | None,
        typer.Option(
            "--pause-when-busy/--no-pause-when-busy",
            help="Pause while the machine is used by others than this peer.",
        ),
    ] = None

    def changes(self, paused: bool | None = None) -> LimitOptions:
        """What of it changes the limits in a state folder."""
        return LimitOptions(
            self.max_upload,
            self.max_memory,
            self.max_device_share,
            tuple(self.hours or ()),
            self.pause_when_busy,
            paused,
        )


@dataclass(frozen=True, slots=True)
class PauseGroup:
    """Whose limits `swarmnet limits` changes."""

    panel: ClassVar[str] = MACHINE

    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The peer's state folder. Default: the only one there."),
    ] = None
    pause: Annotated[
        bool | None,
        typer.Option("--pause/--resume", help="Hand over and stand by; come back."),
    ] = None
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class OutputGroup:
    """What a peer prints, writes and serves."""

    panel: ClassVar[str] = OUTPUT

    dashboard: DashboardOption = None
    dashboard_host: DashboardHostOption = LOOPBACK
    metrics: MetricsOption = None
    plain: PlainOption = False
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print the address to join, and nothing else.")
    ] = False
    shared_log: Annotated[
        bool,
        typer.Option(
            "--shared-log",
            help="Plain lines for a log that all peers of a run write to, as with docker compose: "
            "what is of the whole run is printed by one of them.",
        ),
    ] = False
    ready_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write the address of this peer to FILE (for --join @FILE); in a folder (FOLDER/) "
            "each peer leaves a file of its own (for --join @FOLDER).",
        ),
    ] = None
    health_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="SWARMNET_HEALTH_FILE",
            show_envvar=False,
            help="Write FILE every few seconds; it says whether this peer is well (for health "
            "checks).",
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
            metavar="HOST", help="Address to serve /metrics on; by default this machine only."
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


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """Which run `swarmnet local` makes, of how many peers."""

    panel: ClassVar[str] = RUN

    peers: Annotated[
        int, typer.Option(min=1, max=256, metavar="N", help="Peer processes to start.")
    ] = 4
    spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The run. Default: a small language model."),
    ] = None
    rounds: RoundsOption = None
    seed: SeedOption = None
    chaos: Annotated[
        str,
        typer.Option(
            metavar="RATES",
            help="Harm peers at random while you watch: kill=6/min, or kill=6/min,stop=2/min.",
        ),
    ] = ""
    invite: InviteOption = ""


@dataclass(frozen=True, slots=True)
class LocalMachineGroup:
    """What `swarmnet local` takes of its machine."""

    panel: ClassVar[str] = MACHINE

    threads: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Threads of each peer; 0 = this machine's cores, shared out.",
        ),
    ] = 0


@dataclass(frozen=True, slots=True)
class LocalOutputGroup:
    """What `swarmnet local` prints, writes and serves."""

    panel: ClassVar[str] = OUTPUT

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
    metrics: MetricsOption = None
    plain: PlainOption = False
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class SwarmGroup:
    """What `swarmnet simulate` makes a swarm of."""

    panel: ClassVar[str] = "The swarm"

    peers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Peers that start with the run.")
    ] = 40
    stages: Annotated[int, typer.Option(min=1, metavar="N", help="Pipeline stages.")] = 4
    hours: Annotated[float, typer.Option(min=0.0, metavar="HOURS", help="Virtual hours.")] = 0.1
    churn: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="PART", help="Part of the peers that is replaced in an hour."
        ),
    ] = 0.3
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Churn events, one JSON object a line."),
    ] = None
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="One seed, one history.")] = 0
    links: Annotated[
        str,
        typer.Option(
            metavar="LINKS",
            help="home, fast, or MBIT/MS: as many Mbit/s up and down, and ms between two peers.",
        ),
    ] = "home"
    speed_ratio: Annotated[
        float, typer.Option(min=1.0, metavar="RATIO", help="Fastest machine over slowest.")
    ] = 10.0
    service: Annotated[
        float,
        typer.Option(
            min=0.01, metavar="SECONDS", help="Of a sequence in a stage, at middle speed."
        ),
    ] = 4.0
    sequences: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Of a microbatch; with more there is less to simulate."
        ),
    ] = 1
    microbatches: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of a round, for each replica of a stage.")
    ] = 200
    codec: Annotated[
        Literal["none", "bf16", "int8", "int6", "int4"],
        typer.Option(help="Of what goes from stage to stage: [pipeline] codec of the run."),
    ] = "int8"
    update_codec: Annotated[
        Literal["none", "bf16", "int8", "int4", "topk"] | None,
        typer.Option(help="Of what an update sends: [sync] codec of the run."),
    ] = None
    device: Annotated[
        Literal["cpu", "gpu"],
        typer.Option(help="Of every machine: a core codes beside a CPU, a GPU codes itself."),
    ] = "cpu"
    coding_speed: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="RATIO",
            help="Of coding, over one CPU core; 0 where it takes no time. Default: 1, gpu: 50.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class PolicyGroup:
    """How the simulated swarm goes about it."""

    panel: ClassVar[str] = "Policies"

    sync: Annotated[
        Literal["zero", "delayed", "auto", "local", "gossip"] | None,
        typer.Option(help="When replicas exchange what. Default: delayed; zero in a sweep."),
    ] = None
    local_steps: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Rounds between two exchanges, with --sync local or gossip.",
        ),
    ] = 10


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """What is looked for, and what is printed."""

    panel: ClassVar[str] = OUTPUT

    sweep: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Run so many small swarms with every kind of fault instead.",
        ),
    ] = 0
    replay: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="SEED", help="Run this seed of the sweep and print its events."
        ),
    ] = None
    check_every: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Between looks at all peers; 0 for automatic.",
        ),
    ] = 0.0
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw what happened into PNG.")
    ] = None
    as_json: JsonOption = False
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class TextGroup:
    """What the model is asked to write, and where the run is."""

    panel: ClassVar[str] = "The text"
    prompt: Annotated[
        str | None,
        typer.Argument(help="A text to go on with; with --chat a message to answer."),
    ] = None
    join: Annotated[list[str] | None, typer.Option(metavar="ADDR", help="Any peer of the run.")] = (
        None
    )
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Converse, by the model's chat template: answer the prompt, or else each line "
            "that is typed.",
        ),
    ] = False
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="With --chat: what the model is told first.")
    ] = ""
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A tokenizer.json, where the run has none of its own; its folder's chat template "
            "counts too.",
        ),
    ] = None
    exact: Annotated[
        bool,
        typer.Option(
            "--exact/--no-exact",
            help="Activations go from stage to stage in fp32, so that the text is that of the "
            "exported model; or as the run codes them, in fewer bytes.",
        ),
    ] = True
    serve: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_PORT,
            metavar="PORT",
            help="Answer programs on this machine as the OpenAI API does; 0 = any port.",
        ),
    ] = None
    invite: InviteOption = ""
    transport: TransportOption = "p2pd"
    debug: DebugOption = False


@dataclass(frozen=True, slots=True)
class SamplingGroup:
    """How each token is chosen: transformers' names. None: as the model's files say."""

    panel: ClassVar[str] = "Each token"
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Longest answer. Default: 256.")
    ] = None
    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--do-sample/--no-do-sample",
            help="Draw tokens, or take the likeliest. Default: as the model's files say; drawn "
            "where one of the next four is given.",
            show_default=False,
        ),
    ] = None
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="Below 1 likely tokens are likelier yet.")
    ] = None
    top_k: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Draw from so many; 0 = all.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(metavar="X", help="Draw from the likeliest, together so likely.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Draw the same each time.")
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="Above 1: repeat less.")
    ] = None
