"""What a feeder did in each round: its microbatches in flight, and those that count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarmnet.methods.microbatch import CommittedReply, CommittedRequest
from swarmnet.protocol.pipeline.launching import Launches
from swarmnet.swarm.tasks import Tasks

KEPT_COMMITS = 4
"""Rounds whose committed microbatches a feeder can still be asked about."""


@dataclass(eq=False)
class FedRound:
    """One round of a feeder."""

    round: int
    committed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Path of every microbatch that counts, by microbatch id."""
    refused: dict[int, set[tuple[int, str]]] = field(default_factory=dict)
    """(stage, peer id) of replicas whose round is closed and that asked about a microbatch while it
    was in flight: they will not count it. By microbatch id."""
    in_flight: set[int] = field(default_factory=set)
    """Microbatch ids."""
    is_measured: bool = False
    """The held-out loss of the round is measured by this feeder, or given up."""
    is_missed_ahead: bool = False
    """A measurement failed while the round was open ahead."""
    flights: Tasks = field(default_factory=lambda: Tasks("feeder"))
    _num_begun: int = 0
    """Microbatches that it has begun to launch."""
    _told: set[int] = field(default_factory=set)
    """Microbatches that `news` has named."""

    def __post_init__(self) -> None:
        self.launches = Launches(self.round)

    @property
    def has_begun(self) -> bool:
        """Anything of the round was launched here."""
        return self._num_begun > 0

    def begin(self, now: float) -> None:
        """The round is open from now on. Where it begins once more, its parameters may be others
        than before."""
        self.launches.begin(now)
        self.is_measured = self.is_missed_ahead = False

    def next_number(self) -> int:
        """Of the next microbatch, from 0."""
        n, self._num_begun = self._num_begun, self._num_begun + 1
        return n

    def launched(self, the_id: int, now: float) -> None:
        """A microbatch is in flight."""
        self.in_flight.add(the_id)
        self.launches.launched(now)

    def returned(self, the_id: int) -> None:
        """A microbatch is in flight no more."""
        self.in_flight.discard(the_id)

    def counts(self, the_id: int, path: tuple[str, ...]) -> None:
        """A microbatch that went this way counts."""
        self.committed[the_id] = path

    def refuse(self, the_id: int, stage: int, asker: str) -> None:
        """A replica of a stage will not count a microbatch that is in flight."""
        self.refused.setdefault(the_id, set()).add((stage, asker))

    def measured(self) -> None:
        """Its held-out loss is, or is given up."""
        self.is_measured = True

    def missed(self, *, is_ahead: bool, is_last_try: bool) -> None:
        """A measurement of it failed."""
        self.is_measured, self.is_missed_ahead = is_last_try, is_ahead

    def news(self) -> dict[int, tuple[str, ...]]:
        """What counts and was not named before: paths by microbatch id, ascending."""
        new = sorted(self.committed.keys() - self._told)
        self._told.update(new)
        return {the_id: self.committed[the_id] for the_id in new}

    def is_refused(self, the_id: int, path: tuple[str, ...]) -> bool:
        """Whether a replica on the path will not count the microbatch. No other one can keep it
        from being counted."""
        refusals = self.refused.pop(the_id, ())
        return any(s < len(path) and path[s] == asker for s, asker in refusals)


class FedRounds:
    """The newest rounds of a feeder, and which of them are open."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._rounds: dict[int, FedRound] = {}
        self._open: list[FedRound] = []

    def __iter__(self) -> Iterator[FedRound]:
        """The open ones: the present one, and the next where that is open ahead."""
        return iter(list(self._open))

    def get(self, r: int) -> FedRound | None:
        """A round of the newest `KEPT_COMMITS`, open or not; None where nothing was launched."""
        return self._rounds.get(r)

    def get_open(self, r: int) -> FedRound | None:
        return next((m for m in self._open if m.round == r), None)

    def begin(self, r: int) -> FedRound:
        """A round that is open at the replica."""
        mine = self._rounds.setdefault(r, FedRound(r))
        if mine not in self._open:
            mine.begin(asyncio.get_running_loop().time())
            self._open.append(mine)
            for old in [k for k in self._rounds if k <= r - KEPT_COMMITS]:
                del self._rounds[old]
        return mine

    async def end_others(self, r: int) -> list[FedRound]:
        """Ends what is in flight of rounds that are over where `r` is the present one, or whose
        beginning was taken back. Returns those that are over."""
        over = []
        for mine in [m for m in self._open if m.round not in (r, r + 1)]:
            self._open.remove(mine)
            await mine.flights.close()
            if mine.round < r:
                over.append(mine)
        return over

    async def end_all(self) -> None:
        """Ends what is in flight."""
        for mine in self._open:
            await mine.flights.close()
        self._open.clear()

    def kept(self) -> list[FedRound]:
        """The newest `KEPT_COMMITS`, open or not."""
        return list(self._rounds.values())

    def committed(self, question: CommittedRequest, asker: str) -> CommittedReply:
        """Those that count with `asker` on their path at the stage of the question, and those that
        may yet. Where the asker's round is closed, what is in flight is never committed."""
        mine = self._rounds.get(question.round)
        if mine is None:
            return CommittedReply(())
        counted, in_flight = [], []
        for the_id in question.microbatch_ids:
            path = mine.committed.get(the_id)
            if path is not None:
                if question.stage < len(path) and path[question.stage] == asker:
                    counted.append(the_id)
            elif the_id in mine.in_flight and question.is_over:
                if question.stage < self._num_stages:
                    mine.refuse(the_id, question.stage, asker)
            elif the_id in mine.in_flight:
                in_flight.append(the_id)
        return CommittedReply(tuple(counted), tuple(in_flight))

    def committed_by_id(self) -> dict[int, dict[int, tuple[str, ...]]]:
        """By round (the newest `KEPT_COMMITS`), the path of every microbatch that counts, by its
        id."""
        return {r: mine.committed for r, mine in self._rounds.items()}
