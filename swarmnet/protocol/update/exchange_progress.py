"""Who gets something done in an exchange, and who lives and does not. Pure.

A primary tells who waits long for a result when it has the sum: from then on other stages may be
what it waits for, until the norm of all stages is known. One that has no sum in time hangs, and so
does who does not answer a call in the time that it has. One that has no result in time after that
owes it: it is as good as gone, for this exchange."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from swarmnet.protocol.update import commands as do
from swarmnet.protocol.update.roster import SUSPECT, Ballot, MemberStatus
from swarmnet.protocol.update.shard_state import (
    CANVASSING,
    CLIPPING,
    COPIED,
    COPYING,
    FOLLOWING,
    STEPPING,
    ShardState,
)


class ExchangeProgress:
    """What one replica knows of one exchange. Times are seconds awake."""

    def __init__(self) -> None:
        self.is_usual = True
        """Nobody had to be waited for who was suspected."""
        self.summed: set[int] = set()
        """Shards whose sum is made here."""
        self.taken: set[int] = set()
        """Shards whose owners have made the step, as this replica heard when about to leave."""
        self.missed: set[str] = set()
        """Who lives, was waited for, and has sent nothing."""
        self._suspected: set[str] = set()
        """Who is not back yet."""
        self._came_back: set[str] = set()
        self._hung: set[str] = set()
        self._has_state: dict[tuple[str, int], bool] = {}
        """By peer and shard, whether it has the optimizer state, by its own word."""
        self._waits = SumWaits()
        self._results = ResultWaits()
        self._held_up = HeldUp()
        self._unled_since: dict[tuple[int, Ballot], float] = {}
        """By shard and ballot, since when its primary is dead to this replica."""
        self._behind_at: dict[str, float] = {}
        """When a primary was last seen in the exchange before this one."""

    def begins(self, shard: int, command: do.Command) -> None:
        """Notes work on a shard that is begun here."""
        if isinstance(command, do.Sum):
            self.summed.discard(shard)
            self.missed.update(command.absent)
        elif isinstance(command, do.FindNorm | do.Step):
            self.summed.add(shard)

    def back(self, members: Mapping[str, MemberStatus]) -> set[str]:
        """Notes which members are suspected, and so waited for. Returns those that were at the look
        before, or earlier, and are back: each once, for one that comes and goes would never be done
        with."""
        suspected = {p for p, status in members.items() if status.life == SUSPECT}
        self.is_usual = self.is_usual and not suspected
        waited_for = {p for p, status in members.items() if status.is_waited_for}
        back = (self._suspected & waited_for) - suspected
        self._suspected = self._suspected - back | suspected
        found = back - self._came_back
        self._came_back |= found
        return found

    def came(self, sender: str) -> None:
        """Notes a contribution, in time or not."""
        self.missed.discard(sender)

    def told_of_state(self, peer_id: str, shard: int, *, is_here: bool) -> None:
        """Notes that a peer has the optimizer state that the step on a shard begins with, or has
        not. What it has it has for the exchange: the word that it had not may come later, since it
        was said with a gradient."""
        self._has_state[peer_id, shard] = is_here or self._has_state.get((peer_id, shard), False)

    def is_follower(self, peer_id: str, shard: int) -> bool:
        """Whether a sum is of use to a peer, as far as is known."""
        return self._has_state.get((peer_id, shard), True)

    def has_sum(self, shard: int, primary: str) -> None:
        """Notes that a primary has a sum, as it says."""
        self._waits.summed(shard, primary)

    def is_summed(self, shard: int, primary: str) -> bool:
        """Whether it is known here that a primary has a sum."""
        return shard in self.summed or self._waits.is_summed(shard, primary)

    def hanging(
        self,
        shards: Mapping[int, ShardState],
        began: float | None,
        now: float,
        behind: Iterable[str],
        has_begun: Container[str],
        begin_s: float,
        sum_s: float,
    ) -> list[str]:
        """Primaries that hang, and neighbours between them and this replica; ascending. `began`:
        when this replica began the exchange; None where it has not. Who is still at work itself may
        be the one that hangs.

        `behind`: primaries that are in the exchange before. Their time begins when they have left
        it, within `begin_s`: beside rounds one may end at one replica long before it does at
        another. `has_begun`: who has closed the round; it has `sum_s` for its sum, and who has not
        has `begin_s`, for its sum waits for nobody."""
        for peer_id in behind:
            self._behind_at[peer_id] = now
        if began is None or self._is_at_work(shards) or now < began + begin_s:
            return []

        def limit_s(peer_id: str) -> float:
            return sum_s if peer_id in has_begun else begin_s

        def since(peer_id: str) -> float:
            return max(began, min(self._behind_at.get(peer_id, began), began + begin_s))

        return sorted(self._waits.hung(shards, since, now, limit_s))

    def _is_at_work(self, shards: Mapping[int, ShardState]) -> bool:
        return any(
            shard.state in (STEPPING, COPYING) or (shard.state is CLIPPING and j not in self.summed)
            for j, shard in shards.items()
        )

    def owing(
        self,
        shards: Mapping[int, ShardState],
        now: float,
        longest_s: Mapping[str, float],
        *,
        has_norm: bool,
    ) -> list[str]:
        """As `ResultWaits.owing`, ascending. Who is still at work itself may be what is waited
        for. `has_norm`: that of all stages is known here."""
        if self._is_at_work(shards):
            return []
        has_sum = {j for j, s in shards.items() if self._waits.is_summed(j, s.ballot.primary)}
        self._results.look(shards, now, has_sum, has_norm=has_norm)
        return sorted(self._results.owing(shards, now, longest_s))

    def is_owed(self, shard: int, primary: str, now: float, longest_s: float) -> bool:
        """As `ResultWaits.is_owed`."""
        return self._results.is_owed(shard, primary, now, longest_s)

    def owes(self, peer_id: str) -> bool:
        """As `hangs`, of a primary with a sum. What it contributes later does not make the wait
        for its result a measure of what an exchange takes."""
        self.is_usual = False
        return self.hangs(peer_id)

    def holding_up(
        self, shards: Mapping[int, ShardState], now: float, longest_s: float
    ) -> list[str]:
        """As `HeldUp.found`, ascending."""
        return sorted(self._held_up.found(shards, now, longest_s))

    def unled(self, shards: Mapping[int, ShardState], now: float, longest_s: float) -> list[int]:
        """Shards without a primary for `longest_s`, ascending, each once a ballot."""
        open_now = {
            (j, shard.ballot)
            for j, shard in shards.items()
            if shard.state in (FOLLOWING, CANVASSING) and shard.is_leaderless()
        }
        self._unled_since = {key: self._unled_since.get(key, now) for key in open_now}
        due = (j for (j, _), since in self._unled_since.items() if now >= since + longest_s)
        return sorted(j for j in due if not shards[j].is_unled)

    def hangs(self, peer_id: str) -> bool:
        """Notes that nobody waits for the work of a peer here any more. False where that was
        so."""
        if peer_id in self._hung:
            return False
        self._hung.add(peer_id)
        self.missed.add(peer_id)
        return True

    def leads(self, peer_id: str) -> bool:
        """Notes that a peer takes over, and gets as long as the one before it. True where it was
        found to hang."""
        is_back = peer_id in self._hung
        self._hung.discard(peer_id)
        return is_back


class SumWaits:
    """Whose sums are waited for. Times are seconds awake."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}
        """By shard and primary, since when its sum is waited for."""
        self._summed: set[tuple[int, str]] = set()

    def summed(self, shard: int, primary: str) -> None:
        """Notes that a primary has the sum of a shard."""
        self._summed.add((shard, primary))

    def is_summed(self, shard: int, primary: str) -> bool:
        """As it was noted."""
        return (shard, primary) in self._summed

    def hung(
        self,
        shards: Mapping[int, ShardState],
        began: Callable[[str], float],
        now: float,
        limit_s: Callable[[str], float],
    ) -> set[str]:
        """Living primaries without a sum after the limit of each, of an exchange that this replica
        has begun, which began for a primary at `began`. Where a neighbour stands between, it is
        that one, for its word is all that comes; and only then the primary, from that time on."""
        found = set()
        for j, shard in shards.items():
            primary, asked = shard.ballot.primary, shard.target()
            is_waiting = shard.state is FOLLOWING and shard.begun is not None
            if not is_waiting or asked not in (primary, shard.neighbour) or shard.is_dead(asked):
                continue
            is_first = shard.ballot.is_first and (j, shard.neighbour) not in self._since
            since = self._since.setdefault((j, asked), began(asked) if is_first else now)
            is_summed = (j, primary) in self._summed
            if not is_summed and now >= since + limit_s(asked):
                found.add(asked)
        return found


class ResultWaits:
    """Whose results are waited for, that wait for nobody themselves: with the norm of all stages,
    which has the first primary's sum in it; with the sum, where no norm is needed; and with the
    step that a backup has copied. Times are seconds awake."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}
        """By shard and who is asked for its result, since when that is known here."""

    def look(
        self,
        shards: Mapping[int, ShardState],
        now: float,
        has_sum: Container[int],
        *,
        has_norm: bool,
    ) -> None:
        """Notes who waits for nobody. `has_sum`: shards whose primary has said so."""
        for j, shard in shards.items():
            if shard.state is COPIED:
                is_due = True
            elif shard.state is FOLLOWING and shard.begun is not None:
                may_wait = shard.roster.clips and not has_norm
                is_due = not may_wait and (j in has_sum or (has_norm and shard.ballot.is_first))
            else:
                is_due = False
            if is_due:
                self._since.setdefault((j, shard.target()), now)

    def owing(
        self, shards: Mapping[int, ShardState], now: float, longest_s: Mapping[str, float]
    ) -> set[str]:
        """Living primaries, and neighbours between them and this replica, of which nothing has come
        in `longest_s` of each after they wait for nobody."""
        found = set()
        for j, shard in shards.items():
            primary, asked = shard.ballot.primary, shard.target()
            is_waiting = shard.state in (FOLLOWING, COPIED) and shard.begun is not None
            if not is_waiting or asked not in (primary, shard.neighbour) or shard.is_dead(asked):
                continue
            # Who has taken over waits for all that have yet to find the one before it.
            times = 1 if shard.ballot.is_first else 2
            if self.is_owed(j, asked, now, times * longest_s[asked]):
                found.add(asked)
        return found

    def is_owed(self, shard: int, peer_id: str, now: float, longest_s: float) -> bool:
        """It waits for nobody since so long."""
        since = self._since.get((shard, peer_id))
        return since is not None and now >= since + longest_s


class HeldUp:
    """Shards whose primary is dead to this replica, and lives by the word of another member: that
    one is to have its result then. Times are seconds awake."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, Ballot, str], float] = {}
        """By shard, ballot and member, since when it has said so."""

    def found(self, shards: Mapping[int, ShardState], now: float, longest_s: float) -> set[str]:
        """Members of whose word nothing has come in `longest_s`, in which a primary that lives and
        has none would be found to hang: there is none there, whatever they say."""
        open_now = {
            (j, shard.ballot)
            for j, shard in shards.items()
            if shard.state in (FOLLOWING, CANVASSING) and shard.is_leaderless()
        }
        for j, ballot in open_now:
            if (host := shards[j].host) is not None:
                self._since.setdefault((j, ballot, host), now)
        self._since = {key: at for key, at in self._since.items() if key[:2] in open_now}
        return {host for (_, _, host), at in self._since.items() if now >= at + longest_s}
