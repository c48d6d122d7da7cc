from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swarmnet.simulation.recovery_times import RecoveryTimes


def peer_with(**entries: list[tuple[str, tuple[int, int]]]) -> Any:
    """A peer "own" in round 3; `running` and `pending`: feeder and key of its microbatches."""

    def of_round(kind: str) -> Any:
        found = [SimpleNamespace(feeder=f, key=key) for f, key in entries.get(kind, [])]
        return lambda r: [entry for entry in found if entry.key[0] == r]

    ledger = SimpleNamespace(running=of_round("running"), pending=of_round("pending"))
    own = SimpleNamespace(peer_id="own")
    return SimpleNamespace(
        replica=SimpleNamespace(round=3, ledger=ledger), gossip=SimpleNamespace(own=own)
    )


def test_a_crash_is_recovered_with_the_last_microbatch_of_others() -> None:
    clock = SimpleNamespace(now=10.0)
    times = RecoveryTimes(lambda: clock.now)
    running = [("a", (3, 1)), ("own", (3, 2))]
    times.crashed(peer_with(running=running, pending=[("b", (4, 7))]))
    for now, key in ((12.0, (3, 1)), (13.0, (3, 9)), (15.0, (4, 7)), (90.0, (3, 2))):
        clock.now = now
        times.committed(key)
    assert times.seconds == (5.0,)


def test_a_peer_without_a_replica_has_no_microbatches() -> None:
    times = RecoveryTimes(lambda: 0.0)
    times.crashed(SimpleNamespace(replica=None))  # type: ignore[arg-type]
    times.committed((3, 1))
    assert times.seconds == ()
