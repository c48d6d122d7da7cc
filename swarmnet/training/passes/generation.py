"""Texts that a stage helps to write: passes over a few tokens, beside the keys and values of those
before, by one copy of the parameters that outlives its round."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarmnet.errors import NotReady, ProtocolViolation, RemoteError
from swarmnet.protocol.generation import LONGEST_TEXT, pass_tokens, text_tokens
from swarmnet.training.arrays import from_tensor
from swarmnet.training.late_arrays import numbers_of
from swarmnet.training.models.base import CachePlan, LayerContext, TakesContext
from swarmnet.training.passes.boundary import Boundary
from swarmnet.training.passes.layers import StageLayers
from swarmnet.training.passes.round_vectors import RoundVectors
from swarmnet.wire import Array


@dataclass(slots=True)
class _Text:
    cache: Any
    num_tokens: int = 0


class StageGeneration:
    """Implements `ports.Generation`; all on the device thread."""

    def __init__(
        self,
        layers: StageLayers,
        boundary: Boundary,
        vectors: RoundVectors,
        plan: CachePlan,
        microbatch: int,
    ) -> None:
        """`plan`: of the model's caches. `microbatch`: samples."""
        element = torch.finfo(layers.dtype).bits // 8
        cached = sum(isinstance(module, TakesContext) for module in layers.modules)
        length = layers.plan.inputs.shape[0]
        self.pass_tokens = pass_tokens(microbatch * length)
        self.max_tokens = min(text_tokens(length), plan.max_tokens or LONGEST_TEXT)
        self.copy_bytes = element * layers.num_parameters
        self.token_bytes = element * plan.numbers * cached
        self.text_bytes = element * plan.fixed_numbers * cached
        self._layers = layers
        self._boundary = boundary
        self._vectors = vectors
        self._plan = plan
        self._copy: list[Tensor] = []
        self._texts: dict[Hashable, _Text] = {}

    def copy(self, shards: Sequence[Array]) -> None:
        """As the port says."""
        layers = self._layers
        where = "cpu" if layers.copies_parts else layers.weights_device
        flat = torch.empty(layers.num_parameters, dtype=layers.dtype, device=where)
        fill(flat, shards)
        self.take(flat)

    def take(self, flat: Tensor) -> None:
        """Keeps these parameters, of the dtype of the passes, in place of others. What is not for
        another device stays where it is: it is not to change."""
        self._copy = self._layers.copy_of(flat)

    def drop_copy(self) -> None:
        self._copy = []

    def extend(
        self,
        session: Hashable,
        inputs: Array,
        position: int,
        *,
        is_copied: bool,
        num_logits: int,
        exact: bool = False,
    ) -> tuple[Array, ...]:
        """As the port says. Raises `NotReady` where the text, or the copy, is not here."""
        x, tokens = self._boundary.receive_text(inputs, self.pass_tokens, exact=exact)
        text = self._texts.get(session) if position else _Text(self._plan.make())
        if text is None or text.num_tokens != position or (is_copied and not self._copy):
            raise NotReady("this text is not known here")
        self._texts[session] = text
        count = x.shape[1]
        positions = torch.arange(position, position + count, device=x.device).unsqueeze(0)
        context = LayerContext(positions, text.cache, tokens=tokens)
        try:
            outputs = self._pass(x, context, is_copied)
        except BaseException:
            self.drop(session)  # some layers may have these tokens, and others not
            raise
        text.num_tokens += count
        if self._layers.is_last:
            return self._logits(outputs, num_logits)
        return self._sent(outputs, context, exact=exact)

    def drop(self, session: Hashable) -> None:
        self._texts.pop(session, None)

    def _pass(self, x: Tensor, context: LayerContext, is_copied: bool) -> Tensor:
        with (
            self._vectors.showing(),
            self._layers.evaluating(is_whole_batch=False, wants_outputs=True),
        ):
            if not is_copied:
                return self._layers.extend(x, context).float()
            with self._layers.showing(self._copy):
                return self._layers.extend(x, context).float()

    def _sent(self, outputs: Tensor, context: LayerContext, *, exact: bool) -> tuple[Array, ...]:
        try:
            return (self._boundary.send_text(outputs, context, exact=exact)(),)
        except ProtocolViolation:
            raise _not_finite() from None

    def _logits(self, outputs: Tensor, num_logits: int) -> tuple[Array, ...]:
        logits = outputs[:, -1]
        _check(logits)
        if not 0 < num_logits < logits.shape[-1]:
            return (from_tensor(logits),)
        values, tokens = torch.topk(logits, num_logits)
        return from_tensor(values), from_tensor(tokens.to(torch.int32))


def fill(flat: Tensor, shards: Sequence[Array]) -> None:
    """Writes shards into a vector, one behind the other."""
    start = 0
    for shard in shards:
        values = numbers_of(shard)
        flat[start : start + values.numel()].copy_(values)
        start += values.numel()


def _check(outputs: Tensor) -> None:
    if not bool(torch.isfinite(outputs).all()):
        raise _not_finite()


def _not_finite() -> RemoteError:
    return RemoteError("the model's outputs are not finite here")
