"""Refusals of what fp16 cannot hold: counted, and told to whoever can change the precision."""

from __future__ import annotations

import logging

from swarmnet.errors import RemoteError

log = logging.getLogger("swarmnet.training")


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
            log.warning("%s (%d microbatches so far went elsewhere)", text, self.num_refused)
        return RemoteError(text)
