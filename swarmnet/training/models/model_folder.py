"""What a run takes from a Hugging Face folder: architecture, tokenizer, template and weights."""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarmnet.errors import SpecError, UserError, one_line
from swarmnet.spec import MAX_FILE_BYTES, RUN_FILES, SMALL_FILE_BYTES, ModelSpec
from swarmnet.training.models.base import ParameterRange
from swarmnet.training.models.model_config import read_config, require_transformers
from swarmnet.training.models.source_weights import INDEX_FILE, SINGLE_FILE, SourceWeights

log = logging.getLogger("swarmnet.models")

HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "README.md", "LICENSE")
BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that go with a tokenizer that the run names."""
CARD, MAX_CARD_BYTES = "README.md", 1 << 20
LICENSE_LINE = re.compile(r"^license:\s*([A-Za-z0-9._+ -]{1,64})\s*$", re.MULTILINE)
OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5")


def find_folder(source: str) -> Path:
    """The folder itself, or the hub's model of that name, downloaded where it is not here yet.
    Raises `SpecError`; `UserError` where the hub does not give it."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_NAME.fullmatch(source):
        raise SpecError(f"[model] from: no folder {source}, and no ORG/NAME of the hub")
    require_transformers()  # rather than after a long download
    from huggingface_hub import snapshot_download

    log.warning("downloading %s from the Hugging Face hub", source)
    try:
        return Path(snapshot_download(source, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # of the network, the hub, the disk: each has its own kind
        text = one_line(error)
        raise UserError(f"[model] from: {source} cannot be downloaded: {text}") from None


def read_folder(folder: Path, model: ModelSpec) -> tuple[ModelSpec, dict[str, bytes]]:
    """The model with all that the folder says of it, and the contents of the run's files in it, by
    name. Raises `SpecError`."""
    read = read_config(folder)
    if read.ignored:
        names = ", ".join(read.ignored)
        kind = read.values["model_type"]
        log.warning("config.json: %s not known to transformers' %s: ignored", names, kind)
    contents = small_files(folder, RUN_FILES[:-1])
    if "tokenizer.json" not in contents:
        raise SpecError(
            f"{folder} has no tokenizer.json; transformers' AutoTokenizer can write one "
            "(save_pretrained)"
        )
    values: dict[str, Any] = {
        "config": read.values,
        "base": _base(model.source, folder),
        "dtype": read.dtype,
        "license": _license(folder),
    }
    if model.router_aux_loss_coef is None:
        values["router_aux_loss_coef"] = read.router_loss
    return model.model_copy(update=values), contents


def has_weights(folder: Path) -> bool:
    """Whether there are weights; without them a run begins from random ones, which is said. Raises
    `SpecError` where they are of a kind that is not read."""
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return True
    others = [name for name in OTHER_WEIGHTS if (folder / name).exists()]
    if others:
        raise SpecError(f"{folder / others[0]}: only safetensors are read; convert it first")
    log.warning("%s has no weights: the run begins from random ones", folder)
    return False


def open_weights(
    folder: Path, config: Mapping[str, Any], stages: Sequence[Sequence[ParameterRange]]
) -> SourceWeights:
    """The weights of a folder, checked against the tensors of all stages. Raises `SpecError`."""
    ranges = [r for stage in stages for r in stage]
    weights = SourceWeights(folder, config, [r.name for r in ranges])
    weights.check(ranges)
    if weights.unused:
        log.warning(
            "%s: %d tensors, such as %s, are left out, as transformers does: they are neither "
            "trained nor exported",
            folder,
            len(weights.unused),
            weights.unused[0],
        )
    return weights


def small_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Those of a folder that are there. Raises `SpecError`."""
    found = {}
    for name in names:
        limit = MAX_FILE_BYTES if name == "tokenizer.json" else SMALL_FILE_BYTES
        if (folder / name).is_file():
            found[name] = read_bounded(folder / name, limit)
    return found


def _base(source: str, folder: Path) -> str:
    name = source if HUB_NAME.fullmatch(source) and not Path(source).is_dir() else ""
    text = name or folder.resolve().name
    return text if text.isprintable() else ""


def _license(folder: Path) -> str:
    """What the folder's model card says; empty where it says nothing."""
    try:
        with (folder / CARD).open("rb") as file:
            text = file.read(MAX_CARD_BYTES).decode("utf-8-sig", errors="replace")
    except OSError:
        return ""
    head = text.split("---", 2)[1] if text.startswith("---") and text.count("---") > 1 else ""
    found = LICENSE_LINE.search(head)
    return found[1].strip() if found else ""


def read_bounded(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """A file of a run. A byte order mark is left out: most readers take it for a part of the text.
    Raises `SpecError` where it cannot be read or is longer."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > limit:
        raise SpecError(f"{path}: longer than {limit >> 20} MiB")
    return data.removeprefix(codecs.BOM_UTF8)
