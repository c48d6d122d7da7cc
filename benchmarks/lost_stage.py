"""A middle stage is lost, and nobody has a checkpoint of it: with what does it begin?

    python benchmarks/lost_stage.py answers --seeds 2 3      # runs what is missing
    python benchmarks/lost_stage.py answers --show           # the table again, and a plot

Model and data are those of a task of `learning/tasks.py` (eight layers; `python`, the hard one, or
`answers`, which no model does without all of its middle layers), in one process that makes the
updates of a swarm. In the midst of a run the layers of one stage are replaced: one of eight stages
has one layer, one of four has two. Their moments begin at zero, all others go on, and the rounds
that follow have the same data. The layers begin as

  initial   what the run began with (what a swarm does)
  mean      the mean of the layers at the same places of the stage before and of the stage behind
  weighted  the same, each weighted by the squared norm of its stage's gradient in the last round
            (CheckFree, arXiv 2506.15461)

Held-out loss, nats a token, over that of the same run without a loss (`not lost`), and over that of
the run whose stage began anew: means over the seeds of the differences with the same seed, with
their standard errors.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.tasks import BOUNDARY_STAGES, AnswersData, spec_text  # noqa: E402
from swarmnet.spec import parse_spec  # noqa: E402
from swarmnet.training.models.base import build_layer  # noqa: E402
from tests.oracles.reference import ReferenceTrainer  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "lost-stage.json"
PLOTS = ROOT / "docs" / "decisions"
LAYERS = BOUNDARY_STAGES


@dataclass(frozen=True)
class Run:
    """How long, and when the stage is lost."""

    rounds: int
    lost_at: int
    slots: int
    """Microbatches of a round."""


RUNS = {"python": Run(250, 150, 2), "answers": Run(600, 400, 4)}
AFTER = (0, 5, 10, 20, 50)
"""Rounds since then, after which the loss is measured."""
STAGES = (8, 4)
INITIAL, MEAN, WEIGHTED = WAYS = ("initial", "mean", "weighted")
CONTROL = "not lost"
Losses = dict[str, dict[int, float]]
"""By way, by rounds since the stage was lost."""


@dataclass(frozen=True)
class Lost:
    """Decoder layers by their numbers: those of the stage, and of its neighbours in their order."""

    layers: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]


def lost_of(stages: int) -> Lost:
    """The stage behind the middle."""
    size = LAYERS // stages
    first = stages // 2 * size
    span = range(first, first + size)
    return Lost(tuple(span), tuple(k - size for k in span), tuple(k + size for k in span))


def run(task: str, seed: int) -> dict[str, Any]:
    """All ways with one seed, by number of stages."""
    plan = RUNS[task]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = spec_text(
            task, seed=seed, rounds=plan.rounds, text=Path(folder), codec="none", sync=None
        )
        spec = parse_spec(text)
        trainer = ReferenceTrainer(spec, AnswersData(spec) if task == "answers" else None)
        for r in range(plan.lost_at):
            trainer.step(r, range(plan.slots))
        gradients = trainer.gradients()
        found: dict[str, Any] = {"control": after(copied(trainer), plan)}
        print(seed, CONTROL, found["control"], flush=True)
        for stages in STAGES:
            found[str(stages)] = {}
            for way in WAYS:
                other = copied(trainer)
                found[str(stages)] |= {"share": begin(other, gradients, lost_of(stages), way, seed)}
                found[str(stages)][way] = after(other, plan)
                print(seed, stages, way, found[str(stages)][way], flush=True)
        return found


def copied(trainer: ReferenceTrainer) -> ReferenceTrainer:
    """With its optimizer; the data are shared."""
    data = trainer._data  # noqa: SLF001
    return copy.deepcopy(trainer, {id(data): data})


def after(trainer: ReferenceTrainer, plan: Run) -> dict[int, float]:
    losses = {0: trainer.held_out_loss()}
    for done in range(1, AFTER[-1] + 1):
        trainer.step(plan.lost_at + done - 1, range(plan.slots))
        if done in AFTER:
            losses[done] = trainer.held_out_loss()
    return losses


def begin(
    trainer: ReferenceTrainer, gradients: dict[str, Tensor], lost: Lost, way: str, seed: int
) -> float:
    """Puts new parameters in the place of those that are lost. `gradients`: of the last round.
    Returns the weight of the stage before."""
    values = trainer.state_dict()
    before, behind = (norm_of(gradients, layers) for layers in (lost.before, lost.behind))
    share = before / (before + behind) if way == WEIGHTED else 0.5
    layers = {layer.name: layer for layer in trainer.plan.layers}
    for k, one, two in zip(lost.layers, lost.before, lost.behind, strict=True):
        name = f"model.layers.{k}"
        if way == INITIAL:
            fresh = build_layer(trainer.plan, layers[name], seed).state_dict()
        else:
            fresh = {
                part: share * values[f"model.layers.{one}.{part}"]
                + (1 - share) * values[f"model.layers.{two}.{part}"]
                for part in names_of(values, name)
            }
        for part in names_of(values, name):
            values[f"{name}.{part}"].copy_(fresh[part])
    forget_moments(trainer, lost)
    return before / (before + behind)


def norm_of(gradients: dict[str, Tensor], layers: tuple[int, ...]) -> float:
    """Squared."""
    starts = tuple(f"model.layers.{k}." for k in layers)
    return sum(float(g.square().sum()) for name, g in gradients.items() if name.startswith(starts))


def names_of(values: dict[str, Tensor], layer: str) -> list[str]:
    return [n[len(layer) + 1 :] for n in values if n.startswith(f"{layer}.")]


def forget_moments(trainer: ReferenceTrainer, lost: Lost) -> None:
    starts = tuple(f"model.layers.{k}." for k in lost.layers)
    for name, p in trainer._named_parameters().items():  # noqa: SLF001
        if name.startswith(starts):
            for one in trainer._optimizers._all:  # noqa: SLF001
                one.state.pop(p, None)


# ---- what was found --------------------------------------------------------------------------


def over(
    results: dict[str, Any], stages: int, way: str, done: int, other: str = CONTROL
) -> tuple[float, float]:
    """The mean of the loss over that of another way with the same seed, and its standard error."""
    found = []
    for seed in results.values():
        ways = seed[str(stages)] | {CONTROL: seed["control"]}
        found.append(ways[way][str(done)] - ways[other][str(done)])
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return statistics.mean(found), error


def show(results: dict[str, Any]) -> None:
    print(f"{len(results)} seeds\n")
    print("| lost | | " + " | ".join(f"{n} rounds" for n in AFTER) + " |")
    print("|---" * (len(AFTER) + 2) + "|")
    pairs = [(way, CONTROL) for way in WAYS] + [(way, INITIAL) for way in (MEAN, WEIGHTED)]
    for stages in STAGES:
        for way, other in pairs:
            told = [over(results, stages, way, n, other) for n in AFTER]
            cells = " | ".join(f"{m:+.3f} ± {e:.3f}" for m, e in told)
            print(f"| 1 of {stages} | {way} over {other} | {cells} |")
    shares = [seed[str(s)]["share"] for s in STAGES for seed in results.values()]
    print("\nWeights of the stage before:", ", ".join(f"{s:.2f}" for s in shares))
    alone = [statistics.mean(s["control"][str(n)] for s in results.values()) for n in AFTER]
    print("Loss of the run that lost nothing:", ", ".join(f"{loss:.3f}" for loss in alone))


def draw(task: str, results: dict[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lost-stage"
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(STAGES), figsize=(9, 3.6), sharey=True)
    for panel, stages in zip(panels, STAGES, strict=True):
        for way in WAYS:
            points = [over(results, stages, way, n) for n in AFTER]
            panel.errorbar(AFTER, [m for m, _ in points], [e for _, e in points], label=way)
        panel.set_title(f"1 of {stages} stages lost")
        panel.set_xlabel("rounds since")
    panels[0].set_ylabel("held-out loss over the control's")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(PLOTS / f"lost-stage-{task}.svg", metadata={"Date": None})


def main() -> None:
    """Runs seeds that are missing, and shows all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("task", choices=sorted(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    for seed in () if options.show else options.seeds:
        if str(seed) not in read().get(options.task, {}):
            found = run(options.task, seed)
            results = read()  # another process may have added to it
            results.setdefault(options.task, {})[str(seed)] = found
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    results = read().get(options.task, {})
    show(results)
    draw(options.task, results)


def read() -> dict[str, Any]:
    """By task."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


if __name__ == "__main__":
    main()
