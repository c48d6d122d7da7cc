"""`make test-all`: every test, those marked `long` too, and a small file that says how it ended.

    python -m tests.every run     # after `make test`: the long ones, and the file
    python -m tests.every again   # those that failed, once they are mended
    python -m tests.every age     # `.ci/run`: how old the last result is

The file has the commit that was tested, so its age is a number of commits. `.ci/run` warns when it
is `WARN_AT` old and refuses at `REFUSE_AT`. What is run again leaves that commit as it is: the last
one at which all tests were run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("last.json")
WARN_AT, REFUSE_AT = 50, 150
"""Commits."""
HOW = "`make test-all` runs every test, and its result is to be committed"
PARTS = {
    "virtual": ("-n", "auto", "--dist", "loadgroup", "-m", "long and not processes"),
    "processes": ("-m", "long and processes"),
}
NO_TESTS = 5
"""pytest's exit code where a part has none."""

Git = Callable[..., str | None]
"""What a git command prints; None where it fails."""


class NotUsable(Exception):
    """The result file, or the tree, is not what it has to be; one line."""


@dataclass(frozen=True)
class Outcome:
    """Of one run of all long tests."""

    commit: str
    date: str
    passed: bool
    tests: int
    failures: int
    seconds: int
    failed: list[str] = field(default_factory=list)
    """Node ids of those that failed."""

    @classmethod
    def parse(cls, text: str) -> Outcome:
        """Raises `NotUsable`."""
        try:
            values = json.loads(text)
            outcome = cls(**values)
        except (TypeError, ValueError) as e:
            raise NotUsable(f"{RESULT.name} cannot be read ({e}); {HOW}") from e
        for name, kind in cls.__annotations__.items():
            if name in values and type(values[name]).__name__ != kind.split("[")[0]:
                raise NotUsable(f"{RESULT.name}: {name} is not of type {kind}; {HOW}")
        return outcome


def git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def judge(text: str | None, git: Git) -> tuple[bool, str]:
    """Whether a change may pass with the last result being what it is, and a line about it.
    `text`: of the result file, None where there is none."""
    if text is None:
        return False, f"no result of all tests is there; {HOW}"
    try:
        outcome = Outcome.parse(text)
    except NotUsable as e:
        return False, str(e)
    what = f"the last run of all tests ({outcome.date}, {outcome.tests} long ones)"
    if not outcome.passed:
        return False, f"{what} failed: mend it, then {HOW}"
    commit = outcome.commit[:12]
    if git("cat-file", "-e", f"{outcome.commit}^{{commit}}") is None:
        return True, f"{what} passed; its age is not known, for the history here lacks {commit}"
    if git("merge-base", "--is-ancestor", outcome.commit, "HEAD") is None:
        return False, f"{what} was of commit {commit}, which HEAD does not come from; {HOW}"
    age = int(git("rev-list", "--count", f"{outcome.commit}..HEAD") or 0)
    line = f"{what} passed and is {age} commits old"
    if age >= REFUSE_AT:
        return False, f"{line}, which is too old; {HOW}"
    if age >= WARN_AT:
        return True, f"warning: {line}; {HOW}"
    return True, line


def run() -> Outcome:
    """Runs the long tests of a tree without changes. Raises `NotUsable` where it has some."""
    commit = git("rev-parse", "HEAD")
    if commit is None:
        raise NotUsable("there is no git history here: a result belongs to a commit")
    changed = [line for line in (git("status", "--porcelain") or "").splitlines() if line]
    if changed:
        raise NotUsable(f"commit first, for a result belongs to a commit: {changed[0].strip()}")
    began = time.monotonic()
    tests = failures = 0
    failed: list[str] = []
    passed = True
    for name, arguments in PARTS.items():
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / f"{name}.xml"
            code = run_pytest(*arguments, f"--junitxml={report}")
            passed = passed and code in (0, NO_TESTS)
            suites = ET.parse(report).getroot().iter("testsuite") if report.exists() else ()
            for suite in suites:
                tests += int(suite.get("tests", 0))
                failures += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
                failed += failed_in(suite)
    seconds = round(time.monotonic() - began)
    date = datetime.now(UTC).date().isoformat()
    passed = passed and not failures and tests > 0
    return Outcome(commit, date, passed, tests, failures, seconds, failed)


def run_pytest(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def failed_in(suite: ET.Element) -> list[str]:
    """Node ids of the tests of a report that failed. Their files are found by the names of their
    modules."""
    return [
        f"{(case.get('classname') or '').replace('.', '/')}.py::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]


def run_again(last: Outcome, run_tests: Callable[..., int] = run_pytest) -> Outcome:
    """Runs those that failed. Raises `NotUsable` where that is not known."""
    if last.passed or len(last.failed) != last.failures:
        raise NotUsable(f"{RESULT.name} does not name what failed; {HOW}")
    if run_tests(*last.failed) != 0:
        return last
    return replace(last, passed=True, failures=0, failed=[])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.every")
    parser.add_argument("action", choices=("run", "again", "age"))
    action: Any = parser.parse_args(arguments).action
    if action == "age":
        ok, line = judge(RESULT.read_text() if RESULT.exists() else None, git)
        print(line)
        return 0 if ok else 1
    try:
        outcome = run() if action == "run" else run_again(Outcome.parse(RESULT.read_text()))
    except NotUsable as e:
        print(e)
        return 1
    RESULT.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    print(f"{RESULT.relative_to(ROOT)}: {'passed' if outcome.passed else 'failed'}; commit it")
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
