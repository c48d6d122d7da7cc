"""What an update loses by coding comes back with the next one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.codecs import (
    CHUNK,
    ERROR_DECAY,
    KEPT,
    KEPT_STEP,
    TILE,
    TOPK_DENSITIES,
    UPDATE_CODECS,
    error_decay,
    kept_by,
    kept_of,
    row_bytes,
    sparse_codec,
    update_codec,
)
from swarmnet.spec import OptimizerSpec
from swarmnet.training import cores
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.codecs.registry import CODECS
from swarmnet.training.codecs.shards import (
    ROW,
    TorchShardCodec,
    decode_shard,
    encode_shard,
    round_trip,
    shard_codec_of,
)
from swarmnet.training.models.base import ParameterRange
from swarmnet.training.optimizer.outer import OuterNesterov
from swarmnet.training.optimizer.shards import ShardedAdamW
from swarmnet.wire import Array

SIZE = CHUNK + 300
FEW = sparse_codec(208)
CODED = [*(name for name in UPDATE_CODECS if name != "none"), FEW]


def numbers(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*CODECS, FEW])
@given(size=st.integers(1, 3 * CHUNK), seed=st.integers(0, 1 << 30))
def test_a_shard_of_any_size_is_as_long_as_one_row(name: str, size: int, seed: int) -> None:
    values = numbers(seed, size)
    coded = encode_shard(name, values)
    assert coded.numel() * coded.element_size() == row_bytes(name, size)
    decoded = decode_shard(name, coded, size)
    assert (decoded - values).norm() < values.norm()


@pytest.mark.parametrize("name", [name for name in CODED if error_decay(name) == 1.0])
def test_the_sum_of_contributions_is_that_of_gradients(name: str) -> None:
    """But for what was lost of the last one, however many there were."""
    codec, sent, meant = TorchShardCodec(update_codec(name), [SIZE]), 0.0, 0.0
    for seed in range(60):
        gradient = numbers(seed)
        coded = codec.contribution(0, from_tensor(gradient), keeps_error=True)
        sent = sent + to_tensor(codec.decoded_contribution(0, coded)).double()
        meant = meant + gradient.double()
    one = TorchShardCodec(update_codec(name), [SIZE])
    coded = one.contribution(0, from_tensor(numbers(1)), keeps_error=False)
    lost = (to_tensor(one.decoded_contribution(0, coded)) - numbers(1)).norm()
    assert (sent - meant).norm() < 1.5 * lost
    codec.forget_error(0)
    assert same(codec, numbers(1)) == same(one, numbers(1))


def few_and_many() -> torch.Tensor:
    """A chunk of which `topk` leaves out the number at 4000 alone."""
    gradient = torch.zeros(CHUNK)
    gradient[:KEPT], gradient[4000] = 1.0, 0.5
    return gradient


def test_what_topk_leaves_out_comes_with_later_changes_and_fades() -> None:
    codec, part = TorchShardCodec(UPDATE_CODECS["topk"], [CHUNK]), ERROR_DECAY["topk"]

    def sent(gradient: torch.Tensor) -> torch.Tensor:
        coded = codec.contribution(0, from_tensor(gradient), keeps_error=True)
        return to_tensor(codec.decoded_contribution(0, coded))

    first = few_and_many()
    assert torch.equal(sent(first), first.where(first == 1.0, 0.0))
    again = first.where(first == 1.0, 0.0)
    assert torch.equal(sent(again), again)
    late = sent(torch.zeros(CHUNK))
    assert late[4000].item() == pytest.approx(0.5 * part**2, rel=0.01)
    assert late.count_nonzero() == 1
    assert sent(torch.zeros(CHUNK)).abs().max() < 0.01


def test_what_topk_leaves_out_does_not_come_at_once_with_a_short_change() -> None:
    """Such as the last one of a run, which has all numbers; the error of short ones is kept."""
    codec, part = TorchShardCodec(UPDATE_CODECS["topk"], [CHUNK]), ERROR_DECAY["topk"]
    codec.contribution(0, from_tensor(few_and_many()), keeps_error=True)
    zeros = from_tensor(torch.zeros(CHUNK))
    short = codec.contribution(0, zeros, keeps_error=False, is_short=True)
    assert not to_tensor(codec.decoded_contribution(0, short)).any()
    coded = codec.contribution(0, zeros, keeps_error=False)
    late = to_tensor(codec.decoded_contribution(0, coded))
    assert late[4000].item() == pytest.approx(0.5 * part, rel=0.01), "it is still there"
    codec.contribution(0, from_tensor(numbers(1, CHUNK)), keeps_error=True, is_short=True)
    after = codec.contribution(0, zeros, keeps_error=True, is_short=True)
    assert to_tensor(codec.decoded_contribution(0, after)).any()
    last = codec.contribution(0, zeros, keeps_error=False)
    assert not to_tensor(codec.decoded_contribution(0, last)).any()


def test_the_two_forms_of_contributions_never_have_the_same_size() -> None:
    """A primary knows by the size which it has got."""
    names = UPDATE_CODECS["topk"]
    for size in range(1, 3 * CHUNK):
        assert names.form(names.contributions, size) != names.form(names.sums, size)


@given(st.floats(*TOPK_DENSITIES))
def test_a_density_is_rounded_up_to_what_a_codec_keeps(density: float) -> None:
    kept = kept_by(density)
    assert kept >= density * CHUNK > kept - 3 * KEPT_STEP
    assert kept_of(sparse_codec(kept)) == kept


def test_forms_of_few_numbers_are_told_apart_at_every_density() -> None:
    least, most = (round(1000 * density) for density in TOPK_DENSITIES)
    for kept in sorted({kept_by(n / 1000) for n in range(least, most + 1)}):
        names = update_codec(sparse_codec(kept))
        forms = {names.of_result(is_plain=is_plain) for is_plain in (True, False)}
        assert forms == {names.contributions, "int4"}
        for size in range(1, 3 * CHUNK, TILE):
            assert len({names.form(codec, size) for codec in (*forms, "int6")}) == 3, (kept, size)


@pytest.mark.parametrize(
    "name",
    ["topk-0", "topk-17", "topk-0208", "topk-352", "topk-20.8", "topk-\u00b2", "topk-", "few"],
)
def test_another_number_is_no_codec(name: str) -> None:
    assert not kept_of(name)
    with pytest.raises(KeyError):
        update_codec(name)


def test_either_form_of_a_result_is_applied() -> None:
    codec, present = TorchShardCodec(update_codec(FEW), [SIZE]), numbers(1)
    for name in (FEW, "int4"):
        coded, change = round_trip(name, numbers(2))
        found = to_tensor(codec.applied(0, from_tensor(present), from_tensor(coded)))
        assert torch.equal(found, present + change)
    assert to_tensor(codec.applied(0, from_tensor(present), from_tensor(numbers(3)))).equal(
        numbers(3)
    )
    with pytest.raises(ProtocolViolation):
        codec.applied(0, from_tensor(present), from_tensor(round_trip("int6", numbers(2))[0]))


def test_what_few_numbers_leave_out_is_loaded_in_runs_with_as_many_alone() -> None:
    one, same_run, other = (
        TorchShardCodec(update_codec(name), [SIZE]) for name in (FEW, FEW, sparse_codec(192))
    )
    one.contribution(0, from_tensor(numbers(1)), keeps_error=True)
    same_run.load_errors(one.errors())
    assert same(same_run, numbers(2)) == same(one, numbers(2))
    with pytest.raises(ProtocolViolation):
        other.load_errors(one.errors())


def same(codec: TorchShardCodec, gradient: torch.Tensor) -> bytes:
    return bytes(codec.contribution(0, from_tensor(gradient), keeps_error=False).data)


def test_a_gradient_that_is_offered_elsewhere_changes_nothing() -> None:
    codec = TorchShardCodec(UPDATE_CODECS["int4"], [SIZE])
    codec.contribution(0, from_tensor(numbers(1)), keeps_error=True)
    assert same(codec, numbers(2)) == same(codec, numbers(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", CODED)
def test_a_gradient_that_is_not_finite_changes_nothing(name: str, bad: float) -> None:
    """It never counts: what was lost before comes with the next one."""
    codec, other = (TorchShardCodec(update_codec(name), [SIZE]) for _ in range(2))
    for one in (codec, other):
        one.contribution(0, from_tensor(numbers(0)), keeps_error=True)
    gradient = numbers(1)
    gradient[7] = bad
    codec.contribution(0, from_tensor(gradient), keeps_error=True)
    assert same(codec, numbers(2)) == same(other, numbers(2))
    assert same(codec, numbers(2)) != same(TorchShardCodec(codec.names, [SIZE]), numbers(2))


def adamw(codec: str) -> ShardedAdamW:
    spec = OptimizerSpec(learning_rate=1e-2, rounds=100, warmup_rounds=0)
    optimizer = ShardedAdamW([ParameterRange("w", 0, (SIZE,), SIZE)], [SIZE], spec, codec=codec)
    optimizer.create(0)
    return optimizer


def outer(codec: str) -> OuterNesterov:
    optimizer = OuterNesterov([SIZE], 0.7, 0.9, codec=codec)
    optimizer.create(0)
    return optimizer


@pytest.mark.parametrize("build", [adamw, outer])
@pytest.mark.parametrize("codec", [name for name in CODED if name != FEW])
@pytest.mark.parametrize("is_delayed", [False, True])
def test_coded_results_never_drift_away(build: object, codec: str, is_delayed: bool) -> None:
    """After any number of steps they are off by what was lost of the last one."""
    exact, coded = build("none"), build(codec)  # type: ignore[operator]
    one: Array = from_tensor(numbers(0))
    other = one
    off = []
    for r in range(40):
        gradient = from_tensor(numbers(r + 1) / 100)
        before = one
        one, _ = exact.step(0, one, gradient, 1.0, r, is_delayed)
        result, after = coded.step(0, other, gradient, 1.0, r, is_delayed)
        other = coded.codec.applied(0, other, result)
        assert bytes(other.data) == bytes(after.data)
        moved = (to_tensor(one) - to_tensor(before)).norm()
        off.append(((to_tensor(one) - to_tensor(other)).norm() / moved).item())
    assert max(off) < 0.25
    assert off[-1] < 2 * max(off[:8])
    values, arrays = coded.export(0)
    heir = build(codec)  # type: ignore[operator]
    heir.load(0, values, arrays)
    gradient = from_tensor(numbers(99))
    results = [o.step(0, other, gradient, 1.0, 50, is_delayed)[0] for o in (coded, heir)]
    assert bytes(results[0].data) == bytes(results[1].data)


@pytest.mark.parametrize("codec", CODED)
def test_what_none_has_coded_is_refused(codec: str) -> None:
    shards, zeros = TorchShardCodec(update_codec(codec), [SIZE]), torch.zeros(SIZE)
    short = Array("uint8", (7,), b"1234567")
    for read in (shards.decoded_contribution, shards.decoded_sum):
        with pytest.raises(ProtocolViolation):
            read(0, short)
    with pytest.raises(ProtocolViolation):
        shards.applied(0, from_tensor(zeros), short)
    noise = torch.full((row_bytes(shards.names.sums, SIZE),), 0xFF, dtype=torch.uint8)
    dtype, shape = shards.names.form(shards.names.sums, SIZE)
    with pytest.raises(ProtocolViolation):
        shards.decoded_sum(0, Array(dtype, shape, bytes(noise.numpy())))


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "topk"])
def test_helpers_change_no_bit(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter where a shard is cut for them; what they find wrong is refused."""
    size = 5 * ROW + 100
    values = torch.randn(size, generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(cores, "PART", 2 * ROW)
    monkeypatch.setattr(cores, "LEAST_SHARED", 0)

    def all_made() -> list[bytes]:
        shards = shard_codec_of(codec, [size])
        gradient, made = from_tensor(values), list[Array]()
        for _ in range(2):
            coded = shards.contribution(0, gradient, keeps_error=True)
            made += [coded, shards.decoded_contribution(0, coded), shards.errors()[0][1]]
        made += shards.coded_sum(0, gradient)
        return [bytes(a.data) for a in made]

    alone = all_made()
    monkeypatch.setattr(cores, "CORES", cores.Cores())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert cores.CORES.num_helpers == 3
    assert all_made() == alone
    shards = shard_codec_of(codec, [size])
    values[-1] = math.nan
    bad = shards.contribution(0, from_tensor(values), keeps_error=True)
    assert not shards.errors()
    with pytest.raises(ProtocolViolation):
        shards.decoded_contribution(0, bad)


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("is_delayed", [False, True])
def test_what_nobody_gets_has_the_numbers_of_what_is_sent(codec: str, is_delayed: bool) -> None:
    """Contribution, sum, step and what coding has lost, with and without others."""
    size = 2 * ROW + 100

    def all_made(*, for_others: bool) -> list[bytes]:
        parameter = ParameterRange("p", 0, (size,), size)
        spec = OptimizerSpec(learning_rate=0.01, rounds=10)
        optimizer = ShardedAdamW([parameter], [size], spec, codec=codec)
        optimizer.create(0)
        shards, parameters, made = optimizer.codec, from_tensor(numbers(9, size)), list[Array]()
        for r in range(3):
            gradient = from_tensor(numbers(r, size))
            sent = shards.contribution(0, gradient, keeps_error=True, for_others=for_others)
            total = optimizer.sum([shards.decoded_contribution(0, sent)])
            coded, decoded = shards.coded_sum(0, total)
            again = shards.decoded_sum(0, coded)
            _, parameters = optimizer.step(
                0, parameters, decoded, 0.1, r, is_delayed, for_others=for_others
            )
            made += [sent, total, coded, decoded, again, parameters, shards.errors()[0][1]]
            made += optimizer.export(0)[1]
        return [bytes(array.data) for array in made]

    assert all_made(for_others=False) == all_made(for_others=True)


def test_codes_that_nobody_gets_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shard_codec_of("int8", [SIZE])
    monkeypatch.setattr("swarmnet.training.codecs.shards.encode_shard", lambda *_: 1 / 0)
    gradient = from_tensor(numbers(1))
    sent = shards.contribution(0, gradient, keeps_error=True, for_others=False)
    total = shards.decoded_contribution(0, sent)
    assert shards.coded_sum(0, total)[1] is total
    assert (sent.dtype, sent.shape) == shards.names.form("int8", SIZE)
    assert sent.num_bytes == row_bytes("int8", SIZE)
    with pytest.raises(ZeroDivisionError):
        sent.data.nbytes  # noqa: B018  it is read


def test_a_gradient_that_is_not_finite_is_found_where_nobody_gets_it() -> None:
    shards = shard_codec_of("int8", [SIZE])
    values = numbers(1)
    values[-1] = math.inf
    bad = shards.contribution(0, from_tensor(values), keeps_error=True, for_others=False)
    assert not shards.errors()
    with pytest.raises(ProtocolViolation):
        shards.decoded_contribution(0, bad)
