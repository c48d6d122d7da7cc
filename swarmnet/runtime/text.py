"""Numbers and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAME_CHARS, SHOWN_CHARACTERS = 60, 16
"""Of a run's name and id, in a line."""


def shown_run(name: str, run_id: str) -> str:
    """A run, of which others say the name."""
    return f"{name[:MAX_NAME_CHARS]!r} ({run_id[:SHOWN_CHARACTERS]})"


def listed(parts: Sequence[str], between: str, max_chars: int) -> str:
    """In one line, cut between two parts and never within one; says how many are left out."""
    shown, length = list(parts[:1]), len(parts[0]) if parts else 0
    for part in parts[1:]:
        length += len(between) + len(part)
        if length > max_chars:
            break
        shown.append(part)
    left = len(parts) - len(shown)
    return between.join(shown) + (f" and {left} more" if left else "")


def size(num_bytes: float) -> str:
    """Bytes, with a decimal unit and three digits."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 100 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
