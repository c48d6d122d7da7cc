"""The command line. Options become a dataclass, and errors one line and an exit code; the
work is elsewhere, and imported only when it is needed, so that `--help` is quick."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from peer.console import never_fail, without_controls
from peer.grouped import grouped
from peer.options import (
    LOOPBACK,
    MAX_PORT,
    CheckGroup,
    ComputeGroup,
    DebugOption,
    DeviceOption,
    DtypeOption,
    InviteOption,
    JsonOption,
    LimitGroup,
    LinkGroup,
    LocalGroup,
    LocalMachineGroup,
    LocalOutputGroup,
    MergeOption,
    ModelFolderOption,
    ModelGroup,
    NetworkGroup,
    OutputGroup,
    PauseGroup,
    PolicyGroup,
    RoundOption,
    RoundsOption,
    RunGroup,
    RunIdOption,
    SamplingGroup,
    SeedOption,
    StateDirsOption,
    StateGroup,
    SwarmGroup,
    TextGroup,
    TransportOption,
)
from swarmnet.errors import NotNow, SwarmnetError, UserError
from swarmnet.runtime.options import UsageError
from swarmnet.version import __version__

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
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


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"swarmnet {__version__}")
        raise typer.Exit


@app.callback()
def swarmnet(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version, and end."
        ),
    ] = False,
) -> None:
    """What stands before a command."""


@grouped(
    app,
    "peer",
    (
        RunGroup,
        ModelGroup,
        NetworkGroup,
        LinkGroup,
        ComputeGroup,
        StateGroup,
        LimitGroup,
        OutputGroup,
    ),
)
def peer(
    run: RunGroup,
    model: ModelGroup,
    network: NetworkGroup,
    link: LinkGroup,
    compute: ComputeGroup,
    state: StateGroup,
    limits: LimitGroup,
    output: OutputGroup,
) -> None:
    """Train on this machine: start a run, or join one.

    `swarmnet peer --spec run.toml` starts a run and prints the line that joins it;
    `swarmnet peer --join ADDR` joins. Ctrl-C finishes what is under way and leaves.
    """
    if output.parent_pid is not None:
        from peer.loop import end_with_parent

        end_with_parent(output.parent_pid)

    def work() -> None:
        from peer.commands.peer import serve

        serve(run, model, network, link, compute, state, limits, output)

    _guarded(work, output.debug)


@grouped(app, "local", (LocalGroup, LinkGroup, ComputeGroup, LocalMachineGroup, LocalOutputGroup))
def local(
    run: LocalGroup,
    link: LinkGroup,
    compute: ComputeGroup,
    machine: LocalMachineGroup,
    output: LocalOutputGroup,
) -> None:
    """Run a whole swarm on this machine, one real process a peer.

    Trains until the run's rounds are done, then prints a summary and a sample of text.
    """

    def work() -> None:
        from peer.commands.local import LocalOptions, run_local

        num_ranks = run.peers * (compute.tp or 1)
        options = LocalOptions(
            num_peers=run.peers,
            spec=run.spec,
            rounds=run.rounds,
            seed=run.seed,
            metrics=output.metrics,
            dashboard=output.dashboard,
            dashboard_host=output.dashboard_host,
            transport=link.transport,
            direct=not link.no_direct,
            threads=machine.threads or _threads_each(num_ranks),
            **asdict(compute),
            screen="plain" if output.plain else "auto",
            debug=output.debug,
            chaos=run.chaos,
            invite=run.invite,
            out=output.out,
            dtype=output.dtype,
        )
        _run(run_local(options))

    _guarded(work, output.debug)


@app.command()
def status(
    address: Annotated[str, typer.Argument(metavar="ADDR", help="Any peer of the run.")],
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep looking, until Ctrl-C.")] = False,
    transport: TransportOption = "p2pd",
    debug: DebugOption = False,
) -> None:
    """Take one look at a run: coverage, throughput, round and loss."""

    def work() -> None:
        from peer.commands.status import show_status, watch_status
        from peer.console import make_console

        if watch and as_json:
            raise UsageError("--watch is for people; repeat --json where a program wants to look")
        if watch:
            from peer.loop import Stopped, run

            with suppress(Stopped):  # how it ends
                run(watch_status(address, transport=transport, console=make_console()))
        else:
            _run(show_status(address, as_json=as_json, transport=transport, console=make_console()))

    _guarded(work, debug)


@grouped(app, "generate", (TextGroup, SamplingGroup))
def generate(text: TextGroup, sampling: SamplingGroup) -> None:
    """Let the model of a live run go on with a text, or answer, while it trains.

    The peers of the run see the text.
    """

    def work() -> None:
        from peer.commands.generate import check_options, generate_text

        check_options(text)
        _run(generate_text(text, asdict(sampling)))

    _guarded(work, text.debug)


@grouped(app, "simulate", (SwarmGroup, PolicyGroup, CheckGroup))
def simulate(swarm: SwarmGroup, policy: PolicyGroup, check: CheckGroup) -> None:
    """Simulate a swarm in virtual time, and compare it with the bound of what was alive."""

    def work() -> None:
        from peer.commands.simulate import SimulateOptions, run_simulation

        options = SimulateOptions(
            peers=swarm.peers,
            stages=swarm.stages,
            hours=swarm.hours,
            churn=swarm.churn,
            seed=swarm.seed,
            speed_ratio=swarm.speed_ratio,
            links=swarm.links,
            service_s=swarm.service,
            sequences=swarm.sequences,
            microbatches=swarm.microbatches,
            codec=swarm.codec,
            update_codec=swarm.update_codec or "",
            device=swarm.device,
            coding_speed=swarm.coding_speed,
            trace=swarm.trace,
            sync=policy.sync or "",
            local_steps=policy.local_steps,
            check_every_s=check.check_every,
            sweep=check.sweep,
            replay=check.replay,
            plot=check.plot,
            as_json=check.as_json,
        )
        run_simulation(options)

    _guarded(work, check.debug)


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
        from peer.commands.doctor import DoctorOptions, run_doctor
        from peer.console import make_console

        options = DoctorOptions(tuple(join or ()), spec, port, state_dir, transport, as_json)

        async def check() -> None:
            if await run_doctor(options, make_console()):
                raise typer.Exit(EXIT_FAILED)

        _run(check())

    _guarded(work, debug)


@grouped(app, "limits", (LimitGroup, PauseGroup))
def limits(changes: LimitGroup, which: PauseGroup) -> None:
    """Show or change what a peer on this machine may take, while it runs.

    "none" takes a limit away. The peer follows within a second or two.
    """

    def work() -> None:
        from peer.machine.limits import change_limits, the_state_dir
        from swarmnet.runtime.state_dir import state_root

        folder = the_state_dir(which.state_dir, sorted(state_root().glob("peer-*")))
        now = change_limits(folder, changes.changes(which.pause))
        typer.echo(f"{folder}: {now.describe() or 'no limits'}{'; paused' if now.paused else ''}")

    _guarded(work, which.debug)


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
        from swarmnet.runtime.counted import show_counted

        show_counted(state_dirs, run_id or None, as_json=as_json)

    _guarded(work, debug)


@app.command()
def data(
    spec: Annotated[Path, typer.Argument(metavar="FILE", help="The run.")],
    paths: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH", help="Where this machine has the run's data."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(metavar="FILE", help="Where this machine has the tokenizer.json.")
    ] = "",
    samples: Annotated[int, typer.Option(min=0, help="Of each source, to be shown.")] = 2,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a model sees of a run's data: documents, tokens, first samples, what is masked."""

    def work() -> None:
        from peer.commands.data import DataOptions, show_data
        from peer.console import make_console

        options = DataOptions(spec, tuple(paths or ()), tokenizer, samples, as_json)
        show_data(options, make_console())

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
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say how much memory a replica of each stage needs, or how to cut the layers into stages."""

    def work() -> None:
        from peer.console import make_console

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
                console=make_console(),
            )
            return
        from peer.commands.plan import PlanOptions, show_plan

        show_plan(PlanOptions(spec, replicas, in_flight, precision, as_json), make_console())

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
    state_dir: StateDirsOption = None,
    round_index: RoundOption = None,
    best: Annotated[
        bool, typer.Option("--best", help="The saved round with the lowest held-out loss.")
    ] = False,
    dtype: DtypeOption = "",
    merge: MergeOption = False,
    weights: ModelFolderOption = None,
    run_id: RunIdOption = "",
    invite: InviteOption = "",
    transport: TransportOption = "p2pd",
    debug: DebugOption = False,
) -> None:
    """Write the model as a Hugging Face folder, which transformers loads."""

    def work() -> None:
        if bool(join) == bool(state_dir):
            raise UsageError("give --join ADDR for a live run, or --state-dir DIR for checkpoints")
        if join and run_id:
            raise UsageError("--run-id goes with --state-dir; an address is of one run")
        if best and round_index is not None:
            raise UsageError("give --round or --best, not both")
        from peer.commands.export import Wanted, export_checkpoints, export_live

        base = "" if weights is None else str(weights)
        wanted = Wanted(round_index, run_id, best, dtype, merge, weights, base)
        if state_dir:
            typer.echo(export_checkpoints(state_dir, out, wanted))
            return

        async def export_joined() -> None:
            line = await export_live(
                join or (), out, transport=transport, invite=invite, wanted=wanted
            )
            typer.echo(line)

        _run(export_joined())

    _guarded(work, debug)


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
    if isinstance(error, (UserError, NotNow)):
        return text
    if not isinstance(error, SwarmnetError):
        text = f"{type(error).__name__}: {text}"
    return text if debug else f"{text} (--debug shows where)"


def _complain(line: str) -> None:
    sys.stderr.write(f"swarmnet: {without_controls(line)}\n")
    sys.stderr.flush()


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at the time, which a live screen replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(without_controls(self.format(record)) + "\n")
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


def the_command() -> Any:
    """What the parser makes of `app`. Its help is plain text: brackets in it are no markup."""
    command: Any = typer.main.get_command(app)
    for one in (command, *command.commands.values()):
        one.help = _as_text(one.help)
        for parameter in one.params:
            parameter.help = _as_text(getattr(parameter, "help", None))
    return command


def _as_text(text: str | None) -> str | None:
    if text is None or "[" not in text:
        return text
    from rich.markup import escape  # not before somebody needs it

    return escape(text)


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command line (without the program's name); returns the exit code."""
    never_fail()
    try:
        code = the_command()(list(arguments), prog_name="swarmnet", standalone_mode=False)
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
    from peer.ending import end_process

    end_process(run_command(sys.argv[1:]))
