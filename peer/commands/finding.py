"""One line of what `swarmnet doctor` found."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.causes import DOCTOR, taken_apart

GOOD, WARNING, BAD, SKIPPED = "good", "warning", "bad", "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    level: str
    found: str
    mend: str = ""


def without_mend(line: str) -> tuple[str, str]:
    """A line about other peers without what to do at its end, and that, as far as it is more than
    to start this command."""
    why, mend = taken_apart(line)
    return why, mend.removesuffix(DOCTOR)
