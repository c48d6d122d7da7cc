from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarmnet.errors import Busy
from swarmnet.protocol.pipeline import ledger as ledger_module
from swarmnet.protocol.pipeline.ledger import COMMITTED, PENDING, RUNNING, Ledger

KEY = (3, 77)


def begun(key: tuple[int, int] = KEY) -> Ledger:
    ledger = Ledger()
    ledger.begin(key, caller="c", feeder="f", num_samples=4)
    return ledger


def test_the_usual_life() -> None:
    ledger = begun()
    assert [e.key for e in ledger.running(3)] == [KEY]
    assert ledger.num_samples(3) == 0
    ledger.done(KEY, num_tokens=100, next_peer="n")
    assert [e.next_peer for e in ledger.pending(3)] == ["n"]
    assert (ledger.num_samples(3), ledger.num_tokens(3)) == (4, 100)
    entry = ledger.commit(KEY)
    assert entry is ledger.commit(KEY)
    assert entry is not None
    assert entry.state == COMMITTED
    assert ledger.pending(3) == []
    assert (ledger.num_samples(3), ledger.num_tokens(3)) == (4, 100)
    ledger.finish_round(3)
    assert ledger.get(KEY) is None
    assert len(ledger) == 0
    assert [ledger.take_finished(), ledger.take_finished()] == [4, 0], "they are said once"


def test_flights_of_a_caller_are_open_until_they_count() -> None:
    ledger = begun()
    ledger.begin((4, 78), caller="x", feeder="f", num_samples=4)
    assert [ledger.open_of(p) for p in ("c", "x", "f")] == [[KEY], [(4, 78)], []]
    ledger.done(KEY, num_tokens=100, next_peer=None)
    assert ledger.open_of("c") == [KEY], "done, and it may be in vain"
    ledger.commit(KEY)
    ledger.failed((4, 78))
    assert [ledger.open_of(p) for p in ("c", "x")] == [[], []]


def test_a_commit_may_overtake_the_end() -> None:
    ledger = begun()
    entry = ledger.commit(KEY)
    assert entry is not None
    assert entry.state == RUNNING
    ledger.done(KEY, num_tokens=10, next_peer=None)
    assert entry.state == COMMITTED
    assert ledger.pending(3) == []


def test_what_failed_or_was_retracted_may_begin_again() -> None:
    ledger = begun()
    ledger.failed(KEY)
    assert ledger.get(KEY) is None
    ledger.begin(KEY, caller="c2", feeder="f", num_samples=4)
    ledger.done(KEY, num_tokens=10, next_peer=None)
    ledger.retracted(KEY)
    assert ledger.num_tokens(3) == 0
    assert ledger.commit(KEY) is None
    ledger.begin(KEY, caller="c3", feeder="f", num_samples=4)
    assert len(ledger) == 1


def test_callers_are_remembered_in_order() -> None:
    ledger = begun()
    entry = ledger.get(KEY)
    assert entry is not None
    entry.add_caller("d")
    entry.add_caller("c")
    assert entry.callers == ["d", "c"]
    assert entry.caller == "c"


def test_a_second_begin_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="twice"):
        begun().begin(KEY, caller="c", feeder="f", num_samples=4)


def test_the_ledger_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ENTRIES", 1)
    ledger = begun()
    with pytest.raises(Busy):
        ledger.begin((3, 78), caller="c", feeder="f", num_samples=4)


class LedgerMachine(RuleBasedStateMachine):
    """Against a model: two dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.states: dict[tuple[int, int], str] = {}
        self.early: set[tuple[int, int]] = set()

    keys = st.tuples(st.integers(0, 2), st.integers(0, 3))

    @rule(key=keys)
    def begin(self, key: tuple[int, int]) -> None:
        if key not in self.states:
            self.ledger.begin(key, caller="c", feeder="f", num_samples=2)
            self.states[key] = RUNNING

    @rule(key=keys)
    def done(self, key: tuple[int, int]) -> None:
        if self.states.get(key) == RUNNING:
            self.ledger.done(key, num_tokens=5, next_peer=None)
            self.states[key] = COMMITTED if key in self.early else PENDING

    @rule(key=keys)
    def commit(self, key: tuple[int, int]) -> None:
        assert (self.ledger.commit(key) is None) == (key not in self.states)
        if self.states.get(key) == RUNNING:
            self.early.add(key)
        elif key in self.states:
            self.states[key] = COMMITTED

    @rule(key=keys)
    def undo(self, key: tuple[int, int]) -> None:
        state = self.states.pop(key, None)
        self.early.discard(key)
        (self.ledger.failed if state == RUNNING else self.ledger.retracted)(key)

    @precondition(lambda self: self.states)
    @rule(round_index=st.integers(0, 2))
    def finish_round(self, round_index: int) -> None:
        self.ledger.finish_round(round_index)
        self.states = {k: s for k, s in self.states.items() if k[0] > round_index}
        self.early = {k for k in self.early if k[0] > round_index}

    @invariant()
    def agrees(self) -> None:
        assert len(self.ledger) == len(self.states)
        for r in range(3):
            found = {
                RUNNING: self.ledger.running(r),
                PENDING: self.ledger.pending(r),
                COMMITTED: self.ledger.committed(r),
            }
            assert {e.key: s for s, es in found.items() for e in es} == {
                k: s for k, s in self.states.items() if k[0] == r
            }
            num_buffered = sum(k[0] == r and s != RUNNING for k, s in self.states.items())
            assert self.ledger.num_samples(r) == 2 * num_buffered
            assert self.ledger.num_tokens(r) == 5 * num_buffered


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
