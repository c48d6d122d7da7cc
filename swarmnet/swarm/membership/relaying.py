"""Being reached through relays: a peer that cannot be dialled keeps places at two other peers.

It finds out whether it can be dialled, and puts the addresses at its relays into its record. A peer
that can be dialled offers places. `protocol.membership.reachability` decides who needs them, and
`transport.relay` moves the bytes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Protocol

from swarmnet.errors import Busy, Refused, SwarmnetError
from swarmnet.methods.contact import (
    LOOK_BACK,
    RELAY_RESERVE,
    LookBackReply,
    LookBackRequest,
    RelayGrant,
)
from swarmnet.protocol.backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S
from swarmnet.protocol.dialing.zones import FIRST_PORT, may_dial_somewhere
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.reachability import (
    RelayPlaces,
    Sight,
    circuit_address,
    forwarded_addresses,
    host_and_port,
    is_global,
    is_reachable,
    possible_relays,
)
from swarmnet.protocol.membership.records import LEFT, Record
from swarmnet.protocol.moments import Since
from swarmnet.protocol.relay_room import gives_place, network_of
from swarmnet.protocol.timing import ANSWER_S, LAPSES, UPKEEP_S
from swarmnet.swarm.calls import call, serve
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.timing import LOOK_LESS_S
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.peer")

NUM_JUDGES = 3
"""Peers that are asked what they see."""
LOOK_EVERY_S = LONGEST_PAUSE_S
"""Between two looks at whether this peer can be dialled, once some peer has answered: networks
change."""
RENEW_EVERY_S = UPKEEP_S
GRANT_S = LAPSES * RENEW_EVERY_S
"""A place at a relay ends so long after it was asked for last."""
MAX_GRANTS = 64
"""Places that a peer offers."""
MAX_LOOKS = 4
"""Served at a time."""
MAX_ADDRESSES = 16


class RelayTransport(Transport, Protocol):
    """A transport that has circuits."""

    def own_addresses(self) -> list[str]:
        """Without those that were announced."""

    def announce(self, addresses: Sequence[str]) -> None:
        """Further addresses to tell others, in place of those announced before."""

    async def observed(self, peer_id: str) -> str:
        """The multiaddr that a connected peer comes from; empty where unknown."""

    async def knock(self, host: str, port: int) -> bool:
        """Does something listen there?"""

    def grant_relay(self, peer_id: str, for_s: float) -> None:
        """Lets others call a peer through this one."""

    @property
    def num_grants(self) -> int: ...

    def has_grant(self, peer_id: str) -> bool: ...


class Relaying:
    """Of one peer."""

    def __init__(
        self,
        transport: RelayTransport,
        gossip: Gossip,
        rng: random.Random,
        *,
        offers: bool = True,
    ) -> None:
        """`offers`: gives places to others, where it can be dialled itself."""
        self.reachable: bool | None = None
        """Can others dial this peer? None while unknown."""
        self.sights: list[Sight] = []
        self.places = RelayPlaces()
        self._transport = transport
        self._gossip = gossip
        self._rng = rng
        self._offers = offers
        self._looking = 0
        self._holders: dict[str, str] = {}
        """The networks of those that have a place here, by peer, those that came first first."""
        self._own: list[str] = []
        self._is_doubted = False
        """Somebody cannot reach this peer, which was said."""
        self._wake = asyncio.Event()
        serve(transport, LOOK_BACK, self._on_look_back)
        serve(transport, RELAY_RESERVE, self._on_reserve)
        transport.on_disconnected(self._on_disconnected)

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        looked, renewed = Since(), Since()
        while True:
            own = self._transport.own_addresses()
            if own != self._own:  # on another network, maybe
                self._own, looked = own, Since()
            if self.reachable is None or looked.is_older(loop.time(), LOOK_EVERY_S):
                looked.begin(loop.time())
                await self._look()
            if not self._needs_relays(loop.time()):
                self.places.clear()
            else:
                if renewed.is_due(loop.time(), RENEW_EVERY_S):
                    for relay_id in self.places.relays:
                        await self._reserve(relay_id)
                await self._find_places()
            self._tell()
            self._wake.clear()
            try:
                async with asyncio.timeout(LOOK_LESS_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _needs_relays(self, now: float) -> bool:
        if self.reachable is False:
            return True
        members = {r.peer_id for r in self._gossip.view.records() if r.state != LEFT}
        is_doubted = self._gossip.unreached.doubts.are_serious(now, members)
        if is_doubted and not self._is_doubted:
            log.warning("somebody cannot reach this peer: it can be reached through relays too")
        self._is_doubted = is_doubted
        return is_doubted

    # ---- can this peer be dialled? ----------------------------------------------------------

    async def _look(self) -> None:
        judges = [r.peer_id for r in self._others()[:NUM_JUDGES]]
        sights = await look_from(self._transport, judges)
        verdict = is_reachable(sights)
        if verdict is None:
            return
        self.sights = sights
        if verdict is not self.reachable and not verdict:
            log.warning("nobody can dial this peer: it is reached through relays")
        self.reachable = verdict

    def _others(self) -> list[Record]:
        """Live peers that can be dialled themselves, by what they say: in random order, but those
        first to which there is a channel, for the others may swallow what is sent to them."""
        now = asyncio.get_running_loop().time()
        own_ids = (self._transport.peer_id, self._gossip.own.peer_id)
        others = possible_relays(self._gossip.view.live(now), own_ids)
        self._rng.shuffle(others)
        connected = set(self._transport.connected())
        return sorted(others, key=lambda r: r.peer_id not in connected)

    # ---- places at relays -------------------------------------------------------------------

    async def _find_places(self) -> None:
        """Others for those that are lost."""
        if self.places.are_enough:
            return
        now = asyncio.get_running_loop().time()
        for record in self._others():
            if self.places.are_enough:
                return
            if self.places.may_ask(record.peer_id, now):
                await self._reserve(record.peer_id)

    async def _reserve(self, relay_id: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            reply = await call(
                self._transport, relay_id, RELAY_RESERVE, Message(), timeout_s=ANSWER_S
            )
            grant = reply.body
        except SwarmnetError as e:
            log.info("no place at relay %s: %s", relay_id[-8:], e)
            self.places.lost(relay_id)
            self.places.refused(relay_id, loop.time())
            return
        usable = tuple(filter(may_dial_somewhere, grant.addresses))
        if not usable:
            self.places.refused(relay_id, loop.time())
            return
        if self.places.granted(relay_id, usable):
            at = circuit_address(usable[0], relay_id, self._transport.peer_id)
            log.warning("relay %s: others reach this peer through it, at %s", relay_id[-8:], at)
        self._tell()  # at once: the search for a second one may take long

    def _on_disconnected(self, peer_id: str) -> None:
        if self.places.lost(peer_id):
            log.warning("relay %s is gone; looking for another", peer_id[-8:])
            self._tell()
            self._wake.set()

    def _tell(self) -> None:
        """Makes known where this peer can be reached beside its own addresses."""
        extra: list[str] = []
        if self.reachable:
            end = f"/p2p/{self._transport.peer_id}"
            own = self._transport.own_addresses()
            extra = [a + end for a in forwarded_addresses(own, self.sights)]
        extra += self.places.circuits(self._transport.peer_id)
        self._transport.announce(extra)
        totals = self._gossip.own.totals
        if totals.get("relays", 0) != len(self.places):
            self._gossip.update(totals={**totals, "relays": len(self.places)})
        self._gossip.tell_addresses()

    # ---- for others -------------------------------------------------------------------------

    async def _on_look_back(self, request: Request[LookBackRequest]) -> Message[LookBackReply]:
        """Says where a peer comes from, and knocks there."""
        asked = request.message.body
        if self._looking >= MAX_LOOKS:
            raise Busy("too many looks", backlog_s=FIRST_PAUSE_S)
        self._looking += 1
        try:
            observed = host_and_port(await self._transport.observed(request.remote))
            if observed is None:
                raise Refused("this peer does not see where you come from")
            host, port = observed
            ports = [p for p in dict.fromkeys(asked.ports) if p >= FIRST_PORT]
            knocks = [self._transport.knock(host, p) for p in ports]
            heard = await asyncio.gather(*knocks)
            reached = tuple(p for p, is_there in zip(ports, heard, strict=True) if is_there)
            return Message(LookBackReply(host, port, reached))
        finally:
            self._looking -= 1

    async def _on_reserve(self, request: Request[None]) -> Message[RelayGrant]:
        """A place here, for a while."""
        if not self._offers or self.reachable is False:
            raise Refused("this peer relays for nobody")
        remote, transport = request.remote, self._transport
        at = host_and_port(await transport.observed(machine_of(remote)))
        network = network_of(at[0]) if at is not None else ""
        self._holders = {p: n for p, n in self._holders.items() if transport.has_grant(p)}
        if not transport.has_grant(remote) and transport.num_grants >= MAX_GRANTS:
            loser = gives_place(self._holders, network)
            if loser is None:
                raise Busy("every place at this relay is taken", backlog_s=GRANT_S)
            log.info("%s gives up its place here to one of another network", loser[-8:])
            transport.grant_relay(loser, 0.0)
            del self._holders[loser]
        transport.grant_relay(remote, GRANT_S)
        self._holders[remote] = network
        own = [a for a in self._transport.addresses() if "/p2p-circuit" not in a]
        return Message(RelayGrant(tuple(own[:MAX_ADDRESSES]), GRANT_S))


async def look_from(transport: RelayTransport, peer_ids: Sequence[str]) -> list[Sight]:
    """What these peers see of this one; those that do not answer are left out."""
    pairs = [pair for pair in map(host_and_port, transport.own_addresses()) if pair is not None]
    ports = tuple(dict.fromkeys(port for _, port in pairs))[:4]

    async def ask(peer_id: str) -> Sight | None:
        message = Message(LookBackRequest(ports))
        try:
            reply = await call(transport, peer_id, LOOK_BACK, message, timeout_s=ANSWER_S)
            seen = reply.body
        except SwarmnetError as e:
            log.debug("%s does not say what it sees: %s", peer_id[-8:], e)
            return None
        at = host_and_port(await transport.observed(peer_id))
        reached = tuple(p for p in seen.reached if p in ports)
        return Sight(peer_id, seen.host, seen.port, reached, at is not None and is_global(at[0]))

    return [sight for sight in await asyncio.gather(*map(ask, peer_ids)) if sight is not None]
