"""Does it learn? One process against every sync mode, with and without peers that are replaced.

    python benchmarks/convergence.py [--rounds 400] [--jobs 2] [--only zero local-10]
    python benchmarks/convergence.py --task python --rounds 300 --replaced 0
    python benchmarks/convergence.py --plot

The same small Llama, the same text, the same number of tokens; two stages of four replicas, which
are the production peers over a memory transport in virtual time, with real stages, gradients and
optimizers. `0`, `10` and `30` percent of the eight peers (rounded up: none, one, three) are killed
at even distances, and a newcomer takes the place of each. The figure is the loss on held-out text.

The text of `letters` is drawn by a fixed table of chances, so that the least possible loss is known
and a short run comes near it. `python` is the library's sources, at a higher learning rate, and
ends while the loss still falls fast: the hard case for every mode but `zero`.

Results go to `docs/convergence.json`, a run at a time, so that a run that is there is not made
again; `--plot` draws `docs/convergence-*.svg` from it.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "convergence.json"
STAGES, REPLICAS = 2, 4
REPLACED = (0, 10, 30)
MODES: dict[str, dict[str, Any]] = {
    "zero": {"mode": "zero"},
    "delayed": {"mode": "delayed"},
    "local-10": {"mode": "local", "local_steps": 10},
    "local-50": {"mode": "local", "local_steps": 50},
    "gossip-10": {"mode": "gossip", "local_steps": 10},
    "gossip-50": {"mode": "gossip", "local_steps": 50},
}
EVALUATE_EVERY = 50
LIMIT_S = 1e6
SPEC = """
seed = 1
[model]
kind = "llama"
{model}
vocab_size = 256
max_position_embeddings = 64
[data]
paths = ["{text}"]
tokenizer = "bytes"
{data}
held_out_microbatches = {held_out}
[optimizer]
learning_rate = {rate}
warmup_rounds = 20
rounds = {rounds}
grad_clip_norm = 1.0
[pipeline]
num_stages = {stages}
global_batch = {batch}
microbatch = 4
evaluate_every = {every}
[sync]
aggregation = "mean"
shard_parameters = {shard}
{sync}
"""
TASKS: dict[str, dict[str, Any]] = {
    "letters": {
        "model": """hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
intermediate_size = 64""",
        "rate": 2e-3,
        "batch": 32,
        "held_out": 32,
        "shard": 8192,
        "data": "",
    },
    "python": {
        "model": """hidden_size = 48
num_hidden_layers = 4
num_attention_heads = 4
intermediate_size = 128""",
        "rate": 4e-3,
        "batch": 64,
        "held_out": 64,
        "shard": 16384,
        "text": "python-stdlib",
        "data": 'include = ["*.py"]',
    },
}
LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEF"
TEXT_BYTES = 2_000_000


def write_text(path: Path) -> float:
    """Text whose next letter depends on the last one, by a fixed table of chances; returns the
    least loss that any model can reach on it, nats a letter."""
    rng = random.Random(7)
    num = len(LETTERS)
    table = [_chances(rng, num) for _ in range(num)]
    codes = [rng.randrange(num)]
    entropy, visits = 0.0, 0
    draws = {row: list(itertools.accumulate(chances)) for row, chances in enumerate(table)}
    least = [-sum(p * math.log(p) for p in chances if p > 0) for chances in table]
    for _ in range(TEXT_BYTES):
        row = codes[-1]
        entropy, visits = entropy + least[row], visits + 1
        codes.append(min(bisect.bisect(draws[row], rng.random()), num - 1))
    path.write_bytes(bytes(LETTERS[c] for c in codes))
    return entropy / visits


def _chances(rng: random.Random, num: int) -> list[float]:
    """Uneven: a few letters are likely, the rest hardly come."""
    raw = [rng.gammavariate(0.3, 1.0) + 1e-9 for _ in range(num)]
    return [x / sum(raw) for x in raw]


def spec_of(task: str, sync: dict[str, Any], rounds: int, text: Path) -> Any:
    """The run in one mode."""
    from swarmnet.spec import parse_spec

    lines = "\n".join(f"{k} = {json.dumps(v)}" for k, v in sync.items())
    values = {"text": text, "rounds": rounds, "stages": STAGES, "every": EVALUATE_EVERY}
    return parse_spec(SPEC.format(**{**values, "sync": lines, **TASKS[task]}))


# ---- one run: a child of this script -------------------------------------------------------------


def run_swarm(task: str, name: str, replaced: int, rounds: int) -> dict[str, Any]:
    """A swarm's losses on held-out text, by round; for `zero` without churn also those of one
    process over the same microbatches."""
    from tests.swarm.harness import Swarm, in_virtual_time

    folder = tempfile.TemporaryDirectory()
    text = Path(folder.name) / "text.txt"
    least = write_text(text)
    spec = spec_of(task, MODES[name], rounds, text)
    losses: dict[int, float] = {}
    spreads: list[float] = []
    counted: dict[int, list[int]] = {}
    total = STAGES * REPLICAS
    num_replaced = math.ceil(total * replaced / 100)
    lost = [0]

    async def watch(swarm: Swarm) -> None:
        while True:
            for member in swarm.members.values():
                held_out = member.peer.gossip.own.held_out
                if held_out is not None:
                    losses[held_out.round] = held_out.loss
            await asyncio.sleep(0.2)

    async def scenario(swarm: Swarm) -> None:
        rng = random.Random(replaced)
        watching = asyncio.get_running_loop().create_task(watch(swarm))
        for i in range(total):
            swarm.start(f"peer-{i}", stage=i % STAGES)
        for n in range(num_replaced):
            at = rounds * (n + 1) // (num_replaced + 1)
            await swarm.until(lambda at=at: max(swarm.rounds()) >= at, LIMIT_S)  # type: ignore[misc]
            victim = rng.choice(sorted(swarm.members))
            stage = swarm.members[victim].peer.gossip.own.stage
            swarm.kill(victim)
            swarm.start(f"newcomer-{n}", stage=stage)
        await swarm.until_round(rounds, LIMIT_S)
        await swarm.until(lambda: rounds in losses, LIMIT_S)
        watching.cancel()
        spreads.extend(m.peer.gossip.own.spread for m in swarm.members.values())
        counted.update(swarm.counted)
        lost[0] = swarm.total("samples_lost")

    in_virtual_time(scenario, spec)
    result: dict[str, Any] = {
        "mode": name,
        "replaced": replaced,
        "peers_replaced": num_replaced,
        "peers": total,
        "rounds": rounds,
        "tokens": rounds * spec.pipeline.global_batch * spec.sequence_length,
        "losses": {str(r): losses[r] for r in sorted(losses)},
        "least_loss": least if task == "letters" else None,
        "spread": max(spreads),
        "samples_lost": lost[0],
    }
    if name == "zero" and not replaced:
        result["one_process"] = run_one_process(spec, counted)
    return result


def run_one_process(spec: Any, counted: dict[int, list[int]]) -> dict[str, float]:
    """The losses of plain PyTorch over the microbatches that a swarm counted."""
    from tests.oracles.reference import ReferenceTrainer

    trainer = ReferenceTrainer(spec)
    losses = {"0": trainer.held_out_loss()}
    for r in range(spec.optimizer.rounds):
        trainer.step(r, sorted(counted[r]))
        if (r + 1) % EVALUATE_EVERY == 0 or r + 1 == spec.optimizer.rounds:
            losses[str(r + 1)] = trainer.held_out_loss()
    return losses


# ---- all of them ---------------------------------------------------------------------------------


def load() -> dict[str, Any]:
    """The results so far, by `mode/replaced`."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def key_of(task: str, name: str, replaced: int) -> str:
    """Under which a result lies."""
    return f"{'' if task == 'letters' else task + ':'}{name}/{replaced}"


def run_all(task: str, names: list[str], rates: list[int], rounds: int, jobs: int) -> None:
    """Every run that is not there yet, `jobs` at a time, each in a process of its own."""
    wanted = [
        (n, p)
        for p in rates
        for n in names
        if load().get(key_of(task, n, p), {}).get("rounds") != rounds
    ]

    def one(which: tuple[str, int]) -> None:
        name, replaced = which
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            command = [
                sys.executable,
                __file__,
                "--child",
                task,
                name,
                str(replaced),
                str(rounds),
                file.name,
            ]
            subprocess.run(command, check=True)
            result = json.loads(Path(file.name).read_text())
        results = load()
        results[key_of(task, name, replaced)] = result
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        last = result["losses"][str(rounds)]
        print(f"{name}, {replaced} % replaced: {last:.4f} nats a token", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, wanted))


def show() -> None:
    """The table of docs/convergence.md."""
    results = load()
    first = results["zero/0"]
    rounds = str(first["rounds"])
    base = first["one_process"][rounds]
    print(f"least possible {first['least_loss']:.4f}, untrained {first['losses']['0']:.4f}\n")
    print("| mode | " + " | ".join(f"{p} % replaced" for p in REPLACED) + " |")
    print("|---|" + "---|" * len(REPLACED))
    print(f"| one process | {base:.4f} |" + " |" * (len(REPLACED) - 1))
    for name in MODES:
        cells = []
        for p in REPLACED:
            result = results.get(f"{name}/{p}")
            loss = result["losses"].get(rounds) if result else None
            cells.append("-" if loss is None else f"{loss:.4f} ({loss / base - 1:+.2%})")
        print(f"| {name} | " + " | ".join(cells) + " |")


# ---- plots ---------------------------------------------------------------------------------------

WIDTH, HEIGHT, MARGIN = 720, 400, 60
COLOURS = ("#222222", "#1f77b4", "#2ca02c", "#98df8a", "#d62728", "#ff9896")


def plot(task: str, replaced: int) -> None:
    """`docs/convergence-<replaced>.svg` (`-python` for that task): the gap of each mode to one
    process, over the rounds."""
    results = load()
    zero = results[key_of(task, "zero", 0)]
    one = {int(r): x for r, x in zero["one_process"].items()}
    curves = {}
    for name in MODES:
        result = results.get(key_of(task, name, replaced))
        if result is not None:
            points = {int(r): x for r, x in result["losses"].items() if int(r) in one and int(r)}
            curves[name] = [(r, 100 * (x / one[r] - 1)) for r, x in sorted(points.items())]
    rounds = zero["rounds"]
    top = max([1.0, *(y for points in curves.values() for _, y in points)])
    low = min([0.0, *(y for points in curves.values() for _, y in points)])

    def at(r: float, y: float) -> str:
        x = MARGIN + (WIDTH - 3 * MARGIN) * r / rounds
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (y - low) / (top - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="14">Held-out loss over that of one process, '
        f"{replaced} % of peers replaced</text>",
    ]
    for i in range(6):
        y = low + (top - low) * i / 5
        (x0, y0), (x1, _) = (at(r, y).split(",") for r in (0, rounds))
        parts.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y0}" stroke="#dddddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y0}" text-anchor="end">{y:+.1f} %</text>')
    for r in range(0, rounds + 1, 100):
        x, y0 = at(r, low).split(",")
        parts.append(f'<text x="{x}" y="{float(y0) + 18:.1f}" text-anchor="middle">{r}</text>')
    parts.append(f'<text x="{WIDTH / 2 - MARGIN}" y="{HEIGHT - 14}">rounds</text>')
    for i, (name, points) in enumerate(curves.items()):
        colour = COLOURS[list(MODES).index(name)]
        line = " ".join(at(r, y) for r, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y1 = MARGIN + 18 * i
        parts.append(f'<text x="{WIDTH - 2 * MARGIN + 12}" y="{y1}" fill="{colour}">{name}</text>')
    parts.append("</svg>")
    which = replaced if task == "letters" else task
    (RESULTS.parent / f"convergence-{which}.svg").write_text("\n".join(parts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--replaced", nargs="+", type=int, choices=REPLACED, default=list(REPLACED))
    parser.add_argument("--task", choices=TASKS, default="letters")
    parser.add_argument("--plot", action="store_true", help="draw what is there and end")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.child:
        import torch

        torch.set_num_threads(1)
        task, name, replaced, rounds, out = args.child
        result = run_swarm(task, name, int(replaced), int(rounds))
        Path(out).write_text(json.dumps(result))
        return
    if not args.plot:
        run_all(args.task, args.only, args.replaced, args.rounds, args.jobs)
    if "zero/0" in load():
        for replaced in REPLACED:
            plot("letters", replaced)
        show()
    if key_of("python", "zero", 0) in load():
        plot("python", 0)


if __name__ == "__main__":
    main()
