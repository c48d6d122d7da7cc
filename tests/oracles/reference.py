"""A plain training loop in PyTorch: the tests compare the swarm's numbers with its numbers.

One process trains the whole model with `torch.optim.AdamW` (or `optimizers.PlainMuon`) and
`clip_grad_norm_`. Of the swarm's
code the loop uses the model's layers, the data and the learning rate. It uses nothing that a stage
or a shard is made of, so that a mistake there is not in both. Where the run codes what crosses the
boundaries between stages, so does the loop, at the same places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet.batch import Batch
from swarmnet.ports import Data
from swarmnet.protocol.codecs import BoundaryCodec, boundary_codec
from swarmnet.runtime.compose import run_settings
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import to_tensor
from swarmnet.training.codecs.registry import codec_of
from swarmnet.training.data import open_data
from swarmnet.training.models.base import LayerContext, TakesContext, build_layer
from swarmnet.training.models.registry import model_plan, split_stages
from swarmnet.training.models.routing import Routing
from swarmnet.training.optimizer.rates import learning_rate
from tests.oracles import optimizers
from tests.oracles.optimizers import Optimizers


class _Coded(torch.autograd.Function):
    """Numbers as they are after a boundary; their gradient as it is after the way back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, row: int, codec: BoundaryCodec) -> Tensor:
        ctx.row, ctx.codec = row, codec
        return _rounded(values, row, codec.activations)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _rounded(gradients[0], ctx.row, ctx.codec.gradients), None, None


def _rounded(values: Tensor, row: int, name: str) -> Tensor:
    codec = codec_of(name)
    return codec.decode(codec.encode(values.reshape(-1, row)), row).view(values.shape)


class Cut(nn.Module):
    """A boundary between two stages."""

    def __init__(self, row: int, codec: BoundaryCodec) -> None:
        """`row`: numbers of a token, or of a sample where there are no tokens."""
        super().__init__()
        self._row, self._codec = row, codec

    def forward(self, values: Tensor) -> Tensor:
        coded: Tensor = _Coded.apply(values, self._row, self._codec)  # type: ignore[no-untyped-call]
        return coded


class ReferenceTrainer:
    """Trains the model of a spec in this process, on the microbatches that it is told."""

    def __init__(self, spec: RunSpec, data: Data | None = None) -> None:
        """
        Args:
            spec: of the run: model, optimizer and seed.
            data: the microbatches; those of the spec where not given.

        Raises:
            SpecError: the model cannot be built.
            DataError: the data cannot be read.
        """
        self._spec = spec
        self._settings = run_settings(spec)
        self.plan = model_plan(spec)
        self._data = open_data(spec) if data is None else data
        self._layers = {
            layer.name: build_layer(self.plan, layer, spec.seed) for layer in self.plan.layers
        }
        self.model = nn.Sequential(*self._layers_and_cuts())
        self._optimizers = Optimizers(self._named_parameters(), spec.optimizer)

    def _layers_and_cuts(self) -> Iterator[nn.Module]:
        stages = split_stages(self.plan, self._spec.pipeline.num_stages)
        codec = boundary_codec(self._spec.pipeline.codec)
        for index, stage in enumerate(stages):
            yield from (self._layers[layer.name] for layer in stage)
            if index + 1 < len(stages):
                shape = stage[-1].output_shape
                yield Cut(math.prod(shape[1:] if self.plan.is_sequence else shape), codec)

    def step(self, round_index: int, slots: Sequence[int]) -> float:
        """One update from these slots of the round; returns the mean loss before it, nats per
        token. Where no target has a loss, nothing changes."""
        loss_sum, num_tokens = self.accumulate(round_index, slots)
        if not num_tokens:
            return math.nan
        self.update(round_index, num_tokens)
        return loss_sum / num_tokens

    def update(self, round_index: int, num_tokens: int) -> None:
        """One update from the gradients of `accumulate`, which are sums over `num_tokens`. Those of
        an expert that no token has met are 0, as where all experts are one parameter."""
        for p in self.model.parameters():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
            if p.grad is not None:
                p.grad /= num_tokens
        if self._spec.optimizer.grad_clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._spec.optimizer.grad_clip_norm)
        self._optimizers.step(round_index, self._spec.optimizer)

    def continue_as(self, spec: RunSpec) -> None:
        """Goes on as the first round of another run of the same model, moments and all."""
        self._spec, self._settings = spec, run_settings(spec)

    def adam_step(
        self, round_index: int, mean_part: float, gradient_part: float
    ) -> dict[str, Tensor]:
        """The step that Adam would make along `mean_part` of the running mean of the gradients plus
        `gradient_part` of the newest gradient, without weight decay. By name of the parameter;
        nothing is changed."""
        steps: dict[str, Tensor] = {}
        for name, p in self._named_parameters().items():
            if name in self._optimizers.matrices:
                continue
            state, options = self._optimizers.state(p), self._spec.optimizer
            t = state["step"].item()
            assert p.grad is not None
            mean = mean_part * state["exp_avg"] + gradient_part * p.grad
            mean /= 1 - options.beta1**t
            square = state["exp_avg_sq"] / (1 - options.beta2**t)
            rate = learning_rate(options, round_index)
            steps[name] = -rate * mean / (square.sqrt() + options.eps)
        return steps

    def muon_step(
        self, round_index: int, mean_part: float, gradient_part: float
    ) -> dict[str, Tensor]:
        """The same of Muon and its matrices, along such parts of its momentum and of the newest
        gradient."""
        rate = learning_rate(self._spec.optimizer, round_index)
        steps: dict[str, Tensor] = {}
        for name, p in self._optimizers.matrices.items():
            assert p.grad is not None
            along = mean_part * self._optimizers.state(p)["momentum"] + gradient_part * p.grad
            steps[name] = -rate * optimizers.step_along(along, self._optimizers.parts[name])
        return steps

    def last_muon_step(self) -> dict[str, Tensor]:
        """How far Muon's last step has gone, without weight decay. By name of the matrix."""
        matrices = self._optimizers.matrices
        return {name: -self._optimizers.state(p)["last"] for name, p in matrices.items()}

    def accumulate(self, round_index: int, slots: Sequence[int]) -> tuple[float, int]:
        """Replaces the gradients by sums over the tokens of these slots of a round. Returns the
        summed loss in nats and the number of tokens."""
        self._optimizers.zero_grad()
        loss_sum, num_tokens = 0.0, 0
        for slot in slots:
            batch = self._batch(round_index, slot)
            part_sum, part_tokens = self._add(list(_alone(batch)))
            loss_sum, num_tokens = loss_sum + part_sum, num_tokens + part_tokens
        return loss_sum, num_tokens

    def accumulate_of(self, arrays: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """The same of microbatches of which inputs and targets are given."""
        self._optimizers.zero_grad()
        found = [self._add([pair]) for pair in arrays]
        return sum(loss for loss, _ in found), sum(n for _, n in found)

    def _add(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """Of a microbatch, in one part or in its documents. Routers' losses are those of the
        microbatch: of all tokens in it, by those that have a target."""
        heard: dict[nn.Module, list[Tensor]] = {}
        training = None if not self.plan.routes else Routing(1)
        with ExitStack() as stack:
            for router in _routers(self.model):
                hook = router.register_forward_hook(partial(_hear, heard))
                stack.callback(hook.remove)
            losses = [self.plan.loss(self._outputs(x, training), t) for x, t in parts]
        num_tokens = sum(self.plan.count(targets) for _, targets in parts)
        whole = torch.stack(losses).sum()
        own = [self._router_loss(said) for said in heard.values()]
        (whole + num_tokens * sum(own) / max(1, len(own))).backward()
        return whole.item(), num_tokens

    def _router_loss(self, said: Sequence[Tensor]) -> Tensor:
        """By the formulas of the papers, from the logits of one router."""
        model, logits = self._spec.model, torch.cat([*said])
        probs = logits.softmax(-1)
        of_token = model.num_experts_per_tok or model.config["num_experts_per_tok"]
        chosen = probs.topk(of_token).indices
        balance = torch.zeros(())
        for expert in range(logits.shape[-1]):
            share = (chosen == expert).any(-1).float().mean()
            balance = balance + logits.shape[-1] * share * probs[:, expert].mean()
        z = logits.exp().sum(-1).log().square().mean()
        of_balance, of_z = model.router_losses
        return of_balance * balance + of_z * z

    def _outputs(self, inputs: Tensor, routing: Routing | None = None) -> Tensor:
        context = None
        if self.plan.fixed is not None:
            context = LayerContext(tokens=inputs, fixed=self.plan.fixed(inputs, torch.float32))
        elif routing is not None:
            context = LayerContext(routing=Routing(0))  # a capacity counts; losses are made here
        for layer in self.model:
            is_beside = context is not None and isinstance(layer, TakesContext)
            inputs = layer(inputs, context) if is_beside else layer(inputs)
        return inputs

    def held_out_loss(self) -> float:
        """Mean loss on the held-out data, nats per token."""
        loss_sum, num_tokens = 0.0, 0
        with torch.no_grad():
            for index in range(self._data.num_held_out):
                for inputs, targets in _alone(self._data.held_out(index)):
                    loss_sum += self.plan.loss(self._outputs(inputs), targets).item()
                    num_tokens += self.plan.count(targets)
        return loss_sum / max(num_tokens, 1)

    def swap_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replaces the gradients by copies of others, by name (none: there are no gradients then).
        Returns copies of the old ones."""
        old = {n: g.clone() for n, g in self.gradients().items()}
        for name, p in self._named_parameters().items():
            p.grad = gradients[name].clone() if gradients else None
        return old

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters by name (Hugging Face's for a Llama)."""
        return {name: p.detach() for name, p in self._named_parameters().items()}

    def load_state_dict(self, parameters: Mapping[str, Tensor]) -> None:
        """Replaces the parameters by others, by name, for a measurement of the loss."""
        with torch.no_grad():
            for name, p in self._named_parameters().items():
                p.copy_(parameters[name])

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name."""
        return {n: p.grad for n, p in self._named_parameters().items() if p.grad is not None}

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{layer}.{name}": p
            for layer, module in self._layers.items()
            for name, p in module.named_parameters()
        }

    def microbatch(self, round_index: int, slot: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a slot."""
        inputs, targets = self._batch(round_index, slot).arrays
        return to_tensor(inputs), to_tensor(targets)

    def _batch(self, round_index: int, slot: int) -> Batch:
        indices = self._settings.samples_of(round_index, slot, self._data.num_samples)
        return self._data.microbatch(indices)


def _routers(model: nn.Module) -> Iterator[nn.Module]:
    """Of the built-in model and of those of transformers, which call them so."""
    for name, part in model.named_modules():
        if name.endswith("mlp.gate"):
            yield part


def _hear(heard: dict[nn.Module, list[Tensor]], router: nn.Module, _: Any, said: Any) -> None:
    """Keeps the logits of each call."""
    heard.setdefault(router, []).append(said if isinstance(said, Tensor) else said[0])


def _alone(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets; where documents share a sample, those of each document by itself."""
    inputs, targets = (to_tensor(a) for a in batch.arrays)
    if batch.documents is None:
        yield inputs, targets
        return
    for i, lengths in enumerate(batch.documents):
        pieces = inputs[i : i + 1].split(lengths, dim=1), targets[i : i + 1].split(lengths, dim=1)
        yield from zip(*pieces, strict=True)
