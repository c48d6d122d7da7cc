"""`swarmnet local`: a whole swarm on this machine, one real `swarmnet peer` process a peer, and
this process as the observer that watches it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from peer.commands.chaos import Chaos, parse_chaos
from peer.log import sum_up
from peer.observe.charts import Charts, charts_folder
from peer.observe.dashboard.server import listen
from peer.observe.metrics import open_metrics
from peer.observe.notify import check_url
from peer.observe.observing import JoinRun, RunObserver, join_run
from peer.observe.report import Reporter, open_notifier, open_page
from peer.observe.screen import peers_table
from peer.observe.text import number, size
from peer.observe.view_model import Summary
from peer.option_groups import arguments_for
from peer.options import LOOPBACK, LocalOptions, default_spec_path
from peer.processes import (
    PEER_COMMAND,
    STOP_STEPS,
    ChildPeer,
    PeerProcesses,
    keep_folder,
    kept_folder,
    run_folder,
)
from swarmnet.errors import SwarmnetError, UsageError, UserError
from swarmnet.printable import printable
from swarmnet.runtime.joining.starting import start_run
from swarmnet.runtime.options import INVITE_VARIABLE, ComputeOptions, LinkOptions
from swarmnet.spec import BYTES_TOKENIZER, HELD_OUT_NAME, PYTHON_STDLIB, RunSpec, describe
from swarmnet.swarm.lifecycle.departure import LONGEST_DRAIN_S
from swarmnet.swarm.recovery.checkpointing import LAST_SAVE_S

LOOK_EVERY_S = 0.5
"""Longest time between looks."""
LOOK_PAUSE_S = 0.1
"""Shortest time between looks."""
FINAL_WAIT_S = 30.0
"""After the last update: for the last counts and the last held-out measurement to arrive."""
JOIN_THROUGH = 4
"""Addresses that a newcomer is given: any of them may be gone when it starts."""
SAMPLE_TOKENS = 200
SAMPLE_S, SAMPLE_WAIT_S = 20.0, 60.0
"""After the first, what has been written is shown; after the second, nothing."""
SAVE_WAIT_S = LONGEST_DRAIN_S + LAST_SAVE_S
"""What peers may take for what the model is written from."""
SAVING_STEPS = ((signal.SIGINT, SAVE_WAIT_S), *STOP_STEPS[1:])


async def run_local(
    options: LocalOptions,
    *,
    command: Sequence[str] = PEER_COMMAND,
    join: JoinRun = join_run,
) -> None:
    """Runs a swarm until it has done its rounds; prints a summary and a sample of text.

    `command` and `join` are there for tests.

    Raises:
        UserError: spec, options or metrics file are wrong, or the first peer found them so.
        SwarmnetError: every peer ended before the run did.
    """
    path = options.spec or default_spec_path()
    started = await asyncio.to_thread(start_run, path, rounds=options.rounds, seed=options.seed)
    spec = started.spec
    _check(options, spec)
    rates = parse_chaos(options.chaos) if options.chaos else {}
    if options.invite:
        os.environ[INVITE_VARIABLE] = options.invite  # of the peers; a command line can be seen
        join = partial(join, invite=options.invite)
    async with AsyncExitStack() as stack:
        hub = None
        if options.dashboard is not None:
            listener = listen(options.dashboard_host, options.dashboard)
            hub, shown_at = await open_page(
                stack, spec, options.dashboard_host, listener, options.allowed_host
            )
        kept = options.state_dir
        metrics = stack.enter_context(open_metrics(options.metrics, append=kept is not None))
        drawn = charts_folder(options.log_to)
        charts = None if drawn is None else Charts(drawn, spec)
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
        processes = PeerProcesses(folder, command, steps)
        try:
            await _run(options, spec, reporter, processes, join, rates)
        finally:
            if is_saving and processes.num_alive:
                reporter.screen.say(
                    f"waiting until the peers have saved the model, {SAVE_WAIT_S:.0f} s at most; "
                    "Ctrl-C ends them at once"
                )
            await processes.stop()
            if kept is not None:
                reporter.screen.say(f"the run is in {kept}; the same command goes on with it")
            if options.out is not None:
                base = started.model
                await asyncio.to_thread(_export, options, base, options.out, processes, reporter)


def _export(
    options: LocalOptions, base: str, out: Path, processes: PeerProcesses, reporter: Reporter
) -> None:
    """Writes the model that the peers have saved when they ended; why not, in a line. `base`: as in
    `Wanted`."""
    from peer.commands.export import Wanted, export_checkpoints

    folders = [processes.folder / child.name for child in processes.children]
    try:
        line = export_checkpoints(folders, out, Wanted(dtype=options.dtype, base=base))
    except UserError as error:
        line = f"the model was not written: {error}"
        if options.state_dir is None and any(processes.folder.glob("*/checkpoints")):
            line += f"; what the peers saved is in {keep_folder(processes.folder)}"
    reporter.screen.say(line)


def _check(options: LocalOptions, spec: RunSpec) -> None:
    if options.notify:
        check_url(options.notify)
    if options.out is not None:
        from peer.commands.model_folder import check_out

        check_out(options.out)
    num_stages = spec.pipeline.num_stages
    if options.num_peers < num_stages:
        raise UsageError(f"{num_stages} stages need at least --peers {num_stages}")


async def _run(
    options: LocalOptions,
    spec: RunSpec,
    reporter: Reporter,
    processes: PeerProcesses,
    join: JoinRun,
    rates: dict[str, float],
) -> None:
    screen = reporter.screen
    screen.say(describe(spec))
    screen.say(f"starting {options.num_peers} peers")
    first = await processes.start("peer-1", first_arguments(options))
    address = (await processes.wait_ready(first)).address
    screen.say(f"join it from this machine: swarmnet peer --join {address}")
    for index in range(2, options.num_peers + 1):
        await processes.start(f"peer-{index}", joiner_arguments(options, spec, address))
    observer = await join([address], options.transport)
    try:
        if observer.spec.run_id != spec.run_id:
            raise SwarmnetError("the peers train another run than the one they were given")
        chaos = Chaos(
            rates,
            processes,
            observer.view,
            lambda: _start_newcomer(options, spec, observer, processes),
            screen.say,
            random.Random(spec.seed),
        )
        harming = asyncio.get_running_loop().create_task(chaos.run())
        try:
            await _watch(observer, reporter, processes)
        except asyncio.CancelledError:
            if reporter.monitor.summary().rounds:  # what happened until then is worth knowing
                _show_summary(reporter, chaos)
            raise
        finally:
            harming.cancel()
            await asyncio.gather(harming, return_exceptions=True)
        sample = await _sample(observer)
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
            f"chaos: {chaos.num_killed} peers killed, {chaos.num_stopped} stopped for a while"
        )


async def _start_newcomer(
    options: LocalOptions, spec: RunSpec, observer: RunObserver, processes: PeerProcesses
) -> None:
    """One more peer, through the address of any that lives."""
    now = asyncio.get_running_loop().time()
    addresses = [r.addresses[0] for r in observer.view.live(now) if r.is_replica and r.addresses]
    if addresses:
        name = f"peer-{len(processes.children) + 1}"
        await processes.start(name, joiner_arguments(options, spec, *addresses[:JOIN_THROUGH]))


def _shared_arguments(options: LocalOptions) -> list[str]:
    # who starts a run at this machine wants it now
    arguments = ["--host", LOOPBACK, "--plain", "--no-pause-on-battery"]
    arguments += arguments_for(options, LinkOptions) + arguments_for(options, ComputeOptions)
    if options.threads:
        arguments += ["--threads", str(options.threads)]
    if options.debug:
        arguments.append("--debug")
    return arguments


def first_arguments(options: LocalOptions) -> list[str]:
    arguments = ["--spec", str(options.spec or default_spec_path())]
    if options.rounds is not None:
        arguments += ["--rounds", str(options.rounds)]
    if options.seed is not None:
        arguments += ["--seed", str(options.seed)]
    return arguments + _shared_arguments(options)


def _named_paths(spec: RunSpec) -> list[str]:
    """Of `--data`."""
    data = spec.data
    held_out = [f"{HELD_OUT_NAME}={path}" for path in data.held_out_paths]
    prefixes = [f"{s.name}=" if data.source else "" for s in data.sources]
    sources = zip(prefixes, data.sources, strict=True)
    return [f"{prefix}{path}" for prefix, s in sources for path in s.paths] + held_out


def joiner_arguments(options: LocalOptions, spec: RunSpec, *addresses: str) -> list[str]:
    """A joiner takes neither files nor code from a spec that comes over the network; here both
    are this person's own."""
    arguments = [word for address in addresses for word in ("--join", address)]
    paths = _named_paths(spec)
    if any(path != PYTHON_STDLIB for path in paths):
        for path in paths:
            arguments += ["--data", path]
    if spec.data.tokenizer != BYTES_TOKENIZER:
        arguments += ["--tokenizer", spec.data.tokenizer]
    if spec.model.kind == "custom":
        arguments += ["--builder", spec.model.builder]
    return arguments + _shared_arguments(options)


async def _watch(observer: RunObserver, reporter: Reporter, processes: PeerProcesses) -> None:
    """Looks until the run has done its rounds and all of it was told. A peer that ends before is
    reported and the run goes on; raises `SwarmnetError` when none is left."""
    loop = asyncio.get_running_loop()
    done_at: float | None = None
    while True:
        for child in processes.newly_dead():
            _report_death(child, reporter)
        if not processes.num_alive:
            raise SwarmnetError(f"every peer has ended; their logs are in {processes.folder}")
        now = loop.time()
        reporter.look(observer.view, now, time.time())
        sum_up(time.monotonic())
        processes.trim_logs()
        if reporter.monitor.all_told:
            return
        if reporter.monitor.done:
            done_at = now if done_at is None else done_at
            if now - done_at > FINAL_WAIT_S:
                reporter.screen.say("the last held-out measurement did not arrive in time")
                return
        await observer.wait_news(LOOK_EVERY_S)
        await asyncio.sleep(LOOK_PAUSE_S)


def _report_death(child: ChildPeer, reporter: Reporter) -> None:
    screen = reporter.screen
    screen.say(f"{child.name} (pid {child.process.pid}) {child.how_it_ended()}; the run goes on")
    for line in child.log_tail():
        screen.say(f"  {child.name}: {line}")


async def _sample(observer: RunObserver) -> list[str]:
    """A short text that the model writes, as lines; nothing for what is not a language model. A run
    that cannot say a word has still done its rounds, so a failure is a line too."""
    spec = observer.spec
    if spec.model.kind == "custom":
        return []
    is_python = any(PYTHON_STDLIB in source.paths for source in spec.data.sources)
    prompt = "def " if is_python else "The "
    try:
        async with asyncio.timeout(SAMPLE_WAIT_S):
            written = await observer.generate(prompt, SAMPLE_TOKENS, SAMPLE_S)
    except (SwarmnetError, TimeoutError) as error:
        return [f"no sample: {error or 'the swarm did not answer in time'}"]
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
