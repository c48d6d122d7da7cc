"""The upload cap: bulk of all channels shares one rate, in turn; small messages do not wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from swarmnet.protocol.leftovers import LEAST_SHARE
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.transport.base import Request
from swarmnet.transport.calls.writer import BATCH_BYTES
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.frames import PART_BYTES
from swarmnet.transport.pacing import Pacer
from swarmnet.wire import Array, Message
from tests.transport.loopback import LoopbackHub

RATE = 1e6
PIECE = 100_000


@dataclass(eq=False)
class Link:
    """A channel that always has `left` bytes of bulk to send."""

    pacer: Pacer
    left: int
    sent_at: list[float] = field(default_factory=list)

    def pump(self) -> None:
        while self.left and self.pacer.may_send():
            self.left -= PIECE
            self.sent_at.append(asyncio.get_running_loop().time())
            self.pacer.sent(PIECE)
        if self.left:
            self.pacer.wait(self)


@dataclass(eq=False)
class Behind:
    """A channel that always has a part in the background to send."""

    pacer: Pacer
    sent_at: list[float] = field(default_factory=list)

    def pump(self) -> None:
        while self.pacer.may_send_background():
            self.sent_at.append(asyncio.get_running_loop().time())
            self.pacer.sent(PIECE, is_background=True)
        self.pacer.wait_background(self)


def test_the_background_takes_what_others_leave_and_its_channels_take_turns() -> None:
    """Half of the link is taken, by other channels; then all of it, and more waits."""

    async def main() -> None:
        queued = [0]
        pacer = Pacer(queued_bytes=lambda: queued[0])
        pacer.limit(RATE)
        behind = [Behind(pacer) for _ in range(2)]
        for channel in behind:
            channel.pump()
        for _ in range(40):
            pacer.sent(PIECE)
            await asyncio.sleep(2 * PIECE / RATE)
        counts = [len(channel.sent_at) for channel in behind]
        assert sum(counts) == pytest.approx(40, abs=5)
        assert abs(counts[0] - counts[1]) <= 2
        queued[0] = 10 * PIECE
        for _ in range(40):
            pacer.sent(PIECE // 2)
            await asyncio.sleep(PIECE / RATE)
        more = sum(len(channel.sent_at) for channel in behind) - sum(counts)
        assert more == pytest.approx(40 * LEAST_SHARE, abs=2)
        pacer.forget(behind[0])
        before = len(behind[0].sent_at)
        queued[0] = 0
        await asyncio.sleep(2.0)
        assert len(behind[0].sent_at) == before
        pacer.close()

    run_virtual(main())


def test_under_a_cap_the_background_has_its_share_beside_bulk_without_end() -> None:
    async def main() -> None:
        pacer = Pacer(queued_bytes=lambda: bulk.left)
        bulk, behind = Link(pacer, 10_000 * PIECE), Behind(pacer)
        pacer.limit(RATE)
        bulk.pump()
        behind.pump()
        await asyncio.sleep(20.0)
        sent = len(bulk.sent_at), len(behind.sent_at)
        assert sum(sent) * PIECE == pytest.approx(20.0 * RATE, rel=0.1)
        assert sent[1] * PIECE == pytest.approx(LEAST_SHARE * 20.0 * RATE, rel=0.25)
        pacer.close()

    run_virtual(main())


def test_channels_share_the_rate_fairly() -> None:
    async def main() -> None:
        pacer = Pacer()
        pacer.limit(RATE)
        links = [Link(pacer, 20 * PIECE) for _ in range(3)]
        began = asyncio.get_running_loop().time()
        for link in links:
            link.pump()
        await asyncio.sleep(3.0)
        counts = [len(link.sent_at) for link in links]
        assert max(counts) - min(counts) <= 2, counts
        assert sum(counts) * PIECE == pytest.approx(3.0 * RATE, rel=0.1)
        await asyncio.sleep(10.0)
        took = max(link.sent_at[-1] for link in links) - began
        assert took == pytest.approx(59 * PIECE / RATE, rel=0.02)
        pacer.close()

    run_virtual(main())


def test_small_messages_are_paid_for_by_bulk() -> None:
    async def main() -> None:
        pacer = Pacer()
        pacer.limit(RATE)
        pacer.sent(PIECE * 10)  # a second's worth
        link = Link(pacer, PIECE)
        loop = asyncio.get_running_loop()
        began = loop.time()
        link.pump()
        assert not link.sent_at
        await asyncio.sleep(2.0)
        assert link.sent_at == [pytest.approx(began + 1.0, abs=0.01)]

    run_virtual(main())


def test_taking_the_cap_away_lets_everything_go() -> None:
    async def main() -> None:
        pacer = Pacer()
        pacer.limit(1e3)
        links = [Link(pacer, 20 * PIECE) for _ in range(2)]
        for link in links:
            link.pump()
        await asyncio.sleep(1.0)
        assert all(link.left for link in links)
        pacer.limit(None)
        assert not any(link.left for link in links)

    run_virtual(main())


def test_who_is_gone_is_not_waited_for() -> None:
    async def main() -> None:
        pacer = Pacer()
        pacer.limit(RATE)
        gone, there = Link(pacer, 50 * PIECE), Link(pacer, 5 * PIECE)
        gone.pump()
        there.pump()
        pacer.forget(gone)
        await asyncio.sleep(1.0)
        assert not there.left
        assert len(gone.sent_at) <= 1
        pacer.close()

    run_virtual(main())


def test_the_bulk_of_a_real_channel_keeps_to_the_cap_and_small_calls_do_not_wait() -> None:
    size, rate = 1_500_000, 3e6

    async def main() -> None:
        async with asyncio.timeout(60):
            hub = LoopbackHub()
            a, b = (ChannelTransport(hub.carrier(name)) for name in ("a", "b"))

            async def echo(request: Request) -> Message:
                return Message(request.message.body)

            for transport in (a, b):
                await transport.start()
                transport.handle("echo", echo)
            a.limit_upload(rate)
            loop = asyncio.get_running_loop()
            began = loop.time()
            arrays = (Array("uint8", (size,), bytes(size)),)
            bulk = loop.create_task(a.call("b", "echo", Message(1, arrays), timeout_s=30.0))
            for i in range(10):
                reply = await a.call("b", "echo", Message(i), timeout_s=30.0)
                assert reply.body == i
            assert not bulk.done(), "ten round trips take less than half a second's bulk"
            await bulk
            # What is written last need not have been paid for.
            assert loop.time() - began > (size - BATCH_BYTES - PART_BYTES) / rate
            assert a.traffic.upload.published(loop.time()) == pytest.approx(rate, rel=0.1)
            a.limit_upload(None)
            await a.call("b", "echo", Message(1, arrays), timeout_s=30.0)
            assert a.traffic.upload.published(loop.time()) == 0.0
            for transport in (a, b):
                await transport.close()

    asyncio.run(main())
