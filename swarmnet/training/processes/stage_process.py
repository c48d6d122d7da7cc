"""The process that computes a stage for a peer, as the peer sees it, and the calls on it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import swarmnet.errors as errors
from swarmnet.errors import NotReady, RemoteError, StageLost, SwarmnetError
from swarmnet.training.processes.children import SILENCE_S, Child, Children
from swarmnet.training.processes.shared_memory import Tray
from swarmnet.wire import Array

Result = tuple[dict[str, Any], list[Array]]
"""Plain values, and arrays."""


class StageProcess(Children):
    """One process, which does one call at a time and says what came of it. Arrays lie in memory
    that both map: none goes through a socket."""

    def __init__(self, stage_index: int, program: str, *, silence_s: float = SILENCE_S) -> None:
        """Starts it. Raises `StageLost` where it cannot be started."""
        self._stage_index = stage_index
        self._answers: dict[int, tuple[bool, str]] = {}
        self._lock = threading.Lock()
        self._put_off: deque[tuple[str, dict[str, Any]]] = deque()
        self._tray = Tray()
        super().__init__({0: "its process"}, program, silence_s=silence_s)
        try:
            self.send("open", fd=self._tray.fd)
        except BaseException:
            self.close()
            raise

    def call(
        self, name: str, values: dict[str, Any] | None = None, arrays: Sequence[Array] = ()
    ) -> Result:
        """Has it do something, and returns what came of it. Raises what that raised, or
        `StageLost`."""
        with self._lock:
            self._do_put_off()
            with self._condition:
                self._check_open()
            places = self._tray.put(arrays)
            number = self.send(name, {"values": values or {}, "arrays": places})
            is_refused, told = self._answer(number)
            if is_refused:
                raise _error(told)
            result = told["values"], self._tray.take(told["arrays"])
            self._do_put_off()
            return result

    def later(self, name: str, values: dict[str, Any]) -> None:
        """Has it do what changes no result, from any thread. While a call runs it waits for the end
        of that."""
        self._put_off.append((name, values))
        if self._lock.acquire(blocking=False):
            try:
                self._do_put_off()
            finally:
                self._lock.release()

    def take_descriptor(self) -> int:
        """That came with the last answer."""
        return self._children[0].descriptors.pop()

    def close(self) -> None:
        super().close()
        with self._lock:
            self._tray.close()

    # ---- inside -----------------------------------------------------------------------------

    def _lost(self, reason: str) -> SwarmnetError:
        return StageLost(f"stage {self._stage_index} is lost here: {reason}")

    def _has_ended(self, child: Child, number: int, is_refused: bool, text: str) -> None:
        if text:
            self._answers[number] = is_refused, text

    def _answer(self, number: int) -> tuple[bool, dict[str, Any]]:
        with self._condition:
            self._condition.wait_for(
                lambda: number in self._answers or self.failure is not None or self._is_closed
            )
            found = self._answers.get(number)
            if found is None:
                self._check_open()
                raise AssertionError("there is an answer while it is open")
            self._answers.clear()
        return found[0], json.loads(found[1])

    def _check_open(self) -> None:
        """With the condition held."""
        self._raise_failure()
        if self._is_closed:
            raise NotReady("the device is closed")

    def _do_put_off(self) -> None:
        """With the lock held."""
        while self._put_off:
            name, values = self._put_off.popleft()
            if not self._is_closed:
                with contextlib.suppress(StageLost):  # whoever needs the stage hears of that
                    self.send(name, {"values": values, "arrays": []})


def error_values(error: Exception) -> dict[str, Any]:
    """An error that another process is to raise, as plain values."""
    details = error.details if isinstance(error, RemoteError) else {}
    return {"error": type(error).__name__, "text": str(error), "details": details}


def _error(told: dict[str, Any]) -> Exception:
    """The reverse."""
    kind = getattr(errors, told["error"], None)
    if kind is None:
        return (
            ValueError(told["text"])
            if told["error"] == "ValueError"
            else RuntimeError(told["text"])
        )
    if issubclass(kind, RemoteError):
        return kind(told["text"], **told["details"])
    return kind(told["text"])
