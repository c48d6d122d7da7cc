"""Which peers can work together: who is connected to whom, by their own word. Pure.

A record names the living peers that its peer cannot call. Two peers are *cut* where one names the
other; a call between them needs a third. A partition is a cut of many pairs at once: no path of
serving peers leads to the other side, though there may be news of it through an onlooker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarmnet.protocol.membership.records import Record


def are_cut(one: Record | None, other: Record | None) -> bool:
    """Whether one of two peers says that it cannot call the other."""
    if one is None or other is None:
        return False
    return one.peer_id in other.unreached or other.peer_id in one.unreached


def num_cuts(records: Iterable[Record]) -> dict[str, int]:
    """For each of these peers, from how many of the others it is cut; those from none are left
    out."""
    among = {r.peer_id: r for r in records}
    pairs = {
        (min(r.peer_id, p), max(r.peer_id, p))
        for r in among.values()
        for p in r.unreached
        if p in among and p != r.peer_id
    }
    counts: dict[str, int] = {}
    for pair in sorted(pairs):
        for peer_id in pair:
            counts[peer_id] = counts.get(peer_id, 0) + 1
    return counts


def connected(own_peer_id: str, lost: Iterable[str], serving: Mapping[str, Record]) -> set[str]:
    """The peers among `serving` to which a path of serving peers leads from the own one, which
    cannot reach `lost` itself."""
    missing = set(lost)
    rest = {p: r for p, r in serving.items() if p != own_peer_id}
    found: set[str] = set()
    frontier = [p for p in rest if p not in missing]
    while frontier:
        found.update(frontier)
        for p in frontier:
            del rest[p]
        new: dict[str, None] = {}
        for p in frontier:
            if not rest:
                break
            record = serving[p]
            new.update(dict.fromkeys(q for q, r in rest.items() if not are_cut(record, r)))
            if len(new) == len(rest):
                break
        frontier = list(new)
    return found
