"""Which columns of a table a terminal has room for. Pure: widths are arguments.

A heading that is cut, or a number without its unit, says nothing. So a table that is too wide loses
whole columns, the least important ones first, and cells that have a shorter text take that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from swarmnet.printable import printable


@dataclass(frozen=True, slots=True)
class Column:
    """A column's texts, and what becomes of it where there is no room."""

    title: str
    cells: Sequence[str]
    goes: int = 0
    """The column with the highest number goes first; one with 0 stays."""
    short: Sequence[str] = ()
    """Shorter texts of the cells; empty where there are none."""
    shortens: int = 0
    """As `goes`: when the shorter texts take the place of the longer ones."""

    def width(self, is_short: bool) -> int:
        """Cells of a terminal."""
        texts = self.short if is_short else self.cells
        return max(map(cell_len, (self.title, *texts)), default=0)


def fitting(columns: Sequence[Column], width: int, gap: int) -> dict[int, bool]:
    """Indices of the columns to show, in order, and whether with their short texts. `width`: of the
    whole table; `gap`: what each column takes beside its texts."""
    shown = dict.fromkeys(range(len(columns)), False)
    steps = [(c.goes, 1, i) for i, c in enumerate(columns) if c.goes]
    steps += [(c.shortens, 0, i) for i, c in enumerate(columns) if c.short]
    for _, is_going, i in sorted(steps, reverse=True):
        if sum(columns[k].width(is_short) + gap for k, is_short in shown.items()) <= width:
            break
        if is_going:
            shown.pop(i)
        elif i in shown:
            shown[i] = True
    return shown


def shown_in(encoding: str, text: str) -> str:
    """In one line, as a terminal of this encoding gets it (`peer.console.never_fail`): an escape is
    wider than the character that it stands for."""
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def first_that_fits(texts: Sequence[str], width: int) -> str:
    """The first of several ways to say something that has room, else the last."""
    return next((text for text in texts if cell_len(text) <= width), texts[-1])
