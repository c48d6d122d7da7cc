"""What a layer's two passes take beside what is kept between them, found by both passes on torch's
`meta` device, which takes no memory: every tensor is counted from the operation that makes it until
it is given back. Scratch inside an operation is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from swarmnet.training.memory.pass_peaks import PassPeak
from swarmnet.training.memory.roots import given
from swarmnet.training.torch_calls import TorchCalls

BY_PARTS = functional.scaled_dot_product_attention
"""As torch has it, whatever stands in its place."""


def pass_peak(
    module: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor], *, is_loss: bool = False
) -> PassPeak:
    """Of a layer on the `meta` device. Raises what the layer raises there.

    Args:
        module: the layer, for its parameters.
        x: its input.
        call: the layer, and the loss behind it where `is_loss`.
    """
    lives = _lives_of(module, x, call, is_loss=is_loss)
    offloaded = _lives_of(module, x, call, is_loss=is_loss, is_offloaded=True)
    return PassPeak(
        lives.most() - lives.kept,
        lives.most(is_grad_held=True) - lives.kept,
        lives.most(has_weights=False) - lives.kept,
        lives.most(is_grad_held=True, has_weights=False) - lives.kept,
        offloaded.most(is_grad_held=True),
    )


class _Lives(TorchDispatchMode):
    """Which tensors there are, in the order in which they come and go."""

    def __init__(self, spared: set[int]) -> None:
        """`spared`: memories that do not count."""
        super().__init__()
        self._spared = spared
        self._alive: dict[int, int] = {}
        self._events: list[tuple[int, int]] = []
        """(number of a memory, bytes that it takes or gives back)."""
        self._num = 0
        self.kept = 0
        self._grad = -1
        """The number of the memory of the gradient that comes."""
        self._uncounted: set[int] = set()
        self.of_weights: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(torch.Tensor, self.see, func(*args, **(kwargs or {})))

    def see(self, tensor: Tensor) -> Tensor:
        key = memory_of(tensor)
        if key in self._spared or key in self._alive:
            return tensor
        number, num_bytes = self._num, tensor.untyped_storage().nbytes()
        self._num += 1
        self._alive[key] = number
        self._events.append((number, num_bytes))
        weakref.finalize(tensor.untyped_storage(), self._gone, key, number, num_bytes)
        return tensor

    def _gone(self, key: int, number: int, num_bytes: int) -> None:
        del self._alive[key]
        self._events.append((number, -num_bytes))

    def number_of(self, tensor: Tensor) -> int:
        return self._alive.get(memory_of(tensor), -1)

    def spare(self, tensor: Tensor) -> None:
        """Its memory does not count, whatever was seen of it."""
        self._uncounted.add(self.number_of(tensor))

    def counts(self, key: int) -> bool:
        """Whether what is kept under this key of a memory counts."""
        return key in self._alive and self._alive[key] not in self._uncounted

    def coming(self, grad: Tensor) -> Tensor:
        """It is the gradient that comes."""
        self._grad = self.number_of(grad)
        return grad

    def most(self, *, is_grad_held: bool = False, has_weights: bool = True) -> int:
        """Bytes at a time."""
        now = most = 0
        for number, num_bytes in self._events:
            if number in self._uncounted or (number in self.of_weights and not has_weights):
                continue
            if number == self._grad and num_bytes < 0 and is_grad_held:
                continue
            now += num_bytes
            most = max(most, now)
        return most


def _lives_of(
    module: nn.Module,
    x: Tensor,
    call: Callable[[Tensor], Tensor],
    *,
    is_loss: bool,
    is_offloaded: bool = False,
) -> _Lives:
    parameters = {memory_of(p) for p in (*module.parameters(), *module.buffers())}
    x = x.detach().requires_grad_(x.requires_grad)
    lives = _Lives(parameters | {memory_of(x)})
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Any:
        if memory_of(t) in parameters:
            return t
        if is_offloaded:
            return t.shape, t.stride(), t.dtype
        kept[memory_of(t)] = t
        return t

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, stride, dtype = packed
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def added(parameter: Tensor) -> None:
        if parameter.grad is not None:
            lives.of_weights.add(lives.number_of(parameter.grad))
            parameter.grad = None

    hooks = [
        p.register_post_accumulate_grad_hook(added) for p in module.parameters() if p.requires_grad
    ]
    try:
        with lives:
            with fused_attention(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                y = call(x)
            if not is_loss:
                lives.spare(y)
            lives.kept = sum(
                t.untyped_storage().nbytes() for at, t in kept.items() if lives.counts(at)
            )
            kept.clear()
            if y.requires_grad:
                root = given(y, lives.coming(torch.empty_like(y)))
                del y
                root.backward()
                del root
    finally:
        for hook in hooks:
            hook.remove()
    return lives


def fused_attention() -> TorchCalls:
    """In this context attention is one operation, as on devices that have a kernel for it."""
    return TorchCalls({BY_PARTS: attend_at_once})


def attend_at_once(
    q_BHSE: Tensor,
    k_BHSE: Tensor,
    v_BHSE: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """As torch's `scaled_dot_product_attention`, whose names of arguments these are, in one
    operation, as a device computes it: on the `meta` device torch takes it apart, and would keep
    all scores."""
    is_fused = dropout_p == 0 and q_BHSE.ndim == 4 and q_BHSE.shape[-1] == v_BHSE.shape[-1]
    if is_fused and (attn_mask is None or attn_mask.dtype == q_BHSE.dtype):
        more.pop("enable_gqa", None)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  it has no public name
        found = attend(q_BHSE, k_BHSE, v_BHSE, dropout_p, is_causal, attn_mask=attn_mask, **more)
        return cast(Tensor, found[0])
    return BY_PARTS(q_BHSE, k_BHSE, v_BHSE, attn_mask, dropout_p, is_causal, **more)


def memory_of(tensor: Tensor) -> int:
    """Tells memories apart on the `meta` device too, where every address is 0."""
    storage = tensor.untyped_storage()
    return storage._cdata  # noqa: SLF001  torch has no public name for a storage's identity
