"""A device or a disk that hangs ends its peer; one that is only slow does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from peer.ranks import until_over
from peer.stuck import LOOK_S, STUCK_S, until_stuck
from swarmnet.errors import UserError
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.training.device import DeviceThread, WorkerThread


@dataclass
class Thread:
    """At a piece of work whose number a function of the time gives."""

    piece: Callable[[float], int | None]

    def at_work(self) -> int | None:
        return self.piece(asyncio.get_running_loop().time())


def test_who_hangs_for_long_is_found_and_its_peer_ends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        threads = {"device": Thread(lambda now: 7 if now > 100.0 else int(now / 10))}
        life = loop.create_task(asyncio.sleep(1e9))
        with pytest.raises(UserError, match=r"the device has been .* start it again"):
            await until_over(life, None, until_stuck(threads))
        assert STUCK_S <= loop.time() - 100.0 <= STUCK_S + 2 * LOOK_S
        assert life.cancelled()

    run_virtual(main())


def test_who_is_slow_or_idle_is_left_alone() -> None:
    async def main() -> None:
        threads = {
            "device": Thread(lambda now: int(now / (STUCK_S - 2 * LOOK_S))),
            "averaging": Thread(lambda now: None),
        }
        life = asyncio.get_running_loop().create_task(asyncio.sleep(10 * STUCK_S))
        await until_over(life, None, until_stuck(threads))
        assert life.done()

    run_virtual(main())


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
                seen.append(thread.at_work())
                goes_on.set()
                await piece
            assert seen == [1, 2]
            assert thread.at_work() is None
        finally:
            await thread.close()

    asyncio.run(main())
