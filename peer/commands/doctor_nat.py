"""What `swarmnet doctor` finds out about NAT and relays, by what peers see of this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from typing import Any

from peer.commands.doctor_reach import explain, standing
from peer.commands.finding import GOOD, SKIPPED, WARNING, Finding, without_mend
from swarmnet.causes import Failures
from swarmnet.errors import ProtocolViolation, SwarmnetError
from swarmnet.identity import verify
from swarmnet.methods.contact import PING, RELAY_RESERVE
from swarmnet.methods.records import GOSSIP, GossipRequest
from swarmnet.protocol.membership.reachability import (
    ENDPOINT_INDEPENDENT,
    NONE,
    SYMMETRIC,
    Sight,
    host_and_port,
    is_reachable,
    kind_of_nat,
    relevant,
)
from swarmnet.protocol.membership.records import LEFT, Record
from swarmnet.swarm.calls import call
from swarmnet.swarm.membership.relaying import NUM_JUDGES, look_from
from swarmnet.wire import Message, unpack

ASK_TIMEOUT_S = 12.0
MAX_ASKED_FOR_RELAY = 4
MEND = (
    "forward two TCP ports to this machine on your router, PORT and the next one, and start peers "
    "with --port PORT --announce /ip4/{host}/tcp/PORT"
)


async def check_nat(
    transport: Any,
    peer_id: str,
    *,
    can_compare: bool,
    own_hosts: Collection[str] = (),
    is_here: bool = False,
) -> list[Finding]:
    """NAT and relays, by the word of the peers that `peer_id` knows. `can_compare`: the transport
    goes out from the port on which it listens, so that what different peers see can be compared.
    `own_hosts`: IP addresses of this machine, whose own peers (`is_here`: `peer_id` is one) see
    nothing of a NAT."""
    failures = Failures()
    others = await _others(transport, peer_id, failures)
    unheard: list[Finding] = []
    if failures:
        text, mend = without_mend(f"not known: {failures.told()}")
        unheard = [Finding("other peers", SKIPPED, text, mend)]
    judges = [] if is_here else [peer_id]
    for record in others:
        if len(judges) >= NUM_JUDGES:
            break
        if is_on(own_hosts, record):
            continue
        if await _can_reach(transport, record):
            judges.append(record.peer_id)
    if not judges:
        text = "not looked into: all peers that can be asked run on this machine"
        nat = Finding("NAT", SKIPPED, text, "name a peer on another one with --join")
        return [*unheard, nat]
    sights = await look_from(transport, judges)
    pairs = [host_and_port(a) for a in transport.own_addresses()]
    own_hosts = [pair[0] for pair in pairs if pair is not None]
    found = [
        describe_nat(own_hosts, sights, can_compare=can_compare),
        explain(standing(), sights, can_compare=can_compare),
    ]
    candidates = [*judges[:1], *(r.peer_id for r in others if r.peer_id in judges)]
    return [*unheard, *found, await _check_relay(transport, candidates, is_reachable(sights))]


def is_on(own_hosts: Collection[str], record: Record) -> bool:
    """A peer says of itself that it is on the machine with these IP addresses."""
    pairs = [pair for pair in map(host_and_port, record.addresses) if pair is not None]
    hosts = {host for host, _ in pairs if not is_loopback(host)}
    return bool(pairs) and hosts <= set(own_hosts)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def describe_nat(
    own_hosts: Sequence[str], sights: Sequence[Sight], *, can_compare: bool
) -> Finding:
    """What the sights of the peers mean."""
    judges = relevant(sights)
    if not judges:
        return Finding("NAT", SKIPPED, "no peer says what it sees of this machine")
    kind = kind_of_nat(own_hosts, sights)
    host = judges[0].host
    if kind == NONE:
        return Finding("NAT", GOOD, f"none: peers see this machine at its own address {host}")
    text = f"peers see this machine at {host}, which is not its own address: it is behind NAT"
    if is_reachable(sights):
        return Finding("NAT", GOOD, f"{text}, and its port is forwarded")
    if len(judges) < 2 or not can_compare:
        text += " (of which kind, two peers can tell that are reached over p2pd)"
    elif kind == ENDPOINT_INDEPENDENT:
        text += "; all see the same port (endpoint-independent mapping)"
    elif kind == SYMMETRIC:
        text += "; each sees another port (symmetric)"
    return Finding("NAT", WARNING, text, MEND.format(host=host))


async def _check_relay(
    transport: Any, candidates: Sequence[str], reachable: bool | None
) -> Finding:
    """Would others give this machine a place?"""
    if reachable:
        return Finding(
            "relay", GOOD, "not needed: this machine can be dialled, and can relay itself"
        )
    failures = Failures()
    offering = 0
    for peer_id in list(dict.fromkeys(candidates))[:MAX_ASKED_FOR_RELAY]:
        try:
            await call(transport, peer_id, RELAY_RESERVE, Message(), timeout_s=ASK_TIMEOUT_S)
            offering += 1
        except SwarmnetError as e:
            failures.add(e, peer_id)
    if offering:
        text = (
            f"{offering} of the peers asked give this machine a place: others reach it through them"
        )
        return Finding("relay", GOOD, text)
    why = failures.told() or "nobody to ask"
    mend = "ask somebody whose machine can be dialled to start a peer without --no-relay"
    return Finding("relay", WARNING, f"no peer gives this machine a place ({why})", mend)


async def _others(transport: Any, peer_id: str, failures: Failures) -> list[Record]:
    """Peers of the run that say that they can be dialled, by their signed records. `failures`:
    takes why that peer does not name them."""
    try:
        message = Message(GossipRequest({}))
        reply = await call(transport, peer_id, GOSSIP, message, timeout_s=ASK_TIMEOUT_S)
        news = reply.body
    except SwarmnetError as e:
        failures.add(e, peer_id)
        return []
    found = []
    for envelope in news.records:
        try:
            record = unpack(envelope.payload, Record)
        except ProtocolViolation:
            continue
        usable = record.addresses and not any("/p2p-circuit" in a for a in record.addresses)
        if record.peer_id == peer_id or record.state == LEFT or not usable:
            continue
        if verify(record.peer_id, envelope.payload, envelope.signature):
            found.append(record)
    return found


async def _can_reach(transport: Any, record: Record) -> bool:
    transport.learn(record.peer_id, record.addresses)
    try:
        await call(transport, record.peer_id, PING, Message(), timeout_s=ASK_TIMEOUT_S)
    except SwarmnetError:
        return False
    return True
