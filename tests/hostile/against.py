"""An honest swarm in virtual time that meets attackers, drawn by seeds, one after the other.

python -m tests.hostile.against 17        # one alone, for longer
python -m tests.hostile.against 15 16 17  # one after the other, as a test has them
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnet.simulation.stage import (
    SyntheticOptimizer,
    SyntheticStage,
    check_sum,
    numbers_of,
    packed,
)
from swarmnet.wire import Array
from tests.hostile.attacker import Attacker, NamedSigner
from tests.hostile.drawing import Truth
from tests.hostile.drawn import Drawn, Plan, draw
from tests.swarm.harness import SIZES, Swarm, in_virtual_time, tiny_spec

NUM_STAGES, NUM_REPLICAS = 2, 2
SPEED = 0.4
"""Of the devices: so that a virtual second costs less."""
GLOBAL_BATCH, MICROBATCH = 16, 4
BEFORE_S, DURING_S, AFTER_S, SETTLES_S = 6.0, 6.0, 1.5, 1.5
"""Virtual seconds in which rounds are counted, and between an attack and the count after it."""
ALONE = 5.0
"""So many times longer is one that is tried alone."""
DURING_PART, AFTER_PART = 0.5, 0.8
"""Of the rounds before, in windows so short that one member which is waited for once shows."""


@dataclass
class Watch:
    """What honest peers did that they should not have done."""

    findings: list[str] = field(default_factory=list)
    made: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)
    """By stage and shard: parameters that an honest peer has made of honest gradients."""
    states: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)
    """Optimizer states, likewise."""

    def find(self, text: str) -> None:
        if text not in self.findings:
            self.findings.append(text)

    def begins(self, stage: int, shard: int, parameters: bytes) -> None:
        self.made.setdefault((stage, shard), set()).add(parameters)
        self.states.setdefault((stage, shard), set()).add(packed((0.0,) * 4))

    def look(self, swarm: Swarm) -> None:
        """The parameters that honest replicas have now are honest ones."""
        for name, member in swarm.members.items():
            replica = member.peer.replica
            if replica is None:
                self.find(f"{name} serves no stage")
                continue
            for j in range(replica.num_shards):
                has = bytes(replica.stage.parameter_shard(j).data)
                if has not in self.made[replica.index, j]:
                    self.find(f"{name} has parameters of shard {j} that no honest peer has made")


class WatchedOptimizer(SyntheticOptimizer):
    """One that notes what it makes, and what it is given."""

    def __init__(self, stage: int, watch: Watch) -> None:
        super().__init__(stage, SIZES, ignore)
        self._stage, self._watch = stage, watch

    def step(
        self,
        shard_index: int,
        parameters: Array,
        gradient_sum: Array,
        scale: float,
        round_index: int,
        is_delayed: bool = False,
        for_others: bool = True,
        is_finite: bool = False,
    ) -> tuple[Array, Array]:
        gradient, key = gradient_sum.data, (self._stage, shard_index)
        if not check_sum(self._stage, shard_index, gradient):
            self._watch.find(f"a step of stage {self._stage} with a gradient that is none")
        doubled = [k for k, times in gradient.ids.items() if times != 1]
        if doubled or any(k[0] != round_index for k in gradient.ids):
            self._watch.find(f"a step of stage {self._stage} with other microbatches: {doubled}")
        about = shard_index, parameters, gradient_sum, scale, round_index
        result = super().step(*about, is_delayed, for_others, is_finite)
        self._watch.made[key].add(bytes(result[1].data))
        self._watch.states[key].add(bytes(self.export(shard_index)[1][0].data))
        return result

    def load(self, shard_index: int, values: dict[str, Any], arrays: tuple[Array, ...]) -> None:
        super().load(shard_index, values, arrays)
        if packed(numbers_of(arrays[0])) not in self._watch.states[self._stage, shard_index]:
            self._watch.find(f"optimizer state of stage {self._stage} that no honest peer has made")


def ignore(event: str, **facts: Any) -> None:
    pass


def build(watch: Watch, stage_index: int) -> tuple[Any, Any]:
    """As `Swarm.build`, watched."""
    stage = SyntheticStage(stage_index, NUM_STAGES, SIZES, ignore)
    for j in range(SIZES.num_shards):
        watch.begins(stage_index, j, bytes(stage.parameter_shard(j).data))
    return stage, WatchedOptimizer(stage_index, watch)


class Uncaught(logging.Handler):
    """Hears of errors that nobody expected."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.WARNING)
        self.num_lines = 0
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        self.num_lines += 1
        if record.levelno >= logging.ERROR:
            error = record.exc_info[1] if record.exc_info else None
            where = error.__traceback__ if error is not None else None
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else ""
            self._watch.find(f"in the log: {record.getMessage()} ({error!r} {place})")


@contextmanager
def heard(watch: Watch) -> Iterator[Uncaught]:
    """The log of all honest peers, while it lasts."""
    handler, logger = Uncaught(watch), logging.getLogger("swarmnet")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


@dataclass
class Outcome:
    """Of one attacker."""

    plan: Plan
    before: float
    during: float
    after: float
    """Rounds a second of the slowest honest peer."""
    findings: list[str]

    @property
    def is_well(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        rates = f"{self.before:.2f}, {self.during:.2f}, {self.after:.2f} rounds/s"
        return f"{self.plan}\n  {rates}" + "".join(f"\n  {text}" for text in self.findings)


async def _rounds(swarm: Swarm, seconds: float, watch: Watch) -> float:
    first = swarm.rounds()
    await asyncio.sleep(seconds)
    for name, member in swarm.members.items():
        if member.life.done():
            watch.find(f"{name} has ended: {member.life.exception()!r}")
    last = swarm.rounds()
    return min(b - a for a, b in zip(first, last)) / seconds


def _truth(swarm: Swarm) -> Truth:
    peers = {name: member.peer for name, member in swarm.members.items()}
    some = next(iter(peers.values()))
    return Truth(
        swarm.spec.run_id,
        "",
        tuple(sorted(peers)),
        NUM_STAGES,
        SIZES.num_shards,
        -(-GLOBAL_BATCH // MICROBATCH),
        MICROBATCH,
        max(swarm.rounds()),
        0,
        some.gossip.own.history,
        {name: peer.gossip.own.incarnation for name, peer in peers.items()},
        SIZES,
    )


def meet(
    seeds: Sequence[int],
    *,
    times: float = 1.0,
    ends: bool = True,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """What comes of the attackers of these seeds, in their order; of the first that does harm the
    last, where `ends`. `tell` hears of each at once."""
    found: list[Outcome] = []

    async def scenario(swarm: Swarm) -> None:
        watch = Watch()
        for i in range(NUM_STAGES * NUM_REPLICAS):
            make = functools.partial(build, watch)
            swarm.start(f"peer-{i}", stage=i % NUM_STAGES, speed=SPEED, build=make)
        await swarm.until_round(3)
        with heard(watch) as log:
            before = await _rounds(swarm, BEFORE_S, watch)
            for seed in seeds:
                found.append(await _meet(swarm, seed, times, before, watch, log))
                tell(found[-1])
                if ends and not found[-1].is_well:
                    return

    with tempfile.TemporaryDirectory() as folder:
        spec = tiny_spec(
            Path(folder), num_stages=NUM_STAGES, rounds=100_000, global_batch=GLOBAL_BATCH
        )
        in_virtual_time(scenario, spec, is_synthetic=True, seed=seeds[0], signer=NamedSigner)
    return found


async def _meet(
    swarm: Swarm, seed: int, times: float, before: float, watch: Watch, log: Uncaught
) -> Outcome:
    plan = draw(seed, NUM_STAGES)
    victims = sorted(swarm.members)
    attacker = Attacker(swarm.hub, swarm.spec.run_id, victims, random.Random(seed))
    drawn = Drawn(plan, attacker, _truth(swarm))
    work = asyncio.get_running_loop().create_task(drawn.run())
    during = await _rounds(swarm, times * DURING_S, watch)
    if work.done() and (error := work.exception()) is not None:
        raise error
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    attacker.leave()
    await asyncio.sleep(SETTLES_S)
    after = await _rounds(swarm, times * AFTER_S, watch)
    for name, rate, part, seconds in (
        ("during", during, DURING_PART, times * DURING_S),
        ("after", after, AFTER_PART, times * AFTER_S),
    ):
        if rate * seconds < part * before * seconds - 1:
            watch.find(f"{rate:.2f} rounds/s {name} it, {before:.2f} before")
    watch.look(swarm)
    outcome = Outcome(plan, before, during, after, watch.findings[:])
    watch.findings.clear()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--times", type=float, help="how much longer each is looked at")
    parser.add_argument("--on", action="store_true", help="go on after one that does harm")
    chosen = parser.parse_args()
    times = chosen.times or (ALONE if len(chosen.seeds) == 1 else 1.0)
    meet(chosen.seeds, times=times, ends=not chosen.on, tell=print)


if __name__ == "__main__":
    main()
