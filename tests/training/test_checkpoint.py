"""A checkpoint is all there, or not there."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarmnet.ports import OwnSteps, Snapshot
from swarmnet.spec import RunSpec
from swarmnet.training import checkpoint
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.checkpoint import FILES, META_FILE, CheckpointError, CheckpointStore
from swarmnet.training.optimizer.local_steps import build_optimizer
from swarmnet.training.stage import TorchStage, build_stage
from tests.training.specs import small_spec

SPEC = small_spec()


def snapshot(round_index: int, *, history: int = 1, stage_index: int = 0) -> Snapshot:
    """Of a fresh stage whose shards 0 and 2 have made one step."""
    stage = build_stage(SPEC, stage_index)
    optimizer = build_optimizer(SPEC, stage)
    for j in (0, 2):
        optimizer.create(j)
        gradient = from_tensor(torch.full((stage.shard_sizes[j],), 0.5 + round_index))
        optimizer.step(j, stage.parameter_shard(j), gradient, 1.0, 0)
    num_shards = len(stage.shard_sizes)
    return Snapshot(
        round=round_index,
        history=history,
        stage=stage_index,
        parameters=tuple(stage.parameter_shard(j) for j in range(num_shards)),
        digests=b"".join(stage.digest(j) for j in range(num_shards)),
        optimizer={j: optimizer.export(j) for j in optimizer.owned()},
        errors={1: ("int8", from_tensor(torch.full((stage.shard_sizes[1],), 0.25).bfloat16()))},
    )


def store(path: Path, spec: RunSpec = SPEC, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(path, spec, keep=keep)


def rounds(path: Path, spec: RunSpec = SPEC) -> list[int]:
    return [saved.round for saved in store(path, spec).available()]


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    before = snapshot(10)
    store(tmp_path).save(before)
    [saved] = store(tmp_path).available()
    assert (saved.round, saved.history, saved.stage, saved.held) == (10, 1, 0, (0, 2))
    after = store(tmp_path).load(10)
    assert after.digests == before.digests
    assert after.errors.keys() == before.errors.keys() == {1}
    (codec, lost), (codec_before, lost_before) = after.errors[1], before.errors[1]
    assert codec == codec_before
    assert torch.equal(to_tensor(lost), to_tensor(lost_before))
    for a, b in zip(after.parameters, before.parameters, strict=True):
        assert torch.equal(to_tensor(a), to_tensor(b))
    assert after.optimizer.keys() == before.optimizer.keys()
    for j, (values, arrays) in before.optimizer.items():
        assert after.optimizer[j][0] == values
        for a, b in zip(after.optimizer[j][1], arrays, strict=True):
            assert torch.equal(to_tensor(a), to_tensor(b))


def test_parameters_carry_hugging_face_names(tmp_path: Path) -> None:
    store(tmp_path).save(snapshot(10))
    named = load_file(store(tmp_path).path(10) / "stage.safetensors")
    stage = build_stage(SPEC, 0)
    assert isinstance(stage, TorchStage)
    assert named.keys() == stage.state_dict().keys()
    assert "model.embed_tokens.weight" in named


@pytest.mark.parametrize("name", [*FILES, META_FILE])
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer"])
def test_a_cut_off_file_makes_the_checkpoint_none(tmp_path: Path, name: str, how: str) -> None:
    store(tmp_path).save(snapshot(10))
    store(tmp_path).save(snapshot(20))
    path = store(tmp_path).path(20) / name
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "longer": data + b"x"}[how])
    assert rounds(tmp_path) == [10]
    with pytest.raises(CheckpointError):
        store(tmp_path).load(20)
    assert store(tmp_path).load(10).round == 10


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_on_loading(tmp_path: Path, name: str) -> None:
    store(tmp_path).save(snapshot(10))
    path = store(tmp_path).path(10) / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged \(its checksum is wrong\)"):
        store(tmp_path).load(10)


@pytest.mark.parametrize("writes", range(6))
def test_a_death_while_writing_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """The process dies at the n-th flush; the next save removes what was left."""
    store(tmp_path).save(snapshot(10))
    real, num_left = os.fsync, writes

    def flush(descriptor: int) -> None:
        nonlocal num_left
        if num_left == 0:
            raise KeyboardInterrupt
        num_left -= 1
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    try:
        store(tmp_path).save(snapshot(20))
    except KeyboardInterrupt:
        pass
    monkeypatch.undo()
    assert rounds(tmp_path) in ([10], [10, 20])
    for r in rounds(tmp_path):
        assert store(tmp_path).load(r).round == r
    store(tmp_path).save(snapshot(30))
    names = sorted(p.name for p in store(tmp_path).folder.iterdir())
    assert all(name.startswith("round-") for name in names), "leftovers"


def test_the_newest_stay(tmp_path: Path) -> None:
    for r in (10, 20, 30, 40):
        store(tmp_path, keep=3).save(snapshot(r))
    assert rounds(tmp_path) == [20, 30, 40]


def test_the_rounds_that_slower_disks_save_stay_for_longer(tmp_path: Path) -> None:
    first = snapshot(10)
    for r in range(10, 320, 10):
        CheckpointStore(tmp_path, SPEC, every=10).save(replace(first, round=r))
    assert rounds(tmp_path) == [160, 240, 280, 300, 310]


def test_a_new_history_does_not_destroy_the_older_one_too_early(tmp_path: Path) -> None:
    """The run went on from round 20: its checkpoint stays until the new history has two of its own,
    and what the old one had beyond stays until the new one has come as far."""
    for r in (20, 60):
        store(tmp_path).save(snapshot(r))
    store(tmp_path).save(snapshot(30, history=2))
    assert rounds(tmp_path) == [20, 30, 60]
    store(tmp_path).save(snapshot(40, history=2))
    assert rounds(tmp_path) == [30, 40, 60]
    store(tmp_path).save(snapshot(60, history=2))
    assert [s.history for s in store(tmp_path).available()] == [2, 2]
    assert rounds(tmp_path) == [40, 60]


def test_the_round_that_a_new_history_began_from_stays_until_there_are_enough(
    tmp_path: Path,
) -> None:
    """This peer had left in a later round than it went on from, and others in other rounds."""
    for r in (20, 30, 33):
        store(tmp_path).save(snapshot(r))
    again = store(tmp_path)
    again.load(30)
    again.save(snapshot(40, history=2))
    assert rounds(tmp_path) == [30, 33, 40]
    again.save(snapshot(50, history=2))
    assert rounds(tmp_path) == [40, 50]


def test_a_round_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    store(tmp_path).save(snapshot(10))
    store(tmp_path).save(snapshot(10, history=2, stage_index=1))
    [saved] = store(tmp_path).available()
    assert (saved.history, saved.stage) == (2, 1)
    assert store(tmp_path).load(10).stage == 1


def test_checkpoints_of_another_run_are_left_alone(tmp_path: Path) -> None:
    other = small_spec(optimizer={"learning_rate": 0.5})
    store(tmp_path).save(snapshot(10))
    assert rounds(tmp_path, other) == []
    with pytest.raises(CheckpointError, match="No such file"):
        store(tmp_path, other).load(10)
    for r in (10, 20, 30):
        store(tmp_path, other).save(snapshot(r))
    assert rounds(tmp_path, other) == [20, 30]
    assert rounds(tmp_path) == [10]


def test_a_disk_that_fails_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError) as caught:
        store(tmp_path).save(snapshot(10))
    assert "\n" not in str(caught.value)
    assert "checkpoints" in str(caught.value)


def test_a_state_folder_that_is_removed_is_made_anew(tmp_path: Path) -> None:
    kept = store(tmp_path / "peer-1")
    for r in (10, 20):
        kept.save(snapshot(r))
        kept.note_held_out({r: 2.0})
        shutil.rmtree(tmp_path / "peer-1")
    kept.save(snapshot(30))
    assert rounds(tmp_path / "peer-1") == [30]


def test_a_newer_format_is_not_guessed_at(tmp_path: Path) -> None:
    store(tmp_path).save(snapshot(10))
    path = store(tmp_path).path(10) / META_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    assert rounds(tmp_path) == []
    with pytest.raises(CheckpointError, match="format 2"):
        store(tmp_path).load(10)


def local_snapshot(round_index: int) -> Snapshot:
    """As `snapshot`, with own steps of every shard."""
    one = snapshot(round_index)

    def own(j: int) -> OwnSteps:
        size = one.parameters[j].shape[0]
        arrays = (from_tensor(torch.rand(size)), from_tensor(torch.rand(size)))
        return OwnSteps(from_tensor(torch.rand(size)), 100 + j, ({"steps": 7}, arrays))

    return replace(one, own_steps=tuple(own(j) for j in range(len(one.parameters))))


def test_own_steps_are_loaded_bit_for_bit(tmp_path: Path) -> None:
    before = local_snapshot(10)
    store(tmp_path).save(before)
    after = store(tmp_path).load(10)
    assert len(after.own_steps) == len(after.parameters)
    for a, b in zip(after.own_steps, before.own_steps, strict=True):
        assert (a.tokens, a.moments[0]) == (b.tokens, b.moments[0])
        for x, y in zip((a.parameters, *a.moments[1]), (b.parameters, *b.moments[1]), strict=True):
            assert torch.equal(to_tensor(x), to_tensor(y))


@pytest.mark.parametrize("what", ["missing", "longer", "half", "nan"])
@pytest.mark.parametrize(
    "name", ["own.1.parameters", "own.0.square", "shards.2.mean", "errors.1.int8"]
)
def test_a_foreign_file_is_refused_though_its_checksum_is_right(
    tmp_path: Path, name: str, what: str
) -> None:
    store(tmp_path).save(local_snapshot(10))
    folder = store(tmp_path).path(10)
    tensors = load_file(folder / "optimizer.safetensors")
    tensor = tensors.pop(name)
    if name.startswith("errors") and what == "missing":
        tensors["errors.99.int8"] = tensor  # of no shard; without any, a checkpoint is whole too
    if what != "missing":
        tensors[name] = {
            "longer": torch.cat([tensor, tensor]),
            "half": tensor.half(),
            "nan": tensor / 0,
        }[what]
    save_file(tensors, folder / "optimizer.safetensors")
    meta = json.loads((folder / META_FILE).read_text())
    meta["sizes"]["optimizer.safetensors"] = (folder / "optimizer.safetensors").stat().st_size
    meta["checksums"]["optimizer.safetensors"] = checkpoint.checksum(
        folder / "optimizer.safetensors"
    )
    (folder / META_FILE).write_text(json.dumps(meta))
    assert rounds(tmp_path) == [10]
    with pytest.raises(CheckpointError, match=r"(shard \d is missing or )?does not fit"):
        store(tmp_path).load(10)


@pytest.mark.parametrize("own_steps", [[{"steps": 1}], [{"steps": 1, "tokens": -1}] * 3, "x", [3]])
def test_an_account_of_own_steps_that_cannot_be_makes_the_checkpoint_none(
    tmp_path: Path, own_steps: object
) -> None:
    store(tmp_path).save(local_snapshot(10))
    path = store(tmp_path).path(10) / META_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"own_steps": own_steps}))
    assert rounds(tmp_path) == []


def test_a_checkpoint_from_before_there_were_own_steps_is_read(tmp_path: Path) -> None:
    store(tmp_path).save(snapshot(10))
    path = store(tmp_path).path(10) / META_FILE
    values = json.loads(path.read_text())
    del values["own_steps"]
    path.write_text(json.dumps(values))
    assert store(tmp_path).load(10).own_steps == ()


def full_after(num_checkpoints: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The disk under a folder has room for so many checkpoints: writing more fails half-way."""
    real = checkpoint.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        num_there = sum(1 for _ in folder.glob(f"checkpoints/*/*/{path.name}"))
        if num_there >= num_checkpoints:
            path.write_bytes(b"cut off")
            raise SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", save_file)


@pytest.mark.parametrize("room", [1, 2, 3])
def test_older_checkpoints_make_room_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """And never the newest: where there is room for one alone, that one stays."""
    store = CheckpointStore(tmp_path, SPEC, keep=3, every=1)
    full_after(room, monkeypatch, tmp_path)
    saved: list[int] = []
    for r in range(1, 9):
        if room == 1 and saved:
            with pytest.raises(CheckpointError, match="No space left"):
                store.save(snapshot(r))
        else:
            store.save(snapshot(r))
            saved.append(r)
        there = {s.round for s in store.available()}
        assert max(saved) in there
        assert not list(store.folder.glob(".unfinished-*"))
        store.load(max(saved))


def test_what_others_fetch_and_the_best_make_room_before_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, SPEC)
    for r in (1, 2, 3, 4):
        store.note_held_out({2: 0.5})
        store.keep([1])
        store.save(snapshot(r))
    assert [s.round for s in store.available()] == [1, 2, 3, 4]
    full_after(4, monkeypatch, tmp_path)
    store.save(snapshot(5))
    assert [s.round for s in store.available()] == [2, 4, 5]
    full_after(3, monkeypatch, tmp_path)
    store.save(snapshot(6))
    assert [s.round for s in store.available()] == [5, 6]


def with_shards(whole: Snapshot, *shards: int) -> Snapshot:
    return replace(whole, optimizer={j: whole.optimizer[j] for j in shards})


def test_what_lies_unused_beside_a_peer_completes_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = snapshot(10)
    names = ("own", "second", "third", "damaged", "other")
    own, second, third, damaged, other = (tmp_path / name for name in names)
    store(own).save(with_shards(whole, 0))
    store(second).save(with_shards(whole, 2))
    store(third).save(snapshot(20))
    store(damaged).save(with_shards(whole, 2))
    path = store(damaged).path(10) / "optimizer.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    store(other).save(replace(with_shards(whole, 2), history=2))
    ours = CheckpointStore(own, SPEC, unused=lambda: [second, third, damaged, other, tmp_path])
    found = {(u.folder, u.saved.round): u for u in ours.unused()}
    assert {Path(folder).name for folder, _ in found} == set(names) - {"own"}
    assert [saved.held for saved in ours.available()] == [(0,)]

    refused = [(found[str(folder), 10], [2]) for folder in (damaged, other)]
    assert [saved.held for saved in ours.take_over(refused)] == [(0,)]
    assert len(caplog.messages) == 2
    parts = [(found[str(second), 10], [2]), (found[str(third), 20], [0])]
    assert [(s.round, s.held) for s in ours.take_over(parts)] == [(10, (0, 2)), (20, (0,))]
    for j, (values, arrays) in ours.load(10).optimizer.items():
        assert values == whole.optimizer[j][0]
        for a, b in zip(arrays, whole.optimizer[j][1], strict=True):
            assert torch.equal(to_tensor(a), to_tensor(b))
    assert ours.load(20).optimizer.keys() == {0}
    ours.save(snapshot(30))
    assert [s.round for s in ours.available()] == [10, 30], "what it has now is its own"
    assert len(list(third.glob("checkpoints/*/round-*"))) == 1, "nothing is lost of the others'"


def test_what_was_taken_over_of_others_makes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, beside = tmp_path / "own", tmp_path / "beside"
    store(own).save(snapshot(10))
    store(beside).save(snapshot(5))
    ours = CheckpointStore(own, SPEC, unused=lambda: [beside])
    [found] = ours.unused()
    assert [s.round for s in ours.take_over([(found, [0])])] == [5]
    full_after(1, monkeypatch, own)
    with pytest.raises(CheckpointError, match="No space left"):
        ours.save(snapshot(30))
    assert [s.round for s in store(beside).available()] == [5]
    assert [s.round for s in store(own).available()] == [10]
