"""What this replica signs of its updates, and keeps of what others have signed.

A contributor signs the hash of what it pushes. The primary signs what it sums, before the step, and
the result after it. So whoever does a part of an update again has evidence against its primary, and
none can be made up (`auditing`)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from swarmnet.errors import NotReady, ProtocolViolation
from swarmnet.methods.update import ShardReply
from swarmnet.methods.update_proof import (
    MAX_ENTRIES,
    MAX_PROOF_BYTES,
    SIGNED_AS,
    TAG_BYTES,
    Contribution,
    Entry,
    Proof,
    Stepped,
    Summed,
)
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.sync_modes import GOSSIP
from swarmnet.protocol.update.exchange_turn import may_be_asked
from swarmnet.protocol.update.roster import Ballot
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.pipeline.receipts import hash_of
from swarmnet.swarm.replica.replica import Replica, follows_tied
from swarmnet.wire import Array, pack

Key = tuple[int, int]
"""An exchange and a shard."""


@dataclass(frozen=True, slots=True)
class Given:
    """A contribution, as its contributor has signed it."""

    num_tokens: int
    gradient: bytes
    """Hash of the array."""
    signature: bytes


@dataclass
class Proofs:
    """Of one replica's stage."""

    gossip: Gossip
    replica: Replica
    _given: dict[Key, dict[str, Given]] = field(default_factory=dict)
    """By contributor. Those of others have been checked."""
    _own: dict[Key, Array] = field(default_factory=dict)
    """What this replica contributes, as long as it is needed."""
    _entries: dict[Key, tuple[Entry, ...]] = field(default_factory=dict)
    """Of the newest sum that was made here."""
    _summed: dict[Key, Proof] = field(default_factory=dict)
    """What was signed of the sum with which the step was made here: by this replica, or by the
    primary whose step it is."""
    _stepped: dict[Key, Proof] = field(default_factory=dict)
    """What came with the result, or went with it."""
    _copied: dict[Key, Proof] = field(default_factory=dict)
    """What its primary has signed of the sum of a step that was made here as backup, or what came
    with the result."""
    _alone: set[Key] = field(default_factory=set)
    """Sums of which nothing is signed, for nobody was known who may look at it."""

    @property
    def run_id(self) -> str:
        return self.gossip.own.run_id

    @property
    def is_of_use(self) -> bool:
        """Somebody else may look at a result: the stage has one for all its replicas, and another
        one lives, or may be back."""
        own, now = self.gossip.own.peer_id, asyncio.get_running_loop().time()
        view, index = self.gossip.view, self.replica.index
        members = [*view.members(index, now), *view.lost(index, now)]
        return self.replica.plan.mode != GOSSIP and any(m.peer_id != own for m in members)

    # ---- contributions ----------------------------------------------------------------------

    def gives(self, exchange: int, gradients: Mapping[int, Array | None]) -> None:
        """This replica's contributions, by shard, as they are pushed."""
        self._own.update({(exchange, j): g for j, g in gradients.items() if g is not None})

    def has_given(self, exchange: int, shard: int) -> None:
        """The shard has its result: what the contribution lay in may change."""
        self._own.pop((exchange, shard), None)

    async def own(self, exchange: int, shard: int) -> Array:
        """A copy of what this replica contributes. Raises `NotReady` where it is not kept. It may
        change until it is copied, for what it lies in is used again: who asks looks at its hash."""
        found = self._own.get((exchange, shard))
        if found is None:
            raise NotReady("the contribution is not kept any more")
        if isinstance(found.data, bytes):  # nothing changes it
            return found
        return await self.replica.worker.run(
            lambda: Array(found.dtype, found.shape, bytes(found.data))
        )

    async def sign(self, exchange: int, given: Mapping[int, tuple[int, Array]]) -> dict[int, bytes]:
        """Signatures of this replica's contributions, by shard; each is made once."""
        own = self.gossip.own.peer_id
        left = {j: g for j, g in given.items() if own not in self._given.get((exchange, j), {})}
        if left:
            await self.replica.worker.run(
                lambda: [self._sign(exchange, j, n, array) for j, (n, array) in left.items()]
            )
        return {j: self._given[exchange, j][own].signature for j in given}

    def _sign(self, exchange: int, shard: int, num_tokens: int, array: Array) -> Given:
        """On the worker."""
        own, hashed = self.gossip.own.peer_id, hash_of(array)
        said = self._contribution(own, exchange, shard, num_tokens, hashed)
        made = Given(num_tokens, hashed, self.gossip.signer.sign(said.signed))
        self._given.setdefault((exchange, shard), {})[own] = made
        return made

    async def check(
        self,
        exchange: int,
        contributor: str,
        pushed: Mapping[int, tuple[int, Array]],
        signatures: Sequence[bytes],
    ) -> None:
        """What has been pushed, by shard in the order of its signatures. Raises
        `ProtocolViolation` where it is not what its contributor has signed."""
        if len(signatures) != len(pushed):
            raise ProtocolViolation("not a signature for each contribution")
        if not pushed:
            return

        def work() -> dict[int, Given]:
            found = {}
            for signature, (j, (num_tokens, array)) in zip(signatures, pushed.items(), strict=True):
                given = Given(num_tokens, hash_of(array), signature)
                if not self.has_signed(contributor, exchange, self.replica.index, j, given):
                    raise ProtocolViolation("a contribution that is not signed by who gives it")
                found[j] = given
            return found

        for j, given in (await self.replica.worker.run(work)).items():
            self._given.setdefault((exchange, j), {})[contributor] = given

    def has_signed(
        self, contributor: str, exchange: int, stage: int, shard: int, given: Given
    ) -> bool:
        """Whether the signature is that of the contributor. On any thread."""
        said = Contribution(
            self.run_id, contributor, exchange, stage, shard, given.num_tokens, given.gradient
        )
        return self.gossip.signer.verify(contributor, said.signed, given.signature)

    def _contribution(
        self, peer_id: str, exchange: int, shard: int, num_tokens: int, gradient: bytes
    ) -> Contribution:
        index = self.replica.index
        return Contribution(self.run_id, peer_id, exchange, index, shard, num_tokens, gradient)

    def own_tag(self, exchange: int, shard: int) -> bytes | None:
        """Of the own contribution, as it has to be among those of the sum; None where there is
        none."""
        own = self.gossip.own.peer_id
        given = self._given.get((exchange, shard), {}).get(own)
        if given is None:
            return None
        return tag_of(self._contribution(own, exchange, shard, given.num_tokens, given.gradient))

    # ---- as primary -------------------------------------------------------------------------

    def sums(self, exchange: int, shard: int, *, is_alone: bool = False) -> None:
        """A sum is made here: what was signed of an earlier one does not hold. None of its results
        has been given out. `is_alone`: nobody is known who may look at it, so that nothing is
        signed of it, nor of its step for one that comes before that is made."""
        key = exchange, shard
        for known in (self._summed, self._entries, self._stepped, self._copied):
            known.pop(key, None)
        (self._alone.add if is_alone else self._alone.discard)(key)

    def behind(
        self,
        exchange: int,
        shard: int,
        parts: Sequence[tuple[str, int, Array]],
        counted: Mapping[str, tuple[int, float]],
    ) -> tuple[Entry, ...]:
        """On the worker: what a sum is made of. `counted`: by peer, the tokens that count, and the
        factor; none of those that were left out."""
        own, key, found = self.gossip.own.peer_id, (exchange, shard), list[Entry]()
        for peer_id, num_tokens, array in parts:
            given = self._given.get(key, {}).get(peer_id)
            if given is None and peer_id == own:
                given = self._sign(exchange, shard, num_tokens, array)
            if given is None:
                return ()  # of a mode or a shard of which nothing is signed
            tokens, factor = counted.get(peer_id, (0, 0.0))
            found.append(
                Entry(peer_id, given.num_tokens, given.gradient, given.signature, tokens, factor)
            )
        return tuple(found)

    def summed(
        self,
        exchange: int,
        shard: int,
        term: int,
        entries: tuple[Entry, ...],
        total: bytes,
        num_tokens: int,
        scale: float,
        steps: int,
        squares: float,
    ) -> Proof | None:
        """Signs what the step is made with; None where that is too much, or nothing is known of
        it."""
        own, key = self.gossip.own, (exchange, shard)
        if not 0 < len(entries) <= MAX_ENTRIES:
            return None
        said = Summed(
            own.run_id,
            own.peer_id,
            own.incarnation,
            exchange,
            self.replica.index,
            shard,
            term,
            entries,
            total,
            num_tokens,
            scale,
            steps,
            squares,
        )
        proof = self._sealed(pack(said))
        if len(proof.statement) > MAX_PROOF_BYTES:
            return None
        self._summed[key], self._entries[key] = proof, entries
        return proof

    def stepped(self, exchange: int, shard: int, term: int, result: bytes) -> Proof | None:
        """Signs the result of a step that was made here, once. `result`: its hash."""
        own, key = self.gossip.own, (exchange, shard)
        known = self._stepped.get(key)
        if known is not None or not result or key in self._alone:
            return known
        summed = self._summed.get(key)
        entries = self._entries.get(key, ()) if summed is not None else ()
        tags = tuple(tag_of(self._of_entry(exchange, shard, entry)) for entry in entries)
        total = b"" if summed is None else hash_of_proof(summed)
        said = Stepped(
            own.run_id,
            own.peer_id,
            own.incarnation,
            exchange,
            self.replica.index,
            shard,
            term,
            total,
            result,
            tags,
        )
        return self._stepped.setdefault(key, self._sealed(pack(said)))

    def _of_entry(self, exchange: int, shard: int, entry: Entry) -> Contribution:
        return self._contribution(entry.peer_id, exchange, shard, entry.claimed, entry.gradient)

    def _sealed(self, statement: bytes) -> Proof:
        return Proof(statement, self.gossip.signer.sign(SIGNED_AS + statement))

    # ---- of others --------------------------------------------------------------------------

    def mirrored(self, exchange: int, shard: int, summed: Proof, said: Summed) -> None:
        """As backup: the step is made with this."""
        self._summed[exchange, shard] = self._copied[exchange, shard] = summed
        self._entries[exchange, shard] = said.entries

    def came(self, exchange: int, shard: int, stepped: Proof, summed: Proof | None) -> None:
        """They came with the result that is taken."""
        self._stepped[exchange, shard] = stepped
        self._copied.pop((exchange, shard), None)
        if summed is not None:
            self._copied[exchange, shard] = summed

    def sum_behind(self, exchange: int, shard: int) -> Proof | None:
        """What the primary whose step it was has signed of its sum, where that is known here."""
        key = exchange, shard
        return self._copied.get(key) or self._summed.get(key)

    def names_own(self, told: ShardReply) -> bool:
        """A contribution of this replica is in the sum whose primary has signed so: whoever tells
        of the result may not know it."""
        try:
            said = None if told.summed is None else told.summed.read(Summed)
        except ProtocolViolation:
            return False
        own = self.gossip.own.peer_id
        return said is not None and any(e.peer_id == own and e.factor for e in said.entries)

    def not_shown(
        self,
        exchange: int,
        shard: int,
        told: ShardReply,
        values: Array,
        *,
        is_unchanged: bool,
        is_known: bool,
    ) -> str:
        """On the worker: why a result is none, by what is signed of it; empty where it may be one.
        `is_unchanged`: it leaves the parameters as they are; `is_known`: it comes from
        its primary, to which this replica is known."""
        try:
            said = None if told.proof is None else told.proof.read(Stepped)
            summed = None if told.summed is None else told.summed.read(Summed)
        except ProtocolViolation as e:
            return str(e)
        where = self.run_id, exchange, self.replica.index, shard
        if said is None or told.proof is None:
            return "nothing is signed of it" if is_known else ""
        if (said.run_id, said.round, said.stage, said.shard) != where:
            return "what is signed is of something else"
        if not said.total and not is_unchanged:
            return "it is a step with no sum"
        signed = [(told.proof, said.peer_id)]
        if said.total:
            if summed is None or told.summed is None or hash_of_proof(told.summed) != said.total:
                return "its sum is not shown"
            if (summed.run_id, summed.round, summed.stage, summed.shard) != where:
                return "its sum is of something else"
            signed.append((told.summed, summed.peer_id))
        is_same = not self._is_signed_as_it_comes(values) or hash_of(values) == said.result
        is_signed = is_same and all(self.is_signed(*of) for of in signed)
        return "" if is_signed else "it is not what was signed"

    def _is_signed_as_it_comes(self, values: Array) -> bool:
        """What was signed are these bytes, and not codes that lead to them."""
        return values.dtype != "float32" or self.replica.optimizer.codec.names.results == NONE

    async def maker(
        self, exchange: int, shard: int, sender: str, told: ShardReply, values: Array
    ) -> Ballot | None:
        """The ballot of the primary whose signature a result bears that another replica tells; of
        its teller where it bears none; None where nothing is signed of the shard. Where the codes
        of the result are gone, the digest in the record of one more shows it: its own."""
        if follows_tied(self.replica, shard):
            return None

        def work() -> Ballot:
            return self._signer(exchange, shard, told, values) or Ballot(0, sender)

        found = await self.replica.worker.run(work)
        if found.primary != sender or values.dtype != "float32":
            return found
        digest = await self.replica.worker.run(lambda: xxhash.xxh3_64_digest(values.data))
        now, plan = asyncio.get_running_loop().time(), self.replica.plan
        for other in self.gossip.view.known(self.replica.index, now):
            is_after = plan.parameter_version(other.round) == exchange + 1
            if is_after and other.peer_id != sender and other.digest(shard) == digest:
                return Ballot(0, other.peer_id)
        return found

    def _signer(self, exchange: int, shard: int, told: ShardReply, values: Array) -> Ballot | None:
        """On the worker: who has signed the result, or the sum with which another one has made the
        same step."""
        where = self.run_id, exchange, self.replica.index, shard
        try:
            said = None if told.proof is None else told.proof.read(Stepped)
            summed = None if told.summed is None else told.summed.read(Summed)
        except ProtocolViolation:
            return None
        if said is None or told.proof is None or said.result != hash_of(values):
            return None
        if (said.run_id, said.round, said.stage, said.shard) != where:
            return None
        if not self.is_signed(told.proof, said.peer_id):
            return None
        if summed is None or told.summed is None or hash_of_proof(told.summed) != said.total:
            return Ballot(said.term, said.peer_id)
        if (summed.run_id, summed.round, summed.stage, summed.shard) != where:
            return None
        is_shown = self.is_signed(told.summed, summed.peer_id)
        return Ballot(summed.term, summed.peer_id) if is_shown else None

    def summed_of(self, exchange: int, shard: int) -> Proof | None:
        """What the step here was made with."""
        return self._summed.get((exchange, shard))

    def stepped_of(self, exchange: int, shard: int) -> Proof | None:
        """What came with the result, or went with it."""
        return self._stepped.get((exchange, shard))

    def is_signed(self, proof: Proof, peer_id: str) -> bool:
        """On any thread."""
        return self.gossip.signer.verify(peer_id, proof.signed, proof.signature)

    def finish_round(self, exchange: int) -> None:
        """Forgets exchanges that nobody asks about any more."""
        plan = self.replica.plan
        tables: list[dict[Key, Any]] = [
            self._given,
            self._entries,
            self._summed,
            self._stepped,
            self._copied,
        ]
        for known in (*tables, self._own):
            for r, j in [key for key in known if not may_be_asked(plan, key[1], key[0], exchange)]:
                del known[r, j]
        self._alone = {k for k in self._alone if may_be_asked(plan, k[1], k[0], exchange)}


def tag_of(said: Contribution) -> bytes:
    """By which a result names a contribution that is in it."""
    return hashlib.sha256(pack(said)).digest()[:TAG_BYTES]


def hash_of_proof(proof: Proof) -> bytes:
    """Of the statement."""
    return hashlib.sha256(proof.statement).digest()
