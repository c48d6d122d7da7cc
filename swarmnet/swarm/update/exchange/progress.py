"""Who gets something done in an exchange, and who lives and does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update.shard_facts import CLIPPING, COPYING, FOLLOWING, STEPPING, Facts
from swarmnet.swarm.update.exchange.pace import ExchangePace
from swarmnet.swarm.update.members import ExchangeMembers

log = logging.getLogger("swarmnet.averaging")


class Progress:
    """Of one exchange, as one replica knows it.

    A primary tells who waits long for a result when it has the sum: from then on other stages may
    be what it waits for. One that has none in time hangs, and so does who does not answer a call in
    the time that it has."""

    def __init__(
        self, number: int, members: ExchangeMembers, pace: ExchangePace, refresh: Callable[[], None]
    ) -> None:
        """`refresh()` when there is one more that is as good as dead."""
        self._number = number
        self._members = members
        self._pace = pace
        self._refresh = refresh
        self.is_usual = True
        """Nobody had to be waited for who was suspected."""
        self.summed: set[int] = set()
        """Shards whose sum is made here."""
        self.missed: set[str] = set()
        """Who lives, was waited for, and has sent nothing."""
        self._found: set[str] = set()
        self._has_state: dict[tuple[str, int], bool] = {}
        """By peer and shard, whether it has the optimizer state, by its own word."""
        self._waits = SumWaits()
        self._behind_at: dict[str, float] = {}
        """When a primary was last seen in the exchange before this one."""

    def begins(self, j: int, command: do.Command) -> None:
        """Work on the shard that is begun here."""
        if isinstance(command, do.Sum):
            self.summed.discard(j)
            self.missed.update(command.absent)
        elif isinstance(command, do.FindNorm | do.Step):
            self.summed.add(j)

    def waits(self) -> None:
        """For a suspected member."""
        self.is_usual = False

    def came(self, sender: str) -> None:
        """A contribution is here, in time or not."""
        self.missed.discard(sender)
        self._pace.straggled(sender)  # in the exchange before, it was slow and no more

    def told_of_state(self, peer_id: str, j: int, *, is_here: bool) -> None:
        """A peer has the optimizer state that the step on a shard begins with, or has not. What it
        has it has for the exchange: the word that it had not may come later, since it was said with
        a gradient."""
        self._has_state[peer_id, j] = is_here or self._has_state.get((peer_id, j), False)

    def is_follower(self, peer_id: str, j: int) -> bool:
        """Whether a sum is of use to a peer, as far as is known."""
        return self._has_state.get((peer_id, j), True)

    def has_sum(self, j: int, primary: str) -> None:
        """Says that primary."""
        self._waits.summed(j, primary)

    def look(self, shards: Mapping[int, Facts], began: float | None, now: float) -> None:
        """For primaries that hang. `began`: when this replica began the exchange, in awake seconds
        as `now`; None where it has not. Who is still at work itself may be the one that hangs.

        The time of a primary that is in the exchange before yet has not begun: beside rounds one
        may end at one replica long before it does at another. So are contributions waited for."""
        primaries = {facts.ballot.primary for facts in shards.values()}
        for peer_id in self._members.behind(primaries, self._number):
            self._behind_at[peer_id] = now
        is_at_work = any(
            facts.state in (STEPPING, COPYING) or (facts.state is CLIPPING and j not in self.summed)
            for j, facts in shards.items()
        )
        begin_s, sum_s = self._pace.contributions_s()[1], self._pace.sum_s()
        if began is None or is_at_work or now < began + begin_s:
            return

        def limit_s(peer_id: str) -> float:
            # The sum of one that has not even begun waits for nobody.
            return sum_s if self._members.has_begun(peer_id, self._number) else begin_s

        def since(peer_id: str) -> float:
            return max(began, min(self._behind_at.get(peer_id, began), began + begin_s))

        for peer_id in sorted(self._waits.hung(shards, since, now, limit_s)):
            self.hangs(peer_id)

    def silent(self, peer_id: str) -> None:
        """It has not answered in the time that an exchange takes, if that is known."""
        if self._pace.knows_exchanges and not self._members.behind([peer_id], self._number):
            self.hangs(peer_id)

    def mute(self, peer_id: str) -> None:
        """It has not answered a question in that time, which takes no work."""
        if self._pace.knows_exchanges:
            self.hangs(peer_id)
            self._members.found_mute(peer_id)
            self._refresh()

    def leads(self, peer_id: str) -> None:
        """It takes over: it gets as long as the one before it."""
        if peer_id in self._found:
            self._found.discard(peer_id)
            self._members.works(peer_id)
            self._refresh()

    def hangs(self, peer_id: str) -> None:
        """Nobody waits for its work here any more."""
        if peer_id in self._found:
            return
        self._found.add(peer_id)
        log.info("round %d: %s lives and gets nothing done", self._number, peer_id[-8:])
        self.missed.add(peer_id)
        self._members.found_hung(peer_id, self._number)
        self._refresh()


class SumWaits:
    """Whose sums are waited for. Times are awake seconds."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}
        """By shard and primary, since when its sum is waited for."""
        self._summed: set[tuple[int, str]] = set()

    def summed(self, shard: int, primary: str) -> None:
        """A primary has the sum of a shard."""
        self._summed.add((shard, primary))

    def hung(
        self,
        shards: Mapping[int, Facts],
        began: Callable[[str], float],
        now: float,
        limit_s: Callable[[str], float],
    ) -> set[str]:
        """Living primaries without a sum after the limit of each, of an exchange that this replica
        has begun, which began for a primary at `began`."""
        found = set()
        for j, facts in shards.items():
            primary = facts.ballot.primary
            is_waiting = facts.state is FOLLOWING and facts.begun is not None
            if not is_waiting or facts.target() != primary or facts.is_dead(primary):
                continue
            wait = (j, primary)
            since = self._since.setdefault(wait, began(primary) if facts.ballot.is_first else now)
            if wait not in self._summed and now >= since + limit_s(primary):
                found.add(primary)
        return found
