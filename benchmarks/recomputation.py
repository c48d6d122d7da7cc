"""How near do honest replicas come to the tolerance of audits?

Replicas of small models of several families compute the same microbatches: in fp32, bf16 and fp16,
with 1, 2 and 3 threads, with graphs kept, made again or written to the disk, with the samples of a
batch together or one by one, on a GPU where there is one, and with every codec at the boundaries.

    python -m benchmarks.recomputation --minutes 5
    python -m benchmarks.recomputation --recomputations 100000 --record found.json  # 15 min of CPU
    python -m benchmarks.recomputation --model experts --minutes 5

With `--record` the same command goes on where it was ended, on that machine or another one, until
so many are made.

A recomputation is one microbatch through one stage, as `swarmnet.protocol.audit` has it judged. The
largest difference of any array, or loss, is printed as a share of the tolerance: for each model and
codec, and for each pair of precisions. Exit code 1 where one is above half of its tolerance.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from swarmnet.files import write_whole
from swarmnet.ports import StageResult
from swarmnet.protocol.audit import TOLERANCES
from swarmnet.protocol.codecs import BOUNDARY_CODECS
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.models.model_config import load_config
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array

NUM_STAGES = 3
AT_THESE_PARAMETERS = 4
"""Microbatches; other parameters cost as much as some of these."""
TURN = 2
"""Parameters that replicas get before those of the next model are built."""
PRECISIONS = ("fp32", "bf16", "fp16")
VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained, and on which microbatches."""

    values: dict[str, Any]
    """Of `[model]`, beside sizes that are common to all."""
    microbatch: int = 4
    length: int = 16


def llama(width: int, heads: int, **more: Any) -> dict[str, Any]:
    """The built-in model."""
    return {
        "kind": "llama",
        "hidden_size": width,
        "num_hidden_layers": NUM_STAGES,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "intermediate_size": 2 * width,
        "vocab_size": VOCABULARY,
    } | more


def family(kind: str, **more: Any) -> dict[str, Any]:
    """One of transformers. None: it does not know that size."""
    sizes = llama(32, 4, max_position_embeddings=64) | {"kind": None, "model_type": kind} | more
    config = load_config({name: size for name, size in sizes.items() if size is not None})
    return {"kind": "transformers", "config": config.canonical_values}


MODELS = {
    "llama": Model(llama(64, 4)),
    "narrow": Model(llama(32, 2), microbatch=1, length=48),
    "wide": Model(llama(96, 6), microbatch=8, length=8),
    "experts": Model(llama(32, 4, num_experts=4, num_experts_per_tok=2)),
    "gemma2": Model(family("gemma2", head_dim=8), microbatch=2, length=24),
    "qwen2": Model(family("qwen2"), microbatch=8, length=12),
    "qwen3": Model(family("qwen3", head_dim=16), microbatch=3, length=20),
}
"""By name."""


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
    """The largest difference of some recomputations."""

    num: int = 0
    share: float = 0.0
    """Of the tolerance."""
    of: str = ""

    def found(self, share: float, of: str) -> None:
        """One more."""
        self.num += 1
        if not share <= self.share:
            self.share, self.of = share, of


Found = dict[str, Worst]
"""By model, codec and pair of precisions, with blanks between them."""


def spec_of(folder: Path, model: Model, codec: str) -> RunSpec:
    """A run of it, on text that is made here."""
    text, rng = folder / "text.txt", random.Random(0)
    if not text.exists():
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 7))) for _ in range(300)]
        text.write_text(" ".join(rng.choices(words, k=30_000)))
    positions = {"max_position_embeddings": 64} if model.values["kind"] == "llama" else {}
    values = {
        "seed": 1,
        "model": model.values | positions,
        "data": {"paths": [str(text)], "tokenizer": "bytes", "sequence_length": model.length},
        "optimizer": {"learning_rate": 1e-3, "warmup_rounds": 1, "rounds": 10},
        "pipeline": {
            "num_stages": NUM_STAGES,
            "global_batch": 4 * model.microbatch,
            "microbatch": model.microbatch,
            "codec": codec,
        },
    }
    return RunSpec.model_validate(values)


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


def microbatch(replica: Replica, model: Model, n: int) -> list[tuple[tuple[Any, ...], StageResult]]:
    """A microbatch through all stages and back: what each one took and gave."""
    torch.set_num_threads(replica.way.num_threads)
    key, stages = (0, n), replica.stages
    drawn = torch.Generator().manual_seed(n)
    shape = (model.microbatch, model.length + 1)
    tokens = torch.randint(VOCABULARY, shape, dtype=torch.int32, generator=drawn)
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
    found = [Way(p) for p in PRECISIONS]
    found += [Way("fp32", num_threads=2), Way("bf16", num_threads=2), Way("fp32", num_threads=3)]
    found += [Way(p, activations="recompute") for p in PRECISIONS]
    found += [Way("fp32", activations="blocks"), Way("bf16", activations="offload")]
    found += [Way(p, is_one_by_one=True) for p in PRECISIONS]
    return found + [Way(p, device=d) for p in PRECISIONS for d in devices]


def read(record: Path | None) -> Found:
    """What was found before, where there is such a file."""
    if record is None or not record.exists():
        return {}
    return {name: Worst(**values) for name, values in json.loads(record.read_text()).items()}


def measure(replicas: list[Replica], model: Model, rng: random.Random) -> Iterator[tuple[Any, ...]]:
    """A few microbatches at parameters drawn anew, each computed by one and again by all others:
    the difference, the stage, and the ways of both."""
    seed, size = rng.random(), 10 ** rng.uniform(-4, -1.5)
    for replica in replicas:
        replica.disturb(random.Random(seed), size)
    for _ in range(AT_THESE_PARAMETERS):
        one, *others = rng.sample(replicas, len(replicas))
        n = rng.getrandbits(20)
        for i, (taken, given) in enumerate(microbatch(one, model, n)):
            for other in others:
                difference = other.stages[i].difference(other.again(i, (0, n), taken), given)
                yield difference, i, one.way, other.way


def turn(name: str, codec: str, rng: random.Random, worst: Found) -> None:
    """Builds the replicas of a model, and measures at some parameters."""
    model = MODELS[name]
    devices = ["cuda"] if torch.cuda.is_available() else []
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(Path(folder), model, codec)
        replicas = [Replica(spec, way) for way in ways(devices)]
        for _ in range(TURN):
            for difference, i, one, other in measure(replicas, model, rng):
                pair = "/".join(sorted({one.precision, other.precision}, key=PRECISIONS.index))
                found = worst.setdefault(f"{name} {codec} {pair}", Worst())
                found.found(difference / TOLERANCES[codec], f"stage {i}: {one} / {other}")


def total(worst: Found, part: str = "") -> int:
    """Recomputations, of all or of one model and codec."""
    return sum(found.num for name, found in worst.items() if name.startswith(part))


def table(worst: Found, parts: Sequence[int]) -> None:
    """Prints the largest shares by these parts of the names."""
    rows: Found = {}
    for name, found in worst.items():
        row = rows.setdefault(" ".join(name.split()[part] for part in parts), Worst())
        row.num += found.num
        if not found.share <= row.share:
            row.share, row.of = found.share, found.of
    for name, row in sorted(rows.items()):
        print(f"| {name} | {row.num:,} | {row.share:.3f} | {row.of} |")


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="5 where no number is given either")
    parser.add_argument("--recomputations", type=int, help="ends when so many are made")
    parser.add_argument("--model", choices=MODELS, action="append", help="all, if none is named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="keeps what was found, and goes on from it")
    options = parser.parse_args()
    minutes = options.minutes or (math.inf if options.recomputations else 5.0)
    most, until_s = options.recomputations or math.inf, time.monotonic() + 60 * minutes
    worst = read(options.record)
    made = total(worst)
    rng = random.Random(f"{options.seed}|{made}" if made else options.seed)
    kinds = [(name, codec) for codec in BOUNDARY_CODECS for name in options.model or MODELS]
    while time.monotonic() <= until_s and total(worst) < most:
        name, codec = min(kinds, key=lambda kind: total(worst, " ".join(kind) + " "))
        turn(name, codec, rng, worst)
        if options.record is not None:
            write_whole(options.record, json.dumps({n: asdict(w) for n, w in worst.items()}))
        largest = max(found.share for found in worst.values())
        print(f"\r{total(worst):,} made, {largest:.3f} of the tolerance", end="", file=sys.stderr)
    print(file=sys.stderr)
    for title, parts in ("model and codec", (0, 1)), ("codec and precisions", (1, 2)):
        print(f"| {title} | recomputations | largest share of the tolerance | of |")
        print("|---|---|---|---|")
        table(worst, parts)
        print()
    print(f"{total(worst):,} recomputations")
    return int(any(found.share > 0.5 for found in worst.values()))


if __name__ == "__main__":
    sys.exit(main())
