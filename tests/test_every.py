"""What `.ci/run` makes of the last result of `make test-all`, in histories of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.every.__main__ import (
    REFUSE_AT,
    WARN_AT,
    Git,
    NotUsable,
    Outcome,
    failed_in,
    judge,
    run_again,
)

SEES_ITSELF_STAND_STILL = """
import subprocess, sys, time

GAPS = '''
import time
began = before = time.monotonic()
while (now := time.monotonic()) - before < 0.2:
    assert now - began < 60.0
    before = now
    time.sleep(0.01)
'''

def test_it():
    exec(GAPS)
    assert subprocess.run([sys.executable, "-c", GAPS]).returncode == 0
"""


def git_in(folder: Path) -> Git:
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}

    def git(*arguments: str) -> str | None:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    return git


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many commits as are too many, and one more."""
    folder = tmp_path_factory.mktemp("history")
    lines = []
    for n in range(REFUSE_AT + 1):
        lines += ["commit refs/heads/main", "committer n <e> 0 +0000", "data 1", str(n % 10)]
    git_in(folder)("init", "-q", "-b", "main")
    subprocess.run(
        ["git", "fast-import", "--quiet"],
        cwd=folder,
        input="\n".join(lines) + "\n",
        text=True,
        check=True,
    )
    return folder


def text_of(commit: str, *, passed: bool = True) -> str:
    return json.dumps(asdict(Outcome(commit, "2026-11-25", passed, 30, 0, 300)))


@pytest.mark.parametrize(
    ("age", "passes", "word"),
    [
        (0, True, "is 0 commits old"),
        (WARN_AT - 1, True, "commits old"),
        (WARN_AT, True, "warning:"),
        (REFUSE_AT - 1, True, "warning:"),
        (REFUSE_AT, False, "too old"),
    ],
)
def test_a_result_grows_old_with_commits(history: Path, age: int, passes: bool, word: str) -> None:
    git = git_in(history)
    commit = git("rev-parse", f"main~{age}")
    assert commit
    ok, line = judge(text_of(commit), git)
    assert ok == passes
    assert word in line
    assert line.startswith("warning:") == (ok and age >= WARN_AT)


def test_where_history_is_missing_it_is_said(history: Path, tmp_path: Path) -> None:
    old = git_in(history)("rev-parse", "main~3") or ""
    ok, line = judge(text_of(old), git_in(tmp_path))
    assert ok
    assert "the history here lacks" in line
    cut = tmp_path / "cut"
    git_in(tmp_path)("clone", "-q", "--depth", "2", f"file://{history}", str(cut))
    ok, line = judge(text_of(old), git_in(cut))
    assert ok
    assert "the history here lacks" in line


def test_bad_results_do_not_pass(history: Path) -> None:
    git = git_in(history)
    commit = git("rev-parse", "main") or ""
    elsewhere = git("commit-tree", "-m", "elsewhere", "main^{tree}") or ""
    good = Outcome(commit, "2026-11-25", True, 30, 0, 300)
    for text, word in (
        (None, "no result"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (json.dumps({"commit": commit}), "cannot be read"),
        (json.dumps(asdict(good) | {"passed": "yes"}), "passed is not of type bool"),
        (json.dumps(asdict(replace(good, passed=False))), "failed: mend it"),
        (text_of(elsewhere), "does not come from"),
    ):
        ok, line = judge(text, git)
        assert not ok
        assert word in line


FAILED = Outcome("c", "2026-11-25", False, 30, 2, 300, ["tests/a.py::b[1]", "tests/a.py::c"])


def test_what_failed_is_run_again_and_leaves_the_commit() -> None:
    asked: list[tuple[str, ...]] = []

    def passes(*ids: str) -> int:
        asked.append(ids)
        return 0

    again = run_again(FAILED, passes)
    assert asked == [("tests/a.py::b[1]", "tests/a.py::c")]
    assert again == replace(FAILED, passed=True, failures=0, failed=[])
    assert run_again(FAILED, lambda *ids: 1) == FAILED


@pytest.mark.parametrize(
    "last", [replace(FAILED, failed=[]), replace(FAILED, passed=True, failures=0)]
)
def test_what_failed_has_to_be_known(last: Outcome) -> None:
    with pytest.raises(NotUsable):
        run_again(last, lambda *ids: 0)


def test_what_failed_is_read_from_the_report() -> None:
    suite = ET.fromstring(
        '<testsuite><testcase classname="tests.a.test_b" name="test_c[1]"><failure/></testcase>'
        '<testcase classname="tests.a.test_b" name="test_d"/></testsuite>'
    )
    assert failed_in(suite) == ["tests/a/test_b.py::test_c[1]"]


@pytest.mark.parametrize("way", [[], ["--apart"]], ids=["together", "apart"])
def test_a_test_stands_still_with_its_processes(way: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(SEES_ITSELF_STAND_STILL)
    words = [sys.executable, "-m", "tests.every.stalled", *way, "--stands", "0.3", "0.4"]
    words += ["--runs", "0.1", "0.2", str(tmp_path), "-p", "no:cacheprovider"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stdout + done.stderr
