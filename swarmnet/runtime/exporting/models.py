"""The model as a Hugging Face folder, from a live swarm or from checkpoints."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from swarmnet.errors import UserError
from swarmnet.files import write_whole
from swarmnet.plurals import counted
from swarmnet.ports import Worker
from swarmnet.protocol.saved_rounds import Key
from swarmnet.runtime.exporting.base_weights import fetch_base, has_base, kept_base
from swarmnet.runtime.exporting.model_folder import Trained, check_out, write_folder
from swarmnet.runtime.observing import RunObserver
from swarmnet.runtime.options import ExportModelOptions, TransportName
from swarmnet.runtime.run_files import RunFiles
from swarmnet.runtime.seats import further_seats
from swarmnet.spec import RunSpec
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.recovery.model_fetch import RoundsPassed, fetch_model
from swarmnet.swarm.recovery.saved_models import Parts, SavedModelFetch
from swarmnet.swarm.settings import WaitLimits
from swarmnet.training.checkpoint import (
    CheckpointError,
    Meta,
    find_checkpoints,
    load_parameters,
)
from swarmnet.training.held_out_losses import best_round, read_losses
from swarmnet.training.models.registry import stage_parameter_ranges, stage_shard_sizes
from swarmnet.transport.base import Transport
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.export")

SHOWN_CHARACTERS = 12
"""Of a run's id."""
PARTS = ".part"

Found = Sequence[tuple[Path, Meta]]


@dataclass(frozen=True, kw_only=True)
class Wanted(ExportModelOptions):
    """Which checkpoints are meant, and how the model is written."""

    base: str = ""
    """The model that adapters were trained for, as a person writes it: a folder, or ORG/NAME of the
    hub; empty where only its name is known."""

    def check(self, spec: RunSpec) -> None:
        """Raises `UserError` where it does not go with the run."""
        given = "--merge" if self.merge else "--weights" if self.weights is not None else ""
        if given and spec.lora is None and (self.merge or not has_base(spec)):
            raise UserError(f"{given}: this run trains the whole model; leave it out")
        if spec.adapts_ended and self.weights is not None:
            raise UserError(
                "--weights: this run's adapters are beside what another run ended with, which no "
                "folder has; leave it out"
            )

    def is_whole(self, spec: RunSpec) -> bool:
        """The whole model is written, and not adapters alone."""
        return self.merge or spec.lora is None

    def choose(self, keys: Sequence[Key], held_out: Mapping[int, float]) -> Key | None:
        """Of some rounds, the newest first. None where the wanted one is not among them. Raises
        `UserError` where none of them was measured and the best one is wanted."""
        if self.round is not None:
            return next((key for key in keys if key[1] == self.round), None)
        if not keys or not self.best:
            return next(iter(keys), None)
        best = best_round(held_out, {r for _, r in keys})
        if best is None:
            raise UserError("none of the rounds to be had was measured on held-out data")
        if held_out.get(0, math.inf) <= held_out[best]:
            log.warning("the model that the run began from has a lower held-out loss than any")
        return next(key for key in keys if key[1] == best)


async def export_live(
    addresses: Sequence[str],
    out: Path,
    *,
    transport: TransportName = "auto",
    invite: str = "",
    wanted: Wanted = Wanted(),
) -> str:
    """Writes the model of the run behind an address; returns what was done, in a line. What has
    come stays beside `out` where this is stopped, and is not fetched again. Raises `UserError`."""
    from swarmnet.runtime.observer import Observer

    check_out(out)
    async with await Observer.join(addresses, transport=transport, invite=invite) as observer:
        return await export_observed(observer, out, wanted)


async def export_observed(observer: RunObserver, out: Path, wanted: Wanted = Wanted()) -> str:
    """The same, of a run that is looked at already."""
    from swarmnet.training.device import WorkerThread

    check_out(out)
    spec, gossip = observer.spec, observer.gossip
    wanted.check(spec)
    parts = DiskParts(out.with_name(f".{out.name}{PARTS}"), spec.run_id)
    disk = WorkerThread("disk")
    try:
        trained = await fetch_trained(spec, observer.transport, gossip, parts, disk, wanted)
        files = await observer.fetch_files()
        trained = replace(trained, files=files, base=wanted.base)
        if wanted.is_whole(spec):
            base = await fetch_base(
                spec, observer.transport, gossip, disk, trained.files, wanted.weights
            )
            trained = trained.whole(base)
    finally:
        await disk.close()
    line = write_folder(out, trained, wanted.dtype)
    parts.drop()
    return line


async def fetch_trained(
    spec: RunSpec,
    transport: Transport,
    gossip: Gossip,
    parts: Parts,
    worker: Worker,
    wanted: Wanted = Wanted(),
) -> Trained:
    """The model of a round that replicas have saved; of the present one where none has been saved
    by all. Where the run is too fast for that, one that has been saved meanwhile. `worker`: a
    thread for the disk. Raises `UserError`."""
    if spec.model.kind == "custom":
        raise UserError("a custom model can be exported from --state-dir only")
    sizes = [stage_shard_sizes(spec, k) for k in range(spec.pipeline.num_stages)]
    fetch = SavedModelFetch(transport, gossip, sizes, parts, worker)
    while True:
        found = await fetch.fetch(wanted.choose)
        if found is not None:
            (_, round_index), shards, held_out = found
            return Trained(spec, round_index, _named(spec, shards), held_out=held_out)
        if wanted.round is not None or wanted.best:
            what = "a measured round" if wanted.best else f"round {wanted.round}"
            why = f" ({said})" if (said := fetch.failures.told()) else ""
            raise UserError(
                f"no peer has {what} saved{why}; see --state-dir, or leave the option out"
            )
        try:
            round_index, named = await fetch_named(spec, transport, gossip)
        except RoundsPassed:
            if not fetch.is_saved:
                raise
            continue
        return Trained(spec, round_index, named)


async def fetch_named(
    spec: RunSpec, transport: Transport, gossip: Gossip
) -> tuple[int, dict[str, Tensor]]:
    """The present round of the live run, and all its parameters by name."""
    sizes = [stage_shard_sizes(spec, k) for k in range(spec.pipeline.num_stages)]
    round_index, shards = await fetch_model(transport, gossip, sizes, WaitLimits(), gossip.rng)
    return round_index, _named(spec, shards)


def _named(spec: RunSpec, shards: Sequence[Sequence[Array]]) -> dict[str, Tensor]:
    import torch

    from swarmnet.training.arrays import to_tensor

    named: dict[str, Tensor] = {}
    for k, of_stage in enumerate(shards):
        flat = torch.cat([to_tensor(shard) for shard in of_stage])
        named |= {r.name: r.part_of(flat) for r in stage_parameter_ranges(spec, k)}
    return named


class DiskParts:
    """Shards of a model that is being fetched, on the disk; implements `saved_models.Parts`."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id

    def begun(self) -> list[Key]:
        prefix = f"{self._run_id[:SHOWN_CHARACTERS]}-"
        keys = []
        for path in sorted(self._folder.glob(f"{prefix}*/")):
            with suppress(ValueError):  # somebody else's
                history, round_index = path.name.removeprefix(prefix).split("-")
                keys.append((int(history), int(round_index)))
        return keys

    def begin(self, key: Key) -> None:
        self._key = key
        try:
            for other in self._folder.glob("*") if self._folder.is_dir() else ():
                if other != self._of(key):
                    shutil.rmtree(other, ignore_errors=True)
            self._of(key).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"cannot write {self._folder}: {e.strerror or e}") from None

    def get(self, stage: int, shard: int) -> Array | None:
        try:
            data = self._path(stage, shard).read_bytes()
        except OSError:
            return None
        return Array("float32", (len(data) // 4,), data) if len(data) % 4 == 0 else None

    def put(self, stage: int, shard: int, values: Array) -> None:
        path = self._path(stage, shard)
        try:
            write_whole(path, bytes(values.data))
        except OSError as e:
            raise UserError(f"cannot write {path}: {e.strerror or e}") from None

    def drop(self) -> None:
        """When the model is whole."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _of(self, key: Key) -> Path:
        history, round_index = key
        return self._folder / f"{self._run_id[:SHOWN_CHARACTERS]}-{history}-{round_index}"

    def _path(self, stage: int, shard: int) -> Path:
        return self._of(self._key) / f"{stage}-{shard}"


def export_checkpoints(state_dirs: Sequence[Path], out: Path, wanted: Wanted = Wanted()) -> str:
    """Writes the newest round of which the folders hold every stage undamaged, or the wanted one;
    returns what was done, in a line. Raises `UserError`."""
    check_out(out)
    folders = [folder for path in state_dirs for folder in (path, *further_seats(path))]
    unreadable: list[str] = []
    found: Found = [one for path in folders for one in find_checkpoints(path, unreadable)]
    for line in unreadable:
        log.warning("a checkpoint cannot be used: %s", line)
    if not found:
        raise UserError(f"no checkpoint in {', '.join(str(path) for path in state_dirs)}")
    found = _of_one_run(found, wanted.run_id)
    whole = _whole_rounds([meta for _, meta in found])
    held_out = _held_out(found)
    chosen_key = wanted.choose(whole, held_out)
    keys = whole if wanted.round is None and not wanted.best else [chosen_key]
    if chosen_key is None:
        others = ", ".join(str(r) for r in sorted({r for _, r in whole}))
        raise UserError(f"round {wanted.round} is not there with all stages; there are: {others}")
    for key in filter(None, keys):
        try:
            named, chosen = _load_round(found, key)
        except CheckpointError as e:
            log.warning("round %d cannot be used: %s", key[1], e)
            continue
        further = max((r for history, r in whole if history < key[0]), default=0)
        if wanted.round is None and not wanted.best and further > chosen.round:
            log.warning(
                "an earlier history of this run had come to round %d: --round %d writes that",
                further,
                further,
            )
        spec = RunSpec.from_checkpoint(chosen.spec, chosen.run_id)
        wanted.check(spec)
        files = _run_files(spec, folders)
        trained = Trained(spec, chosen.round, named, files, held_out, base=wanted.base)
        if wanted.is_whole(spec):
            trained = trained.whole(kept_base(spec, folders, wanted.weights))
        return write_folder(out, trained, wanted.dtype)
    raise UserError("no undamaged round; name the --state-dir of more peers")


def newest_whole(state_dirs: Sequence[Path], run_id: str) -> int | None:
    """The newest round of which the folders hold every stage of a run; None where there is none."""
    folders = [folder for path in state_dirs for folder in (path, *further_seats(path))]
    try:
        metas = [meta for path in folders for _, meta in find_checkpoints(path, [])]
        return max(r for _, r in _whole_rounds([m for m in metas if m.run_id == run_id]))
    except (CheckpointError, UserError):
        return None


def _run_files(spec: RunSpec, folders: Sequence[Path]) -> dict[str, bytes]:
    """Of the run, by name, as far as the state folders have them."""
    contents: dict[str, bytes] = {}
    for folder in folders:
        contents |= RunFiles(folder, spec.files).contents()
    return contents


def _held_out(found: Found) -> dict[int, float]:
    losses: dict[int, float] = {}
    for folder in sorted({path.parent for path, _ in found}):
        losses |= read_losses(folder)
    return losses


def _of_one_run(found: Found, run: str) -> Found:
    """Those of the run whose id begins so; of the only one where nothing is said."""
    names = {meta.run_id: meta.spec.get("name", "?") for _, meta in found}
    runs = sorted(run_id for run_id in names if run_id.startswith(run))
    if len(runs) == 1:
        return [(path, meta) for path, meta in found if meta.run_id == runs[0]]
    wrong = (
        f"checkpoints of {counted(len(runs), 'run')}" if runs else f"no checkpoint of a run {run}"
    )
    runs = runs or sorted(names)
    listed = ", ".join(f"{run_id[:SHOWN_CHARACTERS]} ({names[run_id]})" for run_id in runs)
    raise UserError(f"{wrong}; choose one with --run-id: {listed}")


def _whole_rounds(metas: Sequence[Meta]) -> list[tuple[int, int]]:
    """(history, round) of which every stage is there, the newest first: the stages of a round must
    be of one history. Raises `UserError` where there is none."""
    if not metas:
        raise UserError("no checkpoint")
    stages: dict[tuple[int, int], set[int]] = {}
    for meta in metas:
        stages.setdefault((meta.history, meta.round), set()).add(meta.stage)
    num_stages = metas[0].num_stages
    whole = [key for key, have in stages.items() if have >= set(range(num_stages))]
    if not whole:
        present = {meta.stage for meta in metas}
        missing = [f"stage {k}" for k in range(num_stages) if k not in present]
        what = f"{', '.join(missing)} missing" if missing else "no round has all stages"
        raise UserError(f"{what}; name the --state-dir of more peers")
    return sorted(whole, reverse=True)


def _load_round(found: Found, key: tuple[int, int]) -> tuple[dict[str, Tensor], Meta]:
    """All parameters of a whole round. Raises `CheckpointError`."""
    of_round = [(path, meta) for path, meta in found if (meta.history, meta.round) == key]
    named: dict[str, Tensor] = {}
    for stage in range(of_round[0][1].num_stages):
        named |= _load_stage([(path, meta) for path, meta in of_round if meta.stage == stage])
    return named, of_round[0][1]


def _load_stage(found: Found) -> dict[str, Tensor]:
    """From the first undamaged one of these checkpoints of a stage. Raises `CheckpointError`."""
    error = CheckpointError("nothing there")
    for folder, meta in found:
        try:
            return load_parameters(folder, meta)
        except CheckpointError as e:
            error = e
    raise error
