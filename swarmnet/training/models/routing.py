"""What routers of experts are trained on beside the model's loss, and what they did.

A layer with E experts sends each of T tokens of a microbatch to K of them. Its router has losses of
its own, means over these tokens:

- *balance*: E sum_i f_i P_i, f_i the tokens that chose expert i over T, and P_i its mean
  probability (Fedus et al., 2021, arXiv 2101.03961, where K is 1; as transformers has it, where
  tokens choose several).
- *z*: the mean square of the log-sum-exp of the logits (Zoph et al., 2022, arXiv 2202.08906).

Each is multiplied by its coefficient over the number of the model's layers with experts, so that it
is a mean over layers, and by the tokens of the microbatch that have a target. So it is a sum over
tokens like the model's loss, and what that sum is divided by at the end of the round makes a mean
of both.

A loss hangs on its layer's output (`heard`): the backward pass of the stage, whoever makes it and
however often it is computed again, adds its gradient where the layer's output gets one. No number
of it goes to another stage, and the loss that a run reports is without it.

Where ranks of a machine have a part of the microbatch each, a rank has its part of the losses: by
the shares of all ranks' tokens, and the probabilities and logits of its own.

Shapes: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet.ports import RouterReport

ROUTED_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Of transformers. Their routers choose the largest logits, and so does transformers' loss for
them."""


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """The coefficients of a router's own losses, each over the number of layers with experts."""

    balance: float = 0.0
    z: float = 0.0

    @classmethod
    def of(cls, balance: float, z: float, num_layers: int) -> RouterLosses:
        """Of coefficients of the mean over so many layers."""
        return cls(balance / max(1, num_layers), z / max(1, num_layers))

    def part(self, num_parts: int) -> RouterLosses:
        """One of so many, whose gradients are added up."""
        return RouterLosses(self.balance / num_parts, self.z / num_parts)


@dataclass(frozen=True, slots=True)
class Heard:
    """What the router of one layer did with the tokens of a microbatch, or of several."""

    chosen_E: Tensor
    """int64: tokens that chose each expert."""
    dropped: Tensor
    """int64, no dimension: of these choices, those for which an expert had no room."""
    entropy: Tensor
    """fp32, no dimension: of the probabilities, in nats, summed over tokens."""
    num_tokens: int

    def plus(self, other: Heard, sign: int = 1) -> Heard:
        """Both together; with -1, without the other."""
        return Heard(
            self.chosen_E + sign * other.chosen_E,
            self.dropped + sign * other.dropped,
            self.entropy + sign * other.entropy,
            self.num_tokens + sign * other.num_tokens,
        )


@dataclass(slots=True, eq=False)
class Routing:
    """Of one microbatch at one stage: what its routers are told and what they say. It is there in
    training alone: a pass that has none drops no token."""

    num_tokens: int
    """Of the microbatch, those that have a target."""
    scale: float = 1.0
    """Of the backward pass: the gradient that it is given is so many times that of the loss.
    Negative where a microbatch is taken out."""
    layers: dict[nn.Module, Heard] = field(default_factory=dict)
    """By layer. One that is computed again says the same again."""
    of_ranks: Callable[[Heard], Heard] | None = None
    """From what a layer did with this rank's tokens to what it did with all of the microbatch;
    None where this rank has all of it."""


class _WithLoss(torch.autograd.Function):
    """A tensor as it is, and a loss, whose gradient is a number of the microbatch's."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return y.view_as(y)

    @staticmethod
    def backward(  # type: ignore[override,unused-ignore]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        routing: Routing = ctx.routing
        weight = routing.num_tokens * routing.scale
        return grad, torch.full((), weight, dtype=torch.float32, device=grad.device), None


def heard(
    routing: Routing,
    layer: nn.Module,
    y: Tensor,
    logits_TE: Tensor,
    chosen_TK: Tensor,
    losses: RouterLosses,
    dropped: Tensor | None = None,
) -> Tensor:
    """The output `y` of a layer, from which a backward pass goes into its router's losses too.
    `dropped`: as in `Heard`; None for none."""
    num_tokens, num_experts = logits_TE.shape
    trains = torch.is_grad_enabled() and bool(losses.balance or losses.z)
    with torch.set_grad_enabled(trains):
        logits_TE = logits_TE.float()
        log_probs_TE = logits_TE.log_softmax(dim=-1)
        probs_TE = log_probs_TE.exp()
    with torch.no_grad():
        nothing = torch.zeros((), dtype=torch.int64, device=y.device)
        whole = Heard(
            count(chosen_TK, num_experts),
            nothing if dropped is None else dropped,
            -(probs_TE * log_probs_TE).sum(),
            num_tokens,
        )
        if routing.of_ranks is not None:
            whole = routing.of_ranks(whole)
        routing.layers[layer] = whole
    if not trains:
        return y
    shares_E = whole.chosen_E.float() / whole.num_tokens
    loss = losses.balance * num_experts * (shares_E * probs_TE.mean(dim=0)).sum()
    if losses.z:
        loss = loss + losses.z * logits_TE.logsumexp(dim=-1).square().mean()
    if whole.num_tokens != num_tokens:  # the means are of this rank's tokens
        loss = loss * (num_tokens / whole.num_tokens)
    hung: Tensor = _WithLoss.apply(y, loss, routing)
    return hung


def count(chosen: Tensor, num_experts: int) -> Tensor:
    """int64 (E,): how often each expert is among the chosen ones. Nothing waits for the device."""
    flat = chosen.flatten()
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return zeros.scatter_add_(0, flat, torch.ones_like(flat))


# ---- what routers of a stage did in a round -------------------------------------------------


class RoutersOfStage:
    """Adds up what its routers did, round by round. For the device thread; `last` for any."""

    def __init__(self, name_of: Callable[[nn.Module], str]) -> None:
        """`name_of(module)`: of the layer that a module is, or is a part of."""
        self._name_of = name_of
        self._rounds: dict[int, dict[nn.Module, Heard]] = {}
        self.last: tuple[RouterReport, ...] = ()
        """Of the newest round that is over and in which there was something."""

    def add(self, round_index: int, routing: Routing | None) -> None:
        """The gradient of a microbatch is in the round's sum."""
        self._change(round_index, routing, 1)

    def take_out(self, round_index: int, routing: Routing | None) -> None:
        """It is in it no more."""
        self._change(round_index, routing, -1)

    def _change(self, round_index: int, routing: Routing | None, sign: int) -> None:
        if routing is None:
            return
        known = self._rounds.setdefault(round_index, {})
        for layer, one in routing.layers.items():
            before = known.get(layer)
            known[layer] = one if before is None else before.plus(one, sign)

    def drop(self, round_index: int) -> None:
        """Its gradient is given up."""
        self._rounds.pop(round_index, None)

    def finish(self, round_ahead: int | None) -> None:
        """All rounds but this one are over."""
        ended = sorted(r for r in self._rounds if r != round_ahead)
        for round_index in ended:
            found = _reports(self._rounds.pop(round_index), self._name_of)
            self.last = found or self.last


def _reports(
    heard_of: Mapping[nn.Module, Heard], name_of: Callable[[nn.Module], str]
) -> tuple[RouterReport, ...]:
    found = []
    for layer, one in heard_of.items():
        chosen = one.chosen_E.tolist()
        if total := sum(chosen):
            report = RouterReport(
                name_of(layer),
                tuple(n / total for n in chosen),
                float(one.dropped) / total,
                float(one.entropy) / max(1, one.num_tokens),
            )
            found.append(report)
    return tuple(found)


def names_of_parts(layers: Iterable[tuple[str, nn.Module]]) -> Callable[[nn.Module], str]:
    """Finds the name of the layer that a module is a part of."""
    named = {part: name for name, module in layers for part in module.modules()}
    return lambda module: named[module]
