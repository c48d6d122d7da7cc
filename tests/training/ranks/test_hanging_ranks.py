"""A rank that hangs ends its peer with one line, long before a collective does; one that computes
for as long does not. With real processes, on gloo."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from swarmnet.training.ranks import local_group
from swarmnet.training.ranks.local_group import COLLECTIVE_TIMEOUT_S, LocalGroup, RankLost
from swarmnet.training.ranks.rank_stage import LeadStage
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage
from tests.training.ranks.hanging_rank import BUSY_S, HARMS, WORK, add_up
from tests.training.ranks.test_tensor_parallel import ranks, tokens
from tests.training.specs import small_spec

SILENCE_S = 5.0
"""In place of 20 s."""
LIMIT_S = COLLECTIVE_TIMEOUT_S / 2
"""A machine may be busy."""
AT_HARM = (
    r"none has worked for 5 s; rank 0 at add_up \(.*\), "
    r"rank 1 \(pid \d+\) at harm \(hanging_rank\.py:\d+\)"
)
HOW = {
    "killed": r"rank 1 \(pid \d+\) ended with SIGKILL",
    "stopped": r"rank 1 \(pid \d+\) gave no sign of life for 5 s",
    "interpreter": r"rank 1 \(pid \d+\) gave no sign of life for 5 s",
    "library": AT_HARM,
    "lock": AT_HARM,
    "order": AT_HARM,
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_group, "PROGRAM", "tests.training.ranks.hanging_rank")


def lose(group: LocalGroup, call: Callable[[], object]) -> str:
    """Why the ranks are lost, in a call that a thread makes."""
    began = time.monotonic()
    thread = threading.Thread(target=lambda: ended.append(attempt(call)), daemon=True)
    ended: list[Exception | None] = []
    thread.start()
    with pytest.raises(RankLost) as lost:
        asyncio.run(asyncio.wait_for(group.watch(), LIMIT_S))
    assert time.monotonic() - began < LIMIT_S
    return str(lost.value)


def attempt(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except (RuntimeError, RankLost) as error:
        return error
    return None


def harmed(group: LocalGroup, how: str) -> float:
    group.send("harm", {"how": how})
    with group.at_call():
        return add_up(group.group)


@pytest.mark.parametrize("how", HARMS)
def test_a_rank_that_does_not_come_ends_its_peer(how: str, program: None) -> None:
    with ranks(small_spec(), 2, silence_s=SILENCE_S) as group:
        said = lose(group, lambda: harmed(group, how))
    assert re.search(HOW[how], said), said
    assert "\n" not in said


@pytest.mark.parametrize("how", WORK)
def test_a_rank_that_computes_for_longer_is_waited_for(how: str, program: None) -> None:
    assert BUSY_S > 2 * SILENCE_S
    with ranks(small_spec(), 2, silence_s=SILENCE_S) as group:
        began = time.monotonic()
        assert harmed(group, how) == 2.0
        assert time.monotonic() - began > 2 * SILENCE_S
        group.join()


def test_ranks_without_a_call_are_not_looked_at(program: None) -> None:
    with ranks(small_spec(), 2, silence_s=1.0) as group:
        time.sleep(2.5)
        assert harmed(group, "") == 2.0
        group.join()


@pytest.mark.parametrize("others", ["wait", "are through"])
def test_rank_0_that_hangs_in_a_pass_ends_its_peer(
    others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(pipeline={"num_stages": 2})
    with ranks(spec, 2, silence_s=SILENCE_S) as group:
        stage = build_parallel_stage(spec, 0, group)
        assert isinstance(stage, LeadStage)
        run: Any = stage.layers.run

        def hangs(*arguments: Any) -> Any:
            made = run(*arguments) if others == "are through" else None
            threading.Semaphore(0).acquire()
            return made

        monkeypatch.setattr(stage.layers, "run", hangs)
        said = lose(group, lambda: stage.forward((0, 1), tokens(spec, 1)))
    place = "_exactly" if others == "are through" else "all_reduce"
    assert re.search(rf"none has worked for 5 s; rank 0 at hangs .* at {place} ", said), said
