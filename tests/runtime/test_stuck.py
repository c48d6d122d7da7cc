"""A device or a disk that hangs ends its peer; one that is only slow does not. So does another
process with its identity."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.errors import UsageError, UserError
from swarmnet.methods.records import SignedRecord
from swarmnet.ports import BACKWARD, FORWARD, OTHER
from swarmnet.protocol.membership.failure_detector import SILENCE_S
from swarmnet.runtime.ranks import until_over
from swarmnet.runtime.stuck import (
    LOOK_S,
    STUCK_AT_LEAST_S,
    STUCK_FACTOR,
    STUCK_S,
    stuck_after_s,
    until_copied,
    until_stuck,
)
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.training.device import KNOWN_AFTER, DeviceThread, Piece, WorkerThread
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import pack
from tests.swarm.membership.parts import Site, record


@dataclass
class Thread:
    """At a piece of work whose number a function of the time gives."""

    piece: Callable[[float], int | None]
    longest_s: float | None = None

    def at_work(self) -> Piece | None:
        number = self.piece(asyncio.get_running_loop().time())
        return None if number is None else Piece(number, self.longest_s)


@pytest.mark.parametrize(
    ("longest_s", "after_s"),
    [(None, STUCK_S), (0.5, STUCK_AT_LEAST_S), (20.0, STUCK_FACTOR * 20.0), (300.0, STUCK_S)],
)
def test_who_hangs_for_long_is_found_and_its_peer_ends(
    longest_s: float | None, after_s: float
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        hangs = Thread(lambda now: 7 if now > 100.0 else int(now / 10), longest_s)
        life = loop.create_task(asyncio.sleep(1e9))
        with pytest.raises(UserError, match=r"the device has been .* start it again"):
            await until_over(life, None, until_stuck({"device": hangs}))
        assert after_s <= loop.time() - 100.0 <= after_s + 2 * LOOK_S
        assert life.cancelled()

    run_virtual(main())


@pytest.mark.parametrize("longest_s", [None, 0.5, 20.0, 300.0])
def test_who_is_slow_or_idle_is_left_alone(longest_s: float | None) -> None:
    async def main() -> None:
        piece_s = stuck_after_s(longest_s) - 2 * LOOK_S
        threads = {
            "device": Thread(lambda now: int(now / piece_s), longest_s),
            "averaging": Thread(lambda now: None),
        }
        life = asyncio.get_running_loop().create_task(asyncio.sleep(10 * STUCK_S))
        await until_over(life, None, until_stuck(threads))
        assert life.done()

    run_virtual(main())


def test_a_device_knows_how_long_a_pass_takes() -> None:
    """Not other work, of which one piece is not as long as the next, nor what was not done."""

    def refuse() -> None:
        raise ValueError("nobody wants it")

    async def main() -> None:
        device = DeviceThread()
        found: list[float | None] = []

        def look() -> None:
            piece = device.at_work()
            assert piece is not None
            found.append(piece.longest_s)

        try:
            for kind in (FORWARD, OTHER):
                for _ in range(KNOWN_AFTER):
                    with pytest.raises(ValueError, match="nobody wants it"):
                        await device.run(kind, lambda: None, check=refuse)
                for _ in range(KNOWN_AFTER + 1):
                    await device.run(kind, look)
            await device.run(BACKWARD, look)
        finally:
            await device.close()
        of_forward, known, others = (
            found[:KNOWN_AFTER],
            found[KNOWN_AFTER],
            found[KNOWN_AFTER + 1 :],
        )
        assert set(of_forward) == set(others) == {None}
        assert known is not None
        assert known > 0.0

    asyncio.run(main())


@pytest.mark.parametrize("kind", [DeviceThread, WorkerThread])
def test_threads_say_what_they_are_at(kind: type[DeviceThread] | type[WorkerThread]) -> None:
    async def main() -> None:
        thread = kind()
        try:
            assert thread.at_work() is None
            seen = []
            for _ in range(2):
                begun, goes_on = threading.Event(), threading.Event()

                def work(begun: threading.Event = begun, on: threading.Event = goes_on) -> None:
                    begun.set()
                    on.wait(30.0)

                if isinstance(thread, DeviceThread):
                    piece = asyncio.ensure_future(thread.run("forward", work))
                else:
                    piece = asyncio.ensure_future(thread.run(work))
                await asyncio.to_thread(begun.wait, 30.0)
                piece_at = thread.at_work()
                assert piece_at is not None
                seen.append(piece_at.number)
                goes_on.set()
                await piece
            assert seen == [1, 2]
            assert thread.at_work() is None
        finally:
            await thread.close()

    asyncio.run(main())


def test_who_runs_elsewhere_too_is_told_where_and_since_when_and_what_to_do(
    tmp_path: Path,
) -> None:
    """`UsageError` ends a peer with 2, which services do not start again."""

    async def main() -> None:
        hub = MemoryHub()
        site = Site(hub, "a")
        gossip: Any = SimpleNamespace(records=site.records, changed=site.news.changed)
        began_unix_s = 1_700_000_000
        other = replace(
            record("a"), incarnation=began_unix_s * 1000, addresses=("/ip4/5.5.5.5/tcp/4001",)
        )
        watching = asyncio.create_task(until_copied(gossip, tmp_path))
        for version in range(int(SILENCE_S) + 1):
            assert not watching.done()
            site.records.take(SignedRecord(pack(replace(other, version=version)), b""))
            await asyncio.sleep(1.0)
        with pytest.raises(UsageError) as told:
            await watching
        line = str(told.value)
        assert "runs elsewhere too, at /ip4/5.5.5.5/tcp/4001, since " in line
        assert " November " in line
        assert f"Was {tmp_path} copied? Start this one with another --state-dir" in line
        assert "\n" not in line

    run_virtual(main())
