"""The microbatches that are in a replica's gradient buffer, or are about to be.

An entry's life::

    begin -> RUNNING -- done --> PENDING -- commit --> COMMITTED -- finish_round --> gone
                |                   |                      |
                +-- failed          +------ retracted -----+
                    (gone)                  (gone)

A commit may arrive before the work is recorded as done (the caller has its gradient before the
callee's own bookkeeping ran). It is remembered, and `done` then leads straight to COMMITTED.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnet.errors import Busy
from swarmnet.protocol.slots import slot_of

StepKey = tuple[int, int]
"""(round, microbatch id)"""

RUNNING = "running"
PENDING = "pending"
COMMITTED = "committed"

MAX_ENTRIES = 65_536
"""Entries of all rounds together; `begin` raises `Busy` beyond."""


@dataclass(slots=True)
class Entry:
    """One microbatch at one replica of one stage."""

    key: StepKey
    feeder: str
    num_samples: int
    callers: list[str] = field(default_factory=list)
    """Peers that asked for it, in order of asking."""
    state: str = RUNNING
    num_tokens: int = 0
    next_peer: str | None = None
    """The peer of the next stage that got it; None at the last stage, and while that is open."""
    commit_seen: bool = False

    @property
    def caller(self) -> str:
        """The peer that asked for it last."""
        return self.callers[-1]

    def add_caller(self, peer_id: str) -> None:
        """A peer asked for it; it is the last caller now."""
        if peer_id in self.callers:
            self.callers.remove(peer_id)
        self.callers.append(peer_id)


class Ledger:
    """The entries of one served stage, by round and microbatch id."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[int, Entry]] = {}
        self._num_entries = 0
        self._num_finished = 0
        """Samples that counted, in rounds that are finished; as `take_finished`."""

    def __len__(self) -> int:
        return self._num_entries

    def begin(self, key: StepKey, *, caller: str, feeder: str, num_samples: int) -> Entry:
        """Work on a microbatch that is not here yet begins. Raises `Busy` when full."""
        entries = self._rounds.setdefault(key[0], {})
        assert key[1] not in entries, f"microbatch {key} began twice"
        if self._num_entries >= MAX_ENTRIES:
            raise Busy("the ledger is full")
        entry = Entry(key, feeder, num_samples, [caller])
        entries[key[1]] = entry
        self._num_entries += 1
        return entry

    def get(self, key: StepKey) -> Entry | None:
        """The entry of a microbatch; None where it is unknown here."""
        return self._rounds.get(key[0], {}).get(key[1])

    def other_flights(self, key: StepKey) -> list[Entry]:
        """All other flights of the same slot, oldest first."""
        slot = slot_of(key[1])
        entries = self._rounds.get(key[0], {}).items()
        return [entry for other, entry in entries if other != key[1] and slot_of(other) == slot]

    def open_of(self, caller: str) -> list[StepKey]:
        """Microbatches that a peer asked for and that do not count yet, of all rounds."""
        return [
            entry.key
            for entries in self._rounds.values()
            for entry in entries.values()
            if entry.state != COMMITTED and caller in entry.callers
        ]

    def done(self, key: StepKey, *, num_tokens: int, next_peer: str | None) -> None:
        """The gradient is in the buffer. Ignored where the entry is gone (the round is over)."""
        entry = self.get(key)
        if entry is None:
            return
        assert entry.state == RUNNING, f"microbatch {key} ended twice"
        entry.num_tokens = num_tokens
        entry.next_peer = next_peer
        entry.state = COMMITTED if entry.commit_seen else PENDING

    def failed(self, key: StepKey) -> None:
        """The work failed; nothing of it is in the buffer."""
        entry = self.get(key)
        assert entry is None or entry.state == RUNNING, f"microbatch {key} failed after its end"
        self._remove(key)

    def commit(self, key: StepKey) -> Entry | None:
        """The feeder counts the microbatch. Idempotent; None where it is unknown here."""
        entry = self.get(key)
        if entry is None:
            return None
        entry.commit_seen = True
        if entry.state == PENDING:
            entry.state = COMMITTED
        return entry

    def retracted(self, key: StepKey) -> None:
        """The gradient was subtracted from the buffer; the microbatch may begin anew."""
        entry = self.get(key)
        assert entry is None or entry.state != RUNNING, f"microbatch {key} retracted while running"
        self._remove(key)

    def running(self, round_index: int) -> list[Entry]:
        """Begun and not done, oldest first."""
        return self._in_state(round_index, RUNNING)

    def pending(self, round_index: int) -> list[Entry]:
        """Done and not committed, oldest first."""
        return self._in_state(round_index, PENDING)

    def committed(self, round_index: int) -> list[Entry]:
        """Done and committed, oldest first."""
        return self._in_state(round_index, COMMITTED)

    def num_tokens(self, round_index: int) -> int:
        """Tokens whose gradient is in the buffer now."""
        return sum(e.num_tokens for e in self._buffered(round_index))

    def num_samples(self, round_index: int) -> int:
        """Samples whose gradient is in the buffer now."""
        return sum(e.num_samples for e in self._buffered(round_index))

    def take(self, round_index: int) -> dict[int, Entry]:
        """Removes and returns the entries of a round: another replica counts them now."""
        entries = self._rounds.pop(round_index, {})
        self._num_entries -= len(entries)
        return entries

    def put_back(self, round_index: int, entries: dict[int, Entry]) -> None:
        """The reverse of `take`: no other replica counts them after all."""
        self._rounds.setdefault(round_index, {}).update(entries)
        self._num_entries += len(entries)

    def finish_round(self, round_index: int) -> None:
        """Drops all entries of this round and of those before it."""
        for index in [r for r in self._rounds if r <= round_index]:
            ended = self._rounds.pop(index).values()
            self._num_entries -= len(ended)
            self._num_finished += sum(e.num_samples for e in ended if e.state == COMMITTED)

    def take_finished(self) -> int:
        """Samples that this replica computed and that counted, in rounds that finished since this
        was asked last."""
        taken, self._num_finished = self._num_finished, 0
        return taken

    def drop_round(self, round_index: int) -> None:
        """Drops the entries of a round."""
        self._num_entries -= len(self._rounds.pop(round_index, {}))

    def _in_state(self, round_index: int, state: str) -> list[Entry]:
        return [e for e in self._rounds.get(round_index, {}).values() if e.state == state]

    def _buffered(self, round_index: int) -> list[Entry]:
        return [e for e in self._rounds.get(round_index, {}).values() if e.state != RUNNING]

    def _remove(self, key: StepKey) -> None:
        if self._rounds.get(key[0], {}).pop(key[1], None) is not None:
            self._num_entries -= 1
