"""A closed run: every peer refuses who has no invite, and those who have one train as ever."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarmnet.admission import Invite, InviteOnly
from swarmnet.errors import Busy, Refused, SwarmnetError, Unreachable
from swarmnet.identity import Identity
from swarmnet.methods.method import STRANGERS
from swarmnet.methods.records import GossipRequest, Records, SignedRecord, Suspicion
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Message, convert, pack
from tests.swarm.harness import VirtualKeySigner

RUN = "r" * 32
OWNER = Identity(b"o" * 32)
YEAR_S = 365 * 86_400


class Closed:
    """Gossiping peers of a closed run; its date is that of the loop."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.invite = Invite.issue(OWNER, RUN, YEAR_S)

    def join(self, seed: int, invite: Invite | None, *, quiet: bool = False) -> Gossip:
        key = Identity(bytes([seed]) * 32)
        transport = self.hub.transport(key.peer_id)
        transport.set_run(RUN)
        own = Record(
            key.peer_id,
            RUN,
            incarnation=1,
            version=1,
            state=OBSERVING if quiet else ACTIVE,
            stage=-1 if quiet else 0,
            credential=invite.credential(key.peer_id) if invite else b"",
        )
        admission = InviteOnly(OWNER.peer_id, RUN, clock=lambda: asyncio.get_running_loop().time())
        gossip = Gossip(
            transport,
            View(key.peer_id),
            VirtualKeySigner(key),
            own,
            random.Random(seed),
            quiet=quiet,
            admission=admission,
        )

        async def welcome(request: Request) -> Message:
            return Message("welcome")

        transport.handle("relay_reserve", welcome)
        return gossip


async def step(caller: Gossip, callee: Gossip) -> str:
    reply = await caller.transport.call(
        callee.own.peer_id, "relay_reserve", Message(), timeout_s=5.0
    )
    return str(reply.body)


NO_ENTRY = (Refused, Unreachable)
"""Who shows a false signature has no channel for a while."""


def test_invited_peers_may_call_each_other_at_once() -> None:
    """The first call of a newcomer already finds its record known."""

    async def main() -> None:
        closed = Closed()
        a, b, c = (closed.join(seed, closed.invite) for seed in (1, 2, 3))
        assert await step(a, b) == "welcome"
        assert await step(b, a) == "welcome"
        assert await c.reconcile(a.own.peer_id)
        assert await step(c, b) == "welcome"
        assert b.view.get(c.own.peer_id) is not None

    run_virtual(main())


def test_who_has_no_invite_is_refused_by_every_peer() -> None:
    async def main() -> None:
        closed = Closed()
        a, b = (closed.join(seed, closed.invite) for seed in (1, 2))
        assert await a.reconcile(b.own.peer_id)
        strangers = [
            closed.join(3, None),
            closed.join(4, Invite.issue(Identity(b"x" * 32), RUN, YEAR_S)),
            closed.join(5, Invite.issue(OWNER, "another run", YEAR_S)),
        ]
        for stranger in strangers:
            for peer in (a, b):
                await stranger.reconcile(peer.own.peer_id)
                await asyncio.sleep(0.1)
                with pytest.raises(NO_ENTRY, match="closed"):
                    await step(stranger, peer)
                assert peer.view.get(stranger.own.peer_id) is None

    run_virtual(main())


def test_a_stolen_credential_admits_nobody() -> None:
    async def main() -> None:
        closed = Closed()
        a, b = closed.join(1, closed.invite), closed.join(2, closed.invite)
        await a.reconcile(b.own.peer_id)
        thief = closed.join(3, None)
        thief.amend(credential=b.own.credential)
        await thief.reconcile(a.own.peer_id)
        await asyncio.sleep(0.1)
        with pytest.raises(NO_ENTRY):
            await step(thief, a)
        # Nor does the record of an admitted peer, replayed by the thief, say who the thief is.
        replayed = b.own_record.seal()
        thief.transport.notify(a.own.peer_id, "records", Message(Records(records=(replayed,))))
        await asyncio.sleep(0.1)
        with pytest.raises(NO_ENTRY):
            await step(thief, a)

    run_virtual(main())


def test_an_invite_that_ends_ends_the_stay() -> None:
    async def main() -> None:
        closed = Closed()
        now = asyncio.get_running_loop().time()
        a = closed.join(1, closed.invite)
        guest = closed.join(2, Invite.issue(OWNER, RUN, int(now) + 60))
        assert await step(guest, a) == "welcome"
        await asyncio.sleep(62)
        with pytest.raises(Refused):
            await step(guest, a)
        version = a.view.get(guest.own.peer_id)
        guest.update(round=1)
        await guest.reconcile(a.own.peer_id)
        await asyncio.sleep(0.1)
        assert a.view.get(guest.own.peer_id) == version, "its newer records are not taken"

    run_virtual(main())


def test_an_observer_may_look_but_not_accuse() -> None:
    async def main() -> None:
        closed = Closed()
        a, b = closed.join(1, closed.invite), closed.join(2, closed.invite)
        await a.reconcile(b.own.peer_id)
        observer = closed.join(3, None, quiet=True)
        assert await observer.reconcile(a.own.peer_id)
        assert {r.peer_id for r in observer.view.records()} >= {a.own.peer_id, b.own.peer_id}
        lie = Suspicion(b.own.peer_id, *b.own.stamp)
        for method, body in (
            ("gossip", GossipRequest(stamps={}, suspicions=(lie,))),
            ("records", Records(suspicions=(lie,))),
        ):
            await observer.transport.call(a.own.peer_id, method, Message(body), timeout_s=5.0)
        assert a.view.is_live(b.own.peer_id, asyncio.get_running_loop().time())

    run_virtual(main())


def test_an_old_record_that_is_played_again_changes_nothing() -> None:
    async def main() -> None:
        closed = Closed()
        a, b = closed.join(1, closed.invite), closed.join(2, closed.invite)
        await a.reconcile(b.own.peer_id)
        old: SignedRecord = b.own_record.seal()
        b.update(round=7)
        await b.reconcile(a.own.peer_id)
        await asyncio.sleep(0.1)
        replayer = closed.join(3, closed.invite)
        replayer.transport.notify(a.own.peer_id, "records", Message(Records(records=(old,))))
        await asyncio.sleep(0.1)
        seen = a.view.get(b.own.peer_id)
        assert seen is not None
        assert seen.round == 7

    run_virtual(main())


def test_a_stranger_that_asks_without_end_is_told_to_wait() -> None:
    async def main() -> None:
        closed = Closed()
        a, b = closed.join(1, closed.invite), closed.join(2, closed.invite)
        stranger = closed.hub.transport("stranger")
        stranger.set_run(RUN)
        answers = await asyncio.gather(
            *(
                stranger.call(a.own.peer_id, "ping", Message(), timeout_s=5.0)
                for _ in range(int(STRANGERS.burst) + 50)
            ),
            return_exceptions=True,
        )
        refused = [x for x in answers if isinstance(x, SwarmnetError)]
        assert len(refused) == 50
        assert all(isinstance(x, Busy) for x in refused)
        assert await b.reconcile(a.own.peer_id), "others do not pay for it"
        await asyncio.sleep(10)
        await stranger.call(a.own.peer_id, "ping", Message(), timeout_s=5.0)

    run_virtual(main())


def test_records_that_are_too_long_are_refused() -> None:
    async def main() -> None:
        closed = Closed()
        a = closed.join(1, closed.invite)
        stranger = closed.hub.transport("stranger")
        stranger.set_run(RUN)
        long = {"payload": b"x" * ((1 << 20) + 1), "signature": b""}
        with pytest.raises(Refused, match="too long"):
            await stranger.call(
                a.own.peer_id, "records", Message({"records": [long]}), timeout_s=5.0
            )
        reply = await stranger.call(
            a.own.peer_id, "gossip", Message(GossipRequest(stamps={})), timeout_s=5.0
        )
        assert pack(convert(reply.body, Records))

    run_virtual(main())
