"""A model whose layers write into a subspace: its numbers, its boundaries, its folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import ProtocolViolation, SpecError
from swarmnet.ports import StageResult
from swarmnet.protocol.codecs import BOUNDARY_CODECS, TOKEN_BYTES, row_bytes
from swarmnet.runtime.exporting.model_folder import Trained, write_folder
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.continuing import other_model
from swarmnet.training.models import subspace as subspaces
from swarmnet.training.models.registry import model_plan, split_counts, split_stages
from swarmnet.training.models.subspace import FixedEmbedding, fixed_rows, folded
from swarmnet.training.resolving import resolve
from swarmnet.training.stage import TorchStage
from swarmnet.wire import Array
from tests.training.flights import fly, gradient, named, stages_of
from tests.training.models.test_llama import hugging_face
from tests.training.packed import lengths_of
from tests.training.specs import MODEL, small_spec

K, LAYERS = 8, 4
KEY = (0, 1)


def narrow(**changes: dict[str, Any]) -> RunSpec:
    model = {"num_hidden_layers": LAYERS, "subspace": K, "subspace_seed": 5}
    return small_spec(**(changes | {"model": model | changes.get("model", {})}))


def in_stages(num_stages: int, codec: str = "none") -> RunSpec:
    return narrow(pipeline={"num_stages": num_stages, "codec": codec})


def tokens(seed: int, samples: int = 2) -> Array:
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, MODEL["max_position_embeddings"])
    return from_tensor(torch.randint(256, shape, generator=generator, dtype=torch.int32))


def gradients(stages: list[TorchStage]) -> dict[str, torch.Tensor]:
    return {n: g for stage in stages for n, g in named(stage, gradient(stage)).items()}


def state(stages: list[TorchStage]) -> dict[str, torch.Tensor]:
    return {n: p.clone() for stage in stages for n, p in stage.state_dict().items()}


def test_the_fixed_embedding_has_these_bits() -> None:
    rows = fixed_rows(torch.tensor([0, 1, 77, 4_000_000]), 4096, 2**53 - 7, 0.02)
    digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    assert digest.startswith("e66d8d78fd4b20891567feb0b7983ac0")
    assert rows.mean().item() == pytest.approx(0.0, abs=3e-4)
    assert rows.std().item() == pytest.approx(0.02, rel=0.01)
    correlations = torch.corrcoef(rows) - torch.eye(4)
    assert correlations.abs().max() < 0.06
    assert not torch.equal(rows, fixed_rows(torch.tensor([0, 1, 77, 4_000_000]), 4096, 5, 0.02))


def mixed(h: int) -> int:
    """MurmurHash3's finalizer, in whole numbers."""
    h = ((h ^ h >> 16) * 0x85EBCA6B) % 2**32
    h = ((h ^ h >> 13) * 0xC2B2AE35) % 2**32
    return h ^ h >> 16


@given(st.integers(0, 2**22), st.integers(0, 3000), st.integers(0, 2**53 - 1))
def test_a_number_is_a_hash_of_seed_token_and_column(token: int, column: int, seed: int) -> None:
    found = fixed_rows(torch.tensor([token]), column + 1, seed, 3**-0.5)[0, column].item()
    of_token = mixed(token ^ seed % 2**32)
    bits = mixed(mixed(((of_token ^ seed >> 32) + column) % 2**32))
    assert found == pytest.approx((bits >> 8) / 2**23 - 1, abs=1e-7)


@given(st.integers(1, 300), st.integers(0, 2**53 - 1), st.integers(0, 2**32))
def test_rows_are_the_same_alone_and_together(width: int, seed: int, shuffle: int) -> None:
    generator = torch.Generator().manual_seed(shuffle)
    several = torch.randint(50, (3, 4), generator=generator, dtype=torch.int32)
    rows = fixed_rows(several, width, seed, 0.1)
    one = fixed_rows(several[1, 2:3], width, seed, 0.1)
    assert torch.equal(rows[1, 2], one[0])


def test_a_table_and_rows_made_for_a_pass_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = narrow().model
    several = to_tensor(tokens(1))
    by_table = FixedEmbedding(spec)(several, torch.float32)
    monkeypatch.setattr(subspaces, "TABLE_BYTES", 0)
    monkeypatch.setattr(subspaces, "ROWS_AT_ONCE", 5)
    assert torch.equal(FixedEmbedding(spec)(several, torch.float32), by_table)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_losses_and_gradients_are_those_of_the_llama_that_it_folds_to(num_stages: int) -> None:
    """Of transformers' model with the folded weights, whose gradients are those of the coordinates
    in the subspace."""
    spec = in_stages(num_stages)
    stages = stages_of(spec)
    inputs, targets = tokens(1), tokens(2)
    result = fly(stages, KEY, inputs, targets)
    theirs = hugging_face(spec.model)
    theirs.load_state_dict(folded(spec.model, state(stages)), strict=True)
    logits = theirs(to_tensor(inputs).long()).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), to_tensor(targets).flatten().long(), reduction="sum"
    )
    loss.backward()
    assert result.loss_sum == pytest.approx(loss.item(), rel=1e-5)
    ours = gradients(stages)
    assert sum(g.numel() for g in ours.values()) == spec.model.num_parameters
    for name, p in theirs.named_parameters():
        assert p.grad is not None
        wanted = p.grad
        if name == "model.embed_tokens.weight":
            wanted = wanted[:, :K]
        elif ours[name].shape != wanted.shape:
            wanted = wanted[:K]
        torch.testing.assert_close(ours[name], wanted, rtol=1e-4, atol=1e-5)


def test_documents_stay_apart_in_a_pipeline_as_in_one_stage() -> None:
    inputs, targets = tokens(3), tokens(4)
    documents = tuple(lengths_of(inputs.shape[1], i) for i in range(2))
    found = []
    for num_stages in (1, 3):
        spec = narrow(pipeline={"num_stages": num_stages}, data={"document_mask": True})
        stages = stages_of(spec)
        array = inputs
        for stage in stages[:-1]:
            array = stage.forward(KEY, array, documents)
        found.append(stages[-1].forward_backward(KEY, array, targets, documents).loss_sum)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("codec", BOUNDARY_CODECS)
def test_what_crosses_has_as_many_bytes_as_the_formula_says(codec: str) -> None:
    spec, names = in_stages(2, codec), BOUNDARY_CODECS[codec]
    first, last = stages_of(spec)
    up = first.forward(KEY, tokens(1))
    back = last.forward_backward(KEY, up, tokens(2)).grad_inputs
    assert back is not None
    num_tokens = 2 * MODEL["max_position_embeddings"]
    assert len(up.data) == num_tokens * (row_bytes(names.activations, K) + TOKEN_BYTES)
    assert memoryview(back.data).nbytes == num_tokens * row_bytes(names.gradients, K)


def with_other_tokens(array: Array, token: int) -> Array:
    values = to_tensor(array).clone()
    beside = torch.full((1,), token, dtype=torch.int32).view(torch.uint8)
    values[..., -TOKEN_BYTES:] = beside
    return from_tensor(values)


def test_tokens_beside_an_activation_are_checked() -> None:
    first, last = stages_of(in_stages(2))
    up = first.forward(KEY, tokens(1))
    for token in (-1, 256, 2**31 - 1):
        with pytest.raises(ProtocolViolation, match="tokens"):
            last.forward_backward(KEY, with_other_tokens(up, token), tokens(2))
    with pytest.raises(ProtocolViolation, match="inputs"):
        last.forward_backward(KEY, from_tensor(torch.zeros(2, 16, K)), tokens(2))
    ours = StageResult(up, None, 0.0, 0)
    assert first.difference(ours, ours) == 0.0
    assert first.difference(ours, StageResult(with_other_tokens(up, 3), None, 0.0, 0)) == float(
        "inf"
    )


def test_a_recomputation_gives_the_same() -> None:
    for stage, inputs in zip(stages_of(in_stages(3)), self_fed(), strict=True):
        grad = None if stage.is_last else from_tensor(torch.ones(2, 16, K))
        made = stage.recompute_pass(KEY, inputs, tokens(2), grad)()
        again = stage.recompute_pass(KEY, inputs, tokens(2), grad)()
        assert stage.difference(made, again) == 0.0
        if not stage.is_last:
            assert made.outputs is not None
            assert bytes(made.outputs.data) == bytes(stage.forward(KEY, inputs).data)


def self_fed() -> list[Array]:
    """What each of three stages gets."""
    found = [tokens(1)]
    for stage in stages_of(in_stages(3))[:-1]:
        found.append(stage.forward(KEY, found[-1]))
    return found


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_last_layers_are_one_stage(num_stages: int) -> None:
    spec = in_stages(num_stages)
    plan = model_plan(spec)
    stages = split_stages(plan, num_stages)
    assert sum(map(len, stages)) == len(plan.layers)
    assert [layer.name for layer in stages[-1]][-3:] == ["model.layers.3", "model.norm", "lm_head"]
    costs = [1.0] * (len(plan.layers) - 1) + [100.0]
    assert split_counts(plan, costs, num_stages)[-1] >= 3
    with pytest.raises(SpecError, match="are one stage"):
        model_plan(narrow(pipeline={"num_stages": 2, "layers": (5, 2)}))


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"subspace": 7}, "at least 8"),
        ({"subspace": 32}, "less than hidden_size"),
        ({"num_hidden_layers": 1}, "must be at least 2"),
        ({"subspace": 0}, "subspace_seed goes with subspace"),
        ({"kind": "transformers", "from": "folder"}, 'codec = "int4"'),
        ({"kind": "custom", "builder": "a.py:b"}, "in your builder"),
    ],
)
def test_what_cannot_be_is_one_line(model: dict[str, Any], line: str) -> None:
    values = narrow().model_dump()
    if "kind" in model:
        values["model"] = {"subspace": 8, **model}
    else:
        values["model"] |= model
    with pytest.raises(ValueError, match=line):
        RunSpec.model_validate(values)


def test_a_seed_is_filled_in_once_and_is_a_part_of_the_model() -> None:
    written = narrow(model={"subspace_seed": 0})
    assert "[model] subspace_seed" in written.open_keys
    first = resolve(written)
    assert first.model.subspace_seed > 0
    assert resolve(first) == first
    other = resolve(written.with_seed(written.seed + 1))
    assert other.model.subspace_seed != first.model.subspace_seed
    assert "subspace_seed" in other_model(first, other)
    assert other_model(first, written) == ""
    assert "subspace" in other_model(first, small_spec(model={"num_hidden_layers": LAYERS}))


def test_an_exported_folder_is_an_ordinary_llama(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = in_stages(2)
    stages = stages_of(spec)
    write_folder(tmp_path / "out", Trained(spec, 3, state(stages)), "fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    inputs = tokens(6)
    array: Any = inputs
    for stage in stages:
        array = stage.evaluate(array, None)
    with torch.no_grad():
        logits = theirs(to_tensor(inputs).long()).logits
    torch.testing.assert_close(to_tensor(array), logits, rtol=1e-5, atol=1e-5)
