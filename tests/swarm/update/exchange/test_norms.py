"""The gradient norm over all stages, and the death of who sums it up."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.errors import NotReady, Unreachable
from swarmnet.methods.update import NormReply
from swarmnet.simulation.clock import run
from swarmnet.swarm.condition import Condition
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.timing import LOOK_AGAIN_S, LOOK_LESS_S
from swarmnet.swarm.update.exchange.exchange import Exchange
from swarmnet.swarm.update.exchange.norms import ATTEMPT_S, KEPT_ROUNDS, Norms
from swarmnet.swarm.update.exchange.shard_work import ShardWork
from swarmnet.swarm.update.exchange.speakers import Speakers
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.hostile.attacker import NamedSigner, norm_said
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

WAIT_S, LONG_S, USUAL_S = 60.0, 30.0, 2.0
ROUND = 3
SUMS = {0: 1.0, 1: 2.0, 2: 4.0}
LATER = (("b", 1), ("c", 2))
"""Who leads shards that are not the first."""


class Net:
    """Norms of peers that call each other at once."""

    def __init__(self, names: str, num_stages: int = 1) -> None:
        self.live = list(names)
        self.live_of_others: list[str] = []
        self.cuts: set[tuple[str, str]] = set()
        """Who cannot call whom."""
        self.silent: set[str] = set()
        """Who takes calls, and never answers."""
        self.shards = {0: len(SUMS), 1: len(SUMS)}
        """How many each stage is known to have."""
        self.first: dict[tuple[int, int], str] = {(0, j): "abc"[j] for j in SUMS}
        """By stage and shard, who is taken for its primary while it lives."""
        self.handlers: dict[tuple[str, str], Any] = {}
        self.missed: list[str] = []
        self.barred: set[str] = set()
        self.records: dict[str, Any] = {"other": SimpleNamespace(stage=1)}
        self.norms = {name: self.make(name, num_stages) for name in names}

    def make(self, name: str, num_stages: int, stage: int = 0) -> Norms:
        async def call(
            peer_id: str, method: str, message: Message, timeout_s: float, on_progress: Any
        ) -> Message:
            is_there = peer_id in (*self.live, *self.live_of_others)
            if not is_there or (name, peer_id) in self.cuts:
                raise Unreachable("dead")
            if peer_id in self.silent:
                await asyncio.sleep(timeout_s)
                raise Unreachable("no answer")
            request: Any = SimpleNamespace(remote=name, message=message)
            try:
                async with asyncio.timeout(timeout_s):
                    reply: Message = await self.handlers[peer_id, method](request)
            except TimeoutError:
                raise Unreachable("no answer") from None
            return reply

        def handle(method: str, handler: Any, *, ends_with_caller: bool) -> None:
            self.handlers[name, method] = handler

        def check_run(request: Request) -> None: ...

        transport: Any = SimpleNamespace(call=call, handle=handle)
        gossip: Any = SimpleNamespace(
            own=SimpleNamespace(peer_id=name, run_id="run"),
            signer=NamedSigner(name),
            view=SimpleNamespace(get=self.records.get, is_barred=self.barred.__contains__),
            changed=Condition(),
            liveness=SimpleNamespace(awake_s=lambda: asyncio.get_running_loop().time()),
            check_run=check_run,
            add_total=lambda total: self.missed.append(name),
        )
        members = SimpleNamespace(num_shards=lambda of: self.shards.get(of, 0))

        def roots(of: int) -> list[str]:
            return self.live if of == 0 else self.live_of_others

        def leaders(of: int, round_index: int, j: int) -> tuple[str, ...]:
            first = self.first.get((of, j), "other")
            return tuple(sorted(roots(of) or [first], key=lambda p: (p != first, p)))

        replica: Any = SimpleNamespace(index=stage, current_exchange=ROUND)
        ownership: Any = SimpleNamespace(
            gossip=gossip, roots=roots, members=members, leaders=leaders, replica=replica
        )
        waits = SimpleNamespace(norm_s=WAIT_S, contributions_s=LONG_S, usual_s=USUAL_S)
        pace: Any = SimpleNamespace(waits=lambda: waits)
        speakers = Speakers(ownership)
        return Norms(transport, gossip, replica, num_stages, ownership, speakers, pace)

    async def close(self) -> None:
        for norms in self.norms.values():
            await norms.close()


def test_everybody_gets_the_sum_over_all_shards() -> None:
    async def scenario() -> None:
        net = Net("abc")
        totals = await asyncio.gather(
            *(net.norms[name].add(3, j, SUMS[j]) for j, name in enumerate("abc"))
        )
        assert totals == [7.0, 7.0, 7.0]
        assert not net.missed
        await net.close()

    run(scenario())


def test_the_total_outlives_the_root_that_told_it_to_some() -> None:
    """The new root, and the one after it, never hear the sums of those that have it already."""

    async def scenario() -> None:
        net = Net("adebc")
        loop = asyncio.get_running_loop()
        totals = await asyncio.gather(
            *(net.norms[name].add(3, j, SUMS[j]) for j, name in enumerate("abc"))
        )
        net.live.remove("a")
        began = loop.time()
        again = await net.norms["d"].add(3, 0, 0.5)  # a's shard, summed anew without a's part
        assert again == totals[1], "every shard is clipped by one norm"
        assert loop.time() - began < WAIT_S / 4
        assert not net.missed
        await net.close()

    run(scenario())


def test_the_total_outlives_all_of_its_stage_that_had_it() -> None:
    """The root of another stage has it too: by the word of its own, who are asked as well."""

    async def scenario() -> None:
        net = Net("ab", num_stages=2)
        net.norms["o"] = net.make("o", 2, stage=1)
        net.live_of_others.append("o")
        net.records["o"] = SimpleNamespace(stage=1)
        net.norms["o"].heard(ROUND, 17.0)
        net.live.remove("a")  # it had stage 0's sum, and all the shards' but one
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await net.norms["b"].add(ROUND, 0, 0.5) == 17.0
        assert loop.time() - began < WAIT_S / 4
        assert not net.missed
        await net.close()

    run(scenario())


def test_who_is_told_the_total_with_a_result_takes_it_when_no_root_answers() -> None:
    async def scenario() -> None:
        net = Net("ab")
        adding = [asyncio.create_task(net.norms[n].add(ROUND, 0, 1.0)) for n in "ab"]
        await asyncio.sleep(1.0)
        net.norms["a"].heard(ROUND, 7.0)
        net.norms["a"].heard(ROUND, 9.0)
        assert net.norms["a"].known(ROUND) == 7.0, "the first word holds"
        net.norms["a"].heard(ROUND + KEPT_ROUNDS + 1, 9.0)
        assert net.norms["a"].known(ROUND + KEPT_ROUNDS + 1) is None, "no such round is near"
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await asyncio.gather(*adding) == [7.0, 7.0]
        assert loop.time() - began < WAIT_S / 4
        assert not net.missed
        await net.close()

    run(scenario())


def test_what_is_told_with_a_result_does_not_outdo_the_root() -> None:
    """One primary that lies would else scale down every shard that it does not own."""

    async def scenario() -> None:
        net = Net("abc")
        net.norms["a"].heard(ROUND, 1e30)
        net.norms["b"].heard(ROUND, 1e30)
        totals = await asyncio.gather(
            *(net.norms[name].add(ROUND, j, SUMS[j]) for j, name in enumerate("abc"))
        )
        assert totals == [7.0, 7.0, 7.0]
        assert net.norms["a"].known(ROUND) == 7.0
        await net.close()

    run(scenario())


def test_it_goes_with_results_and_to_backups(tmp_path: Path) -> None:
    """Of three replicas one is primary of the only shard; the others never ask for its norm."""
    spec = tiny_spec(tmp_path, num_stages=1, sync={"shard_parameters": 2**20, "replication": 2})

    after_backup: list[float | None] = []

    def note(peer: Peer) -> None:
        take = handler_of(peer.transport, "mirror")

        async def back_up(request: Request) -> Message:
            reply = await take(request)
            after_backup.append(peer.exchanges.norms.known(request.message.body.round))
            return reply

        peer.transport.handle("mirror", back_up)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(1, 3)
        await swarm.until_round(1)
        peers = [member.peer for member in swarm.members.values()]
        for peer in peers:
            note(peer)
        await swarm.until_round(4)
        replica = peers[0].replica
        assert replica is not None
        assert replica.num_shards == 1
        norms = {peer.exchanges.norms.known(3) for peer in peers}
        assert len(norms) == 1, "all know the same"
        assert norms != {None}
        assert sum(peer.exchanges.norms.last_total > 0 for peer in peers) == 1, "one was primary"
        assert after_backup
        assert None not in after_backup

    in_virtual_time(scenario, spec)


def test_no_backup_makes_squares_while_primaries_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the sums of others' shards, and makes what it would say of them where they do not."""
    made, given = list[int](), list[int]()
    squares, stand_in = ShardWork.squares, Exchange.stand_in

    def noted(work: ShardWork, shard: int, *about: Any) -> Any:
        made.append(shard)
        return squares(work, shard, *about)

    def asked(exchange: Exchange, shard: int, *about: Any) -> None:
        given.append(shard)
        stand_in(exchange, shard, *about)

    monkeypatch.setattr(ShardWork, "squares", noted)
    monkeypatch.setattr(Exchange, "stand_in", asked)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(1, 3)
        await swarm.until_round(4)
        assert given
        assert not made

    in_virtual_time(scenario, tiny_spec(tmp_path, num_stages=1, sync={"replication": 2}))


def test_where_nobody_has_it_yet_the_new_root_sums_up() -> None:
    async def scenario() -> None:
        net = Net("abcd")
        net.first[0, 0] = "d"
        first = [
            asyncio.create_task(net.norms[n].add(3, j, SUMS[j])) for n, j in (("b", 1), ("c", 2))
        ]
        await asyncio.sleep(1.0)
        net.live.remove("a")
        totals = await asyncio.gather(*first, net.norms["d"].add(3, 0, 0.5))
        assert totals == [6.5, 6.5, 6.5]
        assert not net.missed
        await net.close()

    run(scenario())


def test_collectors_that_say_nothing_are_not_waited_for() -> None:
    async def scenario() -> None:
        net = Net("xyabc")
        net.silent |= {"x", "y"}
        loop = asyncio.get_running_loop()
        began = loop.time()
        totals = await asyncio.gather(
            *(net.norms[name].add(ROUND, j, SUMS[j]) for j, name in enumerate("abc"))
        )
        assert totals == [7.0] * 3
        assert loop.time() - began < 2 * LOOK_LESS_S < ATTEMPT_S
        assert not net.missed
        await net.close()

    run(scenario())


def test_who_does_not_know_says_so_at_once() -> None:
    async def scenario() -> None:
        net = Net("ab")
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await net.norms["a"].ask_others(3, 0) is None
        assert loop.time() - began < 1.0
        await net.close()

    run(scenario())


def test_what_does_not_hold_is_not_told() -> None:
    async def scenario() -> None:
        net = Net("ab")
        net.first = {(0, j): "a" for j in SUMS}
        adding = [net.norms["a"].add(3, j, SUMS[j]) for j in SUMS]
        assert await asyncio.gather(*adding) == [7.0] * 3
        net.norms["a"].forget()
        assert await net.norms["b"].ask_others(3, 0) is None
        await net.close()

    run(scenario())


@pytest.mark.parametrize(
    ("cuts", "most_s"),
    [
        ({}, 1.0),
        ({"pa", "oa"}, 1.0),  # one collector that all can call is enough, and nobody waits
        ({"bo", "ao"}, 1.0),
        ({"po", "ba"}, WAIT_S / 4),  # those that come after them sum up
    ],
)
def test_who_cannot_be_called_by_some_is_not_needed(cuts: set[str], most_s: float) -> None:
    """Two stages, "ab" and "op": "a" and "o" are the collectors. What is summed up is the same
    anywhere, bit for bit."""

    async def scenario() -> None:
        net = Net("ab", num_stages=2)
        net.live_of_others += "op"
        net.norms |= {name: net.make(name, 2, stage=1) for name in "op"}
        net.first = {(0, j): name for j, name in enumerate("aba")}
        net.first |= {(1, j): name for j, name in enumerate("pop")}
        net.cuts = {(caller, callee) for caller, callee in cuts}
        loop = asyncio.get_running_loop()
        began = loop.time()
        totals = await asyncio.gather(
            *(net.norms[n].add(ROUND, j, SUMS[j] / 3) for j, n in enumerate("aba")),
            *(net.norms[n].add(ROUND, j, SUMS[j] / 7) for j, n in enumerate("pop")),
        )
        sums = list(SUMS.values())
        assert set(totals) == {sum(x / 3 for x in sums) + sum(x / 7 for x in sums)}
        assert loop.time() - began < most_s
        assert not net.missed
        await net.close()

    run(scenario())


def test_the_collectors_are_listened_to_while_others_are_asked_too() -> None:
    """The last to come tells the first two alone."""

    async def scenario() -> None:
        net = Net("abcde", num_stages=1)
        net.first = {(0, j): name for j, name in enumerate("cce")}
        loop = asyncio.get_running_loop()
        began = loop.time()
        early = [asyncio.create_task(net.norms["c"].add(ROUND, j, SUMS[j])) for j in (0, 1)]
        await asyncio.sleep(7.0)
        late = net.norms["e"].add(ROUND, 2, SUMS[2])
        assert await asyncio.gather(*early, late) == [7.0] * 3
        assert loop.time() - began < 7.5
        await net.close()

    run(scenario())


def test_a_stage_is_summed_up_when_all_its_shards_are_known() -> None:
    """Who may speak for a stage: `membership.callers`, and its tests."""

    async def scenario() -> None:
        net = Net("a", num_stages=2)
        net.shards[1] = 2
        theirs = [asyncio.create_task(_say(net, ROUND, {0: 10.0, 7: 1e30}))]
        own = [asyncio.create_task(net.norms["a"].add(ROUND, j, SUMS[j])) for j in SUMS]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in own)
        again = {0: 99.0, 1: 20.0}  # the first word for a shard holds
        theirs.append(asyncio.create_task(_say(net, ROUND, again)))
        assert await asyncio.gather(*own) == [37.0] * 3
        assert {reply.body.sum for reply in await asyncio.gather(*theirs)} == {37.0}
        assert not net.missed
        await net.close()

    run(scenario())


def test_nobody_fills_the_books_with_rounds_that_are_far_away() -> None:
    async def scenario() -> None:
        net = Net("a", num_stages=2)
        net.shards[1] = 1
        for r in (ROUND + KEPT_ROUNDS + 1, 2**40):
            with pytest.raises(NotReady, match="too far ahead"):
                await _say(net, r, {0: 1.0})
        heard = asyncio.create_task(_say(net, ROUND, {0: 10.0}))
        totals = await asyncio.gather(*(net.norms["a"].add(ROUND, j, SUMS[j]) for j in SUMS))
        assert totals == [17.0] * 3
        await heard
        await net.close()

    run(scenario())


def test_a_stage_of_which_nobody_is_known_is_waited_for() -> None:
    async def scenario() -> None:
        net = Net("a", num_stages=2)
        del net.shards[1]
        with pytest.raises(NotReady, match="no replica of that stage"):
            await _say(net, ROUND, {0: 10.0})
        await net.close()

    run(scenario())


def _ended(net: Net, names: str) -> list[asyncio.Task[float]]:
    """Primaries of the three shards of stage 0 that tell their sums at once."""
    norms = [(j, net.norms[name]) for j, name in enumerate(names)]
    return [asyncio.create_task(of.add(ROUND, j, SUMS[j])) for j, of in norms]


def _claim(net: Net, peer_id: str, *shards: int) -> list[asyncio.Task[None]]:
    """It says at both collectors of stage 0 that these shards are huge."""

    async def claim(collector: str) -> None:
        body = norm_said(
            NamedSigner(peer_id), "run", peer_id, ROUND, 0, dict.fromkeys(shards, 1e30)
        )
        request: Any = SimpleNamespace(remote=peer_id, message=Message(body))
        with contextlib.suppress(NotReady):
            await net.handlers[collector, "norm"](request)

    return [asyncio.create_task(claim(collector)) for collector in "ab"]


@pytest.mark.parametrize(("liar", "shards"), [("c", (0, 1)), ("d", (0, 1, 2)), ("x", (0, 1, 2))])
def test_who_does_not_lead_a_shard_says_nothing_of_it(liar: str, shards: tuple[int, ...]) -> None:
    """`c` leads another one, `d` none, and `x` is a stranger. All speak before the primaries do."""

    async def scenario() -> None:
        net = Net("abcd")
        early = _claim(net, liar, *shards)
        await asyncio.sleep(LONG_S - ATTEMPT_S)
        late = _claim(net, liar, *shards)
        assert await asyncio.gather(*_ended(net, "abc")) == [7.0] * 3
        await asyncio.gather(*early, *late)
        assert not net.missed
        await net.close()

    run(scenario())


def test_a_primary_that_is_later_than_others_speaks_for_its_shard() -> None:
    async def scenario() -> None:
        net = Net("abcd")
        claims = _claim(net, "d", 0)
        early = [asyncio.create_task(net.norms[n].add(ROUND, j, SUMS[j])) for n, j in LATER]
        await asyncio.sleep(USUAL_S - 2 * LOOK_AGAIN_S)
        assert await asyncio.gather(net.norms["a"].add(ROUND, 0, SUMS[0]), *early) == [7.0] * 3
        await asyncio.gather(*claims)
        assert not net.missed
        await net.close()

    run(scenario())


def test_another_speaks_for_a_primary_that_lives_and_says_nothing() -> None:
    """At first after a wait; from then on at once, until the primary speaks again."""

    async def scenario() -> None:
        net, loop = Net("abcd"), asyncio.get_running_loop()
        net.first[0, 0] = "x"
        net.live.append("x")
        net.silent.add("x")
        took = list[float]()
        for r in range(ROUND, ROUND + 3):
            began = loop.time()
            sums = [net.norms[name].add(r, j, SUMS[j]) for j, name in enumerate("abc")]
            assert await asyncio.gather(*sums) == [7.0] * 3
            took.append(loop.time() - began)
            if r > ROUND:
                for collector in "abc":
                    net.norms[collector].speakers.spoke("x")
        assert took[0] >= USUAL_S
        assert took[1] < USUAL_S / 2
        assert took[2] >= USUAL_S
        assert max(took) < WAIT_S / 4
        assert not net.missed
        await net.close()

    run(scenario())


async def _say(net: Net, round_index: int, sums: dict[int, float]) -> Message:
    """What a replica of stage 1 hears when it tells "a" the norms of its shards."""
    body = norm_said(NamedSigner("other"), "run", "other", round_index, 1, sums)
    request: Any = SimpleNamespace(remote="other", message=Message(body))
    reply: Message = await net.handlers["a", "norm"](request)
    return reply


def test_one_collector_that_lies_says_nothing_alone_where_the_others_wait() -> None:
    """They answer that they do, which is not silence."""

    async def scenario() -> None:
        net = Net("abcd")

        async def lie(request: Any) -> Message:
            return Message(NormReply(1e30))

        net.handlers["a", "norm"] = lie
        early = [asyncio.create_task(net.norms[n].add(ROUND, j, SUMS[j])) for n, j in LATER]
        await asyncio.sleep(3 * ATTEMPT_S)
        assert not any(task.done() for task in early), "the first shard has no sum"
        assert await asyncio.gather(net.norms["d"].add(ROUND, 0, SUMS[0]), *early) == [7.0] * 3
        await net.close()

    run(scenario())
