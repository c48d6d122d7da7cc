"""The exported folder is a Hugging Face model with the swarm's logits."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from peer.cli import run_command
from swarmnet.errors import UserError
from swarmnet.protocol.membership.records import OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.exporting.model_folder import Trained, write_folder
from swarmnet.runtime.exporting.models import Wanted, export_checkpoints, fetch_named, newest_whole
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.checkpoint import CheckpointStore
from swarmnet.wire import Array
from tests.swarm.harness import OpenSigner, Swarm, in_virtual_time, tiny_spec

ROUNDS = 6


def logits_of(swarm: Swarm, tokens: torch.Tensor) -> torch.Tensor:
    """Through the stages of the swarm, one after the other. `tokens`: (samples, positions)."""
    inputs = Array("int32", tuple(tokens.shape), tokens.int().numpy().tobytes())
    stages = {m.peer.gossip.own.stage: m.peer.replica for m in swarm.members.values()}
    for _, replica in sorted(stages.items()):
        assert replica is not None
        outputs = replica.stage.evaluate(inputs, None)
        assert isinstance(outputs, Array)
        inputs = Array(outputs.dtype, outputs.shape, bytes(outputs.data))
    return torch.frombuffer(bytearray(inputs.data), dtype=torch.float32).view(inputs.shape)


def check_folder(out: Path, swarm: Swarm) -> None:
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        theirs = model(tokens).logits
    torch.testing.assert_close(logits_of(swarm, tokens), theirs, rtol=1e-5, atol=1e-6)
    config = AutoConfig.from_pretrained(out)
    assert not config.tie_word_embeddings
    assert (out / "README.md").read_text().count("a token is a byte") == 1


async def trained(swarm: Swarm, folder: Path) -> None:
    for i in range(3):
        store = CheckpointStore(folder / f"peer-{i}", swarm.spec)
        swarm.start(f"peer-{i}", disk=Disk(store, InlineWorker(), 2))
    await swarm.until_round(ROUNDS)
    await swarm.until(lambda: swarm.total("checkpoints") >= 7)


def observer(swarm: Swarm) -> Gossip:
    transport = swarm.hub.transport("observer")
    transport.set_run(swarm.spec.run_id)
    own = Record("observer", swarm.spec.run_id, 1, 0, state=OBSERVING)
    view = View("observer")
    return Gossip(transport, view, OpenSigner(), own, random.Random(0), quiet=True)


def test_from_a_live_swarm(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        await trained(swarm, tmp_path)
        gossip = observer(swarm)
        await gossip.reconcile("peer-0")
        round_index, named = await fetch_named(spec, gossip.transport, gossip)
        assert round_index == ROUNDS
        write_folder(tmp_path / "model", Trained(spec, round_index, named))
        check_folder(tmp_path / "model", swarm)

    in_virtual_time(scenario, spec)


def test_from_a_live_swarm_all_stages_are_of_one_round(tmp_path: Path) -> None:
    """The run goes on while the model is fetched."""
    spec = tiny_spec(tmp_path, num_stages=2, rounds=40)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(4)
        gossip = observer(swarm)
        running = swarm.hub.transports["observer"]
        await gossip.reconcile("peer-0")
        gossiping = asyncio.ensure_future(gossip.run())
        try:
            round_index, named = await fetch_named(spec, running, gossip)
        finally:
            gossiping.cancel()
        assert 4 <= round_index < 40
        from tests.swarm.harness import relative_difference, replay

        await swarm.until_round(round_index + 1)
        trainer = replay(spec, swarm.counted, round_index)
        assert relative_difference(named, trainer.state_dict()) < 1e-4

    in_virtual_time(scenario, spec)


def test_a_stage_that_nobody_serves_is_one_line(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=40)

    async def scenario(swarm: Swarm) -> None:
        swarm.start("peer-0", stage=0)
        await swarm.until(lambda: swarm.rounds() == [0])
        gossip = observer(swarm)
        await gossip.reconcile("peer-0")
        with pytest.raises(UserError, match="stage 1 has no replica"):
            await fetch_named(spec, gossip.transport, gossip)

    in_virtual_time(scenario, spec)


def test_from_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    dirs = [tmp_path / f"peer-{i}" for i in range(3)]

    async def scenario(swarm: Swarm) -> None:
        await trained(swarm, tmp_path)
        assert f"round {ROUNDS}" in export_checkpoints(dirs, tmp_path / "model")
        assert newest_whole(dirs, spec.run_id) == ROUNDS
        assert newest_whole(dirs, spec.run_id[::-1]) is None
        check_folder(tmp_path / "model", swarm)

    in_virtual_time(scenario, spec)
    arguments = [f"--state-dir={path}" for path in dirs]
    assert run_command(["export", f"--out={tmp_path / 'again'}", *arguments]) == 0
    assert "parameters" in capfd.readouterr().out
    assert run_command(["export", f"--out={tmp_path / 'again'}", *arguments]) == 1
    assert "is there already" in capfd.readouterr().err
    assert run_command(["export", f"--out={tmp_path / 'b'}", f"--state-dir={tmp_path}"]) == 1
    assert "no checkpoint in" in capfd.readouterr().err
    assert run_command(["export", f"--out={tmp_path / 'b'}"]) == 2
    assert sorted(p.name for p in tmp_path.iterdir() if "again" in p.name) == ["again"]


def test_a_damaged_round_is_passed_over_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    dirs = [tmp_path / f"peer-{i}" for i in range(3)]

    async def scenario(swarm: Swarm) -> None:
        await trained(swarm, tmp_path)

    in_virtual_time(scenario, spec)
    arguments = [f"--state-dir={path}" for path in dirs]
    older = sorted({path.name for path in tmp_path.glob("peer-*/checkpoints/*/round-*")})[-2]
    before = int(older.removeprefix("round-"))
    named = [f"--round={before}", f"--out={tmp_path / 'named'}"]
    assert run_command(["export", *named, *arguments]) == 0
    assert f"round {before}," in capfd.readouterr().out
    assert run_command(["export", "--round=1", f"--out={tmp_path / 'none'}", *arguments]) == 1
    assert f"there are: {before}, {ROUNDS}" in capfd.readouterr().err
    for path in tmp_path.glob(f"peer-*/checkpoints/*/round-{ROUNDS:08d}/stage.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert run_command(["export", f"--out={tmp_path / 'model'}", *arguments]) == 0
    said = capfd.readouterr()
    assert f"round {before}," in said.out
    assert f"round {ROUNDS} cannot be used" in said.err


def test_of_several_runs_one_is_named(tmp_path: Path) -> None:
    one = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)
    other = one.with_seed(one.seed + 1)
    dirs = [tmp_path / f"peer-{i}" for i in range(3)]

    async def scenario(swarm: Swarm) -> None:
        await trained(swarm, tmp_path)

    for spec in (one, other):
        in_virtual_time(scenario, spec)
    with pytest.raises(UserError, match=f"--run-id: .*{other.run_id[:12]} "):
        export_checkpoints(dirs, tmp_path / "model")
    with pytest.raises(UserError, match="no checkpoint of a run nothing"):
        export_checkpoints(dirs, tmp_path / "model", Wanted(run_id="nothing"))
    export_checkpoints(dirs, tmp_path / "model", Wanted(run_id=other.run_id[:12]))
    assert other.run_id in (tmp_path / "model" / "README.md").read_text()


def test_checkpoints_that_lack_a_stage_are_one_line(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS)

    async def scenario(swarm: Swarm) -> None:
        await trained(swarm, tmp_path)
        stage = swarm.members["peer-0"].peer.gossip.own.stage
        assert newest_whole([tmp_path / "peer-0"], spec.run_id) is None
        with pytest.raises(UserError, match=f"stage {1 - stage} missing"):
            export_checkpoints([tmp_path / "peer-0"], tmp_path / "model")

    in_virtual_time(scenario, spec)
