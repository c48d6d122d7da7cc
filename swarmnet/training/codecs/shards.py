"""Shards of gradients, sums and results, as an update sends them.

A shard is coded in rows of `ROW` numbers and a shorter last one, so that what is between the steps
of a codec stays in a processor's cache; it has as many bytes as one long row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.protocol.codecs import CHUNK, NONE, UpdateCodec, update_codec
from swarmnet.training.arrays import check_shape, from_tensor, is_finite, to_tensor
from swarmnet.training.codecs.registry import codec_of
from swarmnet.wire import Array

ROW = CHUNK
"""A multiple of all that share a scale."""


class TorchShardCodec:
    """Implements `swarm.ports.ShardCodec` for one replica's stage.

    The error of contributions is held in bfloat16, 2 bytes a parameter: what that rounds away is
    2^-9 of what coding has lost.
    """

    def __init__(self, names: UpdateCodec, shard_sizes: Sequence[int]) -> None:
        self.names = names
        self._sizes = tuple(shard_sizes)
        self._errors: dict[int, Tensor] = {}

    # ---- contributions ----------------------------------------------------------------------

    def contribution(
        self, shard_index: int, gradient: Array, *, keeps_error: bool, is_short: bool = False
    ) -> Array:
        name = self.names.of_contribution(is_short=is_short)
        if name == NONE:
            return gradient
        error, values = self._errors.pop(shard_index, None), to_tensor(gradient)
        if error is not None:
            values = values + error
        coded = encode_shard(name, values)
        if keeps_error:
            lost = values - _decoded(name, coded, values.numel())
            if is_finite(lost):  # else one bad gradient would spoil all that come after it
                self._errors[shard_index] = lost.to(torch.bfloat16)
        elif error is not None:
            self._errors[shard_index] = error
        return from_tensor(coded)

    def forget_error(self, shard_index: int) -> None:
        self._errors.pop(shard_index, None)

    def decoded_contribution(self, shard_index: int, coded: Array) -> Array:
        size, short = self._sizes[shard_index], self.names.of_contribution(is_short=True)
        is_short = (coded.dtype, coded.shape) == self.names.form(short, size)
        name = short if is_short else self.names.contributions
        return self._read("a contribution", name, shard_index, coded)

    # ---- sums -------------------------------------------------------------------------------

    def coded_sum(self, shard_index: int, total: Array) -> Array:
        return _coded(self.names.sums, total)

    def decoded_sum(self, shard_index: int, coded: Array) -> Array:
        return self._read("a sum", self.names.sums, shard_index, coded)

    # ---- results ----------------------------------------------------------------------------

    def applied(self, shard_index: int, present: Array, result: Array) -> Array:
        if result.dtype == "float32":
            return result
        change = self._read("a result", self.names.results, shard_index, result)
        return from_tensor(to_tensor(present) + to_tensor(change))

    def _read(self, what: str, name: str, shard_index: int, coded: Array) -> Array:
        size = self._sizes[shard_index]
        check_shape(f"{what} to shard {shard_index}", coded, *self.names.form(name, size))
        if name == NONE:
            return coded
        return from_tensor(decode_shard(name, to_tensor(coded), size))


def shard_codec_of(name: str, shard_sizes: Sequence[int]) -> TorchShardCodec:
    """By `[sync] codec`. Raises `KeyError` for an unknown name."""
    return TorchShardCodec(update_codec(name), shard_sizes)


def coded_result(name: str, present: Tensor, wanted: Tensor) -> tuple[Array, Tensor]:
    """What goes down where the parameters are to be `wanted`, and what everyone makes of it."""
    if name == NONE:
        return from_tensor(wanted), wanted
    coded = encode_shard(name, wanted - present)
    return from_tensor(coded), present + _decoded(name, coded, wanted.numel())


def encode_shard(name: str, values: Tensor) -> Tensor:
    """fp32 [n] as a coded flat vector of `row_bytes(name, n)` bytes."""
    codec = codec_of(name)
    end = values.numel() // ROW * ROW
    rows = values[:end].view(-1, ROW), values[end:].unsqueeze(0)
    return _joined([codec.encode(part).flatten() for part in rows if part.numel()])


def decode_shard(name: str, coded: Tensor, num_values: int) -> Tensor:
    """The reverse, checked. Raises `ProtocolViolation`: not what this codec makes of finite
    numbers."""
    codec = codec_of(name)
    for rows, n in _coded_rows(name, coded, num_values):
        codec.check("a coded shard", rows, n)
    return _decoded(name, coded, num_values)


def _coded(name: str, values: Array) -> Array:
    return values if name == NONE else from_tensor(encode_shard(name, to_tensor(values)))


def _decoded(name: str, coded: Tensor, num_values: int) -> Tensor:
    codec = codec_of(name)
    parts = _coded_rows(name, coded, num_values)
    return _joined([codec.decode(rows, n).flatten() for rows, n in parts])


def _coded_rows(name: str, coded: Tensor, num_values: int) -> list[tuple[Tensor, int]]:
    """Long rows and the last one, with the numbers in a row of each."""
    (size,) = UpdateCodec(name, name, name).form(name, ROW)[1]
    end = num_values // ROW * size
    found = [(coded[:end].view(-1, size), ROW), (coded[end:].unsqueeze(0), num_values % ROW)]
    return [(rows, n) for rows, n in found if rows.numel()]


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
