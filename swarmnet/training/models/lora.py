"""LoRA: a model's weights stay as they are, and low-rank adapters beside some of its linear layers
are trained (Hu et al., 2022).

A linear layer W x becomes W x + s B A dropout(x), with A (r, inputs), B (outputs, r) and s the
scaling. Parameters of the base keep their names, so that they are found in a model's files; those
of an adapter are LAYER.lora_A.weight and LAYER.lora_B.weight. As in PEFT, A begins as the weight of
an `nn.Linear` would and B with zeros; here both are a function of the run's seed and the name.

Experts have theirs too: each a pair for the matrix of gate and up together, and one for the other,
as `experts.STACKS` names them. The pairs of a layer's E experts lie in two matrices as in PEFT:
lora_A (E r, inputs), one expert after the other, and lora_B (outputs, r E), where an expert's
columns are those that are E apart. A pair meets the rows that its expert gets, and no stack is
ever changed or copied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet.errors import SpecError
from swarmnet.spec import ALL_LINEAR, LoraSpec
from swarmnet.training.models.base import LayerBuilder, ModelPlan, described
from swarmnet.training.models.experts import (
    ADAPTERS,
    DOWN,
    GATE_UP,
    STACKS,
    ExpertLinear,
    Experts,
    LowRank,
    expert_of,
    is_stack,
)
from swarmnet.training.models.frozen import FrozenLinear
from swarmnet.training.models.llama import Linear
from swarmnet.training.models.packing import BITS, check_packing

A, B = "lora_A", "lora_B"
NOT_ADAPTED = ("embed_tokens", "lm_head")
"""Matrices outside the decoder layers."""
OF_FILES = ("w1", "w2", "w3")
"""Names of an expert's matrices in files that have each by itself, and that nothing else has."""
PARTS = {"gate_proj": (GATE_UP, 0, 2), "up_proj": (GATE_UP, 1, 2), "down_proj": (DOWN, 0, 1)}
"""Of an expert that has each matrix by itself: which part of which stack it is, of how many."""
EXPERTS, STACK_DIM = "experts", 3
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


class ExpertsLora(nn.Module):
    """The adapters of a matrix that each expert of a layer has: an `experts.StackAdapter`."""

    def __init__(self, shape: Sequence[int], lora: LoraSpec) -> None:
        """`shape`: of the stack, (E, outputs, inputs). Raises `SpecError` for dropout."""
        super().__init__()
        if lora.lora_dropout:
            raise SpecError(
                "[lora] lora_dropout does not go with adapters on experts, which have none in PEFT "
                "either; write lora_dropout = 0, or leave experts out of target_modules"
            )
        num_experts, outputs, inputs = shape
        self.lora_A = nn.Linear(inputs, lora.rank * num_experts, bias=False)
        self.lora_B = nn.Linear(lora.rank * num_experts, outputs, bias=False)
        self.scaling = scaling_of(lora)
        self._rank = lora.rank

    def sides(self) -> tuple[Tensor, Tensor]:
        """As `StackAdapter.sides`. Ranks that have some experts have their pairs alone."""
        return sides_of(self.lora_A.weight, self.lora_B.weight, self._rank)

    def by_expert(self) -> list[LowRank]:
        """As `StackAdapter.by_expert`."""
        a, b = self.sides()
        pairs = zip(a.unbind(), b.unbind(), strict=True)  # views: no pass keeps copies of them
        return [LowRank(*pair, self.scaling) for pair in pairs]


def sides_of(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(E, r, inputs) and (E, outputs, r) from (E r, inputs) and (outputs, r E)."""
    return a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)


class _Stack:
    """In place of a parameter that has the matrices of all experts, where a family's code takes one
    of them by its number."""

    def __init__(self, matrices: Tensor, adapter: ExpertsLora) -> None:
        self._matrices = matrices
        self._pairs = adapter.by_expert()

    def __getitem__(self, expert: Any) -> _Matrix:
        number = int(expert)
        return _Matrix(self._matrices[number], self._pairs[number])


class _Matrix:
    """In place of one expert's: torch's linear layer adds what its adapter makes of the rows. All
    else that a family's code may do with it fails, so that no adapter is passed over."""

    def __init__(self, weight: Tensor, pair: LowRank) -> None:
        self.weight = weight
        self.pair = pair

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not nn.functional.linear or not isinstance(args[1], cls):
            raise RuntimeError("experts of a kind that cannot be adapted")
        x, matrix, *bias = args
        return func(x, matrix.weight, *bias, **(kwargs or {})) + matrix.pair(x)


def _adapt_stacks(experts: nn.Module, adapters: nn.Module) -> None:
    """Lets a family's own code compute with adapted stacks."""
    alone = experts.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        mine = experts.__dict__  # it comes before the parameters of a module
        for name, adapter in adapters.named_children():
            assert isinstance(adapter, ExpertsLora)
            mine[name] = _Stack(experts.get_parameter(name), adapter)
        try:
            return alone(*args, **kwargs)
        finally:
            for name, _ in adapters.named_children():
                del mine[name]

    experts.forward = forward


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
        is_target = _is_target(f"{layer.name}.{name}", lora.target_modules)
        if is_target and not _is_of_stack(name, inner):
            with torch.device(inner.weight.device):
                frozen = LoraLinear(inner, lora)
        else:
            packing = "" if own in NOT_ADAPTED else packing_of(lora)
            frozen = FrozenLinear(inner, base_dtype(lora), packing)
        setattr(module.get_submodule(within), own, frozen)
    for within, owner, shapes in _stacks(module):
        targets = {
            name: ExpertsLora(shape, lora)
            for name, shape in shapes.items()
            if _is_stack_target(f"{layer.name}.{within}.{name}", lora.target_modules)
        }
        if targets:
            setattr(owner, ADAPTERS, nn.ModuleDict(targets))
            if not isinstance(owner, Experts):
                _adapt_stacks(module.get_submodule(within), owner.get_submodule(ADAPTERS))
    return module


def _stacks(module: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, tuple[int, ...]]]]:
    """The experts within a layer: their name, the module that they are a part of, and the shapes of
    the stacks of their matrices, by name."""
    for name, part in list(module.named_modules()):
        if isinstance(part, Experts):
            yield f"{name}.experts".lstrip("."), part, part.stack_shapes
            continue
        own = {n: tuple(p.shape) for n, p in part.named_parameters(recurse=False)}
        shapes = {n: s for n, s in own.items() if is_stack(f".{name}.{n}") and len(s) == STACK_DIM}
        if shapes:
            yield name, module.get_submodule(name.rpartition(".")[0]), shapes


# ---- which layers ---------------------------------------------------------------------------


def target_names(plan: ModelPlan, wanted: Sequence[str]) -> tuple[str, ...]:
    """`[lora] target_modules` with "all-linear" spelt out: all linear layers of decoder layers.
    Raises `SpecError` as `check_targets`."""
    if tuple(wanted) != (ALL_LINEAR,):
        check_targets(plan, wanted)
        return tuple(wanted)
    linear, _ = _adaptable(plan)
    return tuple(sorted({name.rpartition(".")[2] for name in linear}))


def check_targets(plan: ModelPlan, wanted: Sequence[str]) -> None:
    """Raises `SpecError` for a name that is no linear layer of a decoder layer, and no matrix of
    experts."""
    linear, stacks = _adaptable(plan)
    missing = [
        w
        for w in wanted
        if not any(_is_target(name, (w,)) for name in linear)
        and not any(_is_stack_target(name, (w,)) for name in stacks)
    ]
    if wanted and not missing:
        return
    there = sorted({name.rpartition(".")[2] for name in linear})
    there += sorted({f"experts.{name.rpartition('.')[2]}" for name in stacks})
    shown = ", ".join(there[:MAX_SHOWN]) or "none"
    if missing and missing[0].rpartition(".")[2] in NOT_ADAPTED:
        is_tied = any(layer.tied for layer in plan.layers)
        why = "is one matrix with another one" if is_tied else "is outside the decoder layers"
        raise SpecError(
            f"[lora] target_modules: {missing[0]} {why} and gets no adapter; there are: {shown}"
        )
    if missing and stacks and _is_of_expert(missing[0]):
        raise SpecError(
            f"[lora] target_modules: {missing[0][:80]} is of experts, whose matrices get adapters "
            f"together; there are: {shown}"
        )
    what = f"the model has no linear layer {missing[0][:80]!r}" if missing else "it is empty"
    raise SpecError(f"[lora] target_modules: {what}; there are: {shown}")


def _is_of_expert(name: str) -> bool:
    """A name for matrices of experts where each is by itself."""
    parts = name.split(".")
    return EXPERTS in parts or parts[-1] in (*OF_FILES, *PARTS, *STACKS)


def names_experts(name: str) -> bool:
    """A target's name is for matrices of experts: others may end alike."""
    return EXPERTS in name.split(".")


def present(plan: ModelPlan, names: Sequence[str]) -> tuple[str, ...]:
    """Those of them that are linear layers of decoder layers."""
    there, _ = _adaptable(plan)
    return tuple(w for w in names if any(_is_target(name, (w,)) for name in there))


def _is_target(name: str, wanted: Sequence[str]) -> bool:
    """As PEFT matches: the whole name or its end."""
    return any(name == w or name.endswith(f".{w}") for w in wanted)


def _is_stack_target(name: str, wanted: Sequence[str]) -> bool:
    return _is_target(name, [w for w in wanted if names_experts(w)])


def _adaptable(plan: ModelPlan) -> tuple[list[str], list[str]]:
    """Full names of what can have an adapter: linear layers, and stacks of experts."""
    linear, stacks = [], []
    for layer, module in zip(plan.layers, described(plan.layers), strict=True):
        linear += [
            f"{layer.name}.{name}"
            for name in _linear_names(module)
            if not _is_of_stack(name, module.get_submodule(name))
        ]
        stacks += [f"{layer.name}.{n}.{own}" for n, _, shapes in _stacks(module) for own in shapes]
    return linear, stacks


def _is_of_stack(name: str, part: nn.Module) -> bool:
    """The matrix of an expert of the built-in model: it has its part of all experts' adapters."""
    return isinstance(part, ExpertLinear) and expert_of(f".{name}.") is not None


def _linear_names(module: nn.Module) -> list[str]:
    """Of linear layers within a layer; not of those that do more than that by a class of their
    own, and not the layer itself."""
    plain = (nn.Linear, Linear, ExpertLinear)
    return [name for name, part in module.named_modules() if name and type(part) in plain]


# ---- the trained model ----------------------------------------------------------------------


def merge(
    named: Mapping[str, Tensor], base: Mapping[str, Tensor], lora: LoraSpec
) -> dict[str, Tensor]:
    """The whole model, by name: W + s B A where there is an adapter, else W. `named`: the adapters'
    parameters. `base`: all others, fp32. `lora`: resolved."""
    merged = {}
    for name, value in base.items():
        change = _change_of(name, named, lora)
        merged[name] = value if change is None else value + change
    return merged


def _change_of(name: str, named: Mapping[str, Tensor], lora: LoraSpec) -> Tensor | None:
    """s B A for a parameter of the base, of its shape; None where it has no adapter."""
    module = name.removesuffix(".weight")
    if (sides := _sides(module, named)) is not None:
        return (sides[1] @ sides[0]) * scaling_of(lora)
    if expert_of(name) is None and not is_stack(name):
        return None
    within, _, own = module.rpartition(".")
    number, (stack, part, num_parts) = expert_of(name), PARTS.get(own, (own, 0, 1))
    mixture = within.removesuffix(f".{number}").removesuffix(f".{EXPERTS}")
    if (sides := _sides(f"{mixture}.{ADAPTERS}.{stack}", named)) is None:
        return None
    a_ErI, b_EOr = sides_of(*sides, lora.rank)
    if number is None:
        return (b_EOr @ a_ErI) * scaling_of(lora)
    return (b_EOr[number].chunk(num_parts)[part] @ a_ErI[number]) * scaling_of(lora)


def _sides(module: str, named: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    a, b = named.get(f"{module}.{A}.weight"), named.get(f"{module}.{B}.weight")
    return None if a is None or b is None else (a, b)
