"""Headers of safetensors files: what is none is one line, and takes no more than it is long."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from swarmnet.errors import SpecError
from swarmnet.training.mapped_tensors import MappedFiles, stored_tensors
from swarmnet.training.models.source_weights import SourceWeights

ABOUT: dict[str, Any] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def written(path: Path, header: Any) -> Path:
    """A file with this header and four bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    return path


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, values = tmp_path / "a.safetensors", np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file(
        {"a.b": values, "c": np.asarray(values[0, 0])}, path, metadata={"dtype": "x", "shape": "y"}
    )
    found = {one.name: one for one in stored_tensors(path)}
    assert found["a.b"].shape == (2, 3)
    assert found["c"].shape == ()
    assert MappedFiles().read(found["a.b"], 1, 4).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "header",
    [
        {"a": ABOUT | {"shape": [-1]}},
        {"a": ABOUT | {"shape": [True]}},
        {"a": ABOUT | {"shape": [1 << 70]}},
        {"a": ABOUT | {"shape": "1"}},
        {"a": ABOUT | {"dtype": ["F32"]}},
        {"a": ABOUT | {"dtype": "\x1b[2J"}},
        {"a": ABOUT | {"data_offsets": [0]}},
        {"a": ABOUT | {"data_offsets": [0, 8]}},
        {"a": ABOUT | {"data_offsets": [4, 8], "shape": [1]}},
        {"a": {"dtype": "F32"}},
        {"a": 5},
        {"a" * 900: ABOUT | {"shape": [-1]}},
        [ABOUT],
        b"\xff" * 64,
        b"[" * 5000,
        b'{"a":' * 5000,
        b"{}}}",
    ],
)
def test_a_header_that_is_none_is_one_line(tmp_path: Path, header: Any) -> None:
    path = written(tmp_path / "a.safetensors", header)
    with pytest.raises(SpecError, match=r"a\.safetensors: ") as raised:
        list(stored_tensors(path))
    assert len(str(raised.value)) < len(str(path)) + 200


def test_no_objects_are_made_of_a_header_that_is_none(tmp_path: Path) -> None:
    empty = b'{"a": [' + b"[]," * (1 << 20) + b"[]]}"
    path = written(tmp_path / "model.safetensors", empty)
    folder = tmp_path / "split"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_bytes(b'{"weight_map": ' + empty + b"}")
    tracemalloc.start()
    try:
        with pytest.raises(SpecError):
            list(stored_tensors(path))
        with pytest.raises(SpecError, match=r"index\.json: it cannot be read"):
            SourceWeights(folder, {}, [])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * len(empty)
