"""What a peer publishes about itself.

A record is small, versioned and signed (the signature is kept beside it, see
`swarm.membership.gossip`). Of two records of one peer, the one with the higher (incarnation,
version) is valid, so records may arrive in any order. Counters of a round only grow, except
`launched`: a microbatch that its feeder gives up is subtracted from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from swarmnet.protocol.slots import EMPTY, SlotSet
from swarmnet.protocol.sync_modes import Switch

Stamp = tuple[int, int]
"""(incarnation, version)"""
NO_STAMP: Stamp = (-1, -1)
"""Lower than the stamp of any record."""
OBSERVER_STAGE = -1
KEPT_ROUNDS = 4
"""Rounds whose counters a feeder's record carries."""
DIGEST_BYTES = 8
MAX_ADDRESSES = 16
MAX_TEXT = 256
MAX_SHARDS = 65_536
MAX_CREDENTIAL_BYTES = 1024
MAX_SWITCHES = 8
MAX_RESTORABLE = 16
"""Checkpoints that a peer offers at most."""
MAX_STRIKES = 32
"""Senders of bad contributions that a record names at most."""
SIGNATURE_BYTES = 64
VOUCH_BYTES = 8
"""Of the name of a peer in vouches: the first bytes of the BLAKE2b hash of its id."""
MAX_VOUCHES = 64
"""Peers for which one vouches, at most."""
MAX_UNREACHED = 32
"""Peers that a record names as out of its reach, at most."""
MAX_OWING = 16
"""Peers whose results a record says were waited for in vain, at most."""

JOINING = "joining"
ACTIVE = "active"
LEAVING = "leaving"
LEFT = "left"
OBSERVING = "observing"
STATES = (JOINING, ACTIVE, LEAVING, LEFT, OBSERVING)
MAX_NUMBER = 1 << 62
MAX_COUNT = 1 << 47
"""Tokens of one feeder in a round, at most. The sum over all peers of a view
(`view.MAX_PEERS`) stays below 2^62."""
MAX_LOSS = 1e15
"""The loss of a microbatch, or of held-out data for each token, at most, nats."""
MAX_LOSS_SUM = 1e20
"""The loss of one feeder in a round, at most, nats: sums stay finite."""
MAX_RATE = 1e15
"""Limit of published rates (per second) and times (seconds)."""


@dataclass(frozen=True, slots=True)
class RoundCount:
    """What a feeder did in one round."""

    round: int
    launched: SlotSet = EMPTY
    committed: SlotSet = EMPTY
    """Launched, returned, and counted by this feeder."""
    sealed: bool = False
    """The feeder has no microbatch of this round in flight and launches no more."""
    tokens: int = 0
    loss_sum: float = 0.0
    """Sum over the committed tokens of the loss, in nats."""
    settled: SlotSet = EMPTY
    """Launched, and found to have been counted before, by a feeder whose record does not say so."""

    def __post_init__(self) -> None:
        if not (0 <= self.tokens < MAX_COUNT and 0 <= self.round < MAX_NUMBER):
            raise ValueError("a round's counter is out of range")
        if not abs(self.loss_sum) <= MAX_LOSS_SUM:
            raise ValueError("the loss of a round is out of range")
        if not SlotSet.of(self.committed.mask | self.settled.mask).issubset(self.launched):
            raise ValueError("slots that were committed and not launched")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A feeder's newest measurement on held-out data."""

    round: int
    loss: float
    """Nats per token."""
    bits_per_byte: float
    """NaN-free; 0 where the model is not of text."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.loss) and math.isfinite(self.bits_per_byte)) or self.round < 0:
            raise ValueError("a held-out loss is out of range")


@dataclass(frozen=True, slots=True)
class Restorable:
    """A checkpoint from which a peer could continue (see `protocol.recovery`)."""

    round: int
    """The round that begins with this state."""
    stage: int
    num_shards: int
    holds: bytes
    """As `Record.holds`: shards whose optimizer state is in the checkpoint."""
    history: int = 0
    """`Record.history` at the time."""

    def __post_init__(self) -> None:
        if any(not 0 <= n < MAX_NUMBER for n in (self.round, self.history)):
            raise ValueError("a number of a checkpoint is out of range")
        if not (0 <= self.stage < MAX_SHARDS and 0 < self.num_shards <= MAX_SHARDS):
            raise ValueError("a checkpoint of an impossible stage")
        if len(self.holds) != (self.num_shards + 7) // 8:
            raise ValueError("the shards of a checkpoint are of an impossible number")

    def holds_shard(self, shard_index: int) -> bool:
        return has_bit(self.holds, shard_index)


@dataclass(frozen=True, slots=True)
class Household:
    """What shows that a peer is of a household (see `swarmnet.household`)."""

    key: str
    """Peer id of the household's key."""
    signature: bytes

    def __post_init__(self) -> None:
        if not (0 < len(self.key) <= MAX_TEXT and self.key.isprintable()):
            raise ValueError("the key of a household is no peer id")
        if len(self.signature) != SIGNATURE_BYTES:
            raise ValueError("the signature of a household has an impossible length")


@dataclass(frozen=True, slots=True)
class Owing:
    """One of the stage whose result, as primary, a replica has waited for in vain."""

    peer_id: str
    since: int
    """The first exchange in which others are to lead in its place, as far as this one has a say."""
    until: int
    """The last one."""

    def __post_init__(self) -> None:
        if not 0 < len(self.peer_id) <= MAX_TEXT:
            raise ValueError("a peer id is too long")
        if not 0 <= self.since <= self.until < MAX_NUMBER:
            raise ValueError("the exchanges in which one is passed over are out of range")


NOTHING_DECLARED = (-1, 0)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Record:
    """What a peer publishes about itself."""

    peer_id: str
    run_id: str
    incarnation: int
    """Unix milliseconds at which the process started: records of a restarted peer replace its
    earlier ones."""
    version: int
    """Grows with every change while the process lives."""
    state: str = JOINING
    stage: int = OBSERVER_STAGE
    round: int = 0
    addresses: tuple[str, ...] = ()
    active_from: int = 0
    """First round for which this replica counts as a possible owner of shards."""
    has_data: bool = False
    counts: tuple[RoundCount, ...] = ()
    """Counters of the newest `KEPT_ROUNDS` rounds that it fed, oldest first."""
    samples_per_s: float = 0.0
    """Throughput of its device at this stage, forward and backward, if it were never idle:
    measured, before that an estimate of its own, 0 while unknown."""
    queue_length: int = 0
    upload_bytes_per_s: float = 0.0
    """Measured; 0 while unknown."""
    digests: bytes = b""
    """`DIGEST_BYTES` a shard: of the parameters with which `round` began."""
    holds: bytes = b""
    """Bit j % 8 of byte j // 8: holds the optimizer state of shard j as of the beginning of
    `round`."""
    fresh: bytes = b""
    """As `holds`: shards that it holds since the middle of `round`. So long it is the primary of
    none of them that another peer holds."""
    held_out: HeldOut | None = None
    totals: dict[str, int] = field(default_factory=dict)
    """Counters since its start, such as `rerouted` or `sent_bytes`."""
    strikes: dict[str, int] = field(default_factory=dict)
    """By peer, the number of its gradient contributions that were rejected as not finite."""
    agent: str = ""
    started_unix_s: float = 0.0
    restorable: tuple[Restorable, ...] = ()
    """Checkpoints of `stage` on its disk; only while it is joining."""
    history: int = 0
    """Incarnation of the peer that began the present run, or continued it from a checkpoint. The
    highest one among the active replicas is valid. Rounds of different histories have nothing in
    common but their number."""
    credential: bytes = b""
    """What admits this peer to a closed run (see `swarmnet.admission`)."""
    samples: int = 0
    """Samples committed in the round before `round` and in its update, as far as this replica knew
    when it closed that round: the weight of its parameters where other replicas have different ones
    (see `protocol.update.divergence`)."""

    declared: tuple[int, int] = NOTHING_DECLARED
    """The newest exchange for which this replica has closed its round, and the tokens that it
    contributes to it."""
    spread: float = 0.0
    """In mode `gossip`: distance of the parameters from those of the partner of the last meeting,
    over the norm of the parameters."""
    round_s: float = 0.0
    """In mode `auto`: how long rounds are open, a moving average; 0 while unknown."""
    exchange_s: float = 0.0
    """In mode `auto`: how long exchanges take, a moving average; 0 while unknown."""
    switches: tuple[Switch, ...] = ()
    """In mode `auto`: the newest known changes of the mode, by ascending round."""
    last_open_s: float = 0.0
    """How long the last round that ended here was open to microbatches; 0 before the first."""
    last_busy_s: float = 0.0
    """How long the device worked in that round and its exchange."""
    last_exchange_s: float = 0.0
    """How long the exchange of that round took."""
    moving_to: int = OBSERVER_STAGE
    """The stage that this replica will serve when the round that is being fed is done here."""
    paused: str = ""
    """Why an `observing` peer serves no stage for now, at its owner's request; it will return."""
    unreached: tuple[str, ...] = ()
    """Peers that live, by the news of them, and that this one cannot call; ascending, the first
    `MAX_UNREACHED`."""
    serves_data: bool = False
    """Gives the tokens of the run's data to members that ask."""
    vouches: bytes = b""
    """Peers that it has seen at work, or find a right loss, by a name for each (see
    `protocol.membership.reputation`), ascending."""
    measures: bool = True
    """Its data have a part that is held out: as a feeder it can measure losses on that."""
    publishes: bool = False
    """Has a node of the directory, and publishes records there (see
    `protocol.membership.publishers`)."""
    household: Household | None = None
    """The household that the peer is of."""
    product_flops_per_s: float = 0.0
    """What its products of matrices reach in steps of Muon, measured as it starts; 0 in runs that
    have none, and of peers that do not say it."""
    owing: tuple[Owing, ...] = ()
    """Whose results it has waited for in vain, ascending by peer; the newest `MAX_OWING` of
    them."""

    def __post_init__(self) -> None:
        if not 0 < len(self.peer_id) <= MAX_TEXT or len(self.run_id) > MAX_TEXT:
            raise ValueError("a peer id or run id is too long")
        if self.state not in STATES:
            raise ValueError(f"unknown state {self.state[:32]!r}")
        if not (
            OBSERVER_STAGE <= self.stage < MAX_SHARDS
            and OBSERVER_STAGE <= self.moving_to < MAX_SHARDS
        ):
            raise ValueError("a stage index is out of range")
        if not 0 <= self.history < MAX_NUMBER or len(self.restorable) > MAX_RESTORABLE:
            raise ValueError("a history or its checkpoints are out of range")
        if not (
            0 <= self.incarnation < MAX_NUMBER
            and 0 <= self.version < MAX_NUMBER
            and 0 <= self.round < MAX_NUMBER
            and 0 <= self.active_from < MAX_NUMBER
            and 0 <= self.queue_length < MAX_NUMBER
            and 0 <= self.samples < MAX_NUMBER
        ):
            raise ValueError("a number of a record is out of range")
        rates = (
            self.samples_per_s,
            self.upload_bytes_per_s,
            self.started_unix_s,
            self.spread,
            self.round_s,
            self.exchange_s,
            self.last_open_s,
            self.last_busy_s,
            self.last_exchange_s,
            self.product_flops_per_s,
        )
        if any(not 0 <= x <= MAX_RATE for x in rates):
            raise ValueError("a rate of a record is out of range")
        if len(self.declared) != 2 or not (
            -1 <= self.declared[0] < MAX_NUMBER and -1 <= self.declared[1] < MAX_NUMBER
        ):
            raise ValueError("what a record declares is out of range")
        if len(self.addresses) > MAX_ADDRESSES or any(
            len(a) > MAX_TEXT * 2 for a in self.addresses
        ):
            raise ValueError("too many or too long addresses")
        if len(self.digests) > MAX_SHARDS * DIGEST_BYTES or len(self.digests) % DIGEST_BYTES:
            raise ValueError("digests of an impossible length")
        longest = max(len(self.holds), len(self.fresh))
        if longest > MAX_SHARDS // 8 or len(self.counts) > KEPT_ROUNDS:
            raise ValueError("a field of a record is too long")
        if len(self.totals) > 64 or not _are_counts(self.totals, 64):
            raise ValueError("the totals of a record are out of range")
        if len(self.credential) > MAX_CREDENTIAL_BYTES:
            raise ValueError("the credential of a record is too long")
        if len(self.strikes) > MAX_STRIKES or not _are_counts(self.strikes, MAX_TEXT):
            raise ValueError("the strikes of a record are out of range")
        if len(self.unreached) > MAX_UNREACHED or any(len(p) > MAX_TEXT for p in self.unreached):
            raise ValueError("too many or too long ids of peers that a peer cannot reach")
        if len(self.vouches) > MAX_VOUCHES * VOUCH_BYTES or len(self.vouches) % VOUCH_BYTES:
            raise ValueError("vouches of an impossible length")
        if len(self.owing) > MAX_OWING:
            raise ValueError("too many that owe a result in a record")
        if len(self.switches) > MAX_SWITCHES:
            raise ValueError("too many switches in a record")
        if len(self.paused) > MAX_TEXT:
            raise ValueError("the reason of a pause is too long")
        if len(self.agent) > MAX_TEXT:
            raise ValueError("the agent of a record is too long")
        names = (self.peer_id, self.run_id, *self.unreached, *self.totals, *self.strikes)
        names = (*names, *(one.peer_id for one in self.owing))
        if not "".join((*names, *self.addresses, self.paused, self.agent)).isprintable():
            raise ValueError("a text of a record is not printable")

    @property
    def stamp(self) -> Stamp:
        """Of two records of one peer, the one with the higher stamp is valid."""
        return (self.incarnation, self.version)

    @property
    def is_moving(self) -> bool:
        """The peer has decided to serve another stage, and does not serve it yet."""
        return self.moving_to != OBSERVER_STAGE

    @property
    def house(self) -> str:
        """The key of its household; empty where it is of none."""
        return "" if self.household is None else self.household.key

    @property
    def is_replica(self) -> bool:
        """The peer serves microbatches of its stage now."""
        return self.stage >= 0 and self.state == ACTIVE

    def count(self, round_index: int) -> RoundCount:
        """The counters for a round; zeros where the record has none."""
        for c in self.counts:
            if c.round == round_index:
                return c
        return RoundCount(round_index)

    def digest(self, shard_index: int) -> bytes:
        return self.digests[shard_index * DIGEST_BYTES : (shard_index + 1) * DIGEST_BYTES]

    def holds_shard(self, shard_index: int) -> bool:
        return has_bit(self.holds, shard_index)

    def is_fresh(self, shard_index: int) -> bool:
        """Whether it holds a shard since the middle of its round."""
        return has_bit(self.fresh, shard_index)

    def counts_with(self, count: RoundCount) -> tuple[RoundCount, ...]:
        """The counters with those of one round replaced; the oldest rounds are dropped."""
        counts = {c.round: c for c in self.counts}
        counts[count.round] = count
        return tuple(sorted(counts.values(), key=lambda c: c.round)[-KEPT_ROUNDS:])


def _are_counts(counts: dict[str, int], longest_name: int) -> bool:
    if not counts:
        return True
    is_short = max(map(len, counts)) <= longest_name
    return is_short and min(counts.values()) >= 0 and max(counts.values()) < MAX_NUMBER


FIXED_BYTES = 48 << 10
"""Of a record: more than all texts, totals and rates that it may have."""


def record_bytes(num_shards: int, num_slots: int) -> int:
    """A bound of a record's msgpack, bytes, in a run whose stages have up to `num_shards` shards
    and whose rounds have `num_slots` slots."""
    digests = DIGEST_BYTES * num_shards
    holds = (2 + MAX_RESTORABLE) * (num_shards // 8 + 1)
    sets = 3 * KEPT_ROUNDS * (num_slots // 8 + 1)
    return FIXED_BYTES + digests + holds + sets


def bitmap(indices: list[int], num_shards: int) -> bytes:
    """Shard indices as `Record.holds`."""
    out = bytearray((num_shards + 7) // 8)
    for j in indices:
        out[j // 8] |= 1 << (j % 8)
    return bytes(out)


def has_bit(bits: bytes, index: int) -> bool:
    """Reads what `bitmap` wrote; False beyond its end."""
    byte = index // 8
    return byte < len(bits) and bool(bits[byte] >> (index % 8) & 1)
