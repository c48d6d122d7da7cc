"""Who leaves in the middle of a round leaves its gradient to another replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import Busy, DeadlineExceeded, NotReady, Refused, RemoteError, Stale
from swarmnet.methods.microbatch import CommittedReply, CommittedRequest
from swarmnet.methods.update import AdoptedRequest, AdoptRequest
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, OBSERVER_STAGE
from swarmnet.protocol.pipeline.ledger import Entry, Ledger
from swarmnet.protocol.update.robust import CLIP_TOLERANCE, is_alike
from swarmnet.spec import RunSpec
from swarmnet.swarm.lifecycle.departure import DRAIN_S
from swarmnet.swarm.update.exchanges import Behind
from swarmnet.swarm.update.handover import MAX_ADOPTED
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.swarm.handlers import handler_of
from tests.swarm.harness import (
    Member,
    Swarm,
    in_virtual_time,
    relative_difference,
    replay,
    tiny_spec,
)
from tests.training.packed import PackedData

ROUNDS = 3
LEAVES_IN = 1
BATCH = 240
"""Of 60 microbatches: a round takes far longer than to leave."""
LEAVER = "peer-1"


def long_rounds(
    folder: Path, global_batch: int = BATCH, kind: str = "adamw", **sync: Any
) -> RunSpec:
    values = tiny_spec(
        folder,
        num_stages=2,
        rounds=ROUNDS,
        global_batch=global_batch,
        sync={"aggregation": "mean"} | sync,
    ).model_dump()
    values["optimizer"] |= {"kind": kind}
    return RunSpec.model_validate(values)


async def in_the_middle(swarm: Swarm, num_replicas: int = 3) -> Member:
    """Rounds are under way; returns who is to leave, which has done a part of this one."""
    swarm.start("feeder", stage=0)
    for i in range(num_replicas):
        swarm.start(f"peer-{i}", stage=1, feeds=False)
    await swarm.until_round(LEAVES_IN)
    leaver = swarm.members[LEAVER]
    replica = leaver.peer.replica
    assert replica is not None
    await swarm.until(lambda: replica.ledger.num_samples(replica.round) >= BATCH // 10)
    return leaver


async def left(swarm: Swarm, leaver: Member) -> None:
    leaver.peer.stop()
    await swarm.until(leaver.life.done)
    leaver.life.result()
    del swarm.members[leaver.peer_id]


def check(swarm: Swarm, spec: RunSpec, tolerance: float = 1e-4) -> None:
    trainer = replay(spec, swarm.counted, ROUNDS)
    assert relative_difference(swarm.parameters(), trainer.state_dict()) < tolerance


@pytest.mark.parametrize(
    ("rule", "kind"), [("mean", "adamw"), ("median_clip", "adamw"), ("mean", "muon")]
)
def test_nothing_is_lost_and_nobody_waits_for_the_end_of_the_round(
    tmp_path: Path, rule: str, kind: str
) -> None:
    spec = long_rounds(tmp_path, kind=kind, aggregation=rule)

    async def scenario(swarm: Swarm) -> None:
        leaver = await in_the_middle(swarm, 5 if rule == "median_clip" else 3)
        before = swarm.rounds()
        await left(swarm, leaver)
        assert max(swarm.rounds()) == before[0], "it waited for the round's end"
        await swarm.until_round(ROUNDS)
        check(swarm, spec)
        assert swarm.total("samples_lost") == swarm.total("contributions_dropped") == 0

    in_virtual_time(scenario, spec)


def test_samples_without_any_loss_keep_nobody(tmp_path: Path) -> None:
    """Their gradient is zero: there is nothing to hand over, and nothing to wait for."""
    spec = long_rounds(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        def masked(index: int) -> float:
            return float(max(swarm.rounds()) >= LEAVES_IN)

        swarm.data = PackedData(swarm.data, masked, has_documents=False)
        leaver = await in_the_middle(swarm)
        before = swarm.rounds()
        await left(swarm, leaver)
        assert max(swarm.rounds()) == before[0], "it waited for the round's end"
        await swarm.until_round(ROUNDS)
        assert all(len(ids) == len(set(ids)) == BATCH // 4 for ids in swarm.counted.values())
        assert swarm.total("samples_lost") == 0
        swarm.parameters()  # the same at both replicas

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(("kind", "codec"), [("adamw", "none"), ("muon", "int4")])
def test_beside_an_exchange_of_the_round_before(tmp_path: Path, kind: str, codec: str) -> None:
    spec = long_rounds(tmp_path, kind=kind, mode="delayed", codec=codec)

    async def scenario(swarm: Swarm) -> None:
        leaver = await in_the_middle(swarm)
        before = swarm.rounds()
        await left(swarm, leaver)
        assert max(swarm.rounds()) == before[0], "it waited for the round's end"
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") == 0
        swarm.parameters()

    in_virtual_time(scenario, spec)


def test_microbatches_that_will_never_count_keep_nobody(tmp_path: Path) -> None:
    """Their feeder died when they were done here: no commit will come for them."""
    spec = long_rounds(tmp_path, 3 * BATCH)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("other", stage=0)
        leaver = await in_the_middle(swarm)
        replica = leaver.peer.replica
        assert replica is not None
        r = replica.round

        def of_other() -> list[Entry]:
            return [e for e in replica.ledger.pending(r) if e.feeder == "other"]

        await swarm.until(lambda: len(of_other()) > 0)
        swarm.kill("other")
        orphans = {e.key for e in of_other()}
        kept = sum(e.num_samples for e in replica.ledger.committed(r))
        began = asyncio.get_running_loop().time()
        await left(swarm, leaver)
        assert asyncio.get_running_loop().time() - began < DRAIN_S
        assert max(swarm.rounds()) == r, "it waited for the round's end"
        heirs = [m.peer for m in swarm.members.values() if m.peer.handover.has_any(r)]
        assert len(heirs) == 1, "nobody has taken over what it learned"
        adopted = heirs[0].handover.num_samples(r)
        assert adopted >= kept
        assert leaver.peer.gossip.own.totals["retracted"] >= len(orphans)
        await swarm.until_round(ROUNDS)

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_a_question_in_the_middle_of_a_round_ends_no_flight(tmp_path: Path) -> None:
    """At its end it does: who asks has taken the microbatch out."""
    spec = long_rounds(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        leaver = await in_the_middle(swarm)
        feeder = swarm.members["feeder"].peer.feeder
        assert feeder is not None
        r = max(swarm.rounds())
        mine = feeder.rounds.get(r)
        assert mine is not None
        await swarm.until(lambda: len(mine.in_flight) >= 2)
        stays, ends = sorted(mine.in_flight)[:2]
        reply = feeder.committed(CommittedRequest(r, 1, (stays,), is_over=False), leaver.peer_id)
        assert reply == CommittedReply((), (stays,))
        for name in swarm.members:  # wherever it went
            assert feeder.committed(CommittedRequest(r, 1, (ends,)), name).in_flight == ()
        await swarm.until(lambda: not mine.in_flight & {stays, ends})
        assert stays in mine.committed
        assert ends not in mine.committed

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_what_went_another_way_counts_whoever_asks_about_it(tmp_path: Path) -> None:
    """Else anybody could keep a round from ending: by asking."""
    spec = long_rounds(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        await in_the_middle(swarm)
        feeder = swarm.members["feeder"].peer.feeder
        assert feeder is not None
        r = max(swarm.rounds())
        mine = feeder.rounds.get(r)
        assert mine is not None
        await swarm.until(lambda: len(mine.in_flight) >= 2)
        asked = tuple(sorted(mine.in_flight)[:2])
        for stage in range(4):  # some of these stages there are not
            feeder.committed(CommittedRequest(r, stage, (*asked, 7)), "stranger")
        assert mine.refused.keys() <= set(asked)
        await swarm.until(lambda: not mine.in_flight & set(asked))
        assert set(asked) <= mine.committed.keys()
        assert not mine.refused

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_an_heir_that_leaves_too_gives_on_what_it_was_given(tmp_path: Path) -> None:
    spec = long_rounds(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        leaver = await in_the_middle(swarm)
        other, second = (swarm.members[name].peer for name in ("peer-0", "peer-2"))

        async def moves(stage: int) -> None:
            """As long as it is about to move, it takes over nothing."""
            other.gossip.update(moving_to=stage, urgent=True)
            peers = [second, leaver.peer]
            await swarm.until(
                lambda: all(p.view.get("peer-0").moving_to == stage for p in peers)  # type: ignore[union-attr]
            )

        await moves(0)
        await left(swarm, leaver)
        leaver.peer = second
        await moves(OBSERVER_STAGE)
        handover = second.handover
        assert handover.has_any(LEAVES_IN)
        second.stop()
        await swarm.until(lambda: other.handover.has_any(LEAVES_IN))
        assert not handover.has_any(LEAVES_IN)
        await left(swarm, swarm.members["peer-2"])
        await swarm.until_round(ROUNDS)
        check(swarm, spec)
        assert swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec)


def refusing(answer: Callable[[], Exception]) -> Callable[[Swarm], list[str]]:
    """The heirs' answer to the last message, the first time."""

    def prepare(swarm: Swarm) -> list[str]:
        asked: list[str] = []
        for name, member in swarm.members.items():
            if name in (LEAVER, "feeder"):
                continue
            takes = handler_of(member.peer.transport, "adopted")

            async def refuse(request: Request, name: str = name, takes: Any = takes) -> Message:
                if not asked:
                    asked.append(name)
                    raise answer()
                reply: Message = await takes(request)
                return reply

            member.peer.transport.handle("adopted", refuse)
        return asked

    return prepare


def test_who_says_no_at_the_end_leaves_the_samples_with_the_leaver(tmp_path: Path) -> None:
    spec = long_rounds(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        leaver = await in_the_middle(swarm)
        asked = refusing(lambda: Stale("the round is over", round=LEAVES_IN + 1))(swarm)
        await left(swarm, leaver)
        assert asked
        await swarm.until_round(ROUNDS)
        check(swarm, spec)
        assert swarm.total("samples_lost") == 0

    in_virtual_time(scenario, spec)


def test_without_an_answer_samples_may_be_lost_and_are_not_counted_twice(tmp_path: Path) -> None:
    """The heir has them, and its answer does not come."""
    spec = long_rounds(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        leaver = await in_the_middle(swarm)
        call = leaver.peer.transport.call
        asked = []

        async def deaf(peer_id: str, method: str, message: Message, **options: Any) -> Message:
            reply = await call(peer_id, method, message, **options)
            if method == "adopted":
                asked.append(peer_id)
                raise DeadlineExceeded("no answer")
            return reply

        leaver.peer.transport.call = deaf  # type: ignore[method-assign]
        await left(swarm, leaver)
        assert len(asked) == 1
        await swarm.until_round(ROUNDS)
        check(swarm, spec)

    in_virtual_time(scenario, spec)


def test_a_round_does_not_end_and_takes_nothing_in_while_its_gradient_is_given(
    tmp_path: Path,
) -> None:
    spec = long_rounds(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        peer = (await in_the_middle(swarm)).peer
        replica = peer.replica
        assert replica is not None
        replica.transitions.give()
        with pytest.raises(NotReady, match="leaving"):
            peer.steps.admission.check_room(replica, replica.round, announced=False)
        closing = asyncio.create_task(replica.transitions.close_round())
        await asyncio.sleep(1.0)
        assert not closing.done()
        assert not replica.closed
        replica.transitions.gave(is_refused=False)
        await closing
        assert replica.closed

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_who_begins_anew_drops_what_was_left_with_it(tmp_path: Path) -> None:
    """Its parameters may be others than those that the gradient belongs to."""
    spec = long_rounds(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        await left(swarm, await in_the_middle(swarm))
        heirs = [m.peer for m in swarm.members.values() if m.peer.handover.has_any(LEAVES_IN)]
        (heir,) = heirs
        attend = heir.updates.attend

        def lose_touch() -> None:
            heir.updates.attend = attend  # type: ignore[method-assign]
            raise Behind("the stage has moved on")

        heir.updates.attend = lose_touch  # type: ignore[method-assign]
        await heir.gossip.changed.until(lambda: heir.gossip.own.state == JOINING, 60.0)
        await swarm.until(lambda: heir.gossip.own.state == ACTIVE)
        assert heir.gossip.own.round == LEAVES_IN
        assert not heir.handover.has_any(LEAVES_IN)
        await swarm.until_round(ROUNDS)
        assert swarm.total("samples_lost") > 0

    in_virtual_time(scenario, spec, is_synthetic=True)


def test_bad_gradients_are_not_taken_over(tmp_path: Path) -> None:
    spec = long_rounds(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        leaver = await in_the_middle(swarm)
        heir = swarm.members["peer-2"].peer
        replica, transport = heir.replica, leaver.peer.transport
        assert replica is not None

        async def adopt(shard: int = 0, r: int = LEAVES_IN, size: int | None = None) -> None:
            size = replica.stage.shard_sizes[shard] if size is None else size
            array = Array("float32", (size,), bytes(4 * size))
            message = Message(AdoptRequest(r, 1, shard), (array,))
            await transport.call("peer-2", "adopt", message, timeout_s=5.0)

        async def adopted(r: int = LEAVES_IN, tokens: int = 1) -> None:
            message = Message(AdoptedRequest(r, 1, 1, tokens))
            await transport.call("peer-2", "adopted", message, timeout_s=5.0)

        with pytest.raises(NotReady, match="leaving"):
            await adopt()
        leaver.peer.gossip.update(state=LEAVING, urgent=True)
        await swarm.until(lambda: heir.view.get(LEAVER).state == LEAVING)  # type: ignore[union-attr]
        with pytest.raises(RemoteError, match="fp32 numbers"):
            await adopt(size=7)
        with pytest.raises(Stale):
            await adopt(r=LEAVES_IN + 1)
        with pytest.raises(NotReady, match="not whole"):
            await adopted()
        await adopt()
        with pytest.raises(NotReady, match="not whole"):
            await adopted()
        for method in ("adopt", "adopted"):
            for body in (None, 7, "step", [1, 2], {"round": -1}):
                with pytest.raises(Refused):
                    await transport.call("peer-2", method, Message(body), timeout_s=5.0)
        for _ in range(MAX_ADOPTED):
            for j in range(replica.num_shards):
                await adopt(j)
            await adopted()
        with pytest.raises(Busy):
            await adopt()
        # Who has given its own gradient away takes no other: its buffer has the sum yet.
        replica.transitions.give()
        replica.transitions.gave(is_refused=False)
        with pytest.raises(NotReady, match="takes over no gradient"):
            await adopt()

    in_virtual_time(scenario, spec)


@pytest.mark.parametrize(("rule", "times"), [("mean", float("nan")), ("median_clip", 1000.0)])
def test_a_false_gradient_does_not_spoil_the_heirs_own(
    tmp_path: Path, rule: str, times: float
) -> None:
    spec = long_rounds(tmp_path, aggregation=rule)

    async def scenario(swarm: Swarm) -> None:
        leaver = await in_the_middle(swarm, 5)
        replica = leaver.peer.replica
        assert replica is not None
        gradient = replica.stage.copy_gradient

        def false(shard_index: int) -> Array:
            return from_tensor(to_tensor(gradient(shard_index)) * times)

        replica.stage.copy_gradient = false  # type: ignore[method-assign]
        given = replica.ledger.num_samples(replica.round)
        await left(swarm, leaver)
        await swarm.until_round(ROUNDS)
        swarm.parameters()
        assert swarm.total("contributions_dropped") == 1
        assert not any(m.peer.gossip.own.strikes for m in swarm.members.values())
        assert given <= swarm.total("samples_lost") < 2 * given + 16, "only what it gave"

    in_virtual_time(scenario, spec)


def test_a_ledger_gives_a_round_away_and_gets_it_back() -> None:
    ledger = Ledger()
    for i in range(3):
        ledger.begin((1, i), caller="c", feeder="f", num_samples=4)
        ledger.done((1, i), num_tokens=10, next_peer=None)
        ledger.commit((1, i))
    ledger.begin((2, 0), caller="c", feeder="f", num_samples=4)
    taken = ledger.take(1)
    assert (ledger.num_tokens(1), len(ledger)) == (0, 1)
    ledger.put_back(1, taken)
    assert (ledger.num_tokens(1), ledger.num_samples(1), len(ledger)) == (30, 12, 4)


@given(
    norm=st.floats(1e-6, 1e6),
    own_tokens=st.integers(1, 10**6),
    tokens=st.integers(1, 10**6),
    times=st.floats(0.0, 100.0),
)
def test_a_gradient_like_the_own_one_is_alike_and_a_far_larger_one_is_not(
    norm: float, own_tokens: int, tokens: int, times: float
) -> None:
    """`norm` a token where the signal prevails; by 1 / sqrt(tokens) where the noise does."""
    own = (norm * own_tokens) ** 2
    assert is_alike(own, own_tokens, (norm * tokens) ** 2, tokens)
    noise = (norm * (own_tokens * tokens) ** 0.5) ** 2
    assert is_alike(own, own_tokens, noise, tokens)
    largest = CLIP_TOLERANCE * max(1.0, (own_tokens / tokens) ** 0.5)
    if abs(times - largest) > 1e-3 * largest:
        found = is_alike(own, own_tokens, (times * norm * tokens) ** 2, tokens)
        assert found == (times < largest)
    assert is_alike(0.0, 0, own, own_tokens)
    for bad in (float("nan"), float("inf")):
        assert not is_alike(own, own_tokens, bad, tokens)
    assert not is_alike(own, own_tokens, own, 0)
