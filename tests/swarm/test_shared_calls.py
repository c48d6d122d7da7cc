"""Small shards of one primary share a call, and where that fails none waits for the others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from swarmnet.swarm import averaging
from swarmnet.swarm.messages import ReduceRequest
from swarmnet.transport.base import Request
from swarmnet.wire import Message, convert
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.swarm.test_bad_input import assert_numbers_agree

NUM_PEERS = 3
ROUNDS = 6
AT_ONCE_S = 8.0
"""Virtual seconds for a round, which takes half a one; the deadline for contributions is at 20."""
Calls = Counter[tuple[int, str, str, tuple[int, ...]]]
"""By round, caller, callee and shards."""


def count_calls(swarm: Swarm, name: str, calls: Calls) -> None:
    take = swarm.members[name].peer.averaging._on_reduce

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
        monkeypatch.setattr(averaging, "SHARED_CALL_BYTES", size)

    async def scenario(swarm: Swarm) -> None:
        calls: Calls = Counter()
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(2)
        for name in swarm.members:
            count_calls(swarm, name, calls)
        await swarm.until_round(ROUNDS)
        assert_numbers_agree(swarm, spec, ROUNDS)
        num_shards = swarm.members["peer-0"].peer.averaging.replica.num_shards
        rounds = range(3, ROUNDS - 1)
        assert set(calls.values()) == {1}
        for r in rounds:
            for caller in swarm.members:
                pushed = [shards for q, who, _, shards in calls if (q, who) == (r, caller)]
                own = len(swarm.members[caller].peer.averaging.ownership.holds())
                assert own
                together = [j for shards in pushed for j in shards]
                assert len(together) == len(set(together)) < num_shards
                if room == "all":
                    callees = [to for q, who, to, _ in calls if (q, who) == (r, caller)]
                    assert len(callees) == len(set(callees))
                    assert len(max(pushed, key=len)) > 2
                else:
                    assert max(map(len, pushed)) == {"two": 2, "one": 1}[room]

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

            def everything(r: int, shards: list[int], other: str = other) -> object:
                nonlocal wrong
                wrong += 1
                return [(other, list(shards))]

            swarm.members[name].peer.averaging._calls_for = everything  # type: ignore
        for r in range(3, ROUNDS + 1):
            await swarm.until_round(r, AT_ONCE_S)
        assert wrong >= 4
        assert swarm.total("late_shards") == 0
        assert_numbers_agree(swarm, spec, ROUNDS)

    in_virtual_time(scenario, spec)
