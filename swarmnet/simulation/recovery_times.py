"""How long the microbatches that were inside a crashed peer took to be committed after all."""

from __future__ import annotations

from collections.abc import Callable

from swarmnet.ports import StepKey
from swarmnet.swarm.peer import Peer


class RecoveryTimes:
    """Of all crashes of a run. `now` gives virtual time, seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._waiting: dict[StepKey, float] = {}
        """When the peer crashed that had this microbatch."""
        self._recovered: dict[float, float] = {}

    def crashed(self, peer: Peer) -> None:
        """A peer crashes now. The microbatches of others that it works on have to be made
        elsewhere."""
        replica = peer.replica
        if replica is None:
            return
        own = peer.gossip.own.peer_id
        ledger, r = replica.ledger, replica.round
        rounds = (r, r + 1)
        for entry in [e for q in rounds for e in (*ledger.running(q), *ledger.pending(q))]:
            if entry.feeder != own:
                self._waiting[entry.key] = self._now()

    def committed(self, key: StepKey) -> None:
        """A microbatch is committed now."""
        crashed_at = self._waiting.pop(key, None)
        if crashed_at is not None:
            self._recovered[crashed_at] = self._now() - crashed_at

    @property
    def seconds(self) -> tuple[float, ...]:
        """From each crash to the commit of the last microbatch that was inside the dead peer, in
        the order of the crashes."""
        return tuple(s for _, s in sorted(self._recovered.items()))
