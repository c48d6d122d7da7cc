"""What late contributions cost of the loss, in mode `local`.

    python benchmarks/late_contributions.py [--rounds 200] [--seeds 1 2 3]

Six replicas in one process (`tests/oracles/reference_modes.py`, whose numbers a swarm makes) learn
the task `letters`, with an exchange every ten rounds. Once all are waited for. Once one is late in
every exchange that goes on with a quorum: its change counts in the next one, and it works on
nothing in the six rounds in which it sends. Each round has the same microbatches in both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.tasks import spec_text, write_text  # noqa: E402
from swarmnet.protocol.update.ownership import quorum  # noqa: E402
from swarmnet.protocol.update.robust import MEAN  # noqa: E402
from swarmnet.runtime.compose import run_settings  # noqa: E402
from swarmnet.spec import RunSpec, parse_spec  # noqa: E402
from tests.oracles.reference import ReferenceTrainer  # noqa: E402
from tests.oracles.reference_modes import LocalReference  # noqa: E402

STEPS, SENDING_ROUNDS = 10, 6
NAMES = [f"replica-{i}" for i in range(6)]
SLOW = NAMES[2]
SLOTS = 12
"""Microbatches of a round."""


def spec_of(seed: int, rounds: int, text: Path) -> RunSpec:
    """One stage, and a batch that six share evenly."""
    sync = {"mode": "local", "local_steps": STEPS, "codec": "none"}
    written = spec_text("letters", seed=seed, rounds=rounds, text=text, codec="none", sync=sync)
    lines = written.splitlines()
    sizes = {"num_stages": 1, "global_batch": 4 * SLOTS, "microbatch": 4}
    for name, value in sizes.items():
        (k,) = (k for k, line in enumerate(lines) if line.startswith(f"{name} = "))
        lines[k] = f"{name} = {value}"
    return parse_spec("\n".join(lines))


def held_out_loss(spec: RunSpec, *, is_late: bool) -> float:
    """After the run, nats a token."""
    swarm, plan = LocalReference(spec, dict.fromkeys(NAMES, 0)), run_settings(spec).plan
    num_shards = -(
        -sum(p.numel() for p in swarm.state_dict().values()) // spec.sync.shard_parameters
    )
    sends_until = -1
    for r in range(plan.rounds):
        at_work = [n for n in NAMES if n != SLOW or r > sends_until]
        paths = {k: (at_work[k % len(at_work)],) for k in range(SLOTS)}
        goes_on = is_late and plan.is_due(0, r) and quorum(plan, r, MEAN, []) > 0
        if goes_on:
            sends_until = r + SENDING_ROUNDS
        swarm.step(r, paths, [(SLOW, j) for j in range(num_shards)] if goes_on else ())
    trainer = ReferenceTrainer(spec)
    trainer.load_state_dict(swarm.state_dict())
    return trainer.held_out_loss()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        write_text(text)
        for seed in options.seeds:
            spec = spec_of(seed, options.rounds, text)
            waits, late = (held_out_loss(spec, is_late=is_late) for is_late in (False, True))
            part = 100 * (late / waits - 1)
            print(f"seed {seed}: {waits:.5f}, {late:.5f} with late ones, {part:+.2f} %", flush=True)


if __name__ == "__main__":
    main()
