"""A count and its noun: `1 peer`, `2 peers`, on every line that people read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import peer
import swarmnet
from swarmnet.observe.events import Counted
from swarmnet.observe.text import COUNTED_SENTENCES, sentence
from swarmnet.plurals import counted, plural

NOUNS = (
    "peers|rounds|samples|shards|stages|replicas|minutes|hours|days|files|machines|tokens|"
    "documents|runs|feeders|ranks|microbatches|copies|owners|layers|records|dialogues|times|"
    "epochs|cores|orphans"
)
COUNT = rf"(?:(?:known|own|initial|more) )?(?:{NOUNS})\b(?!/)"
OF_CODE = {"AssertionError", "ProtocolViolation", "ValueError", "fail"}
"""What tells of a fault in code, here or at a peer."""


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (counted(1, "peer"), "1 peer"),
        (counted(0, "peer"), "0 peers"),
        (counted(1200, "microbatch", ","), "1,200 microbatches"),
        (counted(1.0, "epoch", "g"), "1 epoch"),
        (counted(2.5, "epoch", "g"), "2.5 epochs"),
        (counted(0.98, "minute", ".0f"), "1 minute"),
        (counted(2, "copy"), "2 copies"),
        (counted(2, "day"), "2 days"),
        (counted("3 of 8", "round"), "3 of 8 rounds"),
    ],
)
def test_a_noun_follows_its_count(line: str, wanted: str) -> None:
    assert line == wanted


def test_events_of_one_and_of_several() -> None:
    for what, (text, noun) in COUNTED_SENTENCES.items():
        assert ("{count}" in text) == bool(noun)
        one, two = (sentence(Counted(0.0, what, "p" * 12, n), 0) for n in (1, 2))
        if noun:
            assert f" 1 {noun}" in one
            assert f" 2 {plural(noun)}" in two


@pytest.mark.parametrize("package", [swarmnet, peer])
def test_no_line_has_a_plural_behind_a_bare_count(package: object) -> None:
    found = [
        f"{path}:{line}"
        for folder in package.__path__  # type: ignore[attr-defined]
        for path in sorted(Path(folder).rglob("*.py"))
        for line in bare_counts(path.read_text())
    ]
    assert not found, "say `counted(number, noun)`"


def test_the_walk_sees_what_it_looks_for() -> None:
    assert list(bare_counts('say(f"with {num} peers")')) == [1]
    assert list(bare_counts('say(f"{len(x):,} known peers")')) == [1]
    assert list(bare_counts('log.info("stage %d: %d shards to fetch", k, n)')) == [1]
    assert not list(bare_counts('say(f"{rate} samples/s, {MOST} peers")'))
    assert not list(bare_counts('raise ValueError(f"{n} peers")'))


def bare_counts(source: str) -> Iterator[int]:
    """Lines where a text has a number and a noun that is always a plural."""
    tree = ast.parse(source)
    of_code = {
        id(part)
        for call in ast.walk(tree)
        if isinstance(call, ast.Assert)
        or (isinstance(call, ast.Call) and _name(call.func) in OF_CODE)
        for part in ast.walk(call)
    }
    for node in ast.walk(tree):
        if id(node) in of_code:
            continue
        if isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, node.values[1:], strict=False):
                if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                    continue
                if _may_be_one(value) and re.match(f" {COUNT}", str(after.value)):
                    yield value.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "value", None):
            texts = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            if any(isinstance(t, str) and re.search(f"%d {COUNT}", t) for t in texts):
                yield node.lineno


def _may_be_one(value: ast.FormattedValue) -> bool:
    """As it is written: a constant has its number, and 1.0 is no count."""
    form = ast.unparse(value.format_spec) if value.format_spec else ""
    return not _name(value.value).isupper() and not re.search(r"\.[1-9]f", form)


def _name(value: ast.expr) -> str:
    return getattr(value, "attr", "") or getattr(value, "id", "")
