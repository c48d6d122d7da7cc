"""A mutation is drawn with a seed and found again where its code has moved."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import repeat
from pathlib import Path

import pytest

from tests.mutations import __main__ as mutations
from tests.mutations.__main__ import (
    AREAS,
    PACKAGE,
    ROOT,
    WITHIN,
    Mutation,
    OtherTree,
    Outcome,
    area_of,
    digest_of,
    find,
    redraw,
    run,
    sites_in,
)

CODE = """
class Router:
    def pick(self, costs, limit):
        if limit < 3 and costs:
            self.count += 1
            return min(costs)
        return len(costs) + 1

    def other(self, limit):
        return limit < 3
"""


def tree_of(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        path = folder / PACKAGE / "protocol" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_every_mutation_of_a_tree_is_found_in_it_and_changes_it(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, routing=CODE)
    sites = sites_in(tree)
    read = {(s.mutation.before, s.mutation.after) for s in sites}
    assert {("limit < 3", "(limit <= 3)"), ("self.count += 1", "pass")} <= read
    assert ("min(costs)", "(max(costs))") in read
    for site in sites:
        assert find(site.mutation, tree) == site
        changed = site.apply(CODE)
        assert changed != CODE
        compile(changed, "routing.py", "exec")


def test_it_is_found_where_the_code_has_moved(tmp_path: Path) -> None:
    """To another file, in a class of another name, below other lines."""
    before = tree_of(tmp_path / "before", routing=CODE)
    moved = f"import os\n\n{CODE}".replace("Router", "Dispatcher")
    after = tree_of(tmp_path / "after", dispatching=moved)
    for site in sites_in(before):
        found = find(site.mutation, after)
        assert found is not None
        assert found.mutation.source.endswith("dispatching.py")
        assert (found.mutation.before, found.mutation.nth) == (
            site.mutation.before,
            site.mutation.nth,
        )


def test_what_has_no_counterpart_is_drawn_anew(tmp_path: Path) -> None:
    before = tree_of(tmp_path / "before", routing=CODE)
    after = tree_of(tmp_path / "after", routing=CODE.replace("min(costs)", "costs[0]"))
    lost = next(s.mutation for s in sites_in(before) if s.mutation.before == "min(costs)")
    kept = next(s.mutation for s in sites_in(before) if s.mutation.before == "limit < 3")
    assert find(lost, after) is None
    [other, same] = redraw([lost, kept], after, before)
    assert same == kept
    assert find(other, before) is not None
    assert find(other, after) is not None


def test_every_area_has_code_and_tests() -> None:
    named = {p.relative_to(ROOT).as_posix() for p in (ROOT / PACKAGE).rglob("*.py")}
    assert {area_of(source) for source in named} == set(AREAS)
    assert [t for tests in AREAS.values() for t in tests if not (ROOT / t).exists()] == []


def test_every_folder_has_an_area_or_is_named() -> None:
    """What is found at `swarmnet/` alone is tried with tests of something else."""
    folders = {p.parent.relative_to(ROOT).as_posix() for p in (ROOT / PACKAGE).rglob("*.py")}
    assert folders == {*AREAS, *WITHIN}
    assert not AREAS.keys() & set(WITHIN)


def test_a_run_that_was_ended_goes_on_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of(tmp_path / "tree", routing=CODE)
    listed, results = tmp_path / "drawn.json", tmp_path / "results.json"
    drawn = [site.mutation for site in sites_in(tree)]
    listed.write_text(json.dumps([asdict(m) for m in drawn]))
    begun: list[str] = []

    def run_one(mutation: Mutation, tree: Path, python: str) -> Outcome:
        begun.append(str(mutation))
        if len(begun) == 3:
            raise KeyboardInterrupt
        return Outcome(digest_of(tree), str(mutation), True, "a test", 1.0)

    monkeypatch.setattr(mutations, "run_one", run_one)
    monkeypatch.setattr(mutations, "LOWEST_PRIORITY", 0)  # no process gets it back
    options = argparse.Namespace(
        tree=tree, list=listed, results=results, before=None, python="", jobs=1
    )
    with pytest.raises(KeyboardInterrupt):
        run(options)
    saved = [o["mutation"] for o in json.loads(results.read_text())]
    assert saved == [str(m) for m in drawn[: len(saved)]]
    assert 0 < len(saved) < 3
    begun.clear()
    begun += ["", "", ""]
    assert run(options) == 0
    assert begun[3:] == [str(m) for m in drawn[len(saved) :]]
    digest_of.cache_clear()
    tree_of(tree, routing=CODE.replace("< 3", "< 4"))
    with pytest.raises(OtherTree):
        run(options)


@pytest.mark.parametrize("is_at_work", [True, False])
def test_only_a_mutant_that_does_nothing_is_not_waited_for(
    is_at_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has to share a processor is."""
    at_work_s = iter(range(2, 10_000_000, 2)) if is_at_work else repeat(0)
    monkeypatch.setattr(mutations, "PATIENCE_S", 0.1)
    monkeypatch.setattr(mutations, "at_work_s", lambda pid: float(next(at_work_s)))
    program = "import time; time.sleep(0.5); print('done')" if is_at_work else "input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert mutations.output_of(process).strip() == ("done" if is_at_work else "")


def test_what_a_process_has_had_of_a_processor_is_known() -> None:
    assert mutations.at_work_s(os.getpid()) > 0.0
    assert mutations.at_work_s(2**22 + 1) == 0.0, "there is none"
