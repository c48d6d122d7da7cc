"""Real swarms on one device beside a plain loop of transformers' Llama. For `benchmarks/gpu.py`.

The plain loop: autocast, fused AdamW, gradients clipped, the same model, sequences and samples a
step, without a network; with `--compile` once more through `torch.compile`. Then `swarmnet local`
with the same model as its own run, whose peers share the device: one in one stage, and four in two
stages of two, which work all the time where the next round is fed meanwhile (`delayed`, a large
batch). What the device makes inside a round is what such a run of as many peers makes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarmnet.protocol.sync_modes import DELAYED, ZERO

VOCABULARY = 256
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
WARM_STEPS, STEPS = 2, 5
WARM_ROUNDS, ROUNDS = 3, 6
LONGEST_S = 500.0
STOP_S = 60.0


@dataclass(frozen=True)
class Size:
    """Of the model, and of a round."""

    width: int
    layers: int
    length: int
    samples: int
    many_samples: int
    """Of a round in which the device has work all the time."""
    microbatch: int

    def model(self) -> dict[str, int]:
        """Names are those of transformers and of `[model]`."""
        return {
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 64,
            "num_key_value_heads": self.width // 64,
            "intermediate_size": self.width * 11 // 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": self.length,
        }


FULL = Size(1024, 12, 1024, 512, 2048, 8)
TINY = Size(128, 4, 128, 64, 256, 8)


@dataclass(frozen=True)
class Swarm:
    """Of peers on this device."""

    peers: int
    stages: int
    mode: str

    def __str__(self) -> str:
        return f"{self.peers} peer{'s' * (self.peers > 1)}, {self.stages} x " + (
            f"{self.peers // self.stages}, {self.mode}"
        )


PAIRS = (
    (Swarm(1, 1, ZERO), Swarm(1, 1, DELAYED)),
    (Swarm(4, 2, ZERO), Swarm(4, 2, DELAYED)),
)
"""Each beside the one that has work all the time."""


def plain_rate(size: Size, device: torch.device, dtype: torch.dtype, compiled: bool) -> float:
    """Tokens/s of the plain loop, the median step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**size.model())).to(device)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    if compiled:
        model = torch.compile(model)
    shape = (size.microbatch, size.length)
    tokens = torch.randint(VOCABULARY, shape, device=device)
    passes = size.samples // size.microbatch
    cast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
    seconds = []
    for _ in range(WARM_STEPS + STEPS):
        wait_for(device)
        start_s = time.perf_counter()
        for _ in range(passes):
            with cast:
                loss = model(input_ids=tokens, labels=tokens).loss / passes
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        wait_for(device)
        seconds.append(time.perf_counter() - start_s)
    return size.samples * size.length / statistics.median(seconds[WARM_STEPS:])


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spec_text(size: Size, swarm: Swarm, codec: str, rounds: int) -> str:
    """A run.toml."""
    model = "\n".join(f"{name} = {value}" for name, value in size.model().items())
    samples = size.samples if swarm.mode == ZERO else size.many_samples
    return f"""[model]
kind = "llama"
{model}

[data]
paths = ["python-stdlib"]
tokenizer = "bytes"
sequence_length = {size.length}
held_out_fraction = 0.0

[optimizer]
learning_rate = {LEARNING_RATE}
rounds = {rounds}

[pipeline]
num_stages = {swarm.stages}
global_batch = {samples}
microbatch = {size.microbatch}
codec = "{codec}"

[sync]
mode = "{swarm.mode}"
warmup_rounds = 1
codec = "{codec}"
"""


def swarm_rate(size: Size, swarm: Swarm, codec: str, options: list[str]) -> float:
    """Tokens/s of its rounds after the first ones. `options`: more of `swarmnet local`."""
    rounds = WARM_ROUNDS + ROUNDS
    with tempfile.TemporaryDirectory(prefix="swarmnet-gpu-") as name:
        spec, metrics = Path(name) / "run.toml", Path(name) / "metrics.jsonl"
        spec.write_text(spec_text(size, swarm, codec, rounds))
        command = [
            *(sys.executable, "-m", "peer", "local", "--plain", "--spec", str(spec)),
            *("--peers", str(swarm.peers), "--metrics", str(metrics), *options),
        ]
        with _running(command, Path(name) / "output"):
            tokens, seconds = _seen(metrics, rounds)
    return tokens / seconds


@contextmanager
def _running(command: list[str], output: Path) -> Iterator[None]:
    """A command that has to end by itself with 0; else what it printed last is told."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            yield
            process.wait(STOP_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(STOP_S)
            if process.returncode:
                print("\n".join(output.read_text(errors="replace").splitlines()[-20:]))


def _seen(metrics: Path, rounds: int) -> tuple[int, float]:
    """(tokens, seconds) of the rounds after the first ones, when the last one is there."""
    began = time.monotonic()
    while time.monotonic() - began < LONGEST_S:
        time.sleep(0.2)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        found = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # it is being written
            if event.get("event") == "round":
                found.append(event)
        if found and found[-1]["round"] >= rounds - 1:
            late = [e for e in found if e["round"] >= WARM_ROUNDS]
            return sum(e["tokens"] for e in late), sum(e["seconds"] for e in late)
    raise TimeoutError(f"{rounds} rounds took more than {LONGEST_S:.0f} s")


def print_table(
    size: Size,
    device: torch.device,
    dtype: torch.dtype,
    codec: str,
    *,
    compiled: bool,
    peak_flops: float,
    flops_a_token: float,
    options: list[str],
) -> None:
    """Runs all of it, one after the other, and prints a line for each as it is there."""

    def line(name: str, rate: float, beside: str = "") -> None:
        print(f"| {name} | {rate:,.0f} | {rate * flops_a_token / peak_flops:.2f} | {beside} |")

    print("| what | tokens/s | MFU | beside |\n|---|---|---|---|")
    plain = plain_rate(size, device, dtype, compiled=False)
    line("plain loop", plain)
    if compiled:
        rate = plain_rate(size, device, dtype, compiled=True)
        line("plain loop, compiled", rate, f"{rate / plain:.2f} of the plain loop")
        options = [*options, "--compile"]
    for swarm, busy in PAIRS:
        most = swarm_rate(size, busy, codec, options)
        line(str(busy), most, f"{most / plain:.2f} of the plain loop")
        rate = swarm_rate(size, swarm, codec, options)
        line(
            str(swarm),
            rate,
            f"{rate / most:.2f} of the line above, {rate / plain:.2f} of the plain loop",
        )
