"""Which slots each round counted: a feeder's file, and how several are read as one.

A feeder appends a line for every slot as soon as it counts:

    {"run_id": "...", "history": 1764..., "round": 12, "slots": [3]}

A run that went on from a checkpoint makes some rounds again, and of those the later entry holds.
"Later" is told by `history`: it grows with every such restart (see `Record.history`), and a history
voids, from its first round on, all that older ones have. Two peers that begin a history at the
same instant name it differently until they hear of each other; `"was"` on a line says that its
history is the one that this peer named so before.

The file is bounded: the oldest rounds of a very long run are not on record any more.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from swarmnet.errors import UserError
from swarmnet.files import LinesFile, older
from swarmnet.plurals import counted
from swarmnet.protocol.trouble import Trouble
from swarmnet.swarm.pipeline.feeder import Journal

log = logging.getLogger("swarmnet.peer")

COUNTED_FILE = "microbatches.jsonl"
MAX_COUNTED_BYTES = 256 << 20
"""Of the file; with the one that was set aside before it there are twice as many at most. A line
has about a hundred."""


class CountedMicrobatches(Journal):
    """Appends to one peer's file."""

    def __init__(self, path: Path, run_id: str, max_bytes: int = MAX_COUNTED_BYTES) -> None:
        self._path = path
        self._file = LinesFile(path, max_bytes)
        self._run_id = run_id
        self._trouble = Trouble()

    def slot_counted(self, history: int, round_index: int, slot: int) -> None:
        """A slot counts."""
        self._append({"history": history, "round": round_index, "slots": [slot]})

    def renamed(self, old: int, new: int) -> None:
        """The run's history has another name now."""
        self._append({"history": new, "was": old})

    def _append(self, values: dict[str, Any]) -> None:
        """Never raises: a full disk does not stop training."""
        line = json.dumps({"run_id": self._run_id, **values}) + "\n"
        try:
            self._file.append(line.encode())
        except OSError as e:
            more = self._trouble.failed(time.monotonic())
            if more is not None:
                log.warning("%s: %s; not on record: %s%s", self._path, e.strerror, values, more)
            return
        if self._trouble.is_over():
            log.warning("%s: what counts is on record again", self._path)


def read_counted(paths: Sequence[Path], run_id: str | None = None) -> dict[int, list[int]]:
    """The slots that each round counted, by round, ascending; `paths`: the files of all feeders. A
    slot that two feeders counted is there twice. A plain loop over them makes the run's updates
    again.

    `run_id`: of the run that is meant, where the files hold several. Raises `UserError` where a
    file cannot be read, or several runs are in them and none is named.
    """
    lines = [line for path in paths for part in _parts(path) for line in _lines(part)]
    runs = sorted({line["run_id"] for line in lines})
    if run_id is None and len(runs) > 1:
        raise UserError(f"the slots are of {counted(len(runs), 'run')}; name one of {runs}")
    lines = [line for line in lines if run_id in (None, line["run_id"])]
    same_as = {line["was"]: line["history"] for line in lines if "was" in line}
    by_history: dict[int, dict[int, list[int]]] = {}
    for line in lines:
        history = line["history"]
        while same_as.get(history, history) > history:
            history = same_as[history]
        if "slots" in line:
            rounds = by_history.setdefault(history, {})
            rounds.setdefault(line["round"], []).extend(line["slots"])
    found: dict[int, list[int]] = {}
    for _, rounds in sorted(by_history.items()):
        first = min(rounds)
        found = {r: slots for r, slots in found.items() if r < first} | rounds
    return {r: sorted(slots) for r, slots in sorted(found.items())}


def show_counted(
    state_dirs: Sequence[Path],
    run_id: str | None,
    *,
    as_json: bool,
    say: Callable[[str], None],
) -> None:
    """Says `read_counted` of the state folders of feeders, a line a round. Raises `UserError`
    where a folder has no such file."""
    for folder in state_dirs:
        if not (folder / COUNTED_FILE).is_file():
            raise UserError(f"{folder}: no {COUNTED_FILE} there; name a feeder's state folder")
    counted = read_counted([folder / COUNTED_FILE for folder in state_dirs], run_id)
    for round_index, slots in counted.items():
        if as_json:
            say(json.dumps({"round": round_index, "slots": slots}))
        else:
            say(f"round {round_index}: {describe_slots(slots)}")


def describe_slots(slots: Sequence[int]) -> str:
    """How many slots, and by number those that a run without a fault does not have: a slot more
    than once, or left out."""
    times = Counter(slots)
    more = [f"{slot} ({counted(n, 'time')})" for slot, n in sorted(times.items()) if n > 1]
    lacking = sorted(set(range(max(slots) + 1)) - set(slots)) if slots else []
    text = counted(len(times), "slot")
    if more:
        text += f", counted more than once: {', '.join(more)}"
    if lacking:
        text += f", not counted: {', '.join(map(str, lacking))}"
    return text


def _parts(path: Path) -> list[Path]:
    """The older one first."""
    before = older(path)
    return [before, path] if before.exists() else [path]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """A last line that was cut off is left out."""
    try:
        text = path.read_text(errors="replace")
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    for line in text.splitlines():
        try:
            values = json.loads(line)
            numbers = [values["history"], values.get("was", 0)]
            numbers += [values["round"], *values.get("slots", ())] if "round" in values else []
            if isinstance(values["run_id"], str) and all(type(n) is int for n in numbers):
                yield values
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
