"""A round's batch as a list of slots, one microbatch each, and the samples that a slot holds.

Round r has slots 0 to M - 1, where M may grow in the course of a run (`SlotPlan`). With F slots in
the rounds before it, slot s of round r holds the samples at the positions (F + s) B to (F + s) B +
B - 1 of one endless row, B samples a slot. The row is epoch after epoch: each a permutation of all
N samples, keyed by the seed and the epoch. So a slot's samples follow from (seed, round, slot),
whoever feeds it, and each sample comes once an epoch.

The permutation is a Feistel network of four rounds over the smallest power of four that holds N,
walked until it falls below N (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). It takes no memory, and any position is found at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

MAX_SLOTS = 65_536
"""Of a round."""
NUM_FEISTEL_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """How many slots each round of a run has; without arguments as many as there can be."""

    steps: tuple[tuple[int, int], ...] = ((0, MAX_SLOTS),)
    """Rounds, ascending from 0, and the slots that each round has from there on, ascending too."""

    @property
    def most(self) -> int:
        """Slots of the largest round."""
        return self.steps[-1][1]

    def of(self, round_index: int) -> int:
        """Slots of a round."""
        return max(slots for first, slots in self.steps if first <= max(round_index, 0))

    def before(self, round_index: int) -> int:
        """Slots of all rounds before this one."""
        ends = (*(first for first, _ in self.steps[1:]), round_index)
        return sum(
            slots * max(0, min(end, round_index) - first)
            for (first, slots), end in zip(self.steps, ends, strict=True)
        )

    def rounds_of(self, num_slots: int) -> int:
        """The fewest rounds that have together so many slots."""
        last, slots = next(
            ((first, n) for first, n in reversed(self.steps) if self.before(first) < num_slots),
            self.steps[0],
        )
        return last + max(0, -(-(num_slots - self.before(last)) // slots))


ANY_SLOTS = SlotPlan()
"""Where the run is not known."""


@lru_cache(maxsize=16)
def slot_plan(
    global_batch: int, samples_per_slot: int, ramp: tuple[tuple[int, int], ...] = ()
) -> SlotPlan:
    """Of rounds of `global_batch` samples. `ramp`: rounds, and the samples of each round from there
    on, if these are not the same in all."""
    return SlotPlan(
        tuple((first, -(-samples // samples_per_slot)) for first, samples in ramp)
        or ((0, -(-global_batch // samples_per_slot)),)
    )


def sample_indices(
    *,
    seed: int,
    round_index: int,
    slot: int,
    slots: SlotPlan,
    samples_per_slot: int,
    num_samples: int | None,
) -> list[int]:
    """The samples of a slot, ascending by their position. `num_samples`: of the data; None where
    there is no end of them, and indices only grow. Raises `ValueError` where there is no sample."""
    if num_samples is not None and num_samples < 1:
        raise ValueError("data without a sample")
    first = (slots.before(round_index) + slot) * samples_per_slot
    positions = range(first, first + samples_per_slot)
    if num_samples is None:
        return list(positions)
    return [permuted(seed, p // num_samples, p % num_samples, num_samples) for p in positions]


def permuted(seed: int, epoch: int, position: int, num_samples: int) -> int:
    """The sample at a position of an epoch: 0 to `num_samples` - 1, each once."""
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    keys = round_keys(seed, epoch)
    value = position
    while True:
        left, right = value >> half_bits, value & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        value = left << half_bits | right
        if value < num_samples:
            return value


@lru_cache(maxsize=16)
def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """64 bits for each round of the network, of blake2b."""
    digest = blake2b(f"{seed}|{epoch}".encode(), digest_size=8 * NUM_FEISTEL_ROUNDS).digest()
    return tuple(
        int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(NUM_FEISTEL_ROUNDS)
    )


def _mixed(x: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): 64 bits to 64 bits."""
    x &= 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


# ---- flights of slots -------------------------------------------------------------------------

SLOT_BITS = 16


def flight_id(
    run_id: str,
    peer_id: str,
    incarnation: int,
    round_index: int,
    n: int,
    slot: int,
    secret: bytes = b"",
) -> int:
    """The microbatch id of the n-th flight that a feeder begins in a round, 63 bits: the slot in
    the lowest `SLOT_BITS`, and above them a hash that no other flight has. `secret`: of the feeder,
    64 bytes at most; with it nobody can be there before the flight."""
    text = f"{run_id}|{peer_id}|{incarnation}|{round_index}|{n}"
    digest = blake2b(text.encode(), digest_size=6, key=secret).digest()
    return int.from_bytes(digest, "big") >> 1 << SLOT_BITS | slot


def slot_of(microbatch_id: int) -> int:
    """The slot that a flight is of."""
    return microbatch_id & (1 << SLOT_BITS) - 1


# ---- sets of slots ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotSet:
    """A set of slots as it travels: a bitmap of the bytes from the first to the last that is not
    zero. Bit i % 8 of byte i // 8 is slot i."""

    first: int = 0
    """Number of the bitmap's first byte."""
    bits: bytes = b""

    def __post_init__(self) -> None:
        if not 0 <= 8 * self.first <= MAX_SLOTS or len(self.bits) > MAX_SLOTS // 8 - self.first:
            raise ValueError("a slot beyond the most that a round has")
        if (self.bits and not (self.bits[0] and self.bits[-1])) or (self.first and not self.bits):
            raise ValueError("a set of slots that is not in its shortest form")

    @classmethod
    def of(cls, mask: int) -> SlotSet:
        """Of an integer whose bit i is slot i."""
        if not mask:
            return EMPTY
        first = ((mask & -mask).bit_length() - 1) // 8
        mask >>= 8 * first
        return cls(first, mask.to_bytes((mask.bit_length() + 7) // 8, "little"))

    @property
    def mask(self) -> int:
        """An integer whose bit i is slot i."""
        return int.from_bytes(self.bits, "little") << (8 * self.first)

    def __len__(self) -> int:
        return int.from_bytes(self.bits, "little").bit_count()

    def __contains__(self, slot: int) -> bool:
        byte = slot // 8 - self.first
        return 0 <= byte < len(self.bits) and bool(self.bits[byte] >> (slot % 8) & 1)

    def __iter__(self) -> Iterator[int]:
        return iter(slots_in(self.mask))

    def issubset(self, other: SlotSet) -> bool:
        """Every slot of this set is in the other."""
        return not self.mask & ~other.mask

    def with_slot(self, slot: int) -> SlotSet:
        """One more."""
        return SlotSet.of(self.mask | 1 << slot)

    def without(self, slot: int) -> SlotSet:
        """One less."""
        return SlotSet.of(self.mask & ~(1 << slot))


EMPTY = SlotSet()


def slots_in(mask: int) -> list[int]:
    """The slots of a mask, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def all_slots(num_slots: int) -> int:
    """The mask of a whole round."""
    return (1 << num_slots) - 1


def share_of(rank: int, num_feeders: int, num_slots: int) -> range:
    """The slots that the feeder of this rank (in the sorted list of feeders) launches without
    asking. Together the shares are all slots, each once."""
    if not 0 <= rank < num_feeders:
        raise ValueError(f"rank {rank} of {num_feeders} feeders")
    size, rest = divmod(num_slots, num_feeders)
    start = rank * size + min(rank, rest)
    return range(start, start + size + (rank < rest))


def next_slot(missing: int, share: range, rank: int, num_feeders: int) -> int | None:
    """The slot that a feeder launches next, of those that nobody has launched (`missing`, a mask):
    the first of its share, else one of the rest, another for each rank, so that feeders who know
    the same do not launch the same; None where nothing is missing."""
    own = missing & (all_slots(len(share)) << share[0] if share else 0)
    if own:
        return (own & -own).bit_length() - 1
    rest = slots_in(missing)
    return rest[rank * len(rest) // num_feeders] if rest else None
