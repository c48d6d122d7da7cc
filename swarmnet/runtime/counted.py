"""Which slots each round counted, and who computed them: a feeder's file, and how several are read
as one.

A feeder appends a line for every slot as soon as it counts, and one for the round when it is over:
how many samples each machine computed of it, forward and backward, for a stage, by the paths that
replies came with, and how long the round was:

    {"run_id": "...", "history": 1764..., "round": 12, "slots": [3]}
    {"run_id": "...", "history": 1764..., "round": 12, "samples": {"12D3...": 64}, "seconds": 31.5}

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
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarmnet.errors import UserError
from swarmnet.files import LinesFile, older
from swarmnet.plurals import counted
from swarmnet.printable import printable
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import KEPT_ROUNDS
from swarmnet.protocol.trouble import Trouble
from swarmnet.spec import MAX_STAGES
from swarmnet.swarm.pipeline.feeder import Journal

log = logging.getLogger("swarmnet.peer")

COUNTED_FILE = "microbatches.jsonl"
MAX_COUNTED_BYTES = 256 << 20
"""Of the file; with the one that was set aside before it there are twice as many at most. A line
has about a hundred."""


class CountedMicrobatches(Journal):
    """Appends to one peer's file."""

    def __init__(
        self,
        path: Path,
        run_id: str,
        samples_per_slot: int = 1,
        num_stages: int = MAX_STAGES,
        max_bytes: int = MAX_COUNTED_BYTES,
    ) -> None:
        """`num_stages`: of the run; no path has more that counts."""
        self._path = path
        self._samples_per_slot = samples_per_slot
        self._num_stages = num_stages
        self._begun: dict[int, tuple[int, float]] = {}
        """Of the newest rounds: the history in which the first slot counted, and when."""
        self._ended_at: dict[int, float] = {}
        self._file = LinesFile(path, max_bytes)
        self._run_id = run_id
        self._trouble = Trouble()

    def slot_counted(self, history: int, round_index: int, slot: int) -> None:
        """A slot counts."""
        self._append({"history": history, "round": round_index, "slots": [slot]})
        if self._begun.get(round_index, (-1,))[0] != history:
            began_at = self._ended_at.get(round_index - 1, time.monotonic())
            self._begun[round_index] = (history, began_at)
            _forget_old(self._begun)

    def round_counted(self, round_index: int, paths: Mapping[int, tuple[str, ...]]) -> None:
        """A round is over, as far as this feeder knows."""
        if not paths or round_index not in self._begun:
            return
        history, began_at = self._begun[round_index]
        now = time.monotonic()
        self._ended_at[round_index] = now
        _forget_old(self._ended_at)
        named = [p for path in paths.values() for p in path[: self._num_stages]]
        computed = Counter(map(machine_of, named))
        samples = {m: n * self._samples_per_slot for m, n in sorted(computed.items())}
        seconds = round(now - began_at, 3)
        values = {"history": history, "round": round_index, "samples": samples, "seconds": seconds}
        self._append(values)

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
    found: dict[int, list[int]] = {}
    for line in _that_hold(paths, run_id):
        if "slots" in line:
            found.setdefault(line["round"], []).extend(line["slots"])
    return {r: sorted(slots) for r, slots in sorted(found.items())}


@dataclass(slots=True)
class Share:
    """What one machine computed that counted, as feeders saw it."""

    samples: int = 0
    """Forward and backward, of all stages that it served."""
    rounds: int = 0
    """In which any of them counted."""
    seconds: float = 0.0
    """How long these rounds were."""


def read_shares(paths: Sequence[Path], run_id: str | None = None) -> dict[str, Share]:
    """By machine, who computed most first. Arguments and errors are those of `read_counted`."""
    shares: dict[str, Share] = {}
    lengths: dict[str, dict[int, float]] = {}
    for line in _that_hold(paths, run_id):
        for machine, samples in line.get("samples", {}).items():
            shares.setdefault(machine, Share()).samples += samples
            rounds = lengths.setdefault(machine, {})
            rounds[line["round"]] = max(rounds.get(line["round"], 0.0), line["seconds"])
    for machine, rounds in lengths.items():
        shares[machine].rounds, shares[machine].seconds = len(rounds), sum(rounds.values())
    return dict(sorted(shares.items(), key=lambda item: (-item[1].samples, item[0])))


def _that_hold(paths: Iterable[Path], run_id: str | None) -> list[dict[str, Any]]:
    """Lines of rounds that no later history has made again."""
    lines = [line for path in paths for part in _parts(path) for line in _lines(part)]
    runs = sorted({line["run_id"] for line in lines})
    if run_id is None and len(runs) > 1:
        raise UserError(f"the slots are of {counted(len(runs), 'run')}; name one of {runs}")
    lines = [line for line in lines if run_id in (None, line["run_id"])]
    same_as = {line["was"]: line["history"] for line in lines if "was" in line}
    first: dict[int, int] = {}
    for line in lines:
        history = line["history"]
        while same_as.get(history, history) > history:
            history = same_as[history]
        line["history"] = history
        if "slots" in line:
            first[history] = min(first.get(history, line["round"]), line["round"])
    voided_from: dict[int, float] = {}
    least = math.inf
    for history in sorted({line["history"] for line in lines}, reverse=True):
        voided_from[history] = least
        least = min(least, first.get(history, math.inf))
    return [n for n in lines if "round" in n and n["round"] < voided_from[n["history"]]]


def show_counted(
    state_dirs: Sequence[Path],
    run_id: str | None,
    *,
    by_machine: bool = False,
    as_json: bool,
    say: Callable[[str], None],
) -> None:
    """Says `read_counted` of the state folders of feeders, a line a round, or `read_shares`, a line
    a machine. Raises `UserError` where a folder has no such file."""
    for folder in state_dirs:
        if not (folder / COUNTED_FILE).is_file():
            raise UserError(f"{folder}: no {COUNTED_FILE} there; name a feeder's state folder")
    paths = [folder / COUNTED_FILE for folder in state_dirs]
    if by_machine:
        for machine, share in read_shares(paths, run_id).items():
            about = {"machine": machine, **asdict(share)}
            say(json.dumps(about) if as_json else describe_share(machine, share))
        return
    for round_index, slots in read_counted(paths, run_id).items():
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


def describe_share(machine: str, share: Share) -> str:
    """A line. `machine` comes from a file."""
    return (
        f"{printable(machine)}: {counted(share.samples, 'sample')} in "
        f"{counted(share.rounds, 'round')}, {share.seconds / 3600:.1f} hours"
    )


def _forget_old(rounds: dict[int, Any]) -> None:
    for old in [r for r in rounds if r < max(rounds) - 2 * KEPT_ROUNDS]:
        del rounds[old]


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
            samples, seconds = values.get("samples", {}), values.get("seconds", 0.0)
            numbers += samples.values()
            is_long = isinstance(seconds, (int, float)) and 0 <= seconds < math.inf
            if "samples" in values and not (is_long and "round" in values):
                continue
            if isinstance(values["run_id"], str) and all(type(n) is int for n in numbers):
                yield values | ({"seconds": seconds} if samples else {})
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
