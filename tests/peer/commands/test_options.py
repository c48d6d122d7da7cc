"""What one machine's options mean, and the folder that a peer keeps."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet.errors import UsageError, UserError
from swarmnet.identity import Identity
from swarmnet.runtime.joining.beside import tell_run
from swarmnet.runtime.joining.past import unused_states
from swarmnet.runtime.joining.ready import (
    Ready,
    read_ready_file,
    ready_in,
    ready_target,
    remove_stale,
    write_ready_file,
)
from swarmnet.runtime.options import PeerOptions, default_spec_path, with_overrides
from swarmnet.runtime.state_dir import (
    KEY_FILE,
    Claim,
    claimed_state_dir,
    is_claimed,
    next_incarnation,
    until_taken,
)
from swarmnet.spec import RunSpec, load_spec, parse_spec

STDLIB = load_spec(default_spec_path())
FILES = parse_spec(default_spec_path().read_text().replace("python-stdlib", "/etc"))
CUSTOM = parse_spec(
    """
[model]
kind = "custom"
builder = "model.py:build"
[optimizer]
learning_rate = 0.1
rounds = 1
[pipeline]
num_stages = 1
global_batch = 1
microbatch = 1
"""
)
STARTER = PeerOptions(Path("state"), spec=Path("run.toml"))
JOINER = PeerOptions(Path("state"), join=("address",))


@pytest.mark.parametrize(
    ("options", "spec", "paths"),
    [
        (STARTER, FILES, ("/etc",)),
        (JOINER, STDLIB, ("python-stdlib",)),
        (JOINER, FILES, ()),
        (replace(JOINER, data=("mine",)), FILES, ("mine",)),
        (replace(STARTER, feed=False), FILES, ()),
        (replace(JOINER, data=("mine",), feed=False), FILES, ()),
    ],
)
def test_a_spec_from_the_network_chooses_no_files_of_this_machine(
    options: PeerOptions, spec: RunSpec, paths: tuple[str, ...]
) -> None:
    assert options.data_paths(spec) == paths


def test_a_spec_from_the_network_chooses_no_tokenizer_of_this_machine() -> None:
    data = FILES.data.model_copy(update={"tokenizer": "/etc/tokenizer.json"})
    own = FILES.model_copy(update={"data": data})
    assert STARTER.data_tokenizer(own) == "/etc/tokenizer.json"
    assert JOINER.data_tokenizer(own) == ""
    assert replace(JOINER, tokenizer="mine.json").data_tokenizer(own) == "mine.json"
    assert JOINER.data_tokenizer(FILES) == "bytes"


def test_a_spec_from_the_network_runs_no_code_unasked() -> None:
    assert STARTER.model_builder(CUSTOM) == "model.py:build"
    assert replace(JOINER, builder="mine.py:f").model_builder(CUSTOM) == "mine.py:f"
    assert JOINER.model_builder(STDLIB) == ""
    with pytest.raises(UserError, match=r"read it, then add --builder model\.py:build"):
        JOINER.model_builder(CUSTOM)


def test_overrides_change_the_run() -> None:
    assert with_overrides(STDLIB, rounds=None, seed=None).run_id == STDLIB.run_id
    changed = with_overrides(STDLIB, rounds=3, seed=4)
    assert (changed.optimizer.rounds, changed.seed) == (3, 4)


def test_every_peer_of_a_machine_has_a_folder_of_its_own_and_gets_it_back(tmp_path: Path) -> None:
    with (
        claimed_state_dir(None, tmp_path) as first,
        claimed_state_dir(None, tmp_path) as second,
    ):
        assert (first.name, second.name) == ("peer-1", "peer-2")
    with claimed_state_dir(None, tmp_path) as again:
        assert again == first
        with pytest.raises(UserError, match="in use by another peer"), claimed_state_dir(first):
            pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot use the state folder"),
        claimed_state_dir(tmp_path / "file"),
    ):
        pass


def test_a_state_folder_is_unused_where_no_peer_of_the_run_is_at_work_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, other = "r" * 64, "o" * 64
    own, at_work, of_other, starting, free, nothing = (tmp_path / f"peer-{n}" for n in range(1, 7))
    with ExitStack() as stack:
        for folder in (own, at_work, of_other, starting):
            stack.enter_context(claimed_state_dir(folder))
        for folder in (own, at_work, of_other, starting, free, free / "seat-1", own / "seat-1"):
            (folder / "checkpoints" / run_id[:16]).mkdir(parents=True)
        (nothing / "checkpoints" / other[:16]).mkdir(parents=True)
        for folder, running in ((own, run_id), (at_work, run_id), (of_other, other)):
            stack.callback(tell_run(folder, running, "a run", []))
        unused = [of_other, free, free / "seat-1"]
        for mine in (own, own / "seat-1"):
            assert sorted(unused_states(mine, run_id)) == sorted(unused)
        with claimed_state_dir(free):
            assert unused_states(own, run_id) == [of_other]
    assert set(unused_states(own, run_id)) > set(unused)
    monkeypatch.setattr("os.geteuid", lambda: -1)
    assert unused_states(own, run_id) == [], "they are somebody else's"


def test_a_state_folder_that_is_removed_stays_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, key = tmp_path / "peer-1", Identity.generate()
    with claimed_state_dir(folder), ExitStack() as stack:
        told: list[str] = []
        claim = Claim(folder, key, lambda: told.append("the run"))
        stack.callback(claim.close)
        assert claim.renew()
        assert Identity.load_or_create(folder / KEY_FILE) == key
        (folder / KEY_FILE).unlink()
        folder.rename(tmp_path / "away")
        assert claim.renew()
        assert is_claimed(folder), "nobody else begins in it"
        assert Identity.load_or_create(folder / KEY_FILE) == key
        shutil.rmtree(folder)
        (tmp_path / "away").rename(folder)  # a disk comes back
        assert claim.renew()
        assert claim.renew()
        assert [r.message for r in caplog.records] == [
            f"the state folder {folder} was removed; it is made anew"
        ]
        assert told == ["the run"]
        shutil.rmtree(folder)
        folder.write_text("")
        assert claim.renew(), "nothing can be written there, and nobody has taken it"
        folder.unlink()

        monkeypatch.setattr("swarmnet.runtime.state_dir.LOOK_S", 0.0)
        with (
            claimed_state_dir(folder),
            pytest.raises(UsageError, match="was removed, and another peer uses the one in its"),
        ):
            asyncio.run(until_taken(claim))


def test_a_file_system_without_locks_is_no_other_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for wanted in (None, tmp_path / "mine"):
        claiming = claimed_state_dir(wanted, tmp_path)
        with pytest.raises(UserError, match="No locks available"):
            claiming.__enter__()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "peer-1"]


def test_a_clock_set_back_between_two_starts_makes_nobody_older(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path, 5000.0) == 5_000_000
    assert next_incarnation(tmp_path, 4000.0) == 5_000_001
    assert next_incarnation(tmp_path, 6000.0) == 6_000_000
    for damaged in ("", "soon", "-7", "9" * 40):
        (tmp_path / "incarnation").write_text(damaged)
        assert next_incarnation(tmp_path, 7000.0) == 7_000_000


def test_the_ready_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    import os

    path = tmp_path / "ready.json"
    assert read_ready_file(path) is None
    write_ready_file(path, ["/address/p2p/x", "/other/p2p/x"], "x", "run", "a name")
    addresses = ("/address/p2p/x", "/other/p2p/x")
    said = Ready("/address/p2p/x", "x", os.getpid(), addresses, "run", "a name")
    assert read_ready_file(path) == said
    assert [p.name for p in tmp_path.iterdir()] == ["ready.json"]


def test_a_folder_of_ready_files_has_one_a_peer_and_loses_those_nobody_renews(
    tmp_path: Path,
) -> None:
    folder = ready_target(f"{tmp_path}/rendezvous/")
    assert folder.is_dir()
    for peer_id in ("a", "b"):
        write_ready_file(folder, [f"/x/p2p/{peer_id}"], peer_id)
    (folder / "notes.json").write_text("{}")
    os.utime(folder / "a.json", (0, 0))
    os.utime(folder / "notes.json", (0, 0))
    assert [ready.peer_id for ready in ready_in(folder)] == ["b", "a"], "renewed last first"
    remove_stale(folder, time.time())
    assert sorted(path.name for path in folder.iterdir()) == ["b.json", "notes.json"]
    assert ready_target(str(tmp_path / "file")) == tmp_path / "file"
