"""The weights of a Hugging Face folder, read where they lie: memory-mapped, a range at a time.

A parameter of the model is one tensor of the files, or, where transformers keeps the experts of a
layer in one parameter, several after another. Which ones says transformers' own table of
conversions; of its operations only those are known here that put tensors side by side in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from swarmnet.errors import SpecError
from swarmnet.training.mapped_tensors import MappedFiles, Stored, stored_tensors
from swarmnet.training.models.adapter import causal_shell
from swarmnet.training.models.base import ParameterRange, flat_of
from swarmnet.training.models.model_config import load_config

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Where a model's embedding and head are one matrix; its files have it once, or twice the same."""
BASE_PREFIX = "model."
NEVER_USED = r"rotary_emb\.inv_freq$"
"""Tables of old files, which are made anew."""
READ_ELEMENTS = 1 << 24
MAX_SHOWN = 3


class Index(msgspec.Struct):
    """Which files a folder has."""

    weight_map: dict[str, str]
    """Names of files, by those of tensors."""


INDEX = msgspec.json.Decoder(Index)


class SourceWeights:
    """The tensors of a model, by name, as its folder has them."""

    def __init__(self, folder: Path, config: Mapping[str, Any], names: Sequence[str]) -> None:
        """`config`: canonical. `names`: of all parameters and buffers that come from a folder, or
        of as many as adapters need.

        Raises:
            SpecError: a file cannot be read, it has not all of them, or it has others, which are
                another model's: except those that transformers leaves out by its own rules.
        """
        self.folder = folder
        self._files = MappedFiles()
        stored = {one.name: one for path in _files(folder) for one in stored_tensors(path)}
        tied = TIED if config.get("tie_word_embeddings") else {}
        wanted = {tied.get(name, name) for name in names}
        self._parts, unused = _assign(stored, config, {*wanted, *tied})
        for name, owner in tied.items():
            self._tie(name, owner)
        missing = sorted(wanted - self._parts.keys())
        if missing:
            raise SpecError(f"{folder}: it has no tensor for {missing[0]}")
        self.unused = _without_place(unused, config, folder)
        """Tensors that transformers leaves out."""
        dtypes = [one.dtype for parts in self._parts.values() for one in parts]
        self.dtype = max(sorted(set(dtypes)), key=dtypes.count)
        """Of most tensors."""

    def _tie(self, name: str, owner: str) -> None:
        """Files have one matrix of two names once, under either, or twice. Raises `SpecError` where
        they are two."""
        there, here = self._parts.get(owner), self._parts.get(name)
        if there and here:
            size = sum(one.num_elements for one in there)
            is_same = size == sum(one.num_elements for one in here) and all(
                _is_same(self._part(name, at, stop), self._part(owner, at, stop))
                for at in range(0, size, READ_ELEMENTS)
                for stop in (min(at + READ_ELEMENTS, size),)
            )
            if not is_same:
                raise SpecError(
                    f"{self.folder}: {name} and {owner} differ, though config.json says that they "
                    "are one matrix; write tie_word_embeddings = false there"
                )
        one = there or here
        if one is not None:
            self._parts[name] = self._parts[owner] = one

    def _part(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a parameter, whose tensors lie one after the other."""
        parts, at = [], 0
        for one in self._parts[name]:
            first, last = max(start, at), min(stop, at + one.num_elements)
            if first < last:
                parts.append(self._files.read(one, first - at, last - at))
            at += one.num_elements
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def check(self, ranges: Sequence[ParameterRange]) -> None:
        """Raises `SpecError` where a tensor has another size than its parameter."""
        for r in ranges:
            there = sum(one.num_elements for one in self._parts[r.name])
            one = self._parts[r.name]
            if there != r.num_elements or (len(one) == 1 and one[0].shape != r.shape):
                shape = one[0].shape if len(one) == 1 else f"{len(one)} parts"
                raise SpecError(f"{self.folder}: {r.name} is {shape}, not {r.shape}")

    def flat(self, ranges: Sequence[ParameterRange], start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a stage's flat vector, fp32. Raises `SpecError`."""
        return flat_of(ranges, start, stop, lambda r, *part: self._part(r.name, *part))


def _is_same(a: Tensor, b: Tensor) -> bool:
    return np.array_equal(a.numpy(), b.numpy(), equal_nan=True)


def shard_hash(values: Tensor) -> bytes:
    """32 bytes: SHA-256 of fp32 values."""
    return hashlib.sha256(values.contiguous().numpy().data).digest()


def saved_tensors(config: Mapping[str, Any], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names, and in the pieces, in which files of the family have them."""
    from transformers.core_model_loading import revert_weight_conversion

    shell = causal_shell(load_config(config))
    return {n: t.contiguous() for n, t in revert_weight_conversion(shell, dict(named)).items()}


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises `SpecError`."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / SINGLE_FILE]
    try:
        most = min(index.stat().st_size, MAX_INDEX_BYTES)
        with index.open("rb") as file:
            names = set(INDEX.decode(file.read(most)).weight_map.values())
    except (OSError, RecursionError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SpecError(f"{index}: it cannot be read: {str(error)[:100]}") from None
    wrong = [name for name in names if Path(str(name)).name != name]
    if wrong:
        raise SpecError(f"{index}: {str(wrong[0])[:80]} is no name of a file beside it")
    return [folder / name for name in sorted(names)]


def _assign(
    stored: Mapping[str, Stored], config: Mapping[str, Any], wanted: set[str]
) -> tuple[dict[str, list[Stored]], list[str]]:
    """Which tensors, one after the other, are each wanted parameter; and those of no use."""
    renamings, converters = _conversions(json.dumps(config, sort_keys=True))
    from transformers.core_model_loading import rename_source_key

    found: dict[str, list[tuple[list[int], int, Stored]]] = {}
    unused = []
    for name, one in stored.items():
        target, pattern = rename_source_key(name, renamings, converters)
        if target not in wanted and BASE_PREFIX + target in wanted:
            target = BASE_PREFIX + target
        if target not in wanted:
            unused.append(name)
            continue
        place = 0
        if pattern is not None:
            place = _place(name, pattern, converters)
        numbers = [int(n) for n in re.findall(r"\d+", name)]
        found.setdefault(target, []).append((numbers, place, one))
    parts = {
        name: [one for *_, one in sorted(several, key=lambda s: (s[0][:2], s[1]))]
        for name, several in found.items()
    }
    return parts, unused


def _without_place(
    names: Sequence[str], config: Mapping[str, Any], folder: Path
) -> tuple[str, ...]:
    """Those of them that transformers leaves out of such models. Raises `SpecError` for others."""
    shell = causal_shell(load_config(config))
    rules = (*(shell._keys_to_ignore_on_load_unexpected or ()), NEVER_USED)  # noqa: SLF001  it has no public name
    others = [name for name in names if not any(re.search(rule, name) for rule in rules)]
    if others:
        more = f" and {len(others) - MAX_SHOWN} more" if len(others) > MAX_SHOWN else ""
        shown = ", ".join(name[:120] for name in others[:MAX_SHOWN])
        raise SpecError(
            f"{folder}: a model of type {config['model_type']} has no place for {shown}{more}: the "
            "weights or config.json are of another model"
        )
    return tuple(names)


def _place(name: str, pattern: str, converters: Sequence[Any]) -> int:
    """Of a tensor among those that lie side by side in one expert of a parameter. Raises
    `SpecError`."""
    for converter in converters:
        if pattern in converter.source_patterns:
            made = [(type(op).__name__, getattr(op, "dim", 0)) for op in converter.operations]
            if made in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
                return int(converter.source_patterns.index(pattern))
    raise SpecError(f"the weights of this family ({name}) are stored in a way not known here")


@lru_cache(maxsize=16)
def _conversions(config: str) -> tuple[list[Any], list[Any]]:
    """How transformers renames and joins the tensors of a family's files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    steps = get_model_conversion_mapping(causal_shell(load_config(json.loads(config))))
    renamings = [s for s in steps if isinstance(s, WeightRenaming)]
    converters = [s for s in steps if isinstance(s, WeightConverter)]
    if len(renamings) + len(converters) != len(steps):
        raise SpecError("the weights of this family are stored in a way not known here")
    return renamings, converters
