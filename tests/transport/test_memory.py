"""The hub of the memory transport: faults, and time that is the loop's."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmnet.errors import ChannelClosed, DeadlineExceeded, Unreachable
from swarmnet.simulation.clock import run
from swarmnet.simulation.network import Link, SimulatedNetwork
from swarmnet.transport.base import Request
from swarmnet.transport.memory import UNREACHABLE_AFTER_S, EvenNetwork, MemoryHub, MemoryTransport
from swarmnet.wire import Array, Message

DELAY_S = 0.25


async def echo(request: Request) -> Message:
    return request.message


def peers(hub: MemoryHub) -> tuple[MemoryTransport, MemoryTransport]:
    a, b = hub.transport("a"), hub.transport("b")
    for one in (a, b):
        one.handle("echo", echo)
    return a, b


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_message_takes_what_the_network_says() -> None:
    class BySize:
        def delivery_s(self, source: str, target: str, num_bytes: int, now: float) -> float:
            return num_bytes / 1e6 if source == "a" else 1.0

    async def main() -> None:
        a, _b = peers(MemoryHub(network=BySize()))
        await a.call(
            "b", "echo", Message(None, (Array("uint8", (10**6,), bytes(10**6)),)), timeout_s=10
        )
        assert now() == pytest.approx(2.0, abs=0.001)

    run(main())


def test_a_lost_message_fails_at_the_deadline() -> None:
    class Lossy:
        def delivery_s(self, source: str, target: str, num_bytes: int, now: float) -> float | None:
            return None if target == "a" else 0.1

    async def main() -> None:
        a, _ = peers(MemoryHub(network=Lossy()))
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "echo", Message(), timeout_s=3.0)
        assert now() == 3.0

    run(main())


def test_a_frozen_peer_does_nothing_until_it_is_thawed() -> None:
    async def main() -> None:
        hub = MemoryHub(network=EvenNetwork(DELAY_S))
        a, b = peers(hub)
        served: list[float] = []

        async def handler(request: Request) -> Message:
            served.append(now())
            return Message()

        b.handle("m", handler)
        hub.freeze("b")
        call = asyncio.create_task(a.call("b", "m", Message(), timeout_s=60))
        b.notify("a", "echo", Message())  # waits in b
        await asyncio.sleep(5)
        assert served == []
        assert "echo" not in a.traffic.received_bytes
        hub.thaw("b")
        await call
        assert served == [5.0]
        assert now() == 5.0 + DELAY_S
        assert "echo" in a.traffic.received_bytes

    run(main())


def test_a_frozen_peer_hears_of_a_death_when_it_wakes() -> None:
    async def main() -> None:
        hub = MemoryHub()
        a, _b = peers(hub)
        lost: list[str] = []
        a.on_disconnected(lost.append)
        await a.call("b", "echo", Message(), timeout_s=1)
        hub.freeze("a")
        hub.kill("b")
        await asyncio.sleep(1)
        assert lost == []
        hub.thaw("a")
        await asyncio.sleep(0.1)
        assert lost == ["b"]

    run(main())


def test_a_partition_is_silent_on_open_channels_and_unreachable_on_new_ones() -> None:
    async def main() -> None:
        hub = MemoryHub()
        a, _b = peers(hub)
        c = hub.transport("c")
        await a.call("b", "echo", Message(), timeout_s=1)
        hub.partition("a", "b")
        hub.partition("b", "c")
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "echo", Message(), timeout_s=1)
        assert a.connected() == ["b"]
        before = now()
        with pytest.raises(Unreachable):
            await c.call("b", "echo", Message(), timeout_s=60)
        assert now() - before == pytest.approx(UNREACHABLE_AFTER_S)
        with pytest.raises(DeadlineExceeded):
            await c.dial("/memory/p2p/b", timeout_s=1)
        hub.heal("b", "a")
        assert (await a.call("b", "echo", Message(1), timeout_s=1)).body == 1

    run(main())


def test_a_peer_that_comes_back_is_another() -> None:
    async def main() -> None:
        hub = MemoryHub(network=EvenNetwork(DELAY_S))
        a, b = peers(hub)
        call = asyncio.create_task(a.call("b", "echo", Message(), timeout_s=60))
        await asyncio.sleep(DELAY_S / 2)
        hub.kill("b")
        again = hub.transport("b")
        served: list[Request] = []

        async def handler(request: Request) -> Message:
            served.append(request)
            return Message()

        again.handle("echo", handler)
        with pytest.raises(ChannelClosed):
            await call
        await asyncio.sleep(10)
        assert served == []  # the old request died with the old peer
        await b.close()  # the old endpoint; the new one stays
        await a.call("b", "echo", Message(), timeout_s=1)
        assert len(served) == 1

    run(main())


def test_by_reference_for_large_simulations() -> None:
    async def main() -> None:
        hub = MemoryHub(copy=False)
        a, _b = peers(hub)
        body, data = {"k": object()}, bytearray(8)
        reply = await a.call("b", "echo", Message(body, (Array("uint8", (8,), data),)), timeout_s=1)
        assert reply.body is body
        assert reply.arrays[0].data is data

    run(main())


def test_the_same_run_twice_is_the_same() -> None:
    def once() -> list[tuple[float, str]]:
        log: list[tuple[float, str]] = []

        async def main() -> None:
            hub = MemoryHub()
            transports = [hub.transport(str(n)) for n in range(5)]
            for one in transports:
                one.on_connected(lambda p, me=one.peer_id: log.append((now(), f"{me}+{p}")))
                one.on_disconnected(lambda p, me=one.peer_id: log.append((now(), f"{me}-{p}")))
            for one in transports:
                for other in transports:
                    one.notify(other.peer_id, "x", Message())
            await asyncio.sleep(1)
            hub.kill("3")
            await asyncio.sleep(1)

        run(main())
        return log

    first = once()
    assert first == once()
    assert [line for _, line in first[-4:]] == ["0-3", "1-3", "2-3", "4-3"]


def test_the_background_leaves_the_uplink_to_others() -> None:
    """A reply that takes three seconds alone, and half a second of other messages in its midst."""
    size, rate = 3 * 10**6, 1e6

    async def main() -> None:
        network = SimulatedNetwork(random.Random(0), jitter=0.0)
        for name in "ab":
            network.add(name, Link(rate, 1e9, 0.01))
        a, b = peers(MemoryHub(network=network))
        given = Array("uint8", (size,), bytes(size))

        async def give(request: Request) -> Message:
            return Message(None, (given,), is_background=True)

        b.handle("give", give)
        loop = asyncio.get_running_loop()
        coming = loop.create_task(a.call("b", "give", Message(), timeout_s=60))
        unwanted = loop.create_task(a.call("b", "give", Message(), timeout_s=60))
        await asyncio.sleep(1.0)
        unwanted.cancel()
        began = now()
        half = Array("uint8", (size // 6,), bytes(size // 6))
        await b.call("a", "echo", Message(None, (half,)), timeout_s=10)
        assert now() - began < 2 * 0.5 + 0.3, "behind one part, and there and back"
        await coming
        assert now() == pytest.approx(3.5, abs=0.2)
        assert b.traffic.queued_bytes() <= 10**5
        await asyncio.sleep(5.0)
        sent = network.num_bytes
        assert sent == pytest.approx(size + 2 * half.num_bytes, rel=0.01), "one reply, and the echo"

    run(main())
