"""Runs that were before on this machine: what a new one may continue."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.errors import SpecError
from swarmnet.runtime.joining.beside import run_in
from swarmnet.runtime.state_dir import SEAT_FOLDER, is_claimed, state_root
from swarmnet.spec import RunSpec

if TYPE_CHECKING:
    from swarmnet.training.continuing import SavedRuns
    from swarmnet.training.models.initial_weights import EndedWeights, InitialLayout

log = logging.getLogger("swarmnet.peer")

CHECKPOINTS = "checkpoints"
"""In a state folder."""
MAX_FOLDERS = 1024
SHOWN_CHARACTERS = 16
"""Of a run's id."""


def open_past(state_dir: Path | None, wanted: str) -> SavedRuns:
    """The runs among which `[model] continues` = `wanted` chooses: those of a folder and of the
    state folders in it, or all of this machine. `state_dir`: of the own peer. Raises
    `SpecError`."""
    from swarmnet.training.continuing import SavedRuns, wanted_run

    if wanted_run(wanted) is not None:
        return SavedRuns(_of_machine(state_dir), wanted)
    folder = Path(wanted).expanduser()
    if not folder.is_dir():
        raise SpecError(
            f"[model] continues: {wanted[:120]} is no folder and no id of a run (such as the names "
            f"in STATE_DIR/{CHECKPOINTS})"
        )
    return SavedRuns(_folders_in(folder), wanted)


def open_ended(
    spec: RunSpec, layout: InitialLayout, state_dir: Path, written: str
) -> EndedWeights | None:
    """The parameters and moments with which a run begins that continues another, where that one is
    on this machine. `written`: `[model] continues` in the own file, or empty."""
    from swarmnet.training.continuing import SavedRuns

    try:
        is_folder = bool(written) and Path(written).expanduser().is_dir()
        places = _folders_in(Path(written).expanduser()) if is_folder else _of_machine(state_dir)
        ended = SavedRuns(places, spec.model.continues).ended(spec)
        return ended.unchecked(spec, layout)
    except SpecError as error:
        log.debug("%s", error)
        return None


def past_line(spec: RunSpec, state_dir: Path) -> str:
    """What to say of a run that begins on this machine: which one it continues, or could; empty
    where there is none in its state folder. Blocks."""
    from swarmnet.training.continuing import SavedRuns, differences, wanted_run

    continues = wanted_run(spec.model.continues)
    if continues is not None:
        run_id, round_index = continues
        what = "parameters and moments" if spec.model.moments else "parameters"
        return (
            f"this run begins with the {what} of round {round_index} of run "
            f"{run_id[:SHOWN_CHARACTERS]}"
        )
    try:
        own = SavedRuns(_folders_in(state_dir)).similar(spec)
        whole = own or SavedRuns(_of_machine(state_dir)).similar(spec)
    except SpecError:
        return ""
    if whole is None or not (state_dir / CHECKPOINTS / whole.run_id[:SHOWN_CHARACTERS]).is_dir():
        return ""
    shown = whole.run_id[:SHOWN_CHARACTERS]
    return (
        f"this run begins at round 0: {state_dir} has checkpoints of run {shown} up to round "
        f"{whole.round}, with the same model and another {differences(whole.spec, spec)}; to begin "
        f'with those parameters write continues = "{shown}" under [model]'
    )


def unused_states(state_dir: Path, run_id: str) -> list[Path]:
    """State folders beside a peer's, and of the same user, with checkpoints of a run in which no
    peer of that run is at work: it has fewer peers than before, or a peer of another run has taken
    that folder."""
    own = _peer_folder(state_dir.absolute())
    found = []
    for folder in _folders_in(own.parent):
        peer = _peer_folder(folder)
        saved = folder / CHECKPOINTS / run_id[:SHOWN_CHARACTERS]
        if peer == own or not saved.is_dir() or saved.stat().st_uid != os.geteuid():
            continue
        if not is_claimed(peer) or run_in(peer) not in ("", run_id):
            found.append(folder)
    return found


def _peer_folder(state_dir: Path) -> Path:
    """The state folder of the peer that a seat is of; a peer's own."""
    return state_dir.parent if state_dir.name.startswith(SEAT_FOLDER) else state_dir


def _of_machine(state_dir: Path | None) -> list[Path]:
    roots = [state_root()] if state_dir is None else [state_dir.absolute().parent, state_root()]
    return list(dict.fromkeys(path for root in roots for path in _folders_in(root)))


def _folders_in(root: Path) -> list[Path]:
    """A state folder, those in it and those in them: a machine's peers, and the seats of each."""

    def found() -> Iterator[Path]:
        for pattern in (CHECKPOINTS, f"*/{CHECKPOINTS}", f"*/*/{CHECKPOINTS}"):
            yield from sorted(root.absolute().glob(pattern))

    return [path.parent for path in islice(found(), MAX_FOLDERS)]
