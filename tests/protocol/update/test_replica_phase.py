"""A replica's phase, through every order of what may happen to it.

`World` is a replica that only has names for parameters and gradients, with what drives it: it says
which events may come, carries commands out, and checks what the table has to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import pytest

from swarmnet.protocol.sync_modes import DELAYED, SyncPlan
from swarmnet.protocol.update.replica_phase import (
    ANSWERS,
    TABLE,
    Aim,
    AwaitDevice,
    Close,
    Command,
    Declared,
    DropAhead,
    Event,
    FinishRound,
    Flush,
    Give,
    Given,
    Heard,
    KeepBoth,
    Lose,
    NotInTable,
    Open,
    OpenAhead,
    OpenInPart,
    Phase,
    Promote,
    Refused,
    Row,
    State,
)

LAST_ROUND, MAX_MICROBATCHES, DEPTH = 2, 2, 14
PLAN = SyncPlan(DELAYED, rounds=100)
JOINING, FOLLOWING, SERVING, UPDATING = "joining", "following", "serving", "updating"
EVENTS: tuple[type[Event], ...] = (
    *(Aim, Open, OpenInPart, Declared, OpenAhead, Give, Given, Refused, Close, Flush, Lose),
)


class Broken(Exception):
    """What the table has to keep was not kept."""


def keep(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


@dataclass(frozen=True, slots=True)
class World:
    """A replica and what drives it."""

    phase: Phase = field(default_factory=lambda: Phase(State.FETCHING, 0))
    doing: str = JOINING
    is_known: bool = False
    """The others know that it serves."""
    is_asking_ahead: bool = False
    """The device has been asked to open the next round, and has other work before."""
    is_giving: bool = False
    gave: bool = False
    is_flushed: bool = False
    parameters: tuple[int, bool] | None = None
    """(round, whether its own exchange begins with them)"""
    gradient: frozenset[int] = frozenset()
    """Microbatches."""
    sealed: frozenset[int] | None = None
    """The gradient when the device had done all that it had when the round was closed."""
    ahead: tuple[int, frozenset[int]] | None = None
    """The next round, and its gradient."""
    running: tuple[int, int] | None = None
    """(round, microbatch) on its way through the device."""
    counted: tuple[int, ...] = ()
    """Microbatches that an update here, or another replica, counts."""
    num_microbatches: int = 0

    # ---- what may happen --------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """By what drives a replica, whatever the table says."""
        r = self.phase.round
        if self.doing == JOINING:
            rounds = range(max(0, r - 1), min(r + 1, LAST_ROUND) + 1)
            yield from (of(n) for n in rounds for of in (Aim, Open, OpenInPart))
            yield Close()
        elif self.doing == FOLLOWING:
            yield Open(r + 1)
            if not self.is_flushed:
                yield from (OpenInPart(r + 1), Flush())
            yield Lose()
        elif self.doing == SERVING and not self.is_known:
            yield Declared()
        elif self.doing == SERVING:
            if self.is_asking_ahead:  # what closes a round waits until that is ready
                yield OpenAhead()
            elif not self.is_giving:
                yield from (Close(), Lose())
            if self.is_giving:
                yield from (Given(), Refused())
            elif self.ahead is None and not self.gave and self.gradient and not self.running:
                yield Give()
        else:
            yield from (Open(r + 1), Lose())
            if self.ahead is None and not self.is_flushed:
                yield Flush()

    def next(self) -> Iterator[World]:
        """All worlds after one more thing has happened."""
        for event in self.events():
            if getattr(event, "round", 0) <= LAST_ROUND:
                yield self.after(event)
        phase, r = self.phase, self.phase.round
        if phase.may_open_ahead(r) and not self.is_asking_ahead and r < LAST_ROUND:
            yield replace(self, is_asking_ahead=True)
        if self.running is not None:
            yield self.done()
        elif self.num_microbatches < MAX_MICROBATCHES:
            for n in (r, r + 1):
                if phase.lets_in(n) and not phase.is_given(n):
                    yield self.begun(n)

    # ---- microbatches -----------------------------------------------------------------------

    def begun(self, r: int) -> World:
        keep(self.is_known, "a microbatch came before all knew of the replica")
        self.check_parameters(r)
        number = self.num_microbatches
        return replace(self, running=(r, number), num_microbatches=number + 1)

    def done(self) -> World:
        """The device comes to it: it adds to the gradient, or is refused."""
        assert self.running is not None
        r, number = self.running
        if not self.phase.takes(r):
            return replace(self, running=None)
        self.check_parameters(r)
        if r != self.phase.round:
            assert self.ahead is not None
            return replace(self, running=None, ahead=(r, self.ahead[1] | {number}))
        keep(self.sealed is None, "a closed gradient changed")
        keep(not self.gave and not self.is_giving, "a gradient changed that is another's")
        return replace(self, running=None, gradient=self.gradient | {number})

    def check_parameters(self, r: int) -> None:
        """They are those of the round, for what is done of it now."""
        if r == self.phase.round:
            keep(self.parameters == (r, False), "a microbatch met other parameters")
        else:
            keep(self.ahead is not None and self.ahead[0] == r, "a round without its parameters")

    # ---- events -----------------------------------------------------------------------------

    def after(self, event: Event) -> World:
        try:
            phase, command = self.phase.after(event)
        except NotInTable as e:
            raise Broken(f"{e}") from None
        world = self.settled(event)
        if isinstance(event, Open | OpenInPart | Flush):
            # What is done of a round ahead goes on; else the device must not be at work.
            wanted = FinishRound if self.ahead is None else Promote
            keep(isinstance(command, wanted), "parameters put aside stay there")
        world = replace(world.carried_out(command, event), phase=phase)
        return world.driven(event, is_awaited=command is not None)

    def settled(self, event: Event) -> World:
        """Who counts the gradient."""
        if isinstance(event, Given):
            return replace(self, counted=(*self.counted, *sorted(self.gradient)))
        is_update = self.doing == UPDATING and isinstance(event, Open)
        if not is_update:
            return self
        keep(self.sealed == self.gradient or self.is_flushed, "a gradient was not complete")
        if self.gave or self.is_flushed:
            return self
        return replace(self, counted=(*self.counted, *sorted(self.gradient)))

    def carried_out(self, command: Command | None, event: Event) -> World:
        if isinstance(command, AwaitDevice):
            keep(isinstance(event, Close | Lose), "there is nothing to wait for")
            keep(self.doing == SERVING, "there is nothing to wait for")
            return replace(self, sealed=self.gradient)
        if isinstance(command, KeepBoth):
            keep(self.ahead is None, "two rounds ahead")
            return replace(self, ahead=(command.round, frozenset()))
        if isinstance(command, DropAhead):
            keep(self.ahead is not None and self.ahead[0] == command.round, "nothing to drop")
            return replace(self, ahead=None)
        if command is None:
            return self
        keep(isinstance(event, Open | OpenInPart | Flush), "no parameters were put aside")
        if self.ahead is not None:
            keep(isinstance(event, Open), "the next round has begun with other parameters")
            n, gradient = self.ahead
            return replace(self, parameters=(n, False), gradient=gradient, ahead=None, sealed=None)
        is_flush = isinstance(event, Flush)
        counted = self.counted
        if is_flush and self.doing == UPDATING:  # it was copied, and is averaged after this
            keep(self.sealed == self.gradient, "a gradient was not complete")
            counted = counted if self.gave else (*counted, *sorted(self.gradient))
        keep(not is_flush or command.round == self.phase.round, "the wrong round")
        whole = None if isinstance(event, OpenInPart) else (command.round, is_flush)
        return replace(self, parameters=whole, gradient=frozenset(), sealed=None, counted=counted)

    def driven(self, event: Event, *, is_awaited: bool) -> World:
        """What drives it knows of the event; `is_awaited`: the device has come to its command."""
        if isinstance(event, Open):
            return replace(self, doing=SERVING, is_flushed=False, gave=False)
        if isinstance(event, OpenInPart):
            return replace(self, doing=JOINING)
        if isinstance(event, Close):
            return replace(self, doing=FOLLOWING if self.doing == JOINING else UPDATING)
        if isinstance(event, Flush):
            return replace(self, is_flushed=True)
        if isinstance(event, Declared):
            return replace(self, is_known=True)
        if isinstance(event, Give):
            return replace(self, is_giving=True)
        if isinstance(event, Given | Refused):
            return replace(self, is_giving=False, gave=isinstance(event, Given))
        if isinstance(event, OpenAhead):
            return replace(self, is_asking_ahead=False)
        if isinstance(event, Lose):
            keep(self.ahead is None, "a round ahead of what does not hold")
            is_still = self.doing != SERVING or is_awaited
            keep(is_still, "the device may add to what is fetched")
            return replace(
                *(self,),
                doing=JOINING,
                is_known=False,
                is_flushed=False,
                gave=False,
                parameters=None,
                gradient=frozenset(),
                sealed=None,
            )
        return self

    # ---- what always holds ------------------------------------------------------------------

    def check(self) -> None:
        phase, r = self.phase, self.phase.round
        is_whole = self.doing in (SERVING, UPDATING)
        keep(phase.is_whole == is_whole, "whole")
        if is_whole:
            keep(self.parameters == (r, self.is_flushed), "parameters of another round")
        keep(phase.takes(r) == phase.is_open(r) == (self.doing == SERVING), "takes")
        keep(phase.lets_in(r) == (self.doing == SERVING and self.is_known), "lets in")
        keep(phase.takes(r + 1) == phase.is_ahead == (self.ahead is not None), "takes ahead")
        keep(phase.newest_open == r + (self.ahead is not None), "newest open")
        keep(not phase.takes(r - 1) and not phase.takes(r + 2), "takes others")
        keep(phase.is_closed(r) == (self.doing in (FOLLOWING, UPDATING)), "closed")
        keep(phase.is_closed(r - 1) and not phase.is_closed(r + 1), "closed others")
        exchange = r if self.is_flushed else PLAN.parameter_version(r)
        keep(phase.exchange(PLAN) == exchange, "exchange")
        is_anothers = self.is_giving or (self.gave and self.doing == SERVING)
        keep(phase.is_given(r) == is_anothers, "given")
        is_own = self.doing == SERVING and self.is_known and not (is_anothers or self.ahead)
        keep(phase.may_give(r) == phase.may_open_ahead(r) == is_own, "may give, or open ahead")
        keep(len(set(self.counted)) == len(self.counted), "a microbatch counts twice")


def explore(depth: int = DEPTH) -> set[World]:
    """All worlds that come of at most so many things that happen one after the other."""
    seen = {World()}
    newest = list(seen)
    for _ in range(depth):
        coming = {after for world in newest for after in world.next()}
        newest = [world for world in coming if world not in seen]
        for world in newest:
            world.check()
        seen.update(newest)
    return seen


def test_every_order_of_what_may_happen_keeps_the_promises() -> None:
    seen = explore(depth=40)
    print(f"{len(seen)} worlds")
    assert {world.phase.state for world in seen} == set(State)
    assert any(len(world.counted) == MAX_MICROBATCHES for world in seen)
    assert any(world.ahead is not None and world.ahead[1] for world in seen)


def test_a_replica_comes_to_the_last_round_wherever_it_is() -> None:
    """Whatever happened, something can happen after which the next round is open."""
    seen = explore(depth=40)
    before: dict[World, list[World]] = {}
    for world in seen:
        for after in world.next():
            before.setdefault(after, []).append(world)
    reached = {w for w in seen if w.phase.state is State.OPEN and w.phase.round == LAST_ROUND}
    newest = list(reached)
    while newest:
        newest = [b for world in newest for b in before.get(world, ()) if b not in reached]
        reached.update(newest)
    assert reached == seen


def paths(phase: Phase, depth: int) -> Iterator[tuple[Phase, Event, Phase]]:
    """Every step of all sequences of events, whether anything would cause them or not."""
    if not depth:
        return
    for of in EVENTS:
        r = phase.round
        for event in [of(r), of(r + 1), of(r + 2)] if of in (Aim, Open, OpenInPart) else [of()]:
            try:
                after, _ = phase.after(event)
            except NotInTable:
                continue
            yield phase, event, after
            yield from paths(after, depth - 1)


@pytest.mark.parametrize("state", State)
def test_no_sequence_of_events_takes_a_round_up_again(state: State) -> None:
    for before, event, after in paths(Phase(state, 5), 5):
        if before.state is not State.FETCHING:
            assert after.round in (before.round, before.round + 1)
            assert after.round >= before.round
        if before.is_closed(before.round) and after.takes(before.round):
            raise AssertionError(f"{event} opened a closed round")
        if not before.takes(after.round) and after.takes(after.round):
            assert isinstance(event, Open)
        if before.state is State.GIVING and after.state is not State.GIVING:
            assert isinstance(event, Given | Refused)
            assert after.is_open(before.round)
        if before.is_ahead and not after.is_ahead:
            assert isinstance(event, Open | Lose)


@pytest.mark.parametrize("state", State)
def test_any_other_event_is_an_error(state: State) -> None:
    phase = Phase(state, 5)
    for of in EVENTS:
        if of not in TABLE[state]:
            event = of(6) if of in (Aim, Open, OpenInPart) else of()  # type: ignore[call-arg]
            with pytest.raises(NotInTable):
                phase.after(event)
        elif of is Open and state is not State.FETCHING:
            for wrong in (4, 5, 7):
                with pytest.raises(NotInTable):
                    phase.after(Open(wrong))


def test_what_others_calls_tell_is_of_the_present_round_only() -> None:
    phase = Phase(State.OPEN, 3)
    assert phase.hears(2, Heard.OVER) is phase
    assert phase.hears(4, Heard.OVER) is phase
    launched = phase.hears(3, Heard.LAUNCHED)
    assert launched.knows(3, Heard.LAUNCHED)
    assert not launched.knows(3, Heard.OVER)
    over = launched.hears(3, Heard.OVER)
    assert over.knows(3, Heard.LAUNCHED)
    assert over.knows(3, Heard.OVER)
    assert over.hears(3, Heard.LAUNCHED) is over
    closed, _ = over.after(Close())
    assert closed.knows(3, Heard.OVER)
    after, _ = closed.after(Open(4))
    assert after.heard is Heard.NOTHING
    assert after.knows(3, Heard.OVER)
    assert not after.knows(4, Heard.LAUNCHED)
    for state in (State.FETCHING, State.FOLLOWING, State.FOLLOWING_FLUSHED):
        newcomer = Phase(state, 3)
        assert newcomer.hears(3, Heard.OVER) is newcomer


# ---- the table, broken on purpose -----------------------------------------------------------

ROWS = [(state, of) for state, row in TABLE.items() for of in row]
COMMANDS = (None, AwaitDevice, FinishRound, Promote, KeepBoth, DropAhead)


def is_found() -> bool:
    try:
        explore()
    except Broken:
        return True
    return False


def named(row: tuple[State, type[Event]]) -> str:
    return f"{row[0].name}-{row[1].__name__}"


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_row_that_is_missing_or_leads_elsewhere_is_found(
    row: tuple[State, type[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, of = row
    right = TABLE[state][of]
    others: list[Row] = [Row(to, right.does) for to in State if to is not right.to]
    others += [Row(right.to, does) for does in COMMANDS if does is not right.does]
    unnoticed = []
    for wrong in others:
        monkeypatch.setitem(TABLE[state], of, wrong)
        if not is_found():
            unnoticed.append(wrong)
    monkeypatch.delitem(TABLE[state], of)
    assert is_found()
    assert unnoticed == []


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_a_wrong_answer_is_found(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ANSWERS[state]
    for answer in fields(right):
        wrong = replace(right, **{answer.name: not getattr(right, answer.name)})
        monkeypatch.setitem(ANSWERS, state, wrong)
        assert is_found(), answer.name
