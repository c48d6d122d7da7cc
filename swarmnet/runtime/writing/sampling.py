"""Which token comes next: the options of `transformers`' `GenerationConfig`, by their names, with
the same meaning and order (repetition penalty, temperature, top_k, top_p)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnet.errors import ProtocolViolation, UserError
from swarmnet.protocol.generation import MAX_TOKENS
from swarmnet.wire import Array

DEFAULT_NEW_TOKENS = 256
SAMPLES = ("temperature", "top_k", "top_p", "seed")
"""Options of which each means that tokens are drawn, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a text goes on."""

    do_sample: bool = False
    """Draw each token; else the likeliest is taken."""
    temperature: float = 1.0
    top_k: int = 50
    """Of so many likeliest tokens; 0: of all."""
    top_p: float = 1.0
    """Of the likeliest tokens that together are as likely as this."""
    repetition_penalty: float = 1.0
    """Above 1 (Keskar et al., 2019): tokens that are in the text already are less likely."""
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    seed: int | None = None
    """None: another one each time."""

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature <= 100.0:
            raise UserError("temperature: above 0, up to 100")
        if self.top_k < 0:
            raise UserError("top_k: 0 (no limit) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError("top_p: above 0, up to 1")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise UserError("repetition_penalty: above 0; 1 for none")
        if not 0 < self.max_new_tokens <= MAX_TOKENS:
            raise UserError(f"max_new_tokens: 1 to {MAX_TOKENS}")
        if self.seed is not None and self.seed < 0:
            raise UserError("seed: 0 or more")

    def with_options(self, options: Mapping[str, Any]) -> Sampling:
        """With what is not None in `options`. Raises `UserError`."""
        said = {name: value for name, value in options.items() if value is not None}
        if "do_sample" not in said and any(name in said for name in SAMPLES):
            said["do_sample"] = True
        return replace(self, **said)

    def num_logits(self, num_seen: int) -> int:
        """The largest logits that a choice needs; 0 for all. `num_seen`: different tokens of the
        text, which a penalty may throw out of the largest."""
        if self.repetition_penalty < 1.0 or (self.do_sample and not self.top_k):
            return 0
        wanted = self.top_k if self.do_sample else 1
        return wanted + (num_seen if self.repetition_penalty > 1.0 else 0)


def sampling_of(config: Mapping[str, Any]) -> Sampling:
    """What a generation_config.json says, as far as it can be used."""
    kinds = {
        "do_sample": bool,
        "temperature": float,
        "top_k": int,
        "top_p": float,
        "repetition_penalty": float,
    }
    found = Sampling()
    for name, kind in kinds.items():
        value = config.get(name)
        if isinstance(value, (bool, int, float)) and isinstance(value, bool) == (kind is bool):
            try:
                found = replace(found, **{name: kind(value)})
            except (UserError, ValueError, OverflowError):
                continue
    return found


def choose(
    logits: NDArray[np.float32],
    tokens: NDArray[np.int32],
    seen: Collection[int],
    sampling: Sampling,
    rng: np.random.Generator,
) -> int:
    """The next token, of those in `tokens`, shape (k,), with their `logits`. `seen`: those of the
    text."""
    scores = logits.astype(np.float64)
    penalty = sampling.repetition_penalty
    if penalty != 1.0 and seen:
        was_seen = np.isin(tokens, np.fromiter(seen, np.int64, len(seen)))
        punished = np.where(scores < 0, scores * penalty, scores / penalty)
        scores = np.where(was_seen, punished, scores)
    if not sampling.do_sample:
        return int(tokens[np.argmax(scores)])
    scores = scores / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    odds = np.exp(scores[order] - scores[order[0]])
    odds /= odds.sum()
    before = np.cumsum(odds) - odds
    kept = before < sampling.top_p
    kept[0] = True
    odds = np.where(kept, odds, 0.0)
    return int(tokens[order[rng.choice(len(order), p=odds / odds.sum())]])


def read_logits(
    arrays: tuple[Array, ...], vocabulary: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Logits and their tokens, as a last stage gave them. Raises `ProtocolViolation`."""
    if not 1 <= len(arrays) <= 2 or arrays[0].dtype != "float32" or len(arrays[0].shape) != 2:
        raise ProtocolViolation("no logits")
    logits = np.frombuffer(arrays[0].data, np.float32)
    if arrays[0].shape != (1, logits.size) or not logits.size or not np.isfinite(logits).all():
        raise ProtocolViolation("logits of another shape, or not finite")
    if len(arrays) == 1:
        if logits.size != vocabulary:
            raise ProtocolViolation(f"{logits.size} logits of {vocabulary} tokens")
        return logits, np.arange(vocabulary, dtype=np.int32)
    if arrays[1].dtype != "int32" or arrays[1].shape != arrays[0].shape:
        raise ProtocolViolation("logits without their tokens")
    tokens = np.frombuffer(arrays[1].data, np.int32)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ProtocolViolation(f"a token outside [0, {vocabulary})")
    return logits, tokens
