"""Whose sums are waited for in vain: primaries that live and get nothing done."""

from __future__ import annotations

from collections.abc import Mapping

from swarmnet.protocol.update.shard_facts import FOLLOWING, Facts


class SumWaits:
    """Of one exchange at one replica. A primary tells who waits long for a result when it has the
    sum: from then on other stages may be what it waits for. Times are awake seconds."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}
        """By shard and primary, since when its sum is waited for."""
        self._summed: set[tuple[int, str]] = set()

    def summed(self, shard: int, primary: str) -> None:
        """A primary has the sum of a shard."""
        self._summed.add((shard, primary))

    def hung(
        self, shards: Mapping[int, Facts], began: float, now: float, limit_s: float
    ) -> set[str]:
        """Living primaries without a sum after `limit_s`, of an exchange that this replica has
        begun at `began`."""
        if now < began + limit_s:
            return set()
        found = set()
        for j, facts in shards.items():
            primary = facts.ballot.primary
            is_waiting = facts.state is FOLLOWING and facts.begun is not None
            if not is_waiting or facts.target() != primary or facts.is_dead(primary):
                continue
            wait = (j, primary)
            since = self._since.setdefault(wait, began if facts.ballot.is_first else now)
            if wait not in self._summed and now >= since + limit_s:
                found.add(primary)
        return found
