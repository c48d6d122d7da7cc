"""Each document comes once an epoch, in the order of the seed, and samples fit together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.batch import IGNORED
from swarmnet.protocol.slots import permuted
from swarmnet.training.arrays import to_tensor
from swarmnet.training.data import TextData
from swarmnet.training.data.order import Permutation
from tests.training.data.making import documents_of, opened, write_records
from tests.training.specs import MODEL, small_spec

TEXTS = st.lists(st.text("abc ", min_size=1, max_size=30), min_size=1, max_size=200)


@given(st.integers(0, 2**63), st.integers(0, 9), st.integers(1, 300))
def test_many_positions_at_once(seed: int, epoch: int, size: int) -> None:
    found = Permutation(seed, size, epoch).at(np.arange(size))
    assert found.tolist() == [permuted(seed, epoch, p, size) for p in range(size)]


@given(TEXTS, st.integers(1, 40), st.booleans())
def test_each_document_comes_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], length: int, masks: bool
) -> None:
    path = tmp_path_factory.mktemp("packed") / "d.jsonl"
    texts = [*texts, "x" * 41]
    write_records(path, [{"text": text} for text in texts])
    data = opened(str(path), length, held_out_fraction=0.0, document_mask=masks)
    samples = data.sources[0].samples
    assert samples.num_tokens == sum(map(len, texts)) + len(texts)
    row: list[int] = []
    for i in range(samples.num_samples):
        sample = samples.sample(i)
        assert sum(sample.documents) == length
        assert all(size > 0 for size in sample.documents)
        batch = data.microbatch([i])
        assert batch.documents == ((sample.documents,) if masks else None)
        row += sample.inputs[: samples.num_tokens - 1 - i * length].tolist()
        place = 0
        for size in sample.documents:
            ids, targets = sample.inputs[place : place + size], sample.targets[place : place + size]
            place += size
            empty = place > samples.num_tokens - 1 - i * length
            assert (targets[:-1] == ids[1:]).all() or empty
            assert 0 not in ids[:-1].tolist() or empty, "no document in the middle of another"
            if masks and ids[-1] == 0:
                assert targets[-1] == IGNORED
            elif not empty:
                assert targets[-1] != IGNORED
    assert sorted(bytes(row).split(b"\0")) == sorted(text.encode() for text in texts)
    assert len(row) == samples.num_tokens - 1


def test_the_seed_gives_the_order(tmp_path: Path) -> None:
    texts = [f"document number {n}" for n in range(50)]
    path = write_records(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    orders = []
    for seed in (1, 1, 2):
        model = MODEL | {"vocab_size": 256}
        values = {"paths": path, "held_out_fraction": 0.0}
        from swarmnet.training.data import open_data

        data = open_data(small_spec("", model=model, data=values).with_seed(seed))
        assert isinstance(data, TextData)
        orders.append(documents_of(data))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(t.encode() for t in texts)
    assert orders[0] != [t.encode() for t in texts]


def test_the_last_sample_is_filled_up(tmp_path: Path) -> None:
    path = write_records(tmp_path / "d.jsonl", [{"text": "x" * 20}])
    data = opened(path, 16, held_out_fraction=0.0, document_mask=True)
    batch = data.microbatch([1])
    assert to_tensor(batch.inputs)[0].tolist() == [ord("x")] * 4 + [0] * 12
    assert to_tensor(batch.targets)[0].tolist() == [ord("x")] * 3 + [0] + [IGNORED] * 12
    assert batch.documents == ((4, 12),)


def test_several_sources_have_their_shares_and_epochs(tmp_path: Path) -> None:
    for k, (name, count) in enumerate((("few", 40), ("many", 300))):
        letter = "ab"[k]
        write_records(tmp_path / f"{name}.jsonl", [{"text": letter * 15} for _ in range(count)])
    sources = [
        {"name": "few", "paths": str(tmp_path / "few.jsonl"), "weight": 1},
        {"name": "many", "paths": str(tmp_path / "many.jsonl"), "weight": 3},
    ]
    data = opened([], 16, source=sources, held_out_fraction=0.0)
    assert data.num_samples is None
    letters = []
    for n in range(1000):
        inputs = to_tensor(data.microbatch([n + 777]).inputs)[0].tolist()
        letters.append("a" if ord("a") in inputs else "b")
    assert letters.count("a") == 250
    few = data.sources[0].samples.num_samples
    for epoch in range(3):
        seen = [data.source_sample(0, epoch * few + n).inputs.tolist() for n in range(few)]
        assert len(seen) == few
    assert data.samples_of(2.0, 0) == pytest.approx(2 * few * 4, abs=4)
    assert data.samples_of(1.0, 1) == pytest.approx(300 * 4 / 3, abs=4)
