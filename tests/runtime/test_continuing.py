"""A peer whose state folder is of swarmnet 0.1 goes on where it was."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from peer.commands.export import Wanted, export_checkpoints
from swarmnet.errors import UserError
from swarmnet.protocol.membership.records import ACTIVE
from swarmnet.runtime.counted import COUNTED_FILE, CountedMicrobatches, read_counted
from swarmnet.runtime.joining.find import find_living
from swarmnet.runtime.joining.known_peers import KnownPeers
from swarmnet.runtime.joining.starting import StartedRun, start_run
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import RunSpec, load_spec
from swarmnet.spec_0_1 import possible_run_ids_of_0_1, run_id_of_0_1
from swarmnet.swarm.messages import SpecReply
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.arrays import to_tensor
from swarmnet.training.checkpoint import CheckpointStore
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import Message
from tests.swarm.harness import Swarm, in_virtual_time

GOLDEN = Path(__file__).parents[1] / "golden" / "state_0_1"
OLD_ID = "65fa026ed9ac1f7f57646a7e6b8cc731"
ROUND = 6
"""Of its checkpoint."""
ROUNDS = 12


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old state folder, beside the data of its run."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    text = bytes(rng.choice(b"abcdefgh \n") for _ in range(20_000))
    (tmp_path / "text.txt").write_bytes(text)
    shutil.copytree(GOLDEN / "state", tmp_path / "state")
    return tmp_path / "state"


def started() -> StartedRun:
    return start_run(GOLDEN / "run.toml")


def rounds_of(state: Path, spec: RunSpec) -> list[int]:
    return [saved.round for saved in CheckpointStore(state, spec).available()]


def test_its_checkpoint_is_loaded_bit_for_bit(state: Path) -> None:
    run = started()
    assert run.former_ids == (OLD_ID,)
    assert run.spec.run_id != OLD_ID
    store = CheckpointStore(state, run.spec)
    assert [saved.round for saved in store.available()] == [ROUND]
    snapshot = store.load(ROUND)
    [folder] = (state / "checkpoints").glob("*/*")
    named = load_file(folder / "stage.safetensors")
    moments = load_file(folder / "optimizer.safetensors")
    [flat] = snapshot.parameters
    assert sum(t.numel() for t in named.values()) == to_tensor(flat).numel()
    values, (mean, square) = snapshot.optimizer[0]
    assert values == {"steps": ROUND}
    assert to_tensor(mean).equal(moments["shards.0.mean"])
    assert to_tensor(square).equal(moments["shards.0.square"])


def test_the_run_goes_on_in_its_round_with_its_parameters(state: Path) -> None:
    run = started()
    before = CheckpointStore(state, run.spec).load(ROUND)

    async def scenario(swarm: Swarm) -> None:
        store = CheckpointStore(state, run.spec)
        disk = Disk(store, InlineWorker(), 3, store.available(), store.unreadable)
        peer = swarm.start("peer-0", disk=disk)
        assert peer.feeder is not None
        counted = CountedMicrobatches(
            state / COUNTED_FILE, run.spec.run_id, lambda: peer.gossip.own.history
        )
        counted.go_on_from(run.former_ids)
        peer.feeder.on_commit, peer.feeder.on_history = counted, counted.renamed
        await swarm.until(lambda: peer.gossip.own.state == ACTIVE)
        assert peer.gossip.own.round == ROUND
        assert peer.replica is not None
        assert peer.replica.digests == before.digests
        await swarm.until_round(ROUNDS)
        assert swarm.total("shard_reset") == 0, "moments of the optimizer were lost"
        await swarm.until(lambda: swarm.total("checkpoints") >= 2)

    in_virtual_time(scenario, run.spec)
    assert rounds_of(state, run.spec) == [9, ROUNDS]
    folders = [path.name for path in (state / "checkpoints").iterdir()]
    assert folders == [run.spec.run_id[:16]], "the old folder is gone when it is of no more use"
    whole = read_counted([state / COUNTED_FILE])
    assert sorted(whole) == list(range(ROUND, ROUNDS)), "0.1 knew no slots"
    assert read_counted([state / COUNTED_FILE], OLD_ID) == whole
    assert read_counted([state / COUNTED_FILE], run.spec.run_id) == whole


def test_a_joiner_finds_its_old_checkpoint_by_the_spec_that_it_receives(state: Path) -> None:
    spec = RunSpec.from_canonical(started().spec.canonical())
    assert rounds_of(state, spec) == [ROUND]
    assert OLD_ID in possible_run_ids_of_0_1(spec)


def test_checkpoints_of_both_ids_are_pruned_as_one_run(state: Path) -> None:
    spec = started().spec
    store = CheckpointStore(state, spec)
    old = store.load(ROUND)
    store.save(replace(old, round=7, history=old.history + 1))
    assert rounds_of(state, spec) == [ROUND, 7]
    store.save(replace(old, round=ROUND, history=old.history + 1))
    assert rounds_of(state, spec) == [ROUND, 7]
    assert CheckpointStore(state, spec).load(ROUND).history == old.history + 1
    assert len(list((state / "checkpoints").glob("*/round-*"))) == 2


@pytest.mark.parametrize(
    "change",
    [
        "seed = 6",
        '[sync]\nmode = "local"',
        "[sync]\nwarmup_rounds = 3",
        "[sync]\nshard_parameters = 1000",
    ],
)
def test_what_was_another_run_is_another_run(state: Path, change: str) -> None:
    path = state.parent / "other.toml"
    text = (GOLDEN / "run.toml").read_text()
    path.write_text(text.replace("seed = 5", change) if "seed" in change else text + change)
    assert rounds_of(state, start_run(path).spec) == []


def test_a_cut_that_the_program_would_not_choose_is_another_run(state: Path) -> None:
    """The old spec left the shards' size open: 0.1 chose another one."""
    written = load_spec(GOLDEN / "run.toml")
    spec = written.resolved(layers=[3], shard_parameters=1000)
    assert OLD_ID in possible_run_ids_of_0_1(spec)
    assert rounds_of(state, spec) == []


def test_a_damaged_or_forged_spec_is_of_no_run(state: Path) -> None:
    [path] = (state / "checkpoints").glob("*/*/meta.json")
    meta = json.loads(path.read_text())
    for spec in ({}, meta["spec"] | {"seed": 6}, meta["spec"] | {"seed": [[]]}):
        path.write_text(json.dumps(meta | {"spec": spec}))
        assert rounds_of(state, started().spec) == []


@pytest.mark.parametrize("name", ["meta.json", "stage.safetensors"])
def test_an_old_checkpoint_that_is_cut_off_is_told(state: Path, name: str) -> None:
    [path] = (state / "checkpoints").glob(f"*/*/{name}")
    path.write_bytes(path.read_bytes()[:100])
    store = CheckpointStore(state, started().spec)
    assert store.available() == []
    [line] = store.unreadable
    assert str(path.parent) in line


def test_the_peers_that_it_met_are_those_of_the_run(state: Path) -> None:
    run = started()
    known = KnownPeers.load(state)
    assert known.run_id == OLD_ID
    known.rename("another run", ["a third"])
    assert known.run_id == OLD_ID
    known.rename(run.spec.run_id, run.former_ids)
    assert known.run_id == run.spec.run_id
    assert len(known.peers) == 1


def test_peers_that_still_run_0_1_are_told_of() -> None:
    run, written = start_run(GOLDEN / "run.toml", reads_data=False), load_spec(GOLDEN / "run.toml")
    peer_id = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    address = f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id}"
    said: list[str] = []

    async def main() -> None:
        hub = MemoryHub()
        old = hub.transport(peer_id)

        async def on_spec(_: Request) -> Message:
            return Message(SpecReply(run_id_of_0_1(written) or "", b"{}"))

        old.handle("spec", on_spec)
        known = KnownPeers(Path("x"), run.spec.run_id, {peer_id: (address,)})
        found = await find_living(
            hub.transport("own"),
            known,
            run.spec.run_id,
            former_ids=run.former_ids,
            say=said.append,
        )
        assert found == []
        await asyncio.sleep(0)

    run_virtual(main())
    assert said == [
        "1 of the peers met before train this run with swarmnet 0.1, which this peer cannot join: "
        "update them, or start this one with 0.1"
    ]


def test_counted_microbatches_are_linked_once_and_only_where_there_are_any(state: Path) -> None:
    path = state / COUNTED_FILE
    before = path.read_text()
    counted = CountedMicrobatches(path, "new", lambda: 9)
    counted.go_on_from(["unknown"])
    CountedMicrobatches(state / "none", "new", lambda: 9).go_on_from([OLD_ID])
    assert path.read_text() == before
    assert not (state / "none").exists()
    for _ in range(2):
        counted.go_on_from([OLD_ID, "unknown"])
    assert path.read_text() == before + '{"run_id": "new", "was_run_id": "%s"}\n' % OLD_ID  # noqa: UP031
    counted(3, 77)
    read = read_counted([path])
    assert read == {3: [77]}, "0.1 knew no slots"


def test_a_model_is_exported_from_old_checkpoints_and_from_both(state: Path) -> None:
    out = state.parent / "old"
    assert f"round {ROUND}," in export_checkpoints([state], out)
    assert OLD_ID in (out / "README.md").read_text()
    spec = started().spec
    store = CheckpointStore(state, spec)
    store.save(replace(store.load(ROUND), round=8))
    out = state.parent / "both"
    assert "round 8," in export_checkpoints([state], out)
    assert spec.run_id in (out / "README.md").read_text()
    for run_id in (spec.run_id[:12], OLD_ID[:12]):
        out = state.parent / run_id
        assert "round 8," in export_checkpoints([state], out, Wanted(run_id=run_id))
    other = CheckpointStore(state, spec.with_seed(77))
    other.save(store.load(8))
    with pytest.raises(UserError, match="checkpoints of 2 runs"):
        export_checkpoints([state], state.parent / "several")
