"""Backups get the sum while the norm is on its way. One that made the primary's step, bit for bit,
is not given its result; another one is."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmnet.errors import ChannelClosed, NotReady
from swarmnet.methods.update import MirrorRequest, SumsReply
from swarmnet.protocol.update.roster import first_ballot
from swarmnet.simulation.clock import run
from swarmnet.spec import RunSpec
from swarmnet.swarm.tasks import Tasks
from swarmnet.swarm.update.exchange.books import Books
from swarmnet.swarm.update.exchange.calls import SumsAhead, SumsHere, digest_of
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.swarm.handlers import Go, handler_of, intercept_calls
from tests.swarm.harness import Member, Swarm, in_virtual_time, tiny_spec

FIRST, LAST = 3, 6
"""Rounds that are measured: after every owner has its state."""


def spec_of(folder: Path, mode: str, codec: str) -> RunSpec:
    return tiny_spec(folder, num_stages=1, rounds=9, sync={"mode": mode, "codec": codec})


def sent_bytes(swarm: Swarm) -> int:
    peers = [m.peer for m in swarm.members.values()]
    return sum(sum(p.transport.traffic.sent_bytes.values()) for p in peers)


def in_the_last_bit(after: Array) -> Array:
    """What a machine makes of the step whose arithmetic differs a little."""
    values = to_tensor(after).clone()
    raw = values.view(torch.int32) if values.dtype == torch.float32 else values
    raw[-1] ^= 1
    return from_tensor(values)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_who_makes_other_bits_gets_the_result(tmp_path: Path, mode: str, codec: str) -> None:
    found: dict[bool, int] = {}

    async def scenario(swarm: Swarm, is_unlike: bool) -> None:
        def build_unlike(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = swarm.build(stage_index)
            step = optimizer.step

            def unlike(j: int, present: Array, *rest: Any) -> tuple[Array, Array]:
                made = in_the_last_bit(step(j, present, *rest)[0])
                return made, optimizer.codec.applied(j, present, made)

            optimizer.step = unlike
            return stage, optimizer

        swarm.start("peer-0")
        swarm.start("peer-1", build=build_unlike if is_unlike else None)
        await swarm.until_round(FIRST)
        before = sent_bytes(swarm)
        await swarm.until_round(LAST)
        found[is_unlike] = (sent_bytes(swarm) - before) // (LAST - FIRST)
        await swarm.until_round(9)
        swarm.parameters()  # asserts that replicas are the same

    for is_unlike in (False, True):
        in_virtual_time(partial(scenario, is_unlike=is_unlike), spec_of(tmp_path, mode, codec))
    print(f"{mode}, {codec}: {found[False]:,} bytes a round, {found[True]:,} of unlike machines")
    assert found[True] > 1.2 * found[False]


def test_a_copy_that_there_is_not_costs_a_second_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a backup has given its copy up, or a primary lies."""
    takes_copy, told = Books.takes_copy, set[tuple[int, int, str]]()

    def lying(self: Books, exchange: int, shard: int, remote: str, digest: bytes) -> bool:
        key = (exchange, shard, remote)
        is_first = key not in told
        told.add(key)
        return is_first or takes_copy(self, exchange, shard, remote, digest)

    monkeypatch.setattr(Books, "takes_copy", lying)

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):  # two owners a shard
            swarm.start(f"peer-{i}")
        await swarm.until_round(6)
        swarm.parameters()

    in_virtual_time(scenario, spec_of(tmp_path, "zero", "int8"))
    assert len(told) > 10


def test_the_same_copy_is_taken_once() -> None:
    books = Books(None, None, None, None)  # type: ignore[arg-type]
    books.copied(3, 0, "b", b"digest")
    assert not books.takes_copy(3, 1, "b", b"digest")
    assert not books.takes_copy(3, 0, "c", b"digest")
    assert books.takes_copy(3, 0, "b", b"digest")
    assert not books.takes_copy(3, 0, "b", b"digest")
    books.copied(3, 0, "b", b"digest")
    assert not books.takes_copy(3, 0, "b", b"other")
    books.copied(3, 0, "b", b"")
    assert not books.takes_copy(3, 0, "b", b"")
    books.copied(3, 0, "b", b"digest")
    books.summed(3, 0, frozenset())  # again, by a higher ballot
    assert not books.takes_copy(3, 0, "b", b"digest")


def test_a_copy_says_whether_the_own_contribution_is_in_its_sum() -> None:
    books = Books(SimpleNamespace(own=SimpleNamespace(peer_id="b")), None, None, None)  # type: ignore[arg-type]
    assert books.counts_own(3, 0) is None
    for senders, counts in (("ab", True), ("ac", False), ("", None)):
        books.summed(3, 0, frozenset(senders))
        assert books.counts_own(3, 0) is counts


def test_a_backup_whose_contribution_came_too_late_says_so_after_the_death_of_its_primary(
    tmp_path: Path,
) -> None:
    """It makes the step without it, and takes that for the result."""
    copied = set[int]()

    async def scenario(swarm: Swarm) -> None:
        for name in ("peer-0", "peer-1"):
            swarm.start(name)
        await swarm.until_round(FIRST)
        backup: Any = swarm.members["peer-1"].peer

        async def keep(peer_id: str, message: Message[Any], go: Go) -> Message[Any]:
            if message.arrays:
                await asyncio.get_running_loop().create_future()
            return await go(message)

        async def mirror(request: Request[Any]) -> Message[Any]:
            reply = await copy(request)
            if not copied:
                asyncio.get_running_loop().call_soon(swarm.kill, "peer-0")
            copied.add(request.message.body.shard)
            await asyncio.get_running_loop().create_future()
            return reply

        copy = handler_of(backup.transport, "mirror")
        intercept_calls(backup.transport, "reduce", keep)
        backup.transport.handle("mirror", mirror)
        await swarm.until(lambda: bool(copied), 120.0)
        await swarm.until_round(max(swarm.rounds()) + 1, 120.0)
        assert swarm.total("late_shards") >= len(copied) > 0

    in_virtual_time(scenario, spec_of(tmp_path, "zero", "none"))


NORM_S = 0.5
"""For which the norm of all stages is waited for."""


def watch(member: Member, fate: str, seen: Counter[str], early_s: list[float]) -> None:
    """Has norms take long and counts sums and steps; says how long before its step a sum came."""
    transport = member.peer.transport
    take, know = handler_of(transport, "sums"), handler_of(transport, "norm")
    step = handler_of(transport, "mirror")
    came_at: dict[tuple[int, int], float] = {}

    async def sums(request: Request) -> Message:
        if fate == "are refused":
            raise NotReady("no")
        reply = await take(request)
        for j in request.message.body.shards:
            seen["sums"] += 1
            came_at[request.message.body.round, j] = asyncio.get_running_loop().time()
        return reply

    async def lost(backup: str, message: Message, go: Go) -> Message:
        await asyncio.sleep(2.0 * NORM_S)  # the step is named meanwhile
        raise ChannelClosed("the connection broke")

    async def norm(request: Request) -> Message:
        await asyncio.sleep(NORM_S)
        return await know(request)

    async def mirror(request: Request) -> Message:
        body = request.message.body
        assert len(request.message.arrays) == (not body.sum_digest)
        seen["named" if body.sum_digest else "carried"] += 1
        if fate == "are not found" and body.sum_digest:
            raise NotReady("no", lacks_sum=True)
        key = (body.round, body.shard)
        if key in came_at:
            early_s.append(asyncio.get_running_loop().time() - came_at[key])
        return await step(request)

    async def breaks(backup: str, message: Message, go: Go) -> Message:
        reply = await go(message)
        if message.body.sum_digest:
            raise ChannelClosed("the connection broke")
        return reply

    transport.handle("sums", sums)
    transport.handle("norm", norm)
    transport.handle("mirror", mirror)
    if fate == "are lost":
        intercept_calls(transport, "sums", lost)
    if fate == "come, and the call breaks":
        intercept_calls(transport, "mirror", breaks)


@pytest.mark.parametrize("mode", ["zero", "delayed"])
@pytest.mark.parametrize(
    "fate", ["come", "are refused", "are lost", "are not found", "come, and the call breaks"]
)
def test_sums_go_to_backups_while_the_norm_is_on_its_way(
    tmp_path: Path, mode: str, fate: str
) -> None:
    """Where they do not get there, the mirrored step carries them."""
    seen: Counter[str] = Counter()
    early_s: list[float] = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(1, 3)
        await swarm.until_round(1)
        for member in swarm.members.values():
            watch(member, fate, seen, early_s)
        await swarm.until_round(5, 60.0)
        swarm.parameters()  # asserts that replicas are the same
        assert not swarm.total("shard_reset") + swarm.total("shard_stale")

    in_virtual_time(scenario, spec_of(tmp_path, mode, "int8"))
    if fate == "come":
        assert seen["sums"] >= seen["named"] > 5 * seen["carried"]
        assert max(early_s) > NORM_S / 2
    else:
        assert seen["carried"] > 5


TOTALS = [Array("int8", (4,), bytes([j] * 4)) for j in range(4)]
BALLOT = first_ballot("me", is_holder=True)


def test_sums_that_are_ready_together_travel_together() -> None:
    class Calls:
        """Of `LongCalls`."""

        def room(self, exchange: int) -> int:
            return 8

        async def turn(self, num_bytes: int) -> None:
            turns.append(num_bytes)
            await asyncio.sleep(1.0)

        async def call_in_time(self, peer_id: str, method: str, message: Message) -> Message:
            sent.append((peer_id, message.body.shards, message.arrays))
            await asyncio.sleep(1.0)
            if peer_id == "cut":
                raise NotReady("no")
            return Message(SumsReply((2,)))

    async def scenario() -> None:
        tasks, calls = Tasks("test"), Calls()
        ahead = SumsAhead(3, 0, calls, tasks)  # type: ignore[arg-type]
        for j, total in enumerate(TOTALS[:3]):
            ahead.give(j, total, 8, BALLOT, ["b"])
        await asyncio.sleep(0.5)
        ahead.give(3, TOTALS[3], 8, BALLOT, ["b", "cut"])
        going = ahead.take("b", 3, TOTALS[3])
        assert going is not None
        assert going.digest == digest_of(TOTALS[3])
        await going.began()
        assert not going.has_come
        await going.sent
        assert going.has_come
        assert ahead.take("b", 3, TOTALS[3]) is None, "a second try carries it"
        assert turns == [8, 4, 4, 4]
        assert sent == [
            ("b", (0, 1), tuple(TOTALS[:2])),
            ("b", (2,), (TOTALS[2],)),
            ("b", (3,), (TOTALS[3],)),
            ("cut", (3,), (TOTALS[3],)),
        ]
        cut, refused = ahead.take("cut", 3, TOTALS[3]), ahead.take("b", 2, TOTALS[2])
        for lost in (cut, refused):
            assert lost is not None
            await lost.began()
            await lost.sent
            assert not lost.has_come
        again = Array("int8", (4,), bytes(TOTALS[0].data))
        assert ahead.take("b", 0, again) is None, "a sum that was made again"
        ahead.forget(1)
        assert ahead.take("b", 1, TOTALS[1]) is None
        await tasks.close()

    turns: list[int] = []
    sent: list[tuple[str, tuple[int, ...], tuple[Array, ...]]] = []
    run(scenario())


def test_a_backup_steps_with_the_sum_that_is_named_and_no_other() -> None:
    def named(j: int, r: int = 3) -> MirrorRequest:
        return MirrorRequest(r, 0, j, 1.0, r, sum_digest=digest_of(TOTALS[j]))

    async def scenario() -> None:
        here, loop = SumsHere(), asyncio.get_running_loop()
        early = asyncio.create_task(here.of(named(0), "a", 60.0))
        await asyncio.sleep(1.0)
        for sender, total in (("b", 0), ("a", 1)):
            here.put(0, sender, TOTALS[total])
            await asyncio.sleep(1.0)
            assert not early.done()
        here.put(0, "a", TOTALS[0])
        here.put(0, "a", TOTALS[3])  # that was summed before it
        assert await early is TOTALS[0]
        with pytest.raises(NotReady):  # once
            await here.of(named(0), "a", 5.0)
        for end in (lambda: here.end(3), here.close):
            late = asyncio.create_task(here.of(named(3), "a", 60.0))
            await asyncio.sleep(0.0)
            began = loop.time()
            end()
            with pytest.raises(NotReady) as error:
                await late
            assert error.value.details == {"lacks_sum": True}
            assert loop.time() == began, "it ends with the exchange, or a step that carries its sum"

    run(scenario())
