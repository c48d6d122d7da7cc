"""`swarmnet local`: what its person sees of a swarm on this machine, and what harms it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.table import Table
from rich.text import Text

from peer.commands.chaos import Chaos, parse_chaos
from peer.observe.dashboard.hub import Offers
from peer.observe.dashboard.server import listen
from peer.observe.metrics import open_metrics
from peer.observe.report import Reporter, open_page
from peer.observe.screen import peers_table
from peer.options import LocalOptions
from swarmnet.causes import Failures
from swarmnet.errors import SwarmnetError, UserError
from swarmnet.observe.charts import Charts
from swarmnet.observe.notify import check_url, open_notifier
from swarmnet.observe.text import number, size
from swarmnet.observe.view_model import Summary
from swarmnet.plurals import counted
from swarmnet.printable import printable
from swarmnet.runtime.local.processes import (
    PEER_COMMAND,
    STOP_STEPS,
    keep_folder,
    kept_folder,
    run_folder,
)
from swarmnet.runtime.local.swarm import (
    SAVE_WAIT_S,
    SAVING_STEPS,
    LocalSwarm,
    begin_local,
    local_processes,
)
from swarmnet.runtime.local.watching import watch_run
from swarmnet.runtime.observing import JoinRun, RunObserver, join_run
from swarmnet.spec import PYTHON_STDLIB, describe

SAMPLE_TOKENS = 200
SAMPLE_S, SAMPLE_WAIT_S = 20.0, 60.0
"""After the first, what has been written is shown; after the second, nothing."""


async def run_local(
    options: LocalOptions,
    *,
    command: Sequence[str] = PEER_COMMAND,
    join: JoinRun = join_run,
) -> None:
    """Runs a swarm until it has done its rounds; prints a summary and a sample of text. One that
    has no end is done when it is stopped.

    `command` and `join` are there for tests.

    Raises:
        UserError: spec, options or metrics file are wrong, or the first peer found them so.
        SwarmnetError: every peer ended before the run did, or the model was to be kept and is not.
    """
    started, choices = await begin_local(options)
    spec = started.spec
    if options.notify:
        check_url(options.notify)
    if options.out is not None:
        from swarmnet.runtime.exporting.model_folder import check_out

        check_out(options.out)
    rates = parse_chaos(options.chaos) if options.chaos else {}
    async with AsyncExitStack() as stack:
        hub = None
        if options.dashboard is not None:
            listener = listen(options.dashboard_host, options.dashboard)
            hub, shown_at = await open_page(
                stack,
                spec,
                options.dashboard_host,
                listener,
                options.allowed_host,
                Offers(options.metrics),
            )
        kept = options.state_dir
        metrics = stack.enter_context(open_metrics(options.metrics, append=kept is not None))
        charts = Charts(options.log_to, spec) if options.log_to else None
        notifier = await open_notifier(stack, options.notify, spec)
        reporter = stack.enter_context(
            Reporter(spec, options.screen, metrics, hub, notifier, charts)
        )
        folder = stack.enter_context(
            run_folder() if kept is None else kept_folder(kept.absolute(), spec.run_id)
        )
        if hub is not None:
            reporter.screen.say(f"dashboard: {shown_at}")
        is_saving = options.out is not None or kept is not None
        steps = SAVING_STEPS if is_saving else STOP_STEPS
        processes = local_processes(folder, choices, command, steps)
        debug = ("--debug",) if options.debug else ()
        swarm = LocalSwarm(started, choices, processes, debug)
        missing = ""
        try:
            reporter.screen.say(describe(spec))
            observer = await swarm.start(reporter.screen.say, join)
            await _run(swarm, observer, reporter, rates)
        finally:
            if is_saving and processes.num_alive:
                reporter.screen.say(
                    f"waiting until the peers have saved the model, {SAVE_WAIT_S:.0f} s at most; "
                    "Ctrl-C ends them at once"
                )
            await processes.stop()
            if kept is not None:
                line, is_saved = await asyncio.to_thread(_what_is_kept, kept, swarm)
                reporter.screen.say(line)
                missing = "" if is_saved else "nothing of the run is saved"
            if options.out is not None:
                line, is_written = await asyncio.to_thread(_export, options, options.out, swarm)
                reporter.screen.say(line)
                missing = missing if is_written else "the model was not written"
        if missing:
            raise SwarmnetError(missing)


def _what_is_kept(kept: Path, swarm: LocalSwarm) -> tuple[str, bool]:
    """Of a run whose folder stays, in a line: the same command may begin anew. Whether anything
    is saved."""
    from swarmnet.runtime.exporting.models import newest_whole

    newest = newest_whole(swarm.state_dirs, swarm.spec.run_id)
    words = f"the run is in {kept}"
    if newest is None:
        words += ", but no round of all stages is saved: the same command begins anew"
    else:
        words += f", saved after round {newest}; the same command goes on with it"
    errors = [(child.name, child.own_error()) for child in swarm.processes.children]
    if lost := [f"{name}: {error}" for name, error in errors if error]:
        words += f" ({lost[0]})"
    return words, newest is not None


def _export(options: LocalOptions, out: Path, swarm: LocalSwarm) -> tuple[str, bool]:
    """Writes the model that the peers have saved when they ended; how that went, in a line, and
    whether it was written."""
    from swarmnet.runtime.exporting.models import Wanted, export_checkpoints

    folder = swarm.processes.folder
    wanted = Wanted(dtype=options.dtype, base=swarm.started.model)
    try:
        return export_checkpoints(swarm.state_dirs, out, wanted), True
    except UserError as error:
        line = f"the model was not written: {error}"
        if options.state_dir is None and any(folder.glob("*/checkpoints")):
            line += f"; what the peers saved is in {keep_folder(folder)}"
        return line, False


async def _run(
    swarm: LocalSwarm, observer: RunObserver, reporter: Reporter, rates: dict[str, float]
) -> None:
    """Watches, and closes the observer."""
    screen = reporter.screen
    try:
        chaos = Chaos(
            rates,
            swarm.processes,
            observer.view,
            lambda: swarm.start_newcomer(observer),
            screen.say,
            random.Random(swarm.spec.seed),
        )
        harming = asyncio.get_running_loop().create_task(chaos.run())
        try:
            await watch_run(observer, reporter, swarm.processes, screen.say)
        except asyncio.CancelledError:
            if reporter.monitor.summary().rounds:  # what happened until then is worth knowing
                _show_summary(reporter, chaos)
            if swarm.spec.is_endless:
                return  # nothing else ends it
            raise
        finally:
            harming.cancel()
            await asyncio.gather(harming, return_exceptions=True)
        sample = await written_sample(observer)
    finally:
        await observer.close()
    _show_summary(reporter, chaos)
    for line in sample:
        screen.say(line)


def _show_summary(reporter: Reporter, chaos: Chaos) -> None:
    screen = reporter.screen
    screen.close()
    screen.draw(summary_table(reporter.monitor.summary()))
    screen.draw(peers_table(reporter.monitor.view_model().peers))
    if chaos.rates:
        screen.say(
            f"chaos: {counted(chaos.num_killed, 'peer')} killed, {chaos.num_stopped} stopped for a "
            "while"
        )


async def written_sample(observer: RunObserver) -> list[str]:
    """A short text that the model writes, as lines; nothing for what is not a language model. A run
    that cannot say a word has still done its rounds, so a failure is a line too."""
    spec = observer.spec
    if spec.model.kind == "custom":
        return []
    is_python = any(PYTHON_STDLIB in source.paths for source in spec.data.sources)
    prompt = "def " if is_python else "The "
    failures = Failures()
    try:
        async with asyncio.timeout(SAMPLE_WAIT_S):
            written = await observer.generate(prompt, SAMPLE_TOKENS, SAMPLE_S, failures)
    except (SwarmnetError, TimeoutError) as error:
        why = failures.told() or str(error) or "the swarm did not answer in time"
        return [f"no sample: {why}"]
    text = prompt + written
    return ["", "the model writes:", *(f"  {printable(line)}" for line in text.split("\n"))]


COSTS = {
    "re-routes": "rerouted",
    "retracted": "retracted",
    "samples lost": "samples_lost",
    "results given up after a partition": "diverged",
    "optimizer shards reset": "shard_reset",
    "stages begun afresh": "stage_restarted",
    "moves to another stage": "moved",
}
"""What faults have cost, by the key of a run's totals."""


def summary_table(summary: Summary) -> Table:
    """The run in numbers."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    first, last, totals = summary.held_out_first, summary.held_out_last, summary.totals
    measured = []
    if first is not None and last is not None:
        measured = [
            ("held-out loss", first.loss, last.loss),
            ("held-out bits per byte", first.bits_per_byte, last.bits_per_byte),
        ]
    for name, value in (
        ("rounds", number(summary.rounds)),
        ("tokens", number(summary.tokens)),
        ("tokens/s", number(summary.tokens_per_s)),
        *((name, f"{number(a, 3)} -> {number(b, 3)}") for name, a, b in measured if a),
        *((name, number(totals.get(key, 0))) for name, key in COSTS.items()),
        ("bytes sent per token", size(summary.bytes_per_token)),
    ):
        table.add_row(Text(name), Text(value))
    return table
