"""A mutation is drawn with a seed and found again where its code has moved."""

from __future__ import annotations

from pathlib import Path

from tests.mutations.__main__ import AREAS, PACKAGE, ROOT, area_of, find, redraw, sites_in

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
