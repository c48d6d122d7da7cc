"""How all commands print: text is text, whatever the terminal can show and whoever wrote it."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import, and of no use to a command that prints nothing
    from rich.console import Console


def make_console(kind: type[Console] | None = None, width: int | None = None) -> Console:
    """On standard output, in its encoding: frames are drawn with what that has. Brackets in what is
    printed are no markup. `width`: columns where there is no terminal to ask."""
    from rich.console import Console

    kind = kind or Console
    console = kind(file=sys.stdout, highlight=False, markup=False)
    if console.is_terminal or width is None:
        return console
    return kind(file=sys.stdout, highlight=False, markup=False, width=width)


def never_fail() -> None:
    """What a stream's encoding does not have is written as an escape: a terminal that is not UTF-8
    ends no line, and no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def without_controls(text: str) -> str:
    """Text of others, for a terminal: what would move the cursor or change colours is written as an
    escape. Line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not is_control(c) else ascii(c)[1:-1] for c in text)


def is_control(character: str) -> bool:
    """Of C0 or C1, or one that turns the direction of what is shown after it."""
    code = ord(character)
    is_bidi = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    return code < 0x20 or 0x7F <= code < 0xA0 or is_bidi
