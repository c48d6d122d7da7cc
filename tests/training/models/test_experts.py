"""Experts are those of transformers' Mixtral and Qwen2-MoE, number for number, and their routers'
losses are those of the papers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from swarmnet.errors import SpecError
from swarmnet.runtime.exporting.model_folder import (
    Trained,
    model_config,
    saved_names,
    write_folder,
)
from swarmnet.spec import LoraSpec, ModelSpec, RunSpec, describe
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.continuing import other_model
from swarmnet.training.models.adapter import adapter_plan
from swarmnet.training.models.base import (
    LayerContext,
    TakesContext,
    build_layer,
    describe_parameters,
)
from swarmnet.training.models.experts import Experts, grouped, in_a_loop
from swarmnet.training.models.llama import decoder_flops, llama_plan
from swarmnet.training.models.lora import ExpertsLora
from swarmnet.training.models.matrices import muon_matrices
from swarmnet.training.models.model_folder import read_folder
from swarmnet.training.models.routing import Routing
from swarmnet.training.models.source_weights import SourceWeights, saved_tensors
from swarmnet.training.ranks.cut_check import check_cut
from swarmnet.training.ranks.fsdp import check_split
from swarmnet.training.stage import build_stage
from swarmnet.wire import Array
from tests.training.specs import MODEL, small_spec, write_text

LENGTH = MODEL["max_position_embeddings"]
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 4, "num_experts_per_tok": 2},
    "one width more": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "shared": {"num_experts": 4, "shared_expert_intermediate_size": 20},
    "switch": {"num_experts": 4, "num_experts_per_tok": 1},
}
CLASSES = {"mixtral": "MixtralForCausalLM", "one width more": "MixtralForCausalLM"}


def spec_of(**changes: Any) -> ModelSpec:
    values = {**MODEL, "initializer_range": 0.3, **changes}
    return ModelSpec.model_validate(values)


class Whole(nn.Module):
    """All layers of a model."""

    def __init__(self, spec: ModelSpec, seed: int = 3) -> None:
        super().__init__()
        plan = llama_plan(spec, LENGTH)
        self.parts = nn.ModuleList(build_layer(plan, layer, seed) for layer in plan.layers)
        self.names = [layer.name for layer in plan.layers]

    def forward(self, x: Tensor, context: LayerContext | None = None) -> Tensor:
        for part in self.parts:
            x = part(x, context) if isinstance(part, TakesContext) else part(x)
        return x

    def state(self) -> dict[str, Tensor]:
        named = zip(self.names, self.parts, strict=True)
        return {f"{n}.{k}": p for n, part in named for k, p in part.named_parameters()}


def theirs(spec: ModelSpec, state: dict[str, Tensor]) -> Any:
    """The model of transformers that an export is."""
    from tempfile import TemporaryDirectory

    from safetensors.torch import save_file

    config = AutoConfig.for_model(**model_config(spec, []))
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tensors = {n: t.detach().contiguous() for n, t in saved_names(spec, state).items()}
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        model, about = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="sdpa"
        )
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    return model.eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_and_gradients_are_those_of_transformers(kind: str) -> None:
    spec = spec_of(**KINDS[kind])
    model = Whole(spec)
    other = theirs(spec, model.state())
    x = tokens(3, LENGTH)
    logits, expected = model(x.int()), other(x).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    expected.square().sum().backward()
    logits.square().sum().backward()
    gradient, found = other.get_input_embeddings().weight.grad, model.parts[0].weight.grad
    assert (found - gradient).norm() < 1e-5 * gradient.norm()
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters


def context(num_tokens: int = 1) -> LayerContext:
    return LayerContext(routing=Routing(num_tokens))


def experts_of(**changes: Any) -> tuple[Experts, Tensor]:
    spec = spec_of(**changes)
    layer = build_layer(llama_plan(spec, LENGTH), llama_plan(spec, LENGTH).layers[1], 5).mlp
    assert isinstance(layer, Experts)
    x = torch.randn(2, LENGTH, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    return layer, x.requires_grad_()


@pytest.mark.parametrize("chosen", [1, 2])
def test_the_balance_loss_is_that_of_switch_and_of_transformers(chosen: int) -> None:
    layer, x = experts_of(
        num_experts=4,
        num_experts_per_tok=chosen,
        num_hidden_layers=1,
        router_aux_loss_coef=0.5,
        router_z_loss_coef=0.0,
    )
    y = layer(x, context(num_tokens=7))
    (found,) = torch.autograd.grad(y.sum(), layer.gate.weight)
    (plain,) = torch.autograd.grad(layer(x).sum(), layer.gate.weight)
    logits = nn.functional.linear(x.detach().flatten(0, 1), layer.gate.weight)
    loss = load_balancing_loss_func((logits,), 4, chosen)
    (expected,) = torch.autograd.grad(7 * 0.5 * loss, layer.gate.weight)
    torch.testing.assert_close(found - plain, expected, rtol=1e-4, atol=1e-5)
    if chosen == 1:  # alpha N sum f_i P_i, equations (4) to (6)
        probs, first = logits.softmax(-1), logits.argmax(-1)
        f = torch.stack([(first == i).float().mean() for i in range(4)])
        torch.testing.assert_close(loss, 4 * (f * probs.mean(0)).sum())


def test_the_z_loss_is_that_of_st_moe() -> None:
    layer, x = experts_of(
        num_experts=4, num_hidden_layers=1, router_aux_loss_coef=0.0, router_z_loss_coef=0.25
    )
    (found,) = torch.autograd.grad(layer(x, context(num_tokens=3)).sum(), layer.gate.weight)
    (plain,) = torch.autograd.grad(layer(x).sum(), layer.gate.weight)
    logits = nn.functional.linear(x.detach().flatten(0, 1), layer.gate.weight)
    loss = logits.exp().sum(-1).log().square().mean()
    (expected,) = torch.autograd.grad(3 * 0.25 * loss, layer.gate.weight)
    torch.testing.assert_close(found - plain, expected, rtol=1e-4, atol=1e-5)


def with_capacity(layer: Experts, x: Tensor, factor: float) -> tuple[Tensor, int]:
    """Token by token, two experts each, whose weights have the sum 1: an expert has places in a
    sample, and the earliest tokens get them."""
    num_experts = len(layer.experts)
    out, dropped = torch.zeros_like(x), 0
    for b, sample in enumerate(x):
        weights, chosen = layer.gate(sample).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        room = [math.ceil(factor * chosen.numel() / num_experts)] * num_experts
        for t, token in enumerate(sample):
            for w, e in zip(weights[t], chosen[t].tolist(), strict=True):
                dropped += room[e] == 0
                if room[e]:
                    room[e] -= 1
                    out[b, t] += w * layer.experts[e](token)
    return out, dropped


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 8.0])
def test_with_a_capacity_later_tokens_go_without(factor: float) -> None:
    layer, x = experts_of(num_experts=4, capacity_factor=factor)
    beside = context()
    expected, dropped = with_capacity(layer, x.detach(), factor)
    found = layer(x, beside)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert beside.routing is not None
    heard = beside.routing.layers[layer]
    assert int(heard.dropped) == dropped
    assert (dropped == 0) == (factor == 8.0)
    assert int(heard.chosen_E.sum()) == 2 * x.shape[0] * x.shape[1]
    assert torch.equal(layer(x, context()), found)
    dropless, _ = with_capacity(layer, x.detach(), 8.0)
    torch.testing.assert_close(layer(x), dropless, rtol=1e-4, atol=1e-5)


def test_neither_samples_nor_later_tokens_take_places_of_others() -> None:
    layer, x = experts_of(num_experts=4, capacity_factor=0.5)
    apart = [layer(sample.unsqueeze(0), context()) for sample in x]
    whole = layer(x, context())
    torch.testing.assert_close(whole, torch.cat(apart), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        x[:, -1] += 1.0
    torch.testing.assert_close(layer(x, context())[:, :-1], whole[:, :-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rest", "is_adapted"), [(0, False), (5, False), (5, True)])
def test_grouped_products_are_those_of_the_loop(rest: int, is_adapted: bool) -> None:
    """On a GPU in bf16 they take its place. Rows behind the last expert's, which nobody computes,
    may be anything, also in the gradient."""
    layer, _ = experts_of(num_experts=4)
    adapters = {}
    if is_adapted:
        lora = LoraSpec(r=8, lora_alpha=4, target_modules=("experts.down_proj",))
        torch.manual_seed(5)
        adapters = {name: ExpertsLora(s, lora) for name, s in layer.stack_shapes.items()}
        layer.expert_adapters = nn.ModuleDict(adapters)
    sizes = torch.tensor([6, 0, 9, 1])
    rows = torch.randn(int(sizes.sum()) + rest, 32, generator=torch.Generator().manual_seed(3))
    grad = torch.randn(rows.shape, generator=torch.Generator().manual_seed(4))
    results = []
    for product in (in_a_loop, grouped):
        x = rows.clone().requires_grad_()
        layer.zero_grad()
        y = product(x, sizes, layer.experts, adapters)
        y.backward(grad)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
        results.append((y.detach(), x.grad, *[g.clone() for g in gradients]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_exported_folder_is_a_mixture_of_transformers_and_comes_back(
    tmp_path: Path, kind: str
) -> None:
    """With the logits of the run's stages; as `[model] from` it has the same numbers."""
    values = {**MODEL, "initializer_range": 0.3, **KINDS[kind]}
    spec = small_spec(write_text(tmp_path), model=values)
    stages = [build_stage(spec, k) for k in range(2)]
    state = {n: t.clone() for stage in stages for n, t in stage.state_dict().items()}
    folder = tmp_path / "out"
    write_folder(folder, Trained(spec, 3, state), "fp32")
    x = tokens(2, LENGTH)
    logits = stages[1].evaluate(stages[0].evaluate(from_tensor(x.int()), None), None)
    assert isinstance(logits, Array)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model).__name__ == CLASSES.get(kind, "Qwen2MoeForCausalLM")
    with torch.no_grad():
        theirs = model(x).logits
    assert (to_tensor(logits) - theirs).abs().max() < 1e-5 * theirs.abs().max()

    imported, _ = read_folder(folder, ModelSpec.model_validate({"from": str(folder)}))
    plan = adapter_plan(imported, LENGTH)
    ranges = describe_parameters(plan.layers)
    weights = SourceWeights(folder, imported.config, [r.name for r in ranges])
    weights.check(ranges)
    flat = weights.flat(ranges, 0, ranges[-1].stop)
    back = saved_tensors(imported.config, {r.name: r.part_of(flat) for r in ranges})
    names = saved_names(spec.model, state)
    assert back.keys() == names.keys()
    assert all(torch.equal(back[name], names[name]) for name in names)


def test_texts_are_written_as_the_whole_model_would(tmp_path: Path) -> None:
    """Token by token, where a capacity is for training alone."""
    model = {**KINDS["shared"], "capacity_factor": 0.5, "initializer_range": 0.3}
    spec = small_spec(write_text(tmp_path), model=model, pipeline={"num_stages": 1})
    stage = build_stage(spec, 0)
    x = from_tensor(tokens(1, LENGTH).int())
    whole = stage.evaluate(x, None)
    assert isinstance(whole, Array)
    assert stage.generation is not None
    wanted, begun = to_tensor(whole), 0
    for end in (5, 6, 7, LENGTH):
        part = from_tensor(to_tensor(x)[:, begun:end].clone())
        (made,) = stage.generation.extend("a", part, begun, is_copied=False, num_logits=0)
        torch.testing.assert_close(to_tensor(made), wanted[:, end - 1], rtol=1e-4, atol=1e-4)
        begun = end


def test_matrices_of_experts_are_muon_s() -> None:
    layers = llama_plan(spec_of(**KINDS["shared"]), LENGTH).layers
    names = [matrix.name for matrix in muon_matrices(layers, {})]
    of_layer = {name.removeprefix("model.layers.1.") for name in names if ".layers.1." in name}
    experts = {f"mlp.experts.{i}.{p}_proj.weight" for i in range(4) for p in ("gate", "up", "down")}
    assert experts < of_layer
    assert "mlp.gate.weight" in of_layer


def test_a_token_s_experts_are_what_a_layer_costs() -> None:
    """Parameters are all of them, work is that of the chosen ones."""
    plain = spec_of(intermediate_size=72)
    mixture = spec_of(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
    router = 2 * LENGTH * 32 * 8
    assert decoder_flops(mixture, LENGTH) == decoder_flops(plain, LENGTH) + router
    assert mixture.num_active_parameters == plain.num_parameters + 4 * 32 * 8
    more = 4 * 3 * 32 * 24 * 5
    assert mixture.num_parameters == mixture.num_active_parameters + more


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok goes with num_experts"),
        ({"router_z_loss_coef": 0.1}, "router_z_loss_coef goes with num_experts"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "at most num_experts"),
        ({"num_experts": 1}, "of which there are 2 or more"),
        ({"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": True}, "always be 1"),
        ({"num_experts": 4, "subspace": 8}, "subspace does not go with num_experts"),
        ({"num_experts": 4, "mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not"),
        ({"num_experts": 4, "capacity_factor": -1.0}, "greater than or equal to 0"),
    ],
)
def test_what_does_not_go_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec_of(**changes)


def test_what_ranks_do_not_do_is_one_line(tmp_path: Path) -> None:
    spec = small_spec(write_text(tmp_path), model=KINDS["mixtral"])
    check_cut(spec, 2)
    check_split(spec, 1)
    with pytest.raises(SpecError, match=r"--tp 2.* leave --local fsdp out, or take --tp 1"):
        check_split(spec, 2)


def test_a_run_goes_on_with_the_same_experts_only() -> None:
    one = small_spec(model=KINDS["mixtral"])
    assert other_model(one, small_spec(model={**KINDS["mixtral"], "capacity_factor": 1.0})) == ""
    for changes in ({}, {"num_experts": 8}, {"num_experts": 4, "num_experts_per_tok": 3}):
        assert "[model] num_experts" in other_model(one, small_spec(model=changes))


def test_coefficients_that_are_left_out_stay_so_in_the_canonical_form() -> None:
    """A 0 is a 0 at every peer."""
    for said, losses in (({}, (0.01, 0.001)), ({"router_aux_loss_coef": 0.0}, (0.0, 0.001))):
        spec = small_spec(model={**KINDS["mixtral"], **said})
        again = RunSpec.from_canonical(spec.canonical())
        assert again == spec
        assert again.model.router_losses == losses
    assert "2 of 4 experts a token" in describe(spec)
