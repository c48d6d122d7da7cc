"""`swarmnet state`: what is there, and what goes."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peer.cli import run_command
from peer.disk.finding import find, folders_of, remove
from peer.disk.state import age, removable_line
from swarmnet.errors import UserError
from swarmnet.runtime.joining.beside import tell_run
from swarmnet.runtime.state_dir import claimed_state_dir
from swarmnet.training.data.store import ABOUT
from tests.training.data.making import opened
from tests.training.specs import TEXT

OLD, NEW = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three state folders, tokens and a run on this machine alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SWARMNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    state = tmp_path / "swarmnet"
    for name, runs in (("peer-1", [OLD, NEW]), ("peer-2", [NEW]), ("peer-3/seat-1", [OLD])):
        (state / name.split("/")[0]).mkdir(parents=True, exist_ok=True)
        (state / name.split("/")[0] / "lock").touch()
        (state / name.split("/")[0] / "identity.key").touch()
        for run in runs:
            _save(state / name, run)
    write(state / "peer-1" / "microbatches.jsonl", 100)
    write(state / "peer-1" / "base" / "1234" / "weights", 5000)
    write(state / "peer-1" / "files" / "5678", 10)
    write(tmp_path / "tmp" / f"swarmnet-local-{2**30}-x" / "peer-1.log", 77)
    write(tmp_path / "tmp" / f"swarmnet-local-{os.getpid()}-x" / "peer-1.log", 77)
    return state


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def _save(folder: Path, run: str) -> None:
    at = folder / "checkpoints" / run / "round-00000010"
    write(at / "stage.safetensors", 1000)
    (at / "meta.json").write_text(json.dumps({"spec": {"name": f"run {run[0]}"}}))
    old = 1_000_000 if run == OLD else 2_000_000
    for path in at.iterdir():
        os.utime(path, (old, old))


def state(*words: str) -> int:
    return run_command(["state", *words])


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    assert state("--json", *words) == 0
    return {item["name"]: item for item in json.loads(capsys.readouterr().out)}


def test_all_that_is_there_is_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = listed(capsys)
    assert set(items) == {
        f"peer-1/checkpoints/{OLD}",
        f"peer-1/checkpoints/{NEW}",
        f"peer-2/checkpoints/{NEW}",
        f"peer-3/seat-1/checkpoints/{OLD}",
        "peer-1/microbatches.jsonl",
        "peer-1/base/1234",
        "peer-1/files",
        f"swarmnet-local-{2**30}-x",
        f"swarmnet-local-{os.getpid()}-x",
    }
    assert items[f"peer-1/checkpoints/{OLD}"]["run_name"] == "run a"
    assert items["peer-1/base/1234"]["size"] == 5000
    assert [n for n, i in items.items() if i["held_by"]] == [f"swarmnet-local-{os.getpid()}-x"]
    assert state() == 0
    shown = capsys.readouterr().out
    assert any(
        line.split()[:1] == [f"swarmnet-local-{os.getpid()}-x"]
        and line.split()[-1] in ("yes", "on")
        for line in shown.splitlines()
    ), "who is at work is shown where there is little room"
    assert "5.0 kB" in shown
    assert "run a" in shown


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_names_and_sizes_are_whole_however_narrow_the_terminal_is(
    root: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    items = listed(capsys)
    monkeypatch.setenv("COLUMNS", str(width))
    assert state() == 0
    table = capsys.readouterr().out.rsplit("\n", 2)[0]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= width
    names = "".join(line[: line.find("  ", 2)].strip() for line in table.splitlines())
    for name in items:
        assert name in names
    assert len(re.findall(r"\d [kM]?B\b", table)) == len(items)


def test_by_name_and_by_a_bound(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert state("--remove", "run a") == 0
    assert "removed peer-3/seat-1/checkpoints/" in capsys.readouterr().out
    assert not any(OLD in name for name in listed(capsys))
    assert (root / "peer-1" / "lock").exists(), "nobody's identity goes"
    assert state("--keep", "5.3kB") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" are left")
    left = listed(capsys)
    assert f"peer-1/checkpoints/{NEW}" not in left
    assert "peer-1/base/1234" in left
    assert sum(int(str(item["size"])) for item in left.values()) <= 5300
    assert state("--keep", "10B") == 1
    assert "77 B are held by peers at work" in capsys.readouterr().err
    assert list(listed(capsys)) == [f"swarmnet-local-{os.getpid()}-x"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep", "lots"), "an amount is written 20GB"),
        (("--keep", "1GB", "--remove", "x"), "not both"),
        (("--remove", "x"), "there is nothing called x"),
        (("--state-dir", "/no/such"), "/no/such is no folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    root: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(root.rglob("*"))
    assert state(*words) != 0
    assert message in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before


def test_what_a_living_peer_holds_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own folder, and what others have left of its run and of the run that it continues."""
    with ExitStack() as stack:
        stack.enter_context(claimed_state_dir(root / "peer-2"))
        assert listed(capsys)[f"peer-2/checkpoints/{NEW}"]["held_by"] == "a peer starts there"
        assert not listed(capsys)[f"peer-1/checkpoints/{NEW}"]["held_by"]
        stack.callback(tell_run(root / "peer-2", f"{NEW}ffff", "run b", [], continues=f"{OLD}@7"))
        held = {name for name, item in listed(capsys).items() if item["held_by"]}
        assert {n for n in held if "checkpoints" in n} == {
            f"peer-{k}/checkpoints/{run}" for k, run in ((1, OLD), (1, NEW), (2, NEW))
        } | {f"peer-3/seat-1/checkpoints/{OLD}"}
        assert state("--remove", NEW) == 2
        assert "stays: a peer of its run is at work here" in capsys.readouterr().err
        assert state("--keep", "1B") == 1
        assert (root / "peer-1" / "checkpoints" / OLD).exists()
        assert not (root / "peer-1" / "base").joinpath("1234").exists()
    capsys.readouterr()
    assert state("--remove", NEW) == 0


def test_who_begins_meanwhile_keeps_what_is_there(root: Path) -> None:
    """Between the list and the removal."""
    folders = folders_of(root)
    found = {one.item.name: one for one in find(folders, root / "none", root / "none")}
    saved, base = found[f"peer-1/checkpoints/{NEW}"], found["peer-1/base/1234"]
    with ExitStack() as stack:
        stack.enter_context(claimed_state_dir(root / "peer-2"))
        stack.callback(tell_run(root / "peer-2", f"{NEW}ffff", "run b", []))
        with pytest.raises(UserError, match="stays: a peer has begun"):
            remove(saved, folders)
        remove(found[f"peer-1/checkpoints/{OLD}"], folders)
    with claimed_state_dir(root / "peer-1"):
        for one in (saved, base):
            with pytest.raises(UserError, match="stays: a peer has begun"):
                remove(one, folders)
    assert all(path.exists() for one in (saved, base) for path in one.paths)
    remove(base, folders)
    assert not base.paths[0].exists()


def test_tokens_that_a_process_has_open_stay(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root.parent / "a.txt"
    path.write_text(TEXT)
    data: Any = opened(str(path))
    (entry,) = (about.parent for about in (root.parent / "cache" / "data").glob(f"*/{ABOUT}"))
    name = f"tokens/{entry.name}"
    assert listed(capsys)[name]["held_by"] == "a process has opened it"
    assert state("--remove", name) == 2
    del data
    gc.collect()
    assert not listed(capsys)[name]["held_by"]
    assert state("--remove", name) == 0
    assert not entry.exists()


def test_a_run_that_is_over_says_what_may_go(root: Path) -> None:
    line = removable_line(root / "peer-1", f"{NEW}00")
    assert line.startswith("its checkpoints take 1.0 kB of ")
    assert f"`swarmnet state --remove {NEW}" in line
    assert removable_line(root / "peer-1", "cccc") == ""


def test_ages() -> None:
    assert [age(s) for s in (-5, 30, 3600, 90_000)] == ["0 min", "0 min", "1 h", "1 d"]


def test_folders_of_other_programs_are_not_ours(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may have a lock and checkpoints beside ours, and data where the cache is."""
    theirs = (
        root / "other" / "checkpoints" / "epoch-3" / "model.bin",
        root / "other" / "files" / "x",
    )
    data = root.parent / "cache" / "data" / "pictures" / "1.png"
    for path in (*theirs, data):
        write(path, 500)
        os.utime(path, (1, 1))
    (root / "other" / "lock").touch()
    assert not {n for n in listed(capsys) if n.startswith(("other/", "tokens/"))}
    assert state("--keep", "1B") == 1, "what goes on here stays"
    assert all(path.exists() for path in (*theirs, data))


def test_what_a_link_leads_to_is_not_counted_and_stays(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = root.parent / "big" / "cccc"
    write(real / "round-00000001" / "stage.safetensors", 9000)
    (root / "peer-1" / "checkpoints" / "cccc").symlink_to(real)
    item = listed(capsys)["peer-1/checkpoints/cccc"]
    assert int(str(item["size"])) < 1000
    assert state("--remove", "peer-1/checkpoints/cccc") == 0
    assert (real / "round-00000001" / "stage.safetensors").exists()


def test_what_cannot_be_removed_does_not_keep_the_rest(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that went is told, and then why others stay."""
    refused = root / "peer-1" / "checkpoints" / OLD

    def rmtree(path: Path) -> None:
        if path == refused:
            raise PermissionError(13, "Permission denied", str(path))
        really(path)

    really = shutil.rmtree
    monkeypatch.setattr("shutil.rmtree", rmtree)
    assert state("--remove", OLD[:8]) == 1
    said = capsys.readouterr()
    assert f"removed peer-3/seat-1/checkpoints/{OLD}" in said.out
    assert f"cannot remove peer-1/checkpoints/{OLD}: Permission denied" in said.err
    assert refused.exists()


def test_a_folder_that_cannot_be_read_is_an_error(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def iterdir(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert state() == 1
    assert f"cannot read {root}: Permission denied" in capsys.readouterr().err
