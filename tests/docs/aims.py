"""Aims that readers come with: how long one reads from the README to the first command that is
right, and to the thing that runs. As a program it writes the table:

    python -m tests.docs.aims

A reader begins at the top of the README, reads every word up to a link, goes where it leads (with
an anchor: to that heading), and reads on there. Of all ways through the links the shortest counts,
as for a reader who knows from a link's words where it leads. Code is read like text.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "aims.md"
START = "README.md"
WORDS_A_MINUTE = 200
LIMIT_MIN = 10
LINK = re.compile(r"\]\(([\w./-]*\.md)?(?:#([\w-]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Aim:
    """What somebody wants, and what that person types."""

    wants: str
    typed: tuple[str, ...]
    """Lines of a page, in its order: commands, or the heading under which an answer stands. The
    last one makes the thing run."""


AIMS = (
    Aim("see it run", ("make demo",)),
    Aim(
        "tune a model of 8 B on chats",
        (
            "swarmnet data run.toml",
            'swarmnet plan --spec run.toml --machines "24GB-gpu*2" --links 20Mbit/100Mbit,30ms '
            "--choose --write",
            "swarmnet invite --key owner.key >> run.toml",
            "swarmnet invite --key owner.key --spec run.toml --valid 30d > invite.txt",
            "swarmnet peer --spec run.toml --port 4001 --invite invite.txt --dashboard 8080",
            "swarmnet peer --join ADDR --invite invite.txt",
        ),
    ),
    Aim(
        "pretrain 1 B with friends",
        (
            "swarmnet data run.toml",
            'swarmnet plan --spec run.toml --machines "12GB-gpu*8" --links 100Mbit/100Mbit,20ms '
            "--tokens 10B --choose",
            "swarmnet invite --key owner.key >> run.toml",
            "swarmnet invite --key owner.key --spec run.toml --valid 30d > invite.txt",
            "swarmnet peer --spec run.toml --port 4001 --announce "
            "/ip4/YOUR.PUBLIC.IP/tcp/4001 --invite invite.txt --serve-data",
            "swarmnet peer --join ADDR --invite invite.txt --max-upload 15Mbit",
        ),
    ),
    Aim(
        "watch a run, and take its model",
        ("swarmnet status ADDR", "swarmnet export --join ADDR --out model"),
    ),
    Aim(
        "train from a notebook",
        ('with swarmnet.local("run.toml", peers=4) as run:', 'run.export("model")'),
    ),
    Aim(
        "know what a run costs",
        (
            'swarmnet plan --spec run.toml --machines "24GB-gpu*2, 16GB-cpu*3, mac-32GB" '
            "--links 20Mbit/100Mbit,30ms",
        ),
    ),
    Aim(
        "know what is not defended",
        ("## What is not defended",),
    ),
    Aim(
        "mend something",
        ("make install", ".venv/bin/pytest tests/protocol/pipeline"),
    ),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A way from the README to where an aim's lines stand."""

    pages: tuple[str, ...]
    first_words: int
    """Read until the first right line."""
    all_words: int
    """Read until the last one."""


def reading(aim: Aim, pages: dict[str, str]) -> Reading:
    """The shortest (Dijkstra over places where a reader arrives). `pages`: texts by path from the
    root, as `pages_of` gives them.

    Raises:
        LookupError: no page that can be reached has the lines.
    """
    todo: list[tuple[int, tuple[str, ...], int]] = [(0, (START,), 0)]
    seen: set[tuple[str, int]] = set()
    found: list[Reading] = []
    while todo:
        words, path, start = heapq.heappop(todo)
        page = path[-1]
        if found and words >= min(each.first_words for each in found):
            break
        if (page, start) in seen:
            continue
        seen.add((page, start))
        text = pages[page]
        places = _places(aim, text, start)
        if places:
            first, last = (words + _words(text, start, place) for place in places)
            found.append(Reading(path, first, last))
        for link in LINK.finditer(text, start):
            target = _target(page, link[1])
            if target in pages:
                arrival = _heading(pages[target], link[2])
                read = words + _words(text, start, link.end())
                heapq.heappush(todo, (read, (*path, target), arrival))
    if not found:
        raise LookupError(f"no page that the README leads to has {aim.typed}")
    return min(found, key=lambda each: each.first_words)


def _places(aim: Aim, text: str, start: int) -> tuple[int, int] | None:
    """Where the first and the last line end, when all of them come in this order."""
    ends = []
    at = start
    for line in aim.typed:
        at = text.find(line, at)
        if at < 0:
            return None
        at += len(line)
        ends.append(at)
    return ends[0], ends[-1]


def _words(text: str, start: int, end: int) -> int:
    return len(text[start:end].split())


def _target(page: str, link: str | None) -> str:
    """Of a link on a page, from the root."""
    path = (ROOT / page).parent / link if link else ROOT / page
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else ""


def _heading(text: str, anchor: str | None) -> int:
    """Where a heading begins; the top without an anchor."""
    for match in HEADING.finditer(text):
        words = re.sub(r"[^\w\- ]", "", match[1]).strip().lower()
        if anchor and words.replace(" ", "-") == anchor:
            return match.start()
    return 0


def pages_of() -> dict[str, str]:
    """README, CONTRIBUTING and the pages of docs/, by their paths from the root."""
    paths = [ROOT / START, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def table(readings: dict[Aim, Reading]) -> str:
    """In minutes of reading."""
    lines = ["| aim | pages | first line | minutes to it | to the last |", "|---|---|---|---|---|"]
    for aim, way in readings.items():
        pages = ", ".join(Path(page).name for page in way.pages)
        first, last = (words / WORDS_A_MINUTE for words in (way.first_words, way.all_words))
        lines.append(f"| {aim.wants} | {pages} | `{aim.typed[0]}` | {first:.1f} | {last:.1f} |")
    return "\n".join(lines) + "\n"


def readings() -> dict[Aim, Reading]:
    pages = pages_of()
    return {aim: reading(aim, pages) for aim in AIMS}


def written() -> str:
    """The page of the table."""
    return f"""# Aims of readers

Minutes of reading, at {WORDS_A_MINUTE} words a minute, from the top of the README over its links to
the first line that is right, and to the last one that has to be typed (`tests/docs/aims.py` has all
of them). Downloads and training come after that. `python -m tests.docs.aims` writes this page.

{table(readings())}"""


if __name__ == "__main__":
    TABLE.write_text(written())
