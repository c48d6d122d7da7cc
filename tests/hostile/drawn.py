"""An attacker that a seed draws: under how many names, what their records say, which calls they
make and with which lies, how they answer, when, and for how long.

Calls come from the table of methods and lies from the fields of bodies and of `Record`, so that
what is added there is attacked too. To see what a seed does, and to try it alone:

    python -m tests.hostile.against 17
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from swarmnet.errors import Busy, NotReady, RemoteError, Stale, SwarmnetError, Taken
from swarmnet.methods.method import Method
from swarmnet.methods.records import SignedRecord
from swarmnet.methods.table import METHODS
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, OBSERVING, Record
from swarmnet.transport.base import Request
from swarmnet.wire import Message, Packed, pack
from tests.hostile.attacker import Attacker, Name
from tests.hostile.drawing import Truth, arrays, body

MOST_CALLS = 400
"""Of one attacker under way at a time: volume alone is not what is tried here."""
ANSWERS = ("silent", "silent", "refuses", "lies", "lies", "progress")
OF_ITSELF = ("peer_id", "run_id", "incarnation", "version")
"""Fields without which its records are nobody's."""
CALL_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Calls:
    """What it asks for."""

    method: str
    lie: str
    """The field about which it lies; empty: about none."""
    every_s: float
    at_once: int


@dataclass(frozen=True)
class Plan:
    """What an attacker does; a function of its seed."""

    seed: int
    num_names: int
    state: str
    """Of its records; empty: it shows none."""
    stage: int
    """Of the first name; the others serve the stages in turn."""
    record_says: tuple[str, ...]
    """Fields of `Record` that it fills as an honest peer might, beside those that all have."""
    record_lies: tuple[str, ...]
    """Fields about which it lies."""
    record_every_s: float
    """0: it says it once."""
    calls: tuple[Calls, ...]
    answers: tuple[tuple[str, str], ...]
    """How it answers, by method; else it serves nothing."""
    stays_s: float
    """After so long it is gone, or comes back under other names."""

    def __str__(self) -> str:
        calls = ", ".join(
            f"{c.method}({c.lie or 'right'}) x{c.at_once} each {c.every_s} s" for c in self.calls
        )
        answers = ", ".join(f"{method}: {how}" for method, how in self.answers)
        state = self.state or "no record"
        says = f"{len(self.record_says)} more fields, lies about {'+'.join(self.record_lies)}"
        return (
            f"attacker {self.seed}: {self.num_names} names, {state}, stage {self.stage}, "
            f"records each {self.record_every_s} s ({says}), calls {calls or 'nobody'}, "
            f"answers {answers or 'nothing'}, stays {self.stays_s} s"
        )


def draw(seed: int, num_stages: int) -> Plan:
    """The attacker of a seed. One in three only says something, one in three only calls."""
    rng = random.Random(f"attacker|{seed}")
    kind = rng.choice(("says", "calls", "both"))
    names = [f.name for f in fields(Record) if f.name not in OF_ITSELF]
    fills = tuple(sorted(rng.sample(names, rng.choice((0, 3, 10, len(names))))))
    says = () if kind == "calls" else tuple(rng.sample(names, rng.choice((1, 1, 2, 4))))
    methods = list(METHODS.values())
    first = methods[seed % len(methods)]  # none is left to chance
    called = [first, *rng.sample(methods, rng.choice((0, 0, 1, 3)))] if kind != "says" else []
    answered = rng.sample(methods, rng.choice((0, 2, len(methods))))
    return Plan(
        seed,
        rng.choice((1, 1, 1, 2, 4, 20)),
        rng.choice((ACTIVE, ACTIVE, ACTIVE, JOINING, LEAVING, OBSERVING, "")),
        rng.randrange(num_stages),
        fills,
        says,
        rng.choice((0.0, 0.1, 0.5)),
        tuple(_calls(method, rng) for method in called),
        tuple((method.name, rng.choice(ANSWERS)) for method in answered),
        rng.choice((1.0, 30.0, 30.0)),
    )


def _calls(method: Method[Any, Any], rng: random.Random) -> Calls:
    known = [f.name for f in fields(method.request)] if method.request is not type(None) else []
    return Calls(
        method.name,
        rng.choice(["", *known]),
        rng.choice((0.02, 0.1, 1.0)),
        rng.choice((1, 1, 8)),
    )


class Drawn:
    """Carries a plan out, against the swarm that `truth` tells of."""

    def __init__(self, plan: Plan, attacker: Attacker, truth: Truth) -> None:
        """`truth`: as of now; its round is followed by the records of the victims."""
        self.plan = plan
        self.rng = random.Random(f"at work|{plan.seed}")
        self._attacker = attacker
        self._truth = truth
        self._stages: dict[str, int] = {}
        self._round = truth.round
        self._num_open = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        generation = 0
        while True:
            names = [self._name(generation, i) for i in range(self.plan.num_names)]
            try:
                async with asyncio.timeout(self.plan.stays_s):
                    await self._work(names)
            except TimeoutError:
                pass
            for name in names:
                self._attacker.hub.kill(name.peer_id)
            generation += 1

    def _name(self, generation: int, i: int) -> Name:
        name = self._attacker.name(f"{'a' * (i % 2)}liar-{self.plan.seed}-{generation}-{i}")
        for method, how in self.plan.answers:
            self._serve(name, METHODS[method], how)
        return name

    async def _work(self, names: Sequence[Name]) -> None:
        async with asyncio.TaskGroup() as work:
            work.create_task(self._follow(names[0]))
            work.create_task(self._say(names))
            for calls in self.plan.calls:
                work.create_task(self._call(names, calls))

    # ---- what it knows --------------------------------------------------------------------------

    async def _follow(self, name: Name) -> None:
        """Hears what round it is, as anybody can."""
        while True:
            heard = await name.hear(self.rng.choice(self._attacker.victims))
            honest = [r for p, r in heard.items() if p in self._attacker.victims]
            self._stages |= {r.peer_id: r.stage for r in honest}
            if honest:
                self._round = max(r.round for r in honest)
            await asyncio.sleep(0.2)

    def _told(self, own: str, stage: int) -> Truth:
        return replace(self._truth, own=own, stage=stage, round=self._round)

    # ---- what it says ---------------------------------------------------------------------------

    async def _say(self, names: Sequence[Name]) -> None:
        while self.plan.state:
            for i, name in enumerate(names):
                name.tell(self._attacker.victims, self._record(name, i))
            if not self.plan.record_every_s:
                return
            await asyncio.sleep(self.plan.record_every_s)

    def _record(self, name: Name, i: int) -> SignedRecord:
        """As an honest peer's, but for the fields about which it lies."""
        plan, rng = self.plan, self.rng
        stage = (plan.stage + i) % self._truth.num_stages
        truth = self._told(name.peer_id, stage)
        name.version += 1
        of_itself: dict[str, Any] = dict(
            zip(OF_ITSELF, (name.peer_id, name.run_id, name.incarnation, name.version))
        )
        says: dict[str, Any] = of_itself | {
            "state": plan.state,
            "stage": stage if plan.state != OBSERVING else -1,
            "round": truth.round,
            "history": truth.history,
            "addresses": ["/memory"],
        }
        lies = len(plan.record_lies) and 1
        only = rng.choice(plan.record_lies) if lies else ""
        return name.signed(
            pack(body(Record, truth, rng, lies, only, plan.record_says, **says) or of_itself)
        )

    # ---- what it asks ---------------------------------------------------------------------------

    async def _call(self, names: Sequence[Name], calls: Calls) -> None:
        method, rng = METHODS[calls.method], self.rng
        async with asyncio.TaskGroup() as work:
            while True:
                for _ in range(calls.at_once):
                    if self._num_open < MOST_CALLS:
                        name, target = rng.choice(names), rng.choice(self._attacker.victims)
                        work.create_task(self._ask(name, target, method, calls.lie))
                await asyncio.sleep(calls.every_s)

    async def _ask(self, name: Name, target: str, method: Method[Any, Any], about: str) -> None:
        truth = self._told(name.peer_id, self._stages.get(target, 0))
        told = body(method.request, truth, self.rng, 1 if about else 0, about)
        sent = Message(Packed(pack(told)), arrays(method, truth, self.rng))
        self._num_open += 1
        try:
            await name.transport.call(target, method.name, sent, timeout_s=CALL_TIMEOUT_S)
        except SwarmnetError:
            pass
        finally:
            self._num_open -= 1

    # ---- what it answers ------------------------------------------------------------------------

    def _serve(self, name: Name, method: Method[Any, Any], how: str) -> None:
        async def handler(request: Request[Any]) -> Message[Any]:
            stage = getattr(request.message.body, "stage", 0)
            truth = self._told(name.peer_id, stage if isinstance(stage, int) else 0)
            if how == "silent":
                await asyncio.get_running_loop().create_future()
            if how == "refuses":
                raise self._error(truth)
            while how == "progress":
                told = body(method.progress, truth, self.rng, self.rng.choice((0, 0, 1)))
                request.progress(Message(Packed(pack(told))))
                await asyncio.sleep(0.3)
            told = body(method.reply, truth, self.rng, self.rng.choice((0, 1)))
            return Message(Packed(pack(told)), arrays(method, truth, self.rng))

        name.transport.handle(method.name, handler)

    def _error(self, truth: Truth) -> RemoteError:
        rng = self.rng
        return rng.choice(
            (
                Busy("full", backlog_s=rng.choice((0.0, 1e15))),
                NotReady("joining"),
                Stale("over", round=truth.round + rng.choice((-1, 0, 1, 10**6))),
                Taken("another one has it"),
                RemoteError("\x1b[31mno"),
            )
        )
