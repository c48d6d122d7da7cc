"""A primary that dies when one peer has a shard's result and the others have not: there is one
result all the same, and it is everybody's at once."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from swarmnet.errors import NotReady
from swarmnet.methods.update import (
    BallotReply,
    BallotRequest,
    MirrorRequest,
    ReduceRequest,
    ShardReply,
)
from swarmnet.spec import RunSpec
from swarmnet.swarm.peer import Peer
from swarmnet.training.arrays import to_tensor
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message, convert
from tests.swarm.handlers import Around, Go, handler_of, intercept_calls
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec
from tests.swarm.update.results import results_at

NUM_PEERS = 5
ROUNDS = 7
STRUCK = 3
AT_ONCE_S = 8.0
"""Virtual seconds after the death until all others have the result: a round takes half a one, and
the deadline for contributions is at 20."""


def spec_of(folder: Path, mode: str) -> RunSpec:
    """One owner a shard, so that no backup has the step."""
    spec = tiny_spec(folder, num_stages=1, rounds=ROUNDS)
    values = spec.model_dump()
    values["model"]["num_hidden_layers"] = 1
    values["sync"] |= {"mode": mode, "replication": 1}
    return RunSpec.model_validate(values)


Chosen = dict[int, str]
"""By shard, the only one that gets its result from its primary."""


def choose(swarm: Swarm, favoured: int) -> tuple[list[str], Chosen]:
    """Two shards of different primaries, and for each of them the `favoured`-th of those that are
    left, another one, so that nobody has both results. The primaries come first."""
    placement = swarm.members["peer-0"].peer.exchanges.ownership.placement(STRUCK)
    replica = swarm.members["peer-0"].peer.replica
    assert replica is not None
    for i, j in itertools.combinations(range(replica.num_shards), 2):
        victims = [placement.order(i)[0], placement.order(j)[0]]
        left = [[p for p in placement.order(k) if p not in victims] for k in (i, j)]
        chosen = [left[0][favoured], left[1][favoured]]
        if len(set(victims)) == len(set(chosen)) == 2:
            return victims, {i: chosen[0], j: chosen[1]}
    raise AssertionError("no such shards: take another seed")


async def strike(swarm: Swarm, favoured: int) -> dict[int, bytes]:
    """Kills the primaries of two shards as soon as one peer has the first's result of `STRUCK`, and
    another peer the second's. Returns the results by shard."""
    for i in range(NUM_PEERS):
        swarm.start(f"peer-{i}")
    await swarm.until_round(STRUCK)
    victims, chosen = choose(swarm, favoured)
    results: dict[int, bytes] = {}
    given = asyncio.Event()
    for name in victims:
        answer_only(swarm.members[name].peer, chosen)
    for j, name in chosen.items():
        intercept_calls(swarm.members[name].peer.transport, "reduce", note(j, results, given))
    async with asyncio.timeout(60.0):
        while len(results) < len(chosen):
            await given.wait()
            given.clear()
    for name in victims:
        swarm.kill(name)
    return results


def answer_only(primary: Peer, chosen: Chosen) -> None:
    """The primary hears everybody, and answers one."""
    answer = handler_of(primary.transport, "reduce")

    async def answer_one(request: Request) -> Message:
        push = convert(request.message.body, ReduceRequest)
        others = {chosen.get(j, request.remote) for j in push.shards} - {request.remote}
        if push.round == STRUCK and others:
            waiting = asyncio.ensure_future(answer(request))
            waiting.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.Event().wait()
        return await answer(request)

    primary.transport.handle("reduce", answer_one)


def note(j: int, results: dict[int, bytes], given: asyncio.Event) -> Around:
    """Keeps the first result of a shard that a peer has."""

    async def has_it(peer_id: str, message: Message, go: Go) -> Message:
        reply = await go(message)
        push = message.body
        if push.round == STRUCK and j in push.shards:
            parameters = reply.arrays[push.shards.index(j)]
            results.setdefault(j, bytes(parameters.data))
            given.set()
        return reply

    return has_it


@pytest.mark.parametrize("favoured", [0, NUM_PEERS - 3], ids=["next primary", "another"])
@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_the_result_that_one_has_is_everybodys(tmp_path: Path, mode: str, favoured: int) -> None:
    async def scenario(swarm: Swarm) -> None:
        results = await strike(swarm, favoured)
        begins = STRUCK + (2 if mode == "delayed" else 1)
        found: dict[str, dict[int, bytes]] = {}

        def all_have_begun() -> bool:
            for name, member in swarm.members.items():
                replica = member.peer.replica
                if replica is not None and replica.round == begins:
                    shards = {j: bytes(replica.stage.parameter_shard(j).data) for j in results}
                    found.setdefault(name, shards)
            return len(found) == len(swarm.members)

        await swarm.until(all_have_begun, AT_ONCE_S)
        assert all(shards == results for shards in found.values())
        await swarm.until_round(ROUNDS)
        assert all(bool(p.isfinite().all()) for p in swarm.parameters().values())

    in_virtual_time(scenario, spec_of(tmp_path, mode))


@pytest.mark.parametrize("mode", ["zero", "delayed"])
def test_the_step_that_one_backup_made_is_everybodys(tmp_path: Path, mode: str) -> None:
    """The primary dies when its second backup has its step, and the first, which comes after it,
    and the contributors have nothing."""
    values = spec_of(tmp_path, mode).model_dump()
    values["sync"] |= {"replication": 3}

    async def scenario(swarm: Swarm) -> None:
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(STRUCK)
        order = swarm.members["peer-0"].peer.exchanges.ownership.placement(STRUCK).order(0)
        primary, first, second = (swarm.members[name].peer for name in order[:3])
        answer_only(primary, {0: "nobody"})
        take = handler_of(first.transport, "mirror")

        async def take_others(request: Request) -> Message:
            mirror = convert(request.message.body, MirrorRequest)
            if (mirror.round, mirror.shard) == (STRUCK, 0):
                raise NotReady("the state is not followed here")
            return await take(request)

        first.transport.handle("mirror", take_others)
        while (STRUCK, 0) not in results_at(second.exchanges):  # noqa: ASYNC110
            await asyncio.sleep(1e-4)  # nobody tells, and time costs nothing here
        lineage = second.exchanges.states.lineage(0)
        swarm.kill(order[0])
        begins = STRUCK + (2 if mode == "delayed" else 1)
        found: dict[str, bytes] = {}

        def all_have_begun() -> bool:
            for name, member in swarm.members.items():
                replica = member.peer.replica
                if replica is not None and replica.round == begins:
                    found.setdefault(name, bytes(replica.stage.parameter_shard(0).data))
            return len(found) == len(swarm.members)

        assert second.replica is not None
        while second.replica.round < begins:  # noqa: ASYNC110
            await asyncio.sleep(1e-4)  # the next step comes within milliseconds
        assert second.exchanges.states.lineage(0) == lineage, "no other step was made"
        await swarm.until(all_have_begun, AT_ONCE_S)
        assert len(set(found.values())) == 1
        await swarm.until_round(ROUNDS)
        assert swarm.total("diverged") == 0

    in_virtual_time(scenario, RunSpec.model_validate(values))


@pytest.mark.parametrize("dies", [True, False])
def test_what_is_not_finite_is_nobodys_result(tmp_path: Path, dies: bool) -> None:
    """A slow peer answers with nonsense when it is reminded, or asked by a new primary."""

    async def scenario(swarm: Swarm) -> None:
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(STRUCK)
        exchanges = swarm.members["peer-0"].peer.exchanges
        primary, liar = exchanges.ownership.placement(STRUCK).order(0)[:: NUM_PEERS - 1]
        size = exchanges.replica.stage.shard_sizes[0]
        asked: list[str] = []

        async def lie(request: Request) -> Message:
            asked.append(request.remote)
            asks = convert(request.message.body, BallotRequest)
            told = ShardReply(STRUCK + 1, counted=False)
            num_shards = len(asks.shards)
            names = (request.remote,) * num_shards
            results = tuple(range(num_shards))
            reply = BallotReply(asks.terms, names, results, (told,) * num_shards)
            return Message(reply, (nonsense,) * num_shards)

        nonsense = Array("float32", (size,), torch.full((size,), float("nan")).numpy().tobytes())
        peer = swarm.members[liar].peer
        peer.transport.handle("ballot", lie)
        first = [0]

        async def late(peer_id: str, message: Message, go: Go) -> Message:
            push = message.body
            if push.round == STRUCK and set(first) & set(push.shards):
                first.clear()
                await asyncio.sleep(4.0)
            return await go(message)

        intercept_calls(peer.transport, "reduce", late)
        await swarm.until(lambda: swarm.members[primary].peer.replica.closed)  # type: ignore[union-attr]
        if dies:
            swarm.kill(primary)
        await swarm.until_round(STRUCK + 1, AT_ONCE_S)
        assert asked
        await swarm.until_round(ROUNDS)
        assert all(bool(p.isfinite().all()) for p in swarm.parameters().values())
        assert to_tensor(nonsense).isnan().all()

    in_virtual_time(scenario, spec_of(tmp_path, "zero"))


@pytest.mark.parametrize("stop_s", [2.5, 4.0, 5.5])
def test_a_primary_that_stops_when_it_is_past_the_round_is_waited_for(
    tmp_path: Path, stop_s: float
) -> None:
    """It has the result, and has told nobody: a second one would be without its gradient. (Where
    gradients are clipped, whoever made it would have to wait for the norms anyhow.)"""
    values = spec_of(tmp_path, "zero").model_dump()
    values["sync"]["aggregation"] = "mean"
    values["optimizer"]["grad_clip_norm"] = 0.0
    spec = RunSpec.model_validate(values)

    async def scenario(swarm: Swarm) -> None:
        for i in range(NUM_PEERS):
            swarm.start(f"peer-{i}")
        await swarm.until_round(STRUCK)
        first = swarm.members["peer-0"].peer
        name = first.exchanges.ownership.placement(STRUCK).order(0)[0]
        primary = swarm.members[name].peer
        answer, goes_on = handler_of(primary.transport, "reduce"), asyncio.Event()

        async def answer_late(request: Request) -> Message:
            reply = await answer(request)
            if convert(request.message.body, ReduceRequest).round == STRUCK:
                await goes_on.wait()
            return reply

        primary.transport.handle("reduce", answer_late)
        others = [m.peer for n, m in swarm.members.items() if n != name]

        def is_known() -> bool:
            records = [p.gossip.view.get(name) for p in others]
            return all(r is not None and r.round > STRUCK for r in records)

        await swarm.until(is_known)
        assert all(p.replica is not None and p.replica.round == STRUCK for p in others)
        swarm.hub.freeze(name)
        await asyncio.sleep(stop_s)
        swarm.hub.thaw(name)
        goes_on.set()
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") == 0
        trainer = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)
