"""Real runs that programs and notebooks open. What they start ends with them."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from safetensors.torch import load_file

from tests.processes.running import Machine, processes_of, sockets_in, tiny_run

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
ANSWER_S = 240.0
"""Of a kernel; never waited for in full on success."""


def environment(running: Machine) -> dict[str, str]:
    return {
        **os.environ,
        "TMPDIR": str(running.folder),
        "XDG_STATE_HOME": str(running.folder / "state"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(running.folder / "ipython"),
    }


def peers_in(folder: Path) -> dict[int, str]:
    return {pid: line for pid, line in processes_of(folder).items() if "ipykernel" not in line}


def test_the_notebook_of_the_examples_runs(running: Machine) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(running.folder)}}
    client = NotebookClient(notebook, timeout=ANSWER_S, kernel_name="python3", resources=resources)
    with client.setup_kernel(env=environment(running)):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        assert peers_in(running.folder) == {}, "the last cell has stopped the run"
    assert processes_of(running.folder) == {}
    assert not [path for path in sockets_in(running.folder) if path.is_socket()]
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    printed = "".join(
        o["text"] for o in outputs if o.output_type == "stream" and o.name == "stdout"
    )
    first, last = (float(word) for word in printed.split(": ")[1].split("\n")[0].split(" -> "))
    assert last < first - 1
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert "\ndef " not in printed  # the prompt is no part of what is written
    weights = load_file(running.folder / "notebook-model" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (256, 64)


@contextmanager
def kernel(running: Machine) -> Iterator[tuple[Any, Any]]:
    manager, client = start_new_kernel(kernel_name="python3", env=environment(running))
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def printed(client: Any, cell: str, text: str) -> None:
    """Waits until a cell, by the id of its message, has printed it."""
    seen = ""
    while text not in seen:
        try:
            message = client.get_iopub_msg(timeout=ANSWER_S)
        except queue.Empty:
            raise AssertionError(f"not printed: {text}; but: {seen}") from None
        if message["parent_header"].get("msg_id") != cell:
            continue  # of one before
        seen += message["content"].get("text", "") + "\n".join(
            message["content"].get("traceback", ())
        )
        assert message["msg_type"] != "error", seen


def replied(client: Any, cell: str) -> dict[str, Any]:
    """What a kernel answers to a cell. Answers to what the client asked while the kernel started,
    once a second, may still lie before it."""
    while True:
        message = client.get_shell_msg(timeout=ANSWER_S)
        if message["parent_header"].get("msg_id") == cell:
            content: dict[str, Any] = message["content"]
            return content


def test_an_interrupted_cell_leaves_nothing(running: Machine) -> None:
    """Of the block that opened the run; the kernel goes on. Its loop runs while a cell waits. An
    interrupt that comes while ipykernel prints may leave a lock that its output thread waits for,
    and what later cells print is never seen: so the cell waits for the run when it comes. After an
    error a kernel answers "aborted" to what has come by then (`stop_on_error`)."""
    spec = tiny_run(running.folder, rounds=100_000)
    with kernel(running) as (manager, client):
        cell = client.execute(
            "import swarmnet\n"
            f"with swarmnet.local({str(spec)!r}, peers=2) as run:\n"
            "    for done in run.rounds():\n"
            "        if not done.round:\n"
            "            print('round', flush=True)\n",
            stop_on_error=False,
        )
        printed(client, cell, "round")
        assert len(peers_in(running.folder)) >= 3  # two peers, and the daemons
        manager.interrupt_kernel()
        assert replied(client, cell)["ename"] == "KeyboardInterrupt"
        assert peers_in(running.folder) == {}
        cell = client.execute(
            f"async with swarmnet.local({str(spec)!r}, peers=2, rounds=3) as run:\n"
            "    print('told', len([done async for done in run.rounds()]) > 0)\n"
        )
        printed(client, cell, "told True")
        assert replied(client, cell)["status"] == "ok"
        assert peers_in(running.folder) == {}


LAYERS = """
import torch, swarmnet
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
    def forward(self, x):
        return x + F.gelu(self.inner(x))

def layers():
    return nn.Sequential(nn.Linear(2, 32), Block(32), Block(32), nn.Linear(32, 2))

torch.manual_seed(0)
points = torch.randn(1024, 2)
arms = (points[:, 0] * points[:, 1] > 0).long()
spec = {
    "optimizer": {"learning_rate": 1e-2, "rounds": 20},
    "pipeline": {"num_stages": 2, "global_batch": 64, "microbatch": 16},
}
def train(out):
    heard = []
    with swarmnet.local(
        spec, peers=2, model=layers(), data=list(zip(points, arms)), state_dir="kept",
        on_round=lambda done: heard.append(done.round),
    ) as run:
        losses = [done.loss for done in run.rounds()]
        run.export(out)
    return heard, losses
"""


def test_layers_of_a_cell_are_trained_and_go_on(running: Machine) -> None:
    """Their class is in no file. The second time begins with other values, and has those of the
    first at once."""
    with kernel(running) as (_, client):
        client.execute(f"import os; os.chdir({str(running.folder)!r})")
        client.execute(LAYERS)
        cell = client.execute(
            "heard, losses = train('first')\n"
            "print('heard', heard == sorted(heard) and max(heard) == 19, losses[-1] < 0.6)\n"
        )
        printed(client, cell, "heard True True")
        cell = client.execute("train('second'); print('went', 'on')")
        printed(client, cell, "went on")
    first, second = (
        load_file(running.folder / name / "model.safetensors") for name in ("first", "second")
    )
    assert sorted(first) == sorted(second)
    assert "1.inner.weight" in first
    assert all(first[name].equal(second[name]) for name in first)
    assert peers_in(running.folder) == {}


LEAVES = """
import sys, swarmnet
run = swarmnet.local(sys.argv[1], peers=2).open()
print(next(run.rounds()).round, flush=True)
if sys.argv[2] == "waits":
    list(run.rounds())
"""


@pytest.mark.parametrize("how", ["ends", "waits"])
def test_a_program_that_ends_takes_its_peers_along(running: Machine, how: str) -> None:
    """By itself, without a word about them, or killed."""
    spec = tiny_run(running.folder, rounds=100_000)
    program = running.start("program", str(spec), how, command=(sys.executable, "-c", LEAVES))
    running.until(lambda: program.output() or program.process.poll())
    assert program.output(), running.describe()
    if how == "waits":
        running.kill(program)
    else:
        assert running.wait(program) == 0, running.describe()
    running.until(lambda: not processes_of(running.folder))


TAKES_PART = """
import json, pathlib, sys, swarmnet
spec, data, folder = sys.argv[1:]
def options(name):
    return swarmnet.PeerChoices(
        state_dir=pathlib.Path(folder) / name, host="127.0.0.1", threads=1, data=(data,)
    )
with swarmnet.start(spec, options=options("first")) as run:
    with swarmnet.join(run.address, options=options("second")) as joined:
        assert joined.address != run.address
        assert joined.spec == run.spec
        next(joined.rounds())
        with swarmnet.watch(run.address) as seen:
            next(seen.rounds())
            live = {peer.peer_id for peer in seen.status().peers if peer.live}
            assert {r.address.rpartition("/")[2] for r in (run, joined)} <= live, live
            line = seen.export(pathlib.Path(folder) / "model")
            text = seen.generate("abc", max_new_tokens=5, do_sample=False)
            pieces = list(seen.generate("abc", max_new_tokens=5, do_sample=False, stream=True))
            print(json.dumps([line, len(text), len(pieces)]))
"""


def test_a_program_starts_joins_and_watches(running: Machine) -> None:
    spec = tiny_run(running.folder, rounds=100_000)
    data = str(running.folder / "text.txt")
    program = running.start(
        "program", str(spec), data, str(running.folder), command=(sys.executable, "-c", TAKES_PART)
    )
    assert running.wait(program, ANSWER_S) == 0, running.describe()
    line, num_letters, num_pieces = json.loads(program.output().splitlines()[-1])
    assert line.startswith(str(running.folder / "model"))
    assert num_letters > 0
    assert num_pieces > 1
    assert load_file(running.folder / "model" / "model.safetensors")
    assert processes_of(running.folder) == {}


def test_ctrl_c_ends_a_program_in_good_order(running: Machine) -> None:
    program = running.start(
        "program",
        str(tiny_run(running.folder, rounds=100_000)),
        "waits",
        command=(sys.executable, "-c", LEAVES),
    )
    running.until(lambda: program.output() or program.process.poll())
    program.process.send_signal(signal.SIGINT)
    assert running.wait(program) != 0
    assert "KeyboardInterrupt" in "\n".join(program.errors())
    assert processes_of(running.folder) == {}
