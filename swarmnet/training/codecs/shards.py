"""Shards of gradients, sums and results, as an update sends them.

A shard is coded in rows of `ROW` numbers and a shorter last one, so that what is between the steps
of a codec stays in a processor's cache; it has as many bytes as one long row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.errors import ProtocolViolation
from swarmnet.ports import CodingErrors
from swarmnet.protocol.codecs import (
    CHUNK,
    NONE,
    UpdateCodec,
    coded_form,
    error_decay,
    update_codec,
)
from swarmnet.training.arrays import (
    TORCH_DTYPES,
    check_finite,
    check_shape,
    from_tensor,
    is_finite,
)
from swarmnet.training.codecs.registry import codec_of
from swarmnet.training.cores import over
from swarmnet.training.late_arrays import Late, array_of, numbers_of, tensor_on
from swarmnet.training.late_arrays import sent as sent_to_others
from swarmnet.training.memory.device_copies import DeviceCopies
from swarmnet.wire import Array

ROW = CHUNK
"""A multiple of all that share a scale."""


class TorchShardCodec:
    """Implements `ports.ShardCodec` for one replica's stage.

    The error of contributions is held in bfloat16, 2 bytes a parameter: what that rounds away is
    at most 2^-8 of what coding has lost. It is for the next contribution in the same codec. So what
    `topk` has left out of many changes does not come back at once with a short one.
    """

    def __init__(
        self,
        names: UpdateCodec,
        shard_sizes: Sequence[int],
        copies: DeviceCopies | None = None,
    ) -> None:
        """`copies`: to the device on which all is coded, where that is not the host."""
        self.names = names
        self._copies = copies
        self._sizes = tuple(shard_sizes)
        self._errors: dict[int, tuple[str, Tensor]] = {}
        """By shard: what was lost of the last contribution, and in which codec."""

    # ---- contributions ----------------------------------------------------------------------

    def contribution(
        self,
        shard_index: int,
        gradient: Array,
        *,
        keeps_error: bool,
        is_short: bool = False,
        for_others: bool = True,
    ) -> Array:
        name = self.names.of_contribution(is_short=is_short)
        if name == NONE:
            return gradient
        if keeps_error and not for_others and self.names.is_repeatable:
            late = self._rounded(name, shard_index, gradient)
            if late is not None:
                return late
        known, values = self._errors.get(shard_index), numbers_of(gradient, self._copies)
        before = known[1] if known is not None and known[0] == name else None
        decay, size = error_decay(name), values.numel()
        coded = empty_codes(name, values)
        lost = torch.empty_like(values, dtype=torch.bfloat16) if keeps_error else None
        are_finite = list[bool]()

        def work(part: slice) -> None:
            here, out = values[part], coded[coded_part(name, part, size)]
            if before is not None:
                here = torch.add(here, before[part], alpha=decay)
            if lost is None:
                out.copy_(_encoded(name, here))
                return
            codes, sent = round_trip(name, here)
            out.copy_(codes)
            gap = torch.sub(here, sent, out=sent)
            are_finite.append(is_finite(gap))
            lost[part].copy_(gap)

        over(values, work)
        # A bad gradient never counts, and would spoil all that come after it.
        if lost is not None and all(are_finite):
            self._errors[shard_index] = name, lost
        return sent_to_others(coded, self._copies)

    def _rounded(self, name: str, shard_index: int, gradient: Array) -> Late | None:
        """A contribution whose codes nobody may ask for. None where it is of no use."""
        known, values = self._errors.get(shard_index), numbers_of(gradient, self._copies)
        before = known[1] if known is not None and known[0] == name else None
        sent, lost = torch.empty_like(values), torch.empty_like(values, dtype=torch.bfloat16)

        def work(part: slice) -> None:
            here, out = values[part], sent[part]
            if before is not None:
                here = torch.add(here, before[part])
            out.copy_(rounded(name, here, is_checked=True))
            lost[part].copy_(torch.sub(here, out))

        try:
            over(values, work)
        except ProtocolViolation:
            return None
        self._errors[shard_index] = name, lost
        return self._late(name, sent)

    def _late(self, name: str, numbers: Tensor) -> Late:
        """What a repeatable codec has made, and its codes when they are wanted."""
        form, copies = coded_form(name, (numbers.numel(),), 0), self._copies

        def codes() -> Tensor:
            coded = encode_shard(name, numbers)
            return coded if copies is None else copies.to_host(coded).wait()

        return Late(*form, numbers, name, codes)

    def _decoded_late(self, coded: Late) -> Array:
        return array_of(coded.numbers, self._copies, coded.codec)

    def forget_error(self, shard_index: int) -> None:
        self._errors.pop(shard_index, None)

    def errors(self) -> CodingErrors:
        return {j: (name, from_tensor(lost)) for j, (name, lost) in self._errors.items()}

    def load_errors(self, errors: CodingErrors) -> None:
        known = {self.names.of_contribution(is_short=is_short) for is_short in (True, False)}
        loaded: dict[int, tuple[str, Tensor]] = {}
        for j, (name, lost) in errors.items():
            if name not in known or not 0 <= j < len(self._sizes):
                raise ProtocolViolation(f"what {name} has lost of shard {j}, in a run without that")
            check_shape(f"what was lost of shard {j}", lost, "bfloat16", (self._sizes[j],))
            values = tensor_on(lost, self._copies)
            check_finite(f"what was lost of shard {j}", values)
            loaded[j] = name, values
        self._errors = loaded

    def decoded_contribution(self, shard_index: int, coded: Array) -> Array:
        if isinstance(coded, Late) and coded.codec:
            return self._decoded_late(coded)
        size, short = self._sizes[shard_index], self.names.of_contribution(is_short=True)
        is_short = (coded.dtype, coded.shape) == self.names.form(short, size)
        name = short if is_short else self.names.contributions
        return self._read("a contribution", name, shard_index, coded)

    # ---- sums -------------------------------------------------------------------------------

    def coded_sum(self, shard_index: int, total: Array) -> tuple[Array, Array]:
        if self.names.sums == NONE:
            return total, total
        if isinstance(total, Late) and total.codec == self.names.sums:  # of one contribution
            return self._late(total.codec, total.numbers), total
        name, values = self.names.sums, numbers_of(total, self._copies)
        size = values.numel()
        coded, decoded = empty_codes(name, values), torch.empty_like(values)

        def work(part: slice) -> None:
            # Checked like what comes from others: a step is made by all owners or by none.
            codes, back = round_trip(name, values[part], is_checked=True)
            coded[coded_part(name, part, size)].copy_(codes)
            decoded[part].copy_(back)

        over(values, work)
        return sent_to_others(coded, self._copies), array_of(decoded, self._copies)

    def decoded_sum(self, shard_index: int, coded: Array) -> Array:
        if isinstance(coded, Late) and coded.codec:
            return self._decoded_late(coded)
        return self._read("a sum", self.names.sums, shard_index, coded)

    # ---- results ----------------------------------------------------------------------------

    def applied(self, shard_index: int, present: Array, result: Array) -> Array:
        if result.dtype == "float32":
            return result
        plain = self.names.of_result(is_plain=True)
        is_plain = (result.dtype, result.shape) == self.names.form(plain, self._sizes[shard_index])
        name = plain if is_plain else self.names.results
        change = self._read("a result", name, shard_index, result)
        now, change_of = numbers_of(present, self._copies), numbers_of(change, self._copies)
        return array_of(now + change_of, self._copies)

    def _read(self, what: str, name: str, shard_index: int, coded: Array) -> Array:
        size = self._sizes[shard_index]
        check_shape(f"{what} to shard {shard_index}", coded, *self.names.form(name, size))
        if name == NONE:
            return coded
        return array_of(decode_shard(name, tensor_on(coded, self._copies), size), self._copies)


def shard_codec_of(
    name: str, shard_sizes: Sequence[int], copies: DeviceCopies | None = None
) -> TorchShardCodec:
    """By `[sync] codec`. Raises `KeyError` for an unknown name."""
    return TorchShardCodec(update_codec(name), shard_sizes, copies)


def empty_codes(name: str, values: Tensor) -> Tensor:
    """Memory for the codes of a flat vector, on its device."""
    dtype, shape = coded_form(name, (values.numel(),), 0)
    return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=values.device)


def coded_part(name: str, part: slice, num_values: int) -> slice:
    """Where the codes of a part of a shard of so many numbers lie; it begins with a row, and ends
    with one or with the shard."""
    (size,) = coded_form(name, (ROW,), 0)[1]
    assert part.start % ROW == 0
    if part.stop < num_values:
        return slice(part.start // ROW * size, part.stop // ROW * size)
    return slice(part.start // ROW * size, coded_form(name, (num_values,), 0)[1][0])


def encode_shard(name: str, values: Tensor) -> Tensor:
    """fp32 [n] as a coded flat vector of `row_bytes(name, n)` bytes."""
    size = values.numel()
    coded = empty_codes(name, values)

    def work(part: slice) -> None:
        coded[coded_part(name, part, size)].copy_(_encoded(name, values[part]))

    over(values, work)
    return coded


def decode_shard(name: str, coded: Tensor, num_values: int) -> Tensor:
    """The reverse, checked. Raises `ProtocolViolation`: not what this codec makes of finite
    numbers."""
    values = torch.empty(num_values, device=coded.device)

    def work(part: slice) -> None:
        codes = coded[coded_part(name, part, num_values)]
        values[part].copy_(_decoded(name, codes, part.stop - part.start))

    over(values, work)
    return values


# ---- parts of a shard, by one thread ------------------------------------------------------------


def _encoded(name: str, values: Tensor) -> Tensor:
    codec = codec_of(name)
    return _joined([codec.encode(rows) for rows in _rows(values, values.numel(), ROW)])


def round_trip(name: str, values: Tensor, *, is_checked: bool = False) -> tuple[Tensor, Tensor]:
    """fp32 [n] coded, and what everyone makes of it, fp32 [n]. Raises as `decode_shard` where it
    `is_checked`."""
    codec, parts = codec_of(name), list[tuple[Tensor, Tensor]]()
    for rows in _rows(values, values.numel(), ROW):
        parts.append(codec.round_trip(rows))
        if is_checked:
            codec.check("a coded shard", parts[-1][0], rows.shape[1])
    return _joined([coded for coded, _ in parts]), _joined([decoded for _, decoded in parts])


def rounded(name: str, values: Tensor, *, is_checked: bool = False) -> Tensor:
    """The second of `round_trip`. Raises as `decode_shard` where it `is_checked`."""
    codec, what = codec_of(name), "a coded shard" if is_checked else None
    return _joined([codec.rounded(rows, what) for rows in _rows(values, values.numel(), ROW)])


def _decoded(name: str, coded: Tensor, num_values: int) -> Tensor:
    """Checked, as `decode_shard`."""
    codec = codec_of(name)
    (size,) = coded_form(name, (ROW,), 0)[1]
    parts, left = [], num_values
    for rows in _rows(coded, num_values, size):
        n = min(left, ROW)
        parts.append(codec.read("a coded shard", rows, n))
        left -= n * rows.shape[0]
    return _joined(parts)


def _rows(flat: Tensor, num_values: int, size: int) -> list[Tensor]:
    """A shard of so many numbers in rows of `size` elements, and the last, shorter one."""
    end = num_values // ROW * size
    if not end:
        return [flat.unsqueeze(0)]
    if num_values % ROW == 0:
        return [flat.view(-1, size)]
    return [flat[:end].view(-1, size), flat[end:].unsqueeze(0)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0].view(-1) if len(parts) == 1 else torch.cat([p.view(-1) for p in parts])
