"""`swarmnet doctor`: what this machine can do for a run, what is in its way, and how to mend it.

Each check is a function that returns findings; a finding that is not good says what to do in the
same line. Nothing is changed, and nothing but the peer that is asked hears of it."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from peer.commands.doctor_nat import check_nat, is_loopback
from peer.commands.doctor_reach import OUT, USUAL_PORTS, explain_no_way, explain_second
from peer.commands.doctor_report import report
from peer.commands.finding import BAD, GOOD, SKIPPED, WARNING, Finding, without_mend
from peer.machine.other_package import MEND, other_package
from peer.options import DoctorOptions
from swarmnet.causes import told
from swarmnet.errors import AddressError, SwarmnetError, UserError
from swarmnet.identity import Identity
from swarmnet.methods.contact import (
    BANDWIDTH,
    DIAL_BACK,
    LOOK_BACK,
    MAX_DIAL_BACK,
    BandwidthRequest,
    DialBackRequest,
    LookBackRequest,
)
from swarmnet.methods.method import MAX_PROBE_BYTES
from swarmnet.needs import PY_LIBP2P, install_command
from swarmnet.plurals import counted
from swarmnet.protocol.dialing.addresses import peer_of
from swarmnet.protocol.planning.search import cut_of
from swarmnet.runtime.carriers import carrier_of, here, runs_p2pd
from swarmnet.runtime.joining.find import check_addresses, dial_any, fetch_run, read_addresses
from swarmnet.spec import RunSpec, load_spec
from swarmnet.swarm.calls import call
from swarmnet.transport.base import Transport
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.direct import DirectListener, port_after
from swarmnet.transport.libp2p.interfaces import ANY_INTERFACE
from swarmnet.transport.libp2p.knocking import knock_at
from swarmnet.version import __version__
from swarmnet.wire import Array, Message

if TYPE_CHECKING:
    from swarmnet.training.memory.stage_table import StageTable

MARKS = {GOOD: "[green]ok  [/]", WARNING: "[yellow]warn[/]", BAD: "[red]BAD [/]", SKIPPED: "--  "}
MIN_PYTHON = (3, 11)
LOW_MEMORY_BYTES = 2 << 30
LOW_DISK_BYTES = 1 << 30
CHECKPOINTS_KEPT = 3
"""Two, and the one that is being written."""
MAX_CLOCK_ERROR_S = 30.0
SLOW_UPLOAD_BYTES_PER_S = 250_000
PROBE_TIMEOUT_S = 40.0
MAX_WHY_CHARS = 500
TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})(?:/|$)")
"""The host and port of an address."""
GIB, MIB = 1 << 30, 1 << 20


async def run_doctor(options: DoctorOptions, console: Console) -> int:
    """Prints the findings as they come; returns how many are bad. Raises `UserError` for options
    that lead nowhere."""
    if options.report:
        lines = await report()
        if options.as_json:
            console.print_json(json.dumps(lines), ensure_ascii=True)
        for what, text in [] if options.as_json else lines:
            console.print(f"{what + ':':<28} {text}", soft_wrap=True, highlight=False, markup=False)
        return 0
    spec = None
    if options.spec is not None:
        from swarmnet.training.resolving import described

        spec = described(load_spec(options.spec))
    found: list[Finding] = []

    def tell(findings: Iterable[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            if not options.as_json:
                console.print(_line(finding), soft_wrap=True, highlight=False, markup=True)

    for check in (check_python, check_package, check_torch, check_memory):
        tell(await asyncio.to_thread(check))
    tell(await asyncio.to_thread(check_disk, _existing(options.state_dir)))
    if options.join:
        check_addresses([a for a in options.join if not a.startswith("@")])
    tell_network, joined = await check_network(options)
    tell(tell_network)
    spec = spec or joined
    if spec is not None:
        computing = options.device, options.precision
        tell(await asyncio.to_thread(check_spec, spec, _existing(options.state_dir), *computing))
    num_bad = sum(f.level == BAD for f in found)
    if options.as_json:
        console.print_json(json.dumps([asdict(f) for f in found]), ensure_ascii=True)
    else:
        console.print(_verdict(num_bad, sum(f.level == WARNING for f in found)))
    return num_bad


def _line(finding: Finding) -> str:
    mend = f"\n       [bold]->[/] {escape(finding.mend)}" if finding.mend else ""
    return f"{MARKS[finding.level]}  {finding.check + ':':<14} {escape(finding.found)}{mend}"


def _verdict(num_bad: int, num_warnings: int) -> str:
    if num_bad:
        return f"\n{num_bad} to mend before this machine can take part."
    if num_warnings:
        return "\nThis machine can take part; what is marked would make it more useful."
    return "\nThis machine is ready."


def _existing(path: Path | None) -> Path:
    """The folder that is there, of a state folder that may not be made yet."""
    from swarmnet.runtime.state_dir import state_root

    path = path or state_root()
    while not path.exists():
        path = path.parent
    return path


# ---- this machine ---------------------------------------------------------------------------


def check_python() -> list[Finding]:
    """Interpreter and platform."""
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        return [Finding("Python", BAD, version, "install Python 3.11 or newer")]
    found = [Finding("Python", GOOD, f"{version} on {platform.system()} {platform.machine()}")]
    if not runs_p2pd():
        text = f"hivemind's network daemon does not run on {here()}: peers use py-libp2p"
        mend = f"nothing, once py-libp2p is installed ({install_command(PY_LIBP2P)})"
        found.append(Finding("platform", WARNING, text, mend))
    return found


def check_package() -> list[Finding]:
    """Whether what is installed is this swarmnet, and nothing of another one."""
    other = other_package()
    if other is None:
        return [Finding("swarmnet", GOOD, __version__)]
    text, is_over = other
    where = "lies over this one" if is_over else "is installed beside this one"
    return [Finding("swarmnet", BAD if is_over else WARNING, f"{text}, {where}", MEND)]


def check_torch() -> list[Finding]:
    """torch, and the GPU that it sees or should see."""
    try:
        import torch
    except ImportError as e:
        mend = install_command("torch")
        return [Finding("torch", BAD, f"cannot be imported: {e}", mend)]
    import swarmnet.training.accelerators as accelerators

    kind = accelerators.kind()
    built = f"for {kind}" if kind != accelerators.CPU else "for the CPU"
    if torch.version.cuda or torch.version.hip:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for ROCm"
    found = [Finding("torch", GOOD, f"{torch.__version__}, built {built}")]
    devices = [torch.device(kind, i) for i in range(accelerators.num_devices())]
    if devices:
        found += [Finding("GPU", GOOD, accelerators.name_of(device)) for device in devices]
    elif shutil.which("nvidia-smi") is None:
        found.append(Finding("GPU", SKIPPED, "none; this machine computes on its CPU"))
    elif torch.version.cuda is None:
        mend = "install a torch that is built for CUDA, see https://pytorch.org/get-started"
        found.append(Finding("GPU", WARNING, "there is one, and this torch cannot use it", mend))
    else:
        mend = "update the driver until `nvidia-smi` works and names this CUDA version or a newer"
        text = "there is one, and torch cannot open it: the driver is missing or too old"
        found.append(Finding("GPU", WARNING, text, mend))
    return found


def check_memory() -> list[Finding]:
    """Of the machine, now."""
    import psutil

    free = psutil.virtual_memory().available
    text = f"{free / GIB:.1f} GiB free, {counted(psutil.cpu_count() or 1, 'core')}"
    if free < LOW_MEMORY_BYTES:
        return [Finding("memory", WARNING, text, "close other programs, or serve small runs")]
    return [Finding("memory", GOOD, text)]


def check_disk(folder: Path) -> list[Finding]:
    """Where the state will be kept."""
    import os

    if not os.access(folder, os.W_OK):
        mend = "name a folder of your own with --state-dir"
        return [Finding("disk", BAD, f"{folder} cannot be written", mend)]
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in {folder}"
    if free < LOW_DISK_BYTES:
        return [Finding("disk", WARNING, text, "make room, or name another --state-dir")]
    return [Finding("disk", GOOD, text)]


def check_spec(
    spec: RunSpec, folder: Path, device: str = "auto", precision: str = "auto"
) -> list[Finding]:
    """What a stage of the run needs, against what is here, and how fast a peer here would be.
    `device`, `precision`: as of `swarmnet peer`. Raises `UserError` where there is no such
    device."""
    from peer.planning.machines import HOME, read_links
    from peer.planning.question import Planner, this_one
    from swarmnet.runtime.ranks import check_wanted
    from swarmnet.training.memory.stage_table import StageTable, memory_of
    from swarmnet.training.models.registry import split_stages

    check_wanted(device, 1)
    if spec.model.kind == "custom":
        return [Finding("the run", SKIPPED, "a custom model: what it needs is not known")]
    table, stages = StageTable(spec), spec.pipeline.num_stages
    cut = cut_of([len(x) for x in split_stages(table.plan, stages)])
    timed = this_one(spec, precision, device)
    planner = Planner(timed.described, read_links(HOME), precision, timed.seconds)
    machine = planner.machine(timed.described[0], spec)
    here, costs = memory_of(machine), planner.costs(table)
    held = [table.needed(*x, stages, here) for x in cut]
    fits = [costs.held(*x, stages, machine) is not None for x in cut]
    policies = " or ".join(dict.fromkeys(x.activations for x in held))
    beside = ""
    if here.is_apart:
        beside = f" of the GPU, and {_span([x.host_bytes for x in held], MIB)} MiB of main memory"
    text = (
        f"{spec.name!r}: a stage takes {_span([x.device_bytes for x in held], MIB)} MiB of memory"
        f"{beside} where this peer is its only replica, in {here.precision}, with activations = "
        f"{policies}, as this machine would choose"
    )
    found = [Finding("the run", GOOD, text)]
    if not any(fits):
        found[0] = Finding("the run", BAD, text, "this run is too large for this machine")
    elif not all(fits):
        mend = "it fits some stages; see `swarmnet plan`, and choose one with --stage"
        found[0] = Finding("the run", WARNING, text, mend)
    rates = [costs.rates(machine, *x, stages) for x in cut]
    tokens = [costs.job.tokens * r.compute for r in rates if r is not None]
    if tokens:
        text = f"about {_span(tokens)} tokens/s at a stage of {spec.name!r}, by its device"
        found.append(Finding("speed", GOOD, f"{text} ({timed.described[0].note})"))
    state = max(_state_bytes(table, *x) for x in cut) * CHECKPOINTS_KEPT
    if state > shutil.disk_usage(folder).free:
        text = f"checkpoints take up to {state / GIB:.1f} GiB"
        mend = "make room, or start with --checkpoint-every 0"
        found.append(Finding("checkpoints", WARNING, text, mend))
    return found


def _span(values: Sequence[float], unit: float = 1) -> str:
    """The least and the most, where these differ."""
    least, most = min(values) / unit, max(values) / unit
    return f"{least:,.0f}" + (f" to {most:,.0f}" if most > 1.01 * least else "")


def _state_bytes(table: StageTable, first: int, end: int) -> float:
    """That a checkpoint of a stage has at most, where this peer is its only replica."""
    from swarmnet.training.memory.plan import PRECISIONS

    needs = table.needs(first, end, PRECISIONS["fp32"])
    return needs.weights + needs.gradients + needs.updating


# ---- the network ----------------------------------------------------------------------------


async def check_network(options: DoctorOptions) -> tuple[list[Finding], RunSpec | None]:
    """Port, and with `join`: the way there and back, the clock, how fast. And the run's spec."""
    from swarmnet.runtime.net import open_net

    key = Identity.generate()
    second = DirectListener(ANY_INTERFACE, port_after(options.port))
    try:
        listening = await open_net(
            options.transport,
            key,
            host=ANY_INTERFACE,
            port=options.port,
            announce=(),
            direct=second,
        )
    except SwarmnetError as e:
        if isinstance(e, AddressError):
            mend = "stop what uses it (your own peer?), or choose another --port"
        else:
            mend = "mend that, or choose the other --transport"
        found = [Finding("port" if isinstance(e, AddressError) else "carrier", BAD, str(e), mend)]
        if options.join:
            text = "not looked into, for want of a port"
            found.append(Finding("the run", SKIPPED, text, "without --port it takes any free one"))
        return found, None
    try:
        addresses = listening.transport.addresses()
        which = f"{options.port} and {second.port}" if options.port else "any two free ones"
        found = [Finding("port", GOOD, f"can listen on {which}")]
        if not options.join:
            text = "not looked into"
            mend = "name a peer of the run: swarmnet doctor --join ADDR"
            return [*found, Finding("the way in", SKIPPED, text, mend)], None
        asking = await open_net(
            options.transport,
            Identity.generate(),
            host=ANY_INTERFACE,
            port=0,
            announce=(),
            shares_port=True,
        )
        try:
            more, spec = await ask_run(asking.transport, addresses, second.port, options)
            return found + more, spec
        finally:
            await asking.transport.close()
    finally:
        await listening.transport.close()


async def ask_run(
    transport: ChannelTransport, own: Sequence[str], second: int, options: DoctorOptions
) -> tuple[list[Finding], RunSpec | None]:
    """`own`, `second`: the addresses of the identity that listens, and its port for direct
    connections."""
    given: list[str] = []
    try:
        given = await read_addresses(options.join, patience_s=0.0)
        began = time.perf_counter()
        peer_id = await dial_any(transport, given)
        dial_s = time.perf_counter() - began
    except UserError as e:
        why, mend = without_mend(str(e))
        if mend and not isinstance(e, AddressError):  # a knock says no more than was heard
            return [Finding(OUT, BAD, why[:MAX_WHY_CHARS], mend)], None
        return [await look_out(why[:MAX_WHY_CHARS], given)], None
    try:
        spec = await fetch_run(transport, peer_id)
    except UserError as e:  # the way is open: what is wrong is at its other end
        why, _, mend = str(e).rpartition("; ")
        return [Finding(OUT, BAD, why[:MAX_WHY_CHARS], mend)], None
    text = f"peer {peer_id[-8:]} of {spec.name!r} answered in {1000 * dial_s:.0f} ms"
    found = [Finding(OUT, GOOD, text)]
    transport.set_run(spec.run_id)
    # p2pd goes out from the port on which it listens where it is asked to, py-libp2p never.
    hosts = {_host(a) for a in own}
    named = {_host(a) for a in given if peer_of(a) == peer_id}
    is_here = all(host in hosts or is_loopback(host) for host in named)
    can_compare = carrier_of(options.transport) == "p2pd"
    nat = check_nat(transport, peer_id, can_compare=can_compare, own_hosts=hosts, is_here=is_here)
    for check in (
        check_way_in(transport, peer_id, own, is_here=is_here),
        check_second_port(transport, peer_id, second, is_here=is_here),
        nat,
        check_speed(transport, peer_id),
    ):
        try:
            found += await check
        except SwarmnetError as e:
            why, mend = without_mend(told(e))
            mend = mend or "try another peer"
            found.append(Finding("the peer", SKIPPED, f"did not help: {why}", mend))
    return found, spec


async def look_out(why: str, given: Sequence[str]) -> Finding:
    """No peer answered at these addresses: what the first host with a TCP port says itself."""
    found = next((m for m in map(TCP.match, given) if m), None)
    if found is None:
        return explain_no_way(why, "", 0, {})
    host, port = found[1], int(found[2])
    ports = list(dict.fromkeys((port, *USUAL_PORTS)))
    answers = await asyncio.gather(*(knock_at(host, p) for p in ports))
    heard = {p: answer.heard for p, answer in zip(ports, answers, strict=True)}
    return explain_no_way(why, host, port, heard)


async def check_way_in(
    transport: Transport, peer_id: str, own: Sequence[str], *, is_here: bool = False
) -> list[Finding]:
    """Asks the peer to dial the listening identity, which it has never met, at the ports of its
    addresses and the host from which it sees this machine come. `is_here`: it runs on this machine,
    so that it cannot tell what others reach."""
    asked = tuple(sorted(own, key=is_private))[:MAX_DIAL_BACK]
    reply = await call(
        transport, peer_id, DIAL_BACK, Message(DialBackRequest(asked)), timeout_s=PROBE_TIMEOUT_S
    )
    answer = reply.body
    found = [check_clock(answer.unix_s - time.time())]
    pairs = list(zip(asked, answer.reasons, strict=False))
    reached = [answer.host or _host(a) for a, reason in pairs if not reason]
    if reached:
        text = f"that peer reached this machine at {', '.join(dict.fromkeys(reached))}"
        if is_here:
            text += " (it runs on this machine: whether others do, only others can tell)"
        elif all(map(is_private_host, reached)):
            text += " (a private address: peers elsewhere may not)"
        return [*found, Finding("the way in", GOOD, text)]
    if is_here:
        text = "not reached, though that peer runs on this machine"
        mend = "see which addresses this machine has, and what its firewall lets through"
        return [*found, Finding("the way in", WARNING, text, mend)]
    nat = "this machine is behind NAT (it has private addresses only)"
    text = nat if all(is_private(a) for a in own) else "a firewall is in the way"
    mend = (
        "forward two TCP ports to this machine, PORT and the next one, then start peers with "
        "--port PORT --announce /ip4/YOUR.PUBLIC.IP/tcp/PORT; without it others reach this peer "
        "through relays, which is slower"
    )
    return [*found, Finding("the way in", WARNING, f"not reached: {text}", mend)]


async def check_second_port(
    transport: Transport, peer_id: str, port: int, *, is_here: bool = False
) -> list[Finding]:
    """Asks the peer to knock at the port for direct connections. `is_here`: as of
    `check_way_in`."""
    message = Message(LookBackRequest((port,)))
    reply = await call(transport, peer_id, LOOK_BACK, message, timeout_s=PROBE_TIMEOUT_S)
    return [explain_second(port, reply.body.host, port in reply.body.reached, is_here=is_here)]


def check_clock(error_s: float) -> Finding:
    if abs(error_s) <= MAX_CLOCK_ERROR_S:
        return Finding("clock", GOOD, f"within {max(1.0, abs(error_s)):.0f} s of that peer's")
    mend = "set this machine's clock (timedatectl set-ntp true), if it is not the peer's"
    return Finding("clock", WARNING, f"{abs(error_s):.0f} s off that peer's", mend)


async def check_speed(transport: Transport, peer_id: str) -> list[Finding]:
    """Bytes there and bytes back; each way is timed after a short exchange has opened it up."""
    payload = (Array("uint8", (MAX_PROBE_BYTES,), bytes(MAX_PROBE_BYTES)),)

    async def timed(reply_bytes: int, arrays: tuple[Array, ...]) -> float:
        began = time.perf_counter()
        await call(
            transport,
            peer_id,
            BANDWIDTH,
            Message(BandwidthRequest(reply_bytes), arrays),
            timeout_s=PROBE_TIMEOUT_S,
        )
        return time.perf_counter() - began

    round_trip_s = await timed(0, ())
    up = MAX_PROBE_BYTES / max(1e-6, await timed(0, payload) - round_trip_s)
    down = MAX_PROBE_BYTES / max(1e-6, await timed(MAX_PROBE_BYTES, ()) - round_trip_s)
    text = f"to that peer: {_rate(up)} up, {_rate(down)} down, {1000 * round_trip_s:.0f} ms"
    if up < SLOW_UPLOAD_BYTES_PER_S:
        mend = "this link is slow; close what else uses it, or join a run with small activations"
        return [Finding("bandwidth", WARNING, text, mend)]
    return [Finding("bandwidth", GOOD, text)]


def _rate(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:,.1f} Mbit/s"


def _host(address: str) -> str:
    parts = address.split("/")
    return parts[2] if len(parts) > 2 else address


def is_private(address: str) -> bool:
    return is_private_host(_host(address))


def is_private_host(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_private or ip.is_loopback or ip.is_link_local
