"""A live swarm by what its records say, and what a liar can do to the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.protocol.planning.live import (
    FASTEST,
    Live,
    Said,
    Usual,
    better_cut,
    better_moves,
    live_swarm,
    most_missed,
    with_one_more,
)
from swarmnet.protocol.planning.search import cut_of
from tests.protocol.planning.test_cost import equal_job

USUAL = Usual(1e6, 4e6, 0.01)
CUT = cut_of([2, 2])


def said(peer: int, stage: int, rate: float = 0.5, up: float = 1e6, round_s: float = 0.0) -> Said:
    return Said(f"peer-{peer}", stage, rate, up, round_s, 0.0)


def live(*replicas: Said, layers: int = 4, mode: str = "zero") -> Live:
    found = live_swarm(equal_job(layers, 16, mode), CUT, replicas, USUAL)
    assert found is not None
    return found


FOUR = (said(0, 0), said(1, 0), said(2, 1), said(3, 1))


def test_a_machine_is_as_fast_as_it_does_its_stage() -> None:
    """Two layers, each a second of 1e9 FLOP/s for a sample: half a sample a second."""
    found = live(*FOUR)
    assert [m.flops_per_s for m in found.machines] == pytest.approx([1e9] * 4)
    assert found.serves == (0, 0, 1, 1)
    assert found.planned.compute_s == pytest.approx(16)
    assert found.tokens_per_s == found.planned.tokens_per_s, "no round is over yet"


def test_what_rounds_took_corrects_the_plan_and_the_median_counts() -> None:
    took = [replace(r, open_s=30.0, exchange_s=10.0) for r in FOUR]
    found = live(*took[:3], replace(took[3], open_s=1e15))
    assert found.round_s == 40.0
    assert found.tokens_per_s == pytest.approx(160 / 40)
    beside = live(*took, mode="delayed")
    assert beside.round_s == 30.0, "the exchange is beside the next round"
    absurd = live(*(replace(r, open_s=1e-9) for r in FOUR))
    assert absurd.round_s == 0
    assert absurd.tokens_per_s == absurd.planned.tokens_per_s


def test_a_liar_counts_as_ten_middle_machines_at_most() -> None:
    honest = live(*FOUR)
    found = live(*FOUR[:3], said(3, 1, rate=1e15, up=1e15))
    liar = found.machines[3]
    assert liar.flops_per_s == pytest.approx(FASTEST * honest.machines[3].flops_per_s)
    assert liar.up_bytes_per_s == FASTEST * 1e6
    assert found.num_limited == 1
    assert found.planned.tokens_per_s <= FASTEST * honest.planned.tokens_per_s


def test_who_says_nothing_is_taken_for_the_middle_machine() -> None:
    found = live(*FOUR[:3], said(3, 1, rate=0.0, up=0.0))
    assert found.num_assumed == 1
    assert found.machines[3].flops_per_s == found.machines[2].flops_per_s
    assert found.machines[3].up_bytes_per_s == USUAL.up_bytes_per_s


def test_what_cannot_be_planned() -> None:
    job = equal_job(4, 16)
    assert live_swarm(job, CUT, FOUR[:2], USUAL) is None, "nobody serves stage 1"
    silent = [replace(r, samples_per_s=0.0) for r in FOUR]
    assert live_swarm(job, CUT, silent, USUAL) is None
    assert live_swarm(job, CUT, [], USUAL) is None
    beyond = live_swarm(job, CUT, [*FOUR, said(9, 7)], USUAL)
    assert beyond is not None
    assert len(beyond.machines) == 4, "no such stage"


def test_one_more_goes_where_least_is_and_the_only_one_is_missed_most() -> None:
    found = live(said(0, 0), said(1, 0), said(2, 1))
    stage, rate = with_one_more(found)
    assert stage == 1
    assert rate > 1.3 * found.tokens_per_s
    missed = most_missed(found)
    assert (missed.peer_id, missed.stage, missed.tokens_per_s) == ("peer-2", 1, 0.0)


def test_another_cut_pays_where_the_stages_do_not_fit_the_machines() -> None:
    """Six of eight layers at one stage, with two machines each: a move would leave one copy."""
    replicas = [said(0, 0, 1 / 6), said(1, 0, 1 / 6), said(2, 1, 0.5), said(3, 1, 0.5)]
    found = live_swarm(equal_job(8, 64), cut_of([6, 2]), replicas, USUAL)
    assert found is not None
    plan = better_cut(found, 2)
    assert plan is not None
    assert plan.round.tokens_per_s > 1.4 * found.planned.tokens_per_s
    assert min(len(plan.replicas(k)) for k in range(len(plan.cut))) >= 2, "copies stay"
    even = live_swarm(equal_job(8, 64), plan.cut, [
        said(i, k, 1 / (plan.cut[k][1] - plan.cut[k][0])) for i, k in enumerate(plan.serves)
    ], USUAL)  # fmt: skip
    assert even is not None
    assert better_cut(even, 2) is None


def test_moves_come_before_another_cut() -> None:
    replicas = [said(i, 0) for i in range(7)] + [said(7, 1)]
    found = live(*replicas)
    moved = better_moves(found, 1)
    assert moved is not None
    assert sorted(len(moved.replicas(k)) for k in (0, 1)) == [4, 4]
    assert better_moves(live(*FOUR), 1) is None
