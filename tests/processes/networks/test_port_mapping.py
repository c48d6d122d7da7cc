"""A peer has its router forward its two ports, and closes them; network namespaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes.networks.inside import address_at, said, start, world
from tests.processes.running import SPARING, Machine, tiny_run

pytestmark = pytest.mark.processes
EVERYWHERE = ("--host", "any", "--port", "4001", "--debug")
INSIDE = "10.1.0.1"


@contextmanager
def router(running: Machine, space: str, language: str, outside: str) -> Iterator[Path]:
    """A home's router that forwards what it is asked to; what it says is in the file."""
    log = running.folder / "router.log"
    module = ("-m", "tests.transport.mapping.routers", language, INSIDE, outside)
    with log.open("wb") as out:
        serving = subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, *module],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        running.until(lambda: "serves" in log.read_text())
        yield log
    finally:
        serving.kill()
        serving.wait()


@pytest.mark.parametrize("language", ["nat-pmp", "upnp"])
def test_a_router_forwards_the_ports_as_long_as_the_peer_runs(language: str) -> None:
    with world() as (net, running):
        one, home = net.public("one"), net.behind_nat("home")
        outside = net.address_of(2)
        spec = tiny_run(running.folder, rounds=100_000)
        first = start(running, one, "one", "--spec", str(spec), "--stage", "0", *EVERYWHERE)
        running.until_ready(first)
        join = ("--join", address_at(net, 1, first), *SPARING, "--stage", "1", *EVERYWHERE)
        with router(running, f"{home}-nat", language, outside) as log:
            peer = start(running, home, "home", *join)
            running.until(lambda: "A 4001\nA 4002\n" in log.read_text())
            words = "the router forwards TCP ports 4001 and 4002 to this machine"
            running.until(lambda: said(peer, words))
            # Whoever did not hear of it from there gets in, at both ports.
            running.until(lambda: net.connects(one, outside, 4001))
            running.until(lambda: net.connects(one, outside, 4002))
            running.until_ready(peer)
            told = running.folder / "home.ready"
            running.until(lambda: f"/ip4/{outside}/tcp/4001/p2p/" in told.read_text())
            assert not said(peer, "nobody can dial this peer")
            running.interrupt(peer)
            assert running.wait(peer) in (0, 130), peer.describe()
            assert "D 4001\nD 4002\n" in log.read_text()
            assert not net.connects(one, outside, 4001)


@pytest.mark.long
def test_who_does_not_want_it_leaves_the_router_alone() -> None:
    with world() as (net, running):
        one, home = net.public("one"), net.behind_nat("home")
        spec = tiny_run(running.folder, rounds=100_000)
        first = start(running, one, "one", "--spec", str(spec), "--stage", "0", *EVERYWHERE)
        running.until_ready(first)
        join = ("--join", address_at(net, 1, first), *SPARING, "--stage", "1", *EVERYWHERE)
        with router(running, f"{home}-nat", "nat-pmp", net.address_of(2)) as log:
            peer = start(running, home, "home", *join, "--no-port-map")
            running.until(lambda: said(peer, "nobody can dial this peer"))
            assert "A 400" not in log.read_text()
