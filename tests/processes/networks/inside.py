"""Peers inside the network namespaces of a small internet (`internet`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.processes.networks.internet import PUBLIC_NET, Internet, NoNamespaces, internet
from tests.processes.running import Command, Machine, machine

ENTER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
with open("/run/netns/{space}") as found:
    if libc.setns(found.fileno(), 0):
        raise OSError(ctypes.get_errno(), "cannot enter {space}")
"""
"""As `ip netns exec`, for a process that is there already."""


@contextmanager
def world(net: str = PUBLIC_NET) -> Iterator[tuple[Internet, Machine]]:
    """A small internet, and what runs in it. Fails where the machine offers none."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.fail("network namespaces need Linux and root: run this test in a container as root")
    try:
        with internet(net) as made, machine() as running:
            yield made, running
    except NoNamespaces as e:
        pytest.fail(f"this machine offers no network namespaces: {e}")


def start(
    running: Machine,
    space: str,
    name: str,
    *arguments: str,
    before: str = "",
    environment: Mapping[str, str] | None = None,
) -> Command:
    """A peer on a machine of the small internet. `before`: code that it runs first."""
    inside = ENTER.format(space=space) + before
    host = ("--host", "0.0.0.0")
    return running.start_peer(name, *host, *arguments, environment=environment, before=inside)


def doctor(
    running: Machine, space: str, address: str, *arguments: str, code: int = 0
) -> dict[str, dict[str, str]]:
    """What `swarmnet doctor` says on a machine, by check. `code`: with which it ends."""
    inside = ENTER.format(space=space)
    asked = ("doctor", "--join", address, "--json", *arguments)
    command = running.start("doctor", *asked, before=inside)
    assert running.wait(command, 120.0) == code, command.describe()
    return {finding["check"]: finding for finding in json.loads(command.output())}


def address_at(net: Internet, number: int, peer: Command) -> str:
    """Of a peer on the public machine of this number, from 1."""
    return f"/ip4/{net.address_of(number)}/tcp/{peer.address.split('/tcp/')[1]}"


def round_of(peer: Command) -> int:
    """The newest that it has done itself, by its log (`--debug`)."""
    done = [line.split("round ")[1].split(":")[0] for line in peer.errors() if "open for" in line]
    return int(done[-1]) if done else -1


def said(peer: Command, words: str) -> int:
    """Lines of its log with these words."""
    return sum(words in line for line in peer.errors())
