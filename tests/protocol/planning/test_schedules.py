"""Schedules beside those that torch makes, and beside the formulas of their papers."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules

from swarmnet.protocol.planning import schedules
from swarmnet.protocol.planning.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, Step
from swarmnet.protocol.planning.timeline import StageTimes, played, spans_of
from swarmnet.protocol.planning.ways import Links, Way

SIZES = [(1, 1), (1, 3), (2, 2), (2, 4), (3, 6), (4, 4), (4, 8), (4, 16), (6, 12), (8, 16)]
EVEN = StageTimes(1.0, 1.0, 1.0)
"""A forward pass takes as long as either part of a backward pass."""


class Mock:
    """As much of a stage as a schedule looks at before it runs."""

    def __init__(self, index: int, rank: int, num_ranks: int, num_stages: int) -> None:
        self.stage_index, self.group_rank = index, rank
        self.group_size, self.num_stages = num_ranks, num_stages
        self.group = None
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.has_backward = True
        self.submod = torch.nn.Identity()
        self.device = torch.device("cpu")


def torch_order(kind: str, ranks: int, microbatches: int, chunks: int) -> dict[int, list[Any]]:
    made = getattr(torch_schedules, kind)
    num_stages = ranks * chunks
    stages = [Mock(c * ranks, 0, ranks, num_stages) for c in range(chunks)]
    if kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        stages = [Mock(i, 0, ranks, num_stages) for i in (0, num_stages - 1)]
    schedule = made(stages[0] if chunks == 1 and kind in SINGLE else stages, microbatches)
    order = getattr(schedule, "pipeline_order", None)
    return order if order is not None else schedule._get_pipeline_order()  # noqa: SLF001  torch has no public name for it


SINGLE = ("ScheduleGPipe", "Schedule1F1B")
KINDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": INPUT,
    "BACKWARD_WEIGHT": WEIGHT,
}
"""Of the passes; what else torch writes down is communication."""


def flat(actions: list[Any]) -> tuple[Step, ...]:
    """Without what is idle; of overlapped passes one after the other."""
    found: list[Step] = []
    for action in actions:
        if action is None:
            continue
        for one in action.sub_actions or (action,):
            kind = KINDS.get(one.computation_type.name)
            if kind is not None:
                found.append(Step(kind, one.stage_index, one.microbatch_index))
    return tuple(found)


ORACLES: list[tuple[str, str, int, Callable[[int, int], Schedule]]] = [
    ("gpipe", "ScheduleGPipe", 1, schedules.gpipe),
    ("1f1b", "Schedule1F1B", 1, schedules.one_f_one_b),
    ("interleaved", "ScheduleInterleaved1F1B", 2, schedules.interleaved),
    ("interleaved-3", "ScheduleInterleaved1F1B", 3, lambda k, m: schedules.interleaved(k, m, 3)),
    ("zb-h1", "ScheduleInterleavedZeroBubble", 1, schedules.zb_h1),
    ("zb-h1-2", "ScheduleInterleavedZeroBubble", 2, lambda k, m: schedules.zb_h1(k, m, 2)),
    ("zb-v", "ScheduleZBVZeroBubble", 2, schedules.zb_v),
    ("dualpipe-v", "ScheduleDualPipeV", 2, schedules.dualpipe_v),
]


@pytest.mark.parametrize(
    ("kind", "chunks", "make"), [x[1:] for x in ORACLES], ids=[x[0] for x in ORACLES]
)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_the_order_is_torchs(
    kind: str, chunks: int, make: Callable[[int, int], Schedule], ranks: int, microbatches: int
) -> None:
    if kind == "ScheduleDualPipeV" and microbatches < 2 * ranks:
        with pytest.raises(ValueError, match="needs"):
            make(ranks, microbatches)
        return
    order = torch_order(kind, ranks, microbatches, chunks)
    theirs = [flat(order[k]) for k in range(ranks)]
    if kind == "Schedule1F1B":  # it numbers the forward passes of its last rank from 1
        theirs[-1] = tuple(
            replace(s, microbatch=s.microbatch - (s.kind == FORWARD)) for s in theirs[-1]
        )
    assert theirs == list(make(ranks, microbatches).steps)


@pytest.mark.parametrize("make", schedules.SCHEDULES, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("devices", "microbatches"), [x for x in SIZES if x[1] >= 2 * x[0]])
def test_every_pass_is_made_once_and_nobody_waits_for_ever(
    make: Callable[[int, int], Schedule], devices: int, microbatches: int
) -> None:
    if make is schedules.chimera and (devices % 2 or microbatches % 2):
        with pytest.raises(ValueError, match="even"):
            make(devices, microbatches)
        return
    schedule = make(devices, microbatches)
    count = Counter(s for lane in schedule.steps for s in lane)
    assert set(count.values()) == {1}
    for microbatch in range(microbatches):
        for chunk in schedule.path(microbatch):
            assert count[Step(FORWARD, chunk, microbatch)] == 1
            whole = count[Step(BACKWARD, chunk, microbatch)]
            parts = [count[Step(kind, chunk, microbatch)] for kind in (INPUT, WEIGHT)]
            assert [1 - whole] * 2 == parts
    for lane in spans_of(schedule, [EVEN] * devices):
        assert all(a.end_s <= b.begin_s for a, b in pairwise(lane))


@pytest.mark.parametrize(("k", "m"), SIZES)
def test_bubbles_of_the_papers(k: int, m: int) -> None:
    times = [StageTimes(1.0, 1.0, 1.0)] * k
    full = (k - 1) / (m + k - 1)
    assert played(schedules.gpipe, times, m).bubble == pytest.approx(full)
    assert played(schedules.one_f_one_b, times, m).bubble == pytest.approx(full)
    assert played(schedules.naive, times, m).bubble == pytest.approx(1 - 1 / k)
    if m % k == 0:  # Narayanan et al., 2021: as if the pipeline were half as deep
        half = (k - 1) / (2 * m + k - 1)
        assert played(schedules.interleaved, times, m).bubble == pytest.approx(half)


@pytest.mark.parametrize(("k", "m"), [x for x in SIZES if x[1] >= 2 * x[0]])
def test_split_backward_passes_leave_a_third_of_the_bubble_or_none(k: int, m: int) -> None:
    """Qi et al., 2023: (K - 1)(F + I - W) of ZB-H1, where 1F1B has (K - 1)(F + B); of ZB-V (K - 1)
    of the forward passes of one chunk on either end, for a microbatch more of them."""
    work = 3.0 * m
    one = played(schedules.one_f_one_b, [EVEN] * k, m).round_s
    split = played(schedules.zb_h1, [EVEN] * k, m).round_s
    assert one - work == pytest.approx(3 * (k - 1))
    assert split - work == pytest.approx(k - 1)
    vee = played(schedules.zb_v, [EVEN] * k, m)
    assert vee.round_s - work <= (k - 1) / 2 + 1e-9
    assert vee.round_s < split or k == 1


@pytest.mark.parametrize(("k", "m"), [(2, 2), (4, 4), (6, 6), (8, 8)])
def test_chimera_idles_for_half_a_pipeline_less(k: int, m: int) -> None:
    """Li and Hoefler, 2021: (K - 2)/(3M/2 + K - 2) where M = K and backward takes twice as long."""
    found = played(schedules.chimera, [EVEN] * k, m)
    assert found.bubble == pytest.approx((k - 2) / (1.5 * m + k - 2))
    assert found.weight_versions == 2


@pytest.mark.parametrize("times", [EVEN, StageTimes(1.0, 2.0, 1.0), StageTimes(1.0, 1.0, 0.5)])
@pytest.mark.parametrize(("k", "m"), [(2, 4), (3, 6), (4, 16), (8, 16)])
def test_dualpipe_v_idles_for_no_longer_than_its_paper_says(
    k: int, m: int, times: StageTimes
) -> None:
    """DeepSeek-V3, 2024: (K - 1)(F&B + B - 3 W) of the halves of a device, where a forward pass and
    the backward pass beside it end together. Here the forward pass is passed on when it is done,
    which takes (K - 1) F from it, or more where the passes are uneven."""
    f, i, w = times.forward_s / 2, times.input_s / 2, times.weight_s / 2
    idle = played(schedules.dualpipe_v, [times] * k, m).round_s - 2 * m * (f + i + w)
    paper = (k - 1) * ((f + i + w) + (i + w) - 3 * w)
    assert idle <= paper - (k - 1) * f + 1e-9
    if i == f:
        assert idle == pytest.approx(paper - (k - 1) * f)


@pytest.mark.parametrize(("k", "m"), [(2, 4), (4, 8), (8, 16)])
def test_activations_and_versions(k: int, m: int) -> None:
    times = [EVEN] * k
    assert played(schedules.gpipe, times, m).peak_activations == m
    assert played(schedules.one_f_one_b, times, m).peak_activations == k
    assert played(schedules.zb_h1, times, m).peak_activations <= k
    assert played(schedules.naive, times, m).peak_activations == 1
    dream = played(schedules.pipedream, times, m)
    assert dream.weight_versions == k, "one a microbatch in flight"
    assert dream.bubble == pytest.approx(0)
    both = played(schedules.two_bw, times, m)
    assert both.weight_versions == 2
    assert both.round_s == pytest.approx(3 * m)


def in_flight(schedule: Schedule, device: int) -> int:
    """Passes between forward and backward at a device, at most."""
    now = most = 0
    for step in schedule.steps[device]:
        now += {FORWARD: 1, BACKWARD: -1}[step.kind]
        most = max(most, now)
    return most


@pytest.mark.parametrize(("k", "m"), [(2, 4), (4, 8), (4, 16), (6, 12), (8, 16)])
def test_activations_of_the_papers(k: int, m: int) -> None:
    """1F1B: fewer at each device (Narayanan et al., 2019). Interleaved: 1 + (K - 1)/(K V) times as
    many (Korthikanti et al., 2022). ZB-V: as 1F1B (Qi et al., 2023). Chimera: from K/2 + 1 to K (Li
    and Hoefler, 2021). DualPipeV: 2 K + 1 of the halves of a device (DeepSeek-V3, 2024)."""
    one = schedules.one_f_one_b(k, m)
    assert [in_flight(one, d) for d in range(k)] == [k - d for d in range(k)]
    times, chunks = [EVEN] * k, 2
    among = played(schedules.interleaved, times, m).peak_activations
    assert among == pytest.approx(k * (1 + (k - 1) / (k * chunks)))
    assert played(schedules.zb_v, times, m).peak_activations == k
    both = schedules.chimera(k, m)
    assert sorted({in_flight(both, d) for d in range(k)}) == list(range(k // 2 + 1, k + 1))
    assert played(schedules.dualpipe_v, times, m).peak_activations == (2 * k + 1) / 2


def test_a_way_takes_its_time() -> None:
    near = played(schedules.gpipe, [EVEN] * 2, 1)
    ways = {False: Way(latency_s=2.0), True: Way(1.0, 3.0, 2.0)}
    far = played(schedules.gpipe, [EVEN] * 2, 1, lambda a, b, is_back: ways[is_back])
    assert far.round_s == near.round_s + 7


@pytest.mark.parametrize("make", schedules.SCHEDULES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("way", [Way(10.0, 0.0), Way(0.0, 10.0)], ids=["up", "down"])
def test_no_round_is_shorter_than_what_a_link_has_to_carry(
    make: Callable[[int, int], Schedule], way: Way
) -> None:
    """A middle device sends and receives an activation and a gradient of each microbatch."""
    k, m = 4, 8
    took_s = played(make, [EVEN] * k, m, lambda a, b, is_back: way).round_s
    assert took_s >= 2 * m * 10


def test_messages_of_a_link_go_one_after_the_other() -> None:
    links = Links(lambda a, b, is_back: Way(2.0, 3.0, 1.0), 3)
    assert links.arrives(0, 1, False, 0.0) == 4.0, "received while it is sent"
    assert links.arrives(0, 1, False, 0.0) == 7.0, "its turn at the downlink"
    assert links.arrives(2, 1, True, 0.0) == 10.0, "whoever sends"
    assert links.arrives(0, 2, False, 0.0) == 8.0, "the third from this uplink"
    assert links.arrives(0, 2, False, 50.0) == 54.0, "all are free"


def test_devices_that_wait_for_each_other_are_found() -> None:
    made = schedules.one_f_one_b(2, 2)
    swapped = (made.steps[0][::-1], made.steps[1])
    broken = Schedule("broken", 2, made.device_of, made.paths, swapped)
    with pytest.raises(ValueError, match="wait for each other"):
        spans_of(broken, [EVEN] * 2)


def test_torch_is_not_needed() -> None:
    code = "import sys, swarmnet.protocol.planning.timeline as t; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
