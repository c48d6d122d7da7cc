"""Households: whoever has the key of one is a neighbour, and the uplink carries a shard once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import Refused
from swarmnet.household import household_of
from swarmnet.identity import Identity
from swarmnet.methods.update import GATHER, REDUCE, GatherRequest, ReduceRequest
from swarmnet.ports import StepKey
from swarmnet.protocol.membership.records import Household
from swarmnet.protocol.update import events as on
from swarmnet.simulation.stage import SyntheticOptimizer, SyntheticStage
from swarmnet.spec import RunSpec
from swarmnet.swarm.calls import call
from swarmnet.swarm.update.exchange.exchange import Exchange
from swarmnet.swarm.update.exchange.neighbours import Neighbours
from swarmnet.wire import Message
from tests.swarm.handlers import handler_of
from tests.swarm.harness import SIZES, Swarm, check_step, in_virtual_time, tiny_spec
from tests.swarm.update.test_update_bytes import audit

KEYS = [Identity(bytes([n]) * 32) for n in (1, 2)]
HOUSE = 4
"""Replicas of one household."""
SHARD = 16_384
FIRST, LAST = 4, 6
"""Rounds that are measured: after every owner has its state."""
BESIDE = 0.2
"""Gradients a round that peers tell each other beside: with coded ones, that is no small part of so
small a model."""
SOON_S = 12.0
"""Virtual seconds from a death to the next round."""


def house_of(name: str) -> int:
    """The household of a peer: the first four are of one."""
    return int(name.removeprefix("peer-")) // HOUSE


def in_houses(name: str) -> Household:
    return household_of(KEYS[house_of(name)], name)


def alone(name: str) -> None:
    return None


def start(swarm: Swarm, **options: Any) -> None:
    for i in range(2 * HOUSE):
        swarm.start(f"peer-{i}", **options)


# ---- bytes -----------------------------------------------------------------------------------


def count_uplinks(swarm: Swarm) -> Counter[bool]:
    """Bytes from now on, by whether they cross an uplink."""
    found, send = Counter[bool](), swarm.hub.send

    def counted(source: str, target: str, num_bytes: int, deliver: Callable[[], None]) -> None:
        found[house_of(source) != house_of(target)] += num_bytes
        send(source, target, num_bytes, deliver)

    swarm.hub.send = counted  # type: ignore[method-assign]
    return found


def spec_of(folder: Path, **sync: Any) -> RunSpec:
    values = tiny_spec(folder, num_stages=1, rounds=LAST + 1, num_layers=3, sync=sync).model_dump()
    values["pipeline"]["global_batch"] = 64
    values["sync"] |= {"shard_parameters": SHARD}
    values["model"] |= {"hidden_size": 64, "intermediate_size": 256}
    return RunSpec.model_validate(values)


def uplink_bytes(spec: RunSpec, household: Callable[[str], Household | None]) -> float:
    """Of a round, over all uplinks, in gradients."""
    measured = []

    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        await swarm.until_round(FIRST)
        audit(swarm, 0.0)
        found = count_uplinks(swarm)
        await swarm.until_round(LAST)
        num_bytes = 4 * swarm.flat("peer-0").numel()
        measured.append(found[True] / (LAST - FIRST) / num_bytes)
        swarm.parameters()  # replicas do not differ
        assert not swarm.total("late_shards")

    in_virtual_time(scenario, spec, household=household)
    return measured[0]


@pytest.mark.parametrize(
    ("mode", "codec"),
    [("zero", "none"), pytest.param("delayed", "int8", marks=pytest.mark.long)],
)
def test_the_uplink_of_a_household_carries_each_shard_once(
    tmp_path: Path, mode: str, codec: str
) -> None:
    """A contribution and a result, or a sum where one of the household is a backup, in place of
    four of each."""
    spec = spec_of(tmp_path, mode=mode, codec=codec)
    before, after = uplink_bytes(spec, alone), uplink_bytes(spec, in_houses)
    print(f"{mode}, {codec}: {before:.2f} gradients over the uplinks, {after:.2f} with households")
    beside = 0.0 if codec == "none" else BESIDE
    assert after - beside <= 0.3 * (before - beside)


# ---- what counts -----------------------------------------------------------------------------


class Steps:
    """Which microbatches are behind each step of a synthetic swarm, that of a backup too."""

    def __init__(self) -> None:
        self.behind: dict[tuple[int, int], set[StepKey]] = {}
        """By round and shard."""
        self.faults: list[str] = []

    def build(self, stage_index: int) -> tuple[Any, Any]:
        def observe(event: str, **facts: Any) -> None:
            check_step(stage_index, event, **facts)
            if event == "step":
                ids: Counter[StepKey] = facts["gradient"].ids
                where = facts["round"], facts["shard"]
                if max(ids.values()) > 1:
                    self.faults.append(f"{where}: a microbatch counts twice")
                if self.behind.setdefault(where, set(ids)) != set(ids):
                    self.faults.append(f"{where}: two steps")

        stage = SyntheticStage(stage_index, 1, SIZES, observe)
        return stage, SyntheticOptimizer(stage_index, SIZES, observe)

    def fewest(self, round_index: int) -> int:
        """Microbatches behind the worst shard of a round; none counts twice."""
        assert not self.faults
        found = [len(ids) for (r, _), ids in self.behind.items() if r == round_index]
        assert len(found) == SIZES.num_shards
        return min(found)


Struck = Callable[[str], None]
"""Says who dies, once."""


def when_given(monkeypatch: pytest.MonkeyPatch, strike: Struck, *, is_head: bool) -> None:
    """A neighbour has given its contribution, and nothing has gone to the primary."""
    take = Neighbours.take

    async def taken(self: Neighbours, shard: int, sender: str, *rest: Any) -> bool:
        is_taken = await take(self, shard, sender, *rest)
        strike(self._gossip.own.peer_id if is_head else sender)
        return is_taken

    monkeypatch.setattr(Neighbours, "take", taken)


def when_pushed(monkeypatch: pytest.MonkeyPatch, strike: Struck, *, is_head: bool) -> None:
    """The primary has the contribution of a household, and no result."""
    answer = Exchange.answer

    async def answered(self: Exchange, shard: int, make: Any) -> Any:
        event = make(0)
        if isinstance(event, on.Pushed) and event.members and event.gradient is not None:
            strike(event.sender if is_head else self._gossip.own.peer_id)
        return await answer(self, shard, make)

    monkeypatch.setattr(Exchange, "answer", answered)


@pytest.mark.parametrize(
    ("when", "is_head"),
    [(when_given, True), (when_given, False), (when_pushed, True), (when_pushed, False)],
    ids=["head that was given to", "neighbour that has given", "head that has pushed", "primary"],
)
def test_a_death_costs_what_that_of_a_contributor_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: Any, is_head: bool
) -> None:
    """At most what the dead one had worked on, and nothing counts twice."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=10, global_batch=64)
    steps = Steps()

    async def scenario(swarm: Swarm) -> None:
        start(swarm, build=steps.build)
        await swarm.until_round(FIRST)
        struck, had = list[int](), list[int]()

        def strike(name: str) -> None:
            if struck or name not in swarm.members:
                return
            replica = swarm.members[name].peer.replica
            assert replica is not None
            struck.append(replica.round)
            had.append(len(replica.ledger.committed(replica.round)))
            asyncio.get_running_loop().call_soon(swarm.kill, name)

        when(monkeypatch, strike, is_head=is_head)
        await swarm.until(lambda: bool(struck), SOON_S)
        began = asyncio.get_running_loop().time()
        await swarm.until_round(struck[0] + 1, 10 * SOON_S)
        assert asyncio.get_running_loop().time() < began + SOON_S
        await swarm.until_round(10, 10 * SOON_S)
        whole = spec.pipeline.global_batch // spec.pipeline.microbatch
        assert steps.fewest(FIRST - 1) == whole
        assert whole - had[0] <= steps.fewest(struck[0]) <= whole
        assert steps.fewest(9) == whole
        losers = [m for m in swarm.members.values() if m.peer.gossip.own.totals.get("late_shards")]
        assert not losers, "a contribution that was given counts"

    in_virtual_time(scenario, spec, is_synthetic=True, household=in_houses)


def test_a_neighbour_that_does_not_hear_that_it_was_taken_gives_again_and_counts_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sync = {"aggregation": "mean"}  # another rule would cut claims of more tokens than were counted
    spec = tiny_spec(tmp_path, num_stages=1, rounds=FIRST, global_batch=64, sync=sync)
    steps, take, gathered, num_unheard = Steps(), Exchange.take, Exchange.gathered, 0

    async def unheard(self: Exchange, *contribution: Any) -> bool:
        nonlocal num_unheard
        num_unheard += await take(self, *contribution)
        return False

    async def late(self: Exchange, *contribution: Any) -> Any:
        found = await gathered(self, *contribution)
        await asyncio.sleep(0.1)  # what neighbours give to the primary comes first
        return found

    monkeypatch.setattr(Exchange, "take", unheard)
    monkeypatch.setattr(Exchange, "gathered", late)

    async def scenario(swarm: Swarm) -> None:
        start(swarm, build=steps.build)
        await swarm.until_round(FIRST)
        whole = spec.pipeline.global_batch // spec.pipeline.microbatch
        assert all(steps.fewest(r) == whole for r in range(1, FIRST))
        assert num_unheard > 2 * SIZES.num_shards
        assert not swarm.total("late_shards")

    in_virtual_time(scenario, spec, is_synthetic=True, household=in_houses)


def test_what_is_in_the_contribution_of_a_neighbour_is_not_told_as_lost(tmp_path: Path) -> None:
    """Its primary signs for that one alone. Of two, the copied step may be there long before the
    result."""
    spec = tiny_spec(tmp_path, num_stages=1, rounds=3 * LAST, global_batch=64)

    async def scenario(swarm: Swarm) -> None:
        for name in ("peer-0", "peer-1"):
            swarm.start(name)
        await swarm.until_round(FIRST)
        transport: Any = swarm.members["peer-0"].peer.transport
        reduce = handler_of(transport, REDUCE.name)

        async def late(request: Any) -> Any:
            reply = await reduce(request)
            await asyncio.sleep(1.0)
            return reply

        transport.handle(REDUCE.name, late)
        await swarm.until_round(3 * LAST)
        assert not swarm.total("late_shards")

    in_virtual_time(scenario, spec, is_synthetic=True, household=in_houses)


# ---- who is a neighbour ----------------------------------------------------------------------


def test_only_a_neighbour_gives_to_a_neighbour(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, rounds=20, global_batch=64)

    async def scenario(swarm: Swarm) -> None:
        start(swarm)
        await swarm.until_round(2)
        peers = [swarm.members[f"peer-{i}"].peer for i in range(2 * HOUSE)]
        assert {p.view.get(q.transport.peer_id).house for p in peers for q in peers} == {  # type: ignore[union-attr]
            key.peer_id for key in KEYS
        }
        exchanges = peers[0].exchanges
        assert exchanges is not None
        replica = peers[0].replica
        assert replica is not None
        values = replica.stage.parameter_shard(0)
        request = Message(GatherRequest(exchanges.current, 0, (0,), (4,)), (values,))
        with pytest.raises(Refused, match="another household"):
            await call(peers[HOUSE].transport, "peer-0", GATHER, request, timeout_s=5.0)
        members = ("peer-1", f"peer-{HOUSE}")
        push = ReduceRequest(exchanges.current, 0, (0,), (4,), (1,), members=(members,))
        with pytest.raises(Refused, match="another household"):
            await call(
                peers[1].transport, "peer-0", REDUCE, Message(push, (values,)), timeout_s=5.0
            )

    in_virtual_time(scenario, spec, is_synthetic=True, household=in_houses)
