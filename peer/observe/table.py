"""A table that loses columns where a terminal is narrow (`peer.observe.layout`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from peer.observe.layout import Column, fitting
from swarmnet.printable import printable

GAP = 2
"""Columns of the terminal between two of the table."""


@dataclass(frozen=True, slots=True)
class FittedTable:
    """With a heading."""

    columns: Sequence[Column]
    to_right: Sequence[str] = ()
    """Titles of the columns that are numbers."""
    styles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of the cells of a column, by its title."""
    folds: str = ""
    """Title of the column whose texts go on in the next line where nothing else helps."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = fitting(self.columns, options.max_width, GAP)
        table = Table(box=None, padding=(0, 1), header_style="dim")
        rows: list[list[Text]] = [[] for _ in self.columns[0].cells]
        for i, is_short in shown.items():
            column = self.columns[i]
            justify = "right" if column.title in self.to_right else "left"
            table.add_column(
                column.title,
                justify=justify,  # type: ignore[arg-type]
                no_wrap=column.title != self.folds,
                overflow="fold",
            )
            texts = column.short if is_short else column.cells
            styles = self.styles.get(column.title) or [""] * len(texts)
            for row, text, style in zip(rows, texts, styles):
                row.append(Text(printable(text), style))
        for row in rows:
            table.add_row(*row)
        yield table
