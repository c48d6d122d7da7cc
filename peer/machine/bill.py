"""What a peer has sent and received in a day and a month, against what its owner allows. Pure: the
date is an argument, and everything else a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmnet.protocol.resource_limits import ALLOWED, OwnerLimits, size_text

KEPT = 3
"""Days and months that are remembered: a clock that is wrong for a while loses no count."""
RESERVE = 0.02
"""Part of what is allowed at which a peer stops its work: a paused peer still gossips."""
DATE_CHARACTERS, MONTH_CHARACTERS = 10, 7
"""Of 2026-11-29."""


@dataclass(frozen=True, slots=True)
class Used:
    """Bytes."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Bill:
    """Bytes by day and by month; the one written last stands last."""

    days: dict[str, Used] = field(default_factory=dict)
    months: dict[str, Used] = field(default_factory=dict)

    def add(self, date: str, sent: int, received: int) -> None:
        """So many bytes more. `date`: such as 2026-11-29, of the owner's clock."""
        for periods, period in ((self.days, date), (self.months, date[:MONTH_CHARACTERS])):
            before = periods.pop(period, Used())
            periods[period] = Used(before.sent + sent, before.received + received)
            while len(periods) > KEPT:
                del periods[next(iter(periods))]

    def today(self, date: str) -> Used:
        return self.days.get(date, Used())

    def this_month(self, date: str) -> Used:
        return self.months.get(date[:MONTH_CHARACTERS], Used())

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        return {
            name: {period: [used.sent, used.received] for period, used in periods.items()}
            for name, periods in (("days", self.days), ("months", self.months))
        }

    @classmethod
    def from_json(cls, values: Any) -> Bill:
        """Raises `ValueError` for what is none."""
        try:
            return cls(_periods(values["days"], DATE_CHARACTERS), _periods(values["months"], 7))
        except (TypeError, KeyError, AttributeError):
            raise ValueError("not a count of bytes") from None


def _periods(values: Mapping[str, Any], length: int) -> dict[str, Used]:
    found = {}
    for period, (sent, received) in values.items():
        if len(period) != length or not all(type(n) is int and n >= 0 for n in (sent, received)):
            raise ValueError("not a count of bytes")
        found[period] = Used(sent, received)
    return dict(list(found.items())[-KEPT:])


def counted(limits: OwnerLimits, bill: Bill, date: str) -> list[tuple[str, int, float]]:
    """What is bounded: in words, the bytes so far, and how many there may be."""
    today, month = bill.today(date), bill.this_month(date)
    found = [
        (today.sent, limits.max_upload_per_day_bytes),
        (month.sent, limits.max_upload_per_month_bytes),
        (today.received, limits.max_download_per_day_bytes),
        (month.received, limits.max_download_per_month_bytes),
    ]
    named = zip(ALLOWED, found, strict=True)
    return [(what, used, most) for what, (used, most) in named if most is not None]


def used_line(limits: OwnerLimits, bill: Bill, date: str) -> str:
    """For people; empty where nothing is bounded."""
    parts = counted(limits, bill, date)
    return "; ".join(f"{rounded(n)} of {size_text(most)} {what}" for what, n, most in parts)


def why_used_up(limits: OwnerLimits, bill: Bill, date: str) -> str:
    """Why a peer may not work any more, today or this month; empty where it may."""
    for what, used, most in counted(limits, bill, date):
        if used >= (1 - RESERVE) * most:
            return f"it has {what} what its owner allows, {size_text(most)}"
    return ""


def rounded(num_bytes: int) -> str:
    """A few digits."""
    digits = max(0, len(str(num_bytes)) - 3)
    return size_text(num_bytes // 10**digits * 10**digits)
