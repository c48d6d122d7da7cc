"""The optimizers of a plain loop, by `[optimizer]`: torch's AdamW, and Muon written out in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet.spec import OptimizerSpec, Shares, Spread
from swarmnet.training.optimizer.rates import learning_rate


class PlainMuon(torch.optim.Optimizer):
    """One matrix after the other. `state[p]["momentum"]`: the running mean of the gradient;
    `state[p]["last"]`: what the last step has taken away, but for weight decay."""

    def __init__(self, matrices: Mapping[nn.Parameter, Shares], spec: OptimizerSpec) -> None:
        """`matrices`: each with how it is divided."""
        super().__init__(list(matrices), {"lr": spec.learning_rate})
        self._spec = spec
        self._parts = matrices

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        beta = self._spec.momentum
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.copy_(beta * momentum + (1 - beta) * p.grad)
                ahead = beta * momentum + (1 - beta) * p.grad
                p.mul_(1 - group["lr"] * self._spec.weight_decay)
                last = self.state[p]["last"] = group["lr"] * step_along(ahead, self._parts[p])
                p.sub_(last)


def step_along(direction: Tensor, shares: Shares) -> Tensor:
    """The step of a matrix, of several one behind the other, of several that are spread over it, or
    of such stacked: each has AdamW's size by its own shape."""
    step = torch.empty_like(direction)
    is_turned = isinstance(shares, Spread) and bool(shares.columns)
    stacks = [x.unbind() if x.ndim == 3 else (x,) for x in (direction, step)]
    for one, made in zip(*stacks, strict=True):
        along, out = (one.T, made.T) if is_turned else (one, made)
        for rows in _divided(len(along), shares):
            matrix = along[rows]
            out[rows] = 0.2 * max(matrix.shape) ** 0.5 * nearly_orthogonal(matrix)
    return step


def _divided(num_rows: int, shares: Shares) -> list[list[int]]:
    """Which rows (or columns) are each part's."""
    proportions = (shares.rows or shares.columns) if isinstance(shares, Spread) else shares
    times = shares.times if isinstance(shares, Spread) else 1
    one = num_rows // (times * sum(proportions))
    turn = [part for part, n in enumerate(proportions) for _ in range(n * one)]
    owners = turn * times
    return [[row for row, own in enumerate(owners) if own == part] for part in set(turn)]


def nearly_orthogonal(matrix: Tensor) -> Tensor:
    """By five iterations on the singular values, which is what they do to a matrix."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values @ right).float()


class Optimizers:
    """Of the parameters of a model, each by its own."""

    def __init__(self, named: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> None:
        self._spec = spec
        self.parts: dict[str, Shares] = {}
        """Of each matrix that Muon steps, by name."""
        for name, p in named.items():
            if spec.kind == "muon" and name.startswith("model.layers."):
                ends = f".{name.removesuffix('.weight')}"
                given = spec.parts.items()  # type: ignore[union-attr]
                own: list[Shares] = [n for key, n in given if ends.endswith(f".{key}")]
                if own or (p.ndim == 2 and min(p.shape) > 1):
                    [self.parts[name]] = own or [(1,)]
        self.parts = {name: shares for name, shares in self.parts.items() if shares}
        self.matrices = {name: named[name] for name in self.parts}
        others = [p for name, p in named.items() if name not in self.matrices]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": spec.weight_decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = spec.beta1, spec.beta2
        self._all: list[torch.optim.Optimizer] = []
        if groups := [group for group in groups if group["params"]]:
            self._all.append(
                torch.optim.AdamW(groups, lr=spec.learning_rate, betas=betas, eps=spec.eps)
            )
        if self.matrices:
            parts = {p: self.parts[name] for name, p in self.matrices.items()}
            self._all.append(PlainMuon(parts, spec))

    def state(self, p: nn.Parameter) -> dict[str, Any]:
        """Of one parameter."""
        [found] = [o.state[p] for o in self._all if p in o.state]
        return found

    def step(self, round_index: int, spec: OptimizerSpec | None = None) -> None:
        """With the rate of a round. `spec`: of the run that goes on now."""
        for one in self._all:
            for group in one.param_groups:
                group["lr"] = learning_rate(spec or self._spec, round_index)
            one.step()

    def zero_grad(self) -> None:
        for one in self._all:
            one.zero_grad()
