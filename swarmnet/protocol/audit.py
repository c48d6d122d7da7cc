"""Which microbatches are computed again, and what follows of the result.

A caller draws a part of the replies that it gets, and has other replicas of the callee's stage
compute the same (docs/decisions/0018-a-part-of-the-work-is-done-again.md). They agree within a
tolerance that covers every precision and machine, or somebody lies; then a majority decides.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum

from swarmnet.protocol.codecs import BF16, INT4, INT6, INT8, NONE
from swarmnet.protocol.membership.peer_ids import machine_of

RATE = 0.03
"""The part of the replies that is audited: 2 % of the compute, since a third of a pass (the
gradients of the parameters) is left out. One proof is enough: of 3,000 microbatches of which one in
ten is corrupted, none of these is audited in one of 8,000 cases; at 2 % it were one of 400."""
MAX_JUDGES = 16
"""Who compute one microbatch again, where the first of them finds a difference. In a large stage
eight liars are never most of them."""
MAX_PASSED_OVER = 8
"""Cases of one peer."""
MAX_PEERS = 4096
"""Of whom something is known; those that were barred are forgotten last."""
TOLERANCES = {NONE: 0.1, BF16: 0.1, INT8: 0.1, INT6: 0.15, INT4: 0.25}
"""By `[pipeline] codec`: the largest relative difference, of the norms, between what two honest
replicas make of the same microbatch. It covers fp32 beside bf16 and fp16: what a peer says of its
own precision is no evidence. `benchmarks/recomputation.py` measures how near honest ones come."""


class Draw:
    """Chooses what is audited. Nobody else may know before a reply has come: `rng` is to be one
    that cannot be predicted, but in tests."""

    def __init__(self, rng: random.Random, rate: float = RATE) -> None:
        self._rng = rng
        self._rate = rate

    def is_drawn(self) -> bool:
        """Whether the reply that has just come is audited."""
        return self._rng.random() < self._rate

    def judges(self, replicas: Collection[str], audited: str) -> list[str]:
        """Whom to ask, in this order: replicas of the same stage, of other machines than the
        audited one."""
        machine = machine_of(audited)
        others = sorted(p for p in replicas if machine_of(p) != machine)
        return self._rng.sample(others, min(len(others), MAX_JUDGES))


def is_within(difference: float, codec: str) -> bool:
    """Whether two results are the same, but for arithmetic. What is no number is not."""
    return difference <= TOLERANCES[codec]


class Verdict(Enum):
    """What a jury has found, as far as it was asked."""

    AGREES = "agrees"
    """The first judge has computed the same. Nobody else need be asked."""
    OPEN = "open"
    """Somebody else is to be asked; where nobody is left, nothing follows."""
    LIED = "lied"
    SLANDERED = "slandered"
    """Those that found a difference are wrong."""


@dataclass(frozen=True, slots=True)
class Jury:
    """What judges have said of one microbatch."""

    size: int
    """Judges that may be asked."""
    differs: tuple[str, ...] = ()
    agrees: tuple[str, ...] = ()

    def heard(self, judge: str, *, is_same: bool) -> Jury:
        """With the word of one more."""
        if is_same:
            return Jury(self.size, self.differs, (*self.agrees, judge))
        return Jury(self.size, (*self.differs, judge), self.agrees)

    def missed(self) -> Jury:
        """One that was asked gave no answer."""
        return replace(self, size=self.size - 1)

    @property
    def verdict(self) -> Verdict:
        """The audited peer counts as one more, who agrees with itself. A majority is one of all
        that may be asked: else two liars among many honest judges had only to be drawn first. A
        caller who has one judge beside the audited peer cannot tell which of them lies."""
        against, in_favour = len(self.differs), len(self.agrees) + 1
        if not against:
            return Verdict.AGREES if self.agrees else Verdict.OPEN
        if 2 * against > self.size + 1:
            return Verdict.LIED
        return Verdict.SLANDERED if 2 * in_favour > self.size + 1 else Verdict.OPEN


@dataclass(slots=True)
class Evidence:
    """What audits have found of one peer, here."""

    agreed: int = 0
    lied: int = 0
    slandered: int = 0
    """How often it found a difference where others found none."""
    unknown: int = 0
    """Audits of its work without a result, since this peer itself last found it right."""


@dataclass
class Conclusions:
    """One peer's own."""

    _of: dict[str, Evidence] = field(default_factory=dict)

    def of(self, peer_id: str) -> Evidence:
        """The counts of a peer, which are those of its machine: one key signs for all its seats."""
        return self._of.get(machine_of(peer_id), Evidence())

    def is_barred(self, peer_id: str) -> bool:
        """It has lied."""
        found = self._of.get(machine_of(peer_id))
        return found is not None and found.lied > 0

    def may_judge(self, peer_id: str) -> bool:
        """Its word on others is worth asking for."""
        found = self._of.get(machine_of(peer_id))
        return found is None or not (found.lied or found.slandered)

    def concluded(self, audited: str, jury: Jury) -> Verdict:
        """An audit of a peer's work is over."""
        verdict, found = jury.verdict, self._at(audited)
        if verdict is Verdict.LIED:
            found.lied += 1
        elif verdict is Verdict.OPEN:
            found.unknown += 1
        else:
            found.agreed += 1
        if verdict is Verdict.SLANDERED:
            for judge in jury.differs:
                self._at(judge).slandered += 1
        return verdict

    def computed(self, audited: str, *, is_same: bool) -> None:
        """This peer has computed a piece of another's work again itself."""
        found = self._at(audited)
        if is_same:
            found.agreed += 1
            found.unknown = 0
        else:
            found.lied += 1

    def passes_over(self, audited: str) -> bool:
        """A peer's record names other parameters than this one has, so nothing follows of what it
        gave. A peer that heals from a partition is in that state for a moment. One that always is
        would never be audited: it is judged like others after `MAX_PASSED_OVER` such cases."""
        found = self._at(audited)
        found.unknown += 1
        return found.unknown <= MAX_PASSED_OVER

    def _at(self, peer_id: str) -> Evidence:
        peer_id = machine_of(peer_id)
        if peer_id not in self._of and len(self._of) >= MAX_PEERS:
            harmless = (p for p, found in self._of.items() if not found.lied)
            del self._of[next(harmless, next(iter(self._of)))]
        return self._of.setdefault(peer_id, Evidence())
