"""How all commands print: text is text, whatever the terminal can show and whoever wrote it."""

from __future__ import annotations

import io
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, cast

from swarmnet.files import is_full
from swarmnet.printable import printable
from swarmnet.protocol.trouble import Trouble

if TYPE_CHECKING:  # slow to import, and of no use to a command that prints nothing
    from rich.console import Console
    from rich.text import Text

log = logging.getLogger("swarmnet.peer")


def make_console(
    kind: type[Console] | None = None, width: int | None = None, out: IO[str] | None = None
) -> Console:
    """On standard output, or `out`, in its encoding: frames are drawn with what that has. Brackets
    in what is printed are no markup. `width`: columns where there is no terminal to ask."""
    from rich.console import Console

    kind, out = _plain(kind or Console), out or sys.stdout
    console = kind(file=out, highlight=False, markup=False)
    if console.is_terminal or width is None:
        return console
    return kind(file=out, highlight=False, markup=False, width=width)


class _Patient:
    """Implements the text file that it is beside."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._trouble = Trouble()
        self._is_lost = False
        """What was written last."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        self._is_lost = not self._try(lambda: self._out.write(text))
        return len(text)

    def flush(self) -> None:
        if self._try(self._out.flush) and not self._is_lost and self._trouble.is_over():
            log.warning("there is room for what is printed again")

    def _try(self, do: Callable[[], object]) -> bool:
        try:
            do()
        except OSError as e:
            if not is_full(e):
                raise
            more = self._trouble.failed(time.monotonic())
            if more is not None:
                log.warning("no room for what is printed (%s); all else goes on%s", e, more)
            return False
        return True


def patient(out: IO[str]) -> IO[str]:
    """The same, for what goes on while a disk is full: what is printed meanwhile is lost, and a
    line is logged when that begins, and when it ends."""
    return cast(IO[str], _Patient(out))


def never_fail() -> None:
    """What a stream's encoding does not have is written as an escape: a terminal that is not UTF-8
    ends no line, and no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """A line, or several, on standard output, filtered; what reads a pipe has it at once."""
    put(f"{text}\n")


def put(text: str) -> None:
    """As `say`, without an end of the line."""
    sys.stdout.write(without_controls(text))
    sys.stdout.flush()


def complain(line: str) -> None:
    """What went wrong, as a line on standard error."""
    note(f"swarmnet: {line}")


def note(line: str) -> None:
    """A line on standard error, filtered."""
    sys.stderr.write(f"{without_controls(line)}\n")
    sys.stderr.flush()


def show_traceback(error: BaseException) -> None:
    """On standard error, filtered: what an error says may be the words of others."""
    sys.stderr.write(without_controls("".join(traceback.format_exception(error))))
    sys.stderr.flush()


def without_controls(text: str) -> str:
    """Text of others, for a terminal (`swarmnet.printable`). Line ends and tabs stay."""
    return printable(text, "\n\t")


def _plain(kind: type[Console]) -> type[Console]:
    """A console that filters whatever is printed on it, in tables and panels too; styles and what
    rich itself tells the terminal stay."""
    from rich.segment import Segment

    class Plain(kind):  # type: ignore[valid-type, misc]
        def render_str(self, text: str, **kwargs: Any) -> Text:
            """Lines are broken where they are full of what the terminal gets."""
            encoded = text.encode(self.encoding, "backslashreplace")
            return super().render_str(encoded.decode(self.encoding), **kwargs)

        def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **kwargs):
                text = segment.text if segment.control else without_controls(segment.text)
                yield segment if text == segment.text else Segment(text, segment.style)

    return Plain
