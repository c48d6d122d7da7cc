"""Who counts: what this peer has seen others do, and the word of those it has seen work. Pure.

An identity is free, so a record makes nobody a member. A peer *works* here once this one has seen
it work: a microbatch came back through it, or one that it sent was committed. Its word then helps
others (`Record.vouches`): whoever it has seen work itself works here too, but the word of those
does not go further. So a peer that has proved itself can bring in `MAX_VOUCHES` others at most.

Who found the right loss in a trial pass (`protocol.pipeline.trials`) counts too, here and by the
word of those that work: it is given microbatches. It has no gradient before one comes back, so no
exchange waits for it, and its own word helps nobody.

Where a peer has seen nobody work yet, it goes by the swarm that it finds. A newcomer to one that
works (its introducers vouch for somebody) believes its introducers, those for whom they vouch, and
so on. Where nobody vouches for anybody, all begin together, and all count. Who counted when the
first proof came goes on counting for a while, since no peer works with all others at once.

The parameters of the run are those of most, and most may be names of one machine. So who has none
yet, and who only looks on, asks those of a stage that are `nearest`: at the fewest steps of
vouching from the peers that were named to it, which are its introducers too. However many names
vouch for each other, they are further away than the one who was fooled first.

Known ideas: trust by own experience and by the word of those trusted (Kamvar et al. 2003,
"EigenTrust"), which is here bounded to one step; newcomers pay with work before they are believed
(Friedman and Resnick 2001, "The social cost of cheap pseudonyms")."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from functools import lru_cache

from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import MAX_VOUCHES, VOUCH_BYTES

MAX_INTRODUCERS = 3
MAX_NAMED = 16
"""Peers that were named to this one."""
MAX_ANSWERS = 16_384
"""About peers, remembered."""
MAX_BARRED = 16_384
"""Machines that have lied and are remembered; of more, those found out last."""
GRACE_ROUNDS = 32
"""Who counted before anything was proved here goes on counting for so long: those that begin a run
together have worked with all others by then."""


class Level(IntEnum):
    """What is known here of a peer."""

    BARRED = -1
    """It has lied."""
    UNKNOWN = 0
    TRIED = 1
    """It has found the right loss, as this peer or somebody who is proven has seen."""
    VOUCHED = 2
    """Somebody who is proven has seen it work."""
    PROVEN = 3
    """This peer has seen it work."""


@lru_cache(maxsize=1 << 15)
def name_of(peer_id: str) -> bytes:
    """A peer as records name it in their vouches: `VOUCH_BYTES` bytes."""
    return hashlib.blake2b(peer_id.encode(), digest_size=VOUCH_BYTES).digest()


@lru_cache(maxsize=1 << 15)
def tried_name_of(peer_id: str) -> bytes:
    """The same of a peer that has been seen to find the right loss, and not at work yet."""
    return hashlib.blake2b(name_of(peer_id), digest_size=VOUCH_BYTES).digest()


def names_in(vouches: bytes) -> list[bytes]:
    """The names in a record's vouches."""
    return [vouches[i : i + VOUCH_BYTES] for i in range(0, len(vouches), VOUCH_BYTES)]


class Reputation:
    """Of one peer's view of all others.

    What `counts` answers changes only when a method here returns True."""

    def __init__(self, own_peer_id: str) -> None:
        self._own_peer_id = own_peer_id
        self._vouches: dict[str, frozenset[bytes]] = {}
        """By who vouches."""
        self._proven: set[str] = set()
        self._shown: dict[str, bool] = {}
        """Who has shown something to this peer, the last one at the end; whether that is work, or
        a loss alone."""
        self._supported: Counter[bytes] = Counter()
        """How many of the proven peers vouch for one."""
        self._barred: dict[str, None] = {}
        """Machines, those found out last at the end."""
        self._has_met = False
        self._named: dict[str, None] = {}
        """Peers that were named to this one, and have answered."""
        self._is_newcomer = True
        """No round has begun here."""
        self._steps: dict[bytes, int] | None = None
        """As `_find_steps`; None: to be found anew."""
        self._introducers: dict[str, None] = {}
        self._introduced: frozenset[bytes] | None = None
        """Those in whom a newcomer believes; None: to be found anew."""
        self._founders: frozenset[str] = frozenset()
        self._rounds_left = GRACE_ROUNDS
        self._counting: dict[str, bool] = {}
        """What `counts` has answered since the last change. All peers of a view are asked about
        whenever one of their records has changed."""

    # ---- answers --------------------------------------------------------------------------------

    @property
    def is_proven(self) -> bool:
        """Somebody has been seen at work."""
        return bool(self._proven)

    def level(self, peer_id: str) -> Level:
        """What is known of a peer."""
        if self._barred and machine_of(peer_id) in self._barred:
            return Level.BARRED
        if peer_id in self._proven:
            return Level.PROVEN
        if name_of(peer_id) in self._supported:
            return Level.VOUCHED
        is_tried = peer_id in self._shown or tried_name_of(peer_id) in self._supported
        return Level.TRIED if is_tried else Level.UNKNOWN

    def counts(self, peer_id: str) -> bool:
        """Whether a peer takes part in the run, as this one sees it. The own one counts where the
        others would have it."""
        answer = self._counting.get(peer_id)
        if answer is None:
            if len(self._counting) >= MAX_ANSWERS:
                self._counting.clear()
            answer = self._counting[peer_id] = self._finds_counting(peer_id)
        return answer

    def works(self, peer_id: str) -> bool:
        """Whether a peer counts, and may have a gradient: a right loss is not enough."""
        level = self.level(peer_id)
        if level in (Level.UNKNOWN, Level.TRIED):
            return self._is_believed(peer_id)
        return level > Level.UNKNOWN

    def nearest(self, peer_ids: Collection[str]) -> list[str]:
        """Those of some peers of one stage whose word of the run's parameters is worth most, to one
        that has none: those at the fewest steps of vouching from here, in the same order. All that
        are not barred, where nobody vouches for anybody; none, where others do and for none of
        these."""
        allowed = [p for p in peer_ids if self.level(p) is not Level.BARRED]
        if self._proven and (working := [p for p in allowed if self.works(p)]):
            return working
        steps = self._found_steps()
        found = [(steps[name], p) for p in allowed if (name := name_of(p)) in steps]
        if not found:
            return [] if any(steps.values()) else allowed
        # Whom a peer has seen at work is as near as that peer.
        least = max(1, min(step for step, _ in found))
        return [p for step, p in found if step <= least]

    def is_introduced(self, peer_id: str) -> bool:
        """Whether any steps of vouching lead to a peer; all peers, where nobody vouches."""
        steps = self._found_steps()
        return not any(steps.values()) or name_of(peer_id) in steps

    def vouches(self) -> bytes:
        """For whom this peer vouches: those that have shown something last, as a record names
        them."""
        newest = list(self._shown.items())[-MAX_VOUCHES:]
        names = (name_of(p) if is_work else tried_name_of(p) for p, is_work in newest)
        return b"".join(sorted(names))

    # ---- what has been seen ---------------------------------------------------------------------

    def named(self, peer_id: str) -> None:
        """A person has named this peer as one of the run, and it has answered."""
        if len(self._named) < MAX_NAMED:
            self._named[peer_id] = None
            self._steps = None

    def met(self, peer_id: str) -> bool:
        """Records were exchanged with a peer to which this one turned. Those that were named, or
        else the first such peers, introduce a newcomer, where they vouch for somebody."""
        if self._proven or peer_id in self._introducers:
            return False
        if self._named and peer_id not in self._named:
            return False
        is_first, self._has_met = not self._has_met, True
        may_introduce = is_first or bool(self._introducers)
        if not may_introduce or peer_id not in self._vouches:
            return False
        if len(self._introducers) == MAX_INTRODUCERS:
            return False
        self._introducers[peer_id] = None
        self._introduced = self._steps = None
        self._counting.clear()
        return True

    def vouched(self, by: str, vouches: bytes) -> bool:
        """The record of `by` vouches for these now."""
        names, before = frozenset(names_in(vouches)), self._vouches.get(by, frozenset())
        if names == before:
            return False
        self._vouches[by] = names
        if not names:
            del self._vouches[by]
        self._introduced = self._steps = None
        self._counting.clear()
        if by in self._proven:
            self._support(names - before, 1)
            self._support(before - names, -1)
            return True
        return bool(self._introducers or self._named) and not self._proven

    def delivered(self, peer_id: str, known: Iterable[str]) -> bool:
        """A peer was seen at work. `known`: all peers of the view; those that work when the first
        proof comes are the founders."""
        if peer_id == self._own_peer_id or peer_id in self._proven:
            return False
        if machine_of(peer_id) in self._barred:
            return False
        if not self._proven and not self._founders and self._rounds_left:
            self._founders = frozenset(p for p in known if self.works(p))
        self._shown.pop(peer_id, None)
        self._shown[peer_id] = True
        self._proven.add(peer_id)
        self._steps = None
        self._counting.clear()
        self._support(self._vouches.get(peer_id, ()), 1)
        return True

    def found_loss(self, peer_id: str) -> bool:
        """A peer has found the right loss in a trial pass."""
        if peer_id == self._own_peer_id or peer_id in self._shown:
            return False
        if machine_of(peer_id) in self._barred:
            return False
        self._shown[peer_id] = False
        self._counting.clear()
        return True

    def lied(self, peer_id: str) -> bool:
        """There is evidence that a peer has lied: its machine does not count any more."""
        machine = machine_of(peer_id)
        if machine in self._barred:
            return False
        self._barred[machine] = None
        if len(self._barred) > MAX_BARRED:
            del self._barred[next(iter(self._barred))]
        self._counting.clear()
        for seat in [p for p in self._shown if machine_of(p) == machine]:
            self._disprove(seat)
        return True

    def round_began(self) -> bool:
        """Another round has begun here."""
        if self._is_newcomer:
            self._is_newcomer, self._steps = False, None
        if not self._proven or not self._rounds_left:
            return False
        self._rounds_left -= 1
        if self._rounds_left:
            return False
        self._founders = frozenset()
        self._counting.clear()
        return True

    def forget(self, peer_id: str) -> None:
        """A peer has been gone for long. What a machine is barred for is not forgotten."""
        self._disprove(peer_id)
        self._vouches.pop(peer_id, None)
        self._introducers.pop(peer_id, None)
        self._named.pop(peer_id, None)
        self._introduced = self._steps = None
        self._counting.clear()

    # ---- within ---------------------------------------------------------------------------------

    def _finds_counting(self, peer_id: str) -> bool:
        level = self.level(peer_id)
        if level is not Level.UNKNOWN:
            return level > Level.UNKNOWN
        return self._is_believed(peer_id) or self._is_introduced(peer_id, tried_name_of)

    def _disprove(self, peer_id: str) -> None:
        self._shown.pop(peer_id, None)
        if peer_id in self._proven:
            self._proven.remove(peer_id)
            self._steps = None
            self._support(self._vouches.get(peer_id, ()), -1)

    def _support(self, names: Iterable[bytes], sign: int) -> None:
        for name in names:
            self._supported[name] += sign
            if not self._supported[name]:
                del self._supported[name]

    def _found_steps(self) -> dict[bytes, int]:
        if self._steps is None:
            self._steps = self._find_steps()
        return self._steps

    def _find_steps(self) -> dict[bytes, int]:
        """Steps of vouching to each name: from those that this peer has seen at work; a newcomer
        begins with those that were named to it, or else introduce it."""
        begin = self._proven or (self._is_newcomer and self._named) or self._introducers or {}
        who = {name_of(p): p for p in self._vouches}
        found = {name_of(p): 0 for p in begin}
        frontier = list(found)
        while frontier:
            further: list[bytes] = []
            for name in frontier:
                for vouched in sorted(self._vouches.get(who.get(name, ""), ())):
                    if vouched not in found:
                        found[vouched] = found[name] + 1
                        further.append(vouched)
            frontier = further
        return found

    def _is_believed(self, peer_id: str) -> bool:
        """Before this peer has seen it, or has heard of it from those that it has seen."""
        if self._proven:
            return self._rounds_left > 0 and peer_id in self._founders
        return not self._introducers or self._is_introduced(peer_id, name_of)

    def _is_introduced(self, peer_id: str, named: Callable[[str], bytes]) -> bool:
        """`named`: how those that introduce it have to vouch for it."""
        if self._proven or not self._introducers:
            return False
        if self._introduced is None:
            self._introduced = self._find_introduced()
        return peer_id in self._introducers or named(peer_id) in self._introduced

    def _find_introduced(self) -> frozenset[bytes]:
        """Those for whom the introducers vouch, those for whom these vouch, and so on."""
        who = {name_of(p): p for p in self._vouches}
        frontier = [n for p in self._introducers for n in self._vouches.get(p, ())]
        found: set[bytes] = set()
        while frontier:
            name = frontier.pop()
            if name not in found:
                found.add(name)
                frontier += self._vouches.get(who.get(name, ""), ())
        return frozenset(found)
