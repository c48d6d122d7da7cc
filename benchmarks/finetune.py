"""The losses of a swarm that trains adapters, beside those of a plain loop of PEFT.

    swarmnet local --spec examples/finetune/run.toml --peers 4 --metrics losses.jsonl
    python benchmarks/finetune.py examples/finetune/run.toml losses.jsonl

The plain loop (`tests/oracles/plain_peft.py`) is one process with the whole model, on the same
samples in the same rounds: `transformers` and `peft`, none of the swarm's layers. To be run where
the swarm ran, in mode `zero`, with adapters that begin at random.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from swarmnet.runtime.joining.starting import start_run
from swarmnet.training.data import Place
from swarmnet.training.data.opening import open_data
from swarmnet.training.models.model_folder import find_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for what is of tests/


def losses_of(metrics: Path, num_samples: int) -> dict[int, float]:
    """By round, of those that were seen whole: of one of milliseconds an onlooker may see a part
    or nothing. Samples that no update had would show in the losses of the rounds after. Raises
    `SystemExit` where samples were counted twice."""
    lines = (json.loads(line) for line in metrics.read_text().splitlines())
    events = [line for line in lines if line["event"] == "round"]
    if not events:
        raise SystemExit(f"{metrics} has no round")
    odd = [e["round"] for e in events if e["samples"] > num_samples]
    if odd:
        raise SystemExit(f"round {odd[0]} has more than {num_samples} samples")
    return {e["round"]: e["loss"] for e in events if e["samples"] == num_samples}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--rounds", type=int, help="the first ones only")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    from tests.oracles.plain_peft import PlainPeftTrainer
    from tests.swarm.lora_runs import initial_adapters

    run = start_run(options.spec)
    losses = losses_of(options.metrics, run.spec.pipeline.global_batch)
    weights = AutoModelForCausalLM.from_pretrained(find_folder(run.model)).state_dict()
    data = open_data(run.spec, Place(files=run.contents))
    trainer = PlainPeftTrainer(run.spec, weights, initial_adapters(run.spec), data)
    num_slots = run.spec.pipeline.global_batch // run.spec.pipeline.microbatch
    largest, compared = 0.0, 0
    print("round      swarm      plain   relative difference")
    for round_index in range(max(losses) + 1)[: options.rounds]:
        plain, loss = trainer.step(round_index, range(num_slots)), losses.pop(round_index, None)
        if loss is None:
            continue
        compared += 1
        difference = abs(loss - plain) / plain
        largest = max(largest, difference)
        print(f"{round_index + 1:5}  {loss:9.6f}  {plain:9.6f}   {difference:.1e}", flush=True)
    print(f"largest relative difference in {compared} rounds: {largest:.1e}")


if __name__ == "__main__":
    main()
