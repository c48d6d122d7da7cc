"""One that speaks for shards that others lead: of their sums of squares, by which the gradient is
clipped, and of the last stage's sum of a matrix that the first one holds too."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from swarmnet.methods.contact import PING
from swarmnet.methods.update import NORM, REDUCE_TIED, NormReply, TiedSum
from swarmnet.protocol.membership.records import ACTIVE, DIGEST_BYTES
from swarmnet.protocol.update.roster import MAX_TERM
from swarmnet.swarm.update.exchange.norms import Norms
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message
from tests.hostile.attacker import Attacker, NamedSigner
from tests.hostile.attacks import HUGE, calling, says_huge_norms
from tests.hostile.trial import trial
from tests.swarm.handlers import handler_of
from tests.swarm.harness import SIZES, Swarm, in_virtual_time
from tests.swarm.update.exchange.test_tied_shards import check, tied_spec

LIAR = "peer-7"
TIED_EVERY_S = 0.1


def the_member(swarm: Swarm) -> tuple[Any, int]:
    """One that does all its work besides."""
    return swarm.members[LIAR].peer.transport, swarm.stages()[LIAR]


@pytest.mark.parametrize("num_names", [0, 4])
def test_no_norm_is_what_one_says_that_does_not_lead(num_names: int) -> None:
    """A member says it truly of what it leads: others of that round have the sums of all."""

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        assert not swarm.total("norm_missed")
        # The member is barred for its own shards, and takes no later one itself.
        honest = [m.peer for p, m in swarm.members.items() if p != LIAR]
        taken = [peer.exchanges.norms.last_total for peer in honest]
        assert 0 < max(taken) < HUGE, taken

    attack = says_huge_norms(num_names, SIZES.num_shards, None if num_names else the_member)
    pace = trial(attack, during_s=8.0, look=untouched)
    print(pace)
    assert pace.held(), pace


@pytest.mark.parametrize("says", [HUGE, 0.0, None])
def test_no_norm_is_what_one_collector_says(
    says: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers before anybody can know, or (`None`) never."""
    taken = list[float]()
    add = Norms.add

    async def noted(norms: Norms, r: int, j: int, squares: float) -> float:
        taken.append(await add(norms, r, j, squares))
        return taken[-1]

    monkeypatch.setattr(Norms, "add", noted)

    async def attack(attacker: Attacker, swarm: Swarm) -> None:
        norms = next(iter(swarm.members.values())).peer.exchanges.norms
        transport: Any = swarm.members[norms.ownership.roots(0)[0]].peer.transport
        honest = handler_of(transport, NORM.name)

        async def answer(request: Request[Any]) -> Message[Any]:
            if says is None:
                await asyncio.get_running_loop().create_future()
            return Message(NormReply(says or 0.0))

        transport.handle(NORM.name, answer)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            transport.handle(NORM.name, honest)

    def untouched(swarm: Swarm, attacker: Attacker) -> None:
        assert not swarm.total("norm_missed")
        assert all(0 < total < HUGE for total in taken)

    pace = trial(attack, during_s=8.0, look=untouched)
    print(pace)
    assert pace.held(), pace


@pytest.mark.parametrize("is_member", [True, False])
def test_no_sum_of_a_tied_matrix_is_of_one_that_does_not_lead(
    tmp_path: Path, is_member: bool
) -> None:
    """It pushes nonsense with the highest ballot, before and after the primary's own."""
    spec, rounds = tied_spec(tmp_path, 2), 6

    async def scenario(swarm: Swarm) -> None:
        for i in range(8):
            swarm.start(f"peer-{i}", stage=i % 2)
        await swarm.until_round(1)
        attacker = Attacker(swarm.hub, spec.run_id, sorted(swarm.members), random.Random(0))
        peer = swarm.members[LIAR].peer
        transport: Any = peer.transport
        if not is_member:
            name = attacker.name("zz")
            name.answer(PING, lambda body: None)
            transport = name.transport
        assert peer.replica is not None
        sizes = [len(peer.replica.stage.parameter_shard(j).data) for j in range(TIED)]
        async with calling() as start:
            while min(swarm.rounds()) < rounds:
                r = max(swarm.rounds())
                if not is_member:
                    says = {"state": ACTIVE, "round": r, "stage": 1, "addresses": name.where}
                    name.tell(attacker.victims, name.record(**says))
                for j in set(range(TIED)) - (led_by(swarm) if is_member else set()):
                    push = TiedSum(r, 1, j, 64, MAX_TERM, bytes(DIGEST_BYTES))
                    nonsense = Array("float32", (sizes[j] // 4,), b"\0\0\x80\x3f" * (sizes[j] // 4))
                    for victim, stage in swarm.stages().items():
                        if stage == 0:
                            start(transport, victim, REDUCE_TIED, Message(push, (nonsense,)))
                await asyncio.sleep(TIED_EVERY_S)
        assert swarm.total("tied_missed") == 0
        check(swarm, rounds)

    in_virtual_time(scenario, spec, signer=NamedSigner)


TIED = 2
"""Shards of the matrix."""


def led_by(swarm: Swarm) -> set[int]:
    """Of which the liar is the primary by the records: there it may say what it likes."""
    exchanges = swarm.members[LIAR].peer.exchanges
    assert exchanges is not None
    rosters = [(j, exchanges.ownership.roster(exchanges.current, j)) for j in range(TIED)]
    return {j for j, roster in rosters if roster.ballot.primary == LIAR}
