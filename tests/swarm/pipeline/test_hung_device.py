"""A device that hangs in a pass, at a peer that goes on talking: the others go on without it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

FOUND_OUT_S, SPAN_S = 90.0, 30.0
SPEED = 0.2
"""Of the devices: few rounds, and few events."""


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 1])
def test_the_others_go_on_without_a_device_that_hangs(tmp_path: Path, stage: int) -> None:
    """Of one of two replicas: of the first stage, where all feed themselves, or of the last."""

    async def scenario(swarm: Swarm) -> None:
        for i in range(4):
            swarm.start(f"peer-{i}", stage=i % 2, speed=SPEED)
        await swarm.until_round(10)
        hung = f"peer-{stage}"
        device: Any = swarm.members[hung].peer.machine.device
        device._device._finish = lambda job: None  # noqa: SLF001  what it is at never ends
        await asyncio.sleep(FOUND_OUT_S)
        before = rounds(swarm, hung)
        await asyncio.sleep(SPAN_S)
        after = rounds(swarm, hung)
        assert min(b - a for a, b in zip(before, after, strict=True)) > 5
        assert swarm.total("diverged") == 0

    spec = tiny_spec(tmp_path, num_stages=2, rounds=100_000)
    in_virtual_time(scenario, spec, is_synthetic=True)


def rounds(swarm: Swarm, hung: str) -> list[int]:
    """Of the others."""
    others = [m.peer.replica for name, m in swarm.members.items() if name != hung]
    return [replica.round for replica in others if replica is not None]
