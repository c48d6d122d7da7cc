"""A run as a program gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from swarmnet.api.given import NOTHING, Given, spec_file
from swarmnet.api.layers import FILES
from swarmnet.errors import DataError, SpecError, UserError
from swarmnet.runtime.joining.starting import start_run
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import load_spec, parse_spec, read_values

DEFAULT = default_spec_path()
TEXTS = [f"a text of some length, and number {k} of those to learn\n" * 8 for k in range(12)]


class Numbered(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": TEXTS[index], "id": index}


class Endless(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"text": text} for text in TEXTS)


def test_a_path_stays_what_it_is_and_none_is_the_default(tmp_path: Path) -> None:
    assert spec_file("there/run.toml", NOTHING, tmp_path) == Path("there/run.toml")
    assert spec_file(None, NOTHING, tmp_path) == DEFAULT
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [read_values, load_spec, lambda path: start_run(path).spec])
def test_tables_and_specs_make_the_run_of_their_file(make: Any, tmp_path: Path) -> None:
    path = spec_file(make(DEFAULT), NOTHING, tmp_path)
    assert path.parent == tmp_path
    assert start_run(path).spec.run_id == start_run(DEFAULT).spec.run_id


def test_a_codec_that_was_chosen_stays(tmp_path: Path) -> None:
    text = DEFAULT.read_text().replace("[pipeline]", '[pipeline]\ncodec = "none"')
    spec = parse_spec(text.replace("[sync]", '[sync]\ncodec = "none"'))
    again = load_spec(spec_file(spec, NOTHING, tmp_path))
    assert (again.pipeline.codec, again.sync.codec) == ("none", "none")
    assert again == spec


@pytest.mark.parametrize(
    "data",
    [[{"text": text} for text in TEXTS], Numbered(), Endless()],
    ids=lambda d: type(d).__name__,
)
def test_samples_of_a_program_are_the_data_of_the_run(data: Any, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    spec = start_run(spec_file(DEFAULT, Given(data), folder)).spec
    (path,) = spec.data.paths
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == [
        {"text": t} for t in TEXTS
    ]
    plain = tmp_path / "texts.jsonl"
    plain.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    text = DEFAULT.read_text().replace('"python-stdlib"', json.dumps(str(plain)))
    from_file = tmp_path / "run.toml"
    from_file.write_text(text)
    assert spec.data.fingerprint == start_run(from_file).spec.data.fingerprint


def test_dialogues_are_in_the_field_that_the_run_names(tmp_path: Path) -> None:
    values = read_values(DEFAULT)
    values["data"]["messages_field"] = "talk"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = spec_file(values, Given([{"talk": tuple(said)}]), tmp_path)
    (data,) = load_spec(path).data.paths
    assert json.loads(Path(data).read_text()) == {"talk": said}
    with pytest.raises(DataError, match="sample 1 has no list of messages in 'talk'"):
        spec_file(values, Given([{"talk": "Hi"}]), tmp_path)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([], "data: there is no sample"),
        ([{"text": "x"}, {"txt": "y"}], "data: sample 2 has no text in 'text'"),
        (["a text"], 'data: sample 1 is a str; give tables such as {"text": ...}'),
        ([{"text": 3}], "data: sample 1 has no text in 'text'"),
    ],
)
def test_samples_that_are_none_are_named(data: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        spec_file(DEFAULT, Given(data), tmp_path)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (3, "the spec: a path, tables or a RunSpec, and not a int"),
        ({"model": {"kind": "llama"}, "optimiser": {}}, "optimiser"),
        ({**read_values(DEFAULT), "seed": object()}, "seed"),
    ],
)
def test_what_is_no_spec_is_told_before_anything_starts(
    spec: Any, line: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=line):
        spec_file(spec, NOTHING, tmp_path)


def test_several_sources_are_no_place_for_samples(tmp_path: Path) -> None:
    values = read_values(DEFAULT)
    values["data"] = {"source": [{"paths": ["python-stdlib"]}]}
    with pytest.raises(SpecError, match=r"leave \[\[data.source\]\] out"):
        spec_file(values, Given([{"text": "x"}]), tmp_path)


FULL_DISK = "/dev/full"


@pytest.mark.parametrize("name", ["data.jsonl", "run.json"])
@pytest.mark.skipif(not Path(FULL_DISK).exists(), reason="Linux only")
def test_a_full_disk_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(FULL_DISK)
    with pytest.raises(UserError, match=r"cannot write to .*: No space left .*set TMPDIR to a fol"):
        spec_file(DEFAULT, Given([{"text": text} for text in TEXTS]), tmp_path)


@pytest.mark.parametrize("name", ["inputs", "targets"])
@pytest.mark.skipif(not Path(FULL_DISK).exists(), reason="Linux only")
def test_a_disk_that_is_full_with_pairs_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / {"inputs": FILES[0], "targets": FILES[1]}[name]).symlink_to(FULL_DISK)
    pairs = [(torch.zeros(4), 0), (torch.ones(4), 1)] * 20
    values = read_values(DEFAULT)
    values.pop("model"), values.pop("data")
    with pytest.raises(UserError, match=r"cannot write to .*: No space left"):
        spec_file(values, Given(pairs, [torch.nn.Linear(4, 2)]), tmp_path)


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    given = Given([{"text": text} for text in TEXTS])
    with pytest.raises(UserError, match=r"cannot write to .*gone: No such file"):
        spec_file(DEFAULT, given, tmp_path / "gone")


def test_an_error_of_the_programs_own_data_stays_what_it_is(tmp_path: Path) -> None:
    def samples() -> Iterator[dict[str, Any]]:
        yield {"text": "one"}
        raise OSError(5, "my disk")

    with pytest.raises(OSError, match="my disk"):
        spec_file(DEFAULT, Given(samples()), tmp_path)


def test_text_that_is_no_unicode_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sample 1"):
        spec_file(DEFAULT, Given([{"text": "a\ud800"}]), tmp_path)
