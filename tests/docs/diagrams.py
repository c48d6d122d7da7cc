"""Diagrams of the pages, from their text here. As a program it draws them anew:

    python -m tests.docs.diagrams

A line of a text is `from arrow to: label`. In a diagram of peers, `--` is a dial and `..` a way
through a relay, and `<` and `>` are its heads. In a diagram of messages they come one after the
other, `..` is an answer, and a line without an arrow is a note.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

IMAGES = Path(__file__).parents[2] / "docs" / "images"
LINE = re.compile(r"(\w) (<?)(--|\.\.)(>?) (\w): (.*)")
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "swarmnet",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
}
BLUE = "#4a6da7"
DASHES = {"--": "-", "..": "--"}
BOX = {"boxstyle": "round,pad=0.5", "facecolor": "#eef3fa", "edgecolor": BLUE}
ABOVE = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
ROW = 0.42
"""Inches from a message to the next."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Who stands where, and who reaches whom."""

    places: dict[str, tuple[float, float, str]]
    """Inches from the left and the bottom, and what a box says, by name."""
    text: str
    size: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages between columns, from above."""

    columns: dict[str, str]
    text: str
    width: float
    """Inches."""


REACHABLE = Peers(
    places={
        "A": (1.2, 2.9, "A: at home,\nbehind a router"),
        "B": (6.8, 2.9, "B: at home,\nbehind a router"),
        "S": (4.0, 1.75, "S: can be dialled,\nrelays for others"),
        "V": (4.0, 0.35, "V: two ports are forwarded to it"),
    },
    text="""
        A --> S: dials
        B --> S: dials
        A <..> B: at first: through S
        A <--> B: then straight: both dial at once
        A --> V: dials
        B --> V: dials
        V <--> S: either dials
    """,
    size=(8.0, 3.5),
)
MICROBATCH = Messages(
    columns={
        "F": "Feeder",
        "A": "Replica of stage 0",
        "B": "Replica of stage 1",
        "C": "Replica of stage 2 (last)",
    },
    text="""
        F --> F: mark a slot as launched, read its tokens
        F --> A: step(tokens, targets)
        A --> A: forward
        A --> B: step(activation, targets)
        B --> B: forward
        B --> C: step(activation, targets)
        C --> C: forward, loss, backward
        C ..> B: gradient of the activation
        B --> B: backward, add to gradient buffer
        B ..> A: gradient of the activation
        A --> A: backward, add to gradient buffer
        A ..> F: loss and path
        F --> F: mark the slot as committed
        F --> A: commit
        A --> B: commit
        B --> C: commit
        Global batch committed and all feeders sealed: the round is drained.
        Each stage makes its update, then the next round opens.
    """,
    width=9.6,
)
UPDATE = Messages(
    columns={
        "R": "Every replica\nof the stage",
        "P": "Primary of shard j",
        "B": "Backup of shard j",
        "S": "Two collectors (the roots\nof the first two stages)",
    },
    text="""
        R --> P: reduce(gradient of shard j, ballot)
        P --> P: wait for all live replicas, sum in order of peer ids
        P --> S: norm(sum of squares of shard j), of all stages
        P --> B: sums(of shard j and others, while the norm is on its way)
        S ..> P: sum over all stages: the clip factor (the first answer counts)
        P --> B: mirror(scale, digest of the sum or the sum itself, ballot)
        P --> P: AdamW step
        B --> B: the same AdamW step
        B ..> P: done (digest of the result)
        P ..> R: new parameters (same digest: keep yours)
    """,
    width=11.2,
)
DIAGRAMS = {"reachable": REACHABLE, "microbatch": MICROBATCH, "update": UPDATE}
"""By the name of the picture."""


def drawn(diagram: Peers | Messages) -> str:
    """As SVG, which needs no script, no network and no font but a usual one."""
    with matplotlib.rc_context(STYLE):
        figure = _of_peers(diagram) if isinstance(diagram, Peers) else _of_messages(diagram)
        out = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+$", "", out.getvalue().decode(), flags=re.MULTILINE)


def _of_peers(diagram: Peers) -> Figure:
    figure, axes = _empty(*diagram.size)
    boxes = {
        name: axes.text(x, y, label, ha="center", va="center", bbox=BOX, zorder=3)
        for name, (x, y, label) in diagram.places.items()
    }
    FigureCanvasAgg(figure).draw()  # arrows end at boxes, whose sizes are known now
    lines = [_parts(line) for line in _lines(diagram.text)]
    drawn_before: set[tuple[str, str]] = set()
    for source, left, dash, right, target, label in lines:
        pair = (source, target)
        is_alone = sum((each[0], each[4]) == pair for each in lines) == 1
        bend = 0.0 if is_alone else (-0.08 if pair in drawn_before else 0.08)
        drawn_before.add(pair)
        start, end = diagram.places[source][:2], diagram.places[target][:2]
        arrow = FancyArrowPatch(
            start,
            end,
            arrowstyle=f"{left}-{right}",
            linestyle=DASHES[dash],
            connectionstyle=f"arc3,rad={bend}",
            patchA=boxes[source].get_bbox_patch(),
            patchB=boxes[target].get_bbox_patch(),
            shrinkA=3,
            shrinkB=3,
            mutation_scale=12,
            color=BLUE,
        )
        axes.add_patch(arrow)
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - bend * (end[0] - start[0]) / 2
        axes.text(x, y, label, ha="center", va="center", bbox=ABOVE, zorder=2)
    return figure


def _of_messages(diagram: Messages) -> Figure:
    lines = _lines(diagram.text)
    height = (len(lines) + 2) * ROW
    figure, axes = _empty(diagram.width, height)
    step = diagram.width / len(diagram.columns)
    at = {name: (i + 0.5) * step for i, name in enumerate(diagram.columns)}
    for name, label in diagram.columns.items():
        axes.plot([at[name]] * 2, [0.1, height - ROW], color="#b8c4d6", linewidth=1, zorder=0)
        axes.text(at[name], height - ROW, label, ha="center", va="center", bbox=BOX)
    for i, line in enumerate(lines, start=2):
        y = height - i * ROW - 0.1
        if LINE.fullmatch(line) is None:
            axes.text(diagram.width / 2, y, line, ha="center", va="center", bbox=BOX)
            continue
        source, _, dash, _, target, label = _parts(line)
        x0, x1 = at[source], at[target]
        if source == target:
            is_last = source == list(at)[-1]
            side, by = ("right", -0.12) if is_last else ("left", 0.12)
            axes.plot([x0], [y], "o", color=BLUE, markersize=5)
            axes.text(x0 + by, y, label, ha=side, va="center", bbox=ABOVE)
            continue
        arrow = {"arrowstyle": "->", "linestyle": DASHES[dash], "color": BLUE}
        axes.annotate("", (x1, y), (x0, y), arrowprops=arrow | {"shrinkA": 0, "shrinkB": 0})
        axes.text((x0 + x1) / 2, y + 0.1, label, ha="center", va="center", bbox=ABOVE)
    return figure


def _empty(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure((width, height), dpi=72, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _parts(line: str) -> tuple[str, ...]:
    match = LINE.fullmatch(line)
    assert match is not None, line
    return match.groups()


if __name__ == "__main__":
    for name, diagram in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(drawn(diagram))
