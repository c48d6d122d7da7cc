"""A rate limit for each remote peer: token buckets.

A bucket fills at a steady rate up to its burst. Every call takes from it, and a call that finds it
empty is refused. So a peer that calls at an ordinary pace is not slowed down, and a flood costs its
receiver no more than the counting."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBucket:
    """Allows `burst` at once and `per_s` a second in the long run."""

    per_s: float
    burst: float
    tokens: float
    filled_at: float
    """Seconds, of the caller's clock."""

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Takes `amount` and returns True, if that much is there."""
        elapsed_s = max(0.0, now - self.filled_at)
        self.tokens = min(self.burst, self.tokens + elapsed_s * self.per_s)
        self.filled_at = now
        if self.tokens < amount:
            return False
        self.tokens -= amount
        return True

    def give(self, amount: float = 1.0) -> None:
        """What was taken was not needed."""
        self.tokens = min(self.burst, self.tokens + amount)

    def wait_s(self, now: float, amount: float = 1.0) -> float:
        """Seconds until so much is there, if nothing is taken before."""
        elapsed_s = max(0.0, now - self.filled_at)
        missing = amount - min(self.burst, self.tokens + elapsed_s * self.per_s)
        return max(0.0, missing) / self.per_s


@dataclass(slots=True)
class RateLimiter:
    """One bucket a key. One that has not been used for so long that it is full is dropped, which
    changes nothing; so is, beyond `max_keys`, the one used longest ago.

    Such a key begins again with a full bucket, so `max_keys` should exceed the number of remotes
    that there can be at a time."""

    per_s: float
    burst: float
    max_keys: int = 16_384
    _buckets: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        """Keys of which anything is remembered."""
        return len(self._buckets)

    def allows(self, key: str, now: float, amount: float = 1.0) -> bool:
        """Counts one request of `key`; False where it exceeds the rate."""
        full_s = self.burst / self.per_s
        while self._buckets:
            oldest = next(iter(self._buckets.values()))
            if now - oldest.filled_at < full_s:
                break
            self._buckets.popitem(last=False)
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self.max_keys:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = TokenBucket(self.per_s, self.burst, self.burst, now)
        else:
            self._buckets.move_to_end(key)
        return bucket.take(now, amount)

    def give(self, key: str, amount: float = 1.0) -> None:
        """A request that was counted was no load."""
        if (bucket := self._buckets.get(key)) is not None:
            bucket.give(amount)
