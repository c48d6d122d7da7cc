"""fp16: dynamic scaling of the gradient inside one stage (Micikevicius et al., 2018), and refusals
of what it cannot hold.

fp16 ends at 65,504 above and at 6e-8 below, so a backward pass in it needs its gradient moved into
that window. Here the window is one stage's own affair: a gradient arrives in fp32, is multiplied by
a power of two, goes through this stage, and what comes out is divided by the same number in
fp32, which is exact. What travels never is scaled, so replicas need not agree on a scale, and an
overflow is mended where it happened.

The scale of a pass depends on what arrives: the largest number is moved to `target`, which falls
when a pass overflowed and rises when many did not.
"""

from __future__ import annotations

import logging
import math

from swarmnet.errors import RemoteError
from swarmnet.plurals import counted

log = logging.getLogger("swarmnet.training")

START_TARGET = 2.0**10
MAX_TARGET = 2.0**15
MIN_TARGET = 2.0**-14
"""Below it there is no scale: the gradient inside the stage spans more than fp16 can."""
FALL = 0.25
GROW = 2.0
GROW_AFTER = 500
"""Passes without an overflow."""


class LossScale:
    """The scale of a stage's coming passes. Deterministic: ranks that make the same calls have the
    same one."""

    def __init__(self) -> None:
        self.target = START_TARGET
        self.num_overflows = 0
        self._num_good = 0

    def scale(self, largest: float) -> float:
        """A power of two, for a gradient whose largest number is `largest`."""
        return 2.0 ** math.floor(math.log2(self.target / (largest or 1.0)))

    def worked(self) -> None:
        """A pass without an overflow."""
        self._num_good += 1
        if self._num_good >= GROW_AFTER:
            self._num_good = 0
            self.target = min(self.target * GROW, MAX_TARGET)

    def overflowed(self) -> bool:
        """A pass has overflowed; whether a smaller scale is worth another try. Where not, the
        coming passes begin anew."""
        self.num_overflows += 1
        self._num_good = 0
        self.target *= FALL
        if self.target >= MIN_TARGET:
            return True
        self.target = START_TARGET
        return False


class Fp16Refusals:
    """Microbatches that a stage refuses because fp16 cannot hold their values."""

    def __init__(self, stage_index: int) -> None:
        self._stage_index = stage_index
        self.num_refused = 0

    def refuse(self, what: str) -> RemoteError:
        """Counts a refusal. Returns the error for the caller; the person at this machine reads it
        in the log, less often the more there are."""
        text = (
            f"{what} stage {self._stage_index} does not fit into fp16; "
            "--precision bf16 or fp32 holds it"
        )
        self.num_refused += 1
        if self.num_refused.bit_count() == 1:
            refused = counted(self.num_refused, "microbatch")
            log.warning("%s (%s so far went elsewhere)", text, refused)
        return RemoteError(text)
