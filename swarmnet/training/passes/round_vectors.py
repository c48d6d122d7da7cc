"""The flat vectors of the rounds that a stage works on, and how one round follows another.

Parameters of the coming round are put aside until `finish_round`. In mode "zero" they wait in the
memory of their shard's gradient, which nobody needs once they are there: a replica never holds more
than two vectors. Where a round is opened ahead there is a second pair of vectors; it is kept for
the next time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import xxhash
from torch import Tensor

import swarmnet.training.accelerators as accelerators
from swarmnet.errors import ProtocolViolation
from swarmnet.training.arrays import check_finite, check_shape
from swarmnet.training.cores import over
from swarmnet.training.late_arrays import array_of, numbers_of
from swarmnet.training.memory.device_copies import DeviceCopies
from swarmnet.training.memory.vectors import Vectors
from swarmnet.wire import Array

SPARE_FACTOR = 1.5
"""Free device memory that a second pair of vectors needs, as a multiple of the pair's size."""


class Computes(Protocol):
    """What computes with the vectors of a stage."""

    shown: Vectors
    """Those that it computes with, and adds gradients to."""
    overlaps_rounds: bool
    """It can compute with two pairs of vectors in turn."""
    device: torch.device
    """On which it computes."""
    dtype: torch.dtype
    """Of what it computes with."""
    update_copies: DeviceCopies | None
    """To the device where the vectors lie there; None where they lie on the host."""

    def show(self, vectors: Vectors) -> None:
        """Lets it compute with other vectors and add gradients to them."""

    def refresh_copies(self) -> None:
        """The parameters have changed: brings them into copies that it has of them."""


class RoundVectors:
    """The vectors of the present round, and of the round that is open ahead, if there is one.

    `use` and `showing` are for the device thread, and so is `finish_round` where no round
    is open ahead. All else may be called beside them, by one thread at a time: what a pass looks
    at is the one vector that was shown to it, and that stays as it is.
    """

    def __init__(self, computes: Computes, *, reuses_gradient: bool) -> None:
        """`reuses_gradient`: the coming parameters of a shard may overwrite its gradient. Not
        allowed where microbatches add to the gradient while an exchange goes on."""
        self.present = computes.shown
        self._computes = computes
        self.shard_sizes = tuple(shard.numel() for shard in self.present.parameter_shards)
        self._reuses_gradient = reuses_gradient
        self._may_swap = reuses_gradient and computes.overlaps_rounds
        self._swapped: Vectors | None = None
        """The memory of `present` with parameters and gradients exchanged."""
        self._spare: Vectors | None = None
        self._ahead: tuple[int, Vectors] | None = None
        self._put_aside: dict[int, Tensor] = {}
        self._has_room = True
        """For a second pair of vectors, as far as is known."""
        self.make_whole: Callable[[], None] = lambda: None
        """Called before the present gradient is read: where other ranks have parts of it, or passes
        have left some."""
        self.give_up_rest: Callable[[], None] = lambda: None
        """Called before the present gradient is overwritten: passes may have left parts of it,
        which nobody reads any more."""

    @property
    def round_ahead(self) -> int | None:
        """The round that is open ahead."""
        return None if self._ahead is None else self._ahead[0]

    def use(self, round_index: int) -> None:
        """Lets the layers compute with the parameters of a round and add to its gradient."""
        self._computes.show(self._of(round_index))

    @contextlib.contextmanager
    def showing(self, round_index: int | None = None) -> Iterator[None]:
        """In this context the layers compute with the parameters of the round that is open ahead
        where it is `round_index`, else of the present one, whichever that is; and these stay as
        they are though the round may end."""
        while True:
            shown = self._of(round_index)
            with shown.reading:
                if shown is self._of(round_index):
                    self._computes.show(shown)
                    yield
                    return

    def _of(self, round_index: int | None) -> Vectors:
        ahead = self._ahead  # another thread may promote it meanwhile
        return ahead[1] if ahead is not None and round_index == ahead[0] else self.present

    # ---- shards -----------------------------------------------------------------------------

    def gradient_shard(self, shard_index: int) -> Tensor:
        """A view of the present gradient, fp32, shape (elements of the shard,)."""
        self.make_whole()
        self.present.collect()
        return self.present.gradient_shards[shard_index]

    def copy_gradient(self, shard_index: int) -> Tensor:
        """The same, in memory that stays as it is until the next `open_ahead`."""
        gradient = self.gradient_shard(shard_index)
        # Where another round is open ahead, this vector stays as it is until the next one is.
        return gradient if self._ahead is not None else gradient.clone()

    def put_aside(self, shard_index: int, values: Array) -> None:
        """Takes a shard of the coming round's parameters.

        Raises:
            ProtocolViolation: unknown shard, wrong dtype or length, or a value is not finite. Of
                the last, nothing of the shard is put aside any more.
        """
        if not 0 <= shard_index < len(self.shard_sizes):
            raise ProtocolViolation(f"this stage has no shard {str(shard_index)[:32]}")
        assert self._ahead is None, "those of the round ahead are known"
        check_shape("parameters", values, "float32", (self.shard_sizes[shard_index],))
        tensor = numbers_of(values, self._computes.update_copies)
        self._put_aside.pop(shard_index, None)  # where it lies is about to be written to
        if self._reuses_gradient:
            self.give_up_rest()
            tensor = _checked(tensor, self.present.gradient_shards[shard_index])
        elif self._spare is not None:
            with self._spare.reading:
                tensor = _checked(tensor, self._spare.parameter_shards[shard_index])
        else:
            tensor = _checked(tensor)
        self._put_aside[shard_index] = tensor

    def coming_shard(self, shard_index: int) -> Tensor | None:
        """A view of a shard of the coming round's parameters; None where they are not known."""
        ahead, coming = self._ahead, self._put_aside.get(shard_index)
        return coming if ahead is None else ahead[1].parameter_shards[shard_index]

    def digest(self, shard_index: int) -> bytes:
        """XXH3-64 of a present shard's bytes, fp32 and little endian."""
        return digest_of(self.present.parameter_shards[shard_index], self._computes.update_copies)

    def coming_digest(self, shard_index: int) -> bytes:
        """The same of a coming one; empty where it is not known."""
        coming = self.coming_shard(shard_index)
        return b"" if coming is None else digest_of(coming, self._computes.update_copies)

    # ---- rounds -----------------------------------------------------------------------------

    def finish_round(self) -> None:
        """Makes the coming parameters the present ones, with an empty gradient. Where a round is
        open ahead, its parameters and its gradient become the present ones; the device may work on
        that round meanwhile."""
        if self._ahead is not None:
            self._promote()
            return
        self.give_up_rest()
        put_aside, self._put_aside = self._put_aside, {}
        with torch.no_grad():
            if self._may_swap and len(put_aside) == len(self.shard_sizes):
                coming = self._swapped or self.present.swapped()
                self.present, self._swapped = coming, self.present
            else:
                for shard_index, values in put_aside.items():
                    self.present.parameter_shards[shard_index].copy_(values)
            self._computes.show(self.present)
            self.present.clear_gradient()
            self._computes.refresh_copies()

    @property
    def can_open_ahead(self) -> bool:
        """Whether there is memory for a second pair of vectors: always, but on a GPU with little
        memory left, and where there was none."""
        if not (self._computes.overlaps_rounds and self._has_room):
            return False
        device = self._computes.device
        free = None if self._spare is not None else accelerators.free_bytes(device)
        if free is None:
            return True
        element = 4 + torch.finfo(self._computes.dtype).bits // 8
        return free > SPARE_FACTOR * element * self.present.parameters.numel()

    def open_ahead(self, round_index: int) -> None:
        """Makes the parameters that were put aside those of `round_index`, beside the present
        round. Shards that were not put aside stay as they are. Raises `MemoryError`."""
        try:
            coming = self._spare or self.present.another()
        except (MemoryError, RuntimeError) as e:  # torch's word for it
            self._has_room = False
            raise MemoryError(str(e)) from None
        self._spare = None
        with torch.no_grad(), coming.reading:
            for j, shard in enumerate(coming.parameter_shards):
                values = self._put_aside.get(j, self.present.parameter_shards[j])
                if values.data_ptr() != shard.data_ptr():
                    shard.copy_(values)
                if j in self._put_aside:
                    self._put_aside[j] = shard  # where they lay may be needed no more
            coming.clear_gradient()
            coming.refresh_copies()
        self._ahead = (round_index, coming)

    def drop_ahead(self) -> None:
        """Drops the gradient of the round that is open ahead. Its parameters are those that were
        put aside, and still are."""
        if self._ahead is not None:
            _, self._spare = self._ahead
            self._ahead = None

    def _promote(self) -> None:
        """Makes the round that was open ahead the present one."""
        assert self._ahead is not None
        _, coming = self._ahead
        self._put_aside = {}
        before, self.present, self._swapped = self.present, coming, None
        self._spare = before
        self._ahead = None  # last: `use` finds the round in one of the two


def digest_of(shard: Tensor, copies: DeviceCopies | None) -> bytes:
    """XXH3-64 of an fp32 vector's bytes. `copies`: from the device where it lies there."""
    return xxhash.xxh3_64_digest(array_of(shard, copies).data)


def _checked(values: Tensor, target: Tensor | None = None) -> Tensor:
    """Parameters, copied to `target` where there is one: each part right after it was looked at.
    Raises `ProtocolViolation` where one is not finite; then some are copied."""

    def work(part: slice) -> None:
        check_finite("parameters", values[part])
        if target is not None:
            target[part].copy_(values[part])

    over(values, work)
    return values if target is None else target
