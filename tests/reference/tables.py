"""Markdown that several pages use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MADE = (
    "<!-- Made by `python -m tests.reference`; change the code that it tells of, not this page. -->"
)


def page(title: str, *parts: str) -> str:
    """Parts are apart by an empty line."""
    return "\n\n".join((f"# {title}", MADE, *filter(None, parts))) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A column that is empty in all rows is left out."""
    rows = [list(row) for row in rows]
    kept = [k for k in range(len(heads)) if any(row[k] for row in rows)]
    lines = [[heads[k] for k in kept], ["---"] * len(kept)]
    lines += [[row[k] for k in kept] for row in rows]
    assert not any("|" in cell for line in lines for cell in line), "readers differ about these"
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def either(words: Sequence[str]) -> str:
    """Such as `a`, `b` or `c`; empty for none."""
    if not words:
        return ""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def amount(number: float, unit: str = "") -> str:
    """Such as 65,536, 2^40 or 1 GiB."""
    if unit == "bytes":
        for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if number >= size and number % size == 0:
                return f"{number / size:,.0f} {name}"
    is_whole = number == int(number)
    text = f"{int(number):,}" if is_whole else f"{number:g}"
    if is_whole and number >= 1 << 32 and number == 1 << int(number).bit_length() - 1:
        text = f"2^{int(number).bit_length() - 1}"
    return f"{text} {unit}".strip()
