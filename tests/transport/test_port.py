"""What every transport does alike: over memory, and over real frames on socket pairs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from swarmnet.errors import (
    AddressError,
    Busy,
    ChannelClosed,
    DeadlineExceeded,
    NotReady,
    ProtocolViolation,
    Redirect,
    Refused,
    RemoteError,
    Stale,
    TransportError,
    Unreachable,
    Unsupported,
)
from swarmnet.transport.base import Envelope, Request, Transport
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import MAX_BODY_BYTES, Array, Message
from tests.transport import loopback
from tests.transport.loopback import LoopbackHub
from tests.transport.streams import PATIENCE_S, identity

SOON_S = 0.05
"""A deadline that is meant to pass."""


class Memory:
    def __init__(self) -> None:
        self.hub = MemoryHub()

    async def transport(self, peer_id: str) -> Transport:
        return self.hub.transport(peer_id)

    async def kill(self, transport: Transport) -> None:
        self.hub.kill(transport.peer_id)


class Loopback:
    def __init__(self) -> None:
        self.hub = LoopbackHub()

    async def transport(self, peer_id: str) -> Transport:
        transport = ChannelTransport(self.hub.carrier(peer_id), agent="test")
        await transport.start()
        return transport

    async def kill(self, transport: Transport) -> None:
        await self.hub.carriers[transport.peer_id].close()


@dataclass
class World:
    kind: Memory | Loopback
    a: Transport
    b: Transport

    async def call(self, method: str, body: Any = None, *arrays: Array, **options: Any) -> Message:
        options = {"timeout_s": PATIENCE_S, **options}
        return await self.a.call(self.b.peer_id, method, Message(body, arrays), **options)


Scenario = Callable[[World], Any]


@pytest.fixture(params=[Memory, Loopback])
def play(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Runs a scenario with two peers, and looks for tasks that are left."""

    @contextlib.asynccontextmanager
    async def world() -> AsyncIterator[World]:
        kind = request.param()
        a, b = [await kind.transport(identity(n).peer_id) for n in (1, 2)]
        try:
            yield World(kind, a, b)
        finally:
            await a.close()
            await b.close()
            await a.close()  # again: nothing happens

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(2 * PATIENCE_S), world() as w:
                await scenario(w)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        loopback.run(main())

    return run


async def echo(request: Request) -> Message:
    return request.message


def raising(error: Exception) -> Callable[[Request], Any]:
    async def handler(request: Request) -> Message:
        raise error

    return handler


def test_body_and_arrays_arrive_as_plain_values(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        seen: list[Request] = []

        async def handler(request: Request) -> Message:
            seen.append(request)
            return Message((1, "two", b"3", None), request.message.arrays[:1])

        w.b.handle("m", handler)
        data = bytearray(range(24))
        arrays = (Array("float32", (2, 3), data), Array("int8", (0, 5), b""))
        reply = await w.call("m", {"k": (1, 2)}, *arrays)
        assert reply.body == [1, "two", b"3", None]
        assert [(a.dtype, a.shape, bytes(a.data)) for a in reply.arrays] == [
            ("float32", (2, 3), bytes(range(24)))
        ]
        (request,) = seen
        assert (request.remote, request.method) == (w.a.peer_id, "m")
        assert request.message.body == {"k": [1, 2]}
        data[0] = 99  # passed by value
        assert bytes(request.message.arrays[0].data)[0] == 0

    play(scenario)


def test_errors_travel_with_code_text_and_details(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        for error in (
            Busy("full", backlog_s=2.5),
            Stale("over", round=7),
            Redirect("there", peer_id="x"),
            Refused("no"),
        ):
            w.b.handle("m", raising(error))
            with pytest.raises(type(error), match=str(error)) as caught:
                await w.call("m")
            assert type(caught.value) is type(error)
            assert caught.value.details == error.details
        w.b.handle("m", raising(ProtocolViolation("bad shape")))
        with pytest.raises(Refused, match="bad shape"):
            await w.call("m")
        w.b.handle("m", raising(DeadlineExceeded("further down")))
        with pytest.raises(RemoteError, match="DeadlineExceeded: further down"):
            await w.call("m")
        with pytest.raises(NotReady, match="nothing is not served"):
            await w.call("nothing")

    play(scenario)


class Knows:
    """A gate that knows some methods, and lets in everybody."""

    def __init__(self, *methods: str) -> None:
        self.methods = methods

    def knows(self, method: str) -> bool:
        return method in self.methods

    def has_standing(self, machine: str) -> bool:
        return True

    def check(self, envelope: Envelope) -> None:
        assert envelope.method in self.methods

    def enter(self, envelope: Envelope, body: Any) -> Any:
        assert envelope.method in self.methods


def test_who_calls_a_method_that_nobody_knows_hears_that_no_waiting_helps(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(w: World) -> None:
        with pytest.raises(NotReady):  # in no run yet, it cannot say what it will know there
            await w.call("later")
        w.b.guard(Knows("served", "later"))
        w.b.handle("served", echo)
        await w.call("served")
        with pytest.raises(NotReady, match="later is not served"):
            await w.call("later")
        arrays = (Array("uint8", (3,), b"123"),)
        for body, sent in ((None, ()), ({"k": 1}, arrays)):
            with pytest.raises(Unsupported, match="of-2030 is no method here"):
                await w.call("of-2030", body, *sent)
        w.a.notify(w.b.peer_id, "of-2030", Message())
        await w.call("served")

    play(scenario)


def test_a_bug_in_a_handler_is_logged_there_and_told_here(
    play: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(w: World) -> None:
        w.b.handle("m", raising(KeyError("oops")))
        with pytest.raises(RemoteError, match="KeyError: 'oops'"):
            await w.call("m")
        w.b.handle("m", raising(Busy("x", why=object())))  # details that cannot travel
        with pytest.raises(Busy, match="x"):
            await w.call("m")
        w.b.handle("m", echo)
        assert (await w.call("m", 1)).body == 1

    play(scenario)
    assert "m failed" in caplog.text


def test_what_cannot_travel_fails_at_the_sender(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        w.b.handle("m", echo)
        for message in (
            Message(bytes(MAX_BODY_BYTES + 1)),
            Message(object()),
            Message(None, (Array("uint8", (5,), b"1234"),)),
        ):
            with pytest.raises(ProtocolViolation):
                await w.a.call(w.b.peer_id, "m", message, timeout_s=PATIENCE_S)
            w.a.notify(w.b.peer_id, "m", message)  # best effort: does not raise
        w.a.notify(w.b.peer_id, "m", Message(None, (Array("uint8", (1,), b"1"),)))
        assert (await w.call("m", 1)).body == 1  # nothing was lost by it

        async def too_much(request: Request) -> Message:
            request.progress(Message(object()))
            return Message(bytes(MAX_BODY_BYTES + 1))

        w.b.handle("m", too_much)
        with pytest.raises(Refused, match="at most"):
            await w.call("m")

    play(scenario)


def test_progress_comes_before_the_reply(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        async def handler(request: Request) -> Message:
            for number in range(3):
                request.progress(Message(number))
            return Message("done")

        w.b.handle("m", handler)
        heard: list[Any] = []
        reply = await w.call("m", on_progress=lambda note: heard.append(note.body))
        assert (heard, reply.body) == ([0, 1, 2], "done")

        def broken(note: Message) -> None:
            raise ValueError("the listener's own bug")

        assert (await w.call("m", on_progress=broken)).body == "done"

        def refuses(note: Message) -> None:
            raise ProtocolViolation("no progress of such a call")

        with pytest.raises(ProtocolViolation, match="no progress of such a call"):
            await w.call("m", on_progress=refuses)
        assert (await w.call("m")).body == "done"

    play(scenario)


def test_a_call_ends_at_its_deadline_and_the_handler_runs_on(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(w: World) -> None:
        go, done = asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Message:
            await go.wait()
            request.progress(Message("late"))
            done.set()
            return Message("late")

        w.b.handle("slow", slow)
        w.b.handle("m", echo)
        with pytest.raises(DeadlineExceeded, match=r"slow: .* did not answer within 0\.1 s"):
            await w.call("slow", timeout_s=SOON_S)
        go.set()
        await done.wait()
        assert (await w.call("m", 5)).body == 5

    play(scenario)


def test_a_cancelled_call_is_over_at_once(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        entered, never = asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Message:
            entered.set()
            await never.wait()
            return Message()

        w.b.handle("slow", slow)
        w.b.handle("m", echo)
        task = asyncio.create_task(w.call("slow"))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await w.call("m", 5)).body == 5

    play(scenario)


@pytest.mark.parametrize("is_killed", [False, True])
def test_work_that_is_for_its_caller_alone_ends_with_it(
    play: Callable[[Scenario], None], is_killed: bool
) -> None:
    async def scenario(w: World) -> None:
        entered, left = asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Message:
            entered.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                left.set()
            raise AssertionError

        w.b.handle("slow", slow, ends_with_caller=True)
        task = asyncio.create_task(w.call("slow"))
        await entered.wait()
        if is_killed:
            await w.kind.kill(w.a)
        else:
            task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await left.wait()
        await asyncio.gather(task, return_exceptions=True)

    play(scenario)


def test_a_peer_that_is_not_there(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        missing = identity(9).peer_id
        with pytest.raises(Unreachable):
            await w.a.call(missing, "m", Message(), timeout_s=PATIENCE_S)
        w.a.notify(missing, "m", Message())
        with pytest.raises(Unreachable):
            await w.a.dial(f"/ip4/127.0.0.1/tcp/1/p2p/{missing}")
        for address in ("", "nonsense", "/ip4/127.0.0.1/tcp/1", "/x/p2p/", w.a.addresses()[0]):
            with pytest.raises(AddressError):
                await w.a.dial(address)

    play(scenario)


def test_a_killed_peer_fails_open_calls_and_is_unreachable_afterwards(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(w: World) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        w.a.on_connected(lambda peer_id: heard.put_nowait("+" + peer_id))
        w.a.on_disconnected(lambda peer_id: heard.put_nowait("-" + peer_id))
        entered = asyncio.Event()

        async def slow(request: Request) -> Message:
            entered.set()
            await asyncio.sleep(PATIENCE_S)
            return Message()

        w.b.handle("slow", slow)
        calls = [asyncio.create_task(w.call("slow")) for _ in range(3)]
        await entered.wait()
        assert w.a.connected() == [w.b.peer_id]
        await w.kind.kill(w.b)
        for call in calls:
            with pytest.raises(ChannelClosed):
                await call
        assert [await heard.get(), await heard.get()] == ["+" + w.b.peer_id, "-" + w.b.peer_id]
        assert w.a.connected() == []
        with pytest.raises(Unreachable):
            await w.call("slow")

    play(scenario)


def test_peers_say_which_run_they_are_of(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        async def which(request: Request) -> Message:
            return Message(request.run_id)

        w.b.handle("which", which)
        assert (await w.call("which")).body == ""
        w.a.set_run("run 1")
        assert (await w.call("which")).body == "run 1"  # on the channel that was open before

    play(scenario)


def test_notifications_arrive_in_order(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        heard: asyncio.Queue[Any] = asyncio.Queue()

        async def handler(request: Request) -> Message:
            heard.put_nowait((request.remote, request.message.body))
            raise Busy("nobody hears this")

        w.b.handle("n", handler)
        for number in range(5):
            w.a.notify(w.b.peer_id, "n", Message(number))  # opens the channel too
        w.a.notify(w.b.peer_id, "unknown", Message())
        assert [await heard.get() for _ in range(5)] == [(w.a.peer_id, n) for n in range(5)]

    play(scenario)


def test_calls_from_both_sides_at_once(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        for transport in (w.a, w.b):
            transport.handle("m", echo)
        numbers = range(100)
        calls = [
            one.call(other.peer_id, "m", Message(n), timeout_s=PATIENCE_S)
            for n in numbers
            for one, other in ((w.a, w.b), (w.b, w.a))
        ]
        replies = await asyncio.gather(*calls)
        assert [r.body for r in replies] == [n for n in numbers for _ in range(2)]

    play(scenario)


def test_bytes_are_counted_by_method_on_both_sides(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        w.b.handle("big", echo)
        w.b.handle("small", echo)
        data = Array("uint8", (300_000,), bytes(300_000))
        await w.call("big", None, data)
        await w.call("small")
        for traffic in (w.a.traffic, w.b.traffic):
            for by_method in (traffic.sent_bytes, traffic.received_bytes):
                assert 300_000 < by_method["big"] < 301_000
                assert 0 < by_method["small"] < 1000
        assert w.a.traffic.sent_bytes["big"] == w.b.traffic.received_bytes["big"]
        assert w.b.traffic.sent_bytes["big"] == w.a.traffic.received_bytes["big"]

    play(scenario)


def test_closing_ends_handlers_and_calls(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        entered, ended = asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> Message:
            entered.set()
            try:
                await asyncio.sleep(PATIENCE_S)
            finally:
                ended.set()
            return Message()

        w.b.handle("slow", slow)
        call = asyncio.create_task(w.call("slow"))
        await entered.wait()
        await w.b.close()
        assert ended.is_set()
        with pytest.raises((ChannelClosed, NotReady)):
            await call
        await w.a.close()
        with pytest.raises((ChannelClosed, Unreachable)):
            await w.call("slow")

    play(scenario)


def test_who_is_banned_has_no_way_in_and_is_not_called(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        heard: list[Request] = []

        async def hear(request: Request) -> Message:
            heard.append(request)
            return Message()

        w.b.handle("m", hear)
        w.a.handle("m", hear)
        await w.call("m")
        w.b.ban(w.b.peer_id, "itself")
        await w.call("m")
        w.b.ban(w.a.peer_id, "a lie")
        assert w.b.connected() == []
        w.a.notify(w.b.peer_id, "m", Message())
        with pytest.raises(TransportError):
            await w.call("m")
        with pytest.raises(TransportError):
            await w.b.call(w.a.peer_id, "m", Message(), timeout_s=PATIENCE_S)
        assert len(heard) == 2

    play(scenario)


def test_a_call_ends_with_the_ban_of_its_caller(play: Callable[[Scenario], None]) -> None:
    async def scenario(w: World) -> None:
        async def judge(request: Request) -> Message:
            w.b.ban(request.remote, "a lie")
            return Message()

        w.b.handle("m", judge)
        with pytest.raises(TransportError):
            await w.call("m")

    play(scenario)
