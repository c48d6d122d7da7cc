"""What is behind the results of exchanges: whose contributions, how many tokens.

Kept for a few exchanges after they are over, for stragglers and for the report of lost samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet.methods.update import ShardReply
from swarmnet.methods.update_proof import Proof
from swarmnet.protocol.pipeline import progress
from swarmnet.protocol.update import robust
from swarmnet.protocol.update.members import BEHIND_ROUNDS
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
        """By exchange and shard: of sums that were made here."""
        self._counted: dict[int, int] = {}
        """In mode `local`: tokens that rounds counted, by the word of the feeders."""
        self._copies: dict[tuple[int, int], dict[str, bytes]] = {}
        """By exchange and shard: backups of the newest step made here, with the digests of what
        they made."""

    def summed(self, exchange: int, shard: int, senders: frozenset[str]) -> None:
        """A sum has been made here."""
        self._senders[(exchange, shard)] = senders
        self._copies.pop((exchange, shard), None)

    def copied(self, exchange: int, shard: int, backup: str, digest: bytes) -> None:
        """A backup has made the step too."""
        self._copies.setdefault((exchange, shard), {})[backup] = digest

    def takes_copy(self, exchange: int, shard: int, remote: str, digest: bytes) -> bool:
        """Whether a peer need not be given a result, for it has made the same. It is told so once:
        if it comes again it has its copy no more."""
        copy = self._copies.get((exchange, shard), {}).pop(remote, b"")
        return copy == digest != b""

    def stepped(self, exchange: int, shard: int, num_tokens: int) -> None:
        """So many tokens are behind a result."""
        self._tokens[(exchange, shard)] = num_tokens

    def heard(self, exchange: int, shard: int, told: ShardReply) -> None:
        """What came with a result."""
        if told.num_tokens >= 0:
            self._tokens[(exchange, shard)] = told.num_tokens
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
    ) -> ShardReply:
        """What a contributor is told with its result. `coming`: the round that begins with it."""
        return ShardReply(
            exchange + 1 if coming is None else coming,
            remote in self._senders.get((exchange, shard), ()),
            self._tokens.get((exchange, shard), UNKNOWN),
            self.norm(exchange),
            is_copy,
            proof,
            summed,
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
        oldest = round_index - 2 * self.replica.plan.local_steps
        for old in [q for q in self._counted if q < oldest]:
            del self._counted[old]

    def counted_behind(self, exchange: int, shard: int) -> int:
        """Of all rounds whose work is in the exchange of a shard, those too that feeders have yet
        to tell of (`robust.whole_count`); 0 where this peer was not in all of them."""
        plan = self.replica.plan
        if not plan.is_local:
            return self._whole_count(exchange)
        known = [self._counted.get(q, 0) for q in plan.window(shard, exchange)]
        return sum(known) if all(known) else 0

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
        oldest = exchange - BEHIND_ROUNDS
        self._tokens = {key: n for key, n in self._tokens.items() if key[0] >= oldest}
        self._senders = {key: p for key, p in self._senders.items() if key[0] >= oldest}
        self._copies = {key: p for key, p in self._copies.items() if key[0] >= oldest}
