"""Simulated swarms, in tables: those of benchmarks/results/simulation.md.

    python benchmarks/simulated_links.py TABLE... [--jobs N] [--results FILE] [--write]

A cell of a table is one simulation; the first one's command is printed. With `--results`
the cells are kept there, and what is there already is not run again. `--jobs` cells run at a time,
each on a core of its own. `--write` puts the tables into the page, and that of `homes` into
docs/simulation.md.

`reach` and `swarm`: eight stages, one equal machine each, no churn, mode `delayed`, 64 microbatches
a round.

`reach`: 100 Mbit/s and 50 ms between two machines. A microbatch's forward and backward pass of a
stage take an eighth of the time of its activation on the wire as fp32.

`swarm`: 500 Mbit/s, beside the utilisation that SWARM has published for a layer of the size of
GPT-3's (Ryabinin et al. 2023, arXiv 2301.11913; figures at second hand), at the same ratio of
compute to bytes. Their four figures lie within 0.7 points on 1 / (1.220 + 0.00424 for each ms):
that is a machine that computes, sends, and waits for the latency in turn, whose bytes take 0.22 of
the time of the computation. Where a microbatch waits twice for the latency, forward and back, it
computes for 472 ms, and sends 6.5 MB. Here: three sequences of 2^20 numbers in `int8` both ways,
and the latency is that of one way.

`homes`: twelve machines on home links, two stages, no churn, by codec.

`churn`: machines on home links that come and go, by assignment; and a longer time of a small
swarm.

`protocol`: the setting in which ProtocolNanoGPT (Pluralis Research, September 2026) publishes
19.9 s a round: eight machines, a stage each, 200 Mbit/s each way and 50 ms between two neighbours,
512 samples of 1,024 tokens a round in microbatches of 16, and at the boundaries a width of 1,024 or
a subspace of 160. `--layer-s` is what a stage takes for the forward and backward pass of a
microbatch: it is assumed, and small beside the links here. Nothing is said about the loss.

`slow`: mode `local`, one stage of 16 million parameters in `int8`, an exchange every ten rounds of
60 samples. Six machines with 20 Mbit/s up, of which one may have a tenth of that; and the others
without it. The first 300 s do not count: the rates of links are measured in them.

`houses`: the same stage, a round of 120 samples. Eight machines in two houses, each behind one link
of 20 Mbit/s up and 100 Mbit/s down, without a household's key and with it. Each machine computes a
sample a second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script runs as it stands

from benchmarks.assignments import ADAPTIVE, STATIC, SWARM, with_assignment
from peer.commands.simulate import run_scenario, scenario_of
from peer.options import SimulateOptions
from swarmnet.protocol.codecs import INT4, INT6, INT8, NONE
from swarmnet.protocol.sync_modes import DELAYED, LOCAL, ZERO
from swarmnet.simulation.breakdown import EXCHANGE, WORKING
from swarmnet.simulation.coding import CPU, GPU
from swarmnet.simulation.invariants import Bounds
from swarmnet.simulation.network import Link
from swarmnet.simulation.scenario import Scenario
from swarmnet.simulation.stage import Sizes

ROOT = Path(__file__).parents[1]
TABLES_PAGE, SUMMARY = (ROOT / f / "simulation.md" for f in ("benchmarks/results", "docs"))
IN_SUMMARY = ("homes",)
"""Tables of the page that concludes."""
EQUAL = SimulateOptions(
    peers=8, stages=8, hours=0.1, churn=0.0, speed_ratio=1.0, microbatches=64, check_every_s=0.5
)
REACH_LINK, REACH_SERVICE_S = "100/50", 0.042
REACH_CODECS = (NONE, INT8, INT6, INT4)
SWARM_MBIT_S, SWARM_SEQUENCES, SWARM_SERVICE_S = 500, 3, 0.1573
PUBLISHED = {10: 79.3, 50: 70.3, 100: 60.2, 200: 48.5}
"""Per cent, by ms."""
HOME_CODECS = ((NONE, NONE), (INT8, NONE), (INT8, INT8), (INT4, INT4))
SHORT_CHURN = SimulateOptions(peers=32, stages=4, hours=1.0, service_s=16.0, microbatches=60)
LONG_CHURN = SimulateOptions(peers=16, stages=4, hours=6.0, service_s=16.0, microbatches=60)
PROTOCOL_STAGES, PROTOCOL_PARAMETERS, PROTOCOL_SHARDS = 8, 203_828_352, 8
PROTOCOL_BATCH, PROTOCOL_MICROBATCH, PROTOCOL_TOKENS = 512, 16, 1024
PROTOCOL_MBIT_S = 200
PROTOCOL_BYTES_PER_S = PROTOCOL_MBIT_S * 1e6 / 8
FULL_WIDTH, NARROW_WIDTH = 1024, 160
LAYER_S = 0.02
"""Of an accelerator at 125 TFLOP/s, for a stage of 25 million parameters and 16,384 tokens."""
HOUSE_LINK = Link(2.5e6, 12.5e6, 0.01)
HOUSES_BATCH = 120
NAMES = {"service_s": "service", "check_every_s": "check-every"}
"""Of options, where they are not called like their field."""

Values = dict[str, Any]
"""A result as `swarmnet simulate --json` prints it."""


@dataclass(frozen=True)
class Compared:
    """A simulation with one of `assignments.ASSIGNMENTS`."""

    options: SimulateOptions
    assignment: str


@dataclass(frozen=True)
class Published:
    """The setting of `protocol`."""

    width: int
    """Numbers of a token at a boundary: of a subspace, where that is less than `FULL_WIDTH`."""
    codec: str
    mode: str
    paired_links: bool
    """Each boundary has a link of its own; else each machine has one uplink."""
    layer_s: float

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            num_shards=PROTOCOL_SHARDS,
            shard_parameters=PROTOCOL_PARAMETERS // (PROTOCOL_SHARDS * PROTOCOL_STAGES),
            activation_numbers=PROTOCOL_MICROBATCH * PROTOCOL_TOKENS * self.width,
            width=self.width,
            codec=self.codec,
            has_tokens=self.width < FULL_WIDTH,
            update_codec=INT8,
        )

    @property
    def link_bound_s(self) -> float:
        """Seconds that the busiest link needs for the bytes of a round."""
        sizes, num = self.sizes, PROTOCOL_BATCH // PROTOCOL_MICROBATCH
        up, down = sizes.activation_bytes, sizes.gradient_bytes
        busiest = max(up, down) if self.paired_links else up + down
        return num * busiest / PROTOCOL_BYTES_PER_S

    def scenario(self) -> Scenario:
        options = replace(
            EQUAL,
            links=f"{PROTOCOL_MBIT_S}/50",
            sync=self.mode,
            microbatches=PROTOCOL_BATCH // PROTOCOL_MICROBATCH,
            sequences=PROTOCOL_MICROBATCH,
            service_s=self.layer_s / PROTOCOL_MICROBATCH,
            codec=self.codec,
            device=GPU,
        )
        return replace(scenario_of(options), sizes=self.sizes, paired_links=self.paired_links)


@dataclass(frozen=True)
class Uplinks:
    """The setting of `slow`."""

    num_fast: int
    num_slow: int

    def scenario(self) -> Scenario:
        fast = Link(2.5e6, 12.5e6, 0.01)
        slow = replace(fast, up_bytes_per_s=fast.up_bytes_per_s / 10)
        num = self.num_fast + self.num_slow
        return Scenario(
            peers=num,
            max_peers=num,
            stages=1,
            link=fast,
            links=(fast,) * 2 + (slow,) * self.num_slow,
            global_batch=60,
            samples_per_microbatch=1,
            service_s=1.0,
            speed_ratio=1.0,
            sync_mode=LOCAL,
            local_steps=10,
            warmup_s=300.0,
            until_s=900.0,
            sizes=Sizes(num_shards=16, shard_parameters=1 << 20, update_codec=INT8),
            bounds=Bounds(converge_s=1800.0, progress_s=3600.0),
            check_s=2.0,
            keep_log=False,
        )


@dataclass(frozen=True)
class Houses:
    """The setting of `houses`."""

    mode: str
    has_households: bool
    house: int = 4
    num_houses: int = 2

    def scenario(self) -> Scenario:
        num = self.house * self.num_houses
        return Scenario(
            peers=num,
            max_peers=num,
            stages=1,
            link=HOUSE_LINK,
            house=self.house,
            has_households=self.has_households,
            global_batch=HOUSES_BATCH,
            samples_per_microbatch=1,
            service_s=1.0,
            speed_ratio=1.0,
            sync_mode=self.mode,
            warmup_s=300.0,
            until_s=900.0,
            sizes=Sizes(num_shards=16, shard_parameters=1 << 20, update_codec=INT8),
            bounds=Bounds(converge_s=1800.0, progress_s=3600.0),
            check_s=2.0,
            keep_log=False,
        )


Cell = SimulateOptions | Compared | Published | Uplinks | Houses


@dataclass(frozen=True)
class Row:
    """A row of a table: its first column, and the simulations that the others are made of."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Rows alike."""

    head: tuple[str, ...]
    rows: tuple[Row, ...]
    columns: Callable[[Sequence[Values]], Sequence[str]]
    """Of the results of a row's cells."""

    def lines(self, results: Results) -> Iterator[str]:
        """In Markdown, with the command of the first cell below."""
        yield "| " + " | ".join(self.head) + " |"
        yield "|" + "---|" * len(self.head)
        for row in self.rows:
            columns = self.columns([results.of(cell) for cell in row.cells])
            yield "| " + " | ".join((row.name, *columns)) + " |"
        yield f"\n```\n{command(self.rows[0].cells[0])}\n```"


@dataclass
class Results:
    """Results by command, kept in a file where there is one."""

    path: Path | None
    _known: dict[str, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self._known = json.loads(self.path.read_text())

    def of(self, cell: Cell) -> Values:
        """Of a cell that has been made. Raises `KeyError` for another one."""
        return self._known[command(cell)]

    def make(self, cells: Sequence[Cell], num_jobs: int) -> None:
        """Simulates those that are not known."""
        wanted = {command(c): c for c in cells if command(c) not in self._known}
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
            running = {pool.submit(simulated, cell): name for name, cell in wanted.items()}
            for done in as_completed(running):
                self._known[running[done]] = done.result()
                if self.path is not None:
                    self.path.write_text(json.dumps(self._known, indent=1) + "\n")


def command(cell: Cell) -> str:
    """For a shell."""
    if isinstance(cell, Published):
        return f"python benchmarks/simulated_links.py protocol  # {cell}"
    if isinstance(cell, Uplinks):
        return f"python benchmarks/simulated_links.py slow  # {cell}"
    if isinstance(cell, Houses):
        return f"python benchmarks/simulated_links.py houses  # {cell}"
    text, options = "swarmnet simulate", cell
    if isinstance(cell, Compared):
        text, options = f"python benchmarks/assignments.py {cell.assignment}", cell.options
    for option in fields(options):
        value = getattr(options, option.name)
        if value != option.default:
            name = NAMES.get(option.name, option.name.replace("_", "-"))
            text += f" --{name} {value:g}" if isinstance(value, float) else f" --{name} {value}"
    return text


def simulated(cell: Cell) -> Values:
    """The result, without its curves."""
    if isinstance(cell, Compared):
        scenario = with_assignment(scenario_of(cell.options), cell.assignment)
    elif isinstance(cell, Published | Uplinks | Houses):
        scenario = cell.scenario()
    else:
        scenario = scenario_of(cell)
    said: list[str] = []
    run_scenario(scenario, said.append, as_json=True)
    values: Values = json.loads(said[-1])
    del values["samples_over_time"]
    return values


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def of_bounds(values: Values) -> list[str]:
    """Samples/s, and their parts of both bounds."""
    rate = values["samples_per_s"]
    parts = [percent(rate / values[name]) for name in ("bound_per_s", "best_per_s")]
    return [f"{rate:.2f}", *parts]


def reach() -> Table:
    """What codecs are worth on a slow link."""

    def cell(codec: str) -> SimulateOptions:
        return replace(EQUAL, links=REACH_LINK, service_s=REACH_SERVICE_S, codec=codec)

    def columns(cells: Sequence[Values]) -> list[str]:
        plain, coded = cells
        rate = coded["samples_per_s"]
        part = percent(rate / coded["bound_per_s"])
        return [f"{rate:.2f}", part, f"{rate / plain['samples_per_s']:.2f}"]

    rows = tuple(Row(f"`{codec}`", (cell(NONE), cell(codec))) for codec in REACH_CODECS)
    return Table(("codec", "samples/s", "of its own bound", "over fp32"), rows, columns)


def swarm() -> Table:
    """Utilisation: the part of the time in which a machine computes, without coding."""

    def cell(ms: int, codec: str, device: str) -> SimulateOptions:
        return replace(
            EQUAL,
            links=f"{SWARM_MBIT_S}/{ms}",
            service_s=SWARM_SERVICE_S,
            sequences=SWARM_SEQUENCES,
            codec=codec,
            device=device,
        )

    def columns(cells: Sequence[Values]) -> list[str]:
        return [percent(values["samples_per_s"] * SWARM_SERVICE_S) for values in cells]

    rows = tuple(
        Row(f"{ms} | {part} %", (cell(ms, INT8, GPU), cell(ms, INT8, CPU), cell(ms, NONE, CPU)))
        for ms, part in PUBLISHED.items()
    )
    head = ("ms", "SWARM, published", "`int8`, `gpu`", "`int8`, `cpu`", "fp32")
    return Table(head, rows, columns)


def homes() -> Table:
    """A small swarm on home links, by codec."""
    swarm_of = SimulateOptions(
        peers=12, stages=2, hours=0.2, churn=0.0, service_s=4.0, microbatches=40
    )

    def columns(cells: Sequence[Values]) -> list[str]:
        (values,) = cells
        spent = values["breakdown"]
        sent = f"{values['bytes_per_peer_s'] / 1e6:.2f} MB/s"
        return [*of_bounds(values), percent(spent[WORKING]), percent(spent[EXCHANGE]), sent]

    rows = tuple(
        Row(f"`{codec}` | `{update}`", (replace(swarm_of, codec=codec, update_codec=update),))
        for codec, update in HOME_CODECS
    )
    bounds = ("samples/s", "as they served", "best assignment")
    head = ("`--codec`", "`--update-codec`", *bounds, "machines at work")
    return Table((*head, "waiting for the exchange", "sent by a peer"), rows, columns)


def churn() -> Table:
    """Machines that come and go, by assignment; and a longer time."""

    def columns(cells: Sequence[Values]) -> list[str]:
        (values,) = cells
        faults, settled = values["faults"], values["settled_samples"]
        lost = values["samples_lost_mean"]
        recovery = sorted(values["recovery_s"])
        return [
            *of_bounds(values),
            percent(values["breakdown"][WORKING]),
            ", ".join(f"{n} {name}" for name, n in faults.items()),
            f"{values['moved']}",
            f"{lost:.0f} of {settled} ({percent(lost / max(1, settled))})",
            f"{values['stages_restarted']}; {values['shards_reset']}",
            f"{recovery[len(recovery) // 2]:.0f} s, {recovery[-1]:.0f} s" if recovery else "",
            f"{values['control_bytes_per_peer_s'] / 1e3:.1f} kB/s",
        ]

    rows = [
        Row(f"{SHORT_CHURN.peers} peers, `{name}`", (Compared(SHORT_CHURN, name),))
        for name in (ADAPTIVE, SWARM, STATIC)
    ]
    rows.append(Row(f"{LONG_CHURN.peers} peers, {LONG_CHURN.hours:g} hours", (LONG_CHURN,)))
    head = ("swarm", "samples/s", "as they served", "best assignment", "at work", "what happened")
    more = ("moves", "samples lost, mean of all shards", "stages begun afresh; shards reset")
    return Table((*head, *more, "recovery, median and longest", "control"), tuple(rows), columns)


def protocol(layer_s: float = LAYER_S) -> Table:
    """Seconds of a round in a public setting."""

    def columns(cells: Sequence[Values]) -> list[str]:
        return [f"{PROTOCOL_BATCH / values['samples_per_s']:.1f} s" for values in cells]

    rows = []
    for paired, links in ((True, "a boundary"), (False, "a machine")):
        for width, codec in ((FULL_WIDTH, INT8), (FULL_WIDTH, INT4), (NARROW_WIDTH, INT8)):
            cells = [Published(width, codec, mode, paired, layer_s) for mode in (ZERO, DELAYED)]
            bound = f"{cells[0].link_bound_s:.1f} s"
            rows.append(Row(f"{links} | {width} | `{codec}` | {bound}", tuple(cells)))
    head = ("a link for", "numbers a token", "codec", "the links need", "`zero`", "`delayed`")
    return Table(head, tuple(rows), columns)


def slow() -> Table:
    """One uplink of a tenth, in mode `local`."""

    def columns(cells: Sequence[Values]) -> list[str]:
        values, without = cells
        rate = values["samples_per_s"]
        part = f"{rate / without['samples_per_s']:.2f}"
        return [f"{rate:.2f}", part, f"{values['samples_lost']}"]

    five = Uplinks(5, 0)
    rows = (
        Row("five", (five, five)),
        Row("five, and one with a tenth of the uplink", (Uplinks(5, 1), five)),
        Row("six", (Uplinks(6, 0), five)),
    )
    return Table(("machines", "samples/s", "of five", "samples lost"), rows, columns)


def houses() -> Table:
    """Two houses, with and without a key."""

    def columns(cells: Sequence[Values]) -> list[str]:
        before, after = (values["samples_per_s"] for values in cells)
        return [f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"]

    rows = tuple(
        Row(f"`{mode}`", (Houses(mode, False), Houses(mode, True))) for mode in (ZERO, DELAYED)
    )
    head = ("mode", "samples/s", "with `--household`", "times")
    return Table(head, rows, columns)


TABLES: dict[str, Callable[[], Table]] = {
    "reach": reach,
    "swarm": swarm,
    "homes": homes,
    "churn": churn,
    "protocol": protocol,
    "slow": slow,
    "houses": houses,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+", choices=TABLES, metavar="TABLE")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--layer-s", type=float, default=LAYER_S, help="for protocol")
    options = parser.parse_args()
    tables = [
        protocol(options.layer_s) if name == "protocol" else TABLES[name]()
        for name in options.tables
    ]
    results = Results(options.results)
    cells = [cell for table in tables for row in table.rows for cell in row.cells]
    results.make(cells, options.jobs)
    for name, table in zip(options.tables, tables, strict=True):
        text = "\n".join(table.lines(results))
        print(text, end="\n\n", flush=True)
        if options.write:
            page = SUMMARY if name in IN_SUMMARY else TABLES_PAGE
            page.write_text(with_table(page.read_text(), name, text))


def with_table(page: str, name: str, text: str) -> str:
    """The page, with this table in place of the one of its name. Raises `ValueError` where it has
    no place for it."""
    begin, end = (f"<!-- {name}: {edge} -->" for edge in ("begin", "end"))
    start, stop = page.index(begin) + len(begin), page.index(end)
    return f"{page[:start]}\n{text}\n{page[stop:]}"


if __name__ == "__main__":
    main()
