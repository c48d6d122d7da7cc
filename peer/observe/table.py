"""Tables that a narrow terminal cuts nowhere: one loses columns (`peer.observe.layout`), the other
becomes a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from peer.observe.layout import Column, fitting, shown_in

GAP = 2
"""Columns of the terminal between two of the table."""
LEAST_NAME = 16
"""Columns of the terminal in which the names of rows may go on in the next line."""


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
        columns = [_shown_in(console.encoding, column) for column in self.columns]
        shown = fitting(columns, options.max_width, GAP)
        table = Table(box=None, padding=(0, 1), header_style="dim")
        rows: list[list[Text]] = [[] for _ in columns[0].cells]
        for i, is_short in shown.items():
            column = columns[i]
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
                row.append(Text(text, style))
        for row in rows:
            table.add_row(*row)
        yield table


def _shown_in(encoding: str, column: Column) -> Column:
    cells, short = (
        [shown_in(encoding, text) for text in texts] for texts in (column.cells, column.short)
    )
    return replace(column, cells=cells, short=short)


@dataclass(frozen=True, slots=True)
class WholeTable:
    """With a heading, and names of rows in its first column. A terminal that is too narrow gets a
    list in its place: of each row the name, and below it a line for each figure."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [[shown_in(console.encoding, text) for text in row] for row in self.rows]
        widths = [max(map(cell_len, column)) for column in zip(self.titles, *rows)]
        needed = min(widths[0], LEAST_NAME) + sum(widths[1:]) + GAP * len(widths)
        yield self._table(rows) if needed <= options.max_width else self._list(rows, widths)

    def _table(self, rows: Sequence[Sequence[str]]) -> Table:
        table = Table(title=self.title or None, title_justify="left", box=SIMPLE)
        table.padding, table.pad_edge = (0, 1, 0, 0), False
        table.add_column(self.titles[0], overflow="fold")
        for name in self.titles[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def _list(self, rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Text:
        name_width = max(map(cell_len, self.titles[1:]))
        lines = [self.title, ""] if self.title else [""]
        for row in rows:
            lines.append(f"{self.titles[0]} {row[0]}")
            figures = zip(self.titles[1:], row[1:], strict=True)
            lines += [
                f"  {name:<{name_width}}  {text:>{max(widths[1:])}}"
                for name, text in figures
                if text
            ]
        return Text("\n".join([*lines, ""]))
