"""Worlds, and what happens between two of them, in words."""

from __future__ import annotations

from tests.protocol.update.explorer.interned import MASK, Interned, Rest
from tests.protocol.update.explorer.small_world import FIELDS, Local


def end_in_words(net: Interned, world: int) -> str:
    numbers = net.unpack(world)
    told = []
    for p, n in zip(net.peers, numbers):
        local = net.locals.all[n]
        told.append(f"{p}: " + ("gone" if local is None else f"{local.result} {local.applied}"))
    return "; ".join(told)


def label(net: Interned, before: int, after: int) -> str:
    """What has happened between two worlds, in words: by what differs."""
    lines = []
    a, b = net.unpack(before), net.unpack(after)
    bag_a = net.bags.all[before >> net.at_messages & MASK]
    bag_b = net.bags.all[after >> net.at_messages & MASK]
    rest_a, rest_b = (
        net.rests.all[before >> net.at_rest],
        net.rests.all[after >> net.at_rest],
    )
    lines += [
        f"{x} {getattr(rest_a, x)}->{getattr(rest_b, x)}"
        for x in Rest._fields
        if getattr(rest_a, x) != getattr(rest_b, x)
    ]
    for m in sorted({*bag_a, *bag_b}):
        delta = bag_b.count(m) - bag_a.count(m)
        if delta:
            message = net.messages.all[m]
            lines.append(
                f"{'+' if delta > 0 else '-'} {message.source}>{message.target} {message.event}"
            )
    for p, x, y in zip(net.peers, a, b):
        if x != y:
            lines.append(f"{p}: {change(net, x, y)}")
    return " | ".join(lines)


def change(net: Interned, x: int, y: int) -> str:
    a, b = net.locals.all[x], net.locals.all[y]
    if b is None:
        return "crashes"
    parts = [f"{n}={v!r}" for n, u, v in zip(FIELDS, a.shard, b.shard) if u != v]
    parts += [f"{n}={getattr(b, n)!r}" for n in Local._fields[2:] if getattr(a, n) != getattr(b, n)]
    return ", ".join(parts)
