"""Which microbatches are computed again, and what follows of the result.

A caller draws a part of the replies that it gets, and has other replicas of the callee's stage
compute the same (docs/decisions/0018-a-part-of-the-work-is-done-again.md). They agree within a
tolerance that covers every precision and machine, or somebody lies; then a majority decides.

Updates are done again too: backups make every step, and draw sums to be made again
(docs/decisions/0020-an-update-is-done-again.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from swarmnet.protocol.codecs import BF16, INT4, INT6, INT8, NONE
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.update import robust

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
"""That were audited; those that have lied are forgotten last."""
TOLERANCES = {NONE: 0.1, BF16: 0.1, INT8: 0.1, INT6: 0.15, INT4: 0.25}
"""By `[pipeline] codec`: the largest relative difference, of the norms, between what two honest
replicas make of the same microbatch. It covers fp32 beside bf16 and fp16: what a peer says of its
own precision is no evidence. `benchmarks/recomputation.py` measures how near honest ones come."""
UPDATE_RATE = 0.1
"""The part of the sums that a backup makes again. A primary of one shard that is false in every
update is found within 50 of them in 199 of 200 cases."""
LOOK_RATE = 0.5
"""The part of the results of which a contributor checks what its primary has signed. A backup
checks all of those that it has made too."""
UPDATE_TOLERANCE = 0.05
"""The largest relative difference, of the norms, between two honest sums of the same contributions,
or two changes by the same step. All begin with the same bits, so that honest ones differ in the
last bits only, and where a code is rounded the other way."""
ROUNDING = 1e-6
"""Of a number in fp32, by which honest results may differ besides: of small changes to large
parameters there is little left."""
MAX_RATIO = 16.0
"""Of sums of squares of one shard's mean gradient in one exchange."""
CONTRADICTIONS = 2
"""Exchanges in which a primary tells what cannot be, and that is no accident."""
MAX_WITHHELD = 8
"""Updates of a shard in a row of which its primary has not shown what it has signed for."""


class Draw:
    """Chooses what is audited. Nobody else may know before a reply has come: `rng` is to be one
    that cannot be predicted, but in tests."""

    def __init__(self, rng: random.Random, rate: float = RATE) -> None:
        self._rng = rng
        self._rate = rate

    def is_drawn(self) -> bool:
        """Whether the reply that has just come is audited."""
        return self._rng.random() < self._rate

    @classmethod
    def beside(cls, rng: random.Random, rate: float) -> Draw:
        """One that cannot be predicted if `rng` cannot, and leaves that as it is."""
        copy = random.Random()
        copy.setstate(rng.getstate())
        return cls(random.Random(f"updates|{copy.getrandbits(256)}"), rate)

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

    def forget(self, peer_id: str) -> None:
        """A machine has been gone for long. What is held against it is not forgotten."""
        found = self.of(peer_id)
        if not (found.lied or found.slandered):
            self._of.pop(machine_of(peer_id), None)

    def _at(self, peer_id: str) -> Evidence:
        peer_id = machine_of(peer_id)
        if peer_id not in self._of and len(self._of) >= MAX_PEERS:
            harmless = (p for p, found in self._of.items() if not found.lied)
            del self._of[next(harmless, next(iter(self._of)))]
        return self._of.setdefault(peer_id, Evidence())


# ---- updates ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """What a primary says of one contribution to its sum."""

    claimed: int
    """Tokens, by the word of the contributor."""
    num_tokens: int
    """As the primary counts them."""
    factor: float
    """By which the contribution was multiplied; 0 where it was left out."""


def unfair(rule: str, parts: Sequence[Part], num_tokens: int, scale: float, *, clips: bool) -> str:
    """Why a sum cannot be that of an honest primary, whatever the contributions are; empty where it
    can. Whether those that were left out had to be, and whether the numbers add up, is seen by who
    has the contributions.

    Args:
        rule: of `robust.RULES`.
        num_tokens: behind the sum.
        scale: by which the sum is multiplied for the step.
        clips: whether that may be less than one over the tokens.
    """
    used = [part for part in parts if part.factor]
    if any(part.num_tokens > part.claimed or part.num_tokens <= 0 for part in used):
        return "counts other tokens than were claimed"
    if sum(part.num_tokens for part in used) != num_tokens:
        return "counts other tokens than those of its parts"
    is_mean = rule == robust.MEAN or len(parts) < robust.MIN_CONTRIBUTORS
    if is_mean and any(part.num_tokens != part.claimed for part in used):
        return "counts fewer tokens than were claimed"
    if not _are_factors(used, may_clip=rule == robust.MEDIAN_CLIP and not is_mean):
        return "multiplies contributions by what no rule gives"
    whole = scale * num_tokens
    if not 0 <= whole <= 1 + ROUNDING or (not clips and num_tokens and whole < 1 - ROUNDING):
        return "makes the step larger or smaller"
    return ""


def _are_factors(used: Sequence[Part], *, may_clip: bool) -> bool:
    """Whether `robust.clip_factors` may have given these: half of all are not clipped, and all are
    enlarged by as much as clipping takes away."""
    factors = [part.factor for part in used]
    if all(f == 1.0 for f in factors):
        return True
    largest = max(factors)
    if not may_clip or min(factors) < 0 or largest < 1:
        return False
    whole = [f for f in factors if math.isclose(f, largest)]
    weights = [1.0 if math.isclose(f, largest) else math.sqrt(f / largest) for f in factors]
    tokens = [part.num_tokens for part in used]
    fullness = sum(w * n for w, n in zip(weights, tokens, strict=True)) / sum(tokens)
    return 2 * len(whole) >= len(factors) and math.isclose(
        largest * fullness, 1.0, rel_tol=ROUNDING
    )


def is_same_update(difference: float, size: float, parameters: float = 0.0) -> bool:
    """Whether two sums, or two changes of parameters, are the same, but for arithmetic. All are
    norms: of their difference, of one of the two, and of the parameters. What is no number is
    not."""
    return difference <= UPDATE_TOLERANCE * size + ROUNDING * parameters


def are_same_squares(one: float, other: float) -> bool:
    """Whether two sums of squares are of the same numbers, but for arithmetic."""
    return is_same_update(abs(one**0.5 - other**0.5), max(one, other) ** 0.5)


def are_of_one_sum(one: float, other: float) -> bool:
    """Whether two sums of squares may be of the mean gradient of one shard in one exchange. It is
    summed again where its primary has stood back for a moment, perhaps without one that has died:
    so they may differ, but not by a lot."""
    return max(one, other) <= MAX_RATIO * min(one, other)


@dataclass
class Contradictions:
    """Exchanges in which a primary has told what cannot be."""

    _rounds: dict[str, frozenset[int]] = field(default_factory=dict)
    """By machine, those of late at the end."""

    def are_too_many(self, peer_id: str, round_index: int) -> bool:
        """It has, once more. Whether that is a lie."""
        key = machine_of(peer_id)
        self._rounds[key] = self._rounds.pop(key, frozenset()) | {round_index}
        if len(self._rounds) > MAX_PEERS:
            del self._rounds[next(iter(self._rounds))]
        return len(self._rounds[key]) >= CONTRADICTIONS


@dataclass
class Withheld:
    """Updates of which a primary has not shown what it has signed for. Once that may be a link or a
    machine that fails. Always, it would never be audited."""

    _times: dict[tuple[str, int], int] = field(default_factory=dict)
    """In a row, by primary and shard, those of late at the end."""

    def shown(self, peer_id: str, shard: int) -> None:
        """It has."""
        self._times.pop((machine_of(peer_id), shard), None)

    def is_too_often(self, peer_id: str, shard: int) -> bool:
        """It has not, once more. Whether that is as good as a lie."""
        key = machine_of(peer_id), shard
        self._times[key] = self._times.pop(key, 0) + 1
        if len(self._times) > MAX_PEERS:
            del self._times[next(iter(self._times))]
        return self._times[key] > MAX_WITHHELD
