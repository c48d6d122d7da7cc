"""A rank whose layers are compiled to graphs of torch's own operations: without a C++ compiler,
which takes half a minute. What the graphs are is the same."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from swarmnet.training.processes.frames import live
from swarmnet.training.ranks import local_group
from swarmnet.training.ranks.rank import serve


def without_compiler() -> None:
    """From now on, in this process and the ranks that it starts."""
    make = torch.nn.Module.compile

    def to_graphs(module: Any, **how: Any) -> None:
        make(module, backend="aot_eager", **how)

    torch.nn.Module.compile = to_graphs  # type: ignore[method-assign]
    local_group.PROGRAM = "tests.training.ranks.eager_rank"


if __name__ == "__main__":
    FD, RANK, PARENT = (int(word) for word in sys.argv[1:4])
    without_compiler()
    live(FD, PARENT, functools.partial(serve, rank=RANK))
