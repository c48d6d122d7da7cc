"""What an update sends with adapters, against full training of the same model.

    python benchmarks/lora.py path/to/SmolLM2

Two stages of two replicas each, mode `zero`, in one process and in virtual time: the production
peers with the model's real parameters, over the memory transport, whose frames are counted by
method. The numbers are bytes of all replicas together in a round, of the calls that an update
consists of.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

from swarmnet.methods.method import Callee
from swarmnet.methods.state import FetchReply
from swarmnet.methods.table import METHODS
from swarmnet.runtime.text import size
from swarmnet.spec import RunSpec
from swarmnet.training.models.initial_weights import ModelWeights
from swarmnet.training.resolving import resolve_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for what is of tests/

UPDATE = [
    row.name
    for row in METHODS.values()
    if row.callee is not Callee.ANY and row.reply is not FetchReply
]
"""What replicas say to each other for an update; whole states are fetched in other calls."""
FIRST, ROUNDS = 1, 3
"""Rounds that are measured: from the first on, where all states are in place."""


def spec_of(folder: Path, text: Path, lora: dict[str, Any] | None) -> RunSpec:
    values: dict[str, Any] = {
        "model": {"from": str(folder)},
        "data": {"paths": [str(text)], "sequence_length": 16, "held_out_microbatches": 0},
        "optimizer": {"learning_rate": 1e-4, "rounds": ROUNDS + 1},
        "pipeline": {"num_stages": 2, "global_batch": 4, "microbatch": 1, "evaluate_every": 0},
    }
    return RunSpec.model_validate(values if lora is None else {**values, "lora": lora})


def measure(folder: Path, lora: dict[str, Any] | None) -> tuple[int, dict[str, int]]:
    """Trained parameters, and bytes of a round by method."""
    from tests.swarm.harness import Swarm, in_virtual_time

    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "text.txt"
        text.write_text("to be or not to be, that is the question\n" * 200)
        resolved = resolve_run(spec_of(folder, text, lora))
        spec, hashes = resolved.spec, resolved.contents["weights.sha256"]
        found: dict[str, int] = {}
        numbers: list[int] = []

        def sent(swarm: Swarm) -> dict[str, int]:
            traffic = [m.peer.transport.traffic.sent_bytes for m in swarm.members.values()]
            return {method: sum(t.get(method, 0) for t in traffic) for method in UPDATE}

        async def scenario(swarm: Swarm) -> None:
            for stage in range(2):
                swarm.start(f"{stage}", stage=stage, weights=ModelWeights(spec, hashes, folder))
            await swarm.until_round(0)
            for stage in range(2):
                weights = ModelWeights(spec, hashes, folder)
                swarm.start(f"{stage} too", stage=stage, weights=weights)
            await swarm.until_round(FIRST)
            before = sent(swarm)
            await swarm.until_round(ROUNDS)
            after = sent(swarm)
            found.update({m: (after[m] - before[m]) // (ROUNDS - FIRST) for m in UPDATE})
            for stage in range(2):
                replica = swarm.members[f"{stage}"].peer.replica
                assert replica is not None
                numbers.append(sum(replica.stage.shard_sizes))

        in_virtual_time(scenario, spec)
        gc.collect()
        return sum(numbers), {m: n for m, n in found.items() if n}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--r", type=int, default=8)
    parser.add_argument("--target-modules", nargs="+", default=["q_proj", "v_proj"])
    options = parser.parse_args()
    lora = {"r": options.r, "target_modules": options.target_modules}
    results = []
    for what, table in (("LoRA", lora), ("full", None)):
        number, by_method = measure(options.folder, table)
        results.append((number, sum(by_method.values())))
        parts = ", ".join(f"{method} {size(n)}" for method, n in by_method.items())
        print(
            f"{what}: {number:,} parameters, {size(results[-1][1])} a round ({parts})", flush=True
        )
    (few, small), (all_, large) = results
    print(f"{100 * small / large:.3f} % of the bytes, {100 * few / all_:.3f} % of the parameters")


if __name__ == "__main__":
    main()
