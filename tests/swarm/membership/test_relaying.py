"""Who finds out that nobody can dial it, keeps places at relays, and finds others when these go.

Over the memory transport in virtual time, with a network that says who reaches whom.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from swarmnet.errors import Refused
from swarmnet.methods.contact import LookBackRequest, RelayGrant
from swarmnet.protocol.membership import reachability
from swarmnet.protocol.membership.reachability import NUM_RELAYS
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.membership.relaying import (
    GRANT_S,
    MAX_GRANTS,
    RENEW_EVERY_S,
    Relaying,
)
from swarmnet.wire import Message, convert
from tests.swarm.harness import OpenSigner
from tests.swarm.membership.relayed import Net, Wire

RUN = "r"


@dataclass
class Member:
    wire: Wire
    gossip: Gossip
    relaying: Relaying
    life: list[asyncio.Task[None]]


class Swarm:
    """Peers that only gossip and relay."""

    def __init__(self) -> None:
        self.net = Net()
        self.members: dict[str, Member] = {}

    def start(self, name: str, *, hidden: bool = False, offers: bool = True) -> Member:
        if hidden:
            self.net.hidden.add(name)
        host = f"5.5.5.{10 + len(self.members)}"
        wire: Any = Wire(self.net, name, host, self.net.hub.transport(name))
        wire.set_run(RUN)
        own = Record(name, RUN, 1, 0, state=ACTIVE, addresses=tuple(wire.addresses()))
        rng = random.Random(name)
        gossip = Gossip(wire, View(name), OpenSigner(), own, rng)
        relaying = Relaying(wire, gossip, rng, offers=offers)
        loop = asyncio.get_running_loop()
        work = (gossip.run(), relaying.run(), Reconnecting(gossip, rng).run())
        life = [loop.create_task(part) for part in work]
        member = self.members[name] = Member(wire, gossip, relaying, life)
        first = next(iter(self.members))
        if name != first:
            life.append(loop.create_task(self._meet(member, first)))
        return member

    @staticmethod
    async def _meet(member: Member, other: str) -> None:
        await member.gossip.reconcile(other)

    def kill(self, name: str) -> None:
        for task in self.members.pop(name).life:
            task.cancel()
        self.net.hub.kill(name)

    async def close(self) -> None:
        tasks = [task for member in self.members.values() for task in member.life]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def play(scenario: Callable[[Swarm], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        swarm = Swarm()
        try:
            await scenario(swarm)
        finally:
            await swarm.close()

    run_virtual(main())


def test_a_hidden_peer_tells_where_its_relays_are() -> None:
    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"open-{i}")
        hidden = swarm.start("hidden", hidden=True)
        await asyncio.sleep(10.0)
        assert hidden.relaying.reachable is False
        assert len(hidden.relaying.places) == NUM_RELAYS
        for relay_id in hidden.relaying.places.relays:
            relay = swarm.members[relay_id]
            assert relay.relaying.reachable is True
            address = f"/ip4/{relay.wire.host}/tcp/4001/p2p/{relay_id}/p2p-circuit/p2p/hidden"
            record = swarm.members["open-0"].gossip.view.get("hidden")
            assert record is not None
            assert address in record.addresses
        assert not any(
            "p2p-circuit" in a
            for m in swarm.members.values()
            if m is not hidden
            for a in m.wire.addresses()
        )

    play(scenario)


def test_a_relay_that_dies_is_replaced_and_places_are_renewed() -> None:
    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"open-{i}")
        hidden = swarm.start("hidden", hidden=True)
        await asyncio.sleep(10.0)
        before = list(hidden.relaying.places.relays)
        swarm.kill(before[0])
        await asyncio.sleep(0.01)
        assert not any(before[0] in a for a in hidden.wire.addresses()), "at once"
        await asyncio.sleep(10.0)
        now = list(hidden.relaying.places.relays)
        assert len(now) == NUM_RELAYS
        assert before[0] not in now
        await asyncio.sleep(3 * GRANT_S)
        loop = asyncio.get_running_loop()
        for relay_id in now:
            left_s = swarm.members[relay_id].wire.granted["hidden"] - loop.time()
            assert left_s > GRANT_S - 2 * RENEW_EVERY_S

    play(scenario)


def test_two_that_do_not_reach_each_other_keep_places_though_others_reach_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reachability, "DOUBTED_FOR_S", 600.0)

    async def scenario(swarm: Swarm) -> None:
        for i in range(5):
            swarm.start(f"open-{i}")
        await asyncio.sleep(120.0)
        assert not any(m.relaying.places.relays for m in swarm.members.values()), "nobody needs one"
        swarm.net.hub.partition("open-3", "open-4")
        await asyncio.sleep(60.0)
        cut = {"open-3", "open-4"}
        for name, member in swarm.members.items():
            assert member.relaying.reachable is True
            assert len(member.relaying.places) == (NUM_RELAYS if name in cut else 0), name
            assert not cut & set(member.relaying.places.relays)
        swarm.net.hub.heal("open-3", "open-4")
        await asyncio.sleep(500.0)
        assert len(swarm.members["open-3"].relaying.places.relays) == NUM_RELAYS
        await asyncio.sleep(200.0)
        assert not any(m.relaying.places.relays for m in swarm.members.values())

    play(scenario)


def test_one_bad_moment_is_no_reason_to_keep_places() -> None:
    async def scenario(swarm: Swarm) -> None:
        for i in range(5):
            swarm.start(f"open-{i}")
        await asyncio.sleep(20.0)
        for i in range(4):
            swarm.net.hub.partition(f"open-{i}", "open-4")
        await asyncio.sleep(8.0)
        for i in range(4):
            swarm.net.hub.heal(f"open-{i}", "open-4")
        await asyncio.sleep(120.0)
        assert not any(m.relaying.places.relays for m in swarm.members.values())

    play(scenario)


def test_who_declines_or_is_hidden_itself_is_no_relay() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start("open-0")
        swarm.start("open-1", offers=False)
        one, two = (swarm.start(f"hidden-{i}", hidden=True) for i in range(2))
        await asyncio.sleep(20.0)
        assert list(one.relaying.places.relays) == list(two.relaying.places.relays) == ["open-0"]
        with pytest.raises(Refused, match="relays for nobody"):
            await one.wire.call("hidden-1", "relay_reserve", Message(), timeout_s=5.0)

    play(scenario)


def test_the_relay_that_one_has_a_channel_to_is_told_before_all_others_are_tried() -> None:
    async def scenario(swarm: Swarm) -> None:
        open_ = swarm.start("open")
        names = [f"hidden-{i}" for i in range(8)]
        for name in names:
            for other in swarm.members:
                if other != "open":
                    swarm.net.hub.partition(name, other)  # it takes a while to find that out
            swarm.start(name, hidden=True)
        await asyncio.sleep(2 * ANSWER_S)
        for name in names:
            assert list(swarm.members[name].relaying.places.relays) == ["open"]
            record = open_.gossip.view.get(name)
            assert record is not None
            assert any(a.endswith(f"/p2p/open/p2p-circuit/p2p/{name}") for a in record.addresses)

    play(scenario)


def test_places_are_bounded() -> None:
    async def scenario(swarm: Swarm) -> None:
        relay = swarm.start("open-0")
        relay.wire.granted.update((f"p{i}", 1e9) for i in range(MAX_GRANTS - 1))
        one = swarm.start("hidden-0", hidden=True)
        await asyncio.sleep(5.0)
        two = swarm.start("hidden-1", hidden=True)
        await asyncio.sleep(20.0)
        assert (len(one.relaying.places.relays), len(two.relaying.places.relays)) == (1, 0)
        reply = await one.wire.call("open-0", "relay_reserve", Message(), timeout_s=5.0)
        assert convert(reply.body, RelayGrant).seconds == GRANT_S, "who has a place keeps it"

    play(scenario)


def test_the_names_of_one_machine_close_a_relay_to_nobody() -> None:
    async def scenario(swarm: Swarm) -> None:
        relay = swarm.start("open-0")
        liars = [swarm.start(f"liar-{n}", hidden=True) for n in range(4)]
        for liar in liars:
            swarm.net.hosts[liar.wire.peer_id] = "5.5.5.99"
            await liar.wire.call("open-0", "relay_reserve", Message(), timeout_s=5.0)
        free = MAX_GRANTS - relay.wire.num_grants
        relay.wire.granted.update((f"p{i}", 1e9) for i in range(free))
        one = swarm.start("hidden", hidden=True)
        await asyncio.sleep(10.0)
        assert list(one.relaying.places.relays) == ["open-0"]
        assert relay.wire.num_grants == MAX_GRANTS
        assert sum(relay.wire.has_grant(liar.wire.peer_id) for liar in liars) == 3

    play(scenario)


def test_only_the_askers_own_address_is_knocked_at_and_no_system_port() -> None:
    async def scenario(swarm: Swarm) -> None:
        relay = swarm.start("open-0")
        asker = swarm.start("hidden", hidden=True)
        await asyncio.sleep(5.0)
        relay.wire.knocked.clear()
        message = Message(LookBackRequest((22, 4001)))
        await asker.wire.call("open-0", "look_back", message, timeout_s=5.0)
        assert relay.wire.knocked == [(asker.wire.host, 4001)]

    play(scenario)
