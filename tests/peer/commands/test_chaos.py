"""Harm on purpose: what may be asked for, and who may be harmed."""

from __future__ import annotations

import pytest

from peer.commands.chaos import may_lose, parse_chaos
from swarmnet.errors import UsageError
from swarmnet.protocol.membership.records import ACTIVE, JOINING, Record
from swarmnet.protocol.membership.view import View


def test_rates_are_per_second() -> None:
    assert parse_chaos("kill=6/min, stop=3/h") == {"kill": 0.1, "stop": 3 / 3600}


@pytest.mark.parametrize(
    "text", ["kill", "kill=x/min", "kill=1/day", "melt=1/s", "kill=1/s,kill=2/s"]
)
def test_what_is_no_rate_is_told_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError, match="kill=6/min"):
        parse_chaos(text)


def test_the_last_replica_of_a_stage_is_spared() -> None:
    view = View("observer")
    for name, stage, state in (
        ("a", 0, ACTIVE),
        ("b", 0, ACTIVE),
        ("c", 1, ACTIVE),
        ("d", 1, JOINING),
    ):
        view.merge(Record(name, "run", 1, 1, state=state, stage=stage), 0.0)
    assert [name for name in "abcd" if may_lose(view, name, 1.0)] == ["a", "b"]
    assert not may_lose(view, "nobody", 1.0)
