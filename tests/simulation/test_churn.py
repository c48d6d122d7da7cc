"""Churn: Poisson events and traces."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from swarmnet.errors import DataError
from swarmnet.simulation.churn import (
    CRASH,
    JOIN,
    STALL,
    ChurnEvent,
    ChurnRates,
    poisson,
    read_trace,
)


def test_events_come_at_their_rates_and_in_order() -> None:
    rates = ChurnRates(join=60.0, crash=30.0, stall=6.0)
    events = poisson(rates, 36_000.0, random.Random(1))
    assert [e.at_s for e in events] == sorted(e.at_s for e in events)
    count = {a: sum(e.action == a for e in events) for a in (JOIN, CRASH, STALL)}
    assert count[JOIN] == pytest.approx(600, rel=0.15)
    assert count[CRASH] == pytest.approx(300, rel=0.2)
    assert count[STALL] == pytest.approx(60, rel=0.4)
    assert all(e.duration_s > 0 for e in events if e.action == STALL)


def test_the_same_seed_gives_the_same_events() -> None:
    rates = ChurnRates.replacing(400, 0.3)
    a, b = (poisson(rates, 3600.0, random.Random(5)) for _ in range(2))
    assert a == b
    assert poisson(rates, 3600.0, random.Random(6)) != a


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    events = [ChurnEvent(1.0, JOIN), ChurnEvent(2.5, STALL, "peer-0001", 3.0)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(asdict(e)) + "\n" for e in events))
    assert read_trace(path) == events


@pytest.mark.parametrize("line", ["{", '{"at_s": 1, "action": "explode"}', '{"at_s": 1}', "[]"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 0.5, "action": "join"}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_trace(path)


def test_a_missing_trace_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path / "none")
