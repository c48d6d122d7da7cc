"""What the program and its libraries log, on standard error: lines for people, few of a kind."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from typing import TextIO

from peer.console import complain, without_controls
from swarmnet.printable import printable
from swarmnet.protocol.trouble import Kind

OTHERS = "%(name)s: %(message)s"
"""A line of a library."""


class _OneLine(logging.Formatter):
    """What others say in a message begins no line of its own; a traceback has its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)


class _FewOfAKind(logging.Filter):
    """Lets few lines from one place of the program through in a short while, and sums up the
    others."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int], tuple[Kind, str]] = {}
        """By place, with the last line that was left out."""

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.pathname, record.lineno)
        kind, _ = self._kinds.get(place, (Kind(), ""))
        more = kind.line(time.monotonic())
        self._kinds[place] = kind, record.getMessage() if more is None else ""
        if more:
            record.msg, record.args = f"{record.getMessage()}{more}", ()
        return more is not None

    def sums(self, now: float) -> list[str]:
        """Of lines that were left out and that no later one has told of. `now`: seconds, monotonic
        clock."""
        known = list(self._kinds.values())  # other threads log meanwhile
        found = [(kind.sum(now), last) for kind, last in known]
        return [f"{last}{more}" for more, last in found if more]


class _NotOfSearches(logging.Filter):
    """A search in hivemind's table that ends before its time leaves a task that waits for nothing
    (`hivemind/dht/traverse.py`). asyncio says so of each when it is collected."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != "asyncio":
            return True
        text = record.getMessage()
        return not (text.startswith("Task was destroyed") and "coro=<Event.wait()" in text)


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at the time, which a live screen replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(without_controls(self.format(record)) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def log_to_stderr(debug: bool) -> None:
    """From now on, for this process: the project's loggers, and what libraries log that nobody else
    handles."""
    handler = _handler("%(asctime)s %(name)s: %(message)s" if debug else "swarmnet: %(message)s")
    if not debug:
        handler.addFilter(_FewOfAKind())
    logger = logging.getLogger("swarmnet")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    others = _handler(OTHERS)
    others.setLevel(logging.WARNING)
    if not debug:
        others.addFilter(_NotOfSearches())
        others.addFilter(_FewOfAKind())
    logging.lastResort = others


def sum_up(now: float) -> None:
    """Says how many lines of a kind were left out a while ago, where no line has said so since.
    `now`: seconds, monotonic clock. To be called now and then."""
    handlers = logging.getLogger("swarmnet").handlers
    for handler in [*handlers, *filter(None, [logging.lastResort])]:
        for few in handler.filters:
            for line in few.sums(now) if isinstance(few, _FewOfAKind) else ():
                complain(printable(line))


def log_the_rest() -> None:
    """From now on, for this process: what Python itself would write on standard error, as it is. An
    exception in a thread, or where nobody can catch it, may have text of others in it."""
    log = logging.getLogger("python")

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread is not None else "a thread"
            log.error("exception in %s", name, exc_info=args.exc_value)

    def nowhere(args: sys.UnraisableHookArgs) -> None:
        log.error("exception in %r", args.object, exc_info=args.exc_value or True)

    def warned(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        log.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)

    threading.excepthook = in_thread
    sys.unraisablehook = nowhere
    warnings.showwarning = warned


def _handler(shape: str) -> _Stderr:
    handler = _Stderr()
    handler.setFormatter(_OneLine(shape))
    return handler
