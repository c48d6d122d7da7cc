"""What must hold in every world, and at the end of it."""

from __future__ import annotations

from typing import Any

from swarmnet.protocol.update import events as on
from swarmnet.protocol.update.shard_state import DECIDED
from tests.protocol.update.explorer.interned import GONE, MASK, Interned, Rest
from tests.protocol.update.explorer.small_world import UNTOUCHED, Broken, Local, is_false


def has_result(net: Interned, local: int) -> bool:
    return local != GONE and net.locals.all[local].result is not None


def reaches(net: Interned, numbers: list[int], i: int) -> frozenset[str]:
    """Live replicas that are not parted from this one: each takes the next one for living."""
    found, queue = {i}, [i]
    while queue:
        a = queue.pop()
        for b in range(net.size):
            if b in found or numbers[b] == GONE:
                continue
            if takes_for_living(net, numbers, a, b) and takes_for_living(net, numbers, b, a):
                found.add(b)
                queue.append(b)
    return frozenset(net.peers[k] for k in found)


def hears_all(net: Interned, numbers: list[int], i: int, others: frozenset[str]) -> bool:
    """Nobody that this one is not parted from is dead to it: who wrongly took all others for dead,
    and hears of one again, cannot ask the rest."""
    cut = set(net.scenario.cut)
    return all(
        takes_for_living(net, numbers, i, k)
        for k, peer in enumerate(net.peers)
        if k != i and peer in others and {net.peers[i], peer} != cut
    )


def takes_for_living(net: Interned, numbers: list[int], a: int, b: int) -> bool:
    if {net.peers[a], net.peers[b]} == set(net.scenario.cut):
        return False
    has_group = net.is_settled[numbers[a]] and bool(net.locals.all[numbers[a]].group)
    return has_group or net.is_waited_for(net.seen[numbers[a]][b])


def take_result(net: Interned, numbers: list[int], i: int, rest: Rest) -> tuple[int, Rest]:
    """Peer `i` has come to a result. Returns what the peer and the rest become."""
    actor = net.actor(numbers[i])
    if is_false(actor.result, net.scenario.liar):
        raise Broken(f"{actor.me} has {actor.result}, which the liar has made")
    actor.group = reaches(net, numbers, i)
    if net.scenario.suspicions > 1 and not hears_all(net, numbers, i, actor.group):
        actor.group = frozenset({actor.me})
    for k, local in enumerate(numbers):
        if k == i or not has_result(net, local):
            continue
        other = net.locals.all[local]
        if other.result != actor.result and not net.scenario.pulls:
            rest = rest._replace(is_parted=True)
            is_parted = net.scenario.suspicions or net.scenario.cut
            is_one = other.me in actor.group and actor.me in other.group
            if not net.scenario.is_split and (is_one or not is_parted):
                raise Broken(f"{actor.me} has {actor.result}, {other.me} has {other.result}")
    if actor.machine.shard.state is DECIDED:
        check_backups(net, numbers, i)
        rest = rest._replace(is_decided=True)
    return net.freeze(actor), rest


def check_backups(net: Interned, numbers: list[int], i: int) -> None:
    """The result is given out when every backup that lives to the primary has it: by a step, or,
    after a wrong suspicion, from another backup that gave its copy out. One that has refused the
    step, goes by another ballot, or has told the primary so and not yet the opposite, is not waited
    for."""
    own, machine = net.locals.all[numbers[i]], net.machines[numbers[i]]
    assert machine is not None
    if net.scenario.pulls or own.result[1] is None:
        return
    for k, local in enumerate(numbers):
        if k == i or local == GONE or not net.is_waited_for(net.seen[numbers[i]][k]):
            continue
        other, its_machine = net.locals.all[local], net.machines[local]
        assert its_machine is not None
        if its_machine.shard.ballot.primary != machine.shard.ballot.primary:
            continue
        if other.me in machine.shard.served or other.me in dict(machine.shard.claims):
            continue
        if any(isinstance(event, on.Stepped) for event in other.under_way):
            continue  # overthrown while it left its own parameters as they are: it refuses
        has_none = other.applied == UNTOUCHED and other.result is None
        if has_none and not other.is_told_spoiled:
            raise Broken(f"{own.me} gives out what its backup {other.me} has not")


def is_good_end(net: Interned, world: int) -> bool:
    """All that live and take part have a result, or know that they have missed it."""
    for i, shift in enumerate(net.shifts):
        local = world >> shift & MASK
        if local != GONE and not net.is_over[local] and net.peers[i] != net.scenario.mute:
            return False
    return True


def is_parted(net: Interned, world: int) -> bool:
    return net.rests.all[world >> net.at_rest].is_parted


def check_end(net: Interned, world: int) -> None:
    """There is one result, nobody is left waiting, and the moments survive."""
    numbers = [n for n in net.unpack(world) if n != GONE]
    found = [net.locals.all[n] for n in numbers]
    for number in numbers:
        machine = net.machines[number]
        assert machine is not None
        u = machine.shard
        if u.is_over and (u.calls or u.copied_for is not None):
            raise Broken(f"{u.me} never answers {u.calls or u.copied_for}")
    results = {local.result for local in found if local.result is not None}
    if net.scenario.pulls:
        return
    if not is_parted(net, world):
        check_counted(results, found)
    if len(results) > 1 and not is_parted(net, world):
        raise Broken(f"two results: {results}")
    if net.scenario.loses_nothing:
        check_samples(net, results, found)
    if results and not is_parted(net, world):
        check_moments(net, world, found, results.pop())


def check_counted(results: set[Any], found: list[Local]) -> None:
    """No contribution is in the result and in the next exchange too, or in that twice."""
    counted = [p for _, total in results for p in total or ()]
    counted += [p for local in found for p in local.carried]
    if len(counted) > len(set(counted)):
        raise Broken(f"counted twice: {counted}")


def check_samples(net: Interned, results: set[Any], found: list[Local]) -> None:
    """Where no time has passed and nobody has died, every contribution is in the sum, or late and
    in the next one: whatever records or a liar have said, to refuse it was a delay."""
    due = [p for p, n in zip(net.peers, net.scenario.tokens) if n]
    late = [p for local in found for p in local.carried]
    for _, total in results:
        if sorted((*(total or ()), *late)) != due:
            raise Broken(f"the sum has {total}, late are {late}, and {due} have given")


def check_moments(net: Interned, world: int, found: list[Local], result: Any) -> None:
    """With fewer faults than owners there is a state that has seen the result's gradient, and
    each state that has seen another one is known to be spoiled."""
    for local in found:
        is_other = local.applied not in (None, UNTOUCHED, result)
        if is_other and not local.is_told_spoiled:
            raise Broken(f"{local.me} goes on with a state after {local.applied}")
    s, rest = net.scenario, net.rests.all[world >> net.at_rest]
    gone = s.crashes + s.suspicions + s.failures + bool(s.hangs) + bool(s.stops) + bool(s.cut)
    gone += bool(s.owes)  # it may be overthrown while it steps
    gone -= rest.crashes + rest.suspicions + rest.failures + rest.hangs + rest.stops
    # A backup gives out what it copied when its primary dies, and does not mirror it on.
    most = s.replication if rest.is_decided else max(2, s.replication - 1)
    gone += bool(s.primaries)  # of two primaries at once one may spoil its state
    if gone >= most or result[1] is None:
        return  # whoever is taken for dead is not waited for
    if not any(local.applied == result for local in found):
        raise Broken(f"no state has seen {result}: {[local.applied for local in found]}")
