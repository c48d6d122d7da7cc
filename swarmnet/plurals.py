"""A count with its noun, for lines that people read."""

from __future__ import annotations


def counted(count: float | str, noun: str, form: str = "") -> str:
    """`1 peer`, `2 peers`, `1,200 samples`. `noun`: in the singular, with its adjectives before
    it. `form`: how the number is written, such as `,`."""
    text = format(count, form)
    return f"{text} {noun if text == '1' else plural(noun)}"


def plural(noun: str) -> str:
    if noun.endswith(("tch", "s", "x")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"
