"""The resource limits that the owner of a machine sets for a peer, and its working hours. Pure.

A peer keeps to a rate of upload, to an amount of memory, to a share of the device's time and to
hours of the day, and pauses while the owner uses the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmnet.protocol.timing import UPKEEP_S

MINUTES_A_DAY = 24 * 60
MAX_HOURS = 16
"""Spans of the day at most."""
MIN_UPLOAD_BYTES_PER_S = 1_000.0
"""Below this rate not even gossip gets through."""
MIN_SHARE = 0.01
BUSY_ABOVE, QUIET_BELOW = 0.25, 0.10
"""Parts of the machine (CPU, or the busiest GPU) that other programs use. The machine is busy after
more than `BUSY_ABOVE` for `BUSY_AFTER_S`, and quiet again after less than `QUIET_BELOW` for
`QUIET_AFTER_S`."""
BUSY_AFTER_S = 6.0
"""It protects a peer from a pause for each short burst of other programs
(tests/protocol/test_resource_limits.py)."""
QUIET_AFTER_S = UPKEEP_S

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
BINARY = {"k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(bits?|b)(/s)?", re.IGNORECASE)
SPAN = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")

BILLED = {
    "max_upload_per_day": "upload a day",
    "max_upload_per_month": "upload a month",
    "max_download_per_day": "download a day",
    "max_download_per_month": "download a month",
}
"""Amounts of `OwnerLimits`, in words."""

ALLOWED = ("sent today", "sent this month", "received today", "received this month")
"""What such an amount bounds, in words."""
TOLD, TOLD_MOST = "owner_", "owner_max_"
"""How totals of a record begin that tell of that."""

Span = tuple[int, int]
"""Minutes of the day at which a span begins and ends; it wraps around midnight where the end is
earlier."""


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """The resources that a peer may take of its machine."""

    max_upload_bytes_per_s: float | None = None
    max_memory_bytes: float | None = None
    max_device_share: float | None = None
    """Part of the time that the device (GPU, or CPU) may be kept working, 0 to 1."""
    hours: tuple[Span, ...] = ()
    """Local time; empty = always."""
    pause_when_busy: bool = False
    paused: bool = False
    """The owner has paused the peer."""
    pause_on_battery: bool = True
    pause_on_metered: bool = True
    max_upload_per_day_bytes: float | None = None
    max_upload_per_month_bytes: float | None = None
    """Of the calendar; likewise of what is received."""
    max_download_per_day_bytes: float | None = None
    max_download_per_month_bytes: float | None = None

    def __post_init__(self) -> None:
        upload, memory, share = (
            self.max_upload_bytes_per_s,
            self.max_memory_bytes,
            self.max_device_share,
        )
        if upload is not None and not MIN_UPLOAD_BYTES_PER_S <= upload < float("inf"):
            raise ValueError("max_upload: at least 8 kbit/s")
        if memory is not None and not 1 <= memory < float("inf"):
            raise ValueError("max_memory: more than nothing")
        if share is not None and not MIN_SHARE <= share <= 1:
            raise ValueError("max_device_share: from 1% to 100%")
        for name in BILLED:
            amount = getattr(self, f"{name}_bytes")
            if amount is not None and not 1 <= amount < float("inf"):
                raise ValueError(f"{name}: more than nothing")
        if len(self.hours) > MAX_HOURS:
            raise ValueError(f"hours: at most {MAX_HOURS} spans")
        for begin, end in self.hours:
            if begin == end or not (0 <= begin < MINUTES_A_DAY and 0 <= end < MINUTES_A_DAY):
                raise ValueError("hours: each span is two different times of the day")

    def describe(self) -> str:
        """One line; empty where nothing is limited."""
        parts = []
        if self.max_upload_bytes_per_s is not None:
            parts.append(f"upload {rate_text(self.max_upload_bytes_per_s)}")
        for name, what in BILLED.items():
            amount = getattr(self, f"{name}_bytes")
            if amount is not None:
                parts.append(f"{what} {size_text(amount)}")
        if self.max_memory_bytes is not None:
            parts.append(f"memory {size_text(self.max_memory_bytes)}")
        if self.max_device_share is not None:
            parts.append(f"device {share_text(self.max_device_share)} of the time")
        if self.hours:
            parts.append("hours " + ", ".join(map(span_text, self.hours)))
        if self.pause_when_busy:
            parts.append("pauses when the machine is in use")
        if not self.pause_on_battery:
            parts.append("works on battery too")
        if not self.pause_on_metered:
            parts.append("works on metered networks too")
        return "; ".join(parts)


def told_totals(counted: Iterable[tuple[str, int, float]]) -> dict[str, int]:
    """Totals for a record. `counted`: of `ALLOWED` what is bounded, with the bytes so far and at
    most."""
    found: dict[str, int] = {}
    for what, used, most in counted:
        name = what.replace(" ", "_")
        found |= {f"{TOLD}{name}": used, f"{TOLD_MOST}{name}": int(most)}
    return found


def told_allowances(totals: Mapping[str, int]) -> tuple[tuple[str, int, int], ...]:
    """What `told_totals` took in, from the totals of a record, by the word of its peer."""
    names = ((what, what.replace(" ", "_")) for what in ALLOWED)
    return tuple(
        (what, totals.get(f"{TOLD}{name}", 0), totals[f"{TOLD_MOST}{name}"])
        for what, name in names
        if totals.get(f"{TOLD_MOST}{name}", 0) > 0
    )


def parse_rate(text: str) -> float:
    """Bytes/s of "10Mbit" or "2 MB/s". Raises `ValueError`."""
    problem = "a rate is written 10Mbit or 2MB (a second)"
    if text.strip().removesuffix("/s").endswith("b"):  # bits or bytes: ambiguous
        raise ValueError(f"{text[:40]!r}: {problem}")
    amount, is_bits = _amount(text, problem)
    return amount / 8 if is_bits else amount


def parse_size(text: str) -> float:
    """Bytes of "4GB" or "512 MiB". Raises `ValueError`."""
    problem = "an amount is written 4GB or 512MiB"
    amount, is_bits = _amount(text, problem)
    if is_bits:
        raise ValueError(f"{text!r}: {problem}")
    return amount


def _amount(text: str, problem: str) -> tuple[float, bool]:
    found = AMOUNT.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text[:40]!r}: {problem}")
    prefix = found[2].lower()
    scale = BINARY[prefix] if found[3] else PREFIXES[prefix]
    return float(found[1]) * scale, found[4].lower().startswith("bit")


def parse_share(text: str) -> float:
    """0 to 1 of "50%". Raises `ValueError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r}: a share is written 50%")
    return float(found[1]) / 100


def parse_span(text: str) -> Span:
    """ "22:00-07:00". Raises `ValueError`."""
    found = SPAN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r}: hours are written 22:00-07:00")
    numbers = [int(n) for n in found.groups()]
    if any(h > 24 or m > 59 or (h == 24 and m) for h, m in (numbers[:2], numbers[2:])):
        raise ValueError(f"{text[:40]!r}: no such time of the day")
    begin, end = (60 * h + m for h, m in (numbers[:2], numbers[2:]))
    return begin % MINUTES_A_DAY, end % MINUTES_A_DAY


def rate_text(bytes_per_s: float) -> str:
    """As `parse_rate` reads it."""
    return f"{_scaled(8 * bytes_per_s)}bit"


def size_text(num_bytes: float) -> str:
    """As `parse_size` reads it."""
    return f"{_scaled(num_bytes)}B"


def share_text(share: float) -> str:
    """As `parse_share` reads it."""
    return f"{100 * share:.6g}%"


def span_text(span: Span) -> str:
    """As `parse_span` reads it."""
    return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in span)


def _scaled(amount: float) -> str:
    for prefix, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= unit:
            return f"{amount / unit:.6f}".rstrip("0").rstrip(".") + prefix
    return f"{amount:.6f}".rstrip("0").rstrip(".")


def is_open(hours: tuple[Span, ...], minute: int) -> bool:
    """Whether the peer may work at this minute of the day."""
    if not hours:
        return True
    return any(
        begin <= minute < end if begin < end else minute >= begin or minute < end
        for begin, end in hours
    )


def why_paused(
    limits: OwnerLimits,
    minute: int,
    is_busy: bool,
    is_on_battery: bool = False,
    is_metered: bool = False,
) -> str:
    """Why the peer may not work at this minute of the day; empty where it may."""
    if limits.paused:
        return "its owner paused it"
    if not is_open(limits.hours, minute):
        return "it is outside its hours " + ", ".join(map(span_text, limits.hours))
    if limits.pause_when_busy and is_busy:
        return "the machine is in use"
    if limits.pause_on_battery and is_on_battery:
        return "the machine runs on battery"
    if limits.pause_on_metered and is_metered:
        return "its network is metered"
    return ""


def rest_s(worked_s: float, share: float | None) -> float:
    """Seconds for which the device must rest after `worked_s` seconds of work."""
    return 0.0 if share is None else worked_s * (1 / share - 1)


@dataclass(slots=True)
class BusyWatch:
    """Tells whether other programs use the machine. With hysteresis: a short change of their use
    changes nothing."""

    is_busy: bool = False
    _differs_since: float | None = None

    def observe(self, others: float, now: float) -> bool:
        """`others`: the part of the machine that others used since the last look, 0 to 1."""
        looks_busy = others > (QUIET_BELOW if self.is_busy else BUSY_ABOVE)
        if looks_busy == self.is_busy:
            self._differs_since = None
            return self.is_busy
        if self._differs_since is None:
            self._differs_since = now
        if now - self._differs_since >= (QUIET_AFTER_S if self.is_busy else BUSY_AFTER_S):
            self.is_busy = looks_busy
            self._differs_since = None
        return self.is_busy

    def reset(self) -> None:
        """The use of the machine is no longer observed."""
        self.is_busy = False
        self._differs_since = None


@dataclass(slots=True)
class UploadBucket:
    """A token bucket that may go into debt: pieces are sent whole, and the next one waits until the
    last is paid for."""

    bytes_per_s: float | None = None
    """None = no limit."""
    burst_s: float = 0.25
    """Seconds of upload that may be saved up. It protects the rate from timers that are late
    (tests/protocol/test_resource_limits.py)."""
    _level: float = 0.0
    _filled_at: float = 0.0

    def limit(self, bytes_per_s: float | None, now: float) -> None:
        """Changes the rate; None = no limit. Earlier debts are dropped."""
        self.bytes_per_s = bytes_per_s
        self._level = 0.0
        self._filled_at = now

    def spend(self, num_bytes: int, now: float) -> None:
        """Takes in that `num_bytes` were sent."""
        if self.bytes_per_s is not None:
            self._fill(now, self.bytes_per_s)
            self._level -= num_bytes

    def wait_s(self, now: float) -> float:
        """Seconds until more may be sent."""
        if self.bytes_per_s is None:
            return 0.0
        self._fill(now, self.bytes_per_s)
        return max(0.0, -self._level / self.bytes_per_s)

    def _fill(self, now: float, bytes_per_s: float) -> None:
        elapsed_s = max(0.0, now - self._filled_at)
        self._level = min(self.burst_s * bytes_per_s, self._level + elapsed_s * bytes_per_s)
        self._filled_at = now
