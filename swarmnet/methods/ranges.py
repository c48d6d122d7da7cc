"""What numbers and names in bodies may be, wherever they occur."""

from __future__ import annotations

MAX_RECORDS = 4096
MAX_IDS = 65_536
MAX_ID_CHARS = 256
MAX_LINEAGE_BYTES, DIGEST_BYTES = 16, 8
MAX_STEP_SAMPLES = 1 << 20
"""Of a microbatch."""
MAX_STEP_TOKENS, MAX_TOKENS = 1 << 40, 1 << 48
"""Of a microbatch or of one replica's part of a round, and of a contribution to a shard: sums of
them stay far below what other messages carry."""


def check_ids(ids: tuple[str, ...], limit: int) -> None:
    if len(ids) > limit or any(not 0 < len(i) <= MAX_ID_CHARS for i in ids):
        raise ValueError("peer ids are too many or too long")


def check_indices(*numbers: int) -> None:
    if any(not 0 <= n < 2**63 for n in numbers):
        raise ValueError("a number is out of range")


def check_lineage(lineage: bytes) -> None:
    if len(lineage) > MAX_LINEAGE_BYTES:
        raise ValueError("a lineage is too long")
