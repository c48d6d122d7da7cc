"""Two halves of a swarm that cannot reach each other, and an onlooker that reaches both; network
namespaces."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from peer.machine.limits import LIMITS_FILE
from tests.processes.internet import Internet, NoNamespaces, internet
from tests.processes.running import Command, Machine, machine, tiny_run
from tests.processes.test_nat import round_of, said, start

pytestmark = [pytest.mark.processes, pytest.mark.long]

STAGES = (0, 1, 0, 1, 0, 1)
ONE, OTHER = (0, 1, 2), (3, 4, 5)
FOUND_OUT_S = 30.0
SPAN_S = 45.0
KEPT = 0.8
TOGETHER = 20
"""Rounds by which peers that train as one may be apart, by what their logs say at one moment."""


@contextmanager
def world() -> Iterator[tuple[Internet, Machine]]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.fail("network namespaces need Linux and root: run this test in a container as root")
    try:
        with internet() as net, machine() as running:
            yield net, running
    except NoNamespaces as e:
        pytest.fail(f"this machine offers no network namespaces: {e}")


def six_and_an_onlooker(net: Internet, running: Machine, *options: str) -> list[Command]:
    """The six; the onlooker's owner wants its machine for other things, so it serves no stage."""
    onlooker = net.public("onlooker")
    spaces = [net.public(f"m{i}") for i in range(len(STAGES))]
    (running.folder / "onlooker").mkdir()
    (running.folder / "onlooker" / LIMITS_FILE).write_text("paused = true\n")
    spec = tiny_run(running.folder, rounds=1_000_000)
    first = start(running, onlooker, "onlooker", "--spec", str(spec), *options)
    running.until_ready(first)
    address = f"/ip4/{net.address_of(1)}/tcp/{first.address.split('/tcp/')[1]}"
    join = ("--join", address, "--data", str(running.folder / "text.txt"), "--debug", *options)
    peers = [
        start(running, space, f"m{i}", *join, "--stage", str(STAGES[i]))
        for i, space in enumerate(spaces)
    ]
    running.until_ready(*peers)
    running.until(lambda: min(map(round_of, peers)) >= 5)
    return peers


def cut_halves(net: Internet) -> None:
    for a in ONE:
        for b in OTHER:
            net.cut(a + 2, b + 2)  # the onlooker is number 1


def rates(peers: Sequence[Command]) -> list[float]:
    """Rounds a second of each half, over `SPAN_S`."""
    before = [round_of(p) for p in peers]
    time.sleep(SPAN_S)
    made = [round_of(p) - b for p, b in zip(peers, before, strict=True)]
    return [min(made[i] for i in half) / SPAN_S for half in (ONE, OTHER)]


def test_each_half_trains_as_if_the_onlooker_were_not_there() -> None:
    with world() as (net, running):
        peers = six_and_an_onlooker(net, running, "--no-relay")
        cut_halves(net)
        time.sleep(FOUND_OUT_S)
        connected = rates(peers)
        for b in OTHER:
            net.cut(1, b + 2)
        time.sleep(FOUND_OUT_S)
        alone = rates(peers)
        assert min(alone) > 0, "each half has every stage"
        for half in range(2):
            assert connected[half] >= KEPT * alone[half], (connected, alone)


def test_all_train_as_one_where_the_onlooker_relays() -> None:
    with world() as (net, running):
        peers = six_and_an_onlooker(net, running)
        cut_halves(net)
        words = "others reach this peer through it"
        running.until(lambda: any(said(p, words) for p in peers))
        time.sleep(FOUND_OUT_S)
        newest = max(map(round_of, peers))
        running.until(lambda: min(map(round_of, peers)) > newest + 5)
        made = list(map(round_of, peers))
        assert max(made) - min(made) <= TOGETHER, made
