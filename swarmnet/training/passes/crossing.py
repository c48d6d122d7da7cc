"""What crosses a boundary between two stages one way, coded.

Whoever sends gives away codes, and nothing else of its numbers. So all replicas that get a
microbatch, now or after a failure, compute with the same decoded numbers, and so do receipts (which
keep the codes) and retractions. Rounding is to the nearest: no random number is needed for the same
tensor to have the same codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from swarmnet.protocol.codecs import TOKEN_BYTES, coded_form
from swarmnet.training.arrays import check_shape, from_tensor, to_tensor
from swarmnet.training.codecs.fused import fused_codec, is_right_on
from swarmnet.training.codecs.registry import codec_of
from swarmnet.training.memory.device_copies import DeviceCopies, OnHost
from swarmnet.wire import Array


class Crossing:
    """fp32 tensors of one shape a sample, one way."""

    def __init__(
        self,
        codec: str,
        shape: tuple[int, ...],
        num_free: int,
        copies: DeviceCopies,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            codec: its name, of `protocol.codecs`.
            shape: of one sample.
            num_free: dimensions of a batch that are not part of a coded row: samples and, for
                sequences, tokens.
            copies: between the host and the stage's device.
            dtype: of the passes.
        """
        self._codec = codec_of(codec)
        self._shape = shape
        self._num_free = num_free
        self._row_shape = shape[num_free - 1 :]
        self._row_values = math.prod(self._row_shape)
        self.copies = copies
        # Codecs are hashed by identity, which their protocol cannot say.
        codec_key = cast(Any, self._codec)
        self._fused = fused_codec(codec_key, self._row_values, copies.device, dtype)
        self._codes_there = (
            self._fused is None
            and copies.is_apart
            and is_right_on(codec_key, self._row_values, copies.device)
        )
        """On the device, by the codec's own code."""

    def form(self, batch: int) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the array of so many samples."""
        return coded_form(self._codec.name, (batch, *self._shape), self._num_free)

    def check_form(self, what: str, array: Array, batch: int) -> None:
        """Raises `ProtocolViolation` unless dtype and shape are those of so many samples. Cheap."""
        check_shape(what, array, *self.form(batch))

    def send(self, what: str, values: Tensor) -> Callable[[], Array]:
        """A tensor of the device, coded, as an array: what is left to be done for it by the host,
        on any thread. That raises `ProtocolViolation` where a value is not finite; `what` is its
        name in the error's text. A GPU has been told all that it does when this returns."""
        rows = values.detach().reshape(-1, self._row_values)
        shape = coded_form(self._codec.name, tuple(values.shape), self._num_free)[1]
        if self._fused is not None:
            return self._send_fused(what, self.copies.to_host(self._fused.encode(rows)), shape)
        rows = rows.float()
        on_way = self.copies.to_host(self._codec.encode(rows) if self._codes_there else rows)

        def finish() -> Array:
            coded = on_way.wait() if self._codes_there else self._codec.encode(on_way.wait())
            self._codec.check(what, coded, self._row_values)
            return from_tensor(coded.view(shape))

        return finish

    def receive(self, what: str, array: Array, dtype: torch.dtype = torch.float32) -> Tensor:
        """An array whose form was checked, decoded, on the device, rounded to `dtype`. Raises
        `ProtocolViolation` where its values are none of this codec's, or not finite."""
        coded = to_tensor(array)
        free = coded.shape[: self._num_free]
        rows = coded.reshape(math.prod(free), -1)
        if self._fused is not None:
            decoded = self._receive_fused(what, rows, dtype)
        elif self._codes_there:
            self._codec.check(what, rows, self._row_values)
            decoded = self._codec.decode(self.copies.to_device(rows), self._row_values)
        else:
            decoded = self.copies.to_device(self._codec.read(what, rows, self._row_values))
        return decoded.view(*free, *self._row_shape).to(dtype)

    def read(self, what: str, array: Array) -> Tensor:
        """An array whose form was checked, decoded as rows, on the host. Raises as `receive`."""
        coded = to_tensor(array)
        rows = coded.reshape(math.prod(coded.shape[: self._num_free]), -1)
        return self._codec.read(what, rows, self._row_values)

    def _send_fused(self, what: str, on_way: OnHost, shape: tuple[int, ...]) -> Callable[[], Array]:
        fused = self._fused
        assert fused is not None
        return lambda: from_tensor(fused.checked(what, on_way.wait()).view(shape))

    def _receive_fused(self, what: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
        fused = self._fused
        assert fused is not None
        decoded, findings = self.copies.to_device_through(
            rows, lambda coded: fused.decode(coded, dtype)
        )
        fused.check(what, rows, findings)
        return decoded


class WithTokens:
    """A crossing on which the token of each row goes with it, behind its code: rows of bytes, in
    every codec."""

    def __init__(self, plain: Crossing) -> None:
        """`plain`: of the numbers."""
        self._plain = plain

    def form(self, batch: int) -> tuple[str, tuple[int, ...]]:
        """As `Crossing.form`."""
        dtype, (*free, row) = self._plain.form(batch)
        return "uint8", (*free, row * _element_bytes(dtype) + TOKEN_BYTES)

    def check_form(self, what: str, array: Array, batch: int) -> None:
        """As `Crossing.check_form`."""
        check_shape(what, array, *self.form(batch))

    def send(self, what: str, values: Tensor, tokens: Tensor) -> Callable[[], Array]:
        """As `Crossing.send`. `tokens`: of each row, on the device."""
        coding = self._plain.send(what, values)
        on_way = self._plain.copies.to_host(tokens.detach().int())

        def finish() -> Array:
            coded = to_tensor(coding())
            beside = on_way.wait().reshape(*coded.shape[:-1], 1).contiguous()
            whole = torch.cat((coded.view(torch.uint8), beside.view(torch.uint8)), dim=-1)
            return from_tensor(whole)

        return finish

    def receive(self, what: str, array: Array, dtype: torch.dtype = torch.float32) -> Tensor:
        """As `Crossing.receive`."""
        return self._plain.receive(what, self._bare(array), dtype)

    def read(self, what: str, array: Array) -> Tensor:
        """As `Crossing.read`."""
        return self._plain.read(what, self._bare(array))

    def tokens(self, array: Array) -> Array:
        """Those that came with an array whose form was checked, int32. Nobody has looked at their
        values."""
        beside = to_tensor(array)[..., -TOKEN_BYTES:].clone(memory_format=torch.contiguous_format)
        return from_tensor(beside.view(torch.int32).squeeze(-1))

    def _bare(self, array: Array) -> Array:
        """The codes alone."""
        dtype, _ = self._plain.form(1)
        codes = to_tensor(array)[..., :-TOKEN_BYTES].contiguous()
        return from_tensor(codes.view(getattr(torch, dtype)))


def _element_bytes(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
