"""A memory network in which peers that are cut from each other can be reached through relays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmnet.transport.memory import MemoryHub, MemoryTransport


@dataclass
class Net:
    """Hosts by peer id; those in `hidden` let nobody in."""

    hub: MemoryHub = field(default_factory=MemoryHub)
    hidden: set[str] = field(default_factory=set)
    hosts: dict[str, str] = field(default_factory=dict)


class Wire:
    """A memory transport with what `relaying.RelayTransport` asks for beside."""

    def __init__(self, net: Net, name: str, host: str, inner: MemoryTransport) -> None:
        self._net, self._inner = net, inner
        self.host = net.hosts[name] = host
        self.announced: list[str] = []
        self.granted: dict[str, float] = {}
        self.knocked: list[tuple[str, int]] = []
        self.learnt: dict[str, tuple[str, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def own_addresses(self) -> list[str]:
        inside = "10.0.0.2" if self.peer_id in self._net.hidden else self.host
        return [f"/ip4/{inside}/tcp/4001/p2p/{self.peer_id}"]

    def addresses(self) -> list[str]:
        return [*self.announced, *self.own_addresses()]

    def announce(self, addresses: Sequence[str]) -> None:
        self.announced = list(addresses)

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        self.learnt[peer_id] = tuple(addresses)

    async def observed(self, peer_id: str) -> str:
        return f"/ip4/{self._net.hosts[peer_id]}/tcp/4001"

    async def knock(self, host: str, port: int) -> bool:
        self.knocked.append((host, port))
        by_host = {h: p for p, h in self._net.hosts.items()}
        return by_host[host] not in self._net.hidden

    def grant_relay(self, peer_id: str, for_s: float) -> None:
        self.granted[peer_id] = asyncio.get_running_loop().time() + for_s

    @property
    def num_grants(self) -> int:
        now = asyncio.get_running_loop().time()
        return sum(until > now for until in self.granted.values())

    def has_grant(self, peer_id: str) -> bool:
        return self.granted.get(peer_id, 0.0) > asyncio.get_running_loop().time()


class RelayedHub(MemoryHub):
    """Two peers that are parted reach each other where one has a place at a relay which both reach,
    and the other has learnt of it."""

    def __init__(self) -> None:
        super().__init__(copy=False)
        self.net = Net(self)
        self.wires: dict[str, Wire] = {}

    def transport(self, peer_id: str) -> Any:
        host = f"5.5.5.{10 + len(self.wires)}"
        wire = self.wires[peer_id] = Wire(self.net, peer_id, host, super().transport(peer_id))
        return wire

    def is_parted(self, a: str, b: str) -> bool:
        if not super().is_parted(a, b):
            return False
        return not (self._leads(a, b) or self._leads(b, a))

    def _leads(self, caller: str, callee: str) -> bool:
        wire = self.wires.get(caller)
        known = wire.learnt.get(callee, ()) if wire is not None else ()
        now = asyncio.get_running_loop().time()
        return any(
            relay in self.transports
            and self.wires[relay].granted.get(callee, 0.0) > now
            and f"/p2p/{relay}/p2p-circuit/p2p/{callee}" in address
            and not super(RelayedHub, self).is_parted(caller, relay)
            and not super(RelayedHub, self).is_parted(callee, relay)
            for relay in self.wires
            for address in known
        )
