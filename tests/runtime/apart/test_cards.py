"""Ranks or seats where nobody says: by what was measured, in one line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from swarmnet.runtime.apart import cards
from swarmnet.runtime.apart.cards import Layer, Measured, measure, seats_instead, settle, told_part
from tests.runtime.apart.test_seat_devices import cards as have_cards
from tests.runtime.apart.test_seat_devices import options
from tests.training.specs import small_spec

# A layer of 4,096 by 4,096 in bf16, four samples of 2,048 tokens; a card of 100 TFLOP/s.
LAYER = Layer(flops=2 * 8192 * 200e6, numbers=8192 * 4096)
NVLINK, PCIE, SLOW = 300e9, 12e9, 1e9


def test_what_ranks_take_to_tell_each_other() -> None:
    fast, slow = (told_part(LAYER, 2, Measured(rate, 100e12, 2)) for rate in (NVLINK, PCIE))
    assert fast == pytest.approx(0.00089 / (0.00089 + 0.04915), rel=0.01)
    assert slow == pytest.approx(0.02237 / (0.02237 + 0.04915), rel=0.01)
    more = [told_part(LAYER, n, Measured(PCIE, 100e12, 2)) for n in (2, 4, 8)]
    assert more == sorted(more)
    assert told_part(LAYER, 2, Measured(PCIE, 200e12, 2)) > slow
    assert told_part(LAYER, 2, Measured(PCIE, 100e12, 4)) > slow


@pytest.mark.parametrize(
    ("num_cards", "num_stages", "num_ranks", "told", "expected"),
    [
        (2, 4, 2, 0.02, 0),
        (2, 4, 2, 0.31, 2),
        (2, 1, 2, 0.90, 0),
        (8, 2, 8, 0.31, 0),
        (8, 2, 8, 0.90, 2),
        (4, 8, 4, 0.31, 4),
        (4, 4, 1, 0.0, 4),
        (2, 4, 2, 0.2, 0),
    ],
    ids=["fast", "slow", "one stage", "few stages", "slower", "four", "not cut", "alike"],
)
def test_seats_are_taken_where_they_do_more(
    num_cards: int, num_stages: int, num_ranks: int, told: float, expected: int
) -> None:
    assert seats_instead(num_cards, num_stages, num_ranks, told) == expected


def chosen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    num_cards: int = 2,
    num_stages: int = 4,
    **given: Any,
) -> tuple[str, int]:
    """Its stages, and how often two cards were measured."""
    have_cards(monkeypatch, num_cards, given.pop("kind", "cuda"))
    asked = []

    def found(*devices: str) -> Measured:
        asked.append(devices)
        if not rate:
            raise ValueError("nothing")
        return Measured(rate, 1e9, 4)

    monkeypatch.setattr(cards, "measure", found)
    spec = small_spec(pipeline={"num_stages": num_stages})
    return settle(spec, options(tmp_path, **given)).stages, len(asked)


def test_a_machine_chooses_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(tmp_path, monkeypatch, 1e12) == ("", 1)
        assert chosen(tmp_path, monkeypatch, 1e5) == ("2", 1)
        assert chosen(tmp_path, monkeypatch, 0) == ("", 1)
        assert chosen(tmp_path, monkeypatch, 1e12, num_cards=3) == ("3", 1), (
            "of three, two are ranks"
        )
    fast, slow, unknown, three = (record.getMessage() for record in caplog.records)
    assert fast.startswith("2 GPUs: 1 TB a second between two, for which 2 ranks wait 0%: 2 ranks")
    assert fast.endswith("--stages N takes stages")
    assert "100 KB a second" in slow
    assert slow.endswith("2 stages, each on its own; --tp 2 takes ranks")
    assert "was not measured (ValueError): 2 ranks" in unknown
    assert "3 stages, each on its own; --tp 2" in three


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 2},
        {"cp": 2},
        {"ep": 2},
        {"local": "fsdp"},
        {"sequence_parallel": True},
        {"stages": "auto"},
        {"stages": "1"},
        {"stage": 1},
        {"optimizer_memory": "device"},
        {"weights_memory": "host"},
        {"device": "cpu"},
        {"kind": "xpu"},
        {"num_cards": 1},
        {"num_stages": 1},
    ],
    ids=str,
)
def test_nothing_is_measured_where_somebody_has_chosen(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(tmp_path, monkeypatch, 1e5, **given) == (given.get("stages", ""), 0)


def test_two_devices_are_measured_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "PATIENCE_S", 900.0)  # of a machine with other work
    found = measure("cpu", "cpu", "bf16")
    assert found.number_bytes == 2
    assert 1e6 < found.copied_per_s < 1e13
    assert 1e6 < found.flops_per_s < 1e17


def test_what_is_not_there_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    have_cards(monkeypatch, 2)
    monkeypatch.setattr(cards, "PROGRAM", "swarmnet.runtime.apart.no_program")
    with caplog.at_level(logging.WARNING):
        assert settle(small_spec(), options(tmp_path)).stages == ""
    assert "was not measured (CalledProcessError)" in caplog.text
