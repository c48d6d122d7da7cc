"""A swarm that trains adapters: every mode, newcomers, a full stop, and the exported folders."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from swarmnet.errors import UserError
from swarmnet.runtime.exporting.base_weights import fetch_base
from swarmnet.runtime.exporting.model_folder import Trained, write_folder
from swarmnet.runtime.exporting.models import Wanted, export_checkpoints
from swarmnet.runtime.run_files import RunFiles
from swarmnet.simulation.device import InlineWorker
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.checkpoint import CheckpointStore
from swarmnet.training.models.initial_weights import ModelWeights
from tests.peer.commands.test_export import logits_of, observer
from tests.swarm.harness import Swarm, in_virtual_time
from tests.swarm.initial.test_weights import folder_of
from tests.swarm.lora_runs import initial_adapters, lora_run

ROUNDS, EVERY = 8, 2


def start(
    swarm: Swarm, name: str, stage: int, hashes: bytes, state: Path, folder: Path | None = None
) -> None:
    """A peer with a state folder, and with the model's where it is given."""
    spec, state_dir = swarm.spec, state / name
    files = RunFiles(state_dir, spec.files)
    files.save({"weights.sha256": hashes})
    store = CheckpointStore(state_dir, spec, every=EVERY)
    disk = Disk(store, InlineWorker(), EVERY, store.available())
    weights = ModelWeights(spec, hashes, folder, state_dir=state_dir)
    swarm.start(name, stage=stage, disk=disk, weights=weights)


async def start_all(swarm: Swarm, hashes: bytes, state: Path, folder: Path | None) -> None:
    start(swarm, "a0", 0, hashes, state, folder)
    start(swarm, "b0", 1, hashes, state)
    await swarm.until_round(0)
    start(swarm, "a1", 0, hashes, state)
    start(swarm, "b1", 1, hashes, state)


@pytest.mark.parametrize("mode", ["zero", "delayed", "local", "gossip", "auto"])
def test_every_mode_exchanges_adapters(tmp_path: Path, mode: str) -> None:
    """Also over a model whose embedding and head are one matrix: it does not change."""
    folder = folder_of(tmp_path / "model")
    sync = {"mode": mode, "local_steps": 2}
    spec, hashes = lora_run(folder, tmp_path, rounds=ROUNDS, sync=sync)
    size = sum(v.numel() for v in initial_adapters(spec).values())

    async def scenario(swarm: Swarm) -> None:
        await start_all(swarm, hashes, tmp_path / "state", folder)
        await swarm.until_round(4)
        start(swarm, "b2", 1, hashes, tmp_path / "state")
        await swarm.until_round(ROUNDS)
        found = swarm.named("a0") | swarm.named("b0")
        assert sum(v.numel() for v in found.values()) == size
        assert all(v.any() for v in found.values()), "B has changed"
        if mode not in ("local", "gossip"):
            assert swarm.parameters().keys() == found.keys()
            assert len({bytes(swarm.flat(n).numpy()) for n in ("b0", "b1", "b2")}) == 1

    in_virtual_time(scenario, spec)


def test_a_full_stop_of_all_peers_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The base is in the state folders, once; nobody has the model's folder any more."""
    folder, state = folder_of(tmp_path / "model"), tmp_path / "state"
    spec, hashes = lora_run(folder, tmp_path, rounds=ROUNDS)

    async def before(swarm: Swarm) -> None:
        await start_all(swarm, hashes, state, folder)
        await swarm.until_round(5)
        await swarm.until(lambda: swarm.total("checkpoints") >= 8)
        for name in list(swarm.members):
            swarm.kill(name)

    in_virtual_time(before, spec)
    for name in ("a0", "a1", "b0", "b1"):
        assert len(list((state / name / "base").glob("*/*.safetensors"))) == 1
        for path in (state / name / "checkpoints").glob("*/*/stage.safetensors"):
            assert path.stat().st_size < 20_000

    async def after(swarm: Swarm) -> None:
        start(swarm, "a0", 0, hashes, state)
        start(swarm, "b1", 1, hashes, state)
        # This one served another stage before: it gets its base from the others.
        start(swarm, "a1", 1, hashes, state)
        await swarm.until_round(ROUNDS)
        assert min(swarm.counted) >= 4
        swarm.parameters()

    with caplog.at_level(logging.WARNING, "swarmnet"):
        in_virtual_time(after, spec)
    assert "starts afresh" not in caplog.text


def exported(swarm: Swarm, folder: Path, out: Path) -> None:
    """What PEFT makes of an adapter's folder has the swarm's logits."""
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out).eval()
    assert not (out / "model.safetensors").exists()
    with torch.no_grad():
        theirs = model(tokens).logits
    ours = logits_of(swarm, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert "library_name: peft" in (out / "README.md").read_text()


def merged(swarm: Swarm, out: Path, tolerance: float = 1e-5) -> None:
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        theirs = model(tokens).logits
    torch.testing.assert_close(logits_of(swarm, tokens), theirs, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("more", [{}, {"use_rslora": True, "base_dtype": "bfloat16"}])
def test_an_export_is_an_adapter_of_peft_or_a_whole_model(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    folder, state = folder_of(tmp_path / "model"), tmp_path / "state"
    lora = {"r": 2, "lora_alpha": 16, "target_modules": "all-linear", **more}
    spec, hashes = lora_run(folder, tmp_path, rounds=4, lora=lora)
    dirs = [state / name for name in ("a0", "a1", "b0", "b1")]

    async def scenario(swarm: Swarm) -> None:
        await start_all(swarm, hashes, state, folder)
        await swarm.until_round(4)
        await swarm.until(lambda: swarm.total("checkpoints") >= 8)
        line = export_checkpoints(dirs, tmp_path / "adapter")
        assert "round 4" in line
        if not more:
            exported(swarm, folder, tmp_path / "adapter")
        export_checkpoints(dirs, tmp_path / "whole", Wanted(merge=True))
        merged(swarm, tmp_path / "whole")
        export_checkpoints(dirs[::2], tmp_path / "half", Wanted(merge=True))
        next((state / "b0" / "base").glob("*/*")).unlink()
        with pytest.raises(UserError, match="is not all here; name the model's folder"):
            export_checkpoints(dirs[::2], tmp_path / "less", Wanted(merge=True))
        export_checkpoints(dirs[::2], tmp_path / "named", Wanted(merge=True, weights=folder))

    in_virtual_time(scenario, spec)


def test_peers_give_the_base_to_an_export(tmp_path: Path) -> None:
    folder, state = folder_of(tmp_path / "model"), tmp_path / "state"
    spec, hashes = lora_run(folder, tmp_path, rounds=4)

    async def scenario(swarm: Swarm) -> None:
        await start_all(swarm, hashes, state, folder)
        await swarm.until_round(4)
        swarm.kill("a0")  # it has the model's folder
        gossip = observer(swarm)
        await gossip.reconcile("b0")
        files = {"weights.sha256": hashes}
        base = await fetch_base(spec, gossip.transport, gossip, InlineWorker(), files, None)
        named = swarm.named("a1") | swarm.named("b0")
        trained = Trained(spec, 4, named, files=files).whole(base)
        write_folder(tmp_path / "whole", trained)
        merged(swarm, tmp_path / "whole")

    in_virtual_time(scenario, spec)
