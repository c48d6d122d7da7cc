"""A text as its tokens come.

What a token adds to a text depends on those before it: a decoder may drop the space at the very
beginning, join bytes to characters, or put a space between two words. So each piece is what the
whole text gains, prompt included. For that a few tokens before the new ones are decoded together
with them, and alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from swarmnet.runtime.text_codec import TextCodec

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""At the end of what is decoded, one or more: some bytes of the last character are to come."""
LONGEST_CHARACTER = 4
"""Bytes, each of which may be a token."""
CONTEXT, MOST_CONTEXT = 6, 64
"""Tokens before a text that are decoded with its first ones; the more where a character begins
earlier."""


class Pieces:
    """What a text gains by each of its tokens, in whole characters. Special tokens add nothing."""

    def __init__(self, codec: TextCodec, before: Sequence[int] = ()) -> None:
        """`before`: the tokens that the text goes on with."""
        self._codec = codec
        self._tokens = self._context([t for t in before if self._is_text(t)])
        """The last ones, as many as decide how the next one is read."""
        self._num_given = len(self._tokens)
        self._given = codec.decode(self._tokens)
        """The text of those that have been given."""
        self._whole = self._given
        """Likewise, without a character that is not finished, where `before` ends within one."""
        for size in range(len(self._tokens), max(len(self._tokens) - LONGEST_CHARACTER, -1), -1):
            self._whole = codec.decode(self._tokens[:size])
            if not self._whole.endswith(UNFINISHED):
                break

    def push(self, token: int) -> str:
        """What the text gains: nothing yet, where some bytes of a character are to come."""
        if not self._is_text(token):
            return self.rest()
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        if text.endswith(UNFINISHED):
            return ""
        starts = (start for start in (self._given, self._whole) if text.startswith(start))
        gained = text[len(next(starts, "")) or _num_same(self._given, text) :]
        if gained:
            self._keep(text)
        return gained

    def rest(self) -> str:
        """At the end: what stands for bytes that no character came of."""
        left = self._tokens[self._num_given :]
        if not left:
            return ""
        text = self._codec.decode(self._tokens)
        is_longer = text.startswith(self._given)
        gained = text[len(self._given) :] if is_longer else self._codec.decode(left)
        self._keep(text)
        return gained

    def _keep(self, text: str) -> None:
        """All has been given: tokens before the last ones are needed no more, but where a character
        began in them."""
        last = self._tokens[self._num_given :]
        given = self._codec.decode(last)
        if given and not given.startswith(UNFINISHED) and text.endswith(given):
            self._tokens, text = last, given
        self._num_given = len(self._tokens)
        self._given = text
        self._whole = text

    def _is_text(self, token: int) -> bool:
        return token < self._codec.num_tokens and token not in self._codec.special

    def _context(self, tokens: list[int]) -> list[int]:
        for size in range(CONTEXT, MOST_CONTEXT):
            context = tokens[-size:]
            text = self._codec.decode(context)
            if size >= len(tokens) or (text and not text.startswith(UNFINISHED)):
                break
        return context


def text_after(codec: TextCodec, before: Sequence[int], tokens: Sequence[int]) -> str:
    """What `tokens` add to the text of those before them."""
    pieces = Pieces(codec, before)
    return "".join([*map(pieces.push, tokens), pieces.rest()])


def _num_same(a: str, b: str) -> int:
    """Characters at the beginning that two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
