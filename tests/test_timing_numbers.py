"""The numbers that time rests on become fewer: `tests/timing_numbers.py` says which they are."""

from __future__ import annotations

import re

import pytest

from tests.timing_numbers import ROOT, TimingNumber, docstring_of, sources_now, timing_numbers

AT_653D1BD = 221
"""What `python -m tests.timing_numbers --at 653d1bd` prints; half of it is where this leads."""
MOST = 86
"""It goes down. Only a new subject adds to it: `protocol/generation.py`, 3; the background of an
uplink, `protocol/leftovers.py`, 2; which of two ways to a peer is faster, `protocol/upgrade.py`,
2; the link inside a house, as plans assume it, `protocol/planning/houses.py`, 2; who owes the
result of a shard, `swarm/update/exchange/exchange.py`, 1; how long who held a round up rests,
`protocol/pipeline/contests.py`, 1."""


def counted(text: str) -> list[str]:
    return [x.text for x in timing_numbers({"swarmnet/swarm/module.py": text})]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("LOOK_S, MAX_LOOK_S = 0.5, 5.0", ["0.5", "5.0"]),
        ("RETRY_S, MAX_BYTES = 0.5, 64", ["0.5"]),
        ("DAY_S = 24 * 3600.0", ["24 * 3600.0"]),
        ("A_S = 1.0\nB_S = 2 * A_S + 4.0", ["1.0", "2", "4.0"]),
        ("class Limits:\n    route_wait_s: float = 30.0\n    max_queue: int = 3", ["30.0"]),
        ("class Limits:\n    max_attempts: int = 64", ["64"]),
        ("async def f(peer, timeout_s=10.0): await call(peer, timeout_s=2 * timeout_s)", None),
        ("async def f(): await asyncio.sleep(0.2)", ["0.2"]),
        ("async def f(): await wait_for(answer(3), 5)", ["5"]),
        ("async def f(changed): await changed.until(lambda: True, 5)", ["5"]),
        ("def f(loop): loop.call_later(0.5, f, 3)", ["0.5"]),
        ("async def f(loop):\n    async with timeout_at(loop.time() + 7): pass", ["7"]),
        ("def f(now, since): return now - since > 9", ["9"]),
        ("PART = 0.25\ndef f(takes_s): return max(PART * takes_s, 0.0)", ["0.25"]),
        ("GROWTH = 1.5", ["1.5"]),
        ("MAX = 8\nasync def f():\n    for _ in range(MAX): await g()", ["8"]),
        ("MAX = 8\ndef f():\n    for _ in range(MAX): g()", []),
        ("def wait_s(size): return 3 * size", ["3"]),
        ("CALLS_PER_S, MAX_IDS = 20.0, 100\ndef f(rate): return 2 * rate / 8", []),
        ("class Row:\n    round_s: float = 0.0\ndef ms(round_s): return 1e3 * round_s", []),
    ],
)
def test_numbers_are_found_wherever_they_are_written(text: str, numbers: list[str] | None) -> None:
    assert counted(text) == (["10.0", "2"] if numbers is None else numbers)


def test_a_factor_of_another_module_is_counted_where_it_is_defined() -> None:
    numbers = timing_numbers(
        {
            "swarmnet/protocol/pace.py": "SLACK = 3.0\nOTHER = 2.0",
            "swarmnet/swarm/call.py": "from swarmnet.protocol.pace import SLACK\n"
            "def f(takes_s): return SLACK * takes_s",
        }
    )
    assert [(x.path, x.text) for x in numbers] == [("swarmnet/protocol/pace.py", "3.0")]


def test_there_are_not_more_than_before() -> None:
    numbers = timing_numbers(sources_now())
    assert len(numbers) <= MOST, "python -m tests.timing_numbers --list"


UNTOLD = "swarmnet/swarm/update/", "swarmnet/swarm/replica/", "swarmnet/protocol/update/"
"""Folders whose numbers do not all say yet which test fails without them."""


def unsaid(sources: dict[str, str]) -> list[TimingNumber]:
    """Numbers whose docstring names no test, or one that is not there."""
    found = []
    for number in timing_numbers(sources):
        tests = re.findall(r"tests/[\w/]+\.py", docstring_of(number, sources[number.path]))
        if not tests or not all((ROOT / test).exists() for test in tests):
            found.append(number)
    return found


def test_each_number_names_the_test_that_fails_without_it() -> None:
    found = unsaid(sources_now())
    assert not [x for x in found if not x.path.startswith(UNTOLD)]


@pytest.mark.parametrize(
    ("text", "is_said"),
    [
        ('A_S = 1.0\n"""It protects (tests/test_timing_numbers.py)."""', True),
        ('class Limits:\n    a_s: float = 1.0\n    """(tests/test_timing_numbers.py)"""', True),
        ('A_S = 1.0\n"""It protects (tests/test_that_is_not_there.py)."""', False),
        ('A_S = 1.0\n"""It protects."""', False),
        ("A_S = 1.0", False),
        ("async def f(): await asyncio.sleep(0.2)", False),
    ],
)
def test_a_number_without_a_test_is_found(text: str, is_said: bool) -> None:
    assert bool(unsaid({"swarmnet/swarm/module.py": text})) is not is_said
