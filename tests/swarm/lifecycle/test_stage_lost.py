"""A peer whose stage is gone, though the peer is not: its work goes to other replicas, and it comes
back in a while; virtual time, memory transport."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarmnet.errors import StageLost
from swarmnet.ports import undivided
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING
from swarmnet.protocol.timing import UPKEEP_S
from swarmnet.swarm.peer import Peer
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, replay, tiny_spec

REASON = "stage 0 is lost here: its process ended"
PASSES = ("forward_pass", "backward_pass", "loss_pass", "recompute_pass")
OTHERS = ("retract", "gradient_shard", "copy_gradient", "finish_round", "evaluate")
ROUNDS = 24


def fails(*_: Any, **__: Any) -> Any:
    raise StageLost(REASON)


def lose(peer: Peer) -> None:
    """What computes its stage has ended: any call on that fails."""
    assert peer.replica is not None
    for name in PASSES:
        setattr(peer.replica.stage, name, lambda *_, **__: undivided(fails))
    for name in OTHERS:
        setattr(peer.replica.stage, name, fails)


def loses(peer: Peer) -> asyncio.Event:
    """When it is set, the machine hears that the stage is gone; once."""
    lost = asyncio.Event()

    async def until_lost() -> None:
        await lost.wait()
        lost.clear()
        raise StageLost(REASON)

    peer.machine.until_lost = until_lost
    return lost


@pytest.mark.parametrize("later_s", [0.0, 0.1], ids=["told at once", "its work fails first"])
def test_the_others_go_on_and_it_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, later_s: float
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        lost = {}
        for i in range(4):
            lost[i] = loses(swarm.start(f"peer-{i}", stage=i % 2))
        await swarm.until_round(3)
        peer, other = (swarm.members[name].peer for name in ("peer-2", "peer-1"))
        lose(peer)
        await asyncio.sleep(later_s)
        lost[2].set()
        began_s = loop.time()
        await swarm.until(lambda: peer.gossip.own.state == OBSERVING)
        assert peer.replica is None
        assert peer.gossip.own.paused == REASON
        await swarm.until(lambda: (r := other.view.get("peer-2")) is not None and r.paused != "")
        round_then = max(swarm.rounds())
        await swarm.until(lambda: max(swarm.rounds()) >= round_then + 3)
        assert peer.replica is None
        assert loop.time() - began_s < UPKEEP_S
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE)
        assert peer.gossip.own.paused == ""
        await swarm.until_round(ROUNDS)
        reference = replay(spec, swarm.counted, ROUNDS)
        assert relative_difference(swarm.parameters(), reference.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)
    assert [r.getMessage() for r in caplog.records if REASON in r.getMessage()] == [
        f"no stage here for now: {REASON}"
    ]


def test_one_that_leaves_meanwhile_leaves_all_the_same(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        lost = [loses(swarm.start(f"peer-{i}", stage=i % 2)) for i in range(4)]
        await swarm.until_round(3)
        member = swarm.members["peer-2"]
        member.peer.stop()
        await asyncio.sleep(0.0)
        lose(member.peer)
        lost[2].set()
        began_s = asyncio.get_running_loop().time()
        await asyncio.wait([member.life], timeout=60.0)
        assert member.life.done()
        member.life.result()
        assert asyncio.get_running_loop().time() - began_s < 10.0
        del swarm.members["peer-2"]
        round_then = max(swarm.rounds())
        await swarm.until(lambda: max(swarm.rounds()) >= round_then + 3)

    in_virtual_time(scenario, spec)


def test_a_stage_that_is_lost_before_it_is_there_ends_the_peer(tmp_path: Path) -> None:
    """A person hears of it, as of any other reason why the first stage cannot be."""
    spec = tiny_spec(tmp_path, num_stages=2)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", build=fails)
        with pytest.raises(StageLost, match=REASON):
            await swarm.until(lambda: False)

    in_virtual_time(scenario, spec)
