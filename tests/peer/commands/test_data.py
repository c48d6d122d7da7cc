"""What a model sees of a run's data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models
from typer.testing import CliRunner

from peer.cli import app
from peer.commands.data import shown
from swarmnet.batch import IGNORED
from swarmnet.training.data.encoding import open_encoder
from swarmnet.training.data.packing import Sample
from tests.training.data.making import CHATML, tokenizer_folder, write_records

RUN = """
[model]
hidden_size = 32
num_hidden_layers = 4
num_attention_heads = 4
intermediate_size = 48
vocab_size = 400
max_position_embeddings = 64
[data]
held_out_fraction = 0.0
tokenizer = "{tokenizer}"
epochs = 2
[[data.source]]
name = "talks"
paths = "{folder}/talks.jsonl"
messages_field = "messages"
[[data.source]]
name = "notes"
paths = "{folder}/notes"
[optimizer]
learning_rate = 1e-2
[pipeline]
num_stages = 2
global_batch = 4
microbatch = 2
"""


def run_in(folder: Path) -> Path:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you"}]
    records = [{"messages": m} for m in (messages, messages[:1], messages, messages)]
    write_records(folder / "talks.jsonl", records)
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("a note of [some] length. " * 20)
    (folder / "notes" / "b.txt").write_bytes(b"\0\1")
    tokenizer = tokenizer_folder(folder / "t", CHATML)
    path = folder / "run.toml"
    path.write_text(RUN.format(folder=folder, tokenizer=tokenizer))
    return path


def test_what_a_model_sees_of_each_source(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["data", str(run_in(tmp_path)), "--samples", "1"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    talks, notes = (
        lines.index(f"talks: {tmp_path}/talks.jsonl"),
        lines.index(f"notes: {tmp_path}/notes"),
    )
    assert lines[talks + 1].startswith("  3 documents, ")
    assert "what the assistant says" in lines[talks + 2]
    assert lines[talks + 3] == (
        "  dialogues: half have at most 32 tokens, 95 % at most 32, the longest 32; a sample has 64"
    )
    assert any("1 without an answer of the assistant" in line for line in lines[talks:notes])
    text = "\n".join(lines[talks:notes])
    prompt = "⟦<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟧"
    assert prompt + "hello you<|im_end|>⟦\n<|endoftext|>" in text
    assert "places are empty)" in text
    assert "  1 document, " in lines[notes + 1]
    assert "1 file" in "\n".join(lines[notes:])
    assert "a note of [some] length. a note" in result.stdout
    assert "⟦" not in "\n".join(lines[notes:])
    assert lines[-2].endswith("epochs")
    assert lines[-1].startswith("fingerprint ")


def test_for_programs(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["data", str(run_in(tmp_path)), "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert [source["name"] for source in values["sources"]] == ["talks", "notes"]
    assert values["sources"][0]["left_out"] == {"without an answer of the assistant": 1}
    assert values["rounds"] >= 1


def test_of_a_run_without_an_end(tmp_path: Path) -> None:
    path = run_in(tmp_path)
    endless = '[optimizer]\nschedule = "constant"\nwarmup_rounds = 1\nrounds = 0\n'
    text = path.read_text().replace("epochs = 2\n", "")
    path.write_text(text.replace("[optimizer]\n", endless))
    result = CliRunner().invoke(app, ["data", str(path)])
    assert result.exit_code == 0, result.output
    assert re.search(r"no end: an epoch is [0-9.]+ rounds of \d+ samples\n", result.stdout)


def test_epochs_are_counted_with_a_batch_that_grows(tmp_path: Path) -> None:
    path, rounds = run_in(tmp_path), []
    text = path.read_text()
    for line in ("", "batch_ramp = [[0, 2], [3, 4]]\n"):
        path.write_text(text + line)
        result = CliRunner().invoke(app, ["data", str(path), "--json"])
        assert result.exit_code == 0, result.output
        rounds.append(json.loads(result.stdout)["rounds"])
    samples = 2 * 3 + 4 * (rounds[1] - 3)
    assert 4 * (rounds[0] - 1) < samples < 4 * (rounds[0] + 1)
    result = CliRunner().invoke(app, ["data", str(path)])
    assert f"{rounds[1]} rounds of 2, 4 from round 3 on samples: " in " ".join(
        result.stdout.split()
    )


def test_no_space_is_lost_where_learning_begins() -> None:
    """By a decoder that drops the one at the beginning of a text."""
    tokenizer = Tokenizer(models.BPE({"▁a": 0, "▁cat": 1, "▁sat": 2}, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    data: Any = SimpleNamespace(encoder=open_encoder("t", files))
    inputs = np.array([0, 1, 2, 3], np.int32)
    targets = np.array([IGNORED, 2, 3, IGNORED], np.int32)
    assert shown(data, Sample(inputs, targets, (4,))) == "⟦a cat⟧ sat<|endoftext|>"


def test_a_length_that_the_data_say(tmp_path: Path) -> None:
    path = run_in(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("[data]\n", '[data]\nsequence_length = "auto"\n'))
    values = json.loads(CliRunner().invoke(app, ["data", str(path), "--json"]).stdout)
    assert values["sequence_length"] == 64, "of texts, what the model takes"
    only_talks = text[: text.index('[[data.source]]\nname = "notes"')]
    only_talks += text[text.index("[optimizer]") :]
    path.write_text(only_talks.replace("[data]\n", '[data]\nsequence_length = "auto"\n'))
    values = json.loads(CliRunner().invoke(app, ["data", str(path), "--json"]).stdout)
    assert values["sequence_length"] == 32


def test_bad_data_is_one_line(tmp_path: Path) -> None:
    path = run_in(tmp_path)
    (tmp_path / "talks.jsonl").write_text("{")
    result = CliRunner().invoke(app, ["data", str(path)])
    assert result.exit_code != 0
    assert "line 1 is no JSON" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
