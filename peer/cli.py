"""The command line. Errors become one line and an exit code. Options are in `peer.options`; the
work is elsewhere, and imported only when it is needed, so that `--help` is quick."""

from __future__ import annotations

import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from peer.console import complain, never_fail, say, show_traceback
from peer.log import log_the_rest, log_to_stderr
from peer.option_groups import command
from peer.options import (
    CompletionOptions,
    CountedOptions,
    DashboardOptions,
    DataOptions,
    DiskOptions,
    DoctorOptions,
    ExampleOptions,
    ExportLinkOptions,
    ExportSourceOptions,
    InviteOptions,
    LimitOptions,
    LocalOptions,
    ManOptions,
    OutputOptions,
    PauseOptions,
    PlanOptions,
    SamplingOptions,
    SimulateOptions,
    StatusOptions,
    StopOptions,
    TextOptions,
)
from peer.shell.completion import answer, is_asked
from swarmnet.errors import FinalError, NotNow, SwarmnetError, UsageError, UserError
from swarmnet.runtime.options import ExportModelOptions, PeerChoices
from swarmnet.system import WINDOWS, end_with_parent
from swarmnet.version import __version__

T = TypeVar("T")

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_IMPOSSIBLE = 0, 1, 2, 3
EXIT_CODES = {
    EXIT_DONE: "The command has done what it was asked for. For `peer`, `dashboard`, `status "
    "--watch`, and `local` with a run without an end, that includes being stopped by Ctrl-C or "
    "SIGTERM.",
    EXIT_FAILED: "Something went wrong that may not happen another time, or the command was "
    "stopped before it was done. `doctor` ends so where it found something that has to be mended. "
    "Services may start the same command again.",
    EXIT_USAGE: "The same command fails again until a person has changed something: wrong options, "
    "a wrong run.toml, a missing invite, a taken port. Services should not start it again.",
    EXIT_IMPOSSIBLE: "The answer of `plan` is that these machines cannot train the run; it says "
    "what would make it possible.",
}
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
        say(f"swarmnet {__version__}")
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


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a command that is not done when it is stopped."""
    from peer.loop import Stopped, run

    try:
        return run(main)
    except Stopped:
        raise typer.Exit(EXIT_FAILED) from None


def _run_until_stopped(main: Coroutine[Any, Any, None]) -> None:
    """Runs a command that ends by being stopped."""
    from peer.loop import Stopped, run

    with suppress(Stopped):
        run(main)


@contextmanager
def _errors_told(debug: bool) -> Iterator[None]:
    """A command's work: what goes wrong is one line on stderr and an exit code."""
    log_to_stderr(debug)
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_FAILED) from None
    except Exception as error:
        if debug:
            show_traceback(error)
        complain(_describe(error, debug))
        raise typer.Exit(EXIT_USAGE if isinstance(error, FinalError) else EXIT_FAILED) from None


def _describe(error: Exception, debug: bool) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (UserError, NotNow)):
        return text
    if not isinstance(error, SwarmnetError):
        text = f"{type(error).__name__}: {text}"
    return text if debug else f"{text} (--debug shows where)"


@command(app, _errors_told)
def peer(choices: PeerChoices, limits: LimitOptions, output: OutputOptions) -> None:
    """Train on this machine: start a run, or join one.

    `swarmnet peer --spec run.toml` starts a run and prints the line that joins it;
    `swarmnet peer --join ADDR` joins. Ctrl-C finishes what is under way and leaves.
    """
    if output.parent_pid is not None:
        end_with_parent(output.parent_pid, signal.SIGTERM)
    from peer.commands.peer import serve

    serve(choices, limits, output)


@command(app, _errors_told)
def local(options: LocalOptions) -> None:
    """Run a whole swarm on this machine, one real process a peer.

    Trains until the run's rounds are done, then prints a summary and a sample of text.
    """
    from peer.commands.local import run_local

    _run(run_local(options))


@command(app, _errors_told)
def status(options: StatusOptions) -> None:
    """Take one look at a run: coverage, throughput, round and loss."""
    from peer.commands.status import show_status, watch_status
    from peer.console import make_console

    if not options.watch:
        _run(show_status(options, make_console()))
    elif options.as_json:
        raise UsageError("--watch is for people; repeat --json where a program wants to look")
    else:
        _run_until_stopped(watch_status(options, make_console()))


@command(app, _errors_told)
def generate(text: TextOptions, sampling: SamplingOptions) -> None:
    """Let the model of a live run go on with a text, or answer, while it trains.

    The peers of the run see the text.
    """
    from peer.commands.generate import check_options, generate_text

    check_options(text)
    work = generate_text(text, asdict(sampling))
    if text.serve is None:
        _run(work)
    else:
        _run_until_stopped(work)


@command(app, _errors_told)
def example(options: ExampleOptions) -> None:
    """Write an example of the documentation into the folder examples, to be tried and changed."""
    from peer.commands.example import EXAMPLES, write_example

    if options.name is None:
        say("\n".join(EXAMPLES))
    else:
        say(write_example(options.name, Path()))


@command(app, _errors_told)
def completion(options: CompletionOptions) -> None:
    """Print what makes a shell complete commands and options.

    bash: eval "$(swarmnet completion bash)" in ~/.bashrc. zsh: the same with zsh in ~/.zshrc, after
    compinit. fish: write it to ~/.config/fish/completions/swarmnet.fish.
    """
    from peer.shell.completion import script

    say(script(options.shell))


@command(app, _errors_told)
def man(options: ManOptions) -> None:
    """Print a page for man, with all commands and options.

    An installation brings it, for man swarmnet; swarmnet man | man -l - shows it everywhere.
    """
    from peer.shell.described import described
    from peer.shell.man import page

    say(page(app.info.help or "", described(app), EXIT_CODES, __version__))


@command(app, _errors_told)
def simulate(options: SimulateOptions) -> None:
    """Simulate a swarm in virtual time, and compare it with the bound of what was alive."""
    from peer.commands.simulate import run_simulation

    run_simulation(options)


@command(app, _errors_told)
def doctor(options: DoctorOptions) -> None:
    """Check this machine and its network, and say how to mend what is wrong."""
    from peer.commands.doctor import run_doctor
    from peer.console import make_console

    if _run(run_doctor(options, make_console())):
        raise typer.Exit(EXIT_FAILED)


@command(app, _errors_told)
def limits(changes: LimitOptions, which: PauseOptions) -> None:
    """Show or change what a peer on this machine may take, while it runs.

    "none" takes a limit away. The peer follows within a second or two.
    """
    from peer.machine.bill import used_line
    from peer.machine.bill_file import BILL_FILE, date_now, read_bill
    from peer.machine.limits import change_limits, the_state_dir
    from swarmnet.runtime.state_dir import state_root

    folder = the_state_dir(which.state_dir, sorted(state_root().glob("peer-*")))
    now = change_limits(folder, changes, which.pause)
    used = used_line(now, read_bill(folder / BILL_FILE), date_now())
    parts = (now.describe() or "no limits", used, "paused" * now.paused)
    say(f"{folder}: {'; '.join(filter(None, parts))}")


@command(app, _errors_told)
def invite(options: InviteOptions) -> None:
    """Let somebody into a closed run: print an invite.

    Without --spec and --join: make the owner's key, and print the lines that close a new run.
    """
    from peer.commands.invites import issue_invite

    if options.spec is not None and options.join:
        raise UsageError("give --spec FILE or --join ADDR, not both")
    if options.spec is None and (options.rounds is not None or options.seed is not None):
        raise UsageError("--rounds and --seed go with --spec")
    say(_run(issue_invite(options)))


@command(app, _errors_told)
def stop(options: StopOptions) -> None:
    """End a closed run for everybody, as its owner: after a round that all peers save."""
    from peer.commands.stop import stop_run

    _run(stop_run(options))


@command(app, _errors_told)
def state(options: DiskOptions) -> None:
    """Show what runs have left on this machine's disk, and remove it.

    What a peer at work needs is never removed, nor a peer's key.
    """
    from peer.console import make_console
    from peer.disk.state import show_state

    show_state(options, make_console())


@command(app, _errors_told)
def counted(options: CountedOptions) -> None:
    """Say which microbatches each round counted: a plain loop over them makes the same updates.

    Or which machine computed how much of them.
    """
    from swarmnet.runtime.counted import show_counted

    show_counted(
        options.state_dirs,
        options.run_id or None,
        by_machine=options.by_machine,
        as_json=options.as_json,
        say=say,
    )


@command(app, _errors_told)
def data(options: DataOptions) -> None:
    """Show what a model sees of a run's data: documents, tokens, first samples, what is masked."""
    from peer.commands.data import show_data
    from peer.console import make_console

    show_data(options, make_console())


@command(app, _errors_told)
def plan(options: PlanOptions) -> None:
    """Say whether machines can train a run, how fast, by which links, and what would help."""
    from peer.console import make_console

    if options.measure and options.explain:
        raise UsageError("give --measure or --explain, not both")
    others = options.machines, options.choose, options.schedules, options.picture
    if options.measure and any(others):
        raise UsageError(
            "--measure times this machine, whatever machines there are; leave --machines, "
            "--choose, --schedules and --picture out"
        )
    if options.explain and any(others[2:]):
        raise UsageError("--explain has formulas of memory; leave --schedules and --picture out")
    if options.join:
        has_ranks = max(options.cp, options.ep, options.tp) > 1
        if any((*others, has_ranks, options.measure, options.explain)):
            raise UsageError(
                "--join asks the live run; leave --machines, --choose, --measure, --explain, "
                "--cp, --ep, --tp, --schedules and --picture out"
            )
        from peer.planning.live import show_live

        _run(show_live(options, make_console()))
        return
    if options.explain:
        if (options.machines or options.choose) and max(options.cp, options.ep, options.tp) > 1:
            raise UsageError(
                "a plan chooses ranks; leave --cp, --ep and --tp out, or --machines and --choose"
            )
        if options.write:
            raise UsageError("--explain writes nothing; leave --write out")
        if min(options.cp, options.ep) > 1:
            raise UsageError("--cp does not go with --ep; leave one of them out")
        if not options.machines and not options.choose:
            from peer.planning.memory_tables import show_tables

            show_tables(options, make_console())
            return
    for name, number in (("--cp", options.cp), ("--ep", options.ep), ("--tp", options.tp)):
        if number > 1:
            raise UsageError(f"{name} goes with --explain; add it, or leave {name} out")
    if options.precision == "mixed":
        raise UsageError("--precision mixed goes with --explain alone; take fp32, bf16 or fp16")
    if options.measure:
        from peer.machine.measured_layers import show_measured

        show_measured(options, make_console())
        return
    from peer.commands.plan import show_plan

    if not show_plan(options, make_console()):
        raise typer.Exit(EXIT_IMPOSSIBLE)


@command(app, _errors_told)
def dashboard(options: DashboardOptions) -> None:
    """Show a run as a web page: live, or replayed from a metrics file."""
    if bool(options.join) == (options.replay is not None):
        raise UsageError("give --join ADDR for a live run, or --replay FILE for a past one")
    from peer.commands.dashboard import show_live, show_replay

    if options.replay is not None:
        _run_until_stopped(
            show_replay(options.replay, options.host, options.port, options.allowed_host)
        )
    else:
        _run_until_stopped(show_live(options))


@command(app, _errors_told)
def export(source: ExportSourceOptions, model: ExportModelOptions, link: ExportLinkOptions) -> None:
    """Write the model as a Hugging Face folder, which transformers loads."""
    if bool(source.join) == bool(source.state_dir):
        raise UsageError("give --join ADDR for a live run, or --state-dir DIR for checkpoints")
    if source.join and model.run_id:
        raise UsageError("--run-id goes with --state-dir; an address is of one run")
    if model.best and model.round is not None:
        raise UsageError("give --round or --best, not both")
    from swarmnet.runtime.exporting.models import Wanted, export_checkpoints, export_live

    base = "" if model.weights is None else str(model.weights)
    wanted = Wanted(**asdict(model), base=base)
    if source.state_dir:
        say(export_checkpoints(source.state_dir, source.out, wanted))
        return
    live = export_live(
        source.join, source.out, transport=link.transport, invite=link.invite, wanted=wanted
    )
    say(_run(live))


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


def _complete(command: Any, arguments: Sequence[str]) -> list[str]:
    """With the options of a peer's file. Raises `UsageError`."""
    name, *rest = arguments or [""]
    if name != "peer" or "--help" in rest:
        return list(arguments)
    from peer.config import with_config

    return [name, *with_config(command.commands[name], rest)]


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command line (without the program's name); returns the exit code."""
    never_fail()
    if sys.platform == "win32":
        complain(WINDOWS)
        return EXIT_USAGE
    if is_asked():
        answer(typer.main.get_command(app))
    command = the_command()
    try:
        code = command(_complete(command, arguments), prog_name="swarmnet", standalone_mode=False)
    except FinalError as error:
        complain(str(error))
        return EXIT_USAGE
    except ClickException as error:
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            return EXIT_USAGE
        where = context.command_path if context is not None else "swarmnet"
        text = " ".join(error.format_message().split()).rstrip(".")
        complain(f"{text}; see `{where} --help`")
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_DONE


def main() -> None:
    """The entry point of `swarmnet`."""
    from peer.ending import end_process

    log_the_rest()
    end_process(run_command(sys.argv[1:]))
