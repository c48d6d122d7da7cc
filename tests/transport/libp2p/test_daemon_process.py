"""The process of a daemon, with small programs in its place."""

from __future__ import annotations

import asyncio
import sys

import pytest

from swarmnet.errors import TransportError
from swarmnet.transport.libp2p import daemon_process
from swarmnet.transport.libp2p.daemon_process import DaemonProcess
from tests.transport.streams import PATIENCE_S

LISTENS = "print('Peer ID: x', flush=True); import time; time.sleep(1000)"
FAILS = "print('first'); print('panic:'); print('a'); print('bug'); raise SystemExit(3)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + LISTENS


async def start(program: str) -> DaemonProcess:
    return await DaemonProcess.start(sys.executable, ["-c", program])


def test_it_is_up_when_it_says_its_id_and_ends_when_it_is_stopped() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            daemon = await start(LISTENS)
            assert await daemon.until_up()
            await daemon.stop()
            await daemon.stop()
            assert await daemon.wait() < 0
            daemon.kill()  # of one that has ended

    asyncio.run(main())


def test_what_it_said_before_it_ended_is_kept() -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            daemon = await start(FAILS)
            assert not await daemon.until_up()
            assert daemon.last_words == "panic: a bug"
            assert await daemon.wait() == 3
            await daemon.stop()

    asyncio.run(main())


def test_one_that_does_not_end_or_say_anything_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_process, "END_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            deaf = await start(DEAF)
            assert await deaf.until_up()
            await deaf.stop()
            monkeypatch.setattr(daemon_process, "START_TIMEOUT_S", 0.05)
            silent = await start("import time; time.sleep(1000)")
            with pytest.raises(TransportError, match="did not start within"):
                await silent.until_up()
            await silent.stop()

    asyncio.run(main())
