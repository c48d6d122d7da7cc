"""Small shards of one primary share a call, and where that fails none waits for the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet.errors import ProtocolViolation, Refused
from swarmnet.methods.update import ReduceRequest
from swarmnet.protocol.update.roster import Ballot, Roster
from swarmnet.swarm.update.exchange import calls as exchange_calls
from swarmnet.swarm.update.exchange.calls import MAX_SHARED_CALL_BYTES, shared_call_bytes
from swarmnet.transport.base import Request
from swarmnet.wire import Message, convert
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.swarm.pipeline.test_bad_input import assert_numbers_agree

NUM_PEERS = 3
ROUNDS = 6
AT_ONCE_S = 8.0
"""Virtual seconds for a round, which takes half a one; the deadline for contributions is at 20."""
Calls = Counter[tuple[int, str, str, tuple[int, ...]]]
"""By round, caller, callee and shards."""


def count_calls(swarm: Swarm, name: str, calls: Calls) -> None:
    take = handler_of(swarm.members[name].peer.transport, "reduce")

    async def counted(request: Request) -> Message:
        push = convert(request.message.body, ReduceRequest)
        calls[(push.round, request.remote, name, push.shards)] += 1
        return await take(request)

    swarm.members[name].peer.transport.handle("reduce", counted)


@pytest.mark.parametrize("room", ["all", "two", "one"])
def test_shards_share_a_call_as_far_as_they_fit(
    tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)
    shard_bytes = 4 * spec.sync.shard_parameters
    if room != "all":
        size = {"two": 2 * shard_bytes, "one": 0}[room]
        monkeypatch.setattr(exchange_calls, "shared_call_bytes", lambda _: size)

    async def scenario(swarm: Swarm) -> None:
        calls: Calls = Counter()
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(2)
        for name in swarm.members:
            count_calls(swarm, name, calls)
        await swarm.until_round(ROUNDS)
        assert_numbers_agree(swarm, spec, ROUNDS)
        num_shards = swarm.members["peer-0"].peer.exchanges.replica.num_shards
        rounds = range(3, ROUNDS - 1)
        assert set(calls.values()) == {1}
        for r in rounds:
            for caller in swarm.members:
                pushed = [shards for q, who, _, shards in calls if (q, who) == (r, caller)]
                placement = swarm.members[caller].peer.exchanges.ownership.placement(r)
                others = [j for j in range(num_shards) if placement.order(j)[0] != caller]
                assert sorted(j for shards in pushed for j in shards) == others
                if room == "all":
                    callees = [to for q, who, to, _ in calls if (q, who) == (r, caller)]
                    assert len(callees) == len(set(callees))
                    assert len(max(pushed, key=len)) > 2
                else:
                    assert max(map(len, pushed)) == {"two": 2, "one": 1}[room]

    in_virtual_time(scenario, spec)


def test_shards_share_calls_beside_a_round_too(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS, sync={"mode": "delayed"})

    async def scenario(swarm: Swarm) -> None:
        calls: Calls = Counter()
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(2)
        for name in swarm.members:
            count_calls(swarm, name, calls)
        await swarm.until_round(ROUNDS)
        # The last exchanges run beside no round.
        beside = [shards for r, _, _, shards in calls if 2 < r < ROUNDS - 2]
        assert max(map(len, beside)) > 2

    in_virtual_time(scenario, spec)


def test_who_calls_the_wrong_primary_hears_it_at_once(tmp_path: Path) -> None:
    """Two that each take the other for the primary of everything: were the answer to wait until
    all shards are done, each would wait for what the other keeps back."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(2)
        wrong = 0
        for name, other in (("peer-0", "peer-1"), ("peer-1", "peer-0")):
            ownership = swarm.members[name].peer.exchanges.ownership
            roster = ownership.roster

            def everything(r: int, j: int, other: str = other, roster=roster) -> Roster:  # type: ignore[no-untyped-def]
                nonlocal wrong
                wrong += 1
                return replace(roster(r, j), ballot=Ballot(1, other))

            ownership.roster = everything  # type: ignore[method-assign]
        for r in range(3, ROUNDS + 1):
            await swarm.until_round(r, AT_ONCE_S)
        assert wrong >= 4
        assert swarm.total("late_shards") == 0
        assert_numbers_agree(swarm, spec, ROUNDS)

    in_virtual_time(scenario, spec)


def test_what_shares_a_call_goes_up_the_link_in_a_second() -> None:
    assert shared_call_bytes(2e6) == 2_000_000
    assert shared_call_bytes(1e9) == MAX_SHARED_CALL_BYTES


BAD: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((0, 1), (4,)),
    ((1, 1), (4, 4)),
    ((-1,), (4,)),
    ((0,), (-4,)),
    ((0,), (1 << 62,)),
    (tuple(range(65)), (0,) * 65),
]


@pytest.mark.parametrize(("shards", "num_tokens"), BAD)
def test_calls_that_cannot_be(shards: tuple[int, ...], num_tokens: tuple[int, ...]) -> None:
    terms = (1,) * len(shards)
    body = {"round": 0, "stage": 0, "shards": shards, "num_tokens": num_tokens, "terms": terms}
    with pytest.raises(ProtocolViolation):
        convert(body, ReduceRequest)


def test_a_call_for_a_whole_stage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a few bytes would make a peer copy and send all of it."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=ROUNDS)
    room = 4 * spec.sync.shard_parameters
    monkeypatch.setattr("swarmnet.swarm.update.exchange.service.MAX_SHARED_CALL_BYTES", room)
    monkeypatch.setattr(exchange_calls, "shared_call_bytes", lambda _: room)

    async def scenario(swarm: Swarm) -> None:
        for i in range(2):
            swarm.start(f"peer-{i}")
        await swarm.until_round(3)
        caller = swarm.members["peer-1"].peer.transport
        for shards, text in (((0, 1), "do not share a call"), ((1,), "")):
            push = Message(ReduceRequest(2, 0, shards, (0,) * len(shards), (1,) * len(shards)))
            calling = caller.call("peer-0", "reduce", push, timeout_s=30.0)
            if text:
                with pytest.raises(Refused, match=text):
                    await calling
            else:
                assert len((await calling).arrays) == 1

    in_virtual_time(scenario, spec)
