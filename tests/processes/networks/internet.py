"""A small internet of network namespaces: public machines, and machines behind a router with NAT
each. Needs Linux, root, `ip` and `nft` or `iptables`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

PUBLIC_NET, HOME_NET = "200.5.5", "192.168.7"
"""Global addresses, as Python's `ipaddress` and libp2p see them, and those of a home; the
namespaces have no way out. Both lie above 127: libp2p lists loopback before them."""
PUBLIC_NET_6 = "2a05:5:5:5"
"""The same of IPv6."""
DOCKER = "172.17.0.1/16"
"""Of the bridge that every machine with docker has."""


class NoNamespaces(Exception):
    """This machine cannot make network namespaces; says why."""


def run(*command: str) -> str:
    """Raises `NoNamespaces` with what the command said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[:300]}")
    return done.stdout


@dataclass
class Internet:
    """Hosts by name, each a namespace."""

    name: str
    net: str = PUBLIC_NET
    spaces: list[str] = field(default_factory=list)
    num_public: int = 0
    num_behind: int = 0
    firewalls: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By router: the network behind it, and its address outside."""

    def space(self, name: str) -> str:
        space = f"{self.name}-{name}"
        run("ip", "netns", "add", space)
        self.spaces.append(space)
        run("ip", "-n", space, "link", "set", "lo", "up")
        return space

    def begin(self) -> None:
        """The wire that public machines and routers are on."""
        wire = self.space("wire")
        run("ip", "-n", wire, "link", "add", "name", "br0", "type", "bridge")
        run("ip", "-n", wire, "link", "set", "br0", "up")

    def _plug(self, space: str, device: str, *addresses: str) -> None:
        """A cable from a namespace to the wire."""
        wire, port = f"{self.name}-wire", f"p{self.num_public}"
        run(
            "ip",
            "-n",
            wire,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            device,
            "netns",
            space,
        )
        run("ip", "-n", wire, "link", "set", port, "master", "br0", "up")
        if not any(":" in address for address in addresses):
            self._inside(space, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        for address in addresses:
            own = (f"{address}/64", "nodad") if ":" in address else (f"{address}/24",)
            run("ip", "-n", space, "addr", "add", *own, "dev", device)
        run("ip", "-n", space, "link", "set", device, "up")

    def public(self, name: str, versions: Sequence[int] = (4,)) -> str:
        """A machine with an address of its own, of each of these versions of IP; returns its
        namespace."""
        self.num_public += 1
        space = self.space(name)
        self._plug(space, "wan", *(self.address_of(self.num_public, v) for v in versions))
        return space

    def address_of(self, number: int, version: int = 4) -> str:
        return f"{self.net}.{10 + number}" if version == 4 else f"{PUBLIC_NET_6}::{10 + number}"

    def docker(self, space: str) -> None:
        """A machine has docker: its bridge has the address that it has everywhere."""
        run("ip", "-n", space, "link", "add", "name", "docker0", "type", "bridge")
        run("ip", "-n", space, "addr", "add", DOCKER, "dev", "docker0")
        run("ip", "-n", space, "link", "set", "docker0", "up")

    def cable(self, spaces: Sequence[str], device: str = "lan", net: str = HOME_NET) -> list[str]:
        """Two machines have a network of their own beside; returns their addresses there."""
        addresses = [f"{net}.{number}" for number in (1, 2)]
        ends = ("name", device, "netns", spaces[1])
        run("ip", "-n", spaces[0], "link", "add", device, "type", "veth", "peer", *ends)
        for space, address in zip(spaces, addresses, strict=True):
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", space, "link", "set", device, "up")
        return addresses

    def renumber(self, space: str) -> str:
        """A machine gets another address, and loses the one that it had; returns the new one."""
        self.num_public += 1
        address = self.address_of(self.num_public)
        run("ip", "-n", space, "addr", "flush", "dev", "wan")
        run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "wan")
        return address

    def behind_nat(self, name: str, *, is_symmetric: bool = False, net: str = "") -> str:
        """A machine behind a router of its own, which drops what nobody inside has asked for;
        returns its namespace. `is_symmetric`: each connection goes out from another port, else from
        that of the machine inside. `net`: the network inside, whose number 2 the machine is."""
        self.num_public += 1
        self.num_behind += 1
        router, inside = self.space(f"{name}-nat"), self.space(name)
        self._plug(router, "wan", self.address_of(self.num_public))
        net = net or f"10.{self.num_behind}.0"
        run(
            "ip",
            "-n",
            router,
            "link",
            "add",
            "lan",
            "type",
            "veth",
            "peer",
            "name",
            "eth",
            "netns",
            inside,
        )
        run("ip", "-n", router, "addr", "add", f"{net}.1/24", "dev", "lan")
        run("ip", "-n", router, "link", "set", "lan", "up")
        run("ip", "-n", inside, "addr", "add", f"{net}.2/24", "dev", "eth")
        run("ip", "-n", inside, "link", "set", "eth", "up")
        run("ip", "-n", inside, "route", "add", "default", "via", f"{net}.1")
        self._inside(router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._masquerade(router, is_symmetric=is_symmetric)
        return inside

    def behind_firewall(self, name: str) -> str:
        """A machine with a public address of IPv6, and no other, behind a router that drops what it
        has not asked for, without NAT; returns its namespace. To be called after all others are
        made: they learn the way there."""
        self.num_public += 1
        self.num_behind += 1
        router, inside = self.space(f"{name}-nat"), self.space(name)
        outside = self.address_of(self.num_public, 6)
        self._plug(router, "wan", outside)
        net = f"2a05:5:5:{0x100 + self.num_behind:x}"
        ends = ("name", "eth", "netns", inside)
        run("ip", "-n", router, "link", "add", "lan", "type", "veth", "peer", *ends)
        for space, device, number in ((router, "lan", 1), (inside, "eth", 2)):
            own = (f"{net}::{number}/64", "nodad", "dev", device)
            run("ip", "-n", space, "addr", "add", *own)
            run("ip", "-n", space, "link", "set", device, "up")
        run("ip", "-n", inside, "-6", "route", "add", "default", "via", f"{net}::1")
        self._inside(router, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        new = ("-i", "wan", "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP")
        self._inside(router, "ip6tables", "-A", "FORWARD", *new)
        for space, (before, at) in self.firewalls.items():
            run("ip", "-n", space, "-6", "route", "add", f"{net}::/64", "via", outside)
            run("ip", "-n", router, "-6", "route", "add", f"{before}::/64", "via", at)
        hidden = [inside, *(space.removesuffix("-nat") for space in self.firewalls)]
        for space in self._public:
            if space not in hidden:
                run("ip", "-n", space, "-6", "route", "add", f"{net}::/64", "via", outside)
        self.firewalls[router] = net, outside
        return inside

    def host_behind(self, name: str) -> str:
        """The address of a machine behind a firewall."""
        return f"{self.firewalls[f'{self.name}-{name}-nat'][0]}::2"

    def _masquerade(self, router: str, *, is_symmetric: bool) -> None:
        """Who is inside goes out under the router's address; nothing from outside gets in."""
        if shutil.which("nft"):
            for rule in (
                "add table ip nat",
                "add chain ip nat post { type nat hook postrouting priority 100 ; }",
                "add rule ip nat post oifname wan masquerade"
                + (" fully-random" if is_symmetric else ""),
                "add table ip filter",
                "add chain ip filter forward { type filter hook forward priority 0 ; }",
                "add rule ip filter forward iifname wan ct state new drop",
                "add chain ip filter input { type filter hook input priority 0 ; }",
                "add rule ip filter input iifname wan ct state new drop",
            ):
                self._inside(router, "nft", rule)
            return
        masquerade = ("-t", "nat", "-A", "POSTROUTING", "-o", "wan", "-j", "MASQUERADE")
        self._inside(router, "iptables", *masquerade, *(("--random-fully",) * is_symmetric))
        for chain in ("FORWARD", "INPUT"):
            new = ("-i", "wan", "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP")
            self._inside(router, "iptables", "-A", chain, *new)

    @staticmethod
    def _inside(space: str, *command: str) -> None:
        run("ip", "netns", "exec", space, *command)

    def cut(self, first: int, second: int) -> None:
        """No packet goes between two public machines, by number from 1, any more."""
        spaces = self._public
        for here, there in ((first, second), (second, first)):
            run(
                "ip",
                "-n",
                spaces[here - 1],
                "route",
                "add",
                "blackhole",
                f"{self.address_of(there)}/32",
            )

    def join(self, first: int, second: int) -> None:
        """What was cut is whole again."""
        spaces = self._public
        for here, there in ((first, second), (second, first)):
            address = f"{self.address_of(there)}/32"
            run("ip", "-n", spaces[here - 1], "route", "del", "blackhole", address)

    def silence(self, spaces: Sequence[str], device: str, *, ends: bool = False) -> None:
        """What is sent through a device gets nowhere, and nobody is told; or it does again."""
        for space in spaces:
            rule = ("INPUT", "-i", device, "-j", "DROP")
            self._inside(space, "iptables", "-D" if ends else "-A", *rule)

    def captive(self, space: str, ports: Sequence[int]) -> None:
        """The router of a machine behind NAT lets it out to these TCP ports only, and tells nobody:
        as in a hotel, or an office."""
        router = f"{space}-nat"
        for port in ports:
            out = ("-i", "lan", "-p", "tcp", "--dport", str(port), "-j", "ACCEPT")
            self._inside(router, "iptables", "-A", "FORWARD", *out)
        self._inside(router, "iptables", "-A", "FORWARD", "-i", "lan", "-j", "DROP")

    def linked(self, space: str, host: str, port: int) -> bool:
        """Does a TCP connection of a machine stand from its address `host`, of which one end has
        that port?"""
        said = run("ip", "netns", "exec", space, "ss", "-Htn", "state", "established")
        ends = [line.split()[-2:] for line in said.splitlines()]
        ports = f":{port}"
        return any(
            own.rpartition(":")[0] == host and (own.endswith(ports) or other.endswith(ports))
            for own, other in ends
        )

    def cut_one_way(self, source: int, target: int) -> None:
        """No packet gets from one public machine to another any more, by number from 1."""
        space = self._public[target - 1]
        address = self.address_of(source)
        if not shutil.which("nft"):
            self._inside(space, "iptables", "-A", "INPUT", "-s", address, "-j", "DROP")
            return
        for rule in (
            "add table ip cuts",
            "add chain ip cuts in { type filter hook input priority 0 ; }",
            f"add rule ip cuts in ip saddr {address} drop",
        ):
            self._inside(space, "nft", rule)

    def heal_one_way(self, target: int) -> None:
        """All packets get to a public machine again, by number from 1."""
        space = self._public[target - 1]
        if shutil.which("nft"):
            self._inside(space, "nft", "delete table ip cuts")
        else:
            self._inside(space, "iptables", "-F", "INPUT")

    @property
    def _public(self) -> list[str]:
        return [s for s in self.spaces if not s.endswith(("-wire", "-nat"))]

    def reaches(self, space: str, address: str) -> bool:
        """Does a ping get there?"""
        try:
            self._inside(space, *_ping(address))
        except NoNamespaces:
            return False
        return True

    def connects(self, space: str, address: str, port: int) -> bool:
        """Does a TCP connection from a machine to an address stand?"""
        code = f"import socket; socket.create_connection(('{address}', {port}), 2)"
        try:
            self._inside(space, sys.executable, "-c", code)
        except NoNamespaces:
            return False
        return True

    def end(self) -> None:
        for space in reversed(self.spaces):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        self.spaces.clear()


def _ping(address: str) -> Sequence[str]:
    """A TCP connection to a port where nobody listens: refused is an answer, silence is none."""
    code = (
        "import socket, sys\n"
        "s = socket.socket(); s.settimeout(2)\n"
        f"try: s.connect(('{address}', 9))\n"
        "except ConnectionRefusedError: sys.exit(0)\n"
        "except OSError as e: sys.exit(str(e))\n"
    )
    return (sys.executable, "-c", code)


@contextmanager
def internet(net: str = PUBLIC_NET) -> Iterator[Internet]:
    """Its machines have addresses of `net`/24. Raises `NoNamespaces` where the machine does not
    offer them."""
    if not shutil.which("ip"):
        raise NoNamespaces("there is no `ip` here: apt-get install iproute2")
    if not (shutil.which("nft") or shutil.which("iptables")):
        raise NoNamespaces("there is neither `nft` nor `iptables`: apt-get install nftables")
    made = Internet(f"sn{os.getpid()}", net)
    try:
        made.begin()
        yield made
    finally:
        made.end()
