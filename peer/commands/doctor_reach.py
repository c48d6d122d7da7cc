"""Who can reach this machine, by which way, and what would make it better: in three sentences, by
what peers see of it and what the machine knows itself. Pure, but for `standing`."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peer.commands.finding import BAD, GOOD, SKIPPED, WARNING, Finding
from swarmnet.protocol.membership.reachability import (
    NONE,
    SYMMETRIC,
    UNKNOWN,
    Sight,
    is_reachable,
    kind_of_nat,
    relevant,
)
from swarmnet.transport.libp2p.knocking import Heard

CHECK, SECOND, OUT = "who gets here", "second port", "the way out"
USUAL_PORTS = (443, 80)
"""Of the web: networks that let out a few ports only (a hotel's, an office's) let out these."""
CARRIER = ipaddress.IPv4Network("100.64.0.0/10")
"""Of providers that share one address among many customers (RFC 6598), and of many VPNs."""
VPN = re.compile(r"(tailscale|ts|wg|tun|tap|utun|zt|nebula|ppp|nordlynx|proton)\w*$")
"""Names of interfaces that lead into a private network over the internet."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a machine knows of its place in the network."""

    interfaces: Mapping[str, Sequence[str]]
    """IP addresses by interface."""
    default: Sequence[str]
    """Of the default route, one of each family."""

    @property
    def vpns(self) -> dict[str, str]:
        """The interface of each address in a VPN. One of a provider's block is a VPN's too where
        the way out does not begin there."""
        return {
            host: name
            for name, hosts in self.interfaces.items()
            for host in hosts
            if VPN.match(name) or (_is_carriers(host) and host not in self.default)
        }

    @property
    def carrier_host(self) -> str:
        """The address that the provider's own NAT has given to this machine; empty for none."""
        vpns = self.vpns
        return next((h for h in self.default if _is_carriers(h) and h not in vpns), "")

    @property
    def has_only_ipv6(self) -> bool:
        """By the way out, or where there is none by all interfaces."""
        own = [host for hosts in self.interfaces.values() for host in hosts]
        hosts = self.default or list(filter(_leads_out, own))
        return bool(hosts) and all(":" in host for host in hosts)


def standing() -> Standing:
    """Of this machine, now."""
    import psutil

    from swarmnet.transport.libp2p.interfaces import own_hosts

    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [e.address for e in entries if e.family in families]
        for name, entries in sorted(psutil.net_if_addrs().items())
    }
    return Standing(found, own_hosts().default)


def explain(place: Standing, sights: Sequence[Sight], *, can_compare: bool = True) -> Finding:
    """`sights`: of peers on other machines. `can_compare`: the ports in them are of connections
    that went out from one port."""
    judges = relevant(sights)
    if not judges:
        text = "no peer says what it sees of this machine"
        return Finding(CHECK, SKIPPED, text, "name another peer of the run with --join")
    hosts = list(dict.fromkeys(s.host for s in judges))
    at = " and ".join(hosts)
    vpns = [place.vpns[host] for host in hosts if host in place.vpns]
    if vpns:
        return _through_vpn(at, vpns[0], is_reached=bool(is_reachable(sights)))
    if is_reachable(sights):
        is_only_6 = all(":" in host for host in hosts)
        is_public = all(map(_is_public, hosts))
        return _reached(at, is_public=is_public, is_only_6=is_only_6, place=place)
    own = [host for mine in place.interfaces.values() for host in mine]
    kind = kind_of_nat(own, sights)
    return _unreached(place, kind if can_compare or kind == NONE else UNKNOWN, hosts)


def explain_no_way(why: str, host: str, port: int, heard: Mapping[int, Heard]) -> Finding:
    """No peer has answered. `why`: as the carrier says; `host`, `port`: where one was looked for;
    `heard`: from that port and those of the web; empty where none was looked for at a host."""
    others = [p for p in USUAL_PORTS if p != port and p in heard and heard[p].is_there]
    if not heard:
        return Finding(OUT, BAD, why, "check the address with who gave it to you")
    if heard.get(port) is Heard.OPEN:
        text = f"{why}. Something listens at {host} port {port}"
        mend = "check the address with who gave it to you: it may be another peer's, or no peer's"
    elif heard.get(port) is Heard.CLOSED:
        text = f"{why}. {host} is there, and nothing listens at port {port}"
        mend = "ask who gave you the address whether the peer still runs, and at which port"
    elif others:
        text = (
            f"{why}. {host} answers at port {others[0]} and not at {port}: the network here lets "
            "out a few ports only, or a firewall there lets nobody in"
        )
        mend = (
            "try from another network, which tells them apart; here, join by a peer that listens "
            f"at port {others[0]} (started with --port {others[0]}); there, let TCP in at {port}"
        )
    else:
        text = f"{why}. {host} says nothing at port {port}, nor at {USUAL_PORTS[0]}"
        mend = (
            "check the address with who gave it to you, whether that machine is on, and that a "
            "firewall here lets you out"
        )
    return Finding(OUT, BAD, text, mend)


def explain_second(port: int, host: str, is_reached: bool, *, is_here: bool) -> Finding:
    """Of the port for direct connections. `host`: where the peer that knocked there sees this
    machine; `is_here`: it runs on this machine."""
    if is_reached:
        text = f"that peer reached port {port} too, at {host}: large messages come straight"
        if is_here:
            text += " (it runs on this machine: whether others do, only others can tell)"
        return Finding(SECOND, GOOD, text)
    text = (
        f"not reached at {host} port {port}. Large messages come straight only where this machine "
        "can dial the other side, or both routers let two dials meet"
    )
    mend = "let TCP in at both ports, PORT and the next one, and forward both; then --port PORT"
    return Finding(SECOND, WARNING, text, mend)


def _through_vpn(at: str, interface: str, *, is_reached: bool) -> Finding:
    if is_reached:
        text = (
            f"peers of the VPN on {interface} reach this machine at {at}. Their calls and large "
            "messages come straight through it; who is not in the VPN does not get here by itself"
        )
        mend = "nothing, where all peers of the run are in that VPN"
        return Finding(CHECK, GOOD, text, mend)
    text = (
        f"peers see this machine in the VPN on {interface}, at {at}, and none gets in. They reach "
        "it through relays"
    )
    mend = (
        f"let TCP in on {interface}: its firewall, or the rules of the VPN (its ACL), keep it out"
    )
    return Finding(CHECK, WARNING, text, mend)


def _reached(at: str, *, is_public: bool, is_only_6: bool, place: Standing) -> Finding:
    """`is_only_6`: the peers that were asked came by IPv6, and can say nothing of IPv4."""
    if not is_public:
        text = (
            f"peers of the same network reach this machine at {at}. Their calls and large messages "
            "come straight; whether peers elsewhere get here, only they can tell"
        )
        return Finding(CHECK, GOOD, text, "name a peer elsewhere with --join to find out")
    if place.has_only_ipv6 or is_only_6:
        text = (
            f"every peer that has IPv6 reaches this machine at {at}. Its messages come straight; "
            "who has IPv4 only reaches it through relays"
        )
        mend = "nothing, as long as one peer of the run has both and relays"
        return Finding(CHECK, GOOD, text, mend)
    text = (
        f"everybody reaches this machine at {at}. Calls come straight, and it can relay for others"
    )
    return Finding(CHECK, GOOD, text)


def _unreached(place: Standing, kind: str, hosts: Sequence[str]) -> Finding:
    at = " and ".join(hosts)
    relays = "others reach it through relays"
    if place.carrier_host:
        text = (
            f"nobody gets here by himself: the provider shares {at} among many customers, and this "
            f"one is {place.carrier_host} there. So {relays}"
        )
        mend = (
            "no forwarding of yours helps; ask the provider for an address of your own or for "
            "IPv6, or have all peers join one VPN"
        )
        return Finding(CHECK, WARNING, text, mend)
    if kind == NONE:
        text = f"nobody gets here: a firewall keeps what comes to {at} out. So {relays}"
        mend = "let two TCP ports in, PORT and the next one, and start peers with --port PORT"
        return Finding(CHECK, WARNING, text, mend)
    text = f"nobody gets here by himself: a router stands before this machine, at {at}. So {relays}"
    text += (
        "; large messages too, for it shows each peer another port (symmetric)"
        if kind == SYMMETRIC
        else "; large messages go straight where both sides' routers let two dials meet"
    )
    announce = f"--announce /ip{6 if ':' in hosts[0] else 4}/{hosts[0]}/tcp/PORT"
    mend = f"forward two TCP ports, PORT and the next one; then --port PORT {announce}"
    return Finding(CHECK, WARNING, text, mend)


def _is_carriers(host: str) -> bool:
    try:
        return ipaddress.ip_address(host) in CARRIER
    except ValueError:
        return False


def _leads_out(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not ip.is_loopback and not ip.is_link_local


def _is_public(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False
