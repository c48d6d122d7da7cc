"""Runs the machine of a shard's update through every order of events in a small world.

A world is a few replicas with one shard, the messages between them and what they have under way.
Every order of deliveries, every loss of a message, crash, false suspicion and early deadline within
the budgets is tried, and each state is visited once. After every event the invariants are checked;
at the end, that from each state a good end can be reached: all that live have one result."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.roster import DEAD, Roster, Standing, first_ballot
from swarmnet.protocol.update.shard_facts import ADOPTED, DECIDED, HAS_RESULT, Facts
from swarmnet.protocol.update.shard_update import ShardUpdate

FACTS = [f.name for f in fields(Facts) if f.name not in ("me", "roster", "members", "commands")]
MAX_COMMANDS = 200


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scenario:
    """A small world before anything has happened."""

    peers: tuple[str, ...] = ("a", "b", "c")
    replication: int = 2
    tokens: tuple[int, ...] = (1, 1, 1)
    primaries: tuple[str, ...] = ()
    """By peer, who is the primary by its records; the first peer where left out."""
    crashes: int = 0
    drops: int = 0
    suspicions: int = 0
    deadlines: int = 0
    mute: str = ""
    """A peer that lives and never closes its round."""
    clips: bool = True
    cut: frozenset[str] = frozenset()
    """Two peers that cannot reach each other, ever."""
    lazy: bool = True
    """Pauses end, and news of what a peer has done spread, only when nothing else can happen: fewer
    orders. Random schedules go without."""


@dataclass
class World:
    """Everything that is, at one moment. Copied on write."""

    scenario: Scenario
    machines: dict[str, ShardUpdate]
    applied: dict[str, Any]
    """By peer that holds the optimizer state: the step that it is after; "" for the one before."""
    truth: dict[str, Standing]
    seen: dict[tuple[str, str], Standing]
    """By viewer and member."""
    messages: tuple[tuple[Any, ...], ...] = ()
    """("call", id, source, target, event) and ("reply", id, source, target, event)."""
    under_way: tuple[tuple[str, Any], ...] = ()
    """(peer, event) that will come of itself."""
    open_calls: dict[str, Any] = field(default_factory=dict)
    """By peer, the push whose answer counts."""
    results: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, frozenset[str]] = field(default_factory=dict)
    """By peer with a result: whom it was not parted from when it came to it."""
    crashed: frozenset[str] = frozenset()
    crashes: int = 0
    drops: int = 0
    suspicions: int = 0
    deadlines: int = 0
    parted: bool = False
    """A result was made by a replica to which all others that had one were dead."""

    def is_cut(self, a: str, b: str) -> bool:
        return {a, b} == self.scenario.cut

    def told(self, viewer: str, member: str) -> Standing:
        """What the viewer can know of a member."""
        standing = self.truth[member]
        return replace(standing, life=DEAD) if self.is_cut(viewer, member) else standing

    def copy(self) -> World:
        other = copy(self)
        other.machines, other.applied = dict(self.machines), dict(self.applied)
        other.truth, other.seen = dict(self.truth), dict(self.seen)
        other.open_calls, other.results = dict(self.open_calls), dict(self.results)
        other.groups = dict(self.groups)
        return other

    def key(self) -> Any:
        machines = tuple(
            (p, *(getattr(m.facts, name) for name in FACTS)) for p, m in self.machines.items()
        )
        return (
            machines,
            tuple(self.applied.items()),
            tuple(self.seen.items()),
            frozenset(Counter(self.messages).items()),
            frozenset(Counter(self.under_way).items()),
            tuple(sorted(self.open_calls.items())),
            tuple(sorted(self.groups.items())),
            self.crashed,
            self.crashes,
            self.drops,
            self.suspicions,
            self.deadlines,
            self.parted,
        )


def start(scenario: Scenario) -> World:
    peers = scenario.peers
    machines, holders = {}, peers[: scenario.replication]
    for i, me in enumerate(peers):
        primary = scenario.primaries[i] if scenario.primaries else peers[0]
        ballot = first_ballot(primary, is_holder=primary in holders)
        order = tuple(sorted(peers, key=lambda p: (p != primary, peers.index(p))))
        roster = Roster(ballot, order, holders, holders, me in holders, clips=scenario.clips)
        machines[me] = ShardUpdate(me, roster)
    truth = {p: Standing() for p in peers}
    world = World(
        scenario,
        machines,
        dict.fromkeys(holders, ""),
        truth,
        {(a, b): truth[b] for a in peers for b in peers if a != b},
        crashes=scenario.crashes,
        drops=scenario.drops,
        suspicions=scenario.suspicions,
        deadlines=scenario.deadlines,
    )
    for me in peers:
        show(world, me)
        n = scenario.tokens[peers.index(me)]
        if me != scenario.mute:
            world.under_way += ((me, on.Begun(n, me if n else None)),)
    return world


def show(world: World, me: str) -> None:
    seen = {b: s for (a, b), s in world.seen.items() if a == me}
    handle(world, me, on.Seen(seen))


# ---- what may happen next -----------------------------------------------------------------------


def moves(world: World) -> Iterator[tuple[str, Any]]:
    """Each is (name, argument) for `move`; the names with a budget begin with "!"."""
    found = list(busy_moves(world))
    yield from found
    if not found or not world.scenario.lazy:
        yield from late_moves(world)
    yield from faults(world)


def busy_moves(world: World) -> Iterator[tuple[str, Any]]:
    for i in range(len(world.messages)):
        yield "deliver", i
        if world.messages[i][2] in world.crashed and world.messages[i][0] == "reply":
            yield "lose", i
    for i, (_, event) in enumerate(world.under_way):
        if not isinstance(event, on.DeadlinePassed | on.Again):
            yield "happen", i
    for (a, b), standing in world.seen.items():
        if a not in world.crashed and standing.life != world.told(a, b).life:
            yield "news", (a, b)


def late_moves(world: World) -> Iterator[tuple[str, Any]]:
    for i, (_, event) in enumerate(world.under_way):
        if isinstance(event, on.Again):
            yield "happen", i
    for (a, b), standing in world.seen.items():
        told = world.told(a, b)
        if a not in world.crashed and standing != told and standing.life == told.life:
            yield "news", (a, b)


def faults(world: World) -> Iterator[tuple[str, Any]]:
    if world.deadlines:
        for i, (_, event) in enumerate(world.under_way):
            if isinstance(event, on.DeadlinePassed):
                yield "!deadline", i
    if world.drops:
        for i in range(len(world.messages)):
            yield "!drop", i
    if world.crashes:
        for p in world.machines:
            if p not in world.crashed:
                yield "!crash", p
    if world.suspicions:
        for (a, b), standing in world.seen.items():
            if standing.life != DEAD and not {a, b} & world.crashed:
                yield "!suspect", (a, b)


def move(before: World, name: str, argument: Any) -> World:
    world = before.copy()
    if name in ("deliver", "lose", "!drop"):
        message = world.messages[argument]
        world.messages = world.messages[:argument] + world.messages[argument + 1 :]
        if name == "deliver":
            deliver(world, message)
        else:
            world.drops -= name == "!drop"
            fail(world, message)
    elif name in ("happen", "!deadline"):
        peer, event = world.under_way[argument]
        world.under_way = world.under_way[:argument] + world.under_way[argument + 1 :]
        world.deadlines -= name == "!deadline"
        happen(world, peer, event)
    elif name == "news":
        a, b = argument
        world.seen[(a, b)] = world.told(a, b)
        show(world, a)
    elif name == "!crash":
        crash(world, argument)
    elif name == "!suspect":
        world.suspicions -= 1
        a, b = argument
        world.seen[(a, b)] = replace(world.seen[(a, b)], life=DEAD)
        show(world, a)
    return world


def deliver(world: World, message: tuple[Any, ...]) -> None:
    kind, call, source, target, event = message
    if {source, target} == world.scenario.cut and not isinstance(
        event, on.PushFailed | on.MirrorFailed
    ):
        fail(world, message)
        return
    if source not in world.crashed and not world.is_cut(source, target):
        if target not in world.crashed and world.seen[(target, source)].life == DEAD:
            world.seen[(target, source)] = world.truth[source]  # who is heard lives
            show(world, target)
    if kind == "reply":
        if (
            not isinstance(event, on.ResultCame | on.PushFailed)
            or call[1] != "push"
            or world.open_calls.get(target) == call
        ):
            handle(world, target, event)
        return
    if target in world.crashed:
        fail(world, message)
        return
    if isinstance(event, on.MirrorCame):
        event = replace(event, fits=world.applied.get(target) == "")
    handle(world, target, event)


def fail(world: World, message: tuple[Any, ...]) -> None:
    """A call that is lost, or whose answer is, ends with an error at its caller."""
    _, call, source, target, _ = message
    caller = call[0]
    other = target if caller == source else source
    if caller in world.crashed:
        return
    if call[1] == "push":
        world.messages += (("reply", call, other, caller, on.PushFailed(other)),)
    elif call[1] == "mirror":
        world.messages += (("reply", call, other, caller, on.MirrorFailed(other)),)


def happen(world: World, peer: str, event: Any) -> None:
    if isinstance(event, on.Begun):
        declared = replace(world.truth[peer], declared=event.num_tokens)
        world.truth[peer] = declared
    if isinstance(event, on.Stepped):
        result = event.result
        if result[1]:  # a step, and not the parameters left as they are
            is_second = world.applied.get(peer, "") != ""
            if is_second and not world.machines[peer].facts.is_spoiled:
                raise Broken("two steps in one exchange on one state")
            world.applied[peer] = result
    handle(world, peer, event)


def crash(world: World, peer: str) -> None:
    world.crashes -= 1
    world.crashed |= {peer}
    world.truth[peer] = replace(world.truth[peer], life=DEAD)
    world.under_way = tuple(item for item in world.under_way if item[0] != peer)
    waiting = [*world.machines[peer].facts.calls]
    if world.machines[peer].facts.copied_for is not None:
        waiting.append(world.machines[peer].facts.copied_for)
    for call in waiting:
        fail(world, ("call", call, call[0], peer, None))
    for (a, b), _standing in list(world.seen.items()):
        if a == peer:
            world.seen[(a, b)] = Standing()
    world.applied.pop(peer, None)
    world.results.pop(peer, None)
    world.groups.pop(peer, None)
    world.machines[peer] = ShardUpdate(peer, world.machines[peer].facts.roster)


# ---- a machine's commands -----------------------------------------------------------------------


def handle(world: World, me: str, event: Any) -> None:
    if me in world.crashed:
        return
    machine = world.machines[me] = world.machines[me].copy()
    found = machine.handle(event)
    assert len(found) < MAX_COMMANDS
    for command in found:
        carry_out(world, me, command)


def answer(world: World, me: str, call: Any, event: Any) -> None:
    world.messages += (("reply", call, me, call[0], event),)


def carry_out(world: World, me: str, command: Any) -> None:
    machine = world.machines[me]
    match command:
        case do.Push(target, ballot, has_gradient):
            call = (me, "push", target, ballot, has_gradient)
            world.open_calls[me] = call
            n = world.scenario.tokens[world.scenario.peers.index(me)] if has_gradient else 0
            event = on.Pushed(call, me, ballot, n, me if n else None)
            world.messages += (("call", call, me, target, event),)
        case do.GiveUpPush():
            world.open_calls.pop(me, None)
        case do.Ask(members, ballot, is_final):
            for p in members:
                call = (me, "ask", p, ballot, is_final)
                event = on.Asked(call, me, ballot, is_final)
                if ("call", call, me, p, event) not in world.messages:
                    world.messages += (("call", call, me, p, event),)
        case do.Give(call, result):
            answer(world, me, call, on.ResultCame(me, result))
        case do.Agree(call, ballot):
            answer(world, me, call, on.Agreed(me, ballot))
        case do.Deny(call, ballot):
            answer(world, me, call, on.Denied(me, ballot))
        case do.Confirm(call):
            answer(world, me, call, on.Confirmed(me))
        case do.Refuse(call):
            answer(world, me, call, on.Refused(me))
        case do.Sum(parts, _, _, attempt):
            total = tuple(p for p, _, _ in parts) or None
            handle(world, me, on.Summed(total, attempt))
        case do.FindNorm(attempt):
            later(world, me, on.ClipKnown(attempt))
        case do.Step(total, ballot, attempt):
            later(world, me, on.Stepped((ballot, total), attempt))
        case do.Mirror(total, backups, ballot, attempt):
            for p in backups:
                call = (me, "mirror", p, ballot, attempt)
                event = on.MirrorCame(call, me, ballot, (ballot, total), False)
                world.messages += (("call", call, me, p, event),)
        case do.Repeat(step, attempt):
            later(world, me, on.Stepped(step, attempt))
        case do.Adopt(result, _):
            world.results[me] = result
            world.truth[me] = replace(world.truth[me], is_past=True)
            check_result(world, me, machine)
        case do.SetDeadline():
            if world.deadlines and (me, on.DeadlinePassed()) not in world.under_way:
                later(world, me, on.DeadlinePassed())
        case do.Pause():
            later(world, me, on.Again())


def later(world: World, me: str, event: Any) -> None:
    world.under_way += ((me, event),)


# ---- invariants ---------------------------------------------------------------------------------


def reaches(world: World, me: str) -> set[str]:
    """Live replicas that are not parted from this one: each takes the next one for living."""
    found, queue = {me}, [me]
    while queue:
        a = queue.pop()
        for b in world.machines:
            alive = b not in world.crashed and b not in found
            if alive and DEAD not in (world.seen[(a, b)].life, world.seen[(b, a)].life):
                found.add(b)
                queue.append(b)
    return found


def check_result(world: World, me: str, machine: ShardUpdate) -> None:
    result = world.results[me]
    group = world.groups[me] = frozenset(reaches(world, me))
    for other, theirs in world.results.items():
        if theirs != result and other in group and me in world.groups[other]:
            raise Broken(f"{me} has {result}, {other} has {theirs}")
        if theirs != result:
            world.parted = True
    if machine.facts.state is DECIDED and result[1]:
        sent = set(machine.facts.senders)
        if not set(result[1]) <= sent:
            raise Broken("a contribution in the step that is not told to count")


def check(world: World) -> None:
    """The moments survive: who is left has a state with the step of the result, if anybody left
    with the result has come to it by a step."""
    scenario = world.scenario
    gone = len(world.crashed) + scenario.suspicions - world.suspicions + bool(scenario.cut)
    if gone >= scenario.replication or not is_good_end(world):
        return  # whoever is taken for dead is not waited for
    result = next(iter(world.results.values()))
    if result[1] is None:
        return
    kept = [s for s in world.applied.values() if s != ""]
    if not kept:
        raise Broken("the step of the result died with its owners")
    if not world.parted and result not in kept:
        raise Broken(f"of {result} there is no optimizer state, but of {kept}")


def is_good_end(world: World) -> bool:
    """All that live and take part have one result."""
    living = [p for p in world.machines if p not in world.crashed and p != world.scenario.mute]
    states = [world.machines[p].facts.state for p in living]
    if not all(s in (DECIDED, ADOPTED) for s in states):
        return False
    return len({world.results[p] for p in living}) == 1 or world.parted


# ---- exploring ----------------------------------------------------------------------------------


@dataclass
class Explored:
    """What was found."""

    num_states: int
    num_ends: int
    num_parted: int
    is_complete: bool


def explore(scenario: Scenario, limit: int) -> Explored:
    """All states, breadth first; raises `Broken` with the way to the first bad one."""
    first = start(scenario)
    numbers: dict[Any, int] = {first.key(): 0}
    came_from: list[tuple[int, str]] = [(-1, "")]
    before: list[list[int]] = [[]]
    good: list[int] = []
    queue: deque[tuple[int, World]] = deque([(0, first)])
    parted = 0
    is_complete = True
    while queue:
        number, world = queue.popleft()
        try:
            check(world)
        except Broken as e:
            raise Broken(f"{e}\n{path(came_from, number)}") from None
        if is_good_end(world):
            good.append(number)
            parted += world.parted
            continue
        for name, argument in moves(world):
            try:
                after = move(world, name, argument)
            except Broken as e:
                last = label(world, name, argument)
                raise Broken(f"{e}\n{path(came_from, number)}\n{last}") from None
            key = after.key()
            known = numbers.get(key)
            if known is None:
                if len(numbers) >= limit:
                    is_complete = False
                    continue
                known = numbers[key] = len(numbers)
                came_from.append((number, label(world, name, argument)))
                before.append([])
                queue.append((known, after))
            if not name.startswith("!"):
                before[known].append(number)
    if is_complete:
        stuck = unreachable(before, good)
        if stuck is not None:
            raise Broken(f"no way to the next round\n{path(came_from, stuck)}")
    return Explored(len(numbers), len(good), parted, is_complete)


def unreachable(before: list[list[int]], good: list[int]) -> int | None:
    """A state from which no good end can be reached without a further fault."""
    can = bytearray(len(before))
    queue = deque(good)
    for n in good:
        can[n] = 1
    while queue:
        for n in before[queue.popleft()]:
            if not can[n]:
                can[n] = 1
                queue.append(n)
    return next((n for n in range(len(before)) if not can[n]), None)


def label(world: World, name: str, argument: Any) -> str:
    if name in ("deliver", "lose", "!drop"):
        return f"{name} {world.messages[argument]}"
    if name in ("happen", "!deadline"):
        return f"{name} {world.under_way[argument]}"
    return f"{name} {argument}"


def path(came_from: list[tuple[int, str]], number: int) -> str:
    lines: list[str] = []
    while number > 0:
        number, line = came_from[number]
        lines.append(line)
    return "\n".join(reversed(lines))


def wander(scenario: Scenario, rng: random.Random, max_moves: int = 2000) -> int:
    """One random schedule to a good end; the number of its moves."""
    world = start(scenario)
    for n in range(max_moves):
        check(world)
        if is_good_end(world):
            return n
        found = list(moves(world))
        calm = [m for m in found if not m[0].startswith("!")]
        faults = [m for m in found if m[0].startswith("!")]
        if not calm and not faults:
            raise Broken("nothing can happen any more")
        chosen = (
            rng.choice(faults) if faults and (rng.random() < 0.05 or not calm) else rng.choice(calm)
        )
        world = move(world, *chosen)
    raise Broken(f"no end after {max_moves} moves")


assert {DECIDED, ADOPTED} == HAS_RESULT
