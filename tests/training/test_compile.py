"""Compiled layers compute what plain ones do. In a process of its own: compiling starts helpers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, torch
from swarmnet.training.computing import Computing
from swarmnet.training.stage import build_stage
from tests.training.flights import fly, gradient
from tests.training.specs import small_spec
from tests.training.ranks.test_tensor_parallel import tokens

spec = small_spec(pipeline={"num_stages": 2}, model={"num_hidden_layers": 2})
eager = [build_stage(spec, i, computing=Computing("fp32")) for i in range(2)]
fly(eager, (0, 0), tokens(spec, 1), tokens(spec, 2))
assert "torch._dynamo" not in sys.modules, "the compiler takes two seconds to import"

from torch._dynamo.backends.debugging import aot_eager
operations = set()
def noted(graph, inputs):
    operations.update(node.target for node in graph.graph.nodes)
    return aot_eager(graph, inputs)
make = torch.nn.Module.compile  # without a C++ compiler, which takes half a minute
torch.nn.Module.compile = lambda self, **how: make(self, backend=noted, **how)
rows = [[build_stage(spec, i, computing=Computing("fp32", compile=c)) for i in range(2)]
        for c in (False, True)]
for number in range(2):
    a, b = (fly(row, (0, number), tokens(spec, 1), tokens(spec, 2)) for row in rows)
    assert abs(a.loss_sum / b.loss_sum - 1) < 1e-5
for plain, compiled in zip(*rows):
    assert torch.allclose(gradient(plain), gradient(compiled), rtol=1e-4, atol=1e-5)
compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
assert compiled > 0, compiled
assert operations and not {torch.cos, torch.outer, "cos"} & operations, "tables are made once"
short = tokens(spec, 3, length=5)
x, y = (row[0].evaluate(short, None) for row in rows)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
assert x.shape == y.shape

spec = small_spec(data={"document_mask": True}, model={"num_hidden_layers": 1},
                  pipeline={"num_stages": 1})
graphs = []
row = [build_stage(spec, 0, computing=Computing("fp32", compile=c)) for c in (False, True)]
for number, documents in enumerate((((16,), (5, 11)), ((3, 4, 9), (2, 14)), ((16,), (16,)))):
    for stage in row:
        stage.forward_backward((0, number), tokens(spec, 1), tokens(spec, 2), documents)
    assert torch.allclose(*map(gradient, row), rtol=1e-4, atol=1e-5)
    graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
assert compiled < graphs[0] == graphs[2], "a graph is of no set of documents"
"""


def test_compiled_layers_give_the_same_gradients() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
