"""The daemon's process: started so that it ends with us, however we end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from swarmnet.errors import TransportError
from swarmnet.system import RUN_WITH_PARENT

START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 3.0
KEPT_LINES = 10
"""Of what it prints; for the reason why it did not start."""


class DaemonProcess:
    """One run of p2pd. The kernel ends it with the thread that started it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._last_lines: list[str] = []
        loop = asyncio.get_running_loop()
        self._is_up: asyncio.Future[bool] = loop.create_future()
        self._reader = loop.create_task(self._read())

    @classmethod
    async def start(
        cls, binary: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> DaemonProcess:
        """Starts the program; it may end at once. `environment`: variables beside our own."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            RUN_WITH_PARENT,
            str(os.getpid()),
            binary,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "GOLOG_LOG_LEVEL": "error", **(environment or {})},
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_words(self) -> str:
        """What it printed last, in one line."""
        return " ".join(self._last_lines[-3:])

    async def until_up(self) -> bool:
        """Until it says that it listens (True) or ends (False). Raises `TransportError` where
        it does neither in time."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await asyncio.shield(self._is_up)
        except TimeoutError:
            raise TransportError(f"p2pd did not start within {START_TIMEOUT_S:.0f} s") from None

    async def wait(self) -> int:
        """Until it ends; returns its exit code."""
        return await self._process.wait()

    def kill(self) -> None:
        """Ends it at once. Without effect where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Ends it and waits for that. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
                await self._process.wait()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        """Reads what the daemon prints, until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            self._last_lines = [*self._last_lines[1 - KEPT_LINES :], text]
            if text.startswith("Peer ID:") and not self._is_up.done():
                self._is_up.set_result(True)
        if not self._is_up.done():
            self._is_up.set_result(False)
