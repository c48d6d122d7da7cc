"""Who is asked for the run's data, and as long as few have them."""

from __future__ import annotations

from swarmnet.protocol.membership.data_holders import (
    ENOUGH_HOLDERS,
    Givers,
    are_few,
    in_order,
    only_holder,
)
from swarmnet.protocol.membership.view import View
from tests.protocol.making import record


def view_of(num_holders: int) -> View:
    view = View("me")
    view.merge(record("me"), 0.0)
    for i in range(num_holders):
        view.merge(record(f"p-{i}", has_data=True, serves_data=i != 1), 0.0)
    return view


def test_those_are_asked_that_give_the_data_while_few_have_them() -> None:
    givers = Givers()
    few, enough = view_of(3), view_of(ENOUGH_HOLDERS)
    assert are_few(few, 0.0)
    assert givers.to_ask(few, 0.0, at_once=False) == ["p-0", "p-2"]
    assert not are_few(enough, 0.0)
    assert givers.to_ask(enough, 0.0, at_once=False) == []
    assert givers.to_ask(enough, 0.0, at_once=True) == ["p-0", "p-2", "p-3"]


def test_one_that_gave_nothing_is_asked_later_and_one_that_lied_never() -> None:
    givers, view = Givers(), view_of(3)
    givers.gave_nothing("p-0", 0.0, 5.0)
    givers.lied("p-2")
    assert givers.to_ask(view, 4.0, at_once=True) == []
    assert givers.to_ask(view, 5.0, at_once=True) == ["p-0"]


def test_the_only_holder_is_known() -> None:
    assert only_holder(view_of(2).live(0.0)) is None
    only = only_holder(view_of(1).live(0.0))
    assert only is not None
    assert only.peer_id == "p-0"


def test_what_most_say_is_believed_first_and_then_the_smallest() -> None:
    claims = {"right": 100, "huge": 10**9, "small": 1}
    said = {"a": "huge", "b": "right", "c": "right", "d": "small"}
    assert in_order(claims, said) == ["right", "small", "huge"]
    assert in_order({"huge": 10**9, "right": 100}, {"a": "huge", "b": "right"})[0] == "right"
