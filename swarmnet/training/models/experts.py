"""Feed-forward layers of several experts, of which a token meets a few (Shazeer et al., 2017).

A router gives each token K of E experts, and the weights of these: their probabilities, over their
sum where `norm_topk_prob` says so (GShard, arXiv 2006.16668; Mixtral) or as they are (Switch, arXiv
2101.03961, with one expert a token). A shared expert, behind a gate of its own, sees all tokens.
Number for number what transformers' Mixtral does, and with a shared expert its Qwen2-MoE, under the
names of the latter's files.

Tokens are put in the order of their experts, each expert works on its own, and they are put back.
Nothing is dropped unless there is a capacity: then an expert takes `capacity_factor` times its
equal share of a sample's choices, those of the earliest tokens, and the others go without it. So
the output of a sample depends on this sample, and that of a token on no later one. Evaluation and
texts drop nothing.

Each matrix of an expert is a parameter of its own. What is computed again is the same: no order of
additions is left to the device.

Shapes: B samples, S positions, D width, T = B x S tokens, E experts, K experts a token, R = T x K
choices, I width of an expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnet.spec import ModelSpec
from swarmnet.training.models.base import LayerContext
from swarmnet.training.models.routing import RouterLosses, count, heard

Product = Callable[[Tensor, Tensor], Tensor]
"""Of rows (R, D) in the order of their experts, and how many each expert has: what the experts make
of them, (R, D)."""
NUMBER = re.compile(r"\.experts\.(\d+)\.")
STACKS = GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of what transformers keeps of all experts of a layer, (E, outputs, inputs) each. Gate and
what it gates are one matrix, one behind the other."""
ADAPTERS = "expert_adapters"
"""Beside the experts of a layer: the adapters of their matrices, by the names of `STACKS`."""
OF_ADAPTER = re.compile(rf"\.{ADAPTERS}\.(\w+)\.(lora_[AB])\.weight$")
GROUPED_ALIGNMENT = 16
"""Bytes that rows of matrices are a multiple of, where grouped products are asked for."""


def expert_of(name: str) -> int | None:
    """The number of the expert that a parameter of this full name is of; None where it is not of
    one."""
    found = NUMBER.search(name)
    return int(found[1]) if found else None


def is_stack(name: str) -> bool:
    """Of a parameter of this full name, the first dimension is that of the experts: so models of
    transformers have them."""
    return name.rpartition(".experts.")[2] in STACKS


def adapted_stack(name: str) -> tuple[str, str] | None:
    """Of a parameter of this full name that is an adapter's of all experts: the full name of their
    matrices, and which side of it, lora_A or lora_B; None where it is no such parameter."""
    found = OF_ADAPTER.search(name)
    return (f"{name[: found.start()]}.experts.{found[1]}", found[2]) if found else None


class LowRank(NamedTuple):
    """What an adapter adds to the product of one expert's matrix."""

    a: Tensor
    """(r, inputs)."""
    b: Tensor
    """(outputs, r)."""
    scaling: float

    def __call__(self, x_ND: Tensor) -> Tensor:
        return F.linear(F.linear(x_ND, self.a), self.b) * self.scaling


class StackAdapter(Protocol):
    """Of a matrix that each expert has (`lora`)."""

    scaling: float

    def by_expert(self) -> list[LowRank]:
        """Of those that are here."""

    def sides(self) -> tuple[Tensor, Tensor]:
        """(E, r, inputs) and (E, outputs, r), of those that are here."""


NO_ADAPTERS: Mapping[str, Any] = {}


class SharedExperts(Protocol):
    """Experts of a layer that lie on several ranks, which have tokens of their own each."""

    here: range
    """The numbers of those of this rank."""

    def through(self, x_RD: Tensor, sizes_E: Tensor, product: Product) -> Tensor:
        """What the experts of all ranks make of this rank's rows, which lie in the order of the
        experts, `sizes_E` of each: rows in the same order. `product`: makes it of rows of experts
        that are here, those of all ranks."""


class ExpertLinear(nn.Linear):
    """Of an expert: without bias, and without torch's own initialisation."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Expert(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(width, inner)
        self.up_proj = ExpertLinear(width, inner)
        self.down_proj = ExpertLinear(inner, width)

    def forward(self, x_ND: Tensor, low: Mapping[str, LowRank] = NO_ADAPTERS) -> Tensor:
        """`low`: its adapters, by the names of `STACKS`."""
        gate_NI, up_NI = self.gate_proj(x_ND), self.up_proj(x_ND)
        if GATE_UP in low:
            more_NI, beside_NI = low[GATE_UP](x_ND).chunk(2, dim=-1)
            gate_NI, up_NI = gate_NI + more_NI, up_NI + beside_NI
        inner_NI = F.silu(gate_NI) * up_NI
        y_ND: Tensor = self.down_proj(inner_NI)
        return y_ND + low[DOWN](inner_NI) if DOWN in low else y_ND


class Router(nn.Module):
    """Logits of all experts, in fp32 whatever the precision of the pass: a token that rounding
    sends elsewhere is another result."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, width))

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.float(), self.weight.float())


class Experts(nn.Module):
    """Router, experts and shared expert of a decoder layer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        width, shared = spec.hidden_size, spec.shared_expert_intermediate_size
        self.gate = Router(width, spec.num_experts)
        self.experts = nn.ModuleList(
            Expert(width, spec.expert_size) for _ in range(spec.num_experts)
        )
        self.has_shared = shared > 0
        if shared:
            self.shared_expert = Expert(width, shared)
            self.shared_expert_gate = ExpertLinear(width, 1)
        self._num_chosen = spec.num_experts_per_tok
        self._normalizes = spec.norm_topk_prob
        self._capacity_factor = spec.capacity_factor
        self.losses = RouterLosses.of(*spec.router_losses, spec.num_hidden_layers)
        """Of its router; the part that this rank has of them."""
        self.shared: SharedExperts | None = None
        """None where this rank has all experts."""
        self.expert_adapters: nn.Module | None = None
        """A `StackAdapter` by the name of a stack (`lora`)."""

    @property
    def stack_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the matrices of all experts together, by the names of `STACKS`."""
        inner, width = tuple(self.experts[0].get_parameter("gate_proj.weight").shape)
        num_experts = len(self.experts)
        return {GATE_UP: (num_experts, 2 * inner, width), DOWN: (num_experts, width, inner)}

    def forward(self, x_BSD: Tensor, context: LayerContext | None = None) -> Tensor:
        """(B, S, D) to (B, S, D). `context`: of the pass; with a `Routing` in training."""
        y_BSD = self._of_experts(x_BSD, context)
        if not self.has_shared:
            return y_BSD
        return y_BSD + torch.sigmoid(self.shared_expert_gate(x_BSD)) * self.shared_expert(x_BSD)

    def _of_experts(self, x_BSD: Tensor, context: LayerContext | None) -> Tensor:
        routing = None if context is None else context.routing
        x_TD = x_BSD.flatten(0, 1)
        logits_TE = self.gate(x_TD)
        weights_TK, chosen_TK = logits_TE.softmax(dim=-1).topk(self._num_chosen, dim=-1)
        if self._normalizes:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        experts_R = chosen_TK.flatten()
        kept_R = None
        if routing is not None and self._capacity_factor:
            kept_R = self._with_room(experts_R, x_BSD.shape[0])
            # What is dropped goes behind all experts, where nobody works.
            experts_R = torch.where(kept_R, experts_R, len(self.experts))
        through = self._product
        if self.shared is not None:
            through = partial(self.shared.through, product=self._product)
        y_TD = combined(x_TD, experts_R, weights_TK, len(self.experts), through)
        y_BSD = y_TD.view(x_BSD.shape)
        if routing is None:
            return y_BSD
        dropped = None if kept_R is None else (~kept_R).sum()
        return heard(routing, self, y_BSD, logits_TE, chosen_TK, self.losses, dropped)

    def _product(self, x_RD: Tensor, sizes_E: Tensor) -> Tensor:
        """`in_a_loop` of the experts that are here."""
        here = range(len(self.experts)) if self.shared is None else self.shared.here
        experts = [self.experts[i] for i in here]
        adapters: Mapping[str, Any] = NO_ADAPTERS
        if self.expert_adapters is not None:
            adapters = dict(self.expert_adapters.named_children())
        product = grouped if takes_grouped(x_RD, experts[0], adapters) else in_a_loop
        return product(x_RD, sizes_E, experts, adapters)

    def _with_room(self, experts_R: Tensor, num_samples: int) -> Tensor:
        """Whether each choice is among the first of its expert in its sample, as many as there is
        room for."""
        num_experts, num_choices = len(self.experts), len(experts_R) // num_samples
        room = max(1, math.ceil(self._capacity_factor * num_choices / num_experts))
        at_R = torch.arange(len(experts_R), device=experts_R.device)
        groups_R = at_R // num_choices * num_experts + experts_R
        order_R = groups_R.argsort(stable=True)
        sizes = count(groups_R, num_samples * num_experts)
        first_R = (sizes.cumsum(0) - sizes)[groups_R[order_R]]
        return torch.empty_like(at_R, dtype=torch.bool).index_copy_(
            0, order_R, at_R - first_R < room
        )


def combined(
    x_TD: Tensor, experts_R: Tensor, weights_TK: Tensor, num_experts: int, through: Product
) -> Tensor:
    """What the experts of each token make of it, by its weights, (T, D). `experts_R`: by token,
    then by choice; `num_experts` is none. `through`: the way of rows through their experts."""
    order_R = experts_R.argsort(stable=True)
    place_R = order_R.argsort()
    x_RD = Dispatched.apply(x_TD, order_R, place_R, weights_TK.shape[1])
    y_RD = through(x_RD, count(experts_R, num_experts + 1)[:-1])
    y_TKD = y_RD.index_select(0, place_R).view(*weights_TK.shape, -1)
    return (y_TKD * weights_TK.to(y_TKD.dtype).unsqueeze(-1)).sum(dim=1)


class Dispatched(torch.autograd.Function):
    """Rows of tokens, each K times, in another order. Gradients of a token's rows are added in the
    order of its choices."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, place_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.k = k
        return x_TD.index_select(0, order_R // k)

    @staticmethod
    def backward(  # type: ignore[override,unused-ignore]
        ctx: Any, grad_RD: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (place_R,) = ctx.saved_tensors
        grad_TD = grad_RD.index_select(0, place_R).unflatten(0, (-1, ctx.k)).sum(dim=1)
        return grad_TD, None, None, None


def takes_grouped(
    x_RD: Tensor, expert: nn.Module, adapters: Mapping[str, StackAdapter] = NO_ADAPTERS
) -> bool:
    """Whether the products of all experts are made as one: torch has kernels for bf16 on GPUs,
    where loops wait for the device at every layer."""
    assert isinstance(expert, Expert)
    weight = expert.down_proj.weight
    sides = [*weight.shape, *(a.sides()[0].shape[1] for a in adapters.values())]
    return (
        x_RD.device.type == "cuda"
        and x_RD.dtype == weight.dtype == torch.bfloat16
        and weight.numel() > 0  # kept in few bits it is empty
        and all(side * x_RD.element_size() % GROUPED_ALIGNMENT == 0 for side in sides)
    )


def in_a_loop(
    x_RD: Tensor,
    sizes_E: Tensor,
    experts: Sequence[nn.Module],
    adapters: Mapping[str, StackAdapter] = NO_ADAPTERS,
) -> Tensor:
    """What each expert makes of its rows, which lie one after the other, `sizes_E` of them; zeros
    for those behind them. `adapters`: of the experts, by the names of `STACKS`."""
    sizes = sizes_E.tolist()
    *parts, behind = x_RD.split([*sizes, x_RD.shape[0] - sum(sizes)])
    low = {name: adapter.by_expert() for name, adapter in adapters.items()}
    made = [
        expert(part, {name: pairs[i] for name, pairs in low.items()})
        for i, (expert, part) in enumerate(zip(experts, parts, strict=True))
        if part.shape[0]
    ]
    return torch.cat([*made, torch.zeros_like(behind)])


def grouped(
    x_RD: Tensor,
    sizes_E: Tensor,
    experts: Sequence[nn.Module],
    adapters: Mapping[str, StackAdapter] = NO_ADAPTERS,
) -> Tensor:
    """`in_a_loop` by grouped products: matrices of all experts are put side by side for
    it."""
    ends_E = sizes_E.cumsum(0).to(torch.int32)
    # Products leave the rows behind the last expert's as they find them, forward and backward.
    is_made_R1 = (torch.arange(x_RD.shape[0], device=x_RD.device) < ends_E[-1]).unsqueeze(1)
    x_RD = torch.where(is_made_R1, x_RD, 0.0)

    def by_matrices(rows: Tensor, matrices: Tensor) -> Tensor:
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends_E)

    def product(rows: Tensor, name: str) -> Tensor:
        return by_matrices(
            rows, torch.stack([expert.get_parameter(f"{name}.weight") for expert in experts])
        )

    def low(rows: Tensor, name: str) -> Tensor:
        a, b = adapters[name].sides()
        return by_matrices(by_matrices(rows, a), b.contiguous()) * adapters[name].scaling

    gate_RI, up_RI = product(x_RD, "gate_proj"), product(x_RD, "up_proj")
    if GATE_UP in adapters:
        more_RI, beside_RI = low(x_RD, GATE_UP).chunk(2, dim=-1)
        gate_RI, up_RI = gate_RI + more_RI, up_RI + beside_RI
    inner_RI = F.silu(gate_RI) * up_RI
    y_RD = product(inner_RI, "down_proj")
    if DOWN in adapters:
        y_RD = y_RD + low(inner_RI, DOWN)
    return torch.where(is_made_R1, y_RD, 0.0)
