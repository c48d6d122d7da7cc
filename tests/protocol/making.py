"""Records for tests."""

from __future__ import annotations

from swarmnet.protocol.membership.records import ACTIVE, Record


def record(peer_id: str, version: int = 0, *, incarnation: int = 1, **fields: object) -> Record:
    fields = {"state": ACTIVE, "stage": 0, **fields}
    return Record(peer_id, "run", incarnation, version, **fields)  # type: ignore[arg-type]
