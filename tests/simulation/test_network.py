"""The simulated network."""

from __future__ import annotations

import random
from statistics import median

import pytest

from swarmnet.simulation.network import (
    HOME_LATENCY_S,
    HOME_UP_BYTES_PER_S,
    SMALL_BYTES,
    Link,
    SimulatedNetwork,
    home_link,
)

BIG = 1_000_000


def network(**options: float) -> SimulatedNetwork:
    net = SimulatedNetwork(random.Random(1), jitter=0.0, **options)  # type: ignore[arg-type]
    for name, up, down in (("a", 1e6, 1e7), ("b", 1e6, 1e7), ("c", 1e6, 2e6)):
        net.add(name, Link(up, down, 0.01))
    return net


def test_a_message_takes_its_bytes_over_the_slower_end_and_the_latency() -> None:
    assert network().delivery_s("a", "b", BIG, 0.0) == pytest.approx(1.02)


def test_large_messages_queue_for_the_upload() -> None:
    net = network()
    assert net.delivery_s("a", "b", BIG, 0.0) == pytest.approx(1.02)
    assert net.delivery_s("a", "c", BIG, 0.0) == pytest.approx(2.02)
    assert net.delivery_s("a", "b", BIG, 10.0) == pytest.approx(1.02)


def test_large_messages_queue_for_the_download() -> None:
    net = network()
    net.add("d", Link(1e7, 1e7, 0.01))
    net.add("e", Link(1e7, 1e7, 0.01))
    first = net.delivery_s("d", "c", BIG, 0.0)
    second = net.delivery_s("e", "c", BIG, 0.0)
    assert first == pytest.approx(0.52)
    assert second == pytest.approx(1.02, abs=0.03)


def test_pairs_with_links_of_their_own_do_not_wait_for_others() -> None:
    net = network(is_paired=True)
    for target in ("b", "c"):
        assert net.delivery_s("a", target, BIG, 0.0) == pytest.approx(1.02)
    assert net.delivery_s("a", "b", BIG, 0.0) == pytest.approx(2.02)
    assert net.upload_queue("a", 0.0) == 2 * BIG
    assert net.queued_s("b", 0.0) > 0.0
    assert net.delivery_s("b", "a", BIG, 0.0) == pytest.approx(1.02)


def houses() -> SimulatedNetwork:
    """Peers a and b are of one house, c and d of another."""
    net = network()
    for name, house in (("a", "red"), ("b", "red"), ("c", "blue"), ("d", "blue")):
        net.add(name, Link(1e6, 2e6, 0.01), house)
    return net


def test_peers_of_a_house_wait_for_each_other_at_its_uplink() -> None:
    net = houses()
    assert net.delivery_s("a", "c", BIG, 0.0) == pytest.approx(1.02)
    assert net.upload_queue("b", 0.0) == BIG
    assert net.delivery_s("b", "d", BIG, 0.0) == pytest.approx(2.02)
    assert net.delivery_s("c", "a", BIG, 0.0) == pytest.approx(1.02), "the other house has its own"


def test_peers_of_a_house_wait_for_each_other_at_its_downlink() -> None:
    net = houses()
    for name in ("e", "f"):
        net.add(name, Link(1e7, 1e7, 0.01))
    assert net.delivery_s("e", "c", BIG, 0.0) == pytest.approx(0.52)
    assert net.delivery_s("f", "d", BIG, 0.0) == pytest.approx(1.02, abs=0.03)
    assert net.queued_s("c", 0.0) == pytest.approx(net.queued_s("d", 0.0))


def test_what_stays_in_a_house_crosses_neither_way() -> None:
    net = houses()
    inside = net.delivery_s("a", "b", BIG, 0.0)
    assert inside is not None
    assert inside < 0.02
    assert net.upload_queue("a", 0.0) == 0
    assert net.delivery_s("a", "c", BIG, 0.0) == pytest.approx(1.02)
    again = net.delivery_s("b", "a", BIG, 0.0)
    assert again is not None
    assert again < 0.02, "and does not wait for what leaves the house"


def test_a_house_has_one_link() -> None:
    net = houses()
    net.add("b", Link(1e5, 1e6, 0.01), "red")
    assert net.delivery_s("a", "c", BIG, 0.0) == pytest.approx(10.02)


def test_what_waits_for_an_uplink_holds_nobody_up_at_the_receiver() -> None:
    net = network()
    for _ in range(20):
        net.delivery_s("a", "b", BIG, 0.0)
    assert net.delivery_s("c", "b", BIG, 3.0) == pytest.approx(1.02, abs=0.3)


def test_a_small_message_does_not_wait_behind_a_tensor() -> None:
    net = network()
    net.delivery_s("a", "b", 100 * BIG, 0.0)
    small = net.delivery_s("a", "b", SMALL_BYTES // 64, 0.0)
    assert small is not None
    assert small < 0.03


def test_what_is_said_while_the_way_is_closed_arrives_after_it_opened() -> None:
    net = network()
    net.block("a", "b", until=5.0)
    held = net.delivery_s("a", "b", 100, 1.0)
    assert held is not None
    assert 4.0 <= held <= 8.0
    back = net.delivery_s("b", "a", 100, 1.0)
    assert back is not None
    assert back < 0.1
    after = net.delivery_s("a", "b", 100, 5.5)
    assert after is not None
    assert after < 0.1


def test_loss_delays_some_messages_and_loses_none() -> None:
    net = network(loss=0.1)
    delays = [net.delivery_s("a", "b", 100, float(i)) for i in range(2000)]
    late = [d for d in delays if d is not None and d > 0.2]
    assert len(delays) == 2000
    assert None not in delays
    assert 140 < len(late) < 260


def test_home_links_have_the_medians_that_they_promise() -> None:
    rng = random.Random(3)
    links = [home_link(rng) for _ in range(2000)]
    assert median(x.up_bytes_per_s for x in links) == pytest.approx(HOME_UP_BYTES_PER_S, rel=0.1)
    assert median(x.latency_s for x in links) == pytest.approx(HOME_LATENCY_S / 2, rel=0.1)
