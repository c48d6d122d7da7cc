"""Sparse contributions and sparse results in mode `local`: loss over the bytes that are sent.

    python benchmarks/sparse_updates.py [--seeds 1] [--seconds 600]
    python benchmarks/sparse_updates.py --tables

Four replicas in one process, stacked in one tensor, each with AdamW of its own, predict the next
byte of Python sources from the eight before it: embedding, two gated layers, head. There is an
exchange every 30 rounds, 110 of them, after 60 rounds with the plain mean of every step. All codes
are counted, of the last exchange too, which has no sparse ones, and none of the first 60 rounds.

Ways, with what they send in the three directions (to the primary, to its backup, back):

- `fp32`, `mean`: nothing is coded; Nesterov's momentum on the mean change, and the plain mean.
- `topk`: as the default codes: half of the numbers, `int6`, `int4`, and the momentum.
- `built D`: what is built, with `[sync] topk_density = D`: codec, outer step and bytes are those of
  `swarmnet`. It does as `momentum K 0.5` with K of it. `built D N`: after every N exchanges another
  replica leads, which has nothing of the momentum and of what was left out.
- `momentum K F`: K of 4,096 numbers of contributions, with 0.8 of the errors. The primary makes the
  step of `fp32`, and sends K numbers of it, with F of what it has not sent before.
- `mean K F`: the same, with 0.95 of the errors, and the plain mean in place of the step.
- `before K F`: each replica has the momentum, of its own change, before it sends K numbers of it.
  What is sent leaves the momentum. The plain mean, and K numbers of results, as in `momentum`.
- `union K`: as `mean`, but results are whole: each number that any replica has sent, in 4 bits.

Backups get results in place of sums where K is given. Each run adds a line to
`benchmarks/results/sparse_updates.jsonl`; one that is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.runs import this_platform  # noqa: E402
from swarmnet.protocol.codecs import (  # noqa: E402
    CHUNK,
    INT4,
    INT6,
    KEPT,
    TOPK,
    kept_by,
    row_bytes,
    sparse_codec,
    update_codec,
)
from swarmnet.training.arrays import from_tensor, to_tensor  # noqa: E402
from swarmnet.training.codecs.registry import codec_of  # noqa: E402
from swarmnet.training.codecs.shards import TorchShardCodec  # noqa: E402
from swarmnet.training.optimizer import adamw  # noqa: E402
from swarmnet.training.optimizer.outer import OuterNesterov  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sparse_updates.jsonl"
REPLICAS, OWNERS = 4, 2
STEPS, WARMUP, EXCHANGES = 30, 60, 110
CONTEXT, EMBEDDED, WIDTH, INNER, LAYERS, BATCH = 8, 16, 64, 128, 2, 32
HELD_OUT = 16384
RATE, RATE_WARMUP, DECAY = 4e-3, 60, 0.1
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
WAYS = (
    "fp32",
    "topk",
    "union 64",
    "mean 256 0",
    "momentum 256 0",
    "before 256 0",
    "before 192 0",
    "before 128 0",
    "momentum 128 0",
    "momentum 256 1",
    "mean 256 0.5",
    "momentum 256 0.5",
    "momentum 208 0.5",
    "momentum 192 0.5",
    "built 0.05",
    "built 0.05 20",
    "built 0.05 5",
    "before 256 0.5",
    "union 128",
    "mean",
    "momentum 1024 0.5",
    "momentum 1024 0",
    "before 1024 0",
    "union 256",
)


# ---- the model, of all replicas at once ----------------------------------------------------------


def shapes() -> list[tuple[int, ...]]:
    layer = [(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]
    return [(256, EMBEDDED), (CONTEXT * EMBEDDED, WIDTH), *layer * LAYERS, (WIDTH, 256)]


def drawn(seed: int) -> Tensor:
    """Parameters of one replica, fp32 [size]."""
    rng = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=rng) / math.sqrt(shape[0]) for shape in shapes()]
    parts[0] *= math.sqrt(256)
    return torch.cat([p.flatten() for p in parts])


def loss_of(flat_RP: Tensor, inputs_RBC: Tensor, targets_RB: Tensor) -> Tensor:
    """Of each replica, nats a byte, [R]."""
    num = flat_RP.shape[0]
    pieces = flat_RP.split([math.prod(shape) for shape in shapes()], dim=1)
    weights = [p.view(num, *shape) for p, shape in zip(pieces, shapes(), strict=True)]
    rows = torch.arange(num)[:, None, None]
    x = weights[0][rows, inputs_RBC].flatten(2) @ weights[1]
    for k in range(LAYERS):
        gate, up, down = weights[2 + 3 * k : 5 + 3 * k]
        normed = functional.rms_norm(x, (WIDTH,))
        x = x + (functional.silu(normed @ gate) * (normed @ up)) @ down
    logits = functional.rms_norm(x, (WIDTH,)) @ weights[-1]
    losses = functional.cross_entropy(logits.flatten(0, 1), targets_RB.flatten(), reduction="none")
    return losses.view(num, -1).mean(1)


class Text:
    """Sources of Python's library, a byte each."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        whole = b"\n".join(file.read_bytes() for file in files)[: 1 << 22]
        self._bytes = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
        self._end = len(whole) - HELD_OUT - 2 * CONTEXT

    def at(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [..., C] and targets [...]."""
        places = starts[..., None] + torch.arange(CONTEXT)
        return self._bytes[places], self._bytes[starts + CONTEXT]

    def batch(self, seed: int, round_index: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(1_000_000 * seed + round_index)
        return self.at(torch.randint(self._end, (REPLICAS, BATCH), generator=rng))

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self.at(self._end + CONTEXT + torch.arange(HELD_OUT))


# ---- codes ---------------------------------------------------------------------------------------


def sparse(values: Tensor, kept: int) -> Tensor:
    """As `topk` decodes what it has coded, with so many numbers a chunk; fp32 [size]."""
    padded = functional.pad(values, (0, -values.numel() % CHUNK)).view(-1, CHUNK)
    places = padded.abs().topk(kept, dim=1, sorted=False).indices
    numbers = padded.gather(1, places)
    sizes = numbers.abs()
    is_large = sizes > sizes.mean(1, keepdim=True)
    low, high = (
        ((sizes * of).sum(1, keepdim=True) / of.sum(1, keepdim=True).clamp_min(1))
        .to(torch.bfloat16)
        .float()
        for of in (~is_large, is_large)
    )
    levels = torch.where(is_large, high, low) * numbers.sign()
    return torch.zeros_like(padded).scatter_(1, places, levels).flatten()[: values.numel()]


def sparse_bytes(size: int, kept: int) -> float:
    """Places as 12 bits each or as a bit for all, whichever is less; 2 bits; two levels."""
    places = min(12 * kept, CHUNK)
    return -(-size // CHUNK) * ((places + 2 * kept) / 8 + 4)


def dense(values: Tensor, name: str) -> Tensor:
    codec = codec_of(name)
    return codec.decode(codec.encode(values[None]), values.numel())[0]


class Sent:
    """Bytes of a replica, on average, in the three directions."""

    def __init__(self, size: int) -> None:
        self._size, self.total = size, 0.0

    def add(self, contribution: float, backup: float, result: float) -> None:
        parts = (REPLICAS - 1, OWNERS - 1, REPLICAS - OWNERS)
        found = zip(parts, (contribution, backup, result), strict=True)
        self.total += sum(part * num for part, num in found) / REPLICAS


# ---- exchanges -----------------------------------------------------------------------------------


class Exchange:
    """The outer step of a way. What is kept of it between two."""

    def __init__(self, way: str, size: int) -> None:
        self.name, kept, left, *_ = *way.split(), "0", "0"
        self.kept, self._left = int(kept), float(left)
        self._size = size
        self.sent = Sent(size)
        self._momentum = torch.zeros(size)
        self._own_momenta = torch.zeros(REPLICAS, size)
        self._errors = torch.zeros(REPLICAS, size)
        self._lacking = torch.zeros(size)
        """Of the common parameters, to those that the primary has."""

    def plain(self, common: Tensor, changes: Tensor) -> Tensor:
        """Of the rounds of the warm-up."""
        return common - changes.mean(0)

    def last(self, common: Tensor, changes: Tensor) -> Tensor:
        """The plain mean of all that there is, in `int6` and `int4` where other codes are sparse;
        what has waited so far is given up but for what lies at the primary."""
        if self.name in ("fp32", "mean") and not self.kept:
            self.sent.add(*[4.0 * self._size] * 3)
            return common - changes.mean(0)
        six, four = (row_bytes(name, self._size) for name in (INT6, INT4))
        self.sent.add(six, six, four)
        coded = torch.stack([dense(change, INT6) for change in changes])
        return common + dense(self._lacking - dense(coded.mean(0), INT6), INT4)

    def step(self, common: Tensor, changes: Tensor) -> Tensor:
        """New common parameters. `changes`: what replicas came down, [R, size]."""
        if not self.kept and self.name != TOPK:
            self.sent.add(*[4.0 * self._size] * 3)
            mean = changes.mean(0)
            return common - (self._nesterov(mean) if self.name == "fp32" else mean)
        if self.name == "before":
            self._own_momenta.mul_(OUTER_MOMENTUM).add_(changes)
            self._errors += changes + OUTER_MOMENTUM * self._own_momenta
            proposed, decay = OUTER_RATE * self._errors, 1.0
        else:
            decay = 0.95 if self.name in ("mean", "union") else 0.8
            proposed = changes + decay * self._errors
        kept = self.kept or KEPT
        coded = torch.stack([sparse(change, kept) for change in proposed])
        if self.name == "before":
            self._errors -= coded / OUTER_RATE
            self._own_momenta[coded != 0] = 0.0
        else:
            self._errors = proposed - coded
        mean = coded.mean(0)
        if self.name == TOPK:
            mean = dense(mean, INT6)
        there = sparse_bytes(self._size, kept)
        if self.name == "union":
            numbers = int((mean != 0).sum())
            self.sent.add(there, *[min(12 * numbers, self._size) / 8 + numbers / 2] * 2)
            return common - mean
        step = self._nesterov(mean) if self.name in (TOPK, "momentum") else mean
        lacking = self._lacking - step
        told = dense(lacking, INT4) if self.name == TOPK else sparse(lacking, kept)
        self._lacking = (1.0 if self.name == TOPK else self._left) * (lacking - told)
        if self.name == TOPK:
            six, four = (row_bytes(name, self._size) for name in (INT6, INT4))
            self.sent.add(there, six, four)
        else:
            self.sent.add(there, there, there)
        return common + told

    def _nesterov(self, change: Tensor) -> Tensor:
        self._momentum.mul_(OUTER_MOMENTUM).add_(change)
        return OUTER_RATE * (change + OUTER_MOMENTUM * self._momentum)


class Built:
    """An exchange by the product's own code."""

    def __init__(self, density: float, lasts: int, size: int) -> None:
        """`lasts`: exchanges with one primary; 0 for all of them."""
        name = sparse_codec(kept_by(density))
        self.sent = Sent(size)
        self._lasts, self._made = lasts, 0
        self._replicas = [TorchShardCodec(update_codec(name), [size]) for _ in range(REPLICAS)]
        self._owner = OuterNesterov([size], OUTER_RATE, OUTER_MOMENTUM, last_round=1, codec=name)
        self._owner.create(0)

    def plain(self, common: Tensor, changes: Tensor) -> Tensor:
        """Of the rounds of the warm-up, where nothing is counted."""
        return common - changes.mean(0)

    def step(self, common: Tensor, changes: Tensor, *, is_last: bool = False) -> Tensor:
        """As of `Exchange`."""
        coded = [
            codec.contribution(0, from_tensor(change), keeps_error=True, is_short=is_last)
            for codec, change in zip(self._replicas, changes, strict=True)
        ]
        summed = self._owner.sum([self._owner.codec.decoded_contribution(0, c) for c in coded])
        if self._lasts and self._made and self._made % self._lasts == 0:
            self._owner.create(0)
        self._made += 1
        made = self._owner.step(0, from_tensor(common), summed, 1 / REPLICAS, int(is_last))
        self.sent.add(coded[0].num_bytes, made[0].num_bytes, made[0].num_bytes)
        return to_tensor(made[1])

    def last(self, common: Tensor, changes: Tensor) -> Tensor:
        """As of `Exchange`."""
        return self.step(common, changes, is_last=True)


def exchange_of(way: str, size: int) -> Exchange | Built:
    """By its name."""
    name, *numbers = way.split()
    if name != "built":
        return Exchange(way, size)
    density, lasts = [*numbers, "0"][:2]
    return Built(float(density), int(lasts), size)


def rate(round_index: int, rounds: int) -> float:
    if round_index < RATE_WARMUP:
        return RATE * (round_index + 1) / RATE_WARMUP
    done = (round_index - RATE_WARMUP) / (rounds - 1 - RATE_WARMUP)
    return RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def run(way: str, seed: int, exchanges: int) -> dict[str, Any]:
    began, text = time.process_time(), Text()
    common = drawn(seed)
    own = common.repeat(REPLICAS, 1)
    mean, square = torch.zeros_like(own), torch.zeros_like(own)
    exchange = exchange_of(way, common.numel())
    rounds = WARMUP + STEPS * exchanges
    losses: dict[str, float] = {}
    for r in range(rounds):
        leaf = own.detach().requires_grad_()
        loss_of(leaf, *text.batch(seed, r)).sum().backward()
        assert leaf.grad is not None
        norms = leaf.grad.norm(dim=1, keepdim=True)
        gradient = leaf.grad * (1.0 / (norms + 1e-6)).clamp_max(1.0)
        about = adamw.Step(rate(r, rounds), 0.9, 0.95, 1e-8, r + 1)
        flat = own.view(-1), gradient.view(-1), mean.view(-1), square.view(-1)
        adamw.step(*flat, about, DECAY)
        done = r + 1
        if done <= WARMUP or (done - WARMUP) % STEPS == 0:
            changes = common - own
            how = exchange.plain if done <= WARMUP else exchange.step
            if done == rounds:
                how = exchange.last
            common = how(common, changes)
            own = common.repeat(REPLICAS, 1)
        if (done - WARMUP) % (STEPS * 10) == 0 or done == rounds:
            with torch.no_grad():
                inputs, targets = text.held_out()
                found = loss_of(common[None], inputs[None], targets[None]).item()
            losses[str(done)] = found
    size = common.numel()
    return {
        "way": way,
        "seed": seed,
        "exchanges": exchanges,
        "loss": losses[str(rounds)],
        "bytes_a_parameter": exchange.sent.total / size / exchanges,
        "losses": losses,
        "parameters": size,
        "cpu_seconds": round(time.process_time() - began, 1),
        "platform": this_platform(),
    }


def check() -> None:
    """What is called `topk` here is what the product codes."""
    values = torch.randn(3 * CHUNK + 100, generator=torch.Generator().manual_seed(1))
    if not torch.equal(sparse(values, KEPT), dense(values, TOPK)):
        raise SystemExit("`sparse` here is not `topk` of swarmnet.training.codecs any more")
    if sparse_bytes(values.numel(), KEPT) != row_bytes(TOPK, values.numel()):
        raise SystemExit("bytes of `sparse` here are not those of `topk` any more")


PAGE = """# Sparse updates

Loss on held-out bytes after the last of {exchanges} exchanges, and the bytes that a replica sends
in an exchange, of a parameter. `fp32` is what the others are beside, by the same seed.
`python benchmarks/sparse_updates.py` makes the runs and says what the ways are, and `--tables`
makes this page.

| way | bytes | loss | beside `fp32` | seeds |
|---|---|---|---|---|
"""


def write_page(there: Path) -> None:
    """Of the runs of this platform that have the full length, fewest bytes first."""
    runs = [json.loads(line) for line in there.read_text().splitlines()]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for each in runs:
        if each["exchanges"] == EXCHANGES and each["platform"] == this_platform():
            found.setdefault(each["way"], {})[each["seed"]] = each
    lines: list[tuple[float, str]] = []
    for way, own in found.items():
        sent = next(iter(own.values()))["bytes_a_parameter"]
        loss = sum(each["loss"] for each in own.values()) / len(own)
        both = [
            100 * (own[seed]["loss"] / other["loss"] - 1)
            for seed, other in found.get("fp32", {}).items()
            if seed in own and way != "fp32"
        ]
        beside = f"{sum(both) / len(both):+.2f} %" if both else ""
        lines.append((sent, f"| `{way}` | {sent:.3f} | {loss:.4f} | {beside} | {len(own)} |"))
    page = PAGE.format(exchanges=EXCHANGES) + "\n".join(line for _, line in sorted(lines)) + "\n"
    there.with_suffix(".md").write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--exchanges", type=int, default=EXCHANGES)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tables", action="store_true", help="write what is there and end")
    options = parser.parse_args()
    if options.tables:
        write_page(options.results)
        return
    torch.set_num_threads(1)
    check()
    end = time.monotonic() + options.seconds
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    there = {(r["way"], r["seed"], r["exchanges"], r["platform"]) for r in map(json.loads, lines)}
    for seed in options.seeds:
        for way in options.way:
            if (way, seed, options.exchanges, this_platform()) in there or time.monotonic() > end:
                continue
            made = run(way, seed, options.exchanges)
            with options.results.open("a") as out:
                out.write(json.dumps(made) + "\n")
            print(
                f"{way} seed {seed}: {made['loss']:.4f} nats a byte, "
                f"{made['bytes_a_parameter']:.3f} bytes, {made['cpu_seconds']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
