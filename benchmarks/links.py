"""How much of its speed a swarm keeps on home links: real peers on links of a given rate and delay.

    python benchmarks/links.py [--only 'default/*/int8/*'] [--repeat 3] [--window 12]   # as root
    python benchmarks/links.py --list           # the cells, and how often each was measured
    python benchmarks/links.py --show           # table and plots anew from what is there

Four machines, each a network namespace with its own uplink (`tapnet.py`): two stages of two
replicas, or four stages in the runs that are `wide` (`wide-80`: boundaries in a subspace of 80
dimensions). A cell is a run, a sync mode, codecs at both places (`[pipeline] codec` and `[sync]
codec`), a rate in Mbit/s and a delay in ms one way: `default/delayed/int8/20/12`. Rate `max` is a
switch without a limit, and `loopback` no switch at all.

Cells that end in `/homes` and `/households` are two homes of four machines, all replicas of one
stage. The machines of a home share its uplink, and a downlink of five times the rate; between them
nothing has a limit or a delay. In `households` those of a home have a key (`--household`).

Measured from the end of one round to the end of another, over as many rounds as there are from one
held-out loss to the next, or a multiple of that: tokens a second, and bytes a token, by the peers'
own counters and by the switch's. 100 % is the same mode and codecs over a switch without
limit and delay (`max/0`). The bound of a cell: a round takes what it takes on a link with this
delay and no limit (computation and latency, both measured: `max/12`), and then the time that the
busiest uplink needs for the bytes that the switch saw. In `delayed` the link works beside the
devices: `overlapped` takes the longer one of the two instead.

Results go to `benchmarks/results/links.json`, a measurement at a time; a cell that has `--repeat`
of them on such a machine is not measured again. The tables of `links.md` there, one for each
machine, have medians; the plots and the short table of `docs/wire.md` are of the machine with the
most measurements. A measurement takes 30 to 50 s, longer where rounds do. On two cores the peers
and the switch share them, at every rate alike.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import json
import os
import platform
import re
import signal
import statistics
import sys
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tapnet import Counters, Host, Link, Network, NoNetwork, inside, network, remove_stale  # noqa: E402

from swarmnet.identity import Identity  # noqa: E402
from tests.processes.running import SWARMNET, Command, Machine, machine  # noqa: E402

PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Of the peers."""
RESULTS = ROOT / "benchmarks" / "results" / "links.json"
TABLES, SUMMARY = RESULTS.with_suffix(".md"), ROOT / "docs" / "wire.md"
"""Pages: one with all that was measured, and the one that concludes from it."""
BEGIN, END = "<!-- links: begin -->", "<!-- links: end -->"
NAMES = ("one", "two", "three", "four")
HOME_NAMES = tuple(f"{home}-{name}" for home in ("red", "blue") for name in NAMES)
HOMES, HOUSEHOLDS = "homes", "households"
"""Machines without a key of their home, and with one."""
DOWN_TIMES = 5
"""The rate of a home's downlink, in those of its uplink."""
MODES = ("zero", "delayed")
CODECS = ("none", "int8", "int4")
CODEC = "int8"
"""Of runs that say nothing."""
RATES = ("100", "50", "20", "10")
"""Mbit/s of each uplink."""
NO_LIMIT, LOOPBACK = "max", "loopback"
DELAYS = ("12", "50")
"""ms one way."""
WIDE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1408,
}
FOUR_STAGES = {"num_stages": 4, "evaluate_every": 0}
"""A round of the wide model takes many seconds: no losses are measured between them."""
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "batch-256": {"pipeline": {"global_batch": 256}},
    "10M": {
        "model": {
            "hidden_size": 320,
            "num_hidden_layers": 8,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "intermediate_size": 864,
        }
    },
    "wide": {"model": WIDE, "pipeline": FOUR_STAGES},
    "wide-80": {"model": {**WIDE, "subspace": 80}, "pipeline": FOUR_STAGES},
    "one-stage": {
        "pipeline": {"num_stages": 1, "global_batch": 256, "evaluate_every": 0},
    },
}
"""What is other than in the run of `swarmnet local`, by table."""
HOMES_RUN = "one-stage"
ROUNDS = 1_000_000
WARMUP_ROUNDS = 1
"""Of `[sync]`."""
SETTLED_ROUNDS, SETTLE_S = 3, 6.0
"""Before a measurement: channels are open and rates known."""
LEAST_ROUNDS = 3
"""In a measurement."""
LIMIT_S = 240.0
"""For anything that is waited for."""
INCIDENTS = (
    "diverged",
    "samples_lost",
    "shard_reset",
    "shard_stale",
    "shard_unlike",
    "shard_promoted",
    "moved",
    "retracted",
    "rerouted",
)
"""Of a peer's totals: what a run on sound links has none of, or hardly any."""
METRICS_PORT = 9100
LOOK_S = 0.02


@dataclass(frozen=True)
class Cell:
    """What is measured."""

    run: str
    mode: str
    codec: str
    rate: str
    """Mbit/s, `max`, or `loopback`."""
    delay: str = "0"
    """ms one way."""
    homes: str = ""
    """`homes`, `households`, or each machine has an uplink of its own."""

    @property
    def key(self) -> str:
        """As in the file, and as `--only` matches it."""
        words = (self.run, self.mode, self.codec, self.rate, self.delay, self.homes)
        return "/".join(filter(None, words))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the machines."""
        return HOME_NAMES if self.homes else NAMES

    @property
    def houses(self) -> tuple[int, ...]:
        """The number of each machine's home: of each uplink."""
        return tuple(i // len(NAMES) if self.homes else i for i in range(len(self.names)))

    @property
    def on(self) -> str:
        """The link, in words."""
        rate = "no limit" if self.rate == NO_LIMIT else f"{self.rate} Mbit/s"
        return LOOPBACK if self.rate == LOOPBACK else f"{rate}, {self.delay} ms"

    def link(self) -> Link:
        """Of each machine, or of each home."""
        rate = 0.0 if self.rate == NO_LIMIT else 1e6 * float(self.rate)
        down = DOWN_TIMES * rate if self.homes else 0.0
        return Link(float(self.delay) / 1e3, rate, down_bits_per_s=down)

    def beside(self, rate: str, delay: str) -> Cell:
        """The same on another link."""
        return Cell(self.run, self.mode, self.codec, rate, delay, self.homes)


@dataclass
class Measured:
    """One measurement of a cell; bytes are those of all machines together."""

    rounds: int
    seconds: float
    tokens: int
    counted_bytes: int
    """Sent, by the peers' own counters."""
    by_method: dict[str, int]
    """The same by the method of the call."""
    switch_bytes: int = 0
    """Frames that left a machine, 0 on loopback."""
    busiest_bytes: int = 0
    """Of these, those over the uplink that carried the most."""
    dropped_frames: int = 0
    exchange_s: float = 0.0
    """What an exchange took, mean over peers."""
    device_s: float = 0.0
    """What a microbatch took a device, forward and backward, mean over peers."""
    incidents: dict[str, int] = field(default_factory=dict)
    """Since the run began, such as replicas that had another result: what may have cost time."""
    about: dict[str, Any] = field(default_factory=dict)
    """The machine that it was measured on."""


def cells() -> list[Cell]:
    """All, what others are compared with first."""
    found = []
    for run in RUNS:
        if run == HOMES_RUN:
            found += home_cells()
            continue
        for mode in MODES:
            found.append(Cell(run, mode, CODECS[0], LOOPBACK))
            for codec in CODECS:
                base = Cell(run, mode, codec, NO_LIMIT)
                found += [base, *(base.beside(NO_LIMIT, delay) for delay in DELAYS)]
                found += [base.beside(rate, delay) for delay in DELAYS for rate in RATES]
    return found


def home_cells() -> list[Cell]:
    """With a key beside without one."""
    return [
        Cell(HOMES_RUN, mode, codec, rate, DELAYS[0], homes)
        for mode in MODES
        for codec in CODECS
        for rate in (NO_LIMIT, *RATES)
        for homes in (HOMES, HOUSEHOLDS)
    ]


# ---- one measurement -----------------------------------------------------------------------------


def write_spec(cell: Cell, path: Path) -> dict[str, Any]:
    """The run of a cell as a run.toml; returns what is in it."""
    spec = tomllib.loads((ROOT / "swarmnet" / "runtime" / "default.toml").read_text())
    for table, values in RUNS[cell.run].items():
        spec[table] |= values
    spec["optimizer"]["rounds"] = ROUNDS
    spec["pipeline"]["codec"] = cell.codec
    spec["sync"] |= {"mode": cell.mode, "codec": cell.codec, "warmup_rounds": WARMUP_ROUNDS}
    lines = [f"{k} = {json.dumps(v)}" for k, v in spec.items() if not isinstance(v, dict)]
    for name, table in spec.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    path.write_text("\n".join(lines) + "\n")
    return spec


class Swarm:
    """The peers of a measurement."""

    def __init__(
        self,
        running: Machine,
        cell: Cell,
        hosts: Sequence[Host | None],
        spec: Path,
        num_stages: int,
        cores: str,
    ) -> None:
        """`hosts`: None for a peer on loopback. `cores`: as of `measure`."""
        self._num_stages = num_stages
        self._running = running
        self._cell = cell
        self._pinning = ("taskset", "-c", cores) if cores else ()
        self._hosts = hosts
        self.peers: list[Command] = []
        first = self._start(0, "--spec", str(spec))
        running.until_ready(first)
        join = ("--join", self._address_of(first, hosts[0]))
        for i in range(1, len(hosts)):
            self._start(i, *join)
        running.until_ready(*self.peers)

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds that the first peer has told of."""
        for peer in self.peers:
            if peer.process.poll() is not None:
                raise AssertionError(peer.describe())
        return self.peers[0].events("round")

    def numbers(self) -> list[dict[str, float]]:
        """Of each peer, what it says at /metrics."""
        found = []
        for i, host in enumerate(self._hosts):
            with contextlib.nullcontext() if host is None else inside(host.space):
                url = f"http://127.0.0.1:{METRICS_PORT + i}/metrics"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    found.append(_parsed(answer.read().decode()))
        return found

    def _start(self, i: int, *arguments: str) -> Command:
        host = self._hosts[i]
        entering = () if host is None else ("ip", "netns", "exec", host.space)
        if self._cell.homes == HOUSEHOLDS:
            key = self._running.folder / f"home-{self._cell.houses[i]}.key"
            Identity.load_or_create(key)
            arguments = (*arguments, "--household", str(key))
        peer = self._running.start_peer(
            self._cell.names[i],
            "--parent-pid",
            str(os.getpid()),
            "--stage",
            str(i % self._num_stages),
            "--metrics-port",
            str(METRICS_PORT + i),
            "--host",
            "127.0.0.1" if host is None else "0.0.0.0",
            *arguments,
            command=(*entering, *self._pinning, *SWARMNET),
            environment={"PYTHONPATH": PYTHONPATH},
        )
        self.peers.append(peer)
        return peer

    @staticmethod
    def _address_of(peer: Command, host: Host | None) -> str:
        address = peer.address
        return address if host is None else re.sub(r"/ip4/[^/]+", f"/ip4/{host.address}", address)


def _parsed(text: str) -> dict[str, float]:
    """Samples of Prometheus' text form, by name and labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@dataclass(frozen=True)
class Look:
    """What is counted at one moment."""

    peers: list[dict[str, float]]
    switch: dict[str, Counters]

    def grown(self, since: Look, name: str) -> float:
        """A peer's number, summed over peers."""
        return sum(p.get(name, 0.0) - q.get(name, 0.0) for p, q in zip(self.peers, since.peers))


def measure(cell: Cell, window_s: float, congestion: str, cores: str) -> Measured:
    """`cores`: that peers are held to, as for `taskset -c`; all where it is empty. Raises
    `NoNetwork` where this machine cannot; `AssertionError` with what the peers said where the run
    does not go on."""
    with contextlib.ExitStack() as ends:
        made: Network | None = None
        hosts: list[Host | None] = [None] * len(cell.names)
        if cell.rate != LOOPBACK:
            made = ends.enter_context(network(cell.names, cell.link(), congestion, cell.houses))
            hosts = list(made.hosts.values())
        running = ends.enter_context(machine())
        path = running.folder / "run.toml"
        spec = write_spec(cell, path)
        swarm = Swarm(running, cell, hosts, path, spec["pipeline"]["num_stages"], cores)

        def look() -> Look:
            return Look(swarm.numbers(), made.counters() if made else {})

        _until_all_serve(swarm, running)
        _until(lambda: len(swarm.rounds()) >= SETTLED_ROUNDS, running)
        settled_s = time.monotonic() + SETTLE_S
        _until(lambda: time.monotonic() >= settled_s, running)
        _until_all_own(swarm, running)
        begin, first = _at_round_end(swarm, running), look()
        least_s = time.monotonic() + window_s
        period = max(LEAST_ROUNDS, spec["pipeline"].get("evaluate_every", 0))

        def is_enough() -> bool:
            count = swarm.rounds()[-1]["round"] + 1 - begin["round"]
            return time.monotonic() >= least_s and count > 0 and count % period == 0

        _until(is_enough, running)
        end, last = _at_round_end(swarm, running), look()
        about = about_machine(congestion, cores)
    rounds = end["round"] - begin["round"]
    seconds = end["time_unix_s"] - begin["time_unix_s"]
    batch = spec["pipeline"]["global_batch"] * spec["model"]["max_position_embeddings"]
    return _measured(cell, rounds, seconds, rounds * batch, first, last, about)


def _measured(
    cell: Cell,
    rounds: int,
    seconds: float,
    tokens: int,
    first: Look,
    last: Look,
    about: dict[str, Any],
) -> Measured:
    names = sorted(set().union(*last.peers))
    sent = [n for n in names if n.startswith('swarmnet_transport_bytes_total{direction="sent"')]
    by_method = {re.findall(r'method="([^"]*)"', n)[0]: round(last.grown(first, n)) for n in sent}
    switch = {n: c.sent_bytes - first.switch[n].sent_bytes for n, c in last.switch.items()}
    uplinks: Counter[int] = Counter()
    for house, (name, c) in zip(cell.houses, last.switch.items()):
        uplinks[house] += c.crossed_bytes - first.switch[name].crossed_bytes
    return Measured(
        rounds=rounds,
        seconds=seconds,
        tokens=tokens,
        counted_bytes=sum(by_method.values()),
        by_method={method: count for method, count in by_method.items() if count},
        switch_bytes=sum(switch.values()),
        busiest_bytes=max(uplinks.values(), default=0),
        dropped_frames=sum(
            c.dropped_frames - first.switch[n].dropped_frames for n, c in last.switch.items()
        ),
        exchange_s=_mean(first, last, "swarmnet_exchange_seconds"),
        device_s=_mean(first, last, "swarmnet_microbatch_device_seconds"),
        incidents=_incidents(last),
        about=about,
    )


def _incidents(look: Look) -> dict[str, int]:
    found = {}
    for name in INCIDENTS:
        if count := round(sum(p.get(f"swarmnet_{name}_total", 0.0) for p in look.peers)):
            found[name] = count
    return found


def _until_all_serve(swarm: Swarm, running: Machine) -> None:
    """Waits until each peer has been in an exchange: one that still downloads its stage, over a
    link that is full, does no work. Raises `AssertionError` after `LIMIT_S`."""
    end_s = time.monotonic() + LIMIT_S
    while not all(p.get("swarmnet_exchange_seconds_count") for p in swarm.numbers()):
        assert time.monotonic() < end_s, "a peer does not come to serve its stage"
        _at_round_end(swarm, running)


def _until_all_own(swarm: Swarm, running: Machine) -> None:
    """Waits until owners have the optimizer state that they fetch when a run begins."""
    while True:
        before = _fetched(swarm)
        for _ in range(2):
            _at_round_end(swarm, running)
        if _fetched(swarm) == before:
            return


def _fetched(swarm: Swarm) -> float:
    """Bytes of optimizer state that peers have sent to each other."""
    return sum(
        value
        for peer in swarm.numbers()
        for name, value in peer.items()
        if name.startswith("swarmnet_transport_bytes_total") and "fetch_optimizer" in name
    )


def _mean(first: Look, last: Look, histogram: str) -> float:
    count = last.grown(first, f"{histogram}_count")
    return last.grown(first, f"{histogram}_sum") / count if count else 0.0


def _at_round_end(swarm: Swarm, running: Machine) -> dict[str, Any]:
    """Waits for the next round to end; returns what was told of it."""
    known = len(swarm.rounds())
    _until(lambda: len(swarm.rounds()) > known, running)
    return swarm.rounds()[-1]


def _until(condition: Callable[[], object], running: Machine) -> None:
    running.until(condition, LIMIT_S)


def about_machine(congestion: str, cores: str) -> dict[str, Any]:
    """What a figure depends on beside the cell."""
    model = platform.machine()
    with contextlib.suppress(OSError, IndexError):
        cpu = Path("/proc/cpuinfo").read_text()
        model = re.findall(r"model name\s*: (.*)", cpu)[0]
    about = {"cores": os.cpu_count(), "cpu": model, "load": round(os.getloadavg()[0], 1)}
    about["congestion"] = congestion or _default_congestion()
    return about | ({"peer_cores": _num_cores(cores)} if cores else {})


def _num_cores(cores: str) -> int:
    """Of a list as `taskset -c` takes it: `0,2-3` are three."""
    ends = [part.split("-") for part in cores.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in ends)


def _default_congestion() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


# ---- all of them ---------------------------------------------------------------------------------


Results = dict[str, list[dict[str, Any]]]
"""Measurements by cell, of one machine."""


def load(path: Path) -> dict[str, Results]:
    """The measurements so far, by machine."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, cell: Cell, measured: Measured) -> None:
    """Adds one measurement to the file."""
    results = load(path)
    results.setdefault(machine_of(measured.about), {}).setdefault(cell.key, []).append(
        asdict(measured)
    )
    text = json.dumps(results, indent=1, sort_keys=True)
    path.write_text(text + "\n")


def machine_of(about: dict[str, Any]) -> str:
    """What figures that are compared have in common."""
    held = f"peers on {about['peer_cores']} of them, " if "peer_cores" in about else ""
    return f"{about['cores']} cores ({about['cpu']}), {held}TCP {about['congestion']}"


@dataclass(frozen=True)
class Figures:
    """Medians of a cell."""

    all_tokens_per_s: tuple[float, ...]
    """Of each measurement, the smallest first."""
    tokens_per_s: float
    seconds: float
    """A round."""
    counted: float
    """Bytes a token, by the peers."""
    switched: float
    """Bytes a token, by the switch."""
    uplink_bytes: float
    """A round, of the busiest uplink."""


def figures(results: Results, cell: Cell) -> Figures | None:
    """None where the cell has not been measured."""
    found = [Measured(**m) for m in results.get(cell.key, [])]
    if not found:
        return None
    speeds = sorted(m.tokens / m.seconds for m in found)
    return Figures(
        tuple(speeds),
        statistics.median(speeds),
        statistics.median(m.seconds / m.rounds for m in found),
        statistics.median(m.counted_bytes / m.tokens for m in found),
        statistics.median(m.switch_bytes / m.tokens for m in found),
        statistics.median(m.busiest_bytes / m.rounds for m in found),
    )


@dataclass(frozen=True)
class Row:
    """A cell beside what it is compared with."""

    cell: Cell
    found: Figures
    percent: float | None
    """Of the speed without limit and delay."""
    bound: float | None
    """Tokens/s: computation, latency and bytes one after the other."""
    overlapped: float | None
    """Tokens/s: the longer one of computation with latency, and bytes."""


def row_of(results: Results, cell: Cell) -> Row | None:
    """None where the cell has not been measured."""
    found = figures(results, cell)
    if found is None:
        return None
    if cell.rate == LOOPBACK:
        return Row(cell, found, None, None, None)
    best = figures(results, cell.beside(NO_LIMIT, "0"))
    no_limit = figures(results, cell.beside(NO_LIMIT, cell.delay))
    percent = 100 * found.tokens_per_s / best.tokens_per_s if best else None
    if cell.rate == NO_LIMIT or no_limit is None:
        return Row(cell, found, percent, None, None)
    sending_s = 8 * found.uplink_bytes / (1e6 * float(cell.rate))
    tokens = found.tokens_per_s * found.seconds
    return Row(
        cell,
        found,
        percent,
        tokens / (no_limit.seconds + sending_s),
        tokens / max(no_limit.seconds, sending_s),
    )


def table(results: Results) -> Iterator[str]:
    """In Markdown, of what has been measured on one machine."""
    yield from table_of_homes(results)
    for run in RUNS:
        if run == HOMES_RUN:
            continue
        rows = [r for c in cells() if c.run == run and (r := row_of(results, c)) is not None]
        if not rows:
            continue
        yield f"Run `{run}`:"
        yield ""
        yield (
            "| mode | codecs | link | tokens/s | measured | % | bound | of it | overlapped | of it "
            "| B a token, peers | switch |"
        )
        yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
        yield from map(_line, rows)
        yield ""


def table_of_homes(results: Results) -> Iterator[str]:
    """Of households, beside the same homes without a key."""
    found = [(c, figures(results, c), figures(results, _with_key(c))) for c in home_cells()]
    pairs = [(c, a, b) for c, a, b in found if c.homes == HOMES and a and b]
    if not pairs:
        return
    yield f"Run `{HOMES_RUN}`, two homes of four machines, without `--household` and with it:"
    yield ""
    yield (
        "| mode | codecs | uplink of a home | tokens/s | with | times | measured | B a token over "
        "the busiest uplink | with | of it |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for cell, alone, together in pairs:
        speeds = alone.tokens_per_s, together.tokens_per_s
        tokens = [f.tokens_per_s * f.seconds for f in (alone, together)]
        sent = [f.uplink_bytes / t for f, t in zip((alone, together), tokens)]
        num = min(len(alone.all_tokens_per_s), len(together.all_tokens_per_s))
        columns = [cell.mode, cell.codec, cell.on, *(f"{x:,.0f}" for x in speeds)]
        columns += [f"{speeds[1] / speeds[0]:.2f}", str(num), *(f"{x:,.0f}" for x in sent)]
        yield "| " + " | ".join([*columns, f"{sent[1] / sent[0]:.2f}"]) + " |"
    yield ""


def _with_key(cell: Cell) -> Cell:
    return replace(cell, homes=HOUSEHOLDS)


def _line(row: Row) -> str:
    cell, found = row.cell, row.found
    speeds = found.all_tokens_per_s
    spread = f", {speeds[0]:,.0f} to {speeds[-1]:,.0f}" if len(speeds) > 1 else ""
    columns = [
        cell.mode,
        cell.codec,
        cell.on,
        f"{found.tokens_per_s:,.0f}",
        f"{len(speeds)}{spread}",
    ]
    columns.append("" if row.percent is None else f"{row.percent:.0f}")
    for bound in (row.bound, row.overlapped):
        columns.append("" if bound is None else f"{bound:,.0f}")
        columns.append("" if bound is None else f"{found.tokens_per_s / bound:.2f}")
    columns += [f"{found.counted:,.0f}", f"{found.switched:,.0f}" if found.switched else ""]
    return "| " + " | ".join(columns) + " |"


def summary(results: Results) -> Iterator[str]:
    """In Markdown: what is left of the speed at each rate, with the codec of most runs."""
    yield "| run | mode | one way | a round, no limit | no limit |" + "".join(
        f" {rate} Mbit/s |" for rate in RATES
    )
    yield "|---|---|---|---|---|" + "---|" * len(RATES)
    for run in RUNS:
        for mode, delay in itertools.product(MODES, DELAYS):
            cells_here = [Cell(run, mode, CODEC, rate, delay) for rate in (NO_LIMIT, *RATES)]
            rows = [row_of(results, cell) for cell in cells_here]
            if rows[0] is not None and any(rows[1:]):
                left = ["" if r is None or not r.percent else f"{r.percent:.0f} %" for r in rows]
                beside = f"{delay} ms | {rows[0].found.seconds:.2f} s"
                yield f"| `{run}` | `{mode}` | {beside} | " + " | ".join(left) + " |"


def show(path: Path) -> None:
    """Prints the tables, puts them between their marks in both pages, and draws."""
    machines = sorted(load(path).items(), key=lambda item: -_num(item[1]))
    lines = []
    for name, results in machines:
        lines += [f"{_num(results)} measurements on {name}.", "", *table(results)]
        if results is machines[0][1]:
            for run in RUNS:
                if run != HOMES_RUN and any(key.startswith(f"{run}/") for key in results):
                    plot(results, run)
                    lines += [f"![Speed over the rate of the links](links-{run}.svg)", ""]
    print("\n".join(lines))
    put(TABLES, lines)
    if machines:
        put(SUMMARY, [*summary(machines[0][1]), ""])


def put(page: Path, lines: Sequence[str]) -> None:
    """Between the marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page} has no {BEGIN} and {END}")
    page.write_text(before + BEGIN + "\n" + "\n".join(lines) + END + after)


def _num(results: Results) -> int:
    return sum(map(len, results.values()))


def plot(results: Results, run: str) -> None:
    """`links-<run>.svg`: percent over the rate, a panel for each mode and delay."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "links"  # the same figures, the same file
    from matplotlib import pyplot as plt

    colours = dict(zip(CODECS, ("tab:red", "tab:blue", "tab:green")))
    figure, axes = plt.subplots(1, len(MODES), figsize=(9, 3.6), sharey=True)
    for axis, mode in zip(axes, MODES):
        for codec in CODECS:
            for delay, style in zip(DELAYS, ("-o", "--s")):
                cells_here = [Cell(run, mode, codec, rate, delay) for rate in RATES]
                found = [(c, row_of(results, c)) for c in cells_here]
                points = [(float(c.rate), r.percent) for c, r in found if r and r.percent]
                if points:
                    axis.plot(
                        *zip(*points),
                        style,
                        color=colours[codec],
                        ms=4,
                        label=f"{codec}, {delay} ms",
                    )
        axis.set(title=f"`{mode}`", xscale="log", xlabel="Mbit/s of each uplink", ylim=(0, 105))
        axis.set_xticks([float(r) for r in RATES], RATES)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("% of the speed without limit and delay")
    if axes[-1].lines:
        axes[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS.parent / f"links-{run}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="of cells")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of a cell")
    parser.add_argument("--window", type=float, default=12.0, help="seconds of a measurement")
    parser.add_argument("--congestion", default="", help="TCP's, in the namespaces: cubic, bbr")
    parser.add_argument("--cores", default="", help="that peers are held to: 0,1 (taskset -c)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file")
    parser.add_argument("--list", action="store_true", help="name the cells and end")
    parser.add_argument("--show", action="store_true", help="table and plots of what is there")
    parser.add_argument("--dry", action="store_true", help="measure and print, keep nothing")
    args = parser.parse_args()
    wanted = [c for c in cells() if any(fnmatch.fnmatch(c.key, p) for p in args.only)]
    if not wanted:
        parser.error("no cell has such a name; --list names them")
    if args.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
        for cell in wanted:
            print(f"{cell.key:36} {num_here(cell, args)}")
        return
    if args.show:
        show(args.results)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("links.py: ended by a signal"))
    try:
        measure_all(wanted, args)
    except NoNetwork as error:
        raise SystemExit(f"links.py: {error}") from None


def measure_all(wanted: Sequence[Cell], args: argparse.Namespace) -> None:
    """What is not there yet: every cell once, then every cell again."""
    remove_stale()
    for number in range(args.repeat):
        for cell in wanted:
            if not args.dry and num_here(cell, args) > number:
                continue
            measured = measure(cell, args.window, args.congestion, args.cores)
            if not args.dry:
                keep(args.results, cell, measured)
            print(_said(cell, measured), flush=True)


def num_here(cell: Cell, args: argparse.Namespace) -> int:
    """Measurements of a cell on such a machine."""
    machine = machine_of(about_machine(args.congestion, args.cores))
    return len(load(args.results).get(machine, {}).get(cell.key, []))


def _said(cell: Cell, measured: Measured) -> str:
    each = measured.tokens / measured.seconds
    counted = measured.counted_bytes / measured.tokens
    switched = measured.switch_bytes / measured.tokens
    return (
        f"{cell.key:36} {each:9,.0f} tokens/s, {measured.seconds / measured.rounds:6.2f} s a round "
        f"of {measured.rounds}, {counted:6,.0f} B a token (switch {switched:6,.0f}), "
        f"exchange {measured.exchange_s:.2f} s, device {measured.device_s * 1e3:.0f} ms, "
        f"{measured.dropped_frames} dropped, load {measured.about['load']}"
        + "".join(f", {name} {count}" for name, count in measured.incidents.items())
    )


if __name__ == "__main__":
    main()
