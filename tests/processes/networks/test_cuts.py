"""Two peers that cannot reach each other, though all others reach both: training goes on; network
namespaces.

Nobody relays here: with a relay the two would soon be one again (`test_nat`). The virtual half,
with more cases, is `tests/swarm/membership/test_cuts.py`."""

from __future__ import annotations

import time

import pytest

from tests.processes.networks.inside import address_at, round_of, start, world
from tests.processes.networks.internet import Internet
from tests.processes.running import Command, Machine, tiny_run

pytestmark = pytest.mark.processes

STAGES = (0, 1, 0, 1, 0, 1)
WHOLE_S, CUT_S, HEALED_S = 40.0, 120.0, 20.0
"""Without the cut (before it and after it, since other work on this machine may come and go), with
it, and between the two. The exchange in which it begins takes up to 15 s."""
KEPT = 0.8
TOGETHER = 2
"""Rounds by which peers that train as one may be apart, by what their logs say at one moment."""
SLOWLY = """
import time
from swarmnet.training.stage import TorchStage

def slow(name):
    real = getattr(TorchStage, name)
    def work(self, *arguments, **options):
        time.sleep(0.2)
        return real(self, *arguments, **options)
    setattr(TorchStage, name, work)

for name in ("forward", "backward", "forward_backward"):
    slow(name)
"""
"""A device that is slow and takes nothing of this machine: rounds take as long whatever else runs
here."""


def six(net: Internet, running: Machine) -> list[Command]:
    spaces = [net.public(f"m{i}") for i in range(len(STAGES))]
    spec = tiny_run(running.folder, rounds=1_000_000)
    peers: list[Command] = []
    for i, (space, stage) in enumerate(zip(spaces, STAGES, strict=True)):
        if i:
            data = str(running.folder / "text.txt")
            way_in = ("--join", address_at(net, 1, peers[0]), "--data", data)
        else:
            way_in = ("--spec", str(spec))
        arguments = (*way_in, "--stage", str(stage), "--no-relay", "--debug")
        peers.append(start(running, space, f"m{i}", *arguments, before=SLOWLY))
        if not i:
            running.until_ready(peers[0])
    running.until_ready(*peers)
    running.until(lambda: min(map(round_of, peers)) >= 5)
    return peers


def rate(peers: list[Command], span_s: float) -> float:
    """Rounds a second of the slowest."""
    before = [round_of(p) for p in peers]
    began = time.monotonic()
    time.sleep(span_s)
    made = min(round_of(p) - b for p, b in zip(peers, before, strict=True))
    return made / (time.monotonic() - began)


def keeps_its_pace(net: Internet, peers: list[Command], *ways: tuple[int, int]) -> None:
    """`ways`: from which of the peers to which no packet gets any more."""
    before = rate(peers, WHOLE_S)
    for source, target in ways:
        net.cut_one_way(source + 1, target + 1)
    cut = rate(peers, CUT_S)
    made = list(map(round_of, peers))
    for _, target in ways:
        net.heal_one_way(target + 1)
    time.sleep(HEALED_S)
    after = rate(peers, WHOLE_S)
    whole = min(before, after)
    print(f"{ways}: {before:.3f} rounds a second, {cut:.3f}, {after:.3f}: {cut / whole:.2f}")
    for peer in peers:
        assert peer.process.poll() is None, peer.describe()
    assert max(made) - min(made) <= TOGETHER, made
    assert cut >= KEPT * whole, (before, cut, after)


PAIRS = {
    "two replicas of the last stage": (1, 3),
    "two replicas of the first stage": (0, 4),
    "a feeder and a replica of the last stage": (0, 3),
}
ONE_WAY = {
    "from a feeder to a replica of the last stage": (0, 3),
    "from a replica of the last stage to a feeder": (3, 0),
    "between two replicas of the last stage": (1, 3),
}


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_cut_of_one_pair_costs_few_rounds(pair: tuple[int, int]) -> None:
    with world() as (net, running):
        peers = six(net, running)
        keeps_its_pace(net, peers, pair, pair[::-1])


@pytest.mark.long
@pytest.mark.parametrize("way", ONE_WAY.values(), ids=ONE_WAY)
def test_a_one_way_cut_costs_few_rounds(way: tuple[int, int]) -> None:
    with world() as (net, running):
        peers = six(net, running)
        keeps_its_pace(net, peers, way)
