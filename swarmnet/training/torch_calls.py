"""Functions of one's own in place of some of torch's, for code that is not ours to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class TorchCalls(TorchFunctionMode):
    """In this context, what is given is called in place of torch's functions, with their arguments.
    It may call these itself: there the context is not."""

    def __init__(self, instead: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        """`instead`: by torch's function."""
        super().__init__()
        self._instead = instead

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))
