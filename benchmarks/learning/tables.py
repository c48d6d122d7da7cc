"""The tables and plots of benchmarks/results/convergence.md, and the table of docs/convergence.md.

Everything is a paired difference: a cell against the fp32 cell of the same place, task and seed. Of
a codec the figure is the mean over the seeds, with the standard error of that mean. The control is
fp32 against fp32 with its sums in another order: what it differs by is no codec's fault. A codec
is accepted where its mean is below its aim, or is above the control's by no more than two standard
errors of the control. These are of a mean of as many seeds, from the spread of all control runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.learning.runs import FEW, MODES, Cell
from benchmarks.learning.tasks import (
    AS_FEW_BYTES,
    BOTH,
    BOUNDARY,
    BOUNDARY_WIDTH,
    FEWEST,
    NARROW,
    ROTATED,
    TASKS,
    WIDE,
    WIDE_ROUNDS,
    WIDE_WIDTH,
    rounds_of,
    token_bytes,
)

Results = Mapping[str, Mapping[str, Any]]
"""By platform and cell. What is compared is of one platform: the one that has the most of it."""
Result = Mapping[str, Any]

NUM_SEEDS, FIRST_SEED, ORDERS = 3, 1, (1, 2)
AIMS = {"bf16": 0.001, "int8": 0.001, "int6": 0.005, "int4": 0.005, "topk": 0.01, FEW: 0.01}
"""How much of the loss a codec may cost."""
RIGHT_AIM = 0.01
"""How much of the right answers: a hundredth of the prompts."""
CODECS = ("bf16", "int8", "int6", "int4", "topk", FEW)
REPLACED = (0, 10, 30)
NOTHING = ["Not run yet."]
PLACES = {BOUNDARY: "boundaries", BOTH: "boundaries and updates of `zero`"}
BOUNDARY_PLOT = "convergence-boundary-{}.svg"


@dataclass(frozen=True)
class Figure:
    """A mean of paired differences."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    def error(self, num: int | None = None) -> float:
        """Standard error of a mean of so many (None: of this one); NaN for one value."""
        if len(self.values) < 2:
            return math.nan
        return stdev(self.values) / math.sqrt(num or len(self.values))


def value_of(result: Result, *, is_right: bool, at: int | None = None) -> float:
    """Loss, or share of right answers, after so many rounds (None: all)."""
    return float(result["right" if is_right else "losses"][str(at or result["rounds"])])


def difference(result: Result, base: Result, *, is_right: bool, at: int | None = None) -> float:
    """Of the loss relatively, of the right answers as a share of the prompts; more is worse."""
    for key in ("rounds", "platform"):
        assert result[key] == base[key], f"cells of different {key} are compared"
    a, b = (value_of(r, is_right=is_right, at=at) for r in (result, base))
    return b - a if is_right else a / b - 1


def fp32_cell(where: str, task: str, seed: int) -> Cell:
    """What the codecs of a place are compared with."""
    return Cell("zero" if where == BOTH else where, task, "none", seed)


def figure(
    results: Results,
    where: str,
    task: str,
    codec: str,
    *,
    is_right: bool = False,
    orders: Sequence[int] = (0,),
    at: int | None = None,
) -> Figure | None:
    """Of all pairs that are there."""
    seeds = TASKS[task].seeds
    base = [fp32_cell(where, task, seed).key for seed in seeds for _ in orders]
    own = "zero" if where == BOTH and codec == "none" else where
    cells = [Cell(own, task, codec, seed, order=order).key for seed in seeds for order in orders]
    pairs = most(results, cells, base)
    found = tuple(difference(a, b, is_right=is_right, at=at) for a, b in pairs)
    return Figure(found) if found else None


def most(results: Results, *keys: Sequence[str]) -> list[tuple[Result, ...]]:
    """The results of the cells `keys[0][i]`, `keys[1][i]` and so on, for every i of which one
    platform has all; of the platform that has the most."""
    found = [
        [
            tuple(cells[key] for key in wanted)
            for wanted in zip(*keys, strict=True)
            if all(key in cells for key in wanted)
        ]
        for cells in results.values()
    ]
    return max(found, key=len, default=[])


def verdict(codec: str, of: Figure, control: Figure | None, *, is_right: bool) -> str:
    """Why a codec is accepted, or `no`; nothing before all seeds are there."""
    if len(of.values) < NUM_SEEDS:
        return ""
    if of.mean <= (RIGHT_AIM if is_right else AIMS[codec]):
        return "yes"
    if control is not None and of.mean - control.mean <= 2 * control.error(len(of.values)):
        return "as the control"
    return "no"


# ---- tables --------------------------------------------------------------------------------------


def codec_table(results: Results, where: str) -> list[str]:
    """Rows: codecs of one place. Columns: tasks, and the right answers."""
    columns = [(task, False) for task in TASKS if task != "answers"] + [("answers", True)]
    columns = [c for c in columns if figure(results, where, c[0], "none", is_right=c[1])]
    if not columns:
        return NOTHING
    heads = ["right answers" if is_right else f"`{task}`" for task, is_right in columns]
    lines = [
        "| codec | " + " | ".join(f"{head} | harmless" for head in heads) + " |",
        "|---|" + "---|---|" * len(columns),
        _row("fp32", [_mean_value(results, where, *c) for c in columns]),
    ]
    controls = [
        figure(results, where, task, "none", is_right=is_right, orders=ORDERS)
        for task, is_right in columns
    ]
    lines.append(
        _row("control", [f"{_shown(c, r)} | " for c, (_, r) in zip(controls, columns, strict=True)])
    )
    for codec in CODECS:
        cells = []
        for (task, is_right), control in zip(columns, controls, strict=True):
            of = figure(results, where, task, codec, is_right=is_right)
            said = "" if of is None else verdict(codec, of, control, is_right=is_right)
            cells.append(f"{_shown(of, is_right)} | {said}")
        if any(cell.strip(" |") for cell in cells):
            lines.append(_row(f"`{codec}`", cells))
    if where == BOUNDARY:
        lines += ["", *(f"![{task}]({BOUNDARY_PLOT.format(task)})" for task, _ in columns)]
    return lines


def _row(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _mean_value(results: Results, where: str, task: str, is_right: bool) -> str:
    found = most(results, [fp32_cell(where, task, seed).key for seed in TASKS[task].seeds])
    value = mean(value_of(r, is_right=is_right) for (r,) in found)
    return (f"{value:.1%}" if is_right else f"{value:.4f}") + " | "


def _shown(of: Figure | None, is_right: bool) -> str:
    """With the standard error of a mean over the seeds; where seeds are missing that is said."""
    if of is None:
        return ""
    digits, factor, unit = (1, -100, " points") if is_right else (2, 100, " %")
    text = f"{round(factor * of.mean, digits) + 0.0:+.{digits}f}"
    num = min(len(of.values), NUM_SEEDS)
    if num > 1:
        text += f" ± {100 * of.error(num):.{digits}f}"
    return text + unit + (f" ({num} of {NUM_SEEDS} seeds)" if num < NUM_SEEDS else "")


def mode_table(results: Results, task: str) -> list[str]:
    """Rows: modes, in fp32. Columns: loss, and its distance from that of `zero`."""
    lines = ["| mode | loss | more than `zero` |", "|---|---|---|"]
    for mode in MODES:
        both = _beside_zero(results, mode, task)
        if both:
            loss = mean(value_of(r, is_right=False) for r, _ in both)
            gap = "" if mode == "zero" else _shown(_over_zero(both), is_right=False)
            lines.append(_row(f"`{mode}`", [f"{loss:.4f}", gap]))
    return lines if len(lines) > 2 else NOTHING


def _beside_zero(results: Results, mode: str, task: str) -> list[tuple[Result, ...]]:
    """A mode's results in fp32, each with that of `zero`."""
    own, base = (
        [Cell(m, task, "none", seed).key for seed in TASKS[task].seeds] for m in (mode, "zero")
    )
    return most(results, own, base)


def _over_zero(pairs: Sequence[tuple[Result, ...]]) -> Figure | None:
    values = tuple(difference(own, zero, is_right=False) for own, zero in pairs)
    return Figure(values) if values else None


def summary_table(results: Results) -> list[str]:
    """Rows: every codec of every place beside fp32, and every mode in fp32 beside `zero`. Columns:
    what it costs of the loss of each task."""
    tasks = [task for task in TASKS if task != "answers"]
    lines = [
        "| what | codec | " + " | ".join(f"`{task}`" for task in tasks) + " |",
        "|---|---|" + "---|" * len(tasks),
    ]
    for where in (BOUNDARY, BOTH, *MODES):
        for codec in CODECS:
            found = [figure(results, where, task, codec) for task in tasks]
            if any(found):
                shown = [_shown(of, is_right=False) for of in found]
                name = PLACES.get(where, f"updates of `{where}`")
                lines.append(_row(name, [f"`{codec}`", *shown]))
    for mode in MODES:
        found = [_over_zero(_beside_zero(results, mode, task)) for task in tasks]
        if mode != "zero" and any(found):
            shown = [_shown(of, is_right=False) for of in found]
            lines.append(_row(f"mode `{mode}`, beside `zero`", ["`none`", *shown]))
    return lines if len(lines) > 2 else NOTHING


def churn_table(results: Results) -> list[str]:
    """Rows: modes. Columns: per cent of the peers that are replaced. One seed."""
    base = Cell("zero", "letters", "none", FIRST_SEED).key
    lines = [
        "| mode | " + " | ".join(f"{p} % replaced" for p in REPLACED) + " |",
        "|---|" + "---|" * len(REPLACED),
    ]
    for mode in MODES:
        cells = []
        for percent in REPLACED:
            cell = Cell(mode, "letters", "none", FIRST_SEED, replaced=percent)
            text = ""
            for result, zero in most(results, [cell.key], [base]):
                gap = difference(result, zero, is_right=False)
                text = f"{value_of(result, is_right=False):.4f} ({gap:+.2%})"
            cells.append(text)
        if any(cells):
            lines.append(_row(f"`{mode}`", cells))
    return lines if len(lines) > 2 else NOTHING


def narrow_table(results: Results) -> list[str]:
    """Rows: models and codecs. Columns: bytes at a boundary, and the loss at the end of each task
    over that of the dense model in fp32 after all rounds."""
    tasks = [task for task in TASKS if task != "answers"]
    lines = [
        "| model | codec | bytes a token | " + " | ".join(f"`{task}`" for task in tasks) + " |",
        "|---|---|---|" + "---|" * len(tasks),
    ]
    rows = [("dense", BOUNDARY, codec, token_bytes(codec)) for codec in ("none", "int8", FEWEST)]
    for (where, k), few, rotated in zip(NARROW.items(), AS_FEW_BYTES, ROTATED, strict=True):
        part = f"{k} of {BOUNDARY_WIDTH} dimensions"
        rows += [(part, where, codec, token_bytes(codec, k)) for codec in ("none", "int8", FEWEST)]
        rows.append((f"{part}, at random", rotated, "none", token_bytes("none", k)))
        rows.append((f"dense, bytes of {k} dimensions", few, "int8", token_bytes(FEWEST)))
    for name, where, codec, num_bytes in rows:
        found = [_over_dense(results, where, task, codec) for task in tasks]
        if any(found):
            coded = FEWEST if where in AS_FEW_BYTES else codec
            cells = [_shown(of, is_right=False) for of in found]
            if where in AS_FEW_BYTES:
                cells = [
                    f"{cell} after {rounds_of(task, where, codec)} of {TASKS[task].rounds} rounds"
                    for cell, task in zip(cells, tasks, strict=True)
                ]
            lines.append(_row(name, [f"`{coded}`", str(num_bytes), *cells]))
    keys = [Cell(where, "python", "int8", FIRST_SEED).key for where in WIDE]
    for dense, narrow in most(results, keys[:1], keys[1:]):
        values = [value_of(one, is_right=False) for one in (dense, narrow)]
        for (_, k), value in zip(WIDE.items(), values, strict=True):
            name = f"{k} of {WIDE_WIDTH} dimensions" if k else f"dense, {WIDE_WIDTH} wide"
            gap = f"{value / values[0] - 1:+.2%} after {WIDE_ROUNDS} rounds (1 seed)"
            num_bytes = token_bytes("int8", k, WIDE_WIDTH)
            lines.append(_row(name, ["`int8`", str(num_bytes), "", gap]))
    return lines if len(lines) > 2 else NOTHING


def _over_dense(results: Results, where: str, task: str, codec: str) -> Figure | None:
    """How much more the loss is at the end than that of the dense model in fp32."""
    seeds = TASKS[task].seeds
    own = [Cell(where, task, codec, seed).key for seed in seeds]
    pairs = most(results, own, [fp32_cell(BOUNDARY, task, seed).key for seed in seeds])
    values = [value_of(a, is_right=False) / value_of(b, is_right=False) - 1 for a, b in pairs]
    return Figure(tuple(values)) if values else None


def write_tables(page: Path, results: Results) -> None:
    """Replaces what is between `<!-- NAME -->` and `<!-- end -->` by the table of that name."""
    tables = {f"codecs {where}": codec_table(results, where) for where in (BOUNDARY, BOTH, *MODES)}
    tables |= {f"modes {task}": mode_table(results, task) for task in TASKS}
    tables["replaced"] = churn_table(results)
    tables["narrow"] = narrow_table(results)
    tables["summary"] = summary_table(results)

    def table(match: re.Match[str]) -> str:
        return "\n".join([match[1], *tables[match[2]], match[3]])

    marks = re.compile(r"(<!-- ([\w -]+) -->)\n.*?(<!-- end -->)", re.DOTALL)
    page.write_text(marks.sub(table, page.read_text()))


# ---- plots ---------------------------------------------------------------------------------------

WIDTH, HEIGHT, MARGIN = 720, 400, 60
COLOURS = ("#222222", "#1f77b4", "#2ca02c", "#ff7f0e", "#d62728", "#9467bd", "#8c564b")
Curves = dict[str, list[tuple[int, float]]]


def draw(folder: Path, results: Results) -> None:
    """All plots that there are results for."""
    for task in ("letters", "python"):
        drawn = _curves_of_codecs(results, BOUNDARY, task, is_right=False)
        title = f"Held-out loss over that of fp32, `{task}`, codecs at 7 boundaries"
        _plot(folder / BOUNDARY_PLOT.format(task), title, " %", drawn)
    drawn = _curves_of_codecs(results, BOUNDARY, "answers", is_right=True)
    _plot(folder / BOUNDARY_PLOT.format("answers"), "Right answers", " %", drawn)
    for task, name in (("letters", "0"), ("python", "python")):
        drawn = _curves_of_modes(results, task)
        title = f"Held-out loss over that of zero, {task}"
        _plot(folder / f"convergence-{name}.svg", title, " %", drawn)


def _curves_of_codecs(results: Results, where: str, task: str, *, is_right: bool) -> Curves:
    curves: Curves = {}
    for name, codec, orders in (
        ("fp32" if is_right else "control", "none", (0,) if is_right else ORDERS),
        *((codec, codec, (0,)) for codec in CODECS),
    ):
        seeds = TASKS[task].seeds
        keys = [Cell(where, task, codec, seed, order=o).key for seed in seeds for o in orders]
        found = [result for (result,) in most(results, keys)]
        if not found:
            continue
        points = sorted(int(r) for r in found[0]["right" if is_right else "losses"] if int(r))
        curves[name] = [
            (r, 100 * mean(value_of(x, is_right=True, at=r) for x in found))
            if is_right
            else (r, 100 * of.mean)
            for r in points
            if (of := figure(results, where, task, codec, is_right=is_right, orders=orders, at=r))
        ]
    return curves


def _curves_of_modes(results: Results, task: str) -> Curves:
    curves: Curves = {}
    base = Cell("zero", task, "none", FIRST_SEED).key
    for mode in MODES:
        for result, zero in most(results, [Cell(mode, task, "none", FIRST_SEED).key], [base]):
            common = sorted(int(r) for r in result["losses"] if r in zero["losses"] and int(r))
            curves[mode] = [
                (r, 100 * difference(result, zero, is_right=False, at=r)) for r in common
            ]
    return curves


def _plot(file: Path, title: str, unit: str, curves: Curves) -> None:
    """Nothing where there is nothing to compare."""
    if len(curves) < 2:
        return
    rounds = max(r for points in curves.values() for r, _ in points)
    values = [y for points in curves.values() for _, y in points]
    top, low = max(0.2, *values), min(0.0, *values)

    def at(r: float, y: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 3 * MARGIN) * r / rounds
        return round(x, 1), round(
            HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (y - low) / (top - low), 1
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="14">{title}</text>',
    ]
    for i in range(6):
        y = low + (top - low) * i / 5
        (x0, y0), (x1, _) = at(0, y), at(rounds, y)
        parts.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y0}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y0}" text-anchor="end">{y:.2f}{unit}</text>')
    for r in range(0, rounds + 1, 100):
        x, y0 = at(r, low)
        parts.append(f'<text x="{x}" y="{y0 + 18}" text-anchor="middle">{r}</text>')
    parts.append(f'<text x="{WIDTH / 2 - MARGIN}" y="{HEIGHT - 14}">rounds</text>')
    for i, (name, points) in enumerate(curves.items()):
        line = " ".join("{},{}".format(*at(r, y)) for r, y in points)
        colour, y1 = COLOURS[i], MARGIN + 18 * i
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 2 * MARGIN + 12}" y="{y1}" fill="{colour}">{name}</text>')
    file.write_text("\n".join([*parts, "</svg>"]) + "\n")
