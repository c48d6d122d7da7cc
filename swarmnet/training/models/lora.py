"""LoRA: a model's weights stay as they are, and low-rank adapters beside some of its linear layers
are trained (Hu et al., 2022).

A linear layer W x becomes W x + s B A dropout(x), with A (r, inputs), B (outputs, r) and s the
scaling. Parameters of the base keep their names, so that they are found in a model's files; those
of an adapter are LAYER.lora_A.weight and LAYER.lora_B.weight. As in PEFT, A begins as the weight of
an `nn.Linear` would and B with zeros; here both are a function of the run's seed and the name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from swarmnet.errors import SpecError
from swarmnet.spec import ALL_LINEAR, LoraSpec
from swarmnet.training.models.base import LayerBuilder, ModelPlan, described
from swarmnet.training.models.experts import STACKS, is_stack
from swarmnet.training.models.frozen import FrozenLinear
from swarmnet.training.models.llama import Linear
from swarmnet.training.models.packing import BITS, check_packing

A, B = "lora_A", "lora_B"
NOT_ADAPTED = ("embed_tokens", "lm_head")
"""Matrices outside the decoder layers."""
OF_EXPERTS = (*STACKS, "w1", "w2", "w3")
"""Names of an expert's matrices, in models or in files of them, that nothing else has."""
MAX_SHOWN = 20
"""Names in an error's line."""


class LoraLinear(FrozenLinear):
    """A linear layer that is not trained, and its adapter, which is."""

    def __init__(self, inner: nn.Linear, lora: LoraSpec) -> None:
        super().__init__(inner, base_dtype(lora), packing_of(lora))
        rank, dropout = lora.rank, lora.lora_dropout
        self.lora_A = nn.Linear(inner.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, inner.out_features, bias=False)
        self._scaling = scaling_of(lora)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return super().forward(x) + self.lora_B(self.lora_A(self.dropout(x))) * self._scaling


def lora_plan(plan: ModelPlan, lora: LoraSpec) -> ModelPlan:
    """The plan in which only adapters are trained. `lora`: resolved. Raises `SpecError` where this
    machine cannot keep the base as the run says."""
    check_packing(packing_of(lora))
    layers = tuple(
        dataclasses.replace(layer, build=functools.partial(_build, layer, lora))
        for layer in plan.layers
    )
    return dataclasses.replace(
        plan,
        layers=layers,
        initialize=initialize,
        has_base=True,
        base_dtype=base_dtype(lora),
        is_random=plan.is_random or lora.lora_dropout > 0,
    )


def base_dtype(lora: LoraSpec) -> torch.dtype | None:
    """As `ModelPlan.base_dtype`."""
    return torch.bfloat16 if lora.base_dtype else None


def packing_of(lora: LoraSpec | None) -> str:
    """How linear layers of decoder layers keep their weights: a key of `packing.BITS`, or empty."""
    return lora.base_dtype if lora is not None and lora.base_dtype in BITS else ""


def is_packed(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of the base is kept so, where others are."""
    return len(shape) == 2 and name.split(".")[-2] not in NOT_ADAPTED


def scaling_of(lora: LoraSpec) -> float:
    """s of the module's text."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)


def initialize(name: str, values: Tensor, generator: torch.Generator) -> None:
    """`ModelPlan.initialize` of an adapter."""
    if name.endswith(f"{A}.weight"):
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    else:
        values.zero_()


def _build(layer: LayerBuilder, lora: LoraSpec) -> nn.Module:
    module = layer.build()
    module.requires_grad_(False)
    for name in _linear_names(module):
        inner = module.get_submodule(name)
        assert isinstance(inner, nn.Linear)
        within, _, own = name.rpartition(".")
        frozen: FrozenLinear
        if _is_target(f"{layer.name}.{name}", lora.target_modules):
            with torch.device(inner.weight.device):
                frozen = LoraLinear(inner, lora)
        else:
            packing = "" if own in NOT_ADAPTED else packing_of(lora)
            frozen = FrozenLinear(inner, base_dtype(lora), packing)
        setattr(module.get_submodule(within), own, frozen)
    return module


# ---- which layers ---------------------------------------------------------------------------


def target_names(plan: ModelPlan, wanted: Sequence[str]) -> tuple[str, ...]:
    """`[lora] target_modules` with "all-linear" spelt out: all linear layers of decoder layers.
    Raises `SpecError` as `check_targets`."""
    if tuple(wanted) != (ALL_LINEAR,):
        check_targets(plan, wanted)
        return tuple(wanted)
    return tuple(sorted({name.rpartition(".")[2] for name in _all_linear(plan)}))


def check_targets(plan: ModelPlan, wanted: Sequence[str]) -> None:
    """Raises `SpecError` for a name that is no linear layer of a decoder layer."""
    names = _all_linear(plan)
    missing = [w for w in wanted if not any(_is_target(name, (w,)) for name in names)]
    if wanted and not missing:
        return
    there = sorted({name.rpartition(".")[2] for name in names})
    shown = ", ".join(there[:MAX_SHOWN]) or "none"
    if missing and missing[0].rpartition(".")[2] in NOT_ADAPTED:
        is_tied = any(layer.tied for layer in plan.layers)
        why = "is one matrix with another one" if is_tied else "is outside the decoder layers"
        raise SpecError(
            f"[lora] target_modules: {missing[0]} {why} and gets no adapter; there are: {shown}"
        )
    if missing and _is_of_experts(plan, missing[0]):
        raise SpecError(
            f"[lora] target_modules: {missing[0][:80]} is of experts, whose matrices lie in one "
            f"stack and get no adapters; take others: {shown}"
        )
    what = f"the model has no linear layer {missing[0][:80]!r}" if missing else "it is empty"
    raise SpecError(f"[lora] target_modules: {what}; there are: {shown}")


def _is_of_experts(plan: ModelPlan, name: str) -> bool:
    """A name for matrices of experts, in a model that has these in stacks (`experts.is_stack`) or
    in its files."""
    parts = name.split(".")
    if "experts" not in parts and parts[-1] not in OF_EXPERTS:
        return False
    return any(
        is_stack(f"{layer.name}.{own}")
        for layer, module in zip(plan.layers, described(plan.layers), strict=True)
        for own, _ in module.named_parameters()
    )


def present(plan: ModelPlan, names: Sequence[str]) -> tuple[str, ...]:
    """Those of them that are linear layers of decoder layers."""
    there = _all_linear(plan)
    return tuple(w for w in names if any(_is_target(name, (w,)) for name in there))


def _is_target(name: str, wanted: Sequence[str]) -> bool:
    """As PEFT matches: the whole name or its end."""
    return any(name == w or name.endswith(f".{w}") for w in wanted)


def _all_linear(plan: ModelPlan) -> list[str]:
    """Full names of the linear layers that can have an adapter."""
    with torch.device("meta"):
        return [
            f"{layer.name}.{name}" for layer in plan.layers for name in _linear_names(layer.build())
        ]


def _linear_names(module: nn.Module) -> list[str]:
    """Of linear layers within a layer; not of those that do more than that by a class of their
    own, and not the layer itself."""
    plain = (nn.Linear, Linear)
    return [name for name, part in module.named_modules() if name and type(part) in plain]


# ---- the trained model ----------------------------------------------------------------------


def merge(
    named: Mapping[str, Tensor], base: Mapping[str, Tensor], lora: LoraSpec
) -> dict[str, Tensor]:
    """The whole model, by name: W + s B A where there is an adapter, else W. `named`: the adapters'
    parameters. `base`: all others, fp32. `lora`: resolved."""
    merged = {}
    for name, value in base.items():
        module = name.removesuffix(".weight")
        a, b = named.get(f"{module}.{A}.weight"), named.get(f"{module}.{B}.weight")
        if a is not None and b is not None:
            value = value + (b @ a) * scaling_of(lora)
        merged[name] = value
    return merged
