"""Whoever starts a run counts its rounds and names its data, for peers that have none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnet.errors import DataError, SpecError
from swarmnet.runtime.joining.starting import start_run
from swarmnet.spec import RunSpec, load_spec, parse_spec
from swarmnet.training.data import Place, TextData, open_data
from swarmnet.training.data.held_out import divide
from swarmnet.training.data.resolving import is_same, measures_the_same
from swarmnet.training.resolving import described, resolve_run
from tests.training.data.making import CHATML, tokenizer_folder, write_records
from tests.training.specs import TEXT, small_spec, write_text

RUN = """
[model]
hidden_size = 32
num_hidden_layers = 4
num_attention_heads = 4
intermediate_size = 48
vocab_size = 256
max_position_embeddings = 16
[data]
{data}
[optimizer]
learning_rate = 1e-2
{optimizer}
[pipeline]
num_stages = 2
global_batch = 8
microbatch = 2
"""


def run_of(folder: Path, data: str, optimizer: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(RUN.format(data=data, optimizer=optimizer))
    return path


@pytest.mark.parametrize(("epochs", "shorter"), [(1, 1.0), (3, 3.0), (0.5, 0.5)])
def test_epochs_become_rounds(tmp_path: Path, epochs: float, shorter: float) -> None:
    text = write_text(tmp_path)
    started = start_run(run_of(tmp_path, f'paths = "{text}"\nepochs = {epochs}')).spec
    data = open_data(started)
    assert data.num_samples is not None
    rounds = started.optimizer.rounds
    assert (rounds - 1) * 8 < shorter * data.num_samples <= rounds * 8
    assert started.data.epochs == 0
    assert started.open_keys == ()
    assert RunSpec.from_canonical(started.canonical()) == started
    again = start_run(run_of(tmp_path, f'paths = ["{text}"]', f"rounds = {rounds}")).spec
    assert again.run_id == started.run_id, "epochs are another way to write rounds"


def test_one_of_rounds_and_epochs(tmp_path: Path) -> None:
    data = 'paths = ["x"]'
    with pytest.raises(SpecError, match=r"\[optimizer\] rounds is missing"):
        parse_spec(RUN.format(data=data, optimizer=""))
    with pytest.raises(SpecError, match="both say how long the run is"):
        parse_spec(RUN.format(data=f"{data}\nepochs = 2", optimizer="rounds = 5"))
    spec = parse_spec(RUN.format(data=f"{data}\nepochs = 2", optimizer=""))
    assert "[data] epochs" in spec.open_keys
    assert spec.with_rounds(7).optimizer.rounds == 7
    with pytest.raises(DataError, match="needs the data for that"):
        resolve_run(spec)


def test_epochs_need_data_that_end(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "custom_model.py"
    values: dict[str, Any] = {
        "model": {"kind": "custom", "builder": f"{example}:build"},
        "data": {"epochs": 1},
        "optimizer": {"learning_rate": 1e-2},
        "pipeline": {"num_stages": 2, "global_batch": 64, "microbatch": 64},
    }
    with pytest.raises(DataError, match="have no end"):
        resolve_run(RunSpec.model_validate(values), "", Place())


def test_epochs_of_several_sources(tmp_path: Path) -> None:
    for name, count in (("few", 40), ("many", 300)):
        write_records(tmp_path / f"{name}.jsonl", [{"text": "a" * 15} for _ in range(count)])
    sources = "".join(
        f'[[data.source]]\nname = "{name}"\npaths = "{tmp_path / name}.jsonl"\nweight = {weight}\n'
        for name, weight in (("few", 1), ("many", 3))
    )
    head = "held_out_fraction = 0.0\nepochs = 2\n"
    rounds = [
        start_run(run_of(tmp_path, head + of + sources)).spec.optimizer.rounds
        for of in ("", 'epoch_of = "few"\n', 'epoch_of = "many"\n')
    ]
    assert rounds[0] == rounds[1] == pytest.approx(2 * 40 * 4 / 8, abs=1)
    assert rounds[2] == pytest.approx(2 * 300 * 4 / 3 / 8, abs=1)


def test_the_data_say_how_long_samples_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """95 % of the dialogues fit, and what becomes of the others is said."""
    said = [["hi", "yo " * (5 + n % 3)] for n in range(38)] + [
        ["hi", "long " * 60],
        ["a " * 60, "b"],
    ]
    records = [
        {"m": [{"role": r, "content": t} for r, t in zip(("user", "assistant"), one, strict=True)]}
        for one in said
    ]
    records[-2]["m"] = [*records[0]["m"], *records[-2]["m"]]
    path = write_records(tmp_path / "d.jsonl", records)
    head = f'tokenizer = "{tokenizer_folder(tmp_path / "t", CHATML)}"\nmessages_field = "m"\n'
    run = run_of(tmp_path, f'paths = "{path}"\nsequence_length = "auto"\nepochs = 1\n{head}')
    run.write_text(
        run.read_text()
        .replace("max_position_embeddings = 16", "max_position_embeddings = 512")
        .replace("vocab_size = 256", "vocab_size = 400")
    )
    started = start_run(run).spec
    assert started.open_keys == ()
    data = open_data(started)
    assert isinstance(data, TextData)
    _, most, longest = data.sources[0].about.lengths
    length = started.data.sequence_length
    assert length == -(-most // 8) * 8 == started.sequence_length
    assert most < 64 < longest
    assert RunSpec.from_canonical(started.canonical()) == started
    lines = [r.message for r in caplog.records if "sequence_length" in r.message]
    assert lines[0] == f'[data] sequence_length = "auto": samples of {length} tokens'
    assert lines[1].startswith("[data] of 40 dialogues 2 are longer than a sample")
    assert "1 cut after a turn, 1 left out; 95 % have at most" in lines[1]
    written = run.read_text().replace('"auto"', str(length))
    run.write_text(written)
    assert start_run(run).spec.run_id == started.run_id, "another way to write the number"
    auto = written.replace(f"sequence_length = {length}", 'sequence_length = "auto"')
    run.write_text(auto.replace("= 512", "= 44"))
    assert start_run(run).spec.sequence_length == 44, "no more than the model takes"
    with pytest.raises(DataError, match="or write a number"):
        resolve_run(load_spec(run))
    run.write_text(auto)
    assert described(load_spec(run)).sequence_length == length, "to plan it"
    Path(path).unlink()
    assert described(load_spec(run)).sequence_length == 512
    assert "reckoned with samples of 512 tokens" in caplog.text


@pytest.mark.parametrize("length", ['"long"', "-1", "1.5", "true"])
def test_a_length_is_a_number_or_auto(length: str) -> None:
    text = RUN.format(data=f'paths = "x"\nsequence_length = {length}', optimizer="rounds = 5")
    with pytest.raises(SpecError, match=r'sequence_length.*tokens, 0 to 4194304, or "auto"'):
        parse_spec(text)


def test_the_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    spec = resolve_run(small_spec(text), "", Place()).spec
    assert len(spec.data.fingerprint) == 32
    assert is_same(spec, open_data(spec))
    other = tmp_path / "other.txt"
    other.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert not is_same(spec, open_data(spec, Place((str(other),))))
    other.write_text(TEXT)
    assert is_same(spec, open_data(spec, Place((str(other),))))


def test_held_out_files_have_a_fingerprint_too(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    for name, content in (("right", TEXT), ("other", TEXT[1:]), ("copy", TEXT)):
        (tmp_path / f"{name}.txt").write_text(content)
    data = {"held_out_paths": str(tmp_path / "right.txt")}
    spec = resolve_run(small_spec(text, data=data), "", Place()).spec
    assert len(spec.data.held_out_fingerprint) == 32
    assert RunSpec.from_canonical(spec.canonical()) == spec
    for name, is_right in (("copy", True), ("other", False)):
        place = Place((text, f"held-out={tmp_path}/{name}.txt"), reads_held_out=False)
        opened = open_data(spec, place)
        assert is_same(spec, opened), "what is trained on has a fingerprint of its own"
        assert measures_the_same(spec, opened) == is_right
    none = open_data(spec, Place((text,), reads_held_out=False))
    assert measures_the_same(spec, none), "what is not measured is not wrong"


@pytest.mark.parametrize("data", [{}, {"held_out_microbatches": 0, "held_out_paths": "h.txt"}])
def test_a_run_without_held_out_files_keeps_its_id(tmp_path: Path, data: dict[str, Any]) -> None:
    spec = resolve_run(small_spec(write_text(tmp_path), data=data), "", Place()).spec
    assert spec.data.fingerprint
    assert b"held_out_fingerprint" not in spec.canonical()


def test_held_out_files_where_the_run_has_none_are_refused(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    with pytest.raises(DataError, match="no held_out_paths, it measures on a part of its own data"):
        open_data(small_spec(text), Place((text, f"held-out={text}")))
    spec = small_spec(text, data={"held_out_paths": text})
    with pytest.raises(DataError, match="say where the data that are trained on lie, too"):
        open_data(spec, Place((f"held-out={text}",)))


def dialogues(folder: Path, count: int) -> tuple[str, str]:
    """Paths of so many dialogues of about 60 tokens, and of their tokenizer."""
    name = tokenizer_folder(folder / "t", CHATML)
    said = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} it is. " * 2}]
        for n in range(count)
    ]
    return write_records(folder / "d.jsonl", [{"m": messages} for messages in said]), name


@pytest.mark.parametrize(("count", "fraction", "held"), [(8, None, 1), (8, 0.25, 2), (40, None, 1)])
def test_of_few_dialogues_few_are_held_out(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    count: int,
    fraction: float | None,
    held: int,
) -> None:
    """And where that is more than was asked for, whoever starts the run is told."""
    path, tokenizer = dialogues(tmp_path, count)
    data = {"held_out_microbatches": 8, "held_out_fraction": fraction or 0.02}
    data |= {"paths": path, "tokenizer": tokenizer, "messages_field": "m"}
    model = {"vocab_size": 400, "max_position_embeddings": 512}
    with caplog.at_level(logging.WARNING, "swarmnet.data"):
        spec = resolve_run(small_spec(data=data, model=model), "", Place()).spec
    opened = open_data(spec)
    assert isinstance(opened, TextData)
    (source,) = opened.sources
    division = divide(source.store, data["held_out_fraction"], 512, holds_samples=False)
    lengths = division.lengths(np.arange(count), held_out=True)
    assert np.count_nonzero(lengths) == held
    assert lengths.sum() == opened.num_held_out_tokens
    assert spec.data.held_out_least == "document"
    lines = [r.message for r in caplog.records]
    if held / count > 1.5 * data["held_out_fraction"]:
        assert len(lines) == 1
        assert "are held out and not learned, for it is a document at least" in lines[0]
    else:
        assert lines == []


def test_a_part_of_a_short_text_is_held_out_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = write_text(tmp_path)
    data = {"held_out_fraction": 0.02}
    model = {"max_position_embeddings": 512}
    with caplog.at_level(logging.WARNING, "swarmnet.data"):
        spec = resolve_run(small_spec(text, data=data, model=model), "", Place()).spec
    opened = open_data(spec)
    assert isinstance(opened, TextData)
    total = len(TEXT) + 1
    assert 0.02 * total <= opened.num_held_out_tokens <= 0.03 * total
    assert spec.data.held_out_least == "document"
    assert caplog.records == []


def test_what_is_enough_is_divided_as_it_always_was(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    written = small_spec(text, data={"held_out_fraction": 0.02})
    spec = resolve_run(written, "", Place()).spec
    assert b"held_out_least" not in spec.canonical()
    before, few = open_data(written), open_data(written.with_held_out_documents())
    for index in range(before.num_held_out):
        assert before.held_out(index).arrays == few.held_out(index).arrays
    assert before.num_samples == few.num_samples


def test_a_run_that_measures_nothing_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one and the same"}\n' * 30)
    with caplog.at_level(logging.WARNING, "swarmnet.data"):
        resolve_run(small_spec(str(tmp_path / "a.jsonl")), "", Place())
    (record,) = caplog.records
    assert "nothing is held out" in record.message


def test_a_tokenizer_of_the_same_size_is_another(tmp_path: Path) -> None:
    text, name = write_text(tmp_path), tokenizer_folder(tmp_path / "t")
    written = small_spec(text, model={"vocab_size": 400}, data={"tokenizer": name})
    resolved = resolve_run(written, "", Place())
    spec = resolved.spec
    assert sorted(resolved.contents) == ["tokenizer.json", "tokenizer_config.json"]
    place = Place((text,), "", resolved.contents)
    assert is_same(spec, open_data(spec, place)), "of the run's own files"
    tokenizer = Path(tokenizer_folder(tmp_path / "other"))
    values = json.loads(tokenizer.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["9"], vocabulary["8"] = vocabulary["8"], vocabulary["9"]
    tokenizer.write_text(json.dumps(values))
    assert not is_same(spec, open_data(spec, Place((text,), str(tokenizer), resolved.contents)))


def test_paths_of_several_sources(tmp_path: Path) -> None:
    for name in ("a", "b", "h"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 200)
    sources = [{"name": "one", "paths": "/not/here"}, {"paths": "/not/there"}]
    data = {"paths": (), "source": sources, "held_out_paths": "/nor/this"}
    spec = small_spec("", data=data)
    paths = (f"one={tmp_path}/a.txt", f"2={tmp_path}/b.txt")
    found = open_data(spec, Place(paths, reads_held_out=False))
    assert found.num_held_out == 0
    found = open_data(spec, Place((*paths, f"held-out={tmp_path}/h.txt"), reads_held_out=False))
    assert found.num_held_out == 2
    with pytest.raises(DataError, match="say NAME=PATH"):
        open_data(spec, Place((f"{tmp_path}/a.txt",)))
    with pytest.raises(DataError, match="where is 2"):
        open_data(spec, Place(paths[:1]))
