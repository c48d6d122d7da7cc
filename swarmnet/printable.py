"""Text of others as people may see it.

A peer says its reasons, its addresses and its errors itself, and a file or a model may have any
text. What in it would command a terminal, turn the direction of a line, begin another line, or not
be seen at all is shown as the escape that Python has for it. All that is printed, logged or shown
on a page goes through `printable`; it changes nothing of what has gone through it before.
"""

from __future__ import annotations

import unicodedata

INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and symbols, by their categories, that show nothing."""
VARIATIONS = ("\ufe00", "\ufe0f"), ("\U000e0100", "\U000e01ef")
"""Likewise, but for what they do to the character before them."""
MAX_MARKS = 4
"""Marks on one character; more of them reach into other lines."""


def printable(text: str, keeps: str = "") -> str:
    """The text, in one line. `keeps`: control characters that stay, such as line ends where a text
    of several lines is shown."""
    if text.isascii() and text.isprintable():
        return text
    found, num_marks = [], 0
    for character in text:
        num_marks = num_marks + 1 if unicodedata.category(character)[0] == "M" else 0
        if unicodedata.category(character) == "Zs":
            found.append(" ")
        elif character in keeps or (_is_seen(character) and num_marks <= MAX_MARKS):
            found.append(character)
        else:
            found.append(ascii(character)[1:-1])
    return "".join(found)


def _is_seen(character: str) -> bool:
    if any(first <= character <= last for first, last in VARIATIONS):
        return character == "\ufe0f"  # an emoji, not a sign
    return character.isprintable() and character not in INVISIBLE
