"""The worlds that are explored: the small ones by the tests, the deep ones by `make explore`."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.protocol.update.explorer.small_world import Scenario

SMALL = {
    "calm": Scenario(),
    "a crash": Scenario(crashes=1),
    "a lost message": Scenario(drops=1),
    "a false suspicion": Scenario(suspicions=1),
    "a crash and a lost message": Scenario(crashes=1, drops=1),
    "a lost message and a false suspicion": Scenario(drops=1, suspicions=1),
    "an early deadline": Scenario(deadlines=1),
    "a crash and an early deadline": Scenario(crashes=1, deadlines=1),
    "a mute contributor": Scenario(mute="c"),
    "a mute contributor and a crash": Scenario(mute="c", crashes=1),
    "a mute backup": Scenario(mute="b"),
    "a backup that cannot step": Scenario(failures=1, drops=1),
    "a backup that cannot step, and a crash": Scenario(failures=1, crashes=1),
    "one that is left behind": Scenario(strays=1, suspicions=1),
    "one that crashes and comes back as a newcomer": Scenario(crashes=1, drops=1, returns=True),
    "primary and backup cut": Scenario(cut="ab", crashes=1),
    "primary and contributor cut": Scenario(cut="ac", crashes=1),
    "backup and contributor cut": Scenario(cut="bc", crashes=1),
    "records that differ": Scenario(primaries="aba"),
    "two primaries, neither of which waits for the other": Scenario(
        peers="ab", primaries="ab", tokens=(1, 0), deadlines=1
    ),
    "two primaries, one without tokens": Scenario(primaries="abb", tokens=(0, 1, 1)),
    "each its own primary": Scenario(primaries="abc"),
    "one that knows no holder": Scenario(primaries="aac"),
    "rosters of which each names another": Scenario(
        peers="ab", primaries="ba", tokens=(1, 1), crashes=1
    ),
    "one that others take for a holder": Scenario(primaries="acc", misnamed="c"),
    "one that another takes for a holder": Scenario(primaries="aca", misnamed="c"),
    "one that the primary takes for a holder": Scenario(primaries="cba", misnamed="c"),
    "one contributor with tokens": Scenario(tokens=(0, 0, 1), crashes=1),
    "no tokens": Scenario(tokens=(0, 0, 0), crashes=1, drops=1),
    "no norm to wait for": Scenario(clips=False, crashes=1),
    "sums that take long": Scenario(slow_sums=True, suspicions=1),
    "three owners": Scenario(replication=3, crashes=1),
    "three owners and a lost message": Scenario(replication=3, drops=1),
    "three owners and two crashes": Scenario(replication=3, crashes=2),
    "a primary whose device hangs": Scenario(hangs="a"),
    "the only owner's device hangs": Scenario(
        peers="ab", tokens=(1, 1), replication=1, hangs="a", drops=1
    ),
    "the only owner's device hangs for ever": Scenario(
        peers="ab", tokens=(1, 1), replication=1, hangs="a", hangs_for_ever=True
    ),
    "a primary that owes its result": Scenario(owes="a"),
    "one that owes its result and is passed over": Scenario(owes="a", passed_over_by="abc"),
    "one that owes its result and is passed over, and a crash": Scenario(
        owes="a", passed_over_by="abc", crashes=1
    ),
    "one that owes its result and does not know that it is passed over": Scenario(
        owes="a", passed_over_by="bc"
    ),
    "one that owes its result and is passed over by one": Scenario(owes="a", passed_over_by="c"),
    "one of two that owes its result": Scenario(
        peers="ab", tokens=(1, 1), owes="a", patient="b", crashes=1, drops=1
    ),
    "two that lead, a false suspicion and an early deadline": Scenario(
        peers="ab", tokens=(1, 1), primaries="ab", suspicions=1, deadlines=1
    ),
    "a liar that agrees": Scenario(peers="abcx", tokens=(1, 1, 1, 0), liar="x", lies=1),
    "a liar that denies": Scenario(
        peers="abcx", tokens=(1, 1, 1, 0), liar="x", lies=1, denies=True
    ),
    "a liar that tells results": Scenario(
        peers="abcx", tokens=(1, 1, 1, 0), liar="x", lies=1, tells=True
    ),
    "a liar that tells results, and a crash": Scenario(
        peers="abcx", tokens=(1, 1, 1, 0), liar="x", tells=True, crashes=1
    ),
    "the only owner's process stops": Scenario(
        peers="ab", tokens=(1, 1), replication=1, stops="a", slow_sums=True, deadlines=1
    ),
    "a primary's process stops": Scenario(peers="ab", tokens=(1, 1), stops="a"),
    "a quorum": Scenario(quorum=2),
    "a quorum and a crash": Scenario(quorum=2, crashes=1),
    "a quorum and a lost message": Scenario(quorum=2, drops=1),
    "a quorum and a false suspicion": Scenario(quorum=2, suspicions=1),
    "a quorum and a mute contributor": Scenario(quorum=2, mute="c"),
    "a quorum and a backup that cannot step": Scenario(quorum=2, failures=1),
    "a quorum, where records differ": Scenario(quorum=2, primaries="aba"),
    "a quorum, and each its own primary": Scenario(quorum=2, primaries="abc"),
    "neighbours": Scenario(household="bc"),
    "neighbours and a crash": Scenario(household="bc", crashes=1),
    "neighbours and a lost message": Scenario(household="bc", drops=1),
    "neighbours and a false suspicion": Scenario(household="bc", suspicions=1),
    "neighbours and an early deadline": Scenario(household="bc", deadlines=1),
    "neighbours of the primary": Scenario(household="ac", crashes=1),
    "a neighbour that is unsure": Scenario(household="bc", unsure=True),
    "a neighbour that is unsure, and a crash": Scenario(household="bc", unsure=True, crashes=1),
    "a neighbour of the primary that is unsure": Scenario(household="ac", unsure=True, drops=1),
    "neighbours, one without tokens": Scenario(household="bc", tokens=(1, 1, 0), drops=1),
    "neighbours, the first without tokens": Scenario(household="bc", tokens=(1, 0, 1), crashes=1),
    "neighbours, where records differ": Scenario(household="bc", primaries="aba"),
    "a pair": Scenario(
        peers="ab", tokens=(1, 1), pulls=True, clips=False, crashes=1, drops=1, suspicions=1
    ),
    "a pair, one without tokens": Scenario(
        peers="ab", tokens=(1, 0), pulls=True, clips=False, drops=2, deadlines=1
    ),
}
ONE_OF_EACH = Scenario(crashes=1, drops=1, suspicions=1)
"""The deepest of the tests: over a million states."""
DEEP = {
    "one of each": ONE_OF_EACH,
    "one of each, three owners": Scenario(replication=3, crashes=1, drops=1, suspicions=1),
    "a crash, a loss, a deadline": Scenario(crashes=1, drops=1, deadlines=1),
    "a suspicion and a deadline": Scenario(suspicions=1, deadlines=1),
    "a cut, a crash and a loss": Scenario(cut="ab", crashes=1, drops=1),
    "another cut, a crash and a loss": Scenario(cut="ac", crashes=1, drops=1),
    "no tokens with two, one of each": Scenario(tokens=(0, 0, 1), crashes=1, drops=1, suspicions=1),
    "two primaries and a third one": Scenario(primaries="aba", tokens=(1, 0, 1), deadlines=1),
    "records that differ, a crash and a loss": Scenario(primaries="aba", crashes=1, drops=1),
    "no holder known, a crash and a suspicion": Scenario(primaries="aac", crashes=1, suspicions=1),
    "each its own, a crash": Scenario(primaries="abc", crashes=1),
    "each names another": Scenario(primaries="bca"),
    "each names another, a crash": Scenario(primaries="bca", crashes=1),
    "pauses of any length": Scenario(lazy=False),
    "the only owner's device hangs for ever, for two": Scenario(
        replication=1, hangs="a", hangs_for_ever=True
    ),
    "two lies, and a loss": Scenario(
        peers="abcx", tokens=(1, 1, 1, 0), liar="x", lies=2, denies=True, drops=1
    ),
    "a liar that takes over from a dead primary": Scenario(
        peers="abcx", tokens=(1, 1, 1, 0), liar="x", lies=1, tells=True, crashes=1
    ),
    "a lie where one takes another for a holder": Scenario(
        peers="abcx",
        tokens=(1, 1, 1, 0),
        primaries="acax",
        misnamed="c",
        liar="x",
        lies=1,
        denies=True,
    ),
    "a lie where records differ": Scenario(
        peers="abcx", tokens=(1, 1, 1, 0), primaries="abax", liar="x", lies=1, denies=True
    ),
    "the only owner's device hangs, for two": Scenario(replication=1, hangs="a"),
    "the only owner's process stops, for two": Scenario(replication=1, stops="a"),
    "a primary that owes its result, and a crash": Scenario(owes="a", crashes=1),
    "a primary that owes its result, and a lost message": Scenario(owes="a", drops=1),
    "a quorum of four peers": Scenario(peers="abcd", tokens=(1, 1, 1, 1), quorum=2),
    "a quorum, a crash and a loss": Scenario(quorum=2, crashes=1, drops=1),
    "a quorum, where records differ, and a crash": Scenario(quorum=2, primaries="aba", crashes=1),
    "a quorum, and one of two owners stops": Scenario(quorum=2, stops="a"),
    "four peers and a crash": Scenario(peers="abcd", tokens=(1, 1, 1, 1), crashes=1),
    "four peers and a loss": Scenario(peers="abcd", tokens=(1, 1, 1, 1), drops=1),
}


def with_liar(seed: int) -> Scenario:
    """The same with one that lies, and nobody that is taken for dead: a living primary is needed
    for what one says to be refused."""
    found, rng = any_scenario(seed), random.Random(seed)
    others = found.peers[found.replication :]
    misnamed = rng.choice(others) if others and rng.random() < 0.5 else ""
    primaries = found.primaries or "a" * len(found.peers)
    if misnamed:  # all others name the same one, and it knows better itself
        primaries = "".join(
            "a" if p == misnamed else rng.choice("a" + misnamed) for p in found.peers
        )
    way = rng.random()
    return replace(
        found,
        peers=found.peers + "x",
        tokens=(*found.tokens, 0),
        primaries=primaries + "a",
        misnamed=misnamed,
        liar="x",
        lies=3,
        denies=way < 0.5,
        varies=0.25 <= way < 0.75,
        crashes=0,
        suspicions=0,
        returns=False,
        hangs="",
        stops="",
    )


def any_scenario(seed: int) -> Scenario:
    """A larger world, for random schedules."""
    rng = random.Random(seed)
    n = rng.randint(3, 6)
    peers = "abcdef"[:n]
    replication = rng.randint(2, 3)
    second = rng.choice(peers[:replication])
    return Scenario(
        peers=peers,
        replication=replication,
        tokens=tuple(rng.choice((0, 1, 1)) for _ in peers),
        primaries=rng.choice(("", "", "".join(rng.choice("a" + second) for _ in peers))),
        crashes=rng.randint(0, 1),
        drops=rng.randint(0, 3),
        suspicions=rng.randint(0, 2),
        deadlines=rng.randint(0, 1),
        failures=rng.choice((0, 0, 1)),
        returns=rng.random() < 0.3,
        clips=rng.random() < 0.7,
        slow_sums=rng.random() < 0.3,
        lazy=False,
        hangs=rng.choice(("", "", "a")),
        stops=rng.choice(("", "", "a")),
    )
