"""Trial passes: how a replica that nobody has seen at work yet gets to count. Pure.

A caller whose microbatch came back asks such a replica of the same stage for the loss of the same
microbatch, by a forward pass alone (`infer`). The answer has to be the loss that it knows. Nothing
of the round waits for it, and nothing of it stays in a gradient, so that one who does not answer,
or answers wrongly, costs nobody more than the pass."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnet.protocol.backoff import next_pause_s
from swarmnet.protocol.moments import Deadline

SAMPLED_ROUNDS = 4
"""Of the newest of which one microbatch each is kept, while there are newcomers: as far as one may
be behind."""
MOST_OPEN = 2
"""Trial passes of one caller at a time: what all the replicas on trial may cost it."""
LOSS_PART = 0.02
"""By what part of a loss, and by how many nats a token, other kernels, another precision and coded
activations change it, with room; steps of a replica's own, between two exchanges, too."""


def agrees(loss_sum: float, num_tokens: int, known_sum: float, known_tokens: int) -> bool:
    """Whether a loss is that which is known: sums in nats over so many tokens."""
    if num_tokens != known_tokens or not math.isfinite(loss_sum):
        return False
    return abs(loss_sum - known_sum) <= LOSS_PART * max(abs(known_sum), float(known_tokens))


@dataclass
class Trials:
    """Those of one caller."""

    _open: set[str] = field(default_factory=set)
    _pauses: dict[str, float] = field(default_factory=dict)
    """Of peers that failed, seconds."""
    _next: dict[str, Deadline] = field(default_factory=dict)
    _refusals: dict[str, int] = field(default_factory=dict)
    """How often each has said that it cannot be tried now."""

    def choose(self, on_trial: Sequence[str], now: float, rng: random.Random) -> str | None:
        """Whom to try next, of the peers on trial; None for nobody now. Who has put it off seldom
        comes before who does so always."""
        if len(self._open) >= MOST_OPEN:
            return None
        due = [p for p in on_trial if p not in self._open and self._is_due(p, now)]
        least = min(map(self._in_vain, due), default=None)
        due = [p for p in due if self._in_vain(p) == least]
        return rng.choice(due) if due else None

    def begin(self, peer_id: str, on_trial: Sequence[str]) -> None:
        """A pass to a peer goes out. What is known of others than these is forgotten."""
        self._open.add(peer_id)
        for gone in self._pauses.keys() - set(on_trial):
            del self._pauses[gone], self._next[gone]
        for gone in self._refusals.keys() - set(on_trial):
            del self._refusals[gone]

    def end(self, peer_id: str) -> None:
        """It has ended, whatever came of it."""
        self._open.discard(peer_id)

    def refused(self, peer_id: str) -> None:
        """It cannot be tried now, as it says; the next microbatch may find it ready."""
        self._refusals[peer_id] = self._refusals.get(peer_id, 0) + 1

    def failed(self, peer_id: str, now: float) -> None:
        """No answer came, or a wrong one: it is tried again after a while, which grows."""
        self._pauses[peer_id] = pause_s = next_pause_s(self._pauses.get(peer_id))
        self._next[peer_id] = Deadline.after(now, pause_s)

    def _in_vain(self, peer_id: str) -> tuple[float, int]:
        return self._pauses.get(peer_id, 0.0), self._refusals.get(peer_id, 0)

    def _is_due(self, peer_id: str, now: float) -> bool:
        return peer_id not in self._next or self._next[peer_id].is_over(now)
