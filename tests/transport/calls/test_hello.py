"""Hellos: what they say, what is taken of them, and what a person reads of two that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnet.errors import ProtocolViolation
from swarmnet.transport.base import FEATURES, PROTOCOL_VERSIONS
from swarmnet.transport.calls.hello import (
    MAX_FEATURE_CHARS,
    MAX_FEATURES,
    MAX_VERSION,
    Greeting,
    Versions,
    features_of,
    hello_head,
    mismatch,
    offer,
    run_of,
    versions_of,
)
from swarmnet.transport.frames import HELLO, NOTIFY, Head, parse_head
from swarmnet.wire import pack

OLD = {"v": 1, "r": "", "g": "swarmnet/0.1.0"}
"""The hello of swarmnet 0.1."""


def travelled(values: dict[str, Any]) -> Head:
    return parse_head(HELLO, 0, pack(values))


def test_a_hello_says_what_its_program_offers() -> None:
    ours = offer((2, 4), ("beta", "alpha"))
    values = hello_head(ours, "run", "x/1")
    assert values == {"v": 4, "l": 2, "h": 4, "f": ["alpha", "beta"], "r": "run", "g": "x/1"}
    head = travelled(values)
    assert versions_of(head) == Versions(2, 4)
    assert features_of(head) == {"alpha", "beta"}
    assert run_of(head) == "run"


def test_this_program_offers_what_the_port_names() -> None:
    head = travelled(hello_head(offer(), "", ""))
    assert versions_of(head) == Versions(*PROTOCOL_VERSIONS)
    assert features_of(head) == frozenset(FEATURES)


def test_the_hello_of_an_old_peer_is_one_of_one_version_without_features() -> None:
    head = travelled(OLD)
    assert versions_of(head) == Versions(1, 1)
    assert features_of(head) == frozenset()


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        ((2, 2), (2, 2), 2),
        ((2, 4), (3, 7), 4),
        ((3, 7), (2, 4), 4),
        ((1, 9), (4, 5), 5),
        ((2, 3), (3, 4), 3),
        ((2, 2), (1, 1), None),
        ((1, 2), (3, 4), None),
    ],
)
def test_two_peers_use_the_highest_version_that_both_speak(
    ours: tuple[int, int], theirs: tuple[int, int], common: int | None
) -> None:
    assert Versions(*ours).common(Versions(*theirs)) == common
    assert Versions(*theirs).common(Versions(*ours)) == common


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"v": None},
        {"v": "2"},
        {"v": True},
        {"v": 2.0},
        {"v": 0},
        {"v": -1},
        {"v": MAX_VERSION + 1},
        {"v": 2, "l": None},
        {"v": 2, "l": 0, "h": 2},
        {"v": 2, "l": 2, "h": MAX_VERSION + 1},
        {"v": 2, "l": 3, "h": 2},
        {"v": 2, "l": 3, "h": 4},
        {"v": 5, "l": 3, "h": 4},
        {"v": 2, "l": [2], "h": 2},
        {"l": 2, "h": 2},
    ],
)
def test_versions_that_are_none(values: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation):
        versions_of(travelled(values))


MOST = [f"{n:0{MAX_FEATURE_CHARS}}" for n in range(MAX_FEATURES)]


@pytest.mark.parametrize("said", [[], ["a"], ["a", "a"], ["x-y_z.2 !"], MOST])
def test_features_in_bounds_are_taken(said: list[str]) -> None:
    assert features_of(travelled({"f": said})) == set(said)
    assert offer(features=said).features == set(said)


@pytest.mark.parametrize(
    "said",
    [
        None,
        "a",
        {"a": 1},
        7,
        ["a", 7],
        [b"a"],
        [""],
        ["a\n"],
        ["\x1b[2J"],
        ["é"],
        [["a"]],
        ["x" * (MAX_FEATURE_CHARS + 1)],
        [*MOST, "one more"],
        ["a"] * (MAX_FEATURES + 1),
    ],
)
def test_features_that_are_none(said: object) -> None:
    with pytest.raises(ProtocolViolation):
        features_of(travelled({"f": said}))


@pytest.mark.parametrize("said", [[""], ["a\n"], ["x" * (MAX_FEATURE_CHARS + 1)], [*MOST, "more"]])
def test_features_that_no_peer_would_take_are_not_offered(said: list[str]) -> None:
    with pytest.raises(ValueError, match="features that cannot be said"):
        offer(features=said)


@pytest.mark.parametrize("run_id", [None, 7, "x" * 501])
def test_a_run_that_is_none(run_id: object) -> None:
    with pytest.raises(ProtocolViolation):
        run_of(travelled({"r": run_id}))


@pytest.mark.parametrize(
    ("theirs", "ours", "agent", "line"),
    [
        (
            (1, 1),
            (2, 2),
            "swarmnet/0.1.0",
            "protocol 1 (swarmnet/0.1.0); this program speaks 2: update the peer, it is older",
        ),
        (
            (3, 5),
            (2, 2),
            "",
            "protocol 3 to 5; this program speaks 2: update this program, it is older",
        ),
        (
            (2, 2),
            (3, 4),
            "x" * 99,
            f"protocol 2 ({'x' * 32}); this program speaks 3 to 4: update the peer, it is older",
        ),
        (
            (1, 1),
            (2, 2),
            "two\nlines",
            "protocol 1; this program speaks 2: update the peer, it is older",
        ),
        ((1, 1), (2, 2), ["x"], "protocol 1; this program speaks 2: update the peer, it is older"),
    ],
)
def test_one_line_names_both_sides_and_which_is_to_be_updated(
    theirs: tuple[int, int], ours: tuple[int, int], agent: object, line: str
) -> None:
    said = mismatch("12D3KooWabcdefgh", Versions(*theirs), Versions(*ours), agent)
    assert said == f"abcdefgh speaks {line}"


# ---- what the peer may send ---------------------------------------------------------------------


def greeting() -> Greeting:
    return Greeting("peer", offer((2, 4), ("a", "b")))


def note() -> Head:
    return parse_head(NOTIFY, 0, pack({"m": "gossip", "b": None}))


def test_nothing_comes_before_the_hello() -> None:
    waits = greeting()
    waits.expects(HELLO)
    with pytest.raises(ProtocolViolation, match="no hello"):
        waits.expects(NOTIFY)
    assert (waits.is_done, waits.version, waits.features) == (False, 0, frozenset())
    assert not waits.admits(travelled(hello_head(offer((3, 9), ("b", "c")), "run", "")))
    waits.expects(NOTIFY)
    assert waits.admits(note())
    assert (waits.is_done, waits.version, waits.features) == (True, 4, {"b"})


def test_a_later_hello_may_name_another_run_and_nothing_else() -> None:
    heard, theirs = greeting(), offer((3, 9), ("b", "c"))
    for run_id in ("", "run"):
        heard.admits(travelled(hello_head(theirs, run_id, "")))
        assert heard.run_id == run_id
    for other in (offer((3, 8), ("b", "c")), offer((3, 9), ("b",)), offer((7, 9), ("b", "c"))):
        with pytest.raises(ProtocolViolation, match="that change"):
            heard.admits(travelled(hello_head(other, "run", "")))
    assert (heard.run_id, heard.mismatch) == ("run", "")


def test_of_a_peer_of_another_version_nothing_more_is_taken() -> None:
    parts = greeting()
    assert not parts.admits(travelled(OLD))
    assert parts.is_done
    assert "it is older" in parts.mismatch
    assert not parts.admits(note())
    assert not parts.admits(travelled(hello_head(offer((3, 9)), "run", "")))
    assert (parts.version, parts.run_id) == (0, "")
