"""What a stage keeps of the microbatches whose work may still be continued or undone.

`forward` keeps the input of a microbatch, and of the graph what the policy for activations says.
`backward` drops the graph and keeps the output's gradient beside the input: a receipt, from which
`retract` can compute again what `backward` added. `forget` or the end of the round drops the
receipt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnet.ports import StepKey
from swarmnet.training.models.base import LayerContext


@dataclass(slots=True)
class Kept:
    """What a stage keeps of one microbatch. An entry that was forgotten while the device still
    works on it is no longer in the table, and nothing else."""

    inputs: Tensor
    """Shape (samples, *shape of one sample); floats are in the precision of the passes."""
    targets: Tensor | None = None
    """At the last stage."""
    context: LayerContext | None = None
    """What the layers got beside the inputs."""
    outputs: Tensor | None = None
    """With their graph; only between forward and backward, and not with activations
    "recompute"."""
    grad_outputs: Tensor | None = None
    """Of the backward pass that was added; None at the last stage."""
    scale: float = 1.0
    """Of that pass; other than 1 in fp16 only."""
    is_added: bool = False
    """The microbatch's gradient is in the round's sum."""

    def keep_graph(self, outputs: Tensor) -> None:
        """Keeps the outputs of the forward pass with their graph."""
        self.outputs = outputs

    def take_graph(self) -> Tensor | None:
        """The outputs with their graph, which the entry no longer keeps."""
        outputs, self.outputs = self.outputs, None
        return outputs

    def mark_added(self, scale: float, grad_outputs: Tensor | None = None) -> None:
        """A backward pass of this scale has added the microbatch's gradient."""
        self.grad_outputs = grad_outputs
        self.scale = scale
        self.is_added = True

    def take_input_gradient(self) -> Tensor:
        """The gradient of the inputs in fp32 without the pass's scale; the entry no longer keeps
        it."""
        grad, self.inputs.grad = self.inputs.grad, None
        grad = torch.zeros_like(self.inputs) if grad is None else grad
        return grad.float() / self.scale if self.scale != 1.0 else grad.float()


class KeptMicrobatches:
    """The table of kept microbatches by key. `forget` may be called from any thread, the other
    methods from the device thread."""

    def __init__(self, *, needs_input_gradients: bool) -> None:
        """`needs_input_gradients`: there is a stage before this one that waits for them."""
        self._needs_input_gradients = needs_input_gradients
        self._entries: dict[StepKey, Kept] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: StepKey) -> Kept | None:
        """The entry of a microbatch; None where it was forgotten or never here."""
        return self._entries.get(key)

    @property
    def num_in_flight(self) -> int:
        """Microbatches between their passes, or in one of them."""
        return sum(not kept.is_added for kept in list(self._entries.values()))

    def is_added(self, key: StepKey) -> bool:
        """Whether the gradient of a microbatch is in the round's sum and can be retracted."""
        kept = self._entries.get(key)
        return kept is not None and kept.is_added

    def begin(
        self,
        key: StepKey,
        inputs: Tensor,
        targets: Tensor | None = None,
        context: LayerContext | None = None,
    ) -> Kept:
        """A new entry. It is in the table before the work, so that `forget` finds it meanwhile.

        Raises:
            ValueError: the gradient of this microbatch is in the sum already.
        """
        self.check_not_added(key)
        inputs.requires_grad_(self._needs_input_gradients)
        kept = self._entries[key] = Kept(inputs, targets, context)
        return kept

    def check_not_added(self, key: StepKey) -> None:
        """Raises `ValueError` where the gradient of this microbatch is in the sum already."""
        if self.is_added(key):
            raise ValueError(f"the gradient of {key} is in the buffer already")

    def take_added(self, key: StepKey) -> Kept | None:
        """Removes and returns an entry whose gradient is in the sum, with inputs that need no
        gradient; None for any other key."""
        kept = self._entries.get(key)
        if kept is None or not kept.is_added:
            return None
        self.forget(key)
        kept.inputs = kept.inputs.detach()
        return kept

    @contextlib.contextmanager
    def forget_on_error(self, key: StepKey) -> Iterator[None]:
        """Forgets the microbatch where the work in this context fails."""
        try:
            yield
        except BaseException:
            self.forget(key)
            raise

    def forget(self, key: StepKey) -> None:
        """Drops the entry of a microbatch, if there is one."""
        self._entries.pop(key, None)

    def forget_round(self, round_index: int) -> None:
        """Drops the entries of a round."""
        for key in [k for k in list(self._entries) if k[0] == round_index]:
            self.forget(key)

    def keep_round(self, round_index: int | None) -> None:
        """Drops the entries of all other rounds; of every round where it is None."""
        for key in [k for k in list(self._entries) if k[0] != round_index]:
            self.forget(key)
