"""What the passes of a microbatch take beside what is kept between them, in bytes: the gradients
on their way through a layer, and whatever else lives for a few operations.

Of a layer that is traced it is found (`pass_trace`); of the built-in Llama it is `llama_peak`,
which says in which operation most lives. D width, I width of the feed-forward layer.

The gradient of a layer's outputs waits at its residual while the feed-forward layer is passed. Most
lives where the product of its two halves is taken apart: what was kept is all there but the
product, and there are the product's gradient and those of both halves: D + 2 I. Before that, the
gradient of the last matrix is made beside the product's: D + I, and the matrix. With experts it is
where what they gave is weighed: the rows and their products, 2 K D for K experts a token, and their
sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet.spec import ModelSpec

FP32_BYTES = 4
OFFLOADED_NORM, OFFLOADED_NORM_LOW = 8, 14
"""Tensors like a layer's output, where a norm's backward pass is made and nothing else is there:
with passes in fp32, and in half of its bytes, where the norm's own are fp32."""


@dataclass(frozen=True, slots=True)
class PassPeak:
    """Of one layer, with the loss where it is the model's last: at most at a time, beside
    parameters, what comes into the layer, what goes out of it, and what autograd keeps of it."""

    inner: int
    """Of a layer that another one of the stage follows. With the gradient that came, until it is
    used up, that of the input, and that of a parameter until it is added."""
    last: int
    """Of a stage's last layer: the caller holds the gradient that came."""
    inner_but_weights: int
    """`inner` without gradients of parameters."""
    last_but_weights: int
    offloaded: int
    """All that there is of the layer, where what autograd keeps is elsewhere and comes for one
    operation."""


@dataclass(frozen=True, slots=True)
class LayerPart:
    """What a stage counts of one layer."""

    kept: int
    """What autograd keeps of it."""
    own: int
    """Of that, its input."""
    inputs: int
    peak: PassPeak


@dataclass(frozen=True, slots=True)
class StagePeaks:
    """The most of all moments of a backward pass, which gives back each layer's graph in turn."""

    passing: int
    """Beside the graph of the whole stage."""
    layer: int
    """Where each layer is computed again: beside the inputs of all layers."""
    streamed: int
    """The same without gradients of parameters."""
    offloaded: int


def stage_peaks(
    layers: Sequence[LayerPart], gradient: int, *, is_last: bool, adds_at_once: bool
) -> StagePeaks:
    """Of layers that follow each other. `gradient`: of their output, which the caller holds during
    the pass; `is_last`: there is none. `adds_at_once`: of a parameter's gradient no more than one
    lies about; else all do, and are counted elsewhere."""
    passing = layer = streamed = offloaded = 0
    graph_behind = inputs_behind = 0
    for i, part in reversed(list(enumerate(layers))):
        peak, is_end = part.peak, i == len(layers) - 1
        held = 0 if is_end or is_last else gradient
        bare = held + (peak.last_but_weights if is_end else peak.inner_but_weights)
        whole = held + (peak.last if is_end else peak.inner) if adds_at_once else bare
        beside = part.kept - part.own - inputs_behind
        passing = max(passing, whole - graph_behind)
        layer = max(layer, beside + whole)
        streamed = max(streamed, beside + bare)
        offloaded = max(offloaded, held + peak.offloaded)
        graph_behind += part.kept
        inputs_behind += part.inputs
    return StagePeaks(passing, layer, streamed, offloaded)


def llama_peak(model: ModelSpec, layer: str, positions: int, element: int) -> PassPeak:
    """Of a layer of the built-in Llama, and numbers of `element` bytes."""
    width, is_low = model.hidden_size, element != FP32_BYTES
    state = element * positions * width
    exact = FP32_BYTES * positions * width
    if layer == "model.embed_tokens":
        table = element * model.vocab_size * (model.subspace or width)
        state = element * positions * (model.subspace or width)
        return PassPeak(state + table, state + table, state, state, state + table)
    if layer == "model.norm":
        peak = 4 * exact
        return PassPeak(peak, peak + state, peak, peak + state, peak + 3 * exact)
    if layer == "lm_head":
        logits = FP32_BYTES * positions * model.vocab_size
        bare = 2 * logits
        matrix = element * width * model.vocab_size
        low = logits // FP32_BYTES * element - logits + state + matrix
        whole = max(bare, low)
        return PassPeak(whole, whole, bare, bare, whole + logits)
    if model.num_experts:
        return _of_experts(model, positions, element)
    inner, matrix = element * positions * model.intermediate_size, element * width
    out = element * positions * (model.subspace or width)
    matrix *= model.intermediate_size
    kept_before = 4 * inner  # what the feed-forward layer kept is gone where attention is passed
    bare = max(out + 2 * inner, (2 if is_low else 1) * 4 * state - kept_before)
    whole = max(bare, out + inner + matrix)
    offloaded = max(
        out + 5 * inner, out + 2 * inner + matrix, _outside_experts(model, positions, element)
    )
    return PassPeak(whole, whole, bare, bare, offloaded)


def _outside_experts(model: ModelSpec, positions: int, element: int) -> int:
    """`offloaded` where attention and norms are passed: queries, keys, values, what was attended
    to, and the gradients of all of these, with the gradient that waits at the residual."""
    is_low = element != FP32_BYTES
    kv_width = model.num_key_value_heads * model.head_size
    attention = 6 * model.hidden_size + 4 * kv_width
    norm = (OFFLOADED_NORM_LOW if is_low else OFFLOADED_NORM) * model.hidden_size
    return element * positions * max(attention, norm)


def _of_experts(model: ModelSpec, positions: int, element: int) -> PassPeak:
    """Of a decoder layer with experts, where each of these gets as many tokens. In low precision
    the residual and what its norm made of it are no more than copies of what is kept in fp32."""
    width, chosen = model.hidden_size, model.num_experts_per_tok
    shared, is_low = model.shared_expert_intermediate_size, element != FP32_BYTES
    of_one = -(-chosen * model.expert_size // model.num_experts)
    weighed = (2 * chosen + 1 + 2 * is_low) * width
    if shared:  # its graph comes after, and is gone before
        weighed -= 4 * shared + width
        weighed = max(weighed, (3 + is_low) * width, 2 * shared)
    bare = element * positions * max(weighed, width + 2 * of_one)
    sides = max(model.expert_size, shared)
    rows = element * positions * (width + (shared or of_one))
    matrix = element * width * sides
    offloaded = max(
        element * positions * (4 * chosen + 3) * width,
        element * positions * ((1 + chosen) * width + 5 * of_one),
        element * positions * (width + 5 * shared),
        _outside_experts(model, positions, element),
    )
    whole = max(bare, rows + matrix)
    return PassPeak(whole, whole, bare, bare, max(offloaded, rows + matrix))
