"""Several readers of what happens."""

from __future__ import annotations

import asyncio

import pytest

from swarmnet.api.history import History
from swarmnet.errors import SwarmnetError
from swarmnet.observe.events import Event, PeerResumed


def events(*names: str) -> list[Event]:
    return [PeerResumed(0.0, name) for name in names]


def test_each_reader_goes_on_where_it_was() -> None:
    async def scenario() -> None:
        history = History()
        late = asyncio.ensure_future(history.after(2))
        history.add(events("a", "b"))
        assert await history.after(0) == (events("a", "b"), 2)
        await asyncio.sleep(0)
        assert not late.done()
        history.add(events("c"))
        assert await late == (events("c"), 3)
        assert await history.after(0) == (events("a", "b", "c"), 3)
        end = asyncio.ensure_future(history.after(3))
        await asyncio.sleep(0)
        history.end()
        assert await end == ([], 3)

    asyncio.run(scenario())


def test_what_is_kept_is_bounded_and_nobody_reads_twice() -> None:
    history = History(most=3)
    history.add(events("a", "b", "c", "d"))
    assert history.rest(0) == (events("b", "c", "d"), 4)
    assert history.rest(2) == (events("c", "d"), 4)
    assert history.rest(4) == ([], 4)


def test_an_error_comes_after_all_that_happened() -> None:
    history = History()
    history.add(events("a"))
    history.end(SwarmnetError("nobody is left"))
    history.end()
    assert history.rest(0) == (events("a"), 1)
    with pytest.raises(SwarmnetError, match="nobody is left"):
        history.rest(1)
