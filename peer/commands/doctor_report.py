"""`swarmnet doctor --report`: what this machine is and what works on it, for who keeps swarmnet.

It is for machines that nobody has tried yet. A person reads it and sends it, or does not: nothing
is sent from here. It has no name of a machine, person, folder, network or peer."""

from __future__ import annotations

import asyncio
import getpass
import platform
import re
import socket
import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import swarmnet.system as system
from swarmnet.errors import SwarmnetError
from swarmnet.identity import Identity
from swarmnet.plurals import counted
from swarmnet.runtime.carriers import runs_p2pd
from swarmnet.runtime.options import TransportName
from swarmnet.version import __version__
from swarmnet.wire import Array, Message

Lines = list[tuple[str, str]]
"""What, and what is found."""
PACKAGES = (
    *("torch", "triton", "numpy", "hivemind", "libp2p", "uvloop", "cryptography", "protobuf"),
    *("msgspec", "tokenizers", "safetensors", "transformers", "peft", "torchao"),
)
CODECS = ("bf16", "int8", "int6", "int4")
ROW = 4096
"""Numbers of a row by which codecs are tried."""
PATIENCE_S = 60.0
GIB = 1 << 30
MAX_TEXT = 300
PROBE_BYTES = 1 << 20
DIRECT_TRIES = 50
PATHS = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?[/\\][\w.+@~-]+(?:[/\\][\w.+@~-]*)*")
HOSTS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{0,4}){3,}")
PEERS = re.compile(r"\b(?:12D3Koo|Qm)[1-9A-HJ-NP-Za-km-z]{20,}\b")


async def report() -> Lines:
    """Takes some seconds; nothing of the machine changes."""
    found = [*versions(), *machine()]
    found += await asyncio.to_thread(devices)
    for name in ("p2pd", "py-libp2p"):
        found.append((f"carrier {name}", await tried(carries, name)))
    return [(what, impersonal(text)) for what, text in found]


def impersonal(text: str) -> str:
    """A text in one line, without paths, addresses, and names of this machine or its user."""
    for pattern, word in ((PEERS, "PEER"), (PATHS, "PATH"), (HOSTS, "HOST")):
        text = pattern.sub(word, text)
    names = {"USER": _user(), "MACHINE": socket.gethostname()}
    for word, name in names.items():
        if len(name) > 2:
            text = re.sub(rf"\b{re.escape(name)}\b", word, text, flags=re.IGNORECASE)
    return " ".join(text.split())[:MAX_TEXT]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        return ""


# ---- what it is -----------------------------------------------------------------------------


def versions() -> Lines:
    """Of swarmnet, Python, and what is installed of that on which it rests."""
    found = [("swarmnet", __version__)]
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    found.append(("Python", python))
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def machine() -> Lines:
    """Its kind, without its name."""
    import psutil

    kernel = re.match(r"[\d.]*", platform.release())
    parts = [platform.system(), kernel.group() if kernel else "", platform.machine()]
    if platform.mac_ver()[0]:
        parts.append(f"macOS {platform.mac_ver()[0]}")
    if "microsoft" in platform.release().lower():
        parts.append("WSL")
    libc = " ".join(platform.libc_ver())
    memory = (
        f"{counted(psutil.cpu_count() or 1, 'core')}, {psutil.virtual_memory().total / GIB:.0f} GiB"
    )
    ways = "the portable ones" if system.PORTABLE else "those of Linux"
    return [
        ("system", " ".join([*filter(None, parts), *([libc] if libc else [])])),
        ("machine", memory),
        ("ways of the system", ways),
        ("event loop", "uvloop" if system.fastest_loop() is not None else "Python's own"),
        ("machine secret", "there" if system.machine_secret() else "missing"),
    ]


# ---- what computes --------------------------------------------------------------------------


def devices() -> Lines:
    """The CPU and each kind of accelerator: what they have, and a small model trained on each."""
    import torch

    import swarmnet.training.accelerators as accelerators
    from swarmnet.training.codecs.fused import fused_codec, is_right_on
    from swarmnet.training.codecs.registry import codec_of
    from swarmnet.training.memory.device_copies import copies_of
    from swarmnet.training.optimizer.adamw import fuses_as_written
    from swarmnet.training.optimizer.adamw import is_right_on as steps_right_on

    kind, number = accelerators.kind(), accelerators.num_devices()
    found = [("accelerators", f"{number} of {kind}" if number else "none")]
    found.append(("AdamW of torch on the CPU", "right" if fuses_as_written() else "other bits"))
    for name in ["cpu", *([f"{kind}:0"] if number else [])]:
        device = torch.device(name)
        if device.type != accelerators.CPU:
            has = [d for d in ("bfloat16", "float16", "float64") if _has(device, d)]
            copies = type(copies_of(device)).__name__
            pinned = accelerators.has_pinned_memory(device)
            free = accelerators.free_bytes(device)
            found += [
                (name, accelerators.name_of(device)),
                (f"{name} has", ", ".join([*has, *(["pinned memory"] if pinned else []), copies])),
                (f"{name} free", "not said" if free is None else f"{free / GIB:.1f} GiB"),
                (f"{name} AdamW", "right" if steps_right_on(device) else "by the host"),
            ]
            for each in CODECS:
                codec: Any = codec_of(each)
                way = "its own code" if is_right_on(codec, ROW, device) else "by the host"
                if fused_codec(codec, ROW, device, torch.bfloat16):
                    way = "a kernel"
                found.append((f"{name} {each}", way))
        found.append((f"{name} trains", _trial(name)))
    return found


def _has(device: object, dtype: str) -> bool:
    import torch

    import swarmnet.training.accelerators as accelerators

    return accelerators.computes_in(torch.device(str(device)), getattr(torch, dtype))


def _trial(name: str) -> str:
    import torch

    from swarmnet.training.device_trial import try_device
    from swarmnet.training.optimizer.adamw import is_right_on

    try:
        trial = try_device(name, updates_on_device=is_right_on(torch.device(name)))
    except Exception as e:  # whatever a device does not have
        return f"NO: {type(e).__name__}: {e}"
    word = "yes" if trial.is_right else "NO, other numbers"
    return (
        f"{word}: {trial.precision}, loss {trial.loss:.4f} (fp32 on the CPU "
        f"{trial.loss_on_cpu:.4f}), {1000 * trial.seconds:.0f} ms a round"
    )


# ---- what carries ---------------------------------------------------------------------------


async def tried(work: Callable[[TransportName], Awaitable[str]], name: TransportName) -> str:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await work(name)
    except TimeoutError:
        return f"NO: nothing within {PATIENCE_S:.0f} s"
    except Exception as e:  # of a library that is missing or does not fit
        return f"NO: {e}" if isinstance(e, SwarmnetError) else f"NO: {type(e).__name__}: {e}"


async def carries(name: TransportName) -> str:
    """Two peers on loopback call each other, then with large messages, which go direct."""
    from swarmnet.runtime.net import open_net
    from swarmnet.transport.direct import DirectListener

    if name == "p2pd" and not runs_p2pd():
        return "not for this machine"
    began = time.perf_counter()
    nets = []
    try:
        for _ in range(2):
            direct = DirectListener("127.0.0.1", 0)
            key = Identity.generate()
            opened = await open_net(name, key, host="127.0.0.1", port=0, announce=(), direct=direct)
            nets.append(opened.transport)
        started_s = time.perf_counter() - began
        answers, asks = nets

        async def take(request: Any) -> Message:
            return Message()

        answers.handle("take", take)
        peer_id = await asks.dial(answers.addresses()[0])
        payload = Message(None, (Array("uint8", (PROBE_BYTES,), bytes(PROBE_BYTES)),))
        for _ in range(DIRECT_TRIES):
            await asks.call(peer_id, "take", payload, timeout_s=PATIENCE_S)
            if asks.traffic.direct_links:
                break
            await asyncio.sleep(0.1)
        else:
            return f"yes, started in {started_s:.1f} s; NO direct connection"
        return f"yes, started in {started_s:.1f} s; direct connections too"
    finally:
        for transport in nets:
            await transport.close()
