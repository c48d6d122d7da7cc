"""One line of what `swarmnet doctor` found."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, WARNING, BAD, SKIPPED = "good", "warning", "bad", "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    level: str
    found: str
    mend: str = ""
