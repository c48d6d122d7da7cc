"""Other assignments of peers to stages, for comparison with the swarm's own in the simulator.

    python benchmarks/assignments.py NAME [--rebalance-every SECONDS] [--peers N] [--stages N] ...

NAME is `adaptive` (the rule of swarmnet), `static` or `swarm`. Routing, rounds, averaging and
joining stay the same, so that a difference comes from the assignment alone. The other options, and
what is printed, are those of `swarmnet simulate`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b

from peer.commands.simulate import run_scenario, scenario_of
from peer.options import SimulateOptions
from swarmnet.protocol.membership.assignment import (
    Move,
    Staff,
    choose_stage,
    settle,
)
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.scenario import Scenario

ADAPTIVE, STATIC, SWARM = "adaptive", "static", "swarm"
ASSIGNMENTS = (ADAPTIVE, STATIC, SWARM)
REBALANCE_EVERY_S = 300.0
"""The period of the published experiments."""
TAKEN = ("peers", "stages", "hours", "churn", "seed", "links", "service_s", "microbatches")
"""Of the options of `swarmnet simulate`."""
WINDOW = 0.1
"""Part of each period in which the move of that period may begin."""


def _always(
    view: View,
    num_stages: int,
    now: float,
    move: Move,
    *,
    costs: Sequence[float] | None = None,
) -> bool:
    """Every decided move is made."""
    return True


class StaticAssignment:
    """A newcomer draws its stage and stays there."""

    def choose(
        self,
        view: View,
        num_stages: int,
        now: float,
        rng: random.Random,
        *,
        costs: Sequence[float] | None = None,
        allowed: Sequence[int] | None = None,
    ) -> int:
        stages = range(num_stages) if allowed is None else allowed
        return rng.choice([k for k in stages if not view.members(k, now)] or stages)

    def settle(
        self,
        view: View,
        num_stages: int,
        now: float,
        chosen: int,
        before: Collection[str],
        *,
        costs: Sequence[float] | None = None,
        allowed: Sequence[int] | None = None,
    ) -> int:
        return chosen

    def propose(
        self,
        view: View,
        num_stages: int,
        now: float,
        *,
        margin: float,
        costs: Sequence[float] | None = None,
        without: Collection[str] = (),
    ) -> Move | None:
        return None

    confirm = staticmethod(_always)


@dataclass
class SwarmRebalancing:
    """Adaptive rebalancing as published with SWARM (Ryabinin et al. 2023, arXiv:2301.11913,
    algorithm 2): every `every_s` seconds one peer of the stage with the least load moves to the
    stage with the most.

    Load is the length of a stage's queues. Where throughputs are announced, as here, the longest
    queue grows at the stage with the least throughput, so throughputs stand in for load. The moving
    peer is the one with the shortest queue; in a stage that waits for work that is any peer, and it
    is drawn. There is no margin, and no memory. Newcomers join the stage with the least
    throughput."""

    every_s: float = REBALANCE_EVERY_S
    _moved_in: int = -1

    def choose(
        self,
        view: View,
        num_stages: int,
        now: float,
        rng: random.Random,
        *,
        costs: Sequence[float] | None = None,
        allowed: Sequence[int] | None = None,
    ) -> int:
        return choose_stage(view, num_stages, now, rng, costs=costs, allowed=allowed)

    settle = staticmethod(settle)

    def propose(
        self,
        view: View,
        num_stages: int,
        now: float,
        *,
        margin: float,
        costs: Sequence[float] | None = None,
        without: Collection[str] = (),
    ) -> Move | None:
        period = int(now // self.every_s)
        if now - period * self.every_s > WINDOW * self.every_s or period == self._moved_in:
            return None
        staff = Staff(view, num_stages, now).members
        rates = [sum(r.samples_per_s for r in rs) for rs in staff]
        target = min(range(num_stages), key=lambda k: (rates[k], k))
        source = max(range(num_stages), key=lambda k: (rates[k], k))
        if source == target or len(staff[source]) < 2 or rates[target] <= 0:
            return None
        mover = min(
            (r for r in staff[source] if r.state == ACTIVE and not r.is_moving),
            key=lambda r: blake2b(f"{period}|{r.peer_id}".encode(), digest_size=8).digest(),
            default=None,
        )
        if mover is None:
            return None
        if mover.peer_id == view.own_peer_id:
            self._moved_in = period
        return Move(mover.peer_id, source, target, float("inf"))

    confirm = staticmethod(_always)


def with_assignment(scenario: Scenario, name: str, every_s: float = REBALANCE_EVERY_S) -> Scenario:
    """The scenario with one of `ASSIGNMENTS`. `every_s`: period of `swarm`, which looks at fixed
    times, decides at once, and has no cooldown."""
    if name == STATIC:
        return replace(scenario, assigner=lambda copies: StaticAssignment())
    if name == SWARM:
        look_s = WINDOW * every_s / 3
        limits = replace(
            scenario.limits, balance_every_s=look_s, move_proposals=1, move_cooldown_s=0.0
        )
        assigner = partial(_rebalancing, every_s)
        return replace(scenario, assigner=assigner, limits=limits)
    return scenario


def _rebalancing(every_s: float, copies: int) -> SwarmRebalancing:
    return SwarmRebalancing(every_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("assignment", choices=ASSIGNMENTS)
    parser.add_argument("--rebalance-every", type=float, default=REBALANCE_EVERY_S)
    for option in fields(SimulateOptions):
        if option.name in TAKEN:
            name, kind = option.name.removesuffix("_s"), type(option.default)
            parser.add_argument(f"--{name}", dest=option.name, type=kind, default=option.default)
    values = vars(parser.parse_args())
    name, every_s = values.pop("assignment"), values.pop("rebalance_every")
    run_scenario(with_assignment(scenario_of(SimulateOptions(**values)), name, every_s))


if __name__ == "__main__":
    main()
