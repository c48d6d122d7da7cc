"""`swarmnet plan --schedules`: known orders of a pipeline, for this model and these machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console

from peer.observe.table import WholeTable
from peer.planning.question import Found
from swarmnet.errors import SpecError
from swarmnet.files import write_whole
from swarmnet.plurals import counted
from swarmnet.protocol.planning.flow import IN_FLIGHT_PER_REPLICA
from swarmnet.protocol.planning.own_order import own_order
from swarmnet.protocol.planning.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    SCHEDULES,
    WEIGHT,
    Schedule,
)
from swarmnet.protocol.planning.timeline import Span, StageTimes, Timeline, played
from swarmnet.protocol.planning.ways import Way, Ways

COLORS = {FORWARD: "#4477aa", BACKWARD: "#228833", INPUT: "#66aa66", WEIGHT: "#ccbb44"}
NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "backward, gradient of the input",
    WEIGHT: "backward, gradient of the weights",
}
WIDTH, LEFT, LANE, GAP, TITLE = 1000, 70, 16, 4, 26
SMALLEST_TEXT = 12
"""Pixels of a pass in which its microbatch is written."""
MOST_DRAWN = 20_000
"""Passes in a picture."""


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule, or why there is none."""

    name: str
    timeline: Timeline | None
    tokens_per_s: float
    why_not: str = ""


def stage_times(found: Found) -> list[StageTimes]:
    """Of each stage of the plan, as if its replicas were one device that is as fast as all."""
    costs, cut = found.costs, found.plan.cut
    job, times = costs.job, []
    for k, (first, end) in enumerate(cut):
        replicas = [found.machines[i] for i in found.plan.replicas(k)]
        stage = costs.stage(first, end, len(cut), replicas)
        held = costs.held(first, end, len(cut), replicas[0])
        assert stage is not None
        assert held is not None
        again = float(held.computes_again)
        forward_s = job.microbatch / stage.compute / held.passes(job.backward)
        input_s = forward_s * min(1.0, job.backward)
        weight_s = forward_s * max(0.0, job.backward - 1)
        times.append(StageTimes(forward_s, input_s, weight_s, again * forward_s))
    return times


def _ways(found: Found) -> Ways:
    """Of a microbatch from a stage to another one, whose links are those of all replicas."""
    costs, cut, plan = found.costs, found.plan.cut, found.plan
    job = costs.job
    ups, downs, late = [], [], []
    for k in range(len(cut)):
        replicas = [found.machines[i] for i in plan.replicas(k)]
        ups.append(sum(m.up_bytes_per_s for m in replicas))
        downs.append(sum(m.down_bytes_per_s for m in replicas))
        late.append(sum(m.latency_s for m in replicas) / len(replicas))

    def way(source: int, target: int, is_back: bool) -> Way:
        layer = job.layers[cut[min(source, target)][1] - 1]
        num_bytes = layer.gradient_bytes if is_back else layer.activation_bytes
        num_bytes *= job.microbatch
        latency_s = (late[source] + late[target]) / 2
        return Way(num_bytes / ups[source], num_bytes / downs[target], latency_s)

    return way


def _own_orders(
    found: Found, times: Sequence[StageTimes], ways: Ways
) -> list[Callable[[int, int], Schedule]]:
    """The swarm's, with whole backward passes and with split ones."""
    num_replicas = sum(len(found.plan.replicas(k)) for k in range(len(found.plan.cut)))
    window = int(IN_FLIGHT_PER_REPLICA * num_replicas) + 1  # of a feeder of a small swarm

    def make(is_split: bool) -> Callable[[int, int], Schedule]:
        return lambda _, num: own_order(times, num, window, ways, is_split=is_split)

    return [make(False), make(True)]


def rows_of(found: Found) -> list[Row]:
    """All schedules."""
    job, now = found.costs.job, found.plan.round
    times, ways = stage_times(found), _ways(found)
    rest_s = now.exchange_s + now.update_s
    rows = []
    for make in (*SCHEDULES, *_own_orders(found, times, ways)):
        try:
            timeline = played(make, times, job.num_microbatches, ways)
        except ValueError as error:
            rows.append(Row(make.__name__.replace("_", "-"), None, 0.0, str(error)))
            continue
        seconds = timeline.round_s + rest_s
        rows.append(Row(timeline.schedule.name, timeline, now.tokens / seconds))
    return rows


def show_schedules(found: Found, console: Console, *, picture: Path | None, as_json: bool) -> None:
    """Prints the table, and draws the picture where that is wanted. Raises `SpecError` where it
    cannot be written."""
    rows = rows_of(found)
    if picture is not None:
        try:
            write_whole(picture, svg_of([r.timeline for r in rows if r.timeline is not None]))
        except OSError as e:
            raise SpecError(f"{picture} cannot be written: {e.strerror}") from None
    if as_json:
        values = {
            "stages": len(found.plan.cut),
            "microbatches": found.costs.job.num_microbatches,
            "planned_tokens_per_s": found.plan.round.tokens_per_s,
            "schedules": [_values(r) for r in rows],
        }
        console.print_json(json.dumps(values), ensure_ascii=True)
        return
    shown = [
        (
            r.name,
            f"{r.timeline.round_s:.3g} s",
            f"{100 * r.timeline.bubble:.1f} %",
            f"{r.timeline.peak_activations:g}",
            str(r.timeline.weight_versions),
            f"{r.tokens_per_s:,.0f}",
        )
        for r in rows
        if r.timeline is not None
    ]
    titles = ("schedule", "passes", "bubble", "activ.", "weights", "tokens/s")
    console.print(WholeTable(titles, shown))
    lines = [f"{r.name}: {r.why_not}" for r in rows if r.timeline is None]
    lines += [
        f"{counted(len(found.plan.cut), 'stage')}, "
        f"{counted(found.costs.job.num_microbatches, 'microbatch')} a round; each stage as one "
        "device with the speed and links of all its replicas; exchange and update come on top "
        f"({found.plan.round.exchange_s + found.plan.round.update_s:.3g} s)",
        "passes: of a round; activ.: microbatches between their passes on the device with most; "
        "weights: versions or copies on a device. PipeDream and 2BW learn otherwise, from "
        "gradients of older weights",
        "own order: the swarm's, which is decided as it goes; split, with backward passes in two "
        "parts, as CPUs make them in mode zero where they keep whole graphs",
        f"the swarm's own order, replica by replica: {found.plan.round.tokens_per_s:,.0f} tokens/s",
    ]
    if picture is not None:
        lines.append(f"{picture} has the picture, a lane a stage")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _values(row: Row) -> dict[str, object]:
    t = row.timeline
    if t is None:
        return {"name": row.name, "why_not": row.why_not}
    return {
        "name": row.name,
        "round_s": t.round_s,
        "bubble": t.bubble,
        "peak_activations": t.peak_activations,
        "weight_versions": t.weight_versions,
        "tokens_per_s": row.tokens_per_s,
    }


def svg_of(timelines: list[Timeline]) -> str:
    """A lane a stage, for each schedule, on one scale of time."""
    longest = max((lane[-1].end_s for t in timelines for lane in t.spans if lane), default=1.0)
    scale = (WIDTH - LEFT - 10) / longest
    parts, top = [], TITLE + 10
    for kind, x in zip(COLORS, (LEFT, LEFT + 110, LEFT + 230, LEFT + 480), strict=True):
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 18}" y="18">{NAMES[kind]}</text>')
    for t in timelines:
        title = f"{t.schedule.name}: bubble {100 * t.bubble:.1f} %"
        parts.append(f'<text x="{LEFT}" y="{top + 16}">{escape(title)}</text>')
        top += TITLE
        for stage, lane in enumerate(t.spans):
            parts.append(f'<text x="4" y="{top + LANE - 4}">stage {stage}</text>')
            parts.append(
                f'<rect x="{LEFT}" y="{top}" width="{longest * scale:.1f}" height="{LANE}" '
                'fill="#eeeeee"/>'
            )
            if sum(map(len, t.spans)) <= MOST_DRAWN:
                parts += _drawn(lane, scale, top)
            top += LANE + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + 10}" '
        f'viewBox="0 0 {WIDTH} {top + 10}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{top + 10}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _drawn(lane: Sequence[Span], scale: float, top: int) -> list[str]:
    parts = []
    for span in lane:
        x, width = LEFT + span.begin_s * scale, (span.end_s - span.begin_s) * scale
        step = span.step
        about = f"{NAMES[step.kind]} of microbatch {step.microbatch}, part {step.chunk}"
        parts.append(
            f'<rect x="{x:.2f}" y="{top}" width="{max(0.3, width - 0.5):.2f}" height="{LANE}" '
            f'fill="{COLORS[step.kind]}"><title>{about}</title></rect>'
        )
        if width >= SMALLEST_TEXT:
            parts.append(
                f'<text x="{x + width / 2:.2f}" y="{top + LANE - 4}" text-anchor="middle" '
                f'font-size="10" fill="white">{step.microbatch}</text>'
            )
    return parts
