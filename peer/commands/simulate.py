"""`swarmnet simulate`: a swarm in virtual time, against the bound of what was alive; or a sweep of
small swarms with every kind of fault."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from pydantic import ValidationError

import peer.console as console
from peer.options import SimulateOptions
from swarmnet.errors import SwarmnetError, UsageError, UserError
from swarmnet.needs import install_command
from swarmnet.plurals import counted
from swarmnet.protocol.sync_modes import AUTO, DELAYED, ZERO
from swarmnet.simulation.churn import ChurnRates, read_trace
from swarmnet.simulation.coding import DEVICE_KINDS, Coding
from swarmnet.simulation.network import BITS, FAST_LINK, MEGABIT, Link
from swarmnet.simulation.scenario import (
    Result,
    Sample,
    Scenario,
    large_swarm,
    small_swarm_in,
)
from swarmnet.simulation.swarm import simulate
from swarmnet.spec import SyncSpec, chosen_update_codec

Say = Callable[[str], None]
NO_ROUND = (
    "no round ended in this time: give it more --hours, or less work in a round (--microbatches, "
    "--service)"
)
PROGRESS_S = 20.0
"""Between two lines of a long simulation."""

HOME, FAST = "home", "fast"


class InvariantFailed(SwarmnetError):
    """A simulated swarm did what it must not do."""


def run_simulation(options: SimulateOptions, say: Say = console.say) -> None:
    """Runs and prints; raises `InvariantFailed` where an invariant broke, `UserError` where
    the plot cannot be drawn or the trace not read."""
    logging.getLogger("swarmnet").setLevel(logging.CRITICAL)
    if options.peers < options.stages and not options.sweep and options.replay is None:
        raise UsageError(
            f"{counted(options.stages, 'stage')}: take as many peers: --peers {options.stages}"
        )
    if options.plot is not None:
        check_plot(options.plot)  # what is amiss is to be known before the hours, not after
    if options.sweep:
        _sweep(options, say)
    elif options.replay is not None:
        _replay(options, options.replay, say)
    else:
        run_scenario(scenario_of(options), say, as_json=options.as_json, plot=options.plot)


def _sweep(options: SimulateOptions, say: Say) -> None:
    began = time.perf_counter()
    failed = []
    for seed in range(options.seed, options.seed + options.sweep):
        result = simulate(replace(_small(options, seed), keep_log=False))
        if result.broken is not None:
            failed.append(seed)
            mode = f" --sync {options.sync}" if options.sync else ""
            replay = f"swarmnet simulate --replay {seed}{mode}"
            say(f"seed {seed}: {result.broken}\n  replay it: {replay}")
    took_s = time.perf_counter() - began
    broken = counted(len(failed), "broken invariant")
    say(f"{counted(options.sweep, 'swarm')}, {broken}, {took_s:.0f} s")
    if failed:
        raise InvariantFailed(f"an invariant broke at seeds {', '.join(map(str, failed[:20]))}")


def _small(options: SimulateOptions, seed: int) -> Scenario:
    return small_swarm_in(options.sync or ZERO, seed)


def _replay(options: SimulateOptions, seed: int, say: Say) -> None:
    result = simulate(_small(options, seed))
    for line in result.log:
        say(line)
    say(f"event log {result.log_hash}")
    if result.broken is not None:
        raise InvariantFailed(f"seed {seed}: {result.broken}")


def run_scenario(
    scenario: Scenario, say: Say = console.say, *, as_json: bool = False, plot: Path | None = None
) -> None:
    """Runs one simulation and prints its result. Raises as `run_simulation`."""
    began = time.perf_counter()
    with _until_interrupted(say if not as_json else lambda _: None) as stop:
        result = simulate(scenario, stop, _Progress(scenario.until_s))
    took_s = time.perf_counter() - began
    if not result.rounds and result.broken is None:
        console.note(NO_ROUND)
    if as_json:
        say(dumps(summary(result, took_s)))
    else:
        for name, text in lines(result, took_s):
            say(f"{name:<64} {text}")
    if plot is not None:
        draw(result, plot)
    if result.broken is not None:
        raise InvariantFailed(result.broken)


class _Progress:
    """For who waits long: now and then a line on standard error."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._said_at = time.perf_counter()

    def __call__(self, sample: Sample) -> None:
        now = time.perf_counter()
        if now - self._said_at >= PROGRESS_S:
            self._said_at = now
            bound = 100 * sample.samples_per_s / sample.bound_per_s if sample.bound_per_s else 0.0
            console.note(
                f"{sample.at_s:,.0f} of {self._until_s:,.0f} s: round {sample.round}, "
                f"{counted(sample.peers, 'peer')}, {bound:.0f} % of the bound as they serve"
            )


@contextmanager
def _until_interrupted(say: Say) -> Iterator[Callable[[], bool]]:
    """Ctrl-C ends the simulation early, with what there is by then; a second one ends all."""
    pressed: list[int] = []

    def stop(number: int, frame: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)
        say("ending the simulation here; Ctrl-C again to drop it")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def scenario_of(options: SimulateOptions) -> Scenario:
    """The scenario that the options describe. Raises `UserError`."""
    mode = options.sync or DELAYED
    scenario = large_swarm(
        options.peers,
        options.stages,
        options.hours * 3600.0,
        ChurnRates.replacing(options.peers, options.churn),
        options.seed,
        service_s=options.service_s,
        microbatches_per_replica=options.microbatches,
        sequences=options.sequences,
        codec=options.codec,
        update_codec=_update_codec(mode, options.update_codec, options.topk_density),
    )
    return replace(
        scenario,
        sync_mode=mode,
        local_steps=options.local_steps,
        check_s=options.check_every_s or scenario.check_s,
        speed_ratio=options.speed_ratio,
        coding=_coding(options),
        home_links=options.links == HOME,
        link=_link(options.links),
        trace=() if options.trace is None else tuple(read_trace(options.trace)),
    )


def _update_codec(mode: str, codec: str | None, density: float | None) -> str:
    """As a run would have it. Raises `UserError` where none can."""
    given: dict[str, Any] = {"mode": mode, "codec": codec or AUTO}
    options = [f"--update-codec {codec}"] * bool(codec)
    if density is not None:
        given["topk_density"] = density
        options.append(f"--topk-density {density:g}")
    try:
        sync = SyncSpec.model_validate(given)
    except ValidationError as e:
        why = e.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"{' '.join(options)} with --sync {mode}: {why}") from None
    return chosen_update_codec(sync) if sync.codec == AUTO else sync.update_codec


def _coding(options: SimulateOptions) -> Coding:
    kind = DEVICE_KINDS[options.device]
    factor = kind.factor if options.coding_speed is None else options.coding_speed
    return Coding(factor=factor or math.inf, is_beside=kind.codes_beside)


def _link(text: str) -> Link:
    """Of every peer, where links are not those of homes. Raises `UsageError`."""
    if text in (HOME, FAST):
        return FAST_LINK
    try:
        mbit_s, ms = (float(part) for part in text.split("/"))
    except ValueError:
        mbit_s = ms = math.nan
    if not (0.0 < mbit_s < math.inf and 0.0 <= ms < math.inf):
        raise UsageError(
            f"--links {text}: {HOME}, {FAST}, or Mbit/s and ms between two peers, such as 100/50"
        )
    bytes_per_s = mbit_s * MEGABIT / BITS
    return Link(bytes_per_s, bytes_per_s, ms / 1000.0 / 2)


def summary(result: Result, took_s: float) -> dict[str, Any]:
    """A result as plain values, without its event log."""
    values = asdict(replace(result, log=()))
    del values["log"]
    values["wall_s"] = took_s
    return values


def lines(result: Result, took_s: float) -> list[tuple[str, str]]:
    """A result for people."""
    recovery = sorted(result.recovery_s)
    recovered = (
        f"median {median(recovery):.1f} s, longest {recovery[-1]:.1f} s, of {len(recovery)}"
        if recovery
        else "no microbatch had to be rescued"
    )
    faults = ", ".join(f"{n} {name}" for name, n in result.faults.items()) or "none"
    speed = result.virtual_s / max(took_s, 1e-9)
    settled = result.settled_samples
    part = f" ({100 * result.samples_lost_mean / settled:.1f} %)" if settled else ""
    spent = sorted(result.breakdown.items(), key=lambda item: -item[1])
    return [
        ("simulated", f"{result.virtual_s:.0f} s in {took_s:.1f} s ({speed:.1f} times real time)"),
        ("throughput", f"{result.samples_per_s:.1f} samples/s"),
        ("max-flow bound, as they served", f"{result.bound_per_s:.1f} samples/s"),
        ("of that bound", f"{100 * result.fraction_of_bound:.1f} %"),
        ("bound of the best assignment", f"{result.best_per_s:.1f} samples/s"),
        ("of the best assignment", f"{100 * result.fraction_of_best:.1f} %"),
        ("assignment as served, of the best", f"{100 * result.assignment_quality:.1f} %"),
        ("rounds", f"{result.rounds}"),
        ("what happened", faults),
        ("re-routes", f"{result.rerouted}"),
        ("retracted microbatches", f"{result.retracted}"),
        ("moves", f"{result.moved}"),
        (
            "samples lost, mean of all shards",
            f"{result.samples_lost_mean:.0f} of {settled} in updates made{part}",
        ),
        ("samples lost, worst shard of each round", f"{result.samples_lost}"),
        ("stages begun afresh", f"{result.stages_restarted}"),
        ("optimizer shards reset", f"{result.shards_reset}"),
        ("recovery after a crash", recovered),
        ("control traffic", f"{result.control_bytes_per_peer_s:.0f} bytes/s a peer"),
        ("all traffic", f"{result.bytes_per_peer_s:.0f} bytes/s a peer"),
        *((f"machines: {name}", f"{100 * part:.1f} %") for name, part in spent if part),
        ("event log", result.log_hash),
    ]


def draw(result: Result, path: Path) -> None:
    """Throughput against the bounds, peers, recovery times and what the machines did, as a
    picture; PNG or SVG, by the name's end."""
    pyplot = _import_pyplot()
    figure, ((above, right), (middle, below)) = pyplot.subplots(
        2, 2, figsize=(11, 6.5), layout="constrained"
    )
    hours = [s.at_s / 3600.0 for s in result.samples_over_time]
    for values, label in (
        ([s.best_per_s for s in result.samples_over_time], "bound of the best assignment"),
        ([s.bound_per_s for s in result.samples_over_time], "max-flow bound, as they served"),
        ([s.samples_per_s for s in result.samples_over_time], "throughput"),
    ):
        above.plot(hours, values, label=label)
    above.set(ylabel="samples/s", xlabel="hours", ylim=(0, None))
    above.set_title(f"{100 * result.fraction_of_bound:.1f} % of the bound as they served")
    above.legend(fontsize="small")
    middle.plot(hours, [s.peers for s in result.samples_over_time])
    middle.set(ylabel="peers alive", xlabel="hours", ylim=(0, None))
    below.hist(result.recovery_s, bins=40)
    below.set(xlabel="recovery after a crash, s", ylabel="crashes")
    spent = [(name, 100 * part) for name, part in reversed(result.breakdown.items()) if part]
    right.barh([fill(name, 34) for name, _ in spent], [part for _, part in spent])
    right.set(xlabel="% of the machines' capacity")
    right.tick_params(axis="y", labelsize="small")
    try:
        figure.savefig(path, dpi=80)
    except OSError as e:
        raise UserError(f"--plot {path}: {e.strerror or e}") from None
    finally:
        pyplot.close(figure)


def check_plot(path: Path) -> None:
    """Raises `UserError` where a picture cannot be drawn, or not there."""
    pyplot = _import_pyplot()
    figure = pyplot.figure()
    kinds = figure.canvas.get_supported_filetypes()
    pyplot.close(figure)
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise UserError(f"--plot {path}: end its name with .png or .svg")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: no such folder; make {path.parent} first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--plot {path}: it cannot be written; choose another name")


def _import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError(f"--plot needs matplotlib: {install_command('matplotlib')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
