"""What a transport lets its carrier dial, whoever has named it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from swarmnet.errors import Unreachable
from swarmnet.transport.base import PROTOCOL_NAME, ByteStream
from swarmnet.transport.channel import ChannelTransport
from tests.transport.loopback import LoopbackCarrier, LoopbackHub, run
from tests.transport.streams import identity

OWN = "/ip4/192.168.1.5/tcp/4001"
INSIDE = (
    "/ip4/127.0.0.1/tcp/6379",
    "/ip4/10.0.0.1/tcp/5432",
    "/ip4/169.254.169.254/tcp/8080",
    "/ip4/200.5.5.9/tcp/22",
    "/dns4/evil.example/tcp/4001",
)
OUTSIDE, LAN = "/ip4/200.5.5.9/tcp/4001", "/ip4/192.168.1.7/tcp/4001"


class Carrier(LoopbackCarrier):
    """Remembers what it is asked to dial."""

    def __init__(self, hub: LoopbackHub, peer_id: str) -> None:
        super().__init__(hub, peer_id)
        self.known: dict[str, Sequence[str]] = {}
        self.connected: list[str] = []
        self.seen: dict[str, str] = {}
        """Where peers come from."""

    def addresses(self) -> list[str]:
        return [f"{OWN}/p2p/{self.peer_id}"]

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        self.known[peer_id] = list(addresses)

    async def connect(self, address: str) -> str:
        self.connected.append(address)
        return await super().connect(address)

    async def open(self, peer_id: str, protocol: str = PROTOCOL_NAME) -> ByteStream:
        stream = await super().open(peer_id, protocol)
        stream.seen_at = self.seen.get(peer_id, "")
        return stream

    async def observed(self, peer_id: str) -> str:
        return self.seen.get(peer_id, "")


def play(scenario: Callable[[ChannelTransport, Carrier, list[str]], Any]) -> None:
    """A transport, its carrier, and the ids of two other peers."""

    async def main() -> None:
        hub, made = LoopbackHub(), []
        for i in map(identity, range(1, 4)):
            made.append(ChannelTransport(Carrier(hub, i.peer_id), identity=i))
            await made[-1].start()
        carrier = made[0].carrier
        assert isinstance(carrier, Carrier)
        try:
            async with asyncio.timeout(30):
                await scenario(made[0], carrier, [t.peer_id for t in made[1:]])
        finally:
            for transport in made:
                await transport.close()

    run(main())


def test_what_a_record_says_is_dialled_where_its_peer_may_be() -> None:
    async def scenario(a: ChannelTransport, carrier: Carrier, others: list[str]) -> None:
        b, _ = others
        a.learn(b, [*INSIDE, OUTSIDE, LAN])
        await a.dialer.channel(b)
        assert carrier.known[b] == [OUTSIDE, LAN]
        carrier.seen[b] = "/ip4/200.5.5.9/tcp/33333"
        await a.drop(b)
        await asyncio.sleep(0.05)
        await a.dialer.channel(b)
        await a.drop(b)
        await asyncio.sleep(0.05)
        await a.dialer.channel(b)
        assert carrier.known[b] == [OUTSIDE], "it is not in this home"

    play(scenario)


def test_where_nothing_may_be_dialled_the_carrier_knows_nothing() -> None:
    async def scenario(a: ChannelTransport, carrier: Carrier, others: list[str]) -> None:
        a.learn(others[0], INSIDE)
        await a.dialer.channel(others[0])
        assert carrier.known[others[0]] == []

    play(scenario)


def test_what_a_person_names_is_dialled_again_as_it_is() -> None:
    async def scenario(a: ChannelTransport, carrier: Carrier, others: list[str]) -> None:
        b = others[0]
        await a.dial(f"/dns4/friend.example/tcp/443/p2p/{b}")
        a.learn(b, [*INSIDE, OUTSIDE])
        await a.drop(b)
        await asyncio.sleep(0.05)
        await a.dialer.channel(b)
        assert carrier.known[b] == [OUTSIDE, "/dns4/friend.example/tcp/443"]

    play(scenario)


@pytest.mark.parametrize("address", INSIDE)
def test_a_circuit_leads_to_no_door_of_this_machine(address: str) -> None:
    async def scenario(a: ChannelTransport, carrier: Carrier, others: list[str]) -> None:
        b, relay = others
        carrier.hub.apart.add(frozenset((a.peer_id, b)))
        a.learn(b, [f"{address}/p2p/{relay}/p2p-circuit/p2p/{b}"])
        with pytest.raises(Unreachable):
            await a.dialer.channel(b)
        assert not carrier.connected

    play(scenario)


def test_an_asker_is_dialled_back_where_it_is_seen_and_nowhere_else() -> None:
    async def scenario(a: ChannelTransport, carrier: Carrier, others: list[str]) -> None:
        asker, listener = others
        carrier.seen[asker] = "/ip4/200.5.5.9/tcp/33333"
        named = f"/ip4/10.0.0.7/tcp/4001/p2p/{listener}"
        assert await a.dial_back(asker, named, 5.0) == "200.5.5.9"
        assert carrier.connected == [f"/ip4/200.5.5.9/tcp/4001/p2p/{listener}"]
        for wrong in (f"/ip4/127.0.0.1/tcp/22/p2p/{listener}", f"/dns4/x/tcp/4001/p2p/{listener}"):
            with pytest.raises(Unreachable):
                await a.dial_back(asker, wrong, 5.0)
        carrier.seen.clear()
        with pytest.raises(Unreachable):
            await a.dial_back(asker, named, 5.0)
        assert len(carrier.connected) == 1

    play(scenario)
