"""Rounds that peers save: which they are, which are kept for others, and which is fetched. Pure.

Whoever fetches a round says so every `SAY_KEEP_S` to those that have it, and they keep its
checkpoint meanwhile. Digests come with what peers say that they have; what most peers of a stage
say holds, of those that are nearest by vouching (`membership.reputation`). A round that far fewer
have than another is taken only where no other will do: it may be one peer's word. A peer that is
silent says nothing about what it has, so that a round is taken, or given up, only when all have
answered, or after some patience."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol

from swarmnet.errors import UserError
from swarmnet.protocol.membership.records import DIGEST_BYTES
from swarmnet.protocol.timing import ANSWER_S, LAPSES, UPKEEP_S

STRIDES = (1, 2, 4, 8)
"""Multiples of the interval between checkpoints. They are powers of two, so that the rounds that
slower disks save are rounds of faster disks too."""
SAY_KEEP_S = UPKEEP_S
"""Between two times that those who fetch a checkpoint say so."""
KEEP_S = LAPSES * SAY_KEEP_S
"""How long it is kept for them, after one has last said so."""
MAX_KEPT = 4
"""Rounds that are kept for others at a time: each takes the disk space of a checkpoint."""
MAX_KEPT_FOR_ONE = 2
"""Of these, for one peer: who fetches a round, and finds that it has to take another one, names
two. It protects the places of others from a peer that names round after round
(tests/protocol/test_saved_rounds.py)."""
MAX_SAYING = 1024
"""Peers that fetch one round."""
OVERDUE_S = SAY_KEEP_S + ANSWER_S
"""One of which nobody has spoken for so long gives place to another, where all places are taken:
whoever fetched it has it, or has ended. It protects a round that is wanted from those of earlier
fetches (tests/protocol/test_saved_rounds.py)."""

Key = tuple[int, int]
"""(history, round)."""
Choose = Callable[[Sequence[Key], Mapping[int, float]], Key | None]
"""Of the rounds to be had, the newest first, and the held-out losses by round. Raises `UserError`
where none of them will do."""


class CheckpointPace:
    """Which rounds one peer saves. A disk that is too slow for the interval gets every second,
    fourth or eighth checkpoint, which the others keep for longer: some round must be on the disks
    of all."""

    def __init__(self, every: int, rounds: int) -> None:
        """`every`: rounds between checkpoints. `rounds`: length of the run."""
        self._every = every
        self._rounds = rounds
        self._stride = 1

    @property
    def interval(self) -> int:
        """Rounds between checkpoints on this disk."""
        return self._every * self._stride

    def is_due(self, round_index: int, *, is_writing: bool) -> bool:
        """Whether the beginning of a round is saved. One that is due while the one before is still
        being written is left out, but never the run's last."""
        if round_index >= self._rounds:
            return True
        return bool(round_index) and round_index % self.interval == 0 and not is_writing

    def took(self, num_rounds: int) -> bool:
        """Writing a checkpoint took so many rounds. False where no interval is long enough. Comes
        down a step at a time, for round times vary."""
        fitting = [s for s in STRIDES if num_rounds < self._every * s]
        wanted = fitting[0] if fitting else STRIDES[-1]
        self._stride = max(wanted, self._stride // 2)
        return bool(fitting)


class KeptRounds:
    """Rounds of one peer that it keeps for those that fetch them."""

    def __init__(self) -> None:
        self._said: dict[int, dict[str, float]] = {}
        """By round, who has said that it is to be kept, and when last."""

    @property
    def rounds(self) -> tuple[int, ...]:
        """All of them, as they were when last looked at."""
        return tuple(sorted(self._said))

    def at(self, now: float) -> frozenset[int]:
        """Those that somebody is fetching."""
        for round_index, said in list(self._said.items()):
            for who in [who for who, at in said.items() if now >= at + KEEP_S]:
                self._gives_up(who, round_index)
        return frozenset(self._said)

    def keep(self, round_index: int, now: float, *, by: str, saved: Collection[int]) -> None:
        """The peer `by` fetches a round, of those that are `saved` here: no other is kept. A peer
        that names more than `MAX_KEPT_FOR_ONE` gives up the one that it has named first, which is
        kept if others fetch it too. Where all places are taken, and nobody's is overdue, the round
        is not kept."""
        if round_index not in saved:
            return
        kept = self.at(now)
        theirs = {r: said[by] for r, said in self._said.items() if by in said}
        if round_index not in theirs and len(theirs) >= MAX_KEPT_FOR_ONE:
            self._gives_up(by, min(theirs, key=theirs.__getitem__))
        if round_index not in kept and len(self._said) >= MAX_KEPT:
            last_said = {r: max(said.values()) for r, said in self._said.items()}
            oldest = min(last_said, key=last_said.__getitem__)
            if now < last_said[oldest] + OVERDUE_S:
                return
            del self._said[oldest]
        said = self._said.setdefault(round_index, {})
        if by in said or len(said) < MAX_SAYING:
            said[by] = now

    def _gives_up(self, who: str, round_index: int) -> None:
        said = self._said[round_index]
        del said[who]
        if not said:
            del self._said[round_index]


class SavedPart(Protocol):
    """A stage of a round that a peer has saved."""

    @property
    def history(self) -> int: ...

    @property
    def round(self) -> int: ...

    @property
    def stage(self) -> int: ...

    @property
    def digests(self) -> bytes:
        """One after the other, of its shards."""


class Answer(Protocol):
    """What a peer says that it has saved."""

    @property
    def rounds(self) -> Sequence[SavedPart]: ...

    @property
    def held_out(self) -> Mapping[int, float]:
        """Losses by round."""

    @property
    def kept(self) -> Collection[int]:
        """Rounds that it keeps for those that fetch them. Peers of earlier versions do not say."""


@dataclass
class Offer:
    """A round that peers have whole."""

    key: Key
    digests: list[bytes] = field(default_factory=list)
    """Of each stage."""
    holders: list[list[str]] = field(default_factory=list)
    """Peers that have each stage so."""

    @property
    def peers(self) -> list[str]:
        """All holders."""
        return sorted({peer_id for holders in self.holders for peer_id in holders})

    @property
    def support(self) -> int:
        """How many peers say that they have the stage that fewest have."""
        return min(map(len, self.holders))

    def digest(self, stage: int, shard: int) -> bytes:
        return self.digests[stage][DIGEST_BYTES * shard : DIGEST_BYTES * (shard + 1)]


@dataclass(frozen=True, slots=True)
class Fetch:
    """This round is to be fetched."""

    key: Key
    offers: Mapping[Key, Offer]
    """It, and the others that there were to choose from."""
    losses: Mapping[int, float]

    @property
    def offer(self) -> Offer:
        return self.offers[self.key]


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Peers are to be asked again, in a moment."""


@dataclass(frozen=True, slots=True)
class NothingToHave:
    """No round that will do is to be had, and nobody is left who might have one."""


class SavedRounds:
    """What the peers of a run have said last that they have saved, to one that fetches a round."""

    def __init__(
        self,
        num_shards: Sequence[int],
        nearest: Callable[[Sequence[str]], Collection[str]] = lambda peer_ids: peer_ids,
    ) -> None:
        """`num_shards`: of each stage. `nearest`: those of some peers whose word is taken."""
        self._num_shards = num_shards
        self._nearest = nearest
        self._answers: dict[str, Answer] = {}
        self._refused: set[tuple[str, Key, int]] = set()
        """Stages of a round that a peer offers and does not have, as it turned out."""
        self._was_gone = False
        """A round went while it was fetched: peers had no place to keep it."""

    # ---- what has happened ------------------------------------------------------------------

    def answered(self, peer_id: str, answer: Answer) -> None:
        """A peer has said what it has."""
        self._answers[peer_id] = answer

    def unanswered(self, peer_id: str) -> None:
        """A peer does not say what it has, whatever it said before."""
        self._answers.pop(peer_id, None)

    def refused(self, offer: Offer, stage: int, peer_id: str) -> None:
        """A peer does not have a stage, as it turns out; other calls may have found so too."""
        offer.holders[stage] = [p for p in offer.holders[stage] if p != peer_id]
        self._refused.add((peer_id, offer.key, stage))

    def gone(self) -> None:
        """A round that was being fetched is not to be had any more."""
        self._was_gone = True

    # ---- what it means ----------------------------------------------------------------------

    def silent(self, peer_ids: Sequence[str]) -> list[str]:
        """Those among some peers that have not said what they have."""
        return [p for p in peer_ids if p not in self._answers]

    def decide(
        self,
        choose: Choose,
        begun: Collection[Key],
        *,
        is_silent: bool,
        is_patient: bool,
    ) -> Fetch | AskAgain | NothingToHave:
        """What to do now. `begun`: rounds of which parts have come. `is_silent`: some peers have
        not answered. `is_patient`: the fetch has begun a short while ago. Raises what `choose`
        raises where asking again helps no more."""
        offers, losses = self.offers(), self._losses()
        # Parts that have come are thrown away for another round only where theirs is gone.
        if not set(begun) & offers.keys() and begun and is_silent and is_patient:
            return AskAgain()
        key = _choose(choose, offers, begun, losses, may_wait=is_silent)
        if key is not None:
            return Fetch(key, offers, losses)
        # Answers of different moments may have no round in common, though peers do.
        if not is_silent and (offers or not (is_patient and self._is_everywhere())):
            return NothingToHave()
        return AskAgain()

    def keepable(self, chosen: Fetch, choose: Choose) -> Fetch:
        """The round to fetch, when the holders of the one that was chosen have said whether they
        keep it. Where one has gone before all of it was here, and some stage's holders have no
        place for this one: one that they do keep, if that suits."""
        if not self._was_gone or self._keeps(chosen.offer):
            return chosen
        offers = chosen.offers
        kept = {key: offer for key, offer in offers.items() if self._keeps(offer)}
        with suppress(UserError):
            if key := _choose_shared(choose, kept, chosen.losses):
                return Fetch(key, offers, chosen.losses)
        return chosen

    def offers(self) -> dict[Key, Offer]:
        """Rounds of which every stage is to be had."""
        said: dict[tuple[Key, int], Counter[bytes]] = {}
        holding: dict[tuple[Key, int, bytes], list[str]] = {}
        near = self._near()
        for peer_id, answer in sorted(self._answers.items()):
            for part in answer.rounds:
                key = (part.history, part.round)
                if not self._fits(part) or (peer_id, key, part.stage) in self._refused:
                    continue
                if peer_id in near[part.stage]:
                    said.setdefault((key, part.stage), Counter())[part.digests] += 1
                holding.setdefault((key, part.stage, part.digests), []).append(peer_id)
        offers = {}
        stages = range(len(self._num_shards))
        for key in {key for key, _ in said}:
            if all((key, k) in said for k in stages):
                digests = [max(sorted(said[key, k]), key=said[key, k].__getitem__) for k in stages]
                holders = [holding[key, k, digests[k]] for k in stages]
                offers[key] = Offer(key, digests, holders)
        return offers

    def _near(self) -> list[Collection[str]]:
        """By stage, of those that have saved any of it the ones whose word is taken."""
        saving: list[list[str]] = [[] for _ in self._num_shards]
        for peer_id, answer in sorted(self._answers.items()):
            for k in sorted({part.stage for part in answer.rounds if self._fits(part)}):
                saving[k].append(peer_id)
        return [frozenset(self._nearest(there)) for there in saving]

    def _losses(self) -> dict[int, float]:
        """By round, the median of what peers have heard; nothing of a round of which fewer have
        heard than half of those that could."""
        heard: dict[int, list[float]] = {}
        tellers = [answer.held_out for answer in self._answers.values() if answer.held_out]
        for losses in tellers:
            for r, loss in losses.items():
                heard.setdefault(r, []).append(loss)
        since = sorted(min(losses) for losses in tellers)
        could = {r: bisect_right(since, r) for r in heard}
        return {r: median_low(told) for r, told in heard.items() if 2 * len(told) >= could[r]}

    def _is_everywhere(self) -> bool:
        """Something is saved of each stage."""
        stages = {part.stage for answer in self._answers.values() for part in answer.rounds}
        return stages >= set(range(len(self._num_shards)))

    def _fits(self, part: SavedPart) -> bool:
        is_stage = part.stage < len(self._num_shards)
        return is_stage and len(part.digests) == DIGEST_BYTES * self._num_shards[part.stage]

    def _keeps(self, offer: Offer) -> bool:
        """Some holder of each stage keeps the round."""
        round_index = offer.key[1]
        return all(
            any(p in self._answers and round_index in self._answers[p].kept for p in holders)
            for holders in offer.holders
        )


def _choose(
    choose: Choose,
    offers: Mapping[Key, Offer],
    begun: Collection[Key],
    losses: Mapping[int, float],
    *,
    may_wait: bool,
) -> Key | None:
    """One of which parts have come, where that will do."""
    try:
        with suppress(UserError):
            if key := choose([key for key in sorted(offers, reverse=True) if key in begun], losses):
                return key
        return _choose_shared(choose, offers, losses)
    except UserError:
        if may_wait:
            return None
        raise


def _choose_shared(
    choose: Choose, offers: Mapping[Key, Offer], losses: Mapping[int, float]
) -> Key | None:
    """One that as many peers have as any other, or half as many, where such a one will do."""
    whole = sorted(offers, reverse=True)
    most = max((offer.support for offer in offers.values()), default=0)
    with suppress(UserError):
        if key := choose([key for key in whole if 2 * offers[key].support >= most], losses):
            return key
    return choose(whole, losses)
