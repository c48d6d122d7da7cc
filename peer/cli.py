"""The command line. Options become a dataclass, and errors one line and an exit code; the
work is elsewhere, and imported only when it is needed, so that `--help` is quick."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from peer.options import (
    ANY_INTERFACE,
    INVITE_VARIABLE,
    LOOPBACK,
    PeerOptions,
    ScreenName,
    UsageError,
)
from swarmnet.errors import SwarmnetError, UserError

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
MAX_PORT = 65_535
FIRST_DIRECT_PORT = 1024
"""Others dial none below (`swarmnet.transport.direct.FIRST_PORT`)."""
ClickException: Any = typer.BadParameter.__mro__[2]
"""The root of what the parser of options raises."""

app = typer.Typer(
    name="swarmnet",
    help="Train one large model on many machines that come and go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


TransportOption = Annotated[
    Literal["p2pd", "py-libp2p"],
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
    int | None, typer.Option(min=1, help="Length of the run, in place of the spec's.")
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Seed of the run, in place of the spec's.")
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
TpOption = Annotated[
    int | None,
    typer.Option(
        "--tp",
        min=1,
        max=64,
        metavar="N",
        help="Cut every layer over N ranks of this machine. Default: all GPUs it sees, else 1.",
    ),
]
SequenceParallelOption = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel", help="With --tp: split norms and residuals by positions too."
    ),
]
LocalKindOption = Annotated[
    Literal["tensor", "fsdp"],
    typer.Option(
        "--local",
        help="What the ranks of --tp share out: the width of layers, or (fsdp) the samples, with "
        "parameters and gradients sharded.",
    ),
]
DashboardOption = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_PORT, metavar="PORT", help="Show the run as a web page; 0 = any."),
]
DashboardHostOption = Annotated[
    str, typer.Option(help="Address to show the page on; by default for this machine only.")
]
MaxUploadOption = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="Send no more than this: 10Mbit, 2MB (a second)."),
]
MaxMemoryOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Take no more memory than this: 4GB, 512MiB."),
]
MaxDeviceShareOption = Annotated[
    str | None,
    typer.Option(
        metavar="PERCENT", help="Keep the GPU (or the CPU, without one) at work no longer: 50%."
    ),
]
HoursOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPAN", help="Work at these local hours only: 22:00-07:00. Repeat it for several."
    ),
]
PauseWhenBusyOption = Annotated[
    bool | None,
    typer.Option(
        "--pause-when-busy/--no-pause-when-busy",
        help="Pause while the machine is used by others than this peer.",
    ),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="What computes. auto: the GPUs that torch can use, else the CPU."),
]
PrecisionOption = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"],
    typer.Option(
        help="Of this machine's passes; what peers exchange is fp32. auto: as the run says."
    ),
]
ActivationsOption = Annotated[
    Literal["auto", "keep", "blocks", "recompute", "offload"],
    typer.Option(
        help="What this machine keeps between forward and backward. auto: as the run says, else by "
        "free memory."
    ),
]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile the layers (torch.compile): slow to start.")
]
MetricsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write what happens to FILE, one JSON object a line."),
]


@app.command()
def peer(
    spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start a new run from this run.toml."),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Join the run behind this address; repeat it to name several peers. "
            "@FILE: the addresses in a file.",
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Give up when nobody has answered for so long. Default: keep trying.",
        ),
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(min=0, help="Serve this stage. Default: the one that needs you most."),
    ] = None,
    stages: Annotated[
        str,
        typer.Option(
            metavar="K|auto",
            help="Serve so many stages. auto: as many as this machine has room for and the swarm "
            "needs.",
        ),
    ] = "1",
    port: Annotated[
        int, typer.Option(min=0, max=MAX_PORT, help="Listen on this port; 0 = any that is free.")
    ] = 0,
    host: Annotated[
        str, typer.Option(help="Listen on the interface with this address.")
    ] = ANY_INTERFACE,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Tell others this address too (port forwarding, for example).",
        ),
    ] = None,
    transport: TransportOption = "p2pd",
    no_direct: NoDirectOption = False,
    no_relay: Annotated[
        bool,
        typer.Option(
            "--no-relay", help="Carry nothing between other peers that cannot dial each other."
        ),
    ] = False,
    direct_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_PORT,
            help="Listen for direct connections on this port (1024 or above); 0 = any that is "
            "free.",
        ),
    ] = 0,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep this peer's identity and checkpoints here. "
            "Default: ~/.local/state/swarmnet/peer-N.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Where this machine has the run's data; repeat it for several. A peer that joins "
            "reads no files that you have not named.",
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Where this machine has the run's tokenizer.json, where the run has one.",
        ),
    ] = "",
    builder: Annotated[
        str,
        typer.Option(
            metavar="FILE:FUNCTION", help="Where this machine has the code of a custom model."
        ),
    ] = "",
    no_feed: Annotated[
        bool, typer.Option("--no-feed", help="Compute only; start no microbatches.")
    ] = False,
    threads: Annotated[
        int, typer.Option(min=0, help="Threads to compute with; 0 = torch's choice.")
    ] = 0,
    tp: TpOption = None,
    sequence_parallel: SequenceParallelOption = False,
    local_kind: LocalKindOption = "tensor",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    activations: ActivationsOption = "auto",
    compile_layers: CompileOption = False,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Rounds between checkpoints of the stage; 0 = none.")
    ] = 10,
    keep_checkpoints: Annotated[
        int,
        typer.Option(
            min=2, help="Keep the newest so many checkpoints, and up to 3 for slower disks."
        ),
    ] = 2,
    begin_anew: Annotated[
        bool,
        typer.Option(
            "--begin-anew",
            help="Where nobody is at work in the run: begin from initial parameters, not from the "
            "checkpoints that peers have. They stay on the disks.",
        ),
    ] = False,
    invite: InviteOption = "",
    max_upload: MaxUploadOption = None,
    max_memory: MaxMemoryOption = None,
    max_device_share: MaxDeviceShareOption = None,
    hours: HoursOption = None,
    pause_when_busy: PauseWhenBusyOption = None,
    rounds: RoundsOption = None,
    seed: SeedOption = None,
    metrics: MetricsOption = None,
    dashboard: DashboardOption = None,
    dashboard_host: DashboardHostOption = LOOPBACK,
    exit_when_done: Annotated[
        bool,
        typer.Option("--exit-when-done", help="End with the run; else stay and serve the model."),
    ] = False,
    plain: PlainOption = False,
    shared_log: Annotated[
        bool,
        typer.Option(
            "--shared-log",
            help="Plain lines for a log that all peers of a run write to, as with docker compose: "
            "what is of the whole run is printed by one of them.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print the address to join, and nothing else.")
    ] = False,
    debug: DebugOption = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_PORT, help="Serve /metrics for Prometheus on this port."),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address to serve /metrics on; by default this machine only.")
    ] = LOOPBACK,
    health_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="SWARMNET_HEALTH_FILE",
            show_envvar=False,
            help="Write FILE every few seconds while this peer is well (for health checks).",
        ),
    ] = None,
    ready_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write the address of this peer to FILE (for --join @FILE); in a folder (FOLDER/) "
            "each peer leaves a file of its own (for --join @FOLDER).",
        ),
    ] = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train on this machine: start a run, or join one.

    [bold]swarmnet peer --spec run.toml[/bold] starts a run and prints the line that joins it;
    [bold]swarmnet peer --join ADDR[/bold] joins. Ctrl-C finishes what is under way and leaves.
    """
    if parent_pid is not None:
        from peer.loop import end_with_parent

        end_with_parent(parent_pid)

    def work() -> None:
        from peer.machine.limits import LimitOptions
        from peer.ready import ready_target
        from peer.state_dir import claimed_state_dir

        if (spec is None) == (not join):
            raise UsageError("give --spec FILE to start a run, or --join ADDR to join one")
        if join and (rounds is not None or seed is not None):
            raise UsageError("--rounds and --seed go with --spec; who joins takes the run's")
        _check_stages(stages, tp)
        if 0 < direct_port < FIRST_DIRECT_PORT:
            raise UsageError(f"--direct-port: 0, or {FIRST_DIRECT_PORT} and above")
        with claimed_state_dir(state_dir) as path:
            options = PeerOptions(
                state_dir=path,
                spec=spec,
                join=tuple(join or ()),
                patience_s=patience,
                rounds=rounds,
                seed=seed,
                stage=stage,
                stages=stages,
                host=host,
                port=port,
                announce=tuple(announce or ()),
                transport=transport,
                direct=not no_direct,
                relay=not no_relay,
                direct_port=direct_port,
                data=tuple(data or ()),
                tokenizer=tokenizer,
                builder=builder,
                feed=not no_feed,
                threads=threads,
                tp=tp,
                sequence_parallel=sequence_parallel,
                local=local_kind,
                device=device,
                precision=precision,
                activations=activations,
                compile=compile_layers,
                checkpoint_every=checkpoint_every,
                keep_checkpoints=keep_checkpoints,
                begin_anew=begin_anew,
                invite=invite,
                limits=LimitOptions(
                    max_upload, max_memory, max_device_share, tuple(hours or ()), pause_when_busy
                ),
                metrics=metrics,
                dashboard=dashboard,
                dashboard_host=dashboard_host,
                exit_when_done=exit_when_done,
                metrics_port=metrics_port,
                metrics_host=metrics_host,
                health_file=health_file,
                ready_file=None if ready_file is None else ready_target(ready_file),
                screen=_screen(plain, shared_log, quiet),
            )
            _serve(options, parent_pid)

    _guarded(work, debug)


@app.command()
def local(
    peers: Annotated[int, typer.Option(min=1, max=256, help="Peer processes to start.")] = 4,
    spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The run. Default: a small language model."),
    ] = None,
    rounds: RoundsOption = None,
    seed: SeedOption = None,
    metrics: MetricsOption = None,
    dashboard: DashboardOption = None,
    dashboard_host: DashboardHostOption = LOOPBACK,
    transport: TransportOption = "p2pd",
    no_direct: NoDirectOption = False,
    threads: Annotated[
        int, typer.Option(min=0, help="Threads of each peer; 0 = this machine's cores, shared out.")
    ] = 0,
    tp: TpOption = None,
    sequence_parallel: SequenceParallelOption = False,
    local_kind: LocalKindOption = "tensor",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    activations: ActivationsOption = "auto",
    compile_layers: CompileOption = False,
    chaos: Annotated[
        str,
        typer.Option(
            metavar="RATES",
            help="Harm peers at random while you watch: kill=6/min, or kill=6/min,stop=2/min.",
        ),
    ] = "",
    invite: InviteOption = "",
    plain: PlainOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a whole swarm on this machine, one real process a peer.

    Trains until the run's rounds are done, then prints a summary and a sample of text.
    """

    def work() -> None:
        from peer.commands.local import LocalOptions, run_local

        options = LocalOptions(
            num_peers=peers,
            spec=spec,
            rounds=rounds,
            seed=seed,
            metrics=metrics,
            dashboard=dashboard,
            dashboard_host=dashboard_host,
            transport=transport,
            direct=not no_direct,
            threads=threads or _threads_each(peers * (tp or 1)),
            tp=tp,
            sequence_parallel=sequence_parallel,
            local=local_kind,
            device=device,
            precision=precision,
            activations=activations,
            compile=compile_layers,
            screen="plain" if plain else "auto",
            debug=debug,
            chaos=chaos,
            invite=invite,
        )
        _run(run_local(options))

    _guarded(work, debug)


@app.command()
def status(
    address: Annotated[str, typer.Argument(metavar="ADDR", help="Any peer of the run.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for programs.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep looking, until Ctrl-C.")] = False,
    transport: TransportOption = "p2pd",
    debug: DebugOption = False,
) -> None:
    """Take one look at a run: coverage, throughput, round and loss."""

    def work() -> None:
        from rich.console import Console

        from peer.commands.status import show_status, watch_status

        if watch and as_json:
            raise UsageError("--watch is for people; repeat --json where a program wants to look")
        if watch:
            from peer.loop import Stopped, run

            with suppress(Stopped):  # how it ends
                run(watch_status(address, transport=transport, console=Console()))
        else:
            _run(show_status(address, as_json=as_json, transport=transport, console=Console()))

    _guarded(work, debug)


@app.command()
def simulate(
    peers: Annotated[int, typer.Option(min=1, help="Peers that start with the run.")] = 40,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 4,
    hours: Annotated[float, typer.Option(min=0.0, help="Virtual hours.")] = 0.1,
    churn: Annotated[
        float, typer.Option(min=0.0, help="Part of the peers that is replaced in an hour.")
    ] = 0.3,
    seed: Annotated[int, typer.Option(min=0, help="One seed, one history.")] = 0,
    speed_ratio: Annotated[
        float, typer.Option(min=1.0, help="Fastest machine over slowest.")
    ] = 10.0,
    links: Annotated[
        Literal["home", "fast"], typer.Option(help="What the peers are connected by.")
    ] = "home",
    service: Annotated[
        float,
        typer.Option(min=0.01, help="Seconds of a sequence in a stage, at middle speed."),
    ] = 4.0,
    sequences: Annotated[
        int, typer.Option(min=1, help="Of a microbatch; with more there is less to simulate.")
    ] = 1,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Of a round, for each replica of a stage.")
    ] = 200,
    sync: Annotated[
        Literal["zero", "delayed", "auto", "local", "gossip"] | None,
        typer.Option(help="When replicas exchange what. Default: delayed; zero in a sweep."),
    ] = None,
    local_steps: Annotated[
        int, typer.Option(min=1, help="Rounds between two exchanges, with --sync local or gossip.")
    ] = 10,
    assignment: Annotated[
        Literal["adaptive", "static", "swarm"],
        typer.Option(help="How stages are shared out: this swarm's way, or one to compare."),
    ] = "adaptive",
    rebalance_every: Annotated[
        float, typer.Option(min=1.0, help="Seconds; of the assignment swarm.")
    ] = 300.0,
    check_every: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds between looks at all peers; 0 for automatic."),
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Churn events, one JSON object a line."),
    ] = None,
    sweep: Annotated[
        int, typer.Option(min=0, help="Run so many small swarms with every kind of fault instead.")
    ] = 0,
    replay: Annotated[
        int | None, typer.Option(min=0, help="Run this seed of the sweep and print its events.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw what happened into PNG.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for programs.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Simulate a swarm in virtual time, and compare it with the bound of what was alive."""

    def work() -> None:
        from peer.commands.simulate import SimulateOptions, run_simulation

        run_simulation(
            SimulateOptions(
                peers=peers,
                stages=stages,
                hours=hours,
                churn=churn,
                seed=seed,
                speed_ratio=speed_ratio,
                home_links=links == "home",
                service_s=service,
                sequences=sequences,
                microbatches=microbatches,
                sync=sync or "",
                local_steps=local_steps,
                assignment=assignment,
                rebalance_every_s=rebalance_every,
                check_every_s=check_every,
                trace=trace,
                sweep=sweep,
                replay=replay,
                plot=plot,
                as_json=as_json,
            )
        )

    _guarded(work, debug)


@app.command()
def doctor(
    join: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDR", help="A peer of the run: checks the way there and back."),
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check against what this run.toml needs.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=MAX_PORT, help="The port that peers will listen on.")
    ] = 0,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the peer will keep its state.")
    ] = None,
    transport: TransportOption = "p2pd",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON list, for programs.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Check this machine and its network, and say how to mend what is wrong."""

    def work() -> None:
        from rich.console import Console

        from peer.commands.doctor import DoctorOptions, run_doctor

        options = DoctorOptions(tuple(join or ()), spec, port, state_dir, transport, as_json)

        async def check() -> None:
            if await run_doctor(options, Console()):
                raise typer.Exit(EXIT_FAILED)

        _run(check())

    _guarded(work, debug)


@app.command()
def limits(
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The peer's state folder. Default: the only one there."),
    ] = None,
    max_upload: MaxUploadOption = None,
    max_memory: MaxMemoryOption = None,
    max_device_share: MaxDeviceShareOption = None,
    hours: HoursOption = None,
    pause_when_busy: PauseWhenBusyOption = None,
    pause: Annotated[
        bool | None,
        typer.Option("--pause/--resume", help="Hand over and stand by; come back."),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Show or change what a peer on this machine may take, while it runs.

    "none" takes a limit away. The peer follows within a second or two.
    """

    def work() -> None:
        from peer.machine.limits import LimitOptions, change_limits, the_state_dir
        from peer.state_dir import state_root

        folder = the_state_dir(state_dir, sorted(state_root().glob("peer-*")))
        options = LimitOptions(
            max_upload, max_memory, max_device_share, tuple(hours or ()), pause_when_busy, pause
        )
        now = change_limits(folder, options)
        typer.echo(f"{folder}: {now.describe() or 'no limits'}{'; paused' if now.paused else ''}")

    _guarded(work, debug)


@app.command()
def invite(
    key: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The owner's secret key; made where there is none."),
    ],
    spec: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Invite to the run of this run.toml.")
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDR", help="Invite to the live run behind this address."),
    ] = None,
    valid: Annotated[
        str, typer.Option(metavar="TIME", help="For how long: 90m, 12h, 30d, 4w.")
    ] = "30d",
    peer_id: Annotated[
        str,
        typer.Option(
            "--peer", metavar="PEER_ID", help="For this peer only. Default: whoever holds it."
        ),
    ] = "",
    rounds: RoundsOption = None,
    seed: SeedOption = None,
    transport: TransportOption = "p2pd",
    debug: DebugOption = False,
) -> None:
    """Let somebody into a closed run: print an invite.

    Without --spec and --join: make the owner's key, and print the lines that close a new run.
    """

    def work() -> None:
        from peer.commands.invites import InviteOptions, issue_invite

        if spec is not None and join:
            raise UsageError("give --spec FILE or --join ADDR, not both")
        if spec is None and (rounds is not None or seed is not None):
            raise UsageError("--rounds and --seed go with --spec")

        async def issue() -> None:
            options = InviteOptions(
                key, spec, tuple(join or ()), rounds, seed, valid, peer_id, transport
            )
            typer.echo(await issue_invite(options))

        _run(issue())

    _guarded(work, debug)


@app.command()
def counted(
    state_dirs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="State folders of the run's feeders.")
    ],
    run_id: Annotated[
        str, typer.Option("--run-id", help="Of the run, where the folders have seen several.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object a round, with the microbatches' ids.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Say which microbatches each round counted: a plain loop over them makes the same updates."""

    def work() -> None:
        from peer.counted import show_counted

        show_counted(state_dirs, run_id or None, as_json=as_json)

    _guarded(work, debug)


@app.command()
def plan(
    spec: Annotated[Path, typer.Option(metavar="FILE", help="The run.")],
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of each stage.")] = 1,
    in_flight: Annotated[
        int, typer.Option(min=0, help="Microbatches between forward and backward at a replica.")
    ] = 4,
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "mixed"],
        typer.Option(
            help="Of the passes; auto: as the run says. mixed: the ZeRO paper's 16 bytes."
        ),
    ] = "auto",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Time the layers on this machine, and print how to cut them."
        ),
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="With --measure: put the cut into the run's file.")
    ] = False,
    device: DeviceOption = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for programs.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Say how much memory a replica of each stage needs, or how to cut the layers into stages."""

    def work() -> None:
        from rich.console import Console

        if write and not measure:
            raise UsageError("--write goes with --measure")
        if measure and precision == "mixed":
            raise UsageError("--measure takes --precision fp32, bf16 or fp16")
        if measure:
            from peer.machine.measured_layers import show_measured

            show_measured(
                spec,
                precision=precision,
                device=device,
                write=write,
                as_json=as_json,
                console=Console(),
            )
            return
        from peer.commands.plan import PlanOptions, show_plan

        show_plan(PlanOptions(spec, replicas, in_flight, precision, as_json), Console())

    _guarded(work, debug)


@app.command()
def dashboard(
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Show the live run behind this address; repeat it to name several peers. "
            "@FILE: the addresses in a file.",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show a run again, from what --metrics has written."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=MAX_PORT, help="Port of the page; 0 = any that is free.")
    ] = 8080,
    host: Annotated[
        str, typer.Option(help="Address to show it on; by default for this machine only.")
    ] = LOOPBACK,
    transport: TransportOption = "p2pd",
    debug: DebugOption = False,
) -> None:
    """Show a run as a web page: live, or replayed from a metrics file."""

    def work() -> None:
        if bool(join) == (replay is not None):
            raise UsageError("give --join ADDR for a live run, or --replay FILE for a past one")
        from peer.commands.dashboard import show_live, show_replay
        from peer.loop import Stopped, run

        def say(line: str) -> None:
            typer.echo(line)
            sys.stdout.flush()

        try:
            if replay is not None:
                run(show_replay(replay, host=host, port=port, say=say))
            else:
                showing = show_live(join or (), host=host, port=port, transport=transport, say=say)
                run(showing)
        except Stopped:
            pass  # how a page ends

    _guarded(work, debug)


@app.command()
def export(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    join: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDR", help="Take the model from the live run behind this address."),
    ] = None,
    state_dir: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Take it from the checkpoints in these peers' state folders; repeat it until "
            "every stage is there.",
        ),
    ] = None,
    round_index: Annotated[
        int | None,
        typer.Option("--round", min=0, help="Of the checkpoints, this round. Default: the newest."),
    ] = None,
    run_id: Annotated[
        str,
        typer.Option(
            "--run-id", help="Of the run (its beginning will do), where the folders hold several."
        ),
    ] = "",
    invite: InviteOption = "",
    transport: TransportOption = "p2pd",
    debug: DebugOption = False,
) -> None:
    """Write the model as a Hugging Face folder: safetensors and config.json."""

    def work() -> None:
        if bool(join) == bool(state_dir):
            raise UsageError("give --join ADDR for a live run, or --state-dir DIR for checkpoints")
        if join and (round_index is not None or run_id):
            raise UsageError("--round and --run-id go with --state-dir; a live run has one round")
        from peer.commands.export import Wanted, export_checkpoints, export_live

        if state_dir:
            typer.echo(export_checkpoints(state_dir, out, Wanted(round_index, run_id)))
            return

        async def export_joined() -> None:
            typer.echo(await export_live(join or (), out, transport=transport, invite=invite))

        _run(export_joined())

    _guarded(work, debug)


def _serve(options: PeerOptions, parent_pid: int | None) -> None:
    """A peer's life."""
    from peer.loop import Stopped, run
    from peer.observe.metrics import open_metrics
    from peer.observe.report import Running, report_peer

    page = None
    if options.dashboard is not None:
        from peer.observe.dashboard.server import listen

        page = (options.dashboard_host, listen(options.dashboard_host, options.dashboard))
    with open_metrics(options.metrics, append=True) as metrics:

        def show(running: Running) -> Coroutine[Any, Any, None]:
            return report_peer(
                running, options.screen, metrics, page, stays=not options.exit_when_done
            )

        from peer.daemon import run_peer

        try:
            run(run_peer(options, show), parent_pid)
        except Stopped:
            pass  # how a peer ends


def _check_stages(stages: str, tp: int | None) -> None:
    if stages != "auto" and not (stages.isascii() and stages.isdigit() and 1 <= int(stages) <= 64):
        raise UsageError(f"--stages {stages}: a number from 1 to 64, or auto")
    if stages != "1" and tp is not None and tp > 1:
        raise UsageError("--stages goes with one rank: the ranks of --tp serve one stage")


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a command that is not done when it is stopped."""
    from peer.loop import Stopped, run

    try:
        run(main)
    except Stopped:
        raise typer.Exit(EXIT_FAILED) from None


def _threads_each(num_peers: int) -> int:
    import os

    return max(1, (os.cpu_count() or 1) // num_peers)


def _guarded(work: Callable[[], None], debug: bool) -> None:
    """Runs a command's work; what goes wrong is one line on stderr and an exit code."""
    _log_to_stderr(debug)
    try:
        work()
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_FAILED) from None
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        _complain(_describe(error, debug))
        raise typer.Exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED) from None


def _describe(error: Exception, debug: bool) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UserError):
        return text
    if not isinstance(error, SwarmnetError):
        text = f"{type(error).__name__}: {text}"
    return text if debug else f"{text} (--debug shows where)"


def _screen(plain: bool, shared: bool, quiet: bool) -> ScreenName:
    """The one that says least of those asked for."""
    return "quiet" if quiet else "shared" if shared else "plain" if plain else "auto"


def _complain(line: str) -> None:
    sys.stderr.write(f"swarmnet: {line}\n")
    sys.stderr.flush()


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at the time, which a live screen replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _log_to_stderr(debug: bool) -> None:
    handler = _Stderr()
    shape = "%(asctime)s %(name)s: %(message)s" if debug else "swarmnet: %(message)s"
    handler.setFormatter(logging.Formatter(shape))
    logger = logging.getLogger("swarmnet")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command line (without the program's name); returns the exit code."""
    try:
        code = app(list(arguments), prog_name="swarmnet", standalone_mode=False)
    except ClickException as error:
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            return EXIT_USAGE
        where = context.command_path if context is not None else "swarmnet"
        text = " ".join(error.format_message().split()).rstrip(".")
        _complain(f"{text}; see `{where} --help`")
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_DONE


def main() -> None:
    """The entry point of `swarmnet`."""
    sys.exit(run_command(sys.argv[1:]))
