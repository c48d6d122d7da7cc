"""Every command that a page gives to type is run, or says that it is a sketch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.cli import run_command
from tests.docs.typed import PAGES, ROOT, Typed, of_page, typed, with_values
from tests.peer.planning.decisions import LLAMA, SHAPES
from tests.processes.running import tiny_run

ALL = typed()
RUN = "3f2a1c77"
"""The beginning of a run's id, on the page."""


def test_every_command_is_run_or_is_a_sketch() -> None:
    assert len(ALL) > 60
    neither = [t for t in ALL if not (t.is_sketch or t.runs_here or t.runs_beside)]
    assert neither == []
    assert sum(t.is_sketch for t in ALL) <= 12, "most of them are to be run"


def test_a_reader_is_told_so() -> None:
    assert "sketch" in (ROOT / "docs" / "index.md").read_text()


def test_blocks_are_found_and_what_is_a_sketch() -> None:
    page = """
Text with `swarmnet state`.

```
swarmnet plan --spec run.toml   # a comment
git clone
python a.py                     # a sketch: hours
```

    # A sketch.
    swarmnet local
    X=1 swarmnet peer --join ADDR

```toml
swarmnet local
```
"""
    assert of_page("p", page) == [
        Typed("p", "swarmnet plan --spec run.toml", False),
        Typed("p", "python a.py", True),
        Typed("p", "swarmnet local", True),
        Typed("p", "X=1 swarmnet peer --join ADDR", True),
    ]


def test_values_stand_for_words_in_capitals() -> None:
    words = with_values('X=1 swarmnet generate --join ADDR "a b" >> f.txt', {"ADDR": "/ip4/1"})
    assert words == (["generate", "--join", "/ip4/1", "a b"], "f.txt", True)
    with pytest.raises(AssertionError):
        with_values("swarmnet status ADDR", {})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the commands of a page are typed: a small run, a large model's
    config.json, and what peers have left."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    tiny_run(folder).rename(folder / "run.toml")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA | SHAPES["8 B"]))
    peer = tmp_path / "state" / "swarmnet" / "peer-3"
    saved = peer / "checkpoints" / f"{RUN}00000000" / "round-00000010"
    saved.mkdir(parents=True)
    (saved / "stage.safetensors").write_bytes(bytes(100))
    (saved / "meta.json").write_text(json.dumps({"spec": {"name": "a run"}}))
    (peer / "lock").touch()
    (peer / "identity.key").write_bytes(bytes(32))
    (peer / "microbatches.jsonl").write_bytes(bytes(100))
    return folder


HERE = {t.page: [each for each in ALL if each.page == t.page and each.runs_here] for t in ALL}


SLOW = ("docs/simulation.md",)
"""Half a minute of a core."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page in SLOW else ())
        for page, lines in HERE.items()
        if lines
    ],
)
def test_commands_of_a_page_do_what_it_says(
    page: str, machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, as a reader types them."""
    for each in HERE[page]:
        words, target, is_added = with_values(each.line, {"FOLDER": "model"})
        code = run_command(words)
        said = capsys.readouterr()
        assert code == 0, (each.line, said.err)
        assert said.out.strip(), each.line
        if target:
            with Path(target).open("a" if is_added else "w") as file:
                file.write(said.out)


def test_pages_of_commands_are_looked_at() -> None:
    assert {page.name for page in PAGES} >= {"README.md", "finetune.md", "pretrain.md"}
    assert {t.page for t in ALL if t.runs_here} >= {
        "README.md",
        "docs/plan.md",
        "docs/operations.md",
    }
