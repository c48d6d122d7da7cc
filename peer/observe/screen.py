"""What a person sees: a live screen where there is a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peer.console import without_controls
from peer.observe.events import Event, RoundFinished, is_for_programs
from peer.observe.text import coverage, number, sentence, short_id, size
from peer.observe.view_model import PeerRow, StageRow, ViewModel
from peer.options import ScreenName
from swarmnet.spec import RunSpec

log = logging.getLogger("swarmnet.peer")

REFRESH_PER_S = 4
MAX_STAGES_SHOWN = 32
MAX_PEERS_SHOWN = 40
BAR_WIDTH = 40
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
        """A terminal that is gone, a pipe that nobody reads or a full disk behind it ends what is
        said, and not the peer."""
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
        """A line of text, as it is (no markup), never wrapped: it may be there to be copied."""
        text = Text(without_controls(line))
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
    parts: list[RenderableType] = [_numbers(model), Text(), _stages(model.stages)]
    if model.data_risk:
        parts += [Text(), Text(model.data_risk, "yellow")]
    if limits:
        parts += [Text(), Text(f"limits: {limits}", "yellow")]
    if model.peers:
        parts += [Text(), peers_table(model.peers)]
    return Panel(
        Group(*parts),
        title=Text(without_controls(spec.name)),
        title_align="left",
        border_style="cyan",
    )


def _numbers(model: ViewModel) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_column()
    shown = min(model.round + 1, model.rounds)
    run = ProgressBar(total=max(model.rounds, 1), completed=model.round, width=BAR_WIDTH)
    table.add_row("round", run, f"{shown} of {model.rounds}" + (", done" if model.done else ""))
    committed = min(model.committed, model.global_batch)
    batch = ProgressBar(total=model.global_batch, completed=committed, width=BAR_WIDTH)
    table.add_row(
        "global batch", batch, f"{model.committed} of {model.global_batch} samples committed"
    )
    held_out = "-"
    if model.held_out_loss is not None:
        bits = model.held_out_bits_per_byte
        held_out = f"{model.held_out_loss:.3f}" + (f" ({bits:.3f} bits per byte)" if bits else "")
    table.add_row("loss", f"{number(model.loss, 3)}   held out {held_out}", "")
    table.add_row("speed", f"{number(model.tokens_per_s)} tokens/s", f"{model.num_live} peers")
    if model.spread:
        table.add_row("spread", f"{model.spread:.2%} between replicas that met last", "")
    return table


@dataclass(frozen=True, slots=True)
class Blocks:
    """One for each replica of a stage, with what the terminal's encoding has."""

    num_replicas: int
    num_joining: int

    def text(self, is_ascii: bool) -> Text:
        full, hollow = "#o" if is_ascii else "■□"
        blocks = Text(full * self.num_replicas, "green")
        blocks.append(hollow * self.num_joining, "yellow")
        if self.num_replicas == 0:
            blocks.append(" nobody serves it", "red")
        return blocks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text(options.ascii_only)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.text(options.ascii_only))


def _stages(stages: Sequence[StageRow]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for row in stages[:MAX_STAGES_SHOWN]:
        blocks = Blocks(row.num_replicas, row.num_joining)
        rate = f"{number(row.samples_per_s, 1)} samples/s" if row.samples_per_s else ""
        risk = Text(row.risk if row.num_replicas else "", "yellow")
        table.add_row(Text(f"stage {row.stage}", "dim"), blocks, rate, risk)
    if len(stages) > MAX_STAGES_SHOWN:
        table.add_row("", f"and {len(stages) - MAX_STAGES_SHOWN} more", "")
    return table


def _state(row: PeerRow) -> str:
    return f"paused: {row.paused}" if row.paused and row.live else row.state


def peers_table(peers: Sequence[PeerRow]) -> Table:
    """One row a peer."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("peer")
    table.add_column("stage", justify="right")
    table.add_column("state")
    for title in ("round", "samples/s", "queue", "sent", "received", "direct", "re-routes"):
        table.add_column(title, justify="right")
    for row in peers[:MAX_PEERS_SHOWN]:
        table.add_row(
            Text(short_id(row.peer_id)),
            str(row.stage) if row.stage >= 0 else "-",
            Text(without_controls(_state(row)), STATE_STYLES.get(row.state, "dim")),
            str(row.round),
            number(row.samples_per_s, 1) if row.samples_per_s else "-",
            str(row.queue_length),
            size(row.sent_bytes),
            size(row.received_bytes),
            f"{row.direct_links}/{row.links}",
            str(row.rerouted),
        )
    if len(peers) > MAX_PEERS_SHOWN:
        table.add_row(f"and {len(peers) - MAX_PEERS_SHOWN} more")
    return table
