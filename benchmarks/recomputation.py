"""How near do honest replicas come to the tolerance of audits?

Replicas of a small Llama compute the same microbatches: in fp32, bf16 and fp16, with 1 and 2
threads, with graphs kept or made again, with the samples of a batch together or one by one, on a
GPU where there is one, and with every codec at the boundaries.

    python -m benchmarks.recomputation --minutes 5
    python -m benchmarks.recomputation --recomputations 100000 --layers 1  # hours on one core
    python -m benchmarks.recomputation --recomputations 100000 --layers 1 --record found.json

With `--record` the same command goes on where it was ended, on that machine or another one, until
so many are made.

A recomputation is one microbatch through one stage, as `swarmnet.protocol.audit` has it judged. The
largest difference of any array, or loss, is printed beside the tolerance, for each codec, and of
which pair it was. Exit code 1 where one is above half of its tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from swarmnet.files import write_whole
from swarmnet.ports import StageResult
from swarmnet.protocol.audit import TOLERANCES
from swarmnet.protocol.codecs import BOUNDARY_CODECS
from swarmnet.spec import RunSpec, parse_spec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array

NUM_STAGES, MICROBATCH, LENGTH, WIDTH = 3, 4, 16, 64
AT_THESE_PARAMETERS = 4
"""Microbatches; other parameters cost as much as some of these."""
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Way:
    """How a replica computes."""

    precision: str
    num_threads: int = 1
    activations: str = "keep"
    is_one_by_one: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        parts = [self.precision, self.device, f"{self.num_threads} threads", self.activations]
        return ", ".join([*parts, "one by one"] if self.is_one_by_one else parts)


@dataclass(slots=True)
class Worst:
    """The largest difference of a codec."""

    num: int = 0
    difference: float = 0.0
    of: str = ""


def spec_of(folder: Path, codec: str, layers: int) -> RunSpec:
    """A Llama of 9 M numbers at most, on text that is made here."""
    text, rng = folder / "text.txt", random.Random(0)
    if not text.exists():
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 7))) for _ in range(300)]
        text.write_text(" ".join(rng.choices(words, k=30_000)))
    return parse_spec(f"""
seed = 1
[model]
kind = "llama"
hidden_size = {WIDTH}
num_hidden_layers = {NUM_STAGES * layers}
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = {2 * WIDTH}
vocab_size = 256
max_position_embeddings = {LENGTH}
[data]
paths = ["{text}"]
tokenizer = "bytes"
[optimizer]
learning_rate = 1e-3
warmup_rounds = 1
rounds = 10
[pipeline]
num_stages = {NUM_STAGES}
global_batch = 16
microbatch = {MICROBATCH}
codec = "{codec}"
""")


class Replica:
    """All stages of a run, computed in one way."""

    def __init__(self, spec: RunSpec, way: Way) -> None:
        computing: Any = {"precision": way.precision, "activations": way.activations}
        self.way = way
        self.stages = [
            build_stage(spec, i, computing=Computing(**computing), device=way.device)
            for i in range(NUM_STAGES)
        ]

    def disturb(self, rng: random.Random, size: float) -> None:
        """Other parameters, the same for equal generators: as after some training."""
        for stage in self.stages:
            for j in range(len(stage.shard_sizes)):
                values = torch.frombuffer(
                    bytearray(stage.parameter_shard(j).data), dtype=torch.float32
                )
                noise = torch.Generator().manual_seed(rng.getrandbits(32))
                changed = values + size * torch.randn(values.shape, generator=noise)
                stage.stage_parameters(
                    j, Array("float32", tuple(values.shape), changed.numpy().data.cast("B"))
                )
            stage.finish_round()

    def again(self, i: int, key: tuple[int, int], taken: tuple[Any, ...]) -> StageResult:
        """What it makes of a stage's microbatch."""
        torch.set_num_threads(self.way.num_threads)
        stage = self.stages[i]
        if self.way.is_one_by_one:
            with one_by_one(stage):
                return stage.recompute_pass(key, *taken)()
        return stage.recompute_pass(key, *taken)()


@contextlib.contextmanager
def one_by_one(stage: TorchStage) -> Iterator[None]:
    """In this context the layers of a stage get one sample after the other."""
    layers: Any = stage.layers
    run = layers.run

    def each(key: Any, x: torch.Tensor, context: Any = None) -> torch.Tensor:
        return torch.cat([run(key, part, context) for part in x.split(1)])

    layers.run = each
    try:
        yield
    finally:
        del layers.run


def microbatch(replica: Replica, n: int) -> list[tuple[tuple[Any, ...], StageResult]]:
    """A microbatch through all stages and back: what each one took and gave."""
    torch.set_num_threads(replica.way.num_threads)
    key, stages = (0, n), replica.stages
    drawn = torch.Generator().manual_seed(n)
    tokens = torch.randint(256, (MICROBATCH, LENGTH + 1), dtype=torch.int32, generator=drawn)
    inputs, targets = (from_tensor(t.contiguous()) for t in (tokens[:, :-1], tokens[:, 1:]))
    taken = [inputs]
    for stage in stages[:-1]:
        taken.append(stage.forward(key, taken[-1]))
    loss = stages[-1].forward_backward(key, taken[-1], targets)
    below = loss.grad_inputs
    results: list[tuple[tuple[Any, ...], StageResult]] = [
        ((taken[-1], targets, None), StageResult(None, below, loss.loss_sum, loss.num_tokens))
    ]
    for i in reversed(range(NUM_STAGES - 1)):
        above = below
        assert above is not None
        below = stages[i].backward(key, above)
        results.append(((taken[i], targets, above), StageResult(taken[i + 1], below)))
    for stage in stages:
        stage.forget(key)
    return results[::-1]


def ways(devices: list[str]) -> list[Way]:
    """All that are compared."""
    found = [Way(p) for p in PRECISIONS] + [Way("fp32", num_threads=2)]
    found += [Way(p, activations="recompute") for p in PRECISIONS]
    found += [Way(p, is_one_by_one=True) for p in PRECISIONS]
    return found + [Way(p, device=d) for p in PRECISIONS for d in devices]


def read(record: Path | None) -> dict[str, Worst]:
    """By codec; what was found before, where there is such a file."""
    found = {codec: Worst() for codec in BOUNDARY_CODECS}
    if record is not None and record.exists():
        told = json.loads(record.read_text())
        found |= {codec: Worst(**values) for codec, values in told.items()}
    return found


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="5 where no number is given either")
    parser.add_argument("--recomputations", type=int, help="ends when so many are made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2, help="a stage")
    parser.add_argument("--record", type=Path, help="keeps what was found, and goes on from it")
    options = parser.parse_args()
    devices = ["cuda"] if torch.cuda.is_available() else []
    minutes = options.minutes or (math.inf if options.recomputations else 5.0)
    most, until_s = options.recomputations or math.inf, time.monotonic() + 60 * minutes
    worst = read(options.record)
    made = sum(w.num for w in worst.values())
    rng = random.Random(f"{options.seed}|{made}" if made else options.seed)
    with tempfile.TemporaryDirectory() as folder:
        specs = {c: spec_of(Path(folder), c, options.layers) for c in BOUNDARY_CODECS}
        replicas = {c: [Replica(s, way) for way in ways(devices)] for c, s in specs.items()}
    while time.monotonic() <= until_s and sum(w.num for w in worst.values()) < most:
        codec = min(BOUNDARY_CODECS, key=lambda c: worst[c].num)
        measure(replicas[codec], rng, worst[codec])
        if options.record is not None:
            told = {c: asdict(found) for c, found in worst.items()}
            write_whole(options.record, json.dumps(told))
        largest = max(w.difference / TOLERANCES[c] for c, w in worst.items())
        num = sum(w.num for w in worst.values())
        print(f"\r{num:,} recomputations, {largest:.3f} of the tolerance", end="", file=sys.stderr)
    print(file=sys.stderr)
    print("codec  recomputations  largest difference  tolerance  of")
    for codec, found in worst.items():
        tolerance = TOLERANCES[codec]
        print(f"{codec:6} {found.num:14,} {found.difference:19.4f} {tolerance:10.2f}  {found.of}")
    print(f"{sum(w.num for w in worst.values()):,} recomputations")
    return int(any(w.difference > TOLERANCES[codec] / 2 for codec, w in worst.items()))


def measure(replicas: list[Replica], rng: random.Random, worst: Worst) -> None:
    """A few microbatches at parameters drawn anew, each computed by one and again by all others."""
    seed, size = rng.random(), 10 ** rng.uniform(-4, -1.5)
    for replica in replicas:
        replica.disturb(random.Random(seed), size)
    for _ in range(AT_THESE_PARAMETERS):
        one, *others = rng.sample(replicas, len(replicas))
        n = rng.getrandbits(20)
        for i, (taken, given) in enumerate(microbatch(one, n)):
            for other in others:
                difference = other.stages[i].difference(other.again(i, (0, n), taken), given)
                worst.num += 1
                if not difference <= worst.difference:
                    worst.difference = difference
                    worst.of = f"stage {i}: {one.way} / {other.way}"


if __name__ == "__main__":
    sys.exit(main())
