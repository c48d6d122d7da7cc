"""Passes over a few tokens beside what is kept of those before: the same numbers as one pass over
all, by the copy that was taken, whatever has become of the round."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarmnet.errors import NotReady, ProtocolViolation
from swarmnet.protocol.codecs import BOUNDARY_CODECS, NONE
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.memory.plan import BF16, FP32, Precision, copy_bytes
from swarmnet.training.stage import TorchStage, build_stage
from swarmnet.wire import Array
from tests.training.specs import small_spec
from tests.training.test_adapter import run_of, saved

LENGTH = 16
TEXT = "a text"
LLAMA, NARROW = "the built-in llama", "the built-in llama in a subspace"


def spec_of(folder: Path, family: str, codec: str = NONE) -> RunSpec:
    """`codec`: of the boundary, of the built-in model."""
    if family in (LLAMA, NARROW):
        return small_spec(
            model={"subspace": 8 if family == NARROW else 0}, pipeline={"codec": codec}
        )
    saved(folder, family, False)
    return run_of(folder)


def built(spec: RunSpec, precision: str = "fp32") -> list[TorchStage]:
    return [build_stage(spec, k, computing=Computing(precision)) for k in range(2)]


def copy_all(stages: Sequence[TorchStage]) -> None:
    for stage in stages:
        assert stage.generation is not None
        stage.generation.copy([stage.parameter_shard(j) for j in range(len(stage.shard_sizes))])


def tokens_of(spec: RunSpec, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 100, (1, length), generator=generator, dtype=torch.int32)


def through(
    stages: Sequence[TorchStage],
    tokens: Tensor,
    position: int,
    *,
    is_copied: bool = True,
    exact: bool = False,
) -> Tensor:
    """Logits after the last token."""
    arrays = (from_tensor(tokens),)
    for stage in stages:
        assert stage.generation is not None
        arrays = stage.generation.extend(
            TEXT, arrays[0], position, is_copied=is_copied, num_logits=0, exact=exact
        )
    return to_tensor(arrays[0])


def at_once(stages: Sequence[TorchStage], tokens: Tensor) -> Tensor:
    """Logits after the last token, by one pass over all."""
    array = from_tensor(tokens)
    for stage in stages:
        result = stage.evaluate(array, None)
        assert isinstance(result, Array)
        array = result
    return to_tensor(array)[:, -1]


def change(stages: Sequence[TorchStage]) -> None:
    """The next round, with other parameters."""
    for stage in stages:
        for j in range(len(stage.shard_sizes)):
            values = to_tensor(stage.parameter_shard(j)) * 1.5 + 0.01
            stage.stage_parameters(j, from_tensor(values))
        stage.finish_round()


@pytest.mark.parametrize(
    ("family", "codec"),
    [
        *((LLAMA, codec) for codec in BOUNDARY_CODECS),
        *((NARROW, codec) for codec in (NONE, "int8")),
        *((family, NONE) for family in ("llama 3", "gemma3", "mixtral", "qwen3 moe")),
    ],
)
def test_token_by_token_is_the_same_as_at_once(tmp_path: Path, family: str, codec: str) -> None:
    spec = spec_of(tmp_path, family, codec)
    stages = built(spec)
    tokens, expected = tokens_of(spec), []
    for end in (7, 12, 13, 14, 15, 16):
        expected.append(at_once(stages, tokens[:, :end]))
    copy_all(stages)
    for is_copied in (True, False):
        begin, found = 0, []
        for end in (7, 12, 13, 14, 15, 16):  # a few at a time, then one by one
            found.append(through(stages, tokens[:, begin:end], begin, is_copied=is_copied))
            begin = end
        torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", [codec for codec in BOUNDARY_CODECS if codec != NONE])
def test_exact_passes_know_of_no_codec(tmp_path: Path, codec: str) -> None:
    plain, coded = (built(spec_of(tmp_path, LLAMA, name)) for name in (NONE, codec))
    tokens = tokens_of(small_spec())
    for stages in (plain, coded):
        copy_all(stages)
    expected = through(plain, tokens, 0)
    assert torch.equal(through(coded, tokens, 0, exact=True), expected)
    assert not torch.equal(through(coded, tokens, 0), expected)
    first, last = (stage.generation for stage in coded)
    assert first is not None
    assert last is not None
    (made,) = first.extend(TEXT, from_tensor(tokens), 0, is_copied=True, num_logits=0)
    with pytest.raises(ProtocolViolation, match="float32"):
        last.extend(TEXT, made, 0, is_copied=True, num_logits=0, exact=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_copy_outlives_its_round_and_leaves_the_next_one_alone(precision: str) -> None:
    spec = small_spec()
    stages, tokens = built(spec, precision), tokens_of(spec)
    copy_all(stages)
    before = through(stages, tokens, 0)
    change(stages)
    after = at_once(stages, tokens)
    assert torch.equal(through(stages, tokens, 0), before)
    assert torch.equal(at_once(stages, tokens), after)
    assert not torch.equal(before, after)
    torch.testing.assert_close(
        through(stages, tokens, 0, is_copied=False), after, rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(("name", "precision"), [("fp32", FP32), ("bf16", BF16)])
def test_what_is_kept_is_what_is_counted(name: str, precision: Precision) -> None:
    stages, tokens = built(small_spec(), name), tokens_of(small_spec())
    through(stages, tokens, 0, is_copied=False)  # tables of positions are there from now on
    expected = sum(copy_bytes(stage.num_parameters, precision) for stage in stages)
    cached = 0
    for stage in stages:
        assert stage.generation is not None
        stage.generation.drop(TEXT)
        cached += LENGTH * stage.generation.token_bytes
    before = all_bytes()
    copy_all(stages)
    assert all_bytes() - before == expected
    through(stages, tokens, 0)
    assert all_bytes() - before == expected + cached
    for stage in stages:
        assert stage.generation is not None
        assert stage.generation.copy_bytes == copy_bytes(stage.num_parameters, precision)
        stage.generation.drop(TEXT)
        stage.generation.drop_copy()
    assert all_bytes() == before


def all_bytes() -> int:
    """Of all tensors that there are; each storage once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_the_largest_logits_alone() -> None:
    spec = small_spec()
    stages, tokens = built(spec), tokens_of(spec)
    copy_all(stages)
    everything = through(stages, tokens, 0)
    first, last = (stage.generation for stage in stages)
    assert first is not None
    assert last is not None
    hidden = first.extend(TEXT, from_tensor(tokens), 0, is_copied=True, num_logits=3)
    values, ids = last.extend(TEXT, hidden[0], 0, is_copied=True, num_logits=3)
    assert ids.dtype == "int32"
    assert torch.equal(to_tensor(values), everything.topk(3).values)
    assert torch.equal(everything[0, to_tensor(ids)[0].long()], to_tensor(values)[0])


def test_what_does_not_fit_is_refused() -> None:
    first = built(small_spec())[0].generation
    assert first is not None
    assert first.pass_tokens == 2 * LENGTH  # of a microbatch
    good = from_tensor(torch.zeros(1, 4, dtype=torch.int32))
    with pytest.raises(NotReady):  # there is no copy
        first.extend(TEXT, good, 0, is_copied=True, num_logits=0)
    first.extend(TEXT, good, 0, is_copied=False, num_logits=0)
    for position in (3, 5):
        with pytest.raises(NotReady):
            first.extend(TEXT, good, position, is_copied=False, num_logits=0)
    with pytest.raises(NotReady):
        first.extend("another text", good, 4, is_copied=False, num_logits=0)
    for tensor in (
        torch.zeros(2, 4, dtype=torch.int32),
        torch.zeros(1, 2 * LENGTH + 1, dtype=torch.int32),
        torch.zeros(1, 0, dtype=torch.int32),
        torch.zeros(1, 4),
        torch.full((1, 4), 256, dtype=torch.int32),
        torch.full((1, 4), -1, dtype=torch.int32),
    ):
        with pytest.raises(ProtocolViolation):
            first.extend(TEXT, from_tensor(tensor), 4, is_copied=False, num_logits=0)
    first.extend(TEXT, good, 4, is_copied=False, num_logits=0)
    first.drop(TEXT)
    with pytest.raises(NotReady):
        first.extend(TEXT, good, 8, is_copied=False, num_logits=0)
