"""Seconds of a round, beside what papers and the wire say of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarmnet.protocol.planning.cost import Costs, Round
from swarmnet.protocol.planning.exchange import Home, crossing_bytes, exchanged_bytes
from swarmnet.protocol.planning.flow import IN_FLIGHT_PER_REPLICA, Rates
from swarmnet.protocol.planning.late import Late, waited_s
from swarmnet.protocol.planning.model import Held, Job, Layer, Machine, Update
from swarmnet.protocol.planning.own_order import own_order
from swarmnet.protocol.planning.search import best_plan, cut_of
from swarmnet.protocol.planning.timeline import StageTimes, spans_of
from swarmnet.protocol.planning.ways import Way
from swarmnet.protocol.sync_modes import LEAST_QUORUM
from swarmnet.protocol.update.robust import MIN_CONTRIBUTORS

FAST = Machine("m", 1e9, 1e12, 1e12, 0.0)


def equal_job(
    num_layers: int, num_microbatches: int, mode: str = "zero", *, again: bool = False
) -> Job:
    """A layer takes a second forth and back, of one sample."""
    return Job(
        layers=(Layer(1e9 / 3, 10**6, 1000.0, 500.0),) * num_layers,
        tokens=10,
        microbatch=1,
        global_batch=num_microbatches,
        update=Update(mode, "none", 2, 10),
        memory=lambda first, end, num_stages, memory: Held(0, 0, "keep", 4, again),
    )


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 8), (4, 16), (8, 64)])
def test_the_bubble_is_that_of_gpipe(stages: int, microbatches: int) -> None:
    costs = Costs(equal_job(stages, microbatches))
    found = costs.of(cut_of([1] * stages), [FAST] * stages, range(stages))
    assert found is not None
    part = (stages - 1) / (microbatches + stages - 1)
    assert found.bubble_s / found.seconds == pytest.approx(part)
    assert found.compute_s == pytest.approx(microbatches)
    assert found.tokens_per_s == pytest.approx(10 * microbatches / (microbatches + stages - 1))


def splitting(job: Job) -> Job:
    """With backward passes in two parts, but at the first stage."""
    return replace(
        job,
        memory=lambda first, end, num_stages, memory: Held(
            0, 0, "keep", 64, computes_again=False, splits=first > 0
        ),
        splits_pay=True,
    )


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 8), (8, 32)])
@pytest.mark.parametrize("latency_s", [0.0, 1 / 3])
def test_backward_passes_in_two_parts_are_those_of_the_own_order(
    stages: int, microbatches: int, latency_s: float
) -> None:
    """Fill and drain take a third of what they do with whole passes."""
    costs = Costs(splitting(equal_job(stages, microbatches)))
    machines = [replace(FAST, latency_s=latency_s)] * stages
    found = costs.of(cut_of([1] * stages), machines, range(stages))
    assert found is not None
    assert found.bubble_s == pytest.approx((stages - 1) / 3)
    times = [StageTimes(1 / 3, 1 / 3, 1 / 3)] * stages
    window = int(IN_FLIGHT_PER_REPLICA * stages) + 1

    def ways(source: int, target: int, is_back: bool) -> Way:
        return Way(latency_s=latency_s)

    order = own_order(times, microbatches, window, ways, is_split=True)
    spans = spans_of(order, times, ways)
    assert found.seconds == pytest.approx(max(lane[-1].end_s for lane in spans))


def test_two_parts_gain_nothing_at_one_stage_or_with_adapters() -> None:
    for job, stages in ((equal_job(1, 8), 1), (replace(equal_job(4, 8), backward=1.0), 4)):
        rounds = [
            Costs(each).of(cut_of([1] * stages), [FAST] * stages, range(stages))
            for each in (job, splitting(job))
        ]
        assert rounds[0] == rounds[1]


@pytest.mark.parametrize(
    ("stages", "slots", "whole", "owing"),
    [(2, 4, 5.714, 6.667), (4, 4, 3.829, 5.565), (4, 8, 4.912, 6.076)],
)
def test_two_parts_are_as_fast_as_simulated(
    stages: int, slots: int, whole: float, owing: float
) -> None:
    """Samples/s of the swarms of `tests/simulation/test_swarm.py -k owed`, of 0.6 s a
    microbatch."""
    job = equal_job(stages, slots)
    job = replace(job, microbatch=4, global_batch=4 * slots)
    machines = [replace(FAST, flops_per_s=4e9 / 0.6, latency_s=0.001)] * stages
    for each, simulated in ((job, whole), (splitting(job), owing)):
        found = Costs(each).of(cut_of([1] * stages), machines, range(stages))
        assert found is not None
        assert 0.9 < 4 * slots / found.seconds / simulated < 1.1


def test_each_shard_takes_its_time_where_the_round_waits_for_it() -> None:
    slow = replace(FAST, shard_s=0.5)
    for mode, size, shards in (
        ("zero", 10**5, 20),
        ("zero", 3 * 10**5, 7),
        ("zero", 0, 64),
        ("local", 10**5, 2),
        ("delayed", 10**5, 0),
    ):
        job = equal_job(2, 8, mode)
        job = replace(job, update=replace(job.update, shard_parameters=size))
        found = Costs(job).of(((0, 2),), [slow], [0])
        assert found is not None
        assert found.update_s == pytest.approx(0.5 * shards)


def test_the_end_of_a_round_takes_longer_where_a_stage_has_other_replicas() -> None:
    """What is coded, decoded and summed for them counts, and calls for each shard."""
    job = equal_job(2, 8)
    one = replace(
        FAST,
        update_parameters_per_s=1e6,
        shared_parameters_per_s=2e5,
        shard_s=0.1,
        shared_shard_s=0.3,
    )
    costs, ends = Costs(job), []
    for replicas in (1, 2, 3):
        found = costs.of(((0, 2),), [one] * replicas, [0] * replicas)
        assert found is not None
        ends.append(found.update_s)
    parameters = sum(x.parameters for x in job.layers)
    assert ends[0] == pytest.approx(parameters / 1e6 + 64 * 0.1)
    assert ends[1] == ends[2] == pytest.approx(parameters / 2e5 + 64 * 0.3)


def test_two_parts_count_only_where_they_were_measured_to_pay() -> None:
    job = splitting(equal_job(4, 8))
    paid, unpaid, whole = (
        Costs(each).of(cut_of([1] * 4), [FAST] * 4, range(4))
        for each in (job, replace(job, splits_pay=False), equal_job(4, 8))
    )
    assert paid is not None
    assert unpaid is not None
    assert unpaid == whole
    assert paid.seconds < unpaid.seconds


def test_a_forward_pass_again_takes_a_third_more() -> None:
    rounds = [Costs(equal_job(1, 8, again=a)).of(((0, 1),), [FAST], [0]) for a in (False, True)]
    assert rounds[0] is not None
    assert rounds[1] is not None
    assert rounds[1].compute_s == pytest.approx(rounds[0].compute_s * 4 / 3)


def test_links_limit_a_middle_stage_which_sends_both() -> None:
    costs = Costs(equal_job(3, 100))
    slow = replace(FAST, up_bytes_per_s=750.0)
    assert costs.link_bytes(1, 2) == (1500.0, 1500.0)
    rates = costs.rates(slow, 1, 2, 3)
    assert rates is not None
    assert (rates.compute, rates.flow) == pytest.approx((1.0, 0.5))
    found = costs.of(cut_of([1, 1, 1]), [FAST, slow, FAST], [0, 1, 2])
    assert found is not None
    assert found.links_s == pytest.approx(100.0)


def test_few_microbatches_in_flight_wait_for_latency() -> None:
    costs = Costs(equal_job(2, 1000))
    far = replace(FAST, latency_s=10.0)
    near, found = (costs.of(cut_of([1, 1]), [m, m], [0, 1]) for m in (FAST, far))
    assert near is not None
    assert found is not None
    assert near.latency_s == 0
    # A passage takes 2 + 20 s, and 2.5 for each of two replicas are in flight.
    assert found.seconds - found.exchange_s == pytest.approx(1000 * 22 / 5)


def test_few_numbers_are_sent_three_ways_and_no_sums() -> None:
    """Places of 12 bits and values of 2, and two levels a chunk; R = 2 of four."""
    a_number = (208 * 14 / 8 + 4) / 4096
    sent, received = exchanged_bytes(4096, 4, 2, "local", 30, "topk-208")
    assert sent == received == pytest.approx(4096 * 1.5 * a_number / 30)
    in_zero = exchanged_bytes(4096, 4, 2, "zero", 30, "topk-208")  # `auto` looks at it
    assert in_zero == exchanged_bytes(4096, 4, 2, "zero", 30, "int4")


@pytest.mark.parametrize("mode", ["zero", "delayed", "local", "gossip"])
@pytest.mark.parametrize("codec", ["none", "int8", "topk-208"])
@pytest.mark.parametrize("num_muon", [0, 400])
def test_what_is_sent_is_received(mode: str, codec: str, num_muon: int) -> None:
    of = 1000, 4, 2, mode, 10, codec
    parts = [None] * 4 if mode == "gossip" else [0.1, 0.2, 0.3, 0.4]
    each = [exchanged_bytes(*of, part, num_muon) for part in parts]
    sent, received = map(sum, zip(*each, strict=True))
    assert sent == pytest.approx(received)
    assert sent == pytest.approx(4 * exchanged_bytes(*of, num_muon=num_muon)[0])


@pytest.mark.parametrize("mode", ["zero", "delayed", "local", "gossip"])
@pytest.mark.parametrize("num_muon", [0, 400])
def test_replicas_that_share_no_link_cross_all_that_they_exchange(mode: str, num_muon: int) -> None:
    parts = [0.1, 0.2, 0.3, 0.4]
    homes = [Home(1, part, has_key=True) for part in parts]
    each = [exchanged_bytes(1000, 4, 2, mode, 10, "int8", part, num_muon) for part in parts]
    crossing = crossing_bytes(1000, homes, 2, mode, 10, "int8", num_muon)
    for found, expected in zip(crossing, each, strict=True):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["zero", "local", "gossip"])
@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("replication", [1, 2, 3])
def test_what_leaves_homes_comes_to_homes(mode: str, has_key: bool, replication: int) -> None:
    homes = [Home(3, 0.5, has_key), Home(2, 0.3, has_key), Home(1, 0.2)]
    crossing = crossing_bytes(1000, homes, replication, mode, 10, "int8", 400)
    sent, received = map(sum, zip(*crossing, strict=True))
    assert sent == pytest.approx(received)
    assert crossing_bytes(1000, [Home(6, 1.0, has_key)], replication, mode, 10) == [(0.0, 0.0)]


def test_a_household_sends_a_quarter_of_what_four_machines_do() -> None:
    """In gradients, of fp32; `benchmarks/averaging.py --households` measures 8.40 and 2.10."""
    found = {
        has_key: crossing_bytes(1000, [Home(4, 0.5, has_key)] * 2, 2, "zero", 1)
        for has_key in (False, True)
    }
    sent = {has_key: sum(up for up, _ in homes) / 4000 for has_key, homes in found.items()}
    assert sent == pytest.approx({False: 8.0, True: 2.0})
    local = [crossing_bytes(1000, [Home(4, 0.5, k)] * 2, 2, "local", 10) for k in (False, True)]
    assert local[0] == local[1], "late contributions are kept by name"


@pytest.mark.parametrize(
    ("mode", "has_key", "simulated"),
    [("zero", False, 2.60), ("zero", True, 5.08), ("delayed", False, 3.79), ("delayed", True, 8.0)],
)
def test_houses_are_as_fast_as_simulated(mode: str, has_key: bool, simulated: float) -> None:
    """`benchmarks/simulated_links.py houses`."""
    job = replace(equal_job(1, 120, mode), layers=(Layer(1e9 / 3, 16 << 20, 0.0, 0.0),))
    job = replace(job, update=replace(job.update, codec="int8"))
    machines = [
        Machine(
            f"{i}", 1e9, 2.5e6 / 4, 12.5e6 / 4, 0.01, house=f"{i // 4}", sharing=4, has_key=has_key
        )
        for i in range(8)
    ]
    found = Costs(job).of(((0, 1),), machines, [0] * 8)
    assert found is not None
    assert 0.9 < 120 / found.seconds / simulated < 1.2


def test_a_stage_in_one_house_exchanges_inside_it() -> None:
    house = [replace(FAST, up_bytes_per_s=1e6, down_bytes_per_s=1e6, house="a")] * 4
    of = Costs(replace(equal_job(1, 8), layers=(Layer(1e9 / 3, 10**8, 0.0, 0.0),)))
    inside = of.of(((0, 1),), house, [0] * 4)
    assert inside is not None
    assert inside.exchange_s == pytest.approx(10**8 * 8 * 3 / 4 / 125e6 + 4 * 0.001)


@pytest.mark.parametrize(
    ("serves", "crossing", "simulated"),
    [((2, 3, 1, 0), 1, 15.55), ((0, 2, 1, 3), 3, 0.0), ((0, 3, 1, 2), 2, 0.0)],
)
def test_what_stays_in_a_house_crosses_no_link(
    serves: tuple[int, ...], crossing: int, simulated: float
) -> None:
    """Two houses of two, a stage each. Simulated with these layers, 64 samples a round in
    microbatches of 4, and 0.05 s of a device for each sample."""
    layer = Layer(0.05 / 3, 80_000, 131_072 * 257 / 256, 131_072 * 257 / 256)
    job = replace(equal_job(4, 16), layers=(layer,) * 4, microbatch=4, global_batch=64)
    houses = [
        Machine(f"{i}", 1.0, 2.5e6 / 2, 12.5e6 / 2, 0.03, house="ab"[i // 2], sharing=2)
        for i in range(4)
    ]
    costs, cut = Costs(job), cut_of([1] * 4)
    found = costs.of(cut, houses, serves)
    assert found is not None
    per_s = min(20.0, 2.5e6 / (layer.activation_bytes * crossing))
    assert 64 / (found.compute_s + found.links_s) == pytest.approx(per_s)
    if simulated:
        assert 0.9 < 64 / found.seconds / simulated < 1.1
    sent = [up for of_stage in costs.loads(cut, houses, serves) for _, up, _ in of_stage]
    assert sum(sent) == pytest.approx(2 * crossing * layer.activation_bytes)


@pytest.mark.parametrize(("mode", "part"), [("zero", 4), ("delayed", 4), ("local", 1)])
def test_steps_of_muon_are_divided_among_who_makes_them(mode: str, part: int) -> None:
    job = equal_job(2, 8, mode)
    layer = replace(job.layers[0], muon_parameters=10**5, muon_flops=6e9)
    costs = Costs(replace(job, layers=(layer, layer)))
    slow = replace(FAST, exact_flops_per_s=1e9)
    stage = costs.stage(0, 2, 1, [slow] * 4)
    assert stage is not None
    assert stage.update_s == pytest.approx(2 * 6 / part)


@pytest.mark.parametrize("mode", ["zero", "delayed", "local"])
def test_who_multiplies_slowly_makes_few_steps_of_muon(mode: str) -> None:
    """One sends the results of as many numbers in the time of both that the others do."""
    job = equal_job(2, 8, mode)
    layer = replace(job.layers[0], muon_parameters=10**5, muon_flops=6e9)
    costs = Costs(replace(job, layers=(layer, layer)))
    quick = replace(FAST, up_bytes_per_s=1e7, exact_flops_per_s=1e13)
    slow = replace(quick, exact_flops_per_s=1e9)
    stage = costs.stage(0, 2, 1, [quick, slow, quick, quick])
    assert stage is not None
    if mode == "local":
        assert stage.update_s == pytest.approx(2 * 6)
        return
    each = 1.2e10 / costs.parameters(0, 2) / 4 / 3
    weights = [1 / (1e-7 + each / flops) for flops in (1e13, 1e9, 1e13, 1e13)]
    assert stage.update_s == pytest.approx(12 * weights[1] / sum(weights))
    assert stage.update_s < 3 / 4, "even parts would be 3 s each"


def test_an_exchange_waits_for_the_slowest_link_and_delayed_hides_it() -> None:
    slow = replace(FAST, up_bytes_per_s=1e6)
    zero, delayed, local = (
        Costs(equal_job(1, 100, mode)).of(((0, 1),), [FAST, slow], [0, 0])
        for mode in ("zero", "delayed", "local")
    )
    assert zero is not None
    assert delayed is not None
    assert local is not None
    assert zero.exchange_s == pytest.approx(4.0, rel=0.01), "its whole gradient, once"
    assert delayed.exchange_s == 0
    assert local.exchange_s == pytest.approx(zero.exchange_s / 10)


@pytest.mark.parametrize("mode", ["delayed", "auto"])
def test_rounds_that_are_fed_beside_each_other_do_not_fill_and_drain(mode: str) -> None:
    found = Costs(equal_job(4, 16, mode)).of(cut_of([1] * 4), [FAST] * 4, range(4))
    assert found is not None
    assert found.seconds == pytest.approx(16)
    assert found.bubble_s == 0


def test_a_round_ends_with_the_slowest_replica_of_a_stage() -> None:
    slow = replace(FAST, flops_per_s=FAST.flops_per_s / 4)
    found = Costs(equal_job(1, 100)).of(((0, 1),), [FAST, slow], [0, 0])
    assert found is not None
    assert found.compute_s == pytest.approx(100 / 1.25)
    assert found.bubble_s == pytest.approx(4 / 2), "half of its passage"


def test_costs_are_the_same_for_equal_machines_of_any_identity() -> None:
    rng = random.Random(0)
    costs = Costs(equal_job(2, 8))
    for _ in range(20):
        speed = rng.uniform(1e8, 1e9)
        one = costs.rates(replace(FAST, flops_per_s=speed), 0, 1, 2)
        assert one is not None
        assert one.compute == pytest.approx(speed / 1e9)


def test_layers_with_nothing_to_train_are_no_stage() -> None:
    job = equal_job(3, 8)
    frozen = replace(job.layers[0], parameters=0)
    costs = Costs(replace(job, layers=(frozen, *job.layers[1:])))
    assert costs.held(0, 1, 2, FAST) is None
    assert costs.held(0, 2, 2, FAST) is not None
    plan = best_plan(costs, [FAST] * 3)
    assert plan is not None
    assert all(costs.parameters(first, end) for first, end in plan.cut)


def test_cards_that_wait_for_each_other_and_weights_that_come_cost_time() -> None:
    """A sample takes a second on the whole machine."""
    job = equal_job(1, 8)
    plain = Held(0, 0, "keep", 4, computes_again=False)

    def seconds(held: Held) -> float:
        costs = Costs(replace(job, memory=lambda first, end, num_stages, memory: held))
        rates = costs.rates(FAST, 0, 1, 1)
        assert rates is not None
        return 1 / rates.compute

    assert seconds(plain) == pytest.approx(1.0)
    assert seconds(replace(plain, part=0.5)) == pytest.approx(2.0)
    assert seconds(replace(plain, between_s=0.25)) == pytest.approx(1.25), "nobody computes"
    assert seconds(replace(plain, moved_s=0.5)) == pytest.approx(1.0), "while one computes"
    assert seconds(replace(plain, moved_s=3.0)) == pytest.approx(3.0)


def uplinks(fast: int, slow: int, majority: int = LEAST_QUORUM, local_steps: int = 10) -> Round:
    """A stage of 16 million parameters in `int8`: a second a sample, 20 Mbit/s up, or a tenth."""
    job = Job(
        layers=(Layer(1 / 3, 16 << 20, 0.0, 0.0),),
        tokens=1,
        microbatch=1,
        global_batch=60,
        update=Update("local", "int8", 2, local_steps, majority),
        memory=lambda first, end, num_stages, memory: Held(0, 0, "keep", 4, computes_again=False),
    )
    link = Machine("fast", 1.0, 2.5e6, 12.5e6, 0.02)
    poor = replace(link, name="slow", up_bytes_per_s=2.5e5)
    found = Costs(job).of(((0, 1),), [link] * fast + [poor] * slow, [0] * (fast + slow))
    assert found is not None
    return found


@pytest.mark.parametrize(("fast", "slow", "simulated"), [(5, 0, 4.22), (5, 1, 4.39), (6, 0, 4.75)])
def test_local_waits_for_no_slow_uplink(fast: int, slow: int, simulated: float) -> None:
    """Samples/s beside those that `benchmarks/simulated_links.py slow` has."""
    assert uplinks(fast, slow).tokens_per_s == pytest.approx(simulated, rel=0.06)


def test_an_exchange_lasts_as_long_again_as_its_quorum_where_somebody_is_late() -> None:
    """Contributions go up in 5.5 s of five, sums and results as primaries in 5.5 and 1.4 s more."""
    alone, beside = (10 * uplinks(5, n).exchange_s for n in (0, 1))
    assert alone == pytest.approx(11.1, abs=0.1)
    assert beside == pytest.approx(18.1, abs=0.1)
    half = [1.0, 1.0, 1.0, 2.0]
    assert waited_s(half, [1.0] * 4, LEAST_QUORUM) == 2.0, "it is in time"
    assert waited_s([1.0, 1.0, 1.0, 9.0], [1.0] * 4, LEAST_QUORUM) == 2.0
    assert waited_s([1.0, 1.0, 1.0, 9.0], [1.0] * 4, 4) == 9.0, "a rule needs all four"
    assert waited_s([1.0, 1.0, 9.0], [1.0, 1.0, 2.0], LEAST_QUORUM) == 9.0, "half of the tokens"
    assert waited_s([1.0, 9.0], [1.0, 1.0], LEAST_QUORUM) == 9.0, "of two both are needed"


def test_a_robust_rule_waits_for_its_majority() -> None:
    """Three and a slow one are four, and of three every rule is the mean."""
    assert uplinks(3, 1, MIN_CONTRIBUTORS).exchange_s > 3 * uplinks(3, 1).exchange_s
    assert uplinks(4, 1, MIN_CONTRIBUTORS) == uplinks(4, 1)
    assert uplinks(2, 1, MIN_CONTRIBUTORS) == uplinks(2, 1)


@pytest.mark.parametrize(("local_steps", "part"), [(10, 0.50), (5, 0.08), (4, 0.39), (3, 0.21)])
def test_a_late_machine_works_until_the_exchange_after_its_upload(
    local_steps: int, part: float
) -> None:
    """It is away for 58 s, and a round takes 12: of fewer than five it misses an exchange."""
    assert uplinks(5, 1, local_steps=local_steps).compute_s == pytest.approx(
        60 / (5 + part), rel=0.005
    )


def test_what_is_later_than_three_exchanges_adds_nothing() -> None:
    parts = [Late(FAST, Rates(1.0, 1.0), behind_s).at_work(10.0) for behind_s in (29.0, 31.0)]
    assert parts == [pytest.approx(1 / 30), 0.0]
