"""Well-known cards: memory, and FLOP/s as their makers publish them.

Dense figures, without sparsity: of tensor cores that multiply bf16 (or fp16) and add in fp32, and
of fp32. Sources: NVIDIA's architecture whitepapers (Turing TU102, Ampere GA102, Ada AD102,
Blackwell GB202) for GeForce and RTX cards, and NVIDIA's and AMD's data sheets of the others. Of
GeForce cards that are in no whitepaper, cores times boost clock times two, and twice that: the
ratio of the same maker's cards that are. Links are half of what is published for both ways
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

TERA = 1e12


@dataclass(frozen=True, slots=True)
class Card:
    """What is published of it."""

    memory_gb: float
    fp32: float
    """TFLOP/s."""
    low: float
    """TFLOP/s in fp16, and in bf16 where it has that."""
    has_bf16: bool = True
    host_gb_s: float = 32
    """GB/s from main memory, one way: of PCIe 4 with 16 lanes."""
    between_gb_s: float = 0
    """GB/s to another card of the machine, one way, by a link of their own; 0 where it has none, or
    not in every machine: then they go over PCIe."""

    def flops_per_s(self, precision: str) -> float:
        return TERA * (self.fp32 if precision == "fp32" else self.low)


CARDS = {
    "t4": Card(16, 8.1, 65, has_bf16=False, host_gb_s=16),
    "v100": Card(32, 15.7, 125, has_bf16=False, host_gb_s=16),
    "rtx2060": Card(6, 6.5, 25.8, has_bf16=False, host_gb_s=16),
    "rtx2070": Card(8, 7.5, 29.9, has_bf16=False, host_gb_s=16),
    "rtx2080": Card(8, 10.1, 40.3, has_bf16=False, host_gb_s=16),
    "rtx2080ti": Card(11, 13.4, 53.8, has_bf16=False, host_gb_s=16),
    "rtx3060": Card(12, 12.7, 25.5),
    "rtx3060ti": Card(8, 16.2, 32.4),
    "rtx3070": Card(8, 20.3, 40.6),
    "rtx3070ti": Card(8, 21.7, 43.5),
    "rtx3080": Card(10, 29.8, 59.5),
    "rtx3080ti": Card(12, 34.1, 68.2),
    "rtx3090": Card(24, 35.6, 71),
    "rtx3090ti": Card(24, 40, 80),
    "rtx4060": Card(8, 15.1, 30.2, host_gb_s=16),
    "rtx4060ti": Card(8, 22.1, 44.1, host_gb_s=16),
    "rtx4060ti-16gb": Card(16, 22.1, 44.1, host_gb_s=16),
    "rtx4070": Card(12, 29.1, 58.3),
    "rtx4070super": Card(12, 35.5, 71),
    "rtx4070ti": Card(12, 40.1, 80.2),
    "rtx4070tisuper": Card(16, 44.1, 88.2),
    "rtx4080": Card(16, 48.7, 97.5),
    "rtx4080super": Card(16, 52.2, 104.4),
    "rtx4090": Card(24, 82.6, 165.2),
    "rtx5060": Card(8, 19.2, 38.4),
    "rtx5060ti": Card(16, 23.7, 47.4),
    "rtx5060ti-8gb": Card(8, 23.7, 47.4),
    "rtx5070": Card(12, 30.9, 61.7, host_gb_s=64),
    "rtx5070ti": Card(16, 43.9, 87.9, host_gb_s=64),
    "rtx5080": Card(16, 56.3, 112.6, host_gb_s=64),
    "rtx5090": Card(32, 104.8, 209.5, host_gb_s=64),
    "rtxa6000": Card(48, 38.7, 154.8),
    "a10": Card(24, 31.2, 125),
    "l4": Card(24, 30.3, 121),
    "l40s": Card(48, 91.6, 362),
    "a100": Card(80, 19.5, 312),
    "a100-40gb": Card(40, 19.5, 312),
    "h100": Card(80, 67, 989, host_gb_s=64, between_gb_s=450),
    "h200": Card(141, 67, 989, host_gb_s=64, between_gb_s=450),
    "mi300x": Card(192, 163.4, 1307, host_gb_s=64, between_gb_s=448),
}
USABLE = 0.4
"""Of what is published, what training reaches. A plain loop of a 1B-class model reached 0.57 to
0.61 of an H100's and an H200's large matrix products (benchmarks/results/gpu.md); cards for games,
small models and coding leave less."""
USABLE_LINK = 0.5
"""Of what is published of a link, what copies and sums over ranks reach. An assumption."""
DISK_GB_S = 1.5
"""From a disk of a machine. An assumption, of an NVMe disk that is not new."""
PLAIN_GPU = "rtx3090"
"""How fast a `24GB-gpu` is taken for, of which no card is named."""
CPU_FLOPS_PER_S, MAC_FLOPS_PER_S = 0.3 * TERA, 0.5 * TERA
"""Of a machine without a GPU. Assumed, from about 0.05 TFLOP/s that one core of a shared Xeon
reaches in training: nobody publishes them. Macs compute on their CPU."""
MICROBATCH_S = 0.01
"""That a microbatch takes at a stage beside its passes."""
UPDATE_PARAMETERS_PER_S = 50e6
"""At the end of a round. Assumed: the host of an H100 took 5 s for 155 M parameters once, and has
less to do since."""
SHARD_S = 0.002
"""Likewise, of a shard, in the event loop."""
ALONE_SHARD_S, SHARED_SHARD_S = 0.0016, 0.0028
"""Of a machine like those that were measured, where a stage has one replica and where it has
several: 50 shards less made a round of one peer 0.08 s shorter, and one of two replicas 0.14 s
(`swarmnet local`, two cores, a model of 0.9 M parameters, `[sync] shard_parameters` of 16,384 and
of 262,144)."""
HOST_GB = 32.0
"""Main memory beside a card, of which nothing is said."""
SYSTEM_GB, SYSTEM_PART = 2.0, 0.25
"""Of a main memory, what is not free: the system's and the program's own, and no more than that
part of it."""


MOST_ALIKE, ALIKE = 5, 0.5
"""Of cards that may have been meant: how many are told, and how like they have to be."""


def card_named(text: str) -> Card | None:
    """By a name such as `RTX 4090`, `rtx-4090` or `NVIDIA GeForce RTX 4090`."""
    plain = _plain(text)
    return next((card for key, card in CARDS.items() if key.replace("-", "") == plain), None)


def known_cards(text: str) -> str:
    """Names of cards to write in place of one that is unknown: those like it, else all."""
    alike = get_close_matches(_plain(text), CARDS, MOST_ALIKE, ALIKE)
    return f"known cards like it: {', '.join(alike)}" if alike else f"known: {', '.join(CARDS)}"


def _plain(text: str) -> str:
    name = text.lower()
    for maker in ("nvidia", "geforce", "amd", "instinct", "tesla"):
        name = name.replace(maker, "")
    return "".join(c for c in name if c.isalnum())
