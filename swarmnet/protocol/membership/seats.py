"""Several stages on one machine: the number of seats that it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from swarmnet.protocol.membership.peer_ids import MAX_SEATS, machine_of
from swarmnet.protocol.membership.records import LEAVING
from swarmnet.protocol.membership.view import View

MEMORY_PART = 0.7
"""Part of the free memory that all stages of a machine may take together."""


def stages_beside(view: View, own_peer_id: str, num_stages: int, now: float) -> frozenset[int]:
    """Stages that other seats of the same machine serve, are joining or move to. A second copy of a
    stage on one machine would die with the first."""
    machine = machine_of(own_peer_id)
    others = [
        (k, r)
        for k in range(num_stages)
        for r in view.members(k, now)
        if r.peer_id != own_peer_id and machine_of(r.peer_id) == machine
    ]
    here = {k for k, r in others if r.state != LEAVING}
    return frozenset(here | {r.moving_to for _, r in others if 0 <= r.moving_to < num_stages})


@dataclass(frozen=True, slots=True)
class Room:
    """The number of stages that a machine serves, and its reasons."""

    num_seats: int
    by_memory: int
    """Stages that fit into the memory."""
    by_speed: int
    """Stages that it could serve, each as fast as the other peers serve theirs."""
    uncovered: int
    """Stages without a replica at that time."""


def room_for(
    stage_bytes: Sequence[float],
    free_bytes: float,
    own_samples_per_s: float,
    rates: Sequence[Sequence[float]],
    num_here: int = 0,
    left_bytes: float = math.inf,
) -> Room:
    """The number of stages that a machine takes.

    Every further stage costs memory and an exchange of gradients. It pays where a stage would have
    no replica otherwise, and where the machine is so much faster than the others that it can serve
    several stages as fast as they serve one. The memory limits the number in both cases, and no
    stage is taken twice.

    Args:
        stage_bytes: what a replica of each stage holds, bytes.
        free_bytes: memory that is free before the first is built.
        own_samples_per_s: of this machine, serving one stage alone.
        rates: per stage, samples a second of each replica that others serve (0: not measured).
        num_here: stages that it serves now.
        left_bytes: memory that is free beside them: others may have taken some meanwhile.
    """
    num_stages = len(stage_bytes)
    dearest = max([*stage_bytes, 1.0])
    in_all, further = (MEMORY_PART * size / dearest for size in (free_bytes, left_bytes))
    by_memory = max(1, int(min(num_stages, in_all, num_here + further)))
    uncovered = sum(not replicas for replicas in rates)
    known = [rate for replicas in rates for rate in replicas if rate > 0]
    by_speed = max(1, int(min(own_samples_per_s / median(known), MAX_SEATS))) if known else 1
    wanted = max(1, uncovered, min(by_speed, num_stages))
    return Room(min(wanted, by_memory), by_memory, by_speed, uncovered)
