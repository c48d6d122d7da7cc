"""Internet links between network namespaces on one machine, where the kernel has no `sch_netem`.

    with network(("one", "two"), Link(delay_s=0.012, bits_per_s=20e6)) as made:
        subprocess.run(["ip", "netns", "exec", made.hosts["one"].space, ...])
        print(made.counters()["one"].sent_bytes)

Each host is a namespace whose only device is a TAP. A process of its own, the switch, carries
Ethernet frames from one to the other: a frame leaves its host at the rate of that host's uplink,
and arrives after the delay, at the rate of the other's downlink. What would wait longer than
`QUEUE_S` for either is dropped, as in a home router. Hosts may be of one house (`houses`): they
share its uplink and its downlink, and what goes from one of them to another crosses neither, and
takes no time. Needs Linux, root, `/dev/net/tun` and `ip`. 100 Mbit/s take about a sixth of a core.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

QUEUE_S = 0.2
"""Of waiting for an uplink, or for a downlink."""
STEP_S = 0.0005
"""The switch sleeps so long between two looks while frames are on their way. They come in small
groups then, as from a network card, up to this late, and it takes a third less of a core."""
READ_AT_ONCE = 64
"""Frames of one host before the others have their turn."""
MAX_FRAME_BYTES = 65_535
NET = "200.5.5"
"""Global addresses, as Python's `ipaddress` and libp2p see them; the namespaces have no way out."""
PREFIX = "snl"
"""Of the names of namespaces; the maker's pid follows."""
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
ARP = b"\x08\x06"
START_LIMIT_S = 10.0
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


class NoNetwork(Exception):
    """This machine cannot make such a network; says why, in one line."""


@dataclass(frozen=True)
class Link:
    """Of each host, or of each house, to the switch and from there to the others."""

    delay_s: float = 0.0
    """One way."""
    bits_per_s: float = 0.0
    """Of the uplink, Ethernet headers included; 0 = no limit."""
    loss: float = 0.0
    """Part of the frames; ARP is never lost."""
    mtu: int = 1500
    down_bits_per_s: float = 0.0
    """Of the downlink, likewise."""


@dataclass
class Counters:
    """Of one host, Ethernet headers included."""

    sent_bytes: int = 0
    """To its house too."""
    crossed_bytes: int = 0
    """Of these, over the uplink."""
    sent_frames: int = 0
    received_bytes: int = 0
    dropped_frames: int = 0
    """On the way from it: lost, or a queue was full."""


@dataclass(frozen=True)
class Host:
    """A machine of the network."""

    space: str
    """Its namespace."""
    address: str


# ---- how frames travel ---------------------------------------------------------------------------


@dataclass
class Way:
    """An uplink or a downlink: frames leave it one after the other."""

    bits_per_s: float
    """0 = no limit."""
    free_at: float = float("-inf")
    """When it has sent what it has."""

    def through(self, num_bytes: int, now: float) -> float | None:
        """When a frame that comes now has left; None where the queue is full."""
        if not self.bits_per_s:
            return now
        start = max(now, self.free_at)
        if start - now > QUEUE_S:
            return None
        self.free_at = start + 8 * num_bytes / self.bits_per_s
        return self.free_at


class Wires:
    """Learns which host has which Ethernet address, and says when frames arrive where. Hosts are
    numbers here, from 0; `now` never decreases."""

    def __init__(self, houses: Sequence[int], link: Link) -> None:
        """`houses`: the number of each host's house."""
        self.counters = [Counters() for _ in houses]
        self._houses = houses
        self._link = link
        self._up = {house: Way(link.bits_per_s) for house in houses}
        self._down = {house: Way(link.down_bits_per_s) for house in houses}
        self._is_instant = not (link.bits_per_s or link.down_bits_per_s or link.delay_s)
        self._owner: dict[bytes, int] = {}
        self._on_way: list[tuple[float, int, bool, int, int, bytes]] = []
        """When a frame is there, a number, whether it is through the downlink, from, to, itself."""
        self._num_frames = 0
        self._random = random.Random(0)

    @property
    def next_at(self) -> float | None:
        """When something happens to a frame that is on its way; None where none is."""
        return self._on_way[0][0] if self._on_way else None

    def send(self, host: int, frame: bytes, now: float) -> list[int]:
        """A host sends a frame. Returns the hosts that it reaches at once."""
        self._owner[frame[6:12]] = host
        is_for_one = not frame[0] & 1 and frame[:6] in self._owner
        targets = [self._owner[frame[:6]]] if is_for_one else range(len(self._houses))
        house = self._houses[host]
        near = [x for x in targets if x != host and self._houses[x] == house]
        far = [x for x in targets if self._houses[x] != house]
        crosses = bool(far) and self._cross(host, far, frame, now)
        if near or crosses:
            counters = self.counters[host]
            counters.sent_bytes += len(frame)
            counters.sent_frames += 1
            counters.crossed_bytes += len(frame) * crosses
        return [*near, *far] if crosses and self._is_instant else near

    def _cross(self, host: int, targets: Sequence[int], frame: bytes, now: float) -> bool:
        """Over the uplink; whether the frame is through it."""
        link = self._link
        is_lost = link.loss and frame[12:14] != ARP and self._random.random() < link.loss
        left = None if is_lost else self._up[self._houses[host]].through(len(frame), now)
        if left is None:
            self.counters[host].dropped_frames += 1
            return False
        if not self._is_instant:
            for target in targets:
                self._put(left + link.delay_s, False, host, target, frame)
        return True

    def _put(self, at: float, is_through: bool, host: int, target: int, frame: bytes) -> None:
        self._num_frames += 1
        heapq.heappush(self._on_way, (at, self._num_frames, is_through, host, target, frame))

    def arrived(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Hosts, and the frames that are there."""
        while self._on_way and self._on_way[0][0] <= now:
            at, _, is_through, host, target, frame = heapq.heappop(self._on_way)
            if not is_through:
                left = self._down[self._houses[target]].through(len(frame), at)
                if left is None:
                    self.counters[host].dropped_frames += 1
                    continue
                if left > at:
                    self._put(left, True, host, target, frame)
                    continue
            yield target, frame


# ---- the switch, a process of its own ------------------------------------------------------------


@contextlib.contextmanager
def inside(space: str) -> Iterator[None]:
    """This thread is in a network namespace; what it opens there stays there."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{space}", os.O_RDONLY)

    def enter(handle: int) -> None:
        if libc.setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")

    try:
        enter(there)
        try:
            yield
        finally:
            enter(home)
    finally:
        os.close(home)
        os.close(there)


def open_tap(space: str) -> int:
    """A device `eth0` in a namespace; its frames come and go through the handle."""
    with inside(space):
        handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        wanted = struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI)
        fcntl.ioctl(handle, TUNSETIFF, wanted)
    return handle


class Switch:
    """Carries frames between TAPs."""

    def __init__(self, handles: Sequence[int], wires: Wires) -> None:
        self._handles = handles
        self._wires = wires

    def run(self, orders: int) -> None:
        """Until `orders` ends; each line of it is answered with the counters."""
        hosts = {handle: host for host, handle in enumerate(self._handles)}
        handles = [*hosts, orders]
        while True:
            now = time.monotonic()
            for host, frame in self._wires.arrived(now):
                self._write(host, frame)
            next_at = self._wires.next_at
            wait_s = None if next_at is None else max(STEP_S, next_at - now)
            ready, _, _ = select.select(handles, [], [], wait_s)
            if next_at is not None and time.monotonic() < now + STEP_S:
                time.sleep(STEP_S)
            for handle in ready:
                if handle != orders:
                    self._read(hosts[handle], time.monotonic())
                elif not os.read(orders, 4096):
                    return
                else:
                    counted = [asdict(counters) for counters in self._wires.counters]
                    print(json.dumps(counted), flush=True)

    def _read(self, host: int, now: float) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                frame = os.read(self._handles[host], MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            for target in self._wires.send(host, frame, now):
                self._write(target, frame)

    def _write(self, host: int, frame: bytes) -> None:
        """What the host does not take is lost, as on a cable."""
        with contextlib.suppress(OSError):
            os.write(self._handles[host], frame)
            self._wires.counters[host].received_bytes += len(frame)


def serve(spaces: Sequence[str], houses: Sequence[int], link: Link) -> None:
    """The switch's process: says `ready`, and ends with its standard input."""
    handles = [open_tap(space) for space in spaces]
    print("ready", flush=True)
    Switch(handles, Wires(houses, link)).run(sys.stdin.fileno())


# ---- the network, as its maker sees it -----------------------------------------------------------


class Network:
    """Hosts on a switch."""

    def __init__(self, hosts: dict[str, Host], switch: subprocess.Popen[str]) -> None:
        self.hosts = hosts
        self._switch = switch

    def counters(self) -> dict[str, Counters]:
        """What each host has sent so far. Raises `NoNetwork` where the switch is gone."""
        answer = self._ask()
        if not answer:
            raise NoNetwork("the switch has ended")
        return {name: Counters(**found) for name, found in zip(self.hosts, json.loads(answer))}

    def _ask(self) -> str:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        try:
            self._switch.stdin.write("count\n")
            self._switch.stdin.flush()
        except OSError:
            return ""
        return self._switch.stdout.readline()


@contextlib.contextmanager
def network(
    names: Sequence[str], link: Link, congestion: str = "", houses: Sequence[int] = ()
) -> Iterator[Network]:
    """At the end its namespaces and its switch are gone.

    Args:
        names: of the hosts.
        link: of each, or of each house.
        congestion: the kernel's congestion control there (`cubic`, `bbr`); its default where not
            given.
        houses: the number of each host's house; one for each host where not given.

    Raises:
        NoNetwork: this machine does not offer it.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoNetwork("network namespaces need Linux and root: run this as root")
    if not Path("/dev/net/tun").exists():
        raise NoNetwork("there is no /dev/net/tun here: modprobe tun, or --device /dev/net/tun")
    hosts = {
        name: Host(f"{PREFIX}{os.getpid()}-{name}", f"{NET}.{10 + i}")
        for i, name in enumerate(names, 1)
    }
    with contextlib.ExitStack() as ends:
        for host in hosts.values():
            ip("netns", "add", host.space)
            ends.callback(_remove, host.space)
            ip("-n", host.space, "link", "set", "lo", "up")
        spaces = [host.space for host in hosts.values()]
        switch = _start_switch(spaces, houses or range(len(spaces)), link)
        ends.callback(_end, switch)
        for host in hosts.values():
            ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.space, "link", "set", "eth0", "mtu", str(link.mtu), "up")
            if congestion:
                _choose_congestion(host.space, congestion)
        yield Network(hosts, switch)


def ip(*arguments: str) -> None:
    """Raises `NoNetwork` with what the command said."""
    command = ["ip", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        raise NoNetwork("there is no `ip` here: apt-get install iproute2") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[:300]
        raise NoNetwork(f"{' '.join(command)}: {said}")


def remove_stale() -> None:
    """Removes the namespaces of makers that were killed."""
    for path in Path("/run/netns").glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _remove(path.name)


def _start_switch(
    spaces: Sequence[str], houses: Sequence[int], link: Link
) -> subprocess.Popen[str]:
    about = json.dumps({"link": asdict(link), "houses": list(houses)})
    switch = subprocess.Popen(
        [sys.executable, __file__, about, *spaces],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C ends it last
    )
    assert switch.stdout is not None
    said, _, _ = select.select([switch.stdout], [], [], START_LIMIT_S)
    if not said or switch.stdout.readline() != "ready\n":
        _end(switch)
        raise NoNetwork("the switch does not start")
    return switch


def _choose_congestion(space: str, name: str) -> None:
    with inside(space):
        try:
            CONGESTION.write_text(name)
        except OSError:
            raise NoNetwork(
                f"this machine does not offer the congestion control {name} to namespaces: they "
                f"may have {ALLOWED.read_text().strip()}; what is in {ALLOWED} may be more"
            ) from None


def _remove(space: str) -> None:
    subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _end(switch: subprocess.Popen[str]) -> None:
    switch.kill()
    switch.wait()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    serve(sys.argv[2:], told["houses"], Link(**told["link"]))
