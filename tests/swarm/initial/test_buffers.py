"""What a model has beside its parameters: persistent buffers, which routing or decay depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from swarmnet.errors import UserError
from swarmnet.runtime.exporting.base_weights import fetch_base, kept_base
from swarmnet.runtime.exporting.model_folder import Trained, write_folder
from swarmnet.runtime.exporting.models import Wanted, export_checkpoints
from swarmnet.runtime.joining.past import open_ended, open_past
from swarmnet.runtime.run_files import RunFiles
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import RunSpec
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.byte_tokenizer import byte_tokenizer_files
from swarmnet.training.checkpoint import CheckpointStore
from swarmnet.training.computing import Computing
from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights
from swarmnet.training.resolving import Resolved, resolve_run
from swarmnet.training.stage import build_stage
from tests.oracles.plain_transformers import PlainTrainer
from tests.peer.commands.test_export import observer
from tests.swarm.harness import Swarm, in_virtual_time, relative_difference, tiny_spec
from tests.swarm.recovery.test_adapters import start, start_all

ROUNDS, LENGTH = 4, 16
DEEPSEEK = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
MINIMAX = {"num_local_experts": 4, "head_dim": 8, "block_size": 8, "num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {"deepseek_v3": DEEPSEEK, "minimax": MINIMAX}


def folder_of(path: Path, kind: str, *, weights: bool = True) -> Path:
    """A small model whose buffers are not those that it would begin with."""
    values = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 256,
        "max_position_embeddings": 64,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**values, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in buffers_of(model.state_dict(keep_vars=True)).items():
        rows = torch.arange(buffer.numel()).view(buffer.shape)
        more = 0.3 * rows if "correction" in name else 0.01 * rows.remainder(3) * (buffer != 0.0)
        buffer += more
    if weights:
        model.save_pretrained(path)
    else:
        config.save_pretrained(path)
    for name, data in byte_tokenizer_files(64).items():
        (path / name).write_bytes(data)
    return path


def buffers_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in state.items() if not isinstance(t, torch.nn.Parameter)}


def begun_from(folder: Path, tmp_path: Path, **changes: Any) -> Resolved:
    values = tiny_spec(tmp_path, num_stages=2, rounds=ROUNDS, num_layers=4).model_dump()
    values["model"] = {"from": str(folder)}
    values["data"] |= {"sequence_length": LENGTH, "tokenizer": "bytes"}
    for table, fields in changes.items():
        values[table] = (values[table] or {}) | fields
    return resolve_run(RunSpec.model_validate(values))


def logits_of(model: Any) -> Tensor:
    tokens = torch.randint(256, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens).logits
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_of_the_model_wherever_it_goes(tmp_path: Path, kind: str) -> None:
    """One peer has the folder: the update is that of one machine, also of newcomers, after a full
    stop, and in a run that continues this one; and the exported model is that model."""
    folder, state = folder_of(tmp_path / "model", kind), tmp_path / "state"
    resolved = begun_from(folder, tmp_path)
    spec, hashes = resolved.spec, resolved.contents["weights.sha256"]
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    buffers = buffers_of(theirs.state_dict(keep_vars=True))
    dirs = [state / name for name in ("a0", "b1")]
    trained: dict[str, Tensor] = {}

    async def first(swarm: Swarm) -> None:
        await start_all(swarm, hashes, state, folder)
        await swarm.until_round(ROUNDS // 2)
        await swarm.until(lambda: swarm.total("checkpoints") >= 4)
        for name in list(swarm.members):
            swarm.kill(name)

    async def second(swarm: Swarm) -> None:
        for name, stage in (("a0", 0), ("a1", 0), ("b1", 1)):
            start(swarm, name, stage, hashes, state)
        await swarm.until_round(ROUNDS)
        await swarm.until(lambda: swarm.total("checkpoints") >= 3)
        trained.update(swarm.parameters())
        plain = PlainTrainer(spec, theirs.state_dict(), swarm.data)
        for r in range(ROUNDS):
            plain.step(r, range(spec.pipeline.global_batch // spec.pipeline.microbatch))
        expected = {n: t for n, t in plain.parameters().items() if n not in buffers}
        assert relative_difference(trained, expected) < 1e-4
        export_checkpoints(dirs, tmp_path / "out")
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(logits_of(ours), logits_of(plain.model), rtol=1e-4, atol=1e-5)
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert written.keys() == load_file(folder / "model.safetensors").keys()
        found = buffers_of(ours.state_dict(keep_vars=True))
        assert all(torch.equal(found[name], buffers[name]) for name in buffers)

        swarm.kill("a0")
        gossip = observer(swarm)
        await gossip.reconcile("b1")
        files = {"weights.sha256": hashes}
        base = await fetch_base(spec, gossip.transport, gossip, InlineWorker(), files, None)
        live = Trained(spec, ROUNDS, trained, files=resolved.contents).whole(base)
        write_folder(tmp_path / "live", live, "bf16")
        low = load_file(tmp_path / "live" / "model.safetensors")
        assert all(
            torch.equal(low[name].float(), value)
            for name, value in written.items()
            if low[name].dtype == torch.float32
        )
        assert sum(t.dtype == torch.float32 for t in low.values()) == len(buffers)

    in_virtual_time(first, spec)
    in_virtual_time(second, spec)

    values = spec.model_dump()
    values["model"] |= {"weights": "", "continues": str(state)}
    values["files"].pop("weights.sha256")
    values["optimizer"]["rounds"] = 9
    after = resolve_run(RunSpec.model_validate(values), past=open_past(state / "a0", str(state)))
    layout = InitialLayout.of(after.spec)
    assert layout.buffers == buffers.keys()
    ended = open_ended(after.spec, layout, state / "a0", str(state))
    assert ended is not None
    weights = ModelWeights(after.spec, after.contents["weights.sha256"], None, ended=ended)
    before = ModelWeights(spec, hashes, folder)
    for k, sizes in enumerate(layout.base_sizes):
        for j in range(len(sizes)):
            kept, first_ones = weights.shard(k, j), before.shard(k, j)
            assert kept is not None
            assert first_ones is not None
            assert bytes(kept.data) == bytes(first_ones.data)


@pytest.mark.parametrize("kind", KINDS)
def test_without_weights_they_begin_as_the_family_has_them(tmp_path: Path, kind: str) -> None:
    folder = folder_of(tmp_path / "model", kind, weights=False)
    spec = begun_from(folder, tmp_path).spec
    state = tmp_path / "state"
    assert not spec.model.weights

    async def scenario(swarm: Swarm) -> None:
        begun: dict[str, Tensor] = {}
        for k in range(2):
            store = CheckpointStore(state / str(k), spec, every=ROUNDS)
            swarm.start(str(k), stage=k, disk=Disk(store, InlineWorker(), ROUNDS))
        for k in range(2):
            stage = build_stage(spec, k)
            assert not stage.base.shard_sizes
            begun |= {n: t.clone() for n, t in stage.state_dict().items()}
        await swarm.until_round(ROUNDS)
        await swarm.until(lambda: swarm.total("checkpoints") >= 2)
        fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        begun |= buffers_of(fresh.state_dict(keep_vars=True))
        plain = PlainTrainer(spec, begun, swarm.data)
        for r in range(ROUNDS):
            plain.step(r, range(4))
        export_checkpoints([state / "0", state / "1"], tmp_path / "out")
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(logits_of(ours), logits_of(plain.model), rtol=1e-4, atol=1e-5)

    in_virtual_time(scenario, spec)


def test_adapters_are_trained_beside_them(tmp_path: Path) -> None:
    folder, state = folder_of(tmp_path / "model", "deepseek_v3"), tmp_path / "state"
    lora = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["kv_a_proj_with_mqa", "o_proj"],
        "base_dtype": "bfloat16",
    }
    resolved = begun_from(folder, tmp_path, lora=lora)
    spec, hashes = resolved.spec, resolved.contents["weights.sha256"]
    buffers = buffers_of(AutoModelForCausalLM.from_pretrained(folder).state_dict(keep_vars=True))

    async def scenario(swarm: Swarm) -> None:
        await start_all(swarm, hashes, state, folder)
        await swarm.until_round(ROUNDS)
        await swarm.until(lambda: swarm.total("checkpoints") >= 4)
        export_checkpoints([state / "a1", state / "b0"], tmp_path / "out", Wanted(merge=True))

    in_virtual_time(scenario, spec)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == load_file(folder / "model.safetensors").keys()
    assert all(torch.equal(written[name], buffers[name]) for name in buffers), "not rounded"


def test_a_family_s_exact_buffers_stay_in_fp32(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "deepseek_v3")
    stage = build_stage(begun_from(folder, tmp_path).spec, 1, computing=Computing(precision="bf16"))
    kinds = {b.dtype for m in stage.layers.modules for _, b in m.named_buffers()}
    assert kinds == {torch.float32}


def test_a_missing_part_is_one_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "deepseek_v3")
    resolved = begun_from(folder, tmp_path)
    RunFiles(tmp_path, resolved.spec.files).save(
        {"weights.sha256": resolved.contents["weights.sha256"]}
    )
    with pytest.raises(UserError, match="the base of stage 0 is not all here; name the model's"):
        kept_base(resolved.spec, [tmp_path], None)
    assert len(kept_base(resolved.spec, [tmp_path], folder)) == 3
