"""Commands of swarmnet and Python that the pages give a reader to type: lines of blocks.

A line runs in a test as it is typed, with a value for a word in capitals, unless it says that it is
a sketch: its comment does, or the comment that the block begins with. What stands in a sentence
names a command, and is parsed (`test_commands.py`). Commands of other programs (git, pip, docker)
are no part of this.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "protocol.md"),
]
BLOCK = re.compile(r"^```\n(.*?)^```|((?:^    \S.*\n)+)", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```\S[^\n]*\n.*?^```", re.MULTILINE | re.DOTALL)
"""A file of another language."""
LINE = re.compile(r"(?:[A-Z_]+=\S+ )?(?:swarmnet|python) ")
SKETCH = "sketch"
HERE = {"data", "example", "invite", "limits", "plan", "simulate", "state"}
"""Commands that need no other process, unless they ask a live run (`--join`)."""


@dataclass(frozen=True, slots=True)
class Typed:
    """One command."""

    page: str
    """From the root."""
    line: str
    """Without its comment."""
    is_sketch: bool

    @property
    def command(self) -> str:
        """Of swarmnet; else empty."""
        found = re.match(r"(?:[A-Z_]+=\S+ )?swarmnet (\w+)", self.line)
        return found[1] if found else ""

    @property
    def runs_here(self) -> bool:
        """In the process of a test."""
        return not self.is_sketch and self.command in HERE and "--join" not in self.line

    @property
    def runs_beside(self) -> bool:
        """As a process beside a live run."""
        return not self.is_sketch and self.command != "" and not self.runs_here


def typed() -> list[Typed]:
    """All of them, by page, in their order."""
    return [
        each for page in PAGES for each in of_page(str(page.relative_to(ROOT)), page.read_text())
    ]


def of_page(name: str, text: str) -> list[Typed]:
    """Those of one page."""
    found = []
    for fenced, indented in BLOCK.findall(FENCED.sub("", text)):
        lines = [line.strip() for line in (fenced or indented).splitlines()]
        is_sketch = lines[0].startswith("#") and SKETCH in lines[0]
        for line in lines:
            if LINE.match(line):
                said = line.removeprefix(without_comment(line))
                found.append(Typed(name, without_comment(line), is_sketch or SKETCH in said))
    return found


def without_comment(line: str) -> str:
    return re.sub(r"\s+# .*$", "", line)


def with_values(line: str, values: dict[str, str]) -> tuple[list[str], str, bool]:
    """The words of a line after `swarmnet`, with a value for each word in capitals; the file that
    its output goes to, if it goes to one, and whether it is added there.

    Raises:
        AssertionError: a word in capitals has no value.
    """
    for name, value in values.items():
        line = line.replace(name, value)
    line = re.sub(r"^(?:[A-Z_]+=\S+ )?swarmnet ", "", line)
    line, _, target = line.partition(" > ")
    is_added = " >> " in line
    if is_added:
        line, _, target = line.partition(" >> ")
    words = shlex.split(line)
    assert not [word for word in words if re.fullmatch(r"[A-Z]{3,}", word)], line
    return words, target.strip(), is_added
