"""What a person sees: a live screen where there is a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peer.observe.layout import Column, first_that_fits, fitting, shown_in
from peer.observe.table import GAP, FittedTable
from peer.options import ScreenName
from swarmnet.observe.events import Event, RoundFinished, is_for_programs
from swarmnet.observe.text import coverage, number, sentence, short_id, size
from swarmnet.observe.view_model import PeerRow, StageRow, ViewModel
from swarmnet.plurals import counted
from swarmnet.printable import printable
from swarmnet.spec import RunSpec

log = logging.getLogger("swarmnet.peer")

REFRESH_PER_S = 4
MAX_STAGES_SHOWN = 32
MAX_PEERS_SHOWN = 40
BAR_WIDTH, LEAST_BAR_WIDTH = 40, 8
"""Columns of a bar; where there is less room than the second there is none."""
BLOCKS_SHARE = 0.4
"""Of the width, at most, where each replica is a block; else their number is told."""
STATE_STYLES = {
    "active": "green",
    "joining": "yellow",
    "leaving": "yellow",
    "paused": "yellow",
    "lost": "red",
}


class PeerConsole(Console):
    """One that leaves it to its user what a broken pipe means."""

    def on_broken_pipe(self) -> None:
        """Raises `BrokenPipeError`."""
        raise BrokenPipeError("nobody reads it")


class Screen:
    """Shows a run. Use as a context manager; `show` redraws, `say` adds a line that stays.

    Args:
        mode: `auto` is live where the console is a terminal, else plain; `quiet` shows nothing
            but what is passed to `say`.
    """

    def __init__(self, console: Console, mode: ScreenName = "auto") -> None:
        self.console = console
        self.is_live = mode == "auto" and console.is_terminal
        self.is_quiet = mode == "quiet"
        self._live: Live | None = None
        self._drawn_at = float("-inf")
        self._is_mute = False
        """Nothing can be printed any more."""
        self._coverage = ""

    def __enter__(self) -> Screen:
        if self.is_live:
            # transient: what stays on the terminal is the lines and the summary
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._speak(self._live.start)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the terminal back. Idempotent."""
        if self._live is not None:
            self._speak(self._live.stop)
            self._live = None

    def _speak(self, speak: Callable[[], None]) -> None:
        """A terminal that is gone, or a pipe that nobody reads, ends what is said, and not the
        peer."""
        if self._is_mute:
            return
        try:
            speak()
        except (OSError, ValueError) as e:
            self._is_mute = True
            live, self._live = self._live, None
            if live is not None:  # else what goes to stderr would go the same way
                with contextlib.suppress(OSError, ValueError):
                    live.stop()
            log.warning("nothing more is printed (%s); all else goes on", e)
            with contextlib.suppress(OSError, ValueError):  # what is left there fails at the end
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.console.file.fileno())
                os.close(nowhere)

    def say(self, line: str) -> None:
        """One line of text, as it is (no markup), never wrapped: it may be there to be copied."""
        text = Text(printable(line))
        self._speak(lambda: self.console.print(text, soft_wrap=True))

    def draw(self, renderable: RenderableType) -> None:
        """Something that stays, such as the summary."""
        self._speak(lambda: self.console.print(renderable))

    def show(
        self, spec: RunSpec, model: ViewModel, events: Sequence[Event], limits: str = ""
    ) -> None:
        """Redraws, and adds lines for the events. `limits`: of this machine's peer."""
        if self.is_quiet:
            return
        for event in events:
            # A live screen shows the rounds itself.
            if not is_for_programs(event) and not (
                self.is_live and isinstance(event, RoundFinished)
            ):
                self.say(sentence(event, model.rounds))
        live, now = self._live, self.console.get_time()
        if live is not None:
            if now - self._drawn_at >= 1 / REFRESH_PER_S:
                self._drawn_at = now
                self._speak(lambda: live.update(dashboard(spec, model, limits), refresh=True))
        elif coverage(model) != self._coverage and not model.done:
            if not self._coverage and not any(
                r.num_replicas or r.num_joining for r in model.stages
            ):
                return  # nothing is known of the run yet
            self._coverage = coverage(model)
            self.say(self._coverage)


def dashboard(spec: RunSpec, model: ViewModel, limits: str = "") -> RenderableType:
    """The live screen. `limits`: of this machine's peer."""
    parts: list[RenderableType] = [Numbers(model), Text(), Stages(model.stages)]
    if model.data_risk:
        parts += [Text(), Text(model.data_risk, "yellow")]
    if limits:
        parts += [Text(), Text(f"limits: {limits}", "yellow")]
    if model.peers:
        parts += [Text(), peers_table(model.peers)]
    parts += [Text(line, "yellow") for line in allowance_lines(model.peers)[:MAX_PEERS_SHOWN]]
    return Framed(spec.name, Group(*parts))


@dataclass(frozen=True, slots=True)
class Framed:
    """In a frame, below a name, which is cut where there is no room for it."""

    name: str
    inside: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = Text(shown_in(console.encoding, self.name))
        yield Panel(self.inside, title=title, title_align="left", border_style="cyan")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of numbers: its name, and ways to say the value, the longest first."""

    name: str
    texts: tuple[str, ...]
    done: float | None = None
    """Part that a bar before the text shows as done; None for no bar."""


def _round(model: ViewModel) -> Line:
    if not model.end:
        now = f"{model.round + 1}"
        return Line("round", (f"{now}, without an end", now))
    shown = f"{min(model.round + 1, model.end)}"
    of_all = f"{shown} of {model.rounds}" if model.rounds else shown
    part = model.round / model.end
    if model.ends_with is None:
        return Line("round", (f"{of_all}, done" if model.done else of_all,), part)
    if model.done:
        return Line("round", (f"{of_all}, ended by its owner", f"{shown}, ended"), part)
    end = f"its owner ends it with round {model.ends_with}"
    return Line("round", (f"{of_all}; {end}", f"{shown}, ends with {model.ends_with}"), part)


def _lines(model: ViewModel) -> list[Line]:
    of_batch = f"{model.committed} of {model.global_batch}"
    of_all = f"{model.committed} of {counted(model.global_batch, 'sample')}"
    lines = [
        _round(model),
        Line(
            "global batch",
            (
                f"{of_all} committed",
                of_all,
                of_batch,
            ),
            min(1.0, model.committed / max(model.global_batch, 1)),
        ),
        Line("loss", (number(model.loss, 3),)),
    ]
    if model.held_out_loss is not None:
        loss, bits = f"{model.held_out_loss:.3f}", model.held_out_bits_per_byte
        both = f"{loss} ({bits:.3f} bits per byte)" if bits else loss
        lines.append(Line("held out", (both, loss)))
    lines.append(Line("speed", (f"{number(model.tokens_per_s)} tokens/s",)))
    lines.append(Line("peers", (number(model.num_live),)))
    if model.spread:
        spread = f"{model.spread:.2%}"
        lines.append(Line("spread", (f"{spread} between replicas that met last", spread)))
    return lines


@dataclass(frozen=True, slots=True)
class Numbers:
    """The run's numbers, as wide as there is room."""

    model: ViewModel

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _lines(self.model)
        room = options.max_width - max(len(line.name) for line in lines) - GAP
        texts = max(cell_len(line.texts[0]) for line in lines if line.done is not None)
        bar_width = min(BAR_WIDTH, room - texts - GAP)
        table = Table.grid(padding=(0, GAP, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
        for line in lines:
            value: RenderableType = first_that_fits(line.texts, room)
            if line.done is not None and bar_width >= LEAST_BAR_WIDTH:
                both = Table.grid(padding=(0, GAP, 0, 0))
                both.add_row(ProgressBar(1.0, line.done, width=bar_width), value)
                value = both
            table.add_row(line.name, value)
        yield table


def blocks(num_replicas: int, num_joining: int, is_ascii: bool) -> Text:
    """One for each replica of a stage, with what the terminal's encoding has."""
    full, hollow = "#o" if is_ascii else "■□"
    text = Text(full * num_replicas, "green")
    text.append(hollow * num_joining, "yellow")
    if num_replicas == 0:
        text.append(" nobody serves it", "red")
    return text


def _in_numbers(row: StageRow) -> str:
    joining = f" + {row.num_joining}" if row.num_joining else ""
    return counted(f"{row.num_replicas}{joining}", "replica")


@dataclass(frozen=True, slots=True)
class Stages:
    """Who serves each stage. What may go wrong with one stands in its line where there is room,
    else beneath."""

    stages: Sequence[StageRow]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self.stages[:MAX_STAGES_SHOWN]
        drawn = [blocks(r.num_replicas, r.num_joining, options.ascii_only) for r in rows]
        rates = [f"{number(r.samples_per_s, 1)} samples/s" if r.samples_per_s else "" for r in rows]
        risks = [row.risk if row.num_replicas else "" for row in rows]
        if any(text.cell_len > BLOCKS_SHARE * options.max_width for text in drawn):
            drawn = [
                Text(_in_numbers(r), "green") if r.num_replicas else text
                for r, text in zip(rows, drawn)
            ]
        names = [f"stage {row.stage}" for row in rows]
        columns = [
            Column("", names),
            Column("", [text.plain for text in drawn]),
            Column("", rates, goes=1),
            Column("", risks, goes=2),
        ]
        shown = fitting(columns, options.max_width, GAP)
        table = Table.grid(padding=(0, GAP, 0, 0))
        for texts in zip(
            [Text(name, "dim") for name in names],
            drawn,
            rates,
            [Text(risk, "yellow") for risk in risks],
        ):
            table.add_row(*(texts[i] for i in shown))
        yield table
        if len(self.stages) > MAX_STAGES_SHOWN:
            yield Text(f"and {len(self.stages) - MAX_STAGES_SHOWN} more")
        if 3 not in shown:
            yield from (Text(risk, "yellow") for risk in risks if risk)


def _state(row: PeerRow) -> str:
    return f"paused: {row.paused}" if row.paused and row.live else row.state


def allowance_lines(peers: Sequence[PeerRow]) -> list[str]:
    """What is left of what owners allow in a day or a month."""
    return [
        f"{short_id(row.peer_id)}: {size(used)} of {size(most)} {what}, "
        f"{size(max(0, most - used))} left"
        for row in peers
        if row.live
        for what, used, most in row.allowances
    ]


def peers_table(peers: Sequence[PeerRow]) -> RenderableType:
    """One row a peer."""
    rows = peers[:MAX_PEERS_SHOWN]
    columns = [
        Column("peer", [short_id(r.peer_id) for r in rows]),
        Column("stage", [str(r.stage) if r.stage >= 0 else "-" for r in rows]),
        Column("state", [_state(r) for r in rows], 1, [r.state for r in rows], shortens=3),
        Column("round", [str(r.round) for r in rows]),
        Column(
            "samples/s",
            [number(r.samples_per_s, 1) if r.samples_per_s else "-" for r in rows],
            goes=2,
        ),
        Column("queue", [str(r.queue_length) for r in rows], goes=7),
        Column("sent", [size(r.sent_bytes) for r in rows], goes=4),
        Column("received", [size(r.received_bytes) for r in rows], goes=5),
        Column("direct", [f"{r.direct_links}/{r.links}" for r in rows], goes=6),
        Column("re-routes", [str(r.rerouted) for r in rows], goes=8),
    ]
    if any(r.busiest_expert for r in rows):
        busiest = [f"{r.busiest_expert:.1f} x" if r.busiest_expert else "-" for r in rows]
        drops = [f"{100 * r.expert_drops:.1f} %" if r.busiest_expert else "-" for r in rows]
        columns.append(Column("busiest expert", busiest, goes=10))
        columns.append(Column("no room", drops, goes=9))
    if any(r.household for r in rows):
        houses = [short_id(r.household) if r.household else "-" for r in rows]
        columns.append(Column("household", houses, goes=3))
    numbers = [c.title for c in columns if c.title not in ("peer", "state", "household")]
    styles = {"state": [STATE_STYLES.get(r.state, "dim") for r in rows]}
    table = FittedTable(columns, numbers, styles)
    if len(peers) <= MAX_PEERS_SHOWN:
        return table
    return Group(table, Text(f" and {len(peers) - MAX_PEERS_SHOWN} more"))
