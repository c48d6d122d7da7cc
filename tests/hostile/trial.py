"""An honest swarm of eight before, during and after an attack, in virtual time."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.errors import ProtocolViolation
from swarmnet.spec import RunSpec
from tests.hostile.attacker import Attacker, NamedSigner
from tests.hostile.attacks import Attack
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

NUM_STAGES, NUM_REPLICAS = 2, 4
BEFORE_S, DURING_S, AFTER_S = 8.0, 15.0, 10.0
"""Virtual seconds in which rounds are counted."""
SETTLES_S = 3.0
"""After a swarm has begun, and after the attacker has gone."""
OPEN_PART, CLOSED_PART = 0.8, 0.95
"""Of the pace before, that a swarm keeps during an attack by one machine: in an open run; in a
closed one, by strangers."""


@dataclass(frozen=True)
class Pace:
    """Rounds a second of the slowest honest peer."""

    before: float
    during: float
    after: float

    def __str__(self) -> str:
        rates = (self.before, self.during, self.after)
        return "{:.2f} rounds/s before, {:.2f} during, {:.2f} after".format(*rates)

    def held(self, part: float = OPEN_PART) -> bool:
        """Whether the swarm has kept its pace."""
        return min(self.during, self.after) >= part * self.before


@dataclass(frozen=True)
class Invited:
    """Admits who shows an invite. It is good for one peer id, and the attacker has none."""

    is_open: bool = field(default=False, init=False)

    def check(self, peer_id: str, credential: bytes) -> None:
        if credential != invite(peer_id):
            raise ProtocolViolation("no invite")


def invite(peer_id: str) -> bytes:
    """What an honest peer shows in a closed run."""
    return f"for {peer_id}".encode()


def honest_spec(folder: Path, sync: dict[str, object] | None = None, **pipeline: object) -> RunSpec:
    """Of a swarm that has enough to do."""
    return tiny_spec(
        folder,
        num_stages=NUM_STAGES,
        rounds=100_000,
        sync=sync,
        global_batch=32,
        num_layers=2,
        **pipeline,
    )


def trial(
    attack: Attack,
    *,
    seed: int = 0,
    num_replicas: int = NUM_REPLICAS,
    is_closed: bool = False,
    before_s: float = BEFORE_S,
    during_s: float = DURING_S,
    after_s: float = AFTER_S,
    sync: dict[str, object] | None = None,
    look: Callable[[Swarm, Attacker], None] = lambda swarm, attacker: None,
) -> Pace:
    """Lets a swarm of two stages work, attacks it, and lets it work again. `sync`: of the
    spec. `look(swarm, attacker)`: what else has to hold at the end."""
    found: list[Pace] = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(NUM_STAGES, num_replicas)
        await swarm.until_round(3)
        await asyncio.sleep(SETTLES_S)
        before = await _rounds_per_s(swarm, before_s)
        victims = sorted(swarm.members)
        attacker = Attacker(swarm.hub, swarm.spec.run_id, victims, random.Random(seed))
        work = asyncio.get_running_loop().create_task(_run(attack, attacker, swarm))
        during = await _rounds_per_s(swarm, during_s)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        attacker.leave()
        await asyncio.sleep(SETTLES_S)
        after = await _rounds_per_s(swarm, after_s)
        found.append(Pace(before, during, after))
        look(swarm, attacker)

    with tempfile.TemporaryDirectory() as folder:
        spec, closed = (
            honest_spec(Path(folder), sync),
            {"admission": Invited(), "credential": invite},
        )
        in_virtual_time(
            scenario,
            spec,
            is_synthetic=True,
            seed=seed,
            signer=NamedSigner,
            **(closed if is_closed else {}),
        )
    return found[0]


async def _run(attack: Attack, attacker: Attacker, swarm: Swarm) -> None:
    await attack(attacker, swarm)


async def _rounds_per_s(swarm: Swarm, seconds: float) -> float:
    first = swarm.rounds()
    await asyncio.sleep(seconds)
    for member in swarm.members.values():
        if member.life.done():
            member.life.result()
    return min(b - a for a, b in zip(first, swarm.rounds())) / seconds
