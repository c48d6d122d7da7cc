"""What the exchange costs a round, in each sync mode: the production peers on simulated links.

    python benchmarks/sync_modes.py [--seconds 300]

Two stages of three replicas with synthetic devices, in virtual time: rounds, their bubbles and the
bytes are those of the production code; only the devices and the wire are simulated. The upload of
every peer is narrowed step by step. Printed: samples per second over what the devices could do were
they never idle, for `zero` and `delayed`, and how many times faster the latter is. `none` is the
same swarm on links so wide that an exchange takes no time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
UPLOADS_MBIT = (400, 100, 50, 25)
SHARDS, SHARD_PARAMETERS = 6, 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual, of each swarm")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from swarmnet.protocol.sync_modes import DELAYED, ZERO
    from swarmnet.simulation.network import Link
    from swarmnet.simulation.scenario import Scenario
    from swarmnet.simulation.stage import Sizes
    from swarmnet.simulation.swarm import simulate

    base = Scenario(
        seed=1,
        peers=6,
        stages=2,
        until_s=args.seconds,
        warmup_s=args.seconds / 5,
        global_batch=192,
        speed_ratio=1.0,
        service_s=0.1,
        sizes=Sizes(num_shards=SHARDS, shard_parameters=SHARD_PARAMETERS),
        keep_log=False,
    )
    print("| upload | zero | delayed | delayed / zero |")
    print("|---|---|---|---|")
    for mbit in (100_000, *UPLOADS_MBIT):
        link = Link(mbit * 1e6 / 8, mbit * 1e6 / 8, 0.01)
        shares = []
        for mode in (ZERO, DELAYED):
            result = simulate(replace(base, sync_mode=mode, link=link))
            if result.broken:
                raise SystemExit(f"{mode}: {result.broken}")
            shares.append(result.fraction_of_best)
        name = "none" if mbit == 100_000 else f"{mbit} Mbit/s"
        ratio = shares[1] / shares[0]
        print(f"| {name} | {shares[0]:.2f} | {shares[1]:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
