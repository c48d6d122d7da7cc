"""Real runs on this machine, planned and measured. For `benchmarks/planning.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from peer.planning.machines import read_links
from peer.planning.question import Found, Planner, asked, on_this_one
from swarmnet.training.memory.plan import PRECISIONS
from swarmnet.training.memory.stage_table import memory_of

ROUNDS, WARM_ROUNDS = 9, 3
PEAK_ROUNDS = 3
LONGEST_S = 900.0
PEAK_FOLDER = "SWARMNET_PEAK_FOLDER"
METER = """
import json, os, sys, threading, weakref
FOLDER = os.environ.get("SWARMNET_PEAK_FOLDER", "")
if FOLDER and "peer" in sys.orig_argv:
    import atexit
    state = {}
    def meter():
        if "meter" not in state:
            from benchmarks.memory import PeakMeter
            from swarmnet.training.passes.kept import KeptMicrobatches
            tables, init = weakref.WeakSet(), KeptMicrobatches.__init__
            def begun(self, **about):
                init(self, **about)
                tables.add(self)
            KeptMicrobatches.__init__ = begun
            class Shared(PeakMeter):
                lock = threading.RLock()
                in_flight = 0
                def see(self, tensor):
                    with self.lock:
                        before = self.peak_bytes
                        seen = super().see(tensor)
                        if self.peak_bytes > before:
                            self.in_flight = sum(x.num_in_flight for x in list(tables))
                        return seen
                def _gone(self, *about):
                    with self.lock:
                        super()._gone(*about)
            state["meter"] = Shared
            state["one"] = Shared()
        return state["one"]
    run = threading.Thread.run
    def metered(self):
        if "torch" not in sys.modules:
            return run(self)
        from torch.utils._python_dispatch import _pop_mode, _push_mode
        with meter():
            return run(self)
    threading.Thread.run = metered
    def told():
        if "one" in state:
            with open(os.path.join(FOLDER, str(os.getpid())), "w") as file:
                json.dump((state["one"].peak_bytes, state["one"].in_flight), file)
    atexit.register(told)
"""
"""Of the module that Python imports first: counts what threads make of tensors, and microbatches in
flight when that is most."""


@dataclass(frozen=True)
class Shape:
    """A run."""

    name: str
    peers: int
    stages: int = 1
    batch: int = 64
    microbatch: int = 8
    codec: str = "none"
    mode: str = "zero"
    sync_codec: str = "none"
    lora: bool = False
    width: int = 256
    layers: int = 4


SHAPES = (
    Shape("one stage, one peer", 1),
    Shape("two stages", 2, 2),
    Shape("two replicas, int8 updates", 2, sync_codec="int8"),
    Shape("two stages of int8, small microbatches", 2, 2, microbatch=2, codec="int8"),
    Shape("two stages of two, delayed, int4", 4, 2, 128, codec="int4", mode="delayed"),
    Shape("adapters in two stages", 2, 2, lora=True),
)


@dataclass
class Measured:
    """What a run came to."""

    tokens_per_s: float
    cpu_s: float
    """Of all peers, for a thousand tokens."""
    peaks: list[tuple[int, int]] = field(default_factory=list)
    """Of each peer: bytes, and microbatches in flight at that moment."""


def spec_text(shape: Shape, folder: Path) -> str:
    if shape.lora:
        tokenizer = ""
        model = f'from = "{folder / "model"}"\n\n[lora]\nr = 8\n'
    else:
        tokenizer = 'tokenizer = "bytes"\n'
        model = (
            f'kind = "llama"\nhidden_size = {shape.width}\nnum_hidden_layers = {shape.layers}\n'
            "num_attention_heads = 4\nnum_key_value_heads = 4\nvocab_size = 256\n"
            f"intermediate_size = {shape.width * 11 // 4}\nmax_position_embeddings = 128\n"
        )
    return f"""[model]
{model}
[data]
paths = ["python-stdlib"]
include = ["a*.py"]
{tokenizer}sequence_length = 128
held_out_fraction = 0.0

[optimizer]
learning_rate = 1e-3
rounds = {ROUNDS}

[pipeline]
num_stages = {shape.stages}
global_batch = {shape.batch}
microbatch = {shape.microbatch}
codec = "{shape.codec}"

[sync]
mode = "{shape.mode}"
codec = "{shape.sync_codec}"
"""


def _make_model(folder: Path, shape: Shape) -> None:
    """A small Llama with random weights and a token a byte, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=shape.width,
        intermediate_size=shape.width * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))


def planned(path: Path, shape: Shape) -> Found:
    """As `swarmnet plan --machines here*N` does it."""
    question = asked(path, lora=False, choose=False)
    timed = on_this_one(question.spec, "auto", "cpu", shape.peers)
    planner = Planner(timed.described, read_links("10Gbit,0.1ms"), "auto", timed.seconds)
    found = planner.answer(question)
    assert found is not None
    return found


def _cpu_s(process: psutil.Popen) -> float:
    total = 0.0
    for child in process.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def run(path: Path, shape: Shape, rounds: int, more: Mapping[str, str] = {}) -> Measured:
    """Runs it with `swarmnet local`, and looks at its rounds after the first ones."""
    metrics = path.parent / f"metrics-{time.time_ns()}.jsonl"
    command = [
        *(sys.executable, "-m", "peer", "local", "--plain", "--spec", str(path)),
        *("--peers", str(shape.peers), "--rounds", str(rounds), "--metrics", str(metrics)),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | dict(more)
    began, tokens, seconds, cpu = time.monotonic(), 0, 0.0, [0.0, 0.0]
    process = psutil.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=environment
    )
    try:
        for event in _events(metrics, process, began):
            if event.get("event") != "round" or event["round"] < WARM_ROUNDS - 1:
                continue
            if event["round"] == WARM_ROUNDS - 1:
                cpu[0] = _cpu_s(process)
                continue
            tokens += event["tokens"]
            seconds += event["seconds"]
            cpu[1] = _cpu_s(process)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
    if rounds > WARM_ROUNDS and not tokens:
        raise RuntimeError(f"{shape.name}: no round was seen; see {' '.join(command)}")
    return Measured(
        tokens / seconds if seconds else 0.0, (cpu[1] - cpu[0]) / tokens * 1000 if tokens else 0.0
    )


def _events(path: Path, process: psutil.Popen, began: float) -> Iterator[dict[str, Any]]:
    """Lines of the metrics, as they come."""
    seen = 0
    while time.monotonic() - began < LONGEST_S:
        ended = process.poll() is not None
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for line in lines[seen:]:
            if line.endswith("\n"):
                seen += 1
                yield json.loads(line)
        if ended:
            return
        time.sleep(0.1)


@contextmanager
def _metered(folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    peaks, module = folder / "peaks", folder / "first"
    peaks.mkdir()
    module.mkdir()
    (module / "sitecustomize.py").write_text(METER)
    root = str(Path(__file__).resolve().parents[1])
    yield {"PYTHONPATH": os.pathsep.join((str(module), root)), PEAK_FOLDER: str(peaks)}, peaks


def compare(shape: Shape) -> tuple[Found, Found, Measured]:
    """(the plan before the run, the plan after it, the run)."""
    with tempfile.TemporaryDirectory(prefix="swarmnet-planned-") as name:
        folder = Path(name)
        if shape.lora:
            _make_model(folder, shape)
        path = folder / "run.toml"
        path.write_text(spec_text(shape, folder))
        before = planned(path, shape)
        layers = [end - first for first, end in before.plan.cut]
        path.write_text(  # as `swarmnet plan --write`
            path.read_text().replace("[pipeline]\n", f"[pipeline]\nlayers = {layers}\n")
        )
        found = run(path, shape, ROUNDS)
        after = planned(path, shape)
        with _metered(folder) as (more, peaks):
            run(path, shape, PEAK_ROUNDS, more)
            told = [json.loads(p.read_text()) for p in peaks.iterdir()]
            found.peaks = sorted((int(peak), int(in_flight)) for peak, in_flight in told)
        return before, after, found


def line(shape: Shape) -> str:
    """A row of the table."""
    before, after, found = compare(shape)
    rates = [f.plan.round.tokens_per_s for f in (before, after)]
    planned_rate = sum(rates) / 2
    peak, in_flight = max(found.peaks)
    planned_peak, expected, with_as_many = planned_peaks(before, in_flight)
    return (
        f"| {shape.name} | {planned_rate:,.0f} | {found.tokens_per_s:,.0f} | "
        f"{planned_rate / found.tokens_per_s:.2f} | {1000 * _pass_s(before):.3f} | "
        f"{found.cpu_s:.3f} | {planned_peak / 1e6:.1f}, {expected} | {peak / 1e6:.1f}, "
        f"{in_flight} | {planned_peak / peak:.2f} | {with_as_many / peak:.2f} | "
        f"{os.getloadavg()[0]:.1f} |"
    )


def planned_peaks(found: Found, in_flight: int) -> tuple[float, int, float]:
    """(bytes of the peer with most, its microbatches in flight, bytes with `in_flight`)."""
    costs, cut, machine = found.costs, found.plan.cut, found.machines[0]
    held = {stage: costs.held(*stage, len(cut), machine) for stage in cut}
    of_stages = {stage: one for stage, one in held.items() if one is not None}
    most = max(of_stages, key=lambda stage: of_stages[stage].device_bytes)
    one = of_stages[most]
    kept = found.table.needs(*most, PRECISIONS[memory_of(machine).precision]).activations
    assert kept is not None
    more, less = (kept.held(one.activations, n)[0] for n in (in_flight, one.in_flight))
    return one.device_bytes, one.in_flight, one.device_bytes + more - less


def _pass_s(found: Found) -> float:
    """Of all passes for a token, seconds of one machine."""
    job = found.costs.job
    flops = (1 + job.backward) * found.costs.flops(0, len(job.layers))
    return flops / found.machines[0].flops_per_s / job.tokens
