"""Whole swarms in virtual time: one seed, one history; and hundreds of seeds, every invariant."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from typing import Any

import pytest

from swarmnet.protocol.codecs import INT4, INT8, TOPK, sparse_codec
from swarmnet.protocol.sync_modes import AUTO, DELAYED, GOSSIP, LOCAL, ZERO
from swarmnet.protocol.update.lost_samples import LostSamples
from swarmnet.simulation import population
from swarmnet.simulation.churn import ChurnRates
from swarmnet.simulation.clock import run
from swarmnet.simulation.coding import Coding
from swarmnet.simulation.invariants import Bounds
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Sample, Scenario, small_swarm, small_swarm_in
from swarmnet.simulation.stage import Sizes, SyntheticStage
from swarmnet.simulation.swarm import Simulation, simulate
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.settings import WaitLimits

NUM_SEEDS = 300
CHUNK = 25
EACH_TIME = 25
"""Seeds of the sweep that `make test` runs; `make test-all` runs the others too."""
REPLAY = """
from swarmnet.simulation.invariants import Bounds
from swarmnet.simulation.scenario import small_swarm
from swarmnet.simulation.swarm import simulate
for seed in (4, 25):
    result = simulate(small_swarm(seed))
    print(seed, result.log_hash, result.broken)
"""


def test_one_seed_replays_one_history_whatever_the_hash_seed() -> None:
    histories = []
    for hash_seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", REPLAY],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        histories.append(done.stdout)
    assert histories[0] == histories[1]
    assert histories[0].count("\n") == 2


def chunks() -> list[Any]:
    """The sweep in parts; those past `EACH_TIME` take long together."""
    return [
        pytest.param(first, marks=[pytest.mark.long] if first >= EACH_TIME else [])
        for first in range(0, NUM_SEEDS, CHUNK)
    ]


@pytest.mark.parametrize("first", chunks())
def test_small_swarms_with_every_kind_of_fault(first: int) -> None:
    failures = []
    for seed in range(first, first + CHUNK):
        broken = simulate(replace(small_swarm(seed), keep_log=False)).broken
        if broken is not None:
            failures.append(f"swarmnet simulate --replay {seed}: {broken}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_owed_of_gradients_is_in_every_sum(seed: int) -> None:
    """With every kind of fault; the stage refuses to be read before (`simulation.stage`)."""
    scenario = replace(small_swarm(seed), stages=2 + seed % 3, owes_weights=True, keep_log=False)
    assert simulate(scenario).broken is None


@pytest.mark.parametrize(
    ("stages", "slots", "latency_s", "least"),
    [(2, 4, 0.0005, 0.10), (4, 4, 0.0005, 0.20), (4, 8, 0.0005, 0.14), (4, 4, 0.2, 0.12),
     (2, 8, 0.2, 0.0), (4, 16, 0.2, 0.0)],
)  # fmt: skip
def test_rounds_of_few_microbatches_are_shorter_where_gradients_of_weights_are_owed(
    stages: int, slots: int, latency_s: float, least: float
) -> None:
    """A forward pass takes 0.2 s. With more microbatches on slower ways it does no harm."""
    scenario = Scenario(
        seed=1,
        peers=stages,
        stages=stages,
        rounds=12,
        until_s=2000.0,
        warmup_s=20.0 + slots,
        global_batch=4 * slots,
        service_s=0.6,
        speed_ratio=1.0,
        link=Link(1e9, 1e9, latency_s),
        bounds=Bounds(progress_s=600.0),
        keep_log=False,
    )
    found = [simulate(replace(scenario, owes_weights=owes)) for owes in (False, True)]
    assert [x.broken for x in found] == [None, None]
    whole, owing = (x.samples_per_s for x in found)
    assert 1 - whole / owing > least


FEW = 6
"""Seeds of a mode that `make test` runs."""


def seeds(*numbers: tuple[str, int]) -> list[Any]:
    """For each mode so many seeds: the first few, and the others, which take long together."""
    few = [pytest.param(mode, 0, FEW) for mode, _ in numbers]
    return few + [pytest.param(m, FEW, last, marks=pytest.mark.long) for m, last in numbers]


@pytest.mark.parametrize(("mode", "first", "last"), seeds((DELAYED, CHUNK), (AUTO, 12)))
def test_small_swarms_whose_exchanges_run_beside_the_rounds(
    mode: str, first: int, last: int
) -> None:
    failures = []
    for seed in range(first, last):
        broken = simulate(replace(small_swarm_in(mode, seed), keep_log=False)).broken
        if broken is not None:
            failures.append(f"{mode}, seed {seed}: {broken}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("mode", "first", "last"), seeds((LOCAL, CHUNK), (GOSSIP, CHUNK)))
def test_small_swarms_whose_replicas_make_steps_of_their_own(
    mode: str, first: int, last: int
) -> None:
    failures = []
    for seed in range(first, last):
        broken = simulate(replace(small_swarm_in(mode, seed), keep_log=False)).broken
        if broken is not None:
            failures.append(f"swarmnet simulate --sync {mode} --replay {seed}: {broken}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("mode", [LOCAL, GOSSIP])
def test_own_steps_lose_nothing_where_nothing_breaks(mode: str) -> None:
    scenario = Scenario(seed=3, peers=6, stages=3, rounds=13, until_s=120.0, sync_mode=mode)
    result = simulate(replace(scenario, local_steps=3, fragments=2 if mode == LOCAL else 1))
    assert result.broken is None
    assert result.rounds == 13
    assert (result.samples_lost, result.rerouted, result.shards_reset) == (0, 0, 0)


@pytest.mark.parametrize("mode", [LOCAL, GOSSIP])
def test_who_is_there_from_the_beginning_downloads_nothing(mode: str) -> None:
    """A stage of 64 MB, homes that send two megabytes a second: all begin with the same
    parameters and no moments."""
    sizes = Sizes(num_shards=4, shard_parameters=4_000_000)
    scenario = Scenario(
        seed=1, peers=8, stages=2, rounds=9, until_s=15.0, home_links=True, sizes=sizes
    )
    result = simulate(replace(scenario, start_s=0.1, service_s=0.4, sync_mode=mode, local_steps=5))
    assert result.broken is None
    stepped = [line for line in result.log if " own_step " in line and "round=1 " in line]
    assert len(stepped) == 8


@pytest.mark.parametrize("mode", [LOCAL, GOSSIP])
def test_an_own_step_on_anothers_microbatch_is_found(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A replica that takes nothing out again of what another has counted."""
    monkeypatch.setattr(SyntheticStage, "retract", lambda stage, key: None)
    found = (simulate(replace(small_swarm_in(mode, n), keep_log=False)).broken for n in range(12))
    assert any(broken is not None and "the own step of round" in broken for broken in found)


@pytest.mark.parametrize("mode", [pytest.param(ZERO, marks=pytest.mark.long), DELAYED])
def test_a_swarm_too_large_to_push_news_to_everybody(mode: str) -> None:
    """More peers than one push reaches: counters travel with the exchanges, a call tells that a
    round is over, and feeders help each other out by estimate."""
    scenario = Scenario(
        seed=7,
        peers=24,
        stages=2,
        until_s=150.0,
        churn_until_s=40.0,
        settled_rounds=1,
        global_batch=1200,
        service_s=0.4,
        speed_ratio=10.0,
        home_links=True,
        churn=ChurnRates(join=180.0, leave=90.0, crash=180.0),
        max_peers=40,
        sync_mode=mode,
        keep_log=False,
        bounds=Bounds(converge_s=60.0, progress_s=120.0),
    )
    result = simulate(scenario)
    assert result.broken is None
    assert result.rounds >= 1
    assert result.fraction_of_bound > 0.2


def test_the_dead_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long history has thousands of them."""
    born: list[weakref.ref[Peer]] = []
    still_there: list[int] = []

    gc.collect()
    gc.freeze()  # what was there before the swarm is not looked through again and again

    def count(sample: Sample) -> None:
        gc.collect()
        still_there.append(sum(ref() is not None for ref in born) - sample.peers)

    class Noted(Peer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            born.append(weakref.ref(self))

    monkeypatch.setattr(population, "Peer", Noted)
    crashes = ChurnRates(join=900.0, crash=900.0, rejoin=300.0, leave=300.0)
    scenario = Scenario(seed=5, peers=6, stages=2, until_s=120.0, churn=crashes, churn_until_s=90.0)
    try:
        result = simulate(scenario, on_sample=count)
    finally:
        gc.unfreeze()
    assert result.broken is None
    assert len(born) > 20
    assert still_there[-1] == 0


@pytest.mark.parametrize("has_hysteresis", [True, False])
def test_noise_sends_nobody_to_and_fro(has_hysteresis: bool) -> None:
    """Machines whose work takes now half and now twice the time; without margin and rest they go
    to and fro. (With seeds 3 and 5 one move is made, and is due: newcomers who did not know their
    speed had made unequal stages.)"""
    none = WaitLimits(move_margin=0.0, move_proposals=1, move_cooldown_s=1.0)
    scenario = Scenario(
        seed=0,
        peers=12,
        stages=3,
        until_s=400.0 if has_hysteresis else 900.0,
        global_batch=240,
        service_s=2.0,
        service_sigma=0.5,
        speed_ratio=3.0,
        check_s=2.0,
        keep_log=False,
        limits=WaitLimits() if has_hysteresis else none,
        bounds=Bounds(converge_s=300.0, progress_s=900.0),
    )
    simulation = Simulation(scenario, lambda: simulation.population.total("moved") > 1)
    result = run(simulation.run(), seed=0)
    assert result.broken is None
    assert result.moved == 0 if has_hysteresis else result.moved > 1


def test_nothing_is_lost_where_nothing_breaks() -> None:
    result = simulate(Scenario(seed=3, peers=6, stages=3, rounds=6, until_s=120.0))
    assert result.broken is None
    assert result.rounds == 6
    assert (result.samples_lost, result.rerouted, result.shards_reset) == (0, 0, 0)
    assert 0 < result.samples_per_s <= result.bound_per_s


FEW = sparse_codec(208)
CODED = [(ZERO, INT4), (DELAYED, INT8), (LOCAL, TOPK), (LOCAL, FEW), (GOSSIP, INT8)]


@pytest.mark.parametrize(
    ("mode", "codec", "first", "last"),
    [(*coded, 0, 2) for coded in CODED]
    # A feeder restarts between the last commit of a round and its exchange.
    + [(ZERO, INT4, 20, 21)]
    + [pytest.param(*coded, 2, CHUNK, marks=pytest.mark.long) for coded in CODED],
)
def test_coded_updates_in_small_swarms_with_every_kind_of_fault(
    mode: str, codec: str, first: int, last: int
) -> None:
    """And at the boundaries. Machines code so slowly that it takes longer than to compute."""
    for seed in range(first, last):
        scenario = replace(small_swarm_in(mode, seed), keep_log=False)
        sizes = replace(scenario.sizes, codec=INT8, update_codec=codec)
        slow = replace(scenario, sizes=sizes, coding=Coding(factor=0.002))
        broken = simulate(slow).broken
        assert broken is None, f"{mode}, {codec}, seed {seed}: {broken}"


def test_the_whole_sweep_meets_every_kind_of_fault() -> None:
    """The scenarios of the sweep are worth their time."""
    rates = [small_swarm(seed).churn for seed in range(NUM_SEEDS)]
    for action in ("join", "leave", "crash", "stall", "rejoin", "partition", "one_way"):
        assert sum(getattr(r, action) > 0 for r in rates) > NUM_SEEDS / 4, action


def test_in_the_sweep_peers_move() -> None:
    """No stage is uncovered by that, and nothing is lost: the invariants of every seed."""
    quick = [seed for seed in range(NUM_SEEDS) if small_swarm(seed).limits.move_cooldown_s < 10.0]
    assert len(quick) > NUM_SEEDS / 4
    moved = 0
    for seed in quick[:8]:
        result = simulate(replace(small_swarm(seed), keep_log=False))
        assert result.broken is None
        moved += result.moved
        if moved:
            break
    assert moved


def test_a_broken_invariant_is_found() -> None:
    """The checkers see what is wrong: here, a bound that cannot be met."""
    scenario = Scenario(seed=1, peers=2, stages=2, churn=ChurnRates(), until_s=60.0)
    bounds = replace(scenario.bounds, progress_s=0.01)
    broken = simulate(replace(scenario, bounds=bounds)).broken
    assert broken is not None
    assert "nothing has gone on" in broken


@pytest.mark.parametrize("error", [-32, 32])
def test_books_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """A replica that is one microbatch off in what is behind an update."""
    averaged = LostSamples.averaged

    def wrong(books: LostSamples, exchange: int, num_tokens: int, late: int) -> None:
        averaged(books, exchange, num_tokens + error, late)

    monkeypatch.setattr(LostSamples, "averaged", wrong)
    broken = simulate(Scenario(seed=3, peers=6, stages=3, rounds=6, until_s=120.0)).broken
    assert broken is not None
    assert "its replicas say" in broken


@pytest.mark.parametrize("told", [True, False])
def test_a_loss_that_is_told_twice_or_not_at_all_is_found(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    monkeypatch.setattr(LostSamples, "_tells", lambda books, *facts: told)
    found = (simulate(replace(small_swarm(seed), keep_log=False)).broken for seed in range(12))
    words = "told lost" if told else "no replica closed the books"
    assert any(broken is not None and words in broken for broken in found)
