"""What is behind the results of exchanges: whose contributions, how many tokens.

Kept for a few exchanges after they are over, for stragglers and for the report of lost samples."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.methods.update import ShardReply
from swarmnet.methods.update_proof import Proof
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.sync_modes import MOST_LATE
from swarmnet.protocol.update import robust
from swarmnet.protocol.update.exchange_turn import may_be_asked
from swarmnet.protocol.update.late_tokens import Late, added, joined, within
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import RunSettings
from swarmnet.swarm.update.exchange.norms import Norms

UNKNOWN = -1
"""Tokens behind a result that was told without them."""


@dataclass
class Books:
    """Of one replica's stage."""

    gossip: Gossip
    settings: RunSettings
    replica: Replica
    norms: Norms

    def __post_init__(self) -> None:
        self._tokens: dict[tuple[int, int], int] = {}
        """By exchange and shard."""
        self._senders: dict[tuple[int, int], frozenset[str]] = {}
        """By exchange and shard: of sums that were made here, or that a step was copied from."""
        self._brought: dict[tuple[int, int], dict[str, Late]] = {}
        """By exchange and shard, by contributor: of its tokens, those that were late before."""
        self._late: dict[tuple[int, int], Late] = {}
        """By exchange and shard: of the tokens behind the result, those that were late before."""
        self._counted: dict[int, int] = {}
        """In mode `local`: tokens that rounds counted, by the word of the feeders."""
        self._neighbours: dict[tuple[int, int], frozenset[str]] = {}
        """By exchange and shard: whose contributions count, since they were in the own one."""
        self._copies: dict[tuple[int, int], dict[str, bytes]] = {}
        """By exchange and shard: backups of the newest step made here, with the digests of what
        they made."""
        self._alike: dict[int, str] = {}
        """By shard: the last primary whose step was, to the bit, the one that was copied here."""

    def summed(self, exchange: int, shard: int, senders: frozenset[str]) -> None:
        """A sum has been made here."""
        key = exchange, shard
        self._senders[key] = senders
        brought = self._brought.get(key, {})
        self._late[key] = added(late for p, late in brought.items() if p in senders)
        self._copies.pop(key, None)

    def counts_own(self, exchange: int, shard: int) -> bool | None:
        """Whether the own contribution is in the sum that a step was copied from; None where its
        primary has not signed whose are."""
        senders = self._senders.get((exchange, shard))
        return self.gossip.own.peer_id in senders if senders else None

    def counts_too(self, exchange: int, shard: int, neighbours: Collection[str]) -> None:
        """The own contribution is in the result, and those of these in that."""
        self._neighbours[(exchange, shard)] = frozenset(neighbours)

    def brings(self, exchange: int, shard: int, contributor: str, late: Late) -> None:
        """So many tokens of a contribution were late in exchanges before."""
        if any(late):
            self._brought.setdefault((exchange, shard), {})[contributor] = late

    def brought(self, exchange: int, shard: int, contributor: str) -> Late:
        """As it was said with `brings`."""
        return self._brought.get((exchange, shard), {}).get(contributor, ())

    def late_behind(self, exchange: int, shard: int) -> Late:
        """Of the tokens behind a result, or behind the sum that was made here, those that were late
        in exchanges before."""
        key = exchange, shard
        return within(self._late.get(key, ()), max(0, self._tokens.get(key, 0)))

    def tokens_behind(self, exchange: int, shard: int) -> int:
        """Behind a result; 0 where that is not known."""
        return max(0, self._tokens.get((exchange, shard), 0))

    def copied(self, exchange: int, shard: int, backup: str, digest: bytes) -> None:
        """A backup has made the step too."""
        self._copies.setdefault((exchange, shard), {})[backup] = digest

    def takes_copy(self, exchange: int, shard: int, remote: str, digest: bytes) -> bool:
        """Whether a peer need not be given a result, for it has made the same. It is told so once:
        if it comes again it has its copy no more."""
        copy = self._copies.get((exchange, shard), {}).pop(remote, b"")
        return copy == digest != b""

    def made_alike(self, shard: int, primary: str) -> None:
        """The step that was copied here for a primary is, as it says, the same to the bit."""
        self._alike[shard] = primary

    def makes_alike(self, shard: int, primary: str) -> bool:
        """Its machine makes the bits that this one makes, as it has said of a step before."""
        return self._alike.get(shard) == primary

    def stepped(self, exchange: int, shard: int, num_tokens: int, late: Late | None = None) -> None:
        """So many tokens are behind a result. `late`: of them, as a primary says, those that were
        late in exchanges before; None where the sum was made here."""
        self._tokens[(exchange, shard)] = num_tokens
        if late is not None:
            self._late[(exchange, shard)] = late

    def heard(self, exchange: int, shard: int, told: ShardReply) -> None:
        """What came with a result."""
        if told.num_tokens >= 0:
            self.stepped(exchange, shard, told.num_tokens, joined(told.late, told.older))
        if told.norm >= 0:
            self.norms.heard(exchange, told.norm)

    def told(
        self,
        exchange: int,
        shard: int,
        remote: str,
        coming: int | None = None,
        *,
        is_copy: bool = False,
        proof: Proof | None = None,
        summed: Proof | None = None,
        is_late: bool = False,
    ) -> ShardReply:
        """What a contributor is told with its result. `coming`: the round that begins with it;
        `is_late`: its contribution counts in the next one."""
        late, key = self.late_behind(exchange, shard), (exchange, shard)
        return ShardReply(
            exchange + 1 if coming is None else coming,
            remote in self._senders.get(key, ()) or remote in self._neighbours.get(key, ()),
            self._tokens.get((exchange, shard), UNKNOWN),
            self.norm(exchange),
            is_copy,
            proof,
            summed,
            sum(late),
            is_late,
            late[1:],
        )

    def norm(self, exchange: int) -> float:
        """Of the gradient of all stages, as it was taken here; -1 where it is not known."""
        known = self.norms.known(exchange)
        return -1.0 if known is None else known

    def least_tokens(self, exchange: int, shards: Sequence[int]) -> int | None:
        """Behind the worst of these shards; None where it is not known of all."""
        known = [self._tokens.get((exchange, j), UNKNOWN) for j in shards]
        return min(known) if known and UNKNOWN not in known else None

    def samples_in(self, exchange: int, committed: int) -> int:
        """How many of a round's committed samples are in its update, as a mean of all shards; all
        of them where that is not known."""
        known = [n for (of, _), n in self._tokens.items() if of == exchange and n != UNKNOWN]
        counted = self.counted_tokens(exchange)
        if not known or not counted:
            return committed
        return min(committed, round(committed * sum(known) / (len(known) * counted)))

    def counted_tokens(self, exchange: int) -> int:
        """Of a round, by the word of the feeders; 0 where contributions are of several rounds."""
        return 0 if self.replica.plan.is_local else self._counted_in(exchange)

    def note_counted(self, round_index: int) -> None:
        """Of a round that is over here, in mode `local`: its exchange may come rounds later."""
        self._counted[round_index] = self._whole_count(round_index)
        oldest = round_index - (MOST_LATE + 1) * self.replica.plan.local_steps
        for old in [q for q in self._counted if q < oldest]:
            del self._counted[old]

    def counted_behind(self, exchange: int, shard: int) -> int:
        """Of all rounds whose work is in the exchange of a shard, those too that feeders have yet
        to tell of (`robust.whole_count`); 0 where this peer was not in all of them."""
        plan = self.replica.plan
        if not plan.is_local:
            return self._whole_count(exchange)
        window = plan.window(shard, exchange)
        counted = self._counted_of(window)
        return counted + self._left_out(shard, exchange) if counted else 0

    def _counted_of(self, window: range) -> int:
        known = [self._counted.get(q, 0) for q in window]
        return sum(known) if all(known) else 0

    def _left_out(self, shard: int, exchange: int) -> int:
        """What exchanges before this one counted that is behind no result yet may be late, and come
        with it; as far as is known."""
        plan, left = self.replica.plan, 0
        before = plan.exchanges_before(shard, exchange, MOST_LATE)
        for age, e in enumerate(before):
            tokens = self._tokens.get((e, shard), UNKNOWN)
            if tokens == UNKNOWN:
                continue
            came = tokens - sum(self.late_behind(e, shard))
            for k, later in enumerate(before[:age]):
                came += sum(self.late_behind(later, shard)[age - k - 1 : age - k])
            left += max(0, self._counted_of(plan.window(shard, e)) - came)
        return left

    def _counted_in(self, round_index: int) -> int:
        return self._progress(round_index).tokens

    def _whole_count(self, round_index: int) -> int:
        known = self._progress(round_index)
        num_slots = self.settings.slots.of(round_index)
        return robust.whole_count(known.tokens, known.num_flights, num_slots)

    def _progress(self, round_index: int) -> progress.RoundProgress:
        now = asyncio.get_running_loop().time()
        num_slots = self.settings.slots.of(round_index)
        return progress.round_progress(self.gossip.view, round_index, now, num_slots)

    def finish_round(self, exchange: int) -> None:
        """Forgets exchanges that no replica asks about any more."""
        plan = self.replica.plan
        books: tuple[dict[tuple[int, int], Any], ...] = (
            self._tokens,
            self._senders,
            self._neighbours,
            self._brought,
            self._late,
            self._copies,
        )
        # What may come late for an exchange is told by what is behind those since.
        kept = (MOST_LATE + 1) * plan.local_steps if plan.is_local else 0
        for known in books:
            is_small = known is self._tokens or known is self._late
            oldest = exchange + 1 - (kept if is_small else 0)
            for r, j in [
                (r, j) for r, j in known if r < oldest and not may_be_asked(plan, j, r, exchange)
            ]:
                del known[r, j]
