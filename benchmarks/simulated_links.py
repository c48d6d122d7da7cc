"""What codecs are worth on slow links, in the simulator: two tables.

    python benchmarks/simulated_links.py reach [--results FILE]
    python benchmarks/simulated_links.py swarm [--results FILE]

Eight stages, one equal machine each, no churn, mode `delayed`, 64 microbatches a round. A cell is
one `swarmnet simulate`, whose command is printed. With `--results` the cells are kept there, and
what is there already is not run again.

`reach`: 100 Mbit/s and 50 ms between two machines. A microbatch's forward and backward pass of a
stage take an eighth of the time of its activation on the wire as fp32.

`swarm`: 500 Mbit/s, beside the utilisation that SWARM has published for a layer of the size of
GPT-3's (Ryabinin et al. 2023, arXiv 2301.11913; figures at second hand), at the same ratio of
compute to bytes. Their four figures lie within 0.7 points on 1 / (1.220 + 0.00424 for each ms):
that is a machine that computes, sends, and waits for the latency in turn, whose bytes take 0.22 of
the time of the computation. Where a microbatch waits twice for the latency, forward and back, it
computes for 472 ms, and sends 6.5 MB. Here: three sequences of 2^20 numbers in `int8` both ways,
and the latency is that of one way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.commands.simulate import SimulateOptions, run_simulation
from swarmnet.protocol.codecs import INT4, INT6, INT8, NONE

STAGES = 8
MICROBATCHES = 64
HOURS = 0.1
CHECK_S = 0.5
REACH_LINK, REACH_SERVICE_S = "100/50", 0.042
REACH_CODECS = (NONE, INT8, INT6, INT4)
SWARM_MBIT_S, SWARM_SEQUENCES, SWARM_SERVICE_S = 500, 3, 0.1573
PUBLISHED = {10: 79.3, 50: 70.3, 100: 60.2, 200: 48.5}
"""Per cent, by ms."""
GPU_SPEED = 50.0
"""Assumed of a GPU's coding, over that of one core: its memory is as much faster, or more."""


@dataclass(frozen=True)
class Cell:
    """One simulation."""

    links: str
    service_s: float
    codec: str
    sequences: int = 1
    coding_speed: float = 1.0

    @property
    def options(self) -> SimulateOptions:
        return SimulateOptions(
            peers=STAGES,
            stages=STAGES,
            hours=HOURS,
            churn=0.0,
            speed_ratio=1.0,
            links=self.links,
            service_s=self.service_s,
            sequences=self.sequences,
            microbatches=MICROBATCHES,
            codec=self.codec,
            coding_speed=self.coding_speed,
            check_every_s=CHECK_S,
            as_json=True,
        )

    @property
    def command(self) -> str:
        """For a shell."""
        o = self.options
        return (
            f"swarmnet simulate --peers {o.peers} --stages {o.stages} --hours {o.hours} --churn 0 "
            f"--speed-ratio 1 --links {o.links} --service {o.service_s} "
            f"--sequences {o.sequences} --microbatches {o.microbatches} --codec {o.codec} "
            f"--coding-speed {o.coding_speed:g} --check-every {o.check_every_s}"
        )


@dataclass
class Results:
    """Samples/s and bound by command, kept in a file where there is one."""

    path: Path | None

    def __post_init__(self) -> None:
        self._known: dict[str, list[float]] = {}
        if self.path is not None and self.path.exists():
            self._known = json.loads(self.path.read_text())

    def of(self, cell: Cell) -> tuple[float, float]:
        """Samples/s, and those of the bound; simulates where they are not known."""
        if cell.command not in self._known:
            said: list[str] = []
            run_simulation(cell.options, said.append)
            values = json.loads(said[-1])
            self._known[cell.command] = [values["samples_per_s"], values["bound_per_s"]]
            if self.path is not None:
                self.path.write_text(json.dumps(self._known, indent=1) + "\n")
        rate, bound = self._known[cell.command]
        return rate, bound


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=("reach", "swarm"))
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    table = reach if options.table == "reach" else swarm
    for line in table(Results(options.results)):
        print(line, flush=True)


def reach(results: Results) -> Iterator[str]:
    """A row for each codec."""
    yield "| codec | samples/s | of the bound | over fp32 | command |"
    yield "|---|---|---|---|---|"
    plain = 0.0
    for codec in REACH_CODECS:
        cell = Cell(REACH_LINK, REACH_SERVICE_S, codec)
        rate, bound = results.of(cell)
        plain = plain or rate
        yield (
            f"| `{codec}` | {rate:.2f} | {100 * rate / bound:.1f} % | {rate / plain:.2f} | "
            f"`{cell.command}` |"
        )


def swarm(results: Results) -> Iterator[str]:
    """A row for each latency. Utilisation: computation alone; coding is none."""
    yield "| ms | SWARM, published | `int8`, GPU | `int8`, one core codes | fp32 |"
    yield "|---|---|---|---|---|"
    for ms, published in PUBLISHED.items():
        cells = [swarm_cell(ms, INT8, GPU_SPEED), swarm_cell(ms, INT8), swarm_cell(ms, NONE)]
        yield f"| {ms} | {published} % | " + " | ".join(utilisations(cells, results)) + " |"
    yield f"\nThe first cell: `{swarm_cell(10, INT8, GPU_SPEED).command}`"


def swarm_cell(ms: int, codec: str, coding_speed: float = 1.0) -> Cell:
    """At this latency."""
    links = f"{SWARM_MBIT_S}/{ms}"
    return Cell(links, SWARM_SERVICE_S, codec, SWARM_SEQUENCES, coding_speed)


def utilisations(cells: Sequence[Cell], results: Results) -> Iterator[str]:
    """Parts of the time in which a machine computes."""
    for cell in cells:
        yield f"{100 * results.of(cell)[0] * cell.service_s:.1f} %"


if __name__ == "__main__":
    main()
