"""Who speaks for a shard to other stages: what its primary has to say is believed of the one that
this peer takes for it.

At the own stage that is whom it follows (docs/decisions/0024-who-leads-is-asked-not-told.md). Of
other stages it sees the records alone: the first in order that lives. Where that one lives and gets
nothing done, another has taken over, of which no record tells. So the word of the next ones in
order is kept, and holds after a wait; from then on, who was waited for in vain comes last, until it
speaks again, and so does who is barred. Nobody speaks whom `reputation` does not know."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from swarmnet.swarm.update.ownership import Ownership


class Speakers:
    """Those of all stages, as one peer sees them."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._exchange = -1
        self._followed: dict[int, str] = {}
        """By shard of the own stage, in that exchange: whom this peer goes by."""
        self._silent: dict[str, None] = {}

    def order(self, stage: int, exchange: int, shard: int) -> list[str]:
        """Peers that may speak for a shard; the first one is taken for its primary."""
        order = list(self._ownership.leaders(stage, exchange, shard))
        is_barred = self._ownership.gossip.view.is_barred
        order.sort(key=lambda peer_id: (is_barred(peer_id), peer_id in self._silent))
        if stage == self._ownership.replica.index and exchange == self._exchange:
            followed = self._followed.get(shard)
            return list(dict.fromkeys([followed, *order])) if followed else order
        return order

    def begin(self, exchange: int) -> None:
        """The own stage's exchange that is under way here from now on."""
        self._exchange = exchange
        self._followed.clear()

    def end(self) -> None:
        """None is."""
        self.begin(-1)

    def follow(self, shard: int, primary: str) -> None:
        """Whom this peer goes by in that exchange."""
        self._followed[shard] = primary

    def spoke(self, peer_id: str) -> None:
        """It has said something of a shard."""
        self._silent.pop(peer_id, None)

    def passed_over(self, peer_ids: Iterable[str]) -> None:
        """The word of others was taken in their place."""
        self._silent |= dict.fromkeys(peer_ids)


def first_heard(order: Iterable[str], heard: Collection[str]) -> str:
    """The first choice of those that have spoken; empty where none of these may."""
    return next((peer_id for peer_id in order if peer_id in heard), "")
