"""Tokens of contributions that are in a later exchange than their own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from swarmnet.protocol.sync_modes import MOST_LATE

Late = tuple[int, ...]
"""Tokens by how many exchanges later they are: the first number is of the exchange before."""


def added(parts: Iterable[Late]) -> Late:
    """All of them."""
    return tuple(map(sum, zip_longest(*parts, fillvalue=0)))


def by_age(tokens: Mapping[int, int], before: Sequence[int]) -> Late:
    """`tokens`: by exchange; `before`: the exchanges before this one, the newest first."""
    found = [tokens.get(exchange, 0) for exchange in before]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def within(late: Late, most: int) -> Late:
    """No more than so many, of the newest first."""
    found = []
    for n in late:
        found.append(min(n, most))
        most -= found[-1]
    return tuple(found)


def are_possible(late: int, older: Late, num_tokens: int) -> bool:
    """Of messages: of `num_tokens` `late` were late, and of these `older` by two exchanges and
    more."""
    are_few = len(older) < MOST_LATE and all(n >= 0 for n in older)
    return are_few and sum(older) <= late <= max(0, num_tokens)


def joined(late: int, older: Late) -> Late:
    """Of what messages say, all by age."""
    return (late - sum(older), *older) if late else ()
