"""What follows from a spec alone, by the words of `docs/protocol.md`: layers, stages, parameters in
their order, shards, first weights, and AdamW's step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np

f32 = np.float32
Spec = dict[str, Any]
"""The plain values of a canonical spec."""


@dataclass(frozen=True)
class Parameter:
    """Where one lies in the vector of its stage."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


def llama_layers(model: Spec) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of the parameters of each layer."""
    width, inner, vocabulary = (
        model[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    narrow = width // model["num_attention_heads"] * model["num_key_value_heads"]
    decoder = [
        ("self_attn.q_proj", (width, width)),
        ("self_attn.k_proj", (narrow, width)),
        ("self_attn.v_proj", (narrow, width)),
        ("self_attn.o_proj", (width, width)),
        ("mlp.gate_proj", (inner, width)),
        ("mlp.up_proj", (inner, width)),
        ("mlp.down_proj", (width, inner)),
        ("input_layernorm", (width,)),
        ("post_attention_layernorm", (width,)),
    ]
    return [
        [("model.embed_tokens.weight", (vocabulary, width))],
        *(
            [(f"model.layers.{i}.{name}.weight", shape) for name, shape in decoder]
            for i in range(model["num_hidden_layers"])
        ),
        [("model.norm.weight", (width,))],
        [("lm_head.weight", (vocabulary, width))],
    ]


def parameters(spec: Spec, stage: int) -> list[Parameter]:
    """Of a stage, in the order of its vector."""
    layers = llama_layers(spec["model"])
    ends = list(accumulate(spec["pipeline"]["layers"]))
    assert ends[-1] == len(layers)
    found: list[Parameter] = []
    for layer in layers[ends[stage] - spec["pipeline"]["layers"][stage] : ends[stage]]:
        for name, shape in layer:
            found.append(Parameter(name, shape, found[-1].stop if found else 0))
    return found


def shard_sizes(spec: Spec, stage: int) -> list[int]:
    size, total = spec["sync"]["shard_parameters"], parameters(spec, stage)[-1].stop
    return [min(size, total - start) for start in range(0, total, size)]


# ---- first weights --------------------------------------------------------------------------


def first_weights(spec: Spec, stage: int) -> np.ndarray:
    """Of a run that begins from no weights; up to the last bits."""
    deviation = spec["model"].get("initializer_range", 0.02)
    parts = [
        _normal(_seed_of(spec.get("seed", 0), p.name), p.size, deviation)
        if len(p.shape) > 1
        else np.ones(p.size, f32)
        for p in parameters(spec, stage)
    ]
    return np.concatenate(parts)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(blake2b(f"{seed}|{name}".encode(), digest_size=8).digest(), "big") >> 1


def _normal(seed: int, size: int, deviation: float) -> np.ndarray:
    generator = _mersenne_twister(seed)

    def uniform(n: int) -> np.ndarray:
        return (generator.random_raw(n) % (1 << 24) / (1 << 24)).astype(f32)

    def normal(u: np.ndarray) -> np.ndarray:
        radius = np.sqrt(f32(-2) * np.log(f32(1) - u[:, :8]))
        angle = f32(2 * math.pi) * u[:, 8:]
        return np.hstack((radius * np.cos(angle), radius * np.sin(angle))) * f32(deviation)

    values = uniform(size)
    whole = size // 16 * 16
    values[:whole] = normal(values[:whole].reshape(-1, 16)).ravel()
    if whole < size:
        values[-16:] = normal(uniform(16).reshape(1, 16))
    return values


def _mersenne_twister(seed: int) -> np.random.MT19937:
    """MT19937 with the seeding of Matsumoto and Nishimura's `init_genrand`."""
    key = [seed % (1 << 32)]
    for i in range(1, 624):
        key.append((1812433253 * (key[-1] ^ key[-1] >> 30) + i) % (1 << 32))
    generator = np.random.MT19937()
    state: Any = generator.state
    state["state"] = {"key": np.array(key, np.uint32), "pos": 624}
    generator.state = state
    return generator


# ---- a forward pass -------------------------------------------------------------------------

IGNORED = -100


@dataclass(frozen=True)
class Passed:
    """Of a batch: sums over its tokens."""

    loss_sum: float
    num_tokens: int
    head_gradient: np.ndarray
    """Of `lm_head.weight`."""


def passed(
    spec: Spec, weights: Mapping[str, np.ndarray], inputs: np.ndarray, targets: np.ndarray
) -> Passed:
    """A Llama, in fp64: B samples of S tokens, width D, heads of E numbers."""
    about = spec["model"]
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    heads, kv_heads = about["num_attention_heads"], about["num_key_value_heads"]
    length = inputs.shape[1]
    size = about["hidden_size"] // heads
    frequencies = about.get("rope_theta", 10000.0) ** -(np.arange(0, size, 2) / size)
    angles = np.outer(np.arange(length), frequencies)
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
    sees = np.tril(np.ones((length, length), bool))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = np.square(x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + about.get("rms_norm_eps", 1e-5)) * w[f"{name}.weight"]

    def turned(x: np.ndarray) -> np.ndarray:
        half = np.concatenate((-x[..., size // 2 :], x[..., : size // 2]), axis=-1)
        return x * cos + half * sin

    x = w["model.embed_tokens.weight"][inputs]
    for i in range(about["num_hidden_layers"]):
        name = f"model.layers.{i}"
        y = norm(x, f"{name}.input_layernorm")
        q, k, v = (
            (y @ w[f"{name}.self_attn.{part}_proj.weight"].T).reshape(*y.shape[:2], -1, size)
            for part in "qkv"
        )
        k, v = (np.repeat(part, heads // kv_heads, axis=2) for part in (turned(k), v))
        scores = np.einsum("bshe,bthe->bhst", turned(q), k) / math.sqrt(size)
        scores = np.exp(np.where(sees, scores, -np.inf))
        mixed = np.einsum("bhst,bthe->bshe", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(x.shape) @ w[f"{name}.self_attn.o_proj.weight"].T
        y = norm(x, f"{name}.post_attention_layernorm")
        gate = y @ w[f"{name}.mlp.gate_proj.weight"].T
        up = y @ w[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.mlp.down_proj.weight"].T
    x = norm(x, "model.norm")
    learned = targets != IGNORED
    logits, wanted = (x @ w["lm_head.weight"].T)[learned], targets[learned]
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    odds /= odds.sum(-1, keepdims=True)
    places = np.arange(len(wanted))
    loss_sum = float(-np.log(odds[places, wanted]).sum())
    odds[places, wanted] -= 1
    return Passed(loss_sum, len(wanted), odds.T @ x[learned])


# ---- AdamW ----------------------------------------------------------------------------------


def learning_rate(optimizer: Spec, r: int) -> float:
    """Of the step that ends round r."""
    highest, warmup = optimizer["learning_rate"], optimizer.get("warmup_rounds", 0)
    if r < warmup:
        return float(highest * (r + 1) / warmup)
    low = optimizer.get("min_learning_rate_ratio", 0.1)
    match optimizer.get("schedule", "cosine"):
        case "constant":
            return float(highest)
        case "wsd":
            decay = optimizer["decay_rounds"]
            done = max(r + 1 - (optimizer["rounds"] - decay), 0)
            return float(highest * (low + (1 - low) * (1 - math.sqrt(min(done / decay, 1.0)))))
        case _:
            progress = min((r - warmup) / max(optimizer["rounds"] - 1 - warmup, 1), 1.0)
            return float(highest * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))))


def decayed(spec: Spec, stage: int) -> np.ndarray:
    """Which elements of a stage's vector weight decay is for."""
    return np.concatenate([np.full(p.size, len(p.shape) > 1) for p in parameters(spec, stage)])


def _fma(a: f32, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c, rounded once but for rare doubles."""
    return (np.float64(a) * b.astype(np.float64) + c).astype(f32)


@dataclass
class State:
    """AdamW's, of a shard."""

    mean: np.ndarray
    square: np.ndarray
    steps: int


def step(
    optimizer: Spec,
    r: int,
    before: np.ndarray,
    state: State,
    gradient: np.ndarray,
    has_decay: np.ndarray,
) -> tuple[np.ndarray, State]:
    """The step that ends round r. `gradient`: the sum times the scale, fp32."""
    rate = learning_rate(optimizer, r)
    beta1, beta2 = optimizer.get("beta1", 0.9), optimizer.get("beta2", 0.95)
    steps = state.steps + 1
    decay = f32(1 - rate * optimizer.get("weight_decay", 0.1))
    shrunk = np.where(has_decay, before * decay, before)
    weight = f32(1 - beta1)
    apart = gradient - state.mean
    if weight < 0.5:
        mean = _fma(weight, apart, state.mean)
    else:
        mean = _fma(weight - f32(1), apart, gradient)
    scaled = f32(1 - beta2) * gradient
    square = (scaled.astype(np.float64) * gradient + f32(beta2) * state.square).astype(f32)
    return applied(optimizer, rate, shrunk, State(mean, square, steps)), State(mean, square, steps)


def applied(optimizer: Spec, rate: float, shrunk: np.ndarray, after: State) -> np.ndarray:
    """The parameters after a step that has made these moments."""
    beta1, beta2 = optimizer.get("beta1", 0.9), optimizer.get("beta2", 0.95)
    bias = 1 - beta1**after.steps
    root = f32(math.sqrt(1 - beta2**after.steps))
    divisor = np.sqrt(after.square) / root + f32(optimizer.get("eps", 1e-8))
    return shrunk + f32(-(rate / bias)) * after.mean / divisor
