"""A peer's checkpoints of its stage, on its own disk.

    STATE_DIR/checkpoints/<run>/round-00000120/
        stage.safetensors       the parameters, fp32, under Hugging Face's names
        optimizer.safetensors   the moments of the shards that the peer owned; where replicas make
                            steps of their own, also what these have come to: parameters and
                            moments; where contributions are coded, what that has lost of them
        meta.json               what, of which run and round; a checksum of each file

`<run>` is the beginning of the run's id: a peer that turns to another run loses nothing of this.

A checkpoint is all there or not there: it is written into a folder beside its place, every file and
the folder are flushed to the disk, and only then is the folder renamed. What was cut off by a crash
is a leftover that the next save removes, and what the disk spoiled later is found by the
checksums; neither is ever loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarmnet.errors import ProtocolViolation, UserError, one_line
from swarmnet.files import is_full
from swarmnet.plurals import counted
from swarmnet.ports import CodingErrors, OwnSteps, Saved, Snapshot, Unused
from swarmnet.protocol.saved_rounds import STRIDES
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.held_out_losses import add_losses, best_round, read_losses
from swarmnet.training.mapped_tensors import MappedFiles, stored_tensors
from swarmnet.training.models.base import ParameterRange, flat_of
from swarmnet.training.models.registry import (
    stage_moments,
    stage_parameter_ranges,
    stage_shard_sizes,
)
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.recovery")

FORMAT = 1
FOLDER = "checkpoints"
RUN_CHARACTERS = 16
"""Of the run's id, in the name of its folder."""
STAGE_FILE, OPTIMIZER_FILE, META_FILE = "stage.safetensors", "optimizer.safetensors", "meta.json"
FILES = (STAGE_FILE, OPTIMIZER_FILE)
MOMENTS = {1: ("momentum",), 2: ("mean", "square")}
"""By their number, the moments of a shard, in the order of `Optimizer.export`: those of the outer
step or of Muon, and of AdamW."""
AHEAD = "ahead"
"""By how much parameters are ahead, where that is kept; after the moments."""
ERRORS = "errors"
"""First part of the names of what coding has lost: ERRORS.SHARD.CODEC."""
FAST = "parameters"
"""Of a shard, what a replica's own steps have made of it; the moments of these come after it."""
MIN_KEPT = 2
"""Peers do not save at the same instant: the newest round that all have may be the last but one."""
MAX_META_BYTES = 16 << 20
NAME = re.compile(r"round-(\d{8,19})")
UNFINISHED = ".unfinished-"
"""Prefix of a folder that is being written, or replaced."""


Moments = dict[int, tuple[dict[str, Any], tuple[Array, ...]]]
"""As `Snapshot.optimizer`."""


class CheckpointError(UserError):
    """A checkpoint cannot be written or read."""


@dataclass(frozen=True, slots=True)
class Meta:
    """meta.json."""

    run_id: str
    spec: dict[str, Any]
    """The run's spec, so that a checkpoint explains itself."""
    history: int
    round: int
    stage: int
    num_stages: int
    num_shards: int
    digests: str
    """16 hex digits for each shard of the parameters."""
    steps: dict[int, int]
    """By shard whose optimizer state is here: the steps that it has seen."""
    sizes: dict[str, int]
    """Bytes of each file."""
    checksums: dict[str, str]
    """xxh3-128 of each file, hex."""
    saved_unix_s: float
    own_steps: list[dict[str, int]] = field(default_factory=list)
    """By shard, where the replica made steps of its own: `steps` ever, and `tokens` behind those
    since the last exchange."""
    format: int = FORMAT

    @property
    def saved(self) -> Saved:
        return Saved(
            self.round, self.history, self.stage, self.num_shards, tuple(sorted(self.steps))
        )

    def to_json(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(values, indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Meta:
        """Raises `CheckpointError` where it is missing, cut off or not understood."""
        path = folder / META_FILE
        try:
            with path.open("rb") as file:
                values = json.loads(file.read(MAX_META_BYTES))
            if values["format"] != FORMAT:
                raise CheckpointError(f"{folder}: format {values['format']!r}, not {FORMAT}")
            values["steps"] = {int(j): int(n) for j, n in values["steps"].items()}
            meta = cls(**values)
            bytes.fromhex(meta.digests)
            numbers = [meta.history, meta.round, meta.stage, meta.num_stages, meta.num_shards]
            numbers += [own[name] for own in meta.own_steps for name in ("steps", "tokens")]
            if not all(isinstance(n, int) and n >= 0 for n in numbers):
                raise ValueError("negative")
            if meta.own_steps and len(meta.own_steps) != meta.num_shards:
                raise ValueError("own steps of other shards")
            return meta
        except OSError as e:
            raise CheckpointError(f"{path}: {e.strerror or e}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError(f"{path}: damaged") from None


class CheckpointStore:
    """The checkpoints of one peer in one run; implements `ports.Checkpoints`.

    Only one thread at a time may use it.
    """

    def __init__(
        self,
        state_dir: Path,
        spec: RunSpec,
        *,
        keep: int = MIN_KEPT,
        every: int | None = None,
        model: RunSpec | None = None,
        unused: Callable[[], Iterable[Path]] = tuple,
    ) -> None:
        """`keep`: newest checkpoints that stay, at least `MIN_KEPT`. `every`: rounds between two,
        for the ones that stay beside the newest, since others' disks are slower (`_prune`); None
        for none. `model`: the spec as this machine builds it, where a custom model's code is
        elsewhere than the run's spec says. `unused`: state folders of this machine that no peer of
        the run uses."""
        if keep < MIN_KEPT:
            raise CheckpointError(f"at least {MIN_KEPT} checkpoints must be kept")
        self.folder = state_dir / FOLDER / spec.run_id[:RUN_CHARACTERS]
        self._spec = spec
        self._keep = keep
        self._every = every
        self._model = model or spec
        self._unused = unused
        self._taken: dict[int, list[tuple[Path, Meta, frozenset[int]]]] = {}
        """By round, what was taken over of other state folders: a checkpoint, and the shards whose
        optimizer state is used."""
        self._wanted: frozenset[int] = frozenset()
        self._loaded: frozenset[int] = frozenset()
        """The round from which this peer has gone on, if it has."""
        self.unreadable: list[str] = []
        """What `available` found and could not use, a line for each."""

    def available(self) -> list[Saved]:
        """Those of this run that are complete, the oldest first. Quick: what the disk spoiled
        without changing a file's size is found by `load`. Raises `CheckpointError`."""
        self.unreadable = []
        return [self._saved(meta) for _, meta in self._found(self.unreadable)]

    def unused(self) -> list[Unused]:
        name = self.folder.name
        found: list[Unused] = []
        for state_dir in self._unused():
            with suppress(CheckpointError):
                metas = read_metas(state_dir / FOLDER / name)
                ours = [m for m in metas if m.run_id == self._spec.run_id]
                found += [Unused(str(state_dir), meta.saved) for meta in ours]
        return found

    def take_over(self, parts: Sequence[tuple[Unused, Collection[int]]]) -> list[Saved]:
        for unused, shards in parts:
            r = unused.saved.round
            path = Path(unused.folder) / FOLDER / self.folder.name / self.path(r).name
            try:
                meta = Meta.read(path)
                self._check_beside(path, meta, unused.saved)
            except CheckpointError as e:
                log.warning("what no peer uses is not taken over: %s", e)
                continue
            held = frozenset(shards) & frozenset(meta.steps)
            self._taken.setdefault(r, []).append((path, meta, held))
        rounds = {unused.saved.round for unused, _ in parts}
        return [saved for saved in self.available() if saved.round in rounds]

    def path(self, round_index: int) -> Path:
        """The folder of a checkpoint."""
        return self.folder / f"round-{round_index:08d}"

    def save(self, snapshot: Snapshot) -> None:
        """Writes a checkpoint; one of the same round is replaced. Where the disk is full, older
        ones make room for it, but the newest. Raises `CheckpointError`; nothing of the new one is
        left on the disk then."""
        target = self.path(snapshot.round)
        unfinished = self.folder / f"{UNFINISHED}{target.name}"
        with _one_line(target):
            while True:
                self._remove_leftovers()
                try:
                    unfinished.mkdir(parents=True)
                    self._write(unfinished, snapshot)
                    _put(unfinished, target)
                    break
                except (OSError, SafetensorError) as e:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    if not (is_full(e) and self._make_room()):
                        raise
            self._taken.clear()  # the own state is newer now
            self._prune()

    def load(self, round_index: int) -> Snapshot:
        """Raises `CheckpointError` where it is missing or damaged in any way."""
        found = {meta.round: path for path, meta in self._found()}
        folder = found.get(round_index, self.path(round_index))
        meta = Meta.read(folder)
        if meta.run_id != self._spec.run_id or meta.round != round_index:
            raise CheckpointError(f"{folder}: of another run or round")
        ranges = stage_parameter_ranges(self._model, meta.stage)
        flat = _flatten(load_parameters(folder, meta), ranges, folder)
        sizes = _shard_sizes(self._model, meta, folder)
        if sum(sizes) != flat.numel():
            raise CheckpointError(f"{folder}: does not fit the model")
        parameters = tuple(from_tensor(part) for part in flat.split(list(sizes)))
        optimizer, own_steps, errors = _load_optimizer(folder, meta, sizes)
        for path, beside, held in self._taken.get(round_index, ()):
            if path == folder:
                optimizer = {j: state for j, state in optimizer.items() if j in held}
            else:
                states, _, _ = _load_optimizer(path, beside, sizes)
                optimizer |= {j: states[j] for j in held - optimizer.keys()}
        if b"".join(xxhash.xxh3_64_digest(p.data) for p in parameters).hex() != meta.digests:
            raise CheckpointError(f"{folder}: the parameters do not match their digests")
        self._loaded = frozenset({round_index})
        return Snapshot(
            round=meta.round,
            history=meta.history,
            stage=meta.stage,
            parameters=parameters,
            digests=bytes.fromhex(meta.digests),
            optimizer=optimizer,
            own_steps=own_steps,
            errors=errors,
        )

    def keep(self, rounds: Collection[int]) -> None:
        self._wanted = frozenset(rounds)

    def digests(self, round_index: int) -> bytes:
        metas = [meta for _, meta in self._found() if meta.round == round_index]
        return bytes.fromhex(metas[0].digests) if metas else b""

    def shard(self, round_index: int, stage_index: int, shard_index: int) -> Array | None:
        for path, meta in self._found():
            if (meta.round, meta.stage) == (round_index, stage_index):
                return self._shard_of(path, meta, shard_index)
        return None

    def note_held_out(self, losses: Mapping[int, float]) -> None:
        with _one_line(self.folder):
            add_losses(self.folder, losses)

    def held_out(self) -> Mapping[int, float]:
        return read_losses(self.folder)

    # ---- within -----------------------------------------------------------------------------

    def _shard_of(self, path: Path, meta: Meta, shard_index: int) -> Array | None:
        """Checked by whoever gets it, by its digest."""
        sizes = _shard_sizes(self._model, meta, path)
        if not 0 <= shard_index < len(sizes):
            return None
        start = sum(sizes[:shard_index])
        stop = start + sizes[shard_index]
        files, ranges = MappedFiles(), stage_parameter_ranges(self._model, meta.stage)
        stored = {one.name: one for one in stored_tensors(path / STAGE_FILE)}
        return from_tensor(
            flat_of(ranges, start, stop, lambda r, *part: files.read(stored[r.name], *part))
        )

    def _found(self, unreadable: list[str] | None = None) -> list[tuple[Path, Meta]]:
        """Every complete checkpoint of this run and its folder, the oldest round first; with those
        that were taken over. `unreadable` as in `read_metas`."""
        metas = read_metas(self.folder, unreadable)
        found = {m.round: (self.path(m.round), m) for m in metas if m.run_id == self._spec.run_id}
        for r, ((path, meta, _), *_) in self._taken.items():
            found.setdefault(r, (path, meta))
        return [found[r] for r in sorted(found)]

    def _saved(self, meta: Meta) -> Saved:
        """What there is of a round, with what was taken over."""
        taken = self._taken.get(meta.round, [])
        is_own = all(meta is not one for _, one, _ in taken)
        held = set(meta.steps) if is_own else set()
        held.update(*(shards for _, _, shards in taken))
        return replace(meta.saved, held=tuple(sorted(held)))

    def _check_beside(self, path: Path, meta: Meta, saved: Saved) -> None:
        """Raises `CheckpointError` where a checkpoint of another state folder is damaged, is not
        what it was, or has other parameters than are here of that round."""
        if meta.run_id != self._spec.run_id or meta.saved != saved or not _is_complete(path, meta):
            raise CheckpointError(f"{path}: it has changed")
        for name in FILES:
            with _one_line(path / name):
                if checksum(path / name) != meta.checksums.get(name):
                    raise CheckpointError(f"{path / name}: damaged (its checksum is wrong)")
        of_round = [one for _, one in self._found() if one.round == meta.round]
        same = [(meta.history, meta.stage, meta.digests)]
        if any((one.history, one.stage, one.digests) not in same for one in of_round):
            raise CheckpointError(f"{path}: it is of another history than {self.path(meta.round)}")

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        flat = torch.cat([to_tensor(p) for p in snapshot.parameters])
        named = {
            r.name: flat[r.start : r.stop].view(r.shape)
            for r in stage_parameter_ranges(self._model, snapshot.stage)
        }
        moments: dict[str, Tensor] = {}
        steps: dict[int, int] = {}
        own_moments = stage_moments(self._model, snapshot.stage)
        has_outer = self._spec.sync.mode in (LOCAL, GOSSIP)
        for j, (values, arrays) in sorted(snapshot.optimizer.items()):
            steps[j] = int(values["steps"])
            names = (*MOMENTS[1 if has_outer else own_moments[j]], AHEAD)
            for name, array in zip(names, arrays, strict=False):  # not all are ahead
                moments[f"shards.{j}.{name}"] = to_tensor(array)
        own_steps = []
        for j, own in enumerate(snapshot.own_steps):
            values, arrays = own.moments
            own_steps.append({"steps": int(values["steps"]), "tokens": own.tokens})
            names = (FAST, *MOMENTS[own_moments[j]])
            for name, array in zip(names, (own.parameters, *arrays), strict=True):
                moments[f"own.{j}.{name}"] = to_tensor(array)
        for j, (codec, lost) in sorted(snapshot.errors.items()):
            moments[f"{ERRORS}.{j}.{codec}"] = to_tensor(lost)
        about = {"format": "pt", "run_id": self._spec.run_id, "round": str(snapshot.round)}
        save_file(named, folder / STAGE_FILE, metadata=about)
        save_file(moments, folder / OPTIMIZER_FILE, metadata=about)
        meta = Meta(
            run_id=self._spec.run_id,
            spec=json.loads(self._spec.canonical()),
            history=snapshot.history,
            round=snapshot.round,
            stage=snapshot.stage,
            num_stages=self._spec.pipeline.num_stages,
            num_shards=len(snapshot.parameters),
            digests=snapshot.digests.hex(),
            steps=steps,
            sizes={n: (folder / n).stat().st_size for n in FILES},
            checksums={n: checksum(folder / n) for n in FILES},
            saved_unix_s=time.time(),
            own_steps=own_steps,
        )
        (folder / META_FILE).write_text(meta.to_json())
        for path in (*sorted(folder.iterdir()), folder):
            _flush(path)

    def _remove_leftovers(self) -> None:
        if self.folder.is_dir():
            for path in sorted(self.folder.glob(f"{UNFINISHED}*")):
                shutil.rmtree(path)

    def _make_room(self) -> bool:
        """Removes the checkpoint that is missed least; False where only the newest is left. First
        those that no restart of this run needs, the one with the best held-out loss last of them;
        then the older ones of the newest."""
        found = [one for one in self._found() if one[0].parent == self.folder]
        if len(found) < 2:
            return False
        newest = max(found, key=lambda one: (one[1].history, one[1].round))
        of_history = [one for one in found if one[1].history == newest[1].history]
        present = of_history[-self._keep :]
        best = best_round(read_losses(self.folder), {meta.round for _, meta in found})
        others = sorted(
            (one for one in found if one not in present), key=lambda one: one[1].round == best
        )
        _remove((others or present)[0][0])
        return True

    def _prune(self) -> None:
        """Keeps the newest of the newest history, and the two newest of every second, fourth and
        eighth round that is saved: peers with slower disks save those alone; and the one with the
        best held-out loss, and what is asked for. Until the newest history has enough, the one that
        it went on from stays, for newer ones of the older history may be those of leaving peers,
        which have no round in common. Where an older history
        had come further, its last checkpoint stays too: a run that was begun anew by mistake
        destroys nothing."""
        metas = [meta for _, meta in self._found()]
        history = max(m.history for m in metas)
        saved = [m.round for m in metas if m.history == history]
        present = saved[-self._keep :]
        shared = {
            r
            for stride in STRIDES[1:]
            if self._every
            for r in [r for r in saved if r % (stride * self._every) == 0][-2:]
        }
        older = [m.round for m in metas if m.history < history]
        before = [r for r in older if r < present[-1]]
        further = [r for r in older if r > present[-1]]
        num_missing = self._keep - len(present)
        best = best_round(read_losses(self.folder), set(saved))
        wanted = {*self._wanted, *(() if best is None else (best,))}
        kept = {
            *present,
            *shared,
            *wanted,
            *before[max(0, len(before) - num_missing) :],
            *(self._loaded if num_missing else ()),
            *further[-1:],
        }
        kept_paths = {self.path(r) for r in kept}
        for path in sorted(self.folder.iterdir()):
            if NAME.fullmatch(path.name) and path not in kept_paths:
                _remove(path)


def read_metas(folder: Path, unreadable: list[str] | None = None) -> list[Meta]:
    """The meta.json of every complete checkpoint in a run's folder, the oldest round first.
    `unreadable` gets a line for each of the others. Raises `CheckpointError` where the folder
    cannot be read."""
    if unreadable is None:
        unreadable = []
    metas: list[Meta] = []
    try:
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as e:
        raise CheckpointError(f"{folder}: {e.strerror or e}") from None
    for path in paths:
        matched = NAME.fullmatch(path.name)
        if matched is None:
            continue
        try:
            meta = Meta.read(path)
        except CheckpointError as e:
            unreadable.append(str(e))
            continue
        if meta.round != int(matched[1]):
            unreadable.append(f"{path}: it says that it is of round {meta.round}")
        elif not _is_complete(path, meta):
            unreadable.append(f"{path}: a file is missing or cut off")
        else:
            metas.append(meta)
    return sorted(metas, key=lambda m: m.round)


def _is_complete(folder: Path, meta: Meta) -> bool:
    """Every file is there, as long as it was."""
    try:
        return all((folder / name).stat().st_size == meta.sizes[name] for name in FILES)
    except (OSError, KeyError):
        return False


def load_parameters(folder: Path, meta: Meta) -> dict[str, Tensor]:
    """The parameters of a checkpoint by name. Raises `CheckpointError`."""
    return _load_tensors(folder / STAGE_FILE, meta)


def find_checkpoints(
    state_dir: Path, unreadable: list[str] | None = None
) -> list[tuple[Path, Meta]]:
    """Every complete checkpoint in a peer's state folder, of whatever run, and its folder.
    `unreadable` as in `read_metas`. Raises `CheckpointError`."""
    found: list[tuple[Path, Meta]] = []
    for folder in sorted((state_dir / FOLDER).glob("*/")):
        found += [(folder / f"round-{m.round:08d}", m) for m in read_metas(folder, unreadable)]
    return found


def checksum(path: Path) -> str:
    """xxh3-128 of a file, hex. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _load_tensors(path: Path, meta: Meta) -> dict[str, Tensor]:
    with _one_line(path):
        if checksum(path) != meta.checksums.get(path.name):
            raise CheckpointError(f"{path}: damaged (its checksum is wrong)")
        return load_file(path)


def _load_optimizer(
    folder: Path, meta: Meta, sizes: Sequence[int]
) -> tuple[Moments, tuple[OwnSteps, ...], CodingErrors]:
    """Moments, own steps, and what coding has lost."""
    path = folder / OPTIMIZER_FILE
    tensors = _load_tensors(path, meta)

    def arrays(names: Sequence[str], j: int) -> tuple[Any, ...]:
        found = [tensors.get(name) for name in names]
        if not all(t is not None and _fits(t, sizes[j]) for t in found):
            raise CheckpointError(f"{path}: shard {j} is missing or does not fit")
        return tuple(from_tensor(t) for t in found if t is not None)

    if any(not 0 <= j < len(sizes) for j in meta.steps):
        raise CheckpointError(f"{path}: of shards that do not exist")
    state: Moments = {}
    for j, steps in sorted(meta.steps.items()):
        names = _moments_in(tensors, f"shards.{j}")
        if f"shards.{j}.{AHEAD}" in tensors:
            names.append(f"shards.{j}.{AHEAD}")
        state[j] = {"steps": steps}, arrays(names, j)
    own_steps = []
    for j, own in enumerate(meta.own_steps):
        fast, *moments = arrays([f"own.{j}.{FAST}", *_moments_in(tensors, f"own.{j}")], j)
        own_steps.append(OwnSteps(fast, own["tokens"], ({"steps": own["steps"]}, tuple(moments))))
    return state, tuple(own_steps), _load_errors(path, tensors, sizes)


def _moments_in(tensors: Mapping[str, Tensor], of: str) -> list[str]:
    """Names of the moments of a shard: what there is, else AdamW's."""
    names = next((names for names in MOMENTS.values() if f"{of}.{names[0]}" in tensors), MOMENTS[2])
    return [f"{of}.{name}" for name in names]


def _load_errors(path: Path, tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> CodingErrors:
    errors: dict[int, tuple[str, Array]] = {}
    for name, lost in tensors.items():
        first, *rest = name.split(".")
        if first != ERRORS:
            continue
        match rest:
            case [number, codec] if number.isascii() and number.isdigit():
                j = int(number)
                if j < len(sizes) and _fits(lost, sizes[j], torch.bfloat16):
                    errors[j] = codec, from_tensor(lost)
                    continue
        raise CheckpointError(f"{path}: {name[:64]} does not fit")
    return errors


def _fits(values: Tensor, size: int, dtype: torch.dtype = torch.float32) -> bool:
    """Finite numbers, as many as the shard has."""
    is_shard = values.dtype == dtype and values.shape == (size,)
    return is_shard and bool(torch.isfinite(values).all())


def _flatten(named: dict[str, Tensor], ranges: Sequence[ParameterRange], folder: Path) -> Tensor:
    """The flat vector of a stage, in its canonical order."""
    parts = []
    for r in ranges:
        part = named.get(r.name)
        if part is None or tuple(part.shape) != r.shape or part.dtype != torch.float32:
            raise CheckpointError(f"{folder}: {r.name} does not fit the model")
        parts.append(part.reshape(-1))
    return torch.cat(parts)


def _shard_sizes(spec: RunSpec, meta: Meta, folder: Path) -> tuple[int, ...]:
    sizes = stage_shard_sizes(spec, meta.stage)
    if len(sizes) != meta.num_shards:
        raise CheckpointError(f"{folder}: {counted(meta.num_shards, 'shard')}, not {len(sizes)}")
    return sizes


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Foreign errors become ours, once, here."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror or e}") from None
    except SafetensorError as e:
        raise CheckpointError(f"{path}: {one_line(e)}") from None
    except (ProtocolViolation, RuntimeError, ValueError) as e:
        raise CheckpointError(f"{path}: {type(e).__name__}: {str(e)[:200]}") from None


def _put(source: Path, target: Path) -> None:
    """Renames a folder to its place. A folder that is there already is first moved away: one that
    is not empty cannot be replaced."""
    if target.exists():
        away = target.with_name(f"{UNFINISHED}old-{target.name}")
        target.rename(away)
    source.rename(target)
    _flush(target.parent)
    shutil.rmtree(target.with_name(f"{UNFINISHED}old-{target.name}"), ignore_errors=True)


def _remove(folder: Path) -> None:
    """Renamed first, so that a removal that is cut off leaves no half checkpoint behind."""
    away = folder.with_name(f"{UNFINISHED}old-{folder.name}")
    folder.rename(away)
    shutil.rmtree(away)


def _flush(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
