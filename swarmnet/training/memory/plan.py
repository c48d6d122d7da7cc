"""What a replica of each stage holds in memory, by formula.

ZeRO (Rajbhandari et al., 2020) counts 16 bytes a parameter for mixed-precision Adam: 2 for the
weight, 2 for its gradient, 12 for the optimizer (fp32 master copy and two moments). Of Psi
parameters on N replicas its first stage leaves 4 Psi + 12 Psi / N on each. Here the optimizer
state of a shard is on R replicas, so a replica holds in mode `zero`

    weights * Psi + gradients * Psi + (master + moments) * Psi * min(R, N) / N

In fp32 the weights are their own master copy: 4 + 4 + 8 R / N bytes a parameter. In bf16 there is
the copy that layers compute with besides: 2 + 4 + 4 + 8 R / N; and in fp16, while a pass runs, the
gradient of that pass: 2 more. (That fp32 weights are on every replica, and not in R places, is
what lets any replica answer for any shard.) Everything is in bytes; the share of the optimizer is
that of a replica with the average upload bandwidth. With Muon the matrices of decoder layers have
one moment, 4 bytes in place of 8.

The other sync modes need more:

- `delayed`, and `auto` which may choose it: a second pair of weights and gradients, since a round
  opens before the last one has ended; and until its exchange is over a copy of a gradient, 4,
  where the next round was not open yet when it was taken. With the owners, how far parameters are
  ahead, 4 R / N.
- `local`: the moments of own steps cannot be shared out, so that there are all of them, and the
  parameters of the last exchange, 4; the owners' outer momentum, 4 R / N.
- `gossip`: the same, with an outer momentum of everybody's own, 4.

While the model writes a text (`swarmnet generate`) a replica may keep, where there is room, one
copy of its parameters as passes need them: `copy_bytes`.

What a replica sends in a round: `swarmnet.protocol.planning.exchange`.

Beside it there are activations, by microbatch in flight: what the stage keeps between the passes by
the policy (`Activations`), and the activation as it came and as it went, in fp32.

Activations of the built-in Llama are those that autograd keeps (`layer_bytes`): B samples, S
positions, D width, K width of keys and values, I width of the feed-forward layer, H heads,
V tokens. With experts `experts_bytes` stands for the feed-forward layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swarmnet.errors import SpecError
from swarmnet.protocol.codecs import NONE, TOKEN_BYTES
from swarmnet.protocol.planning.exchange import codec_in, exchanged_bytes, number_bytes
from swarmnet.protocol.sync_modes import AUTO, DELAYED, GOSSIP, LOCAL, ZERO
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.attention.documents import JOINED
from swarmnet.training.memory.pass_peaks import LayerPart, llama_peak, stage_peaks
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    ParameterRange,
    describe_buffers,
    describe_frozen,
    describe_parameters,
    num_parameters,
)
from swarmnet.training.models.experts import adapted_stack, expert_of, is_stack
from swarmnet.training.models.lora import is_packed, names_experts, packing_of
from swarmnet.training.models.packing import BITS
from swarmnet.training.models.registry import (
    experts_met,
    model_plan,
    num_experts,
    split_stages,
    stage_matrix_parameters,
    stage_parameter_ranges,
)
from swarmnet.training.models.subspace import has_table

FP32_BYTES, LOW_BYTES, INDEX_BYTES = 4, 2, 8
MODES = (ZERO, DELAYED, LOCAL, GOSSIP)
UNCUT, UNCUT_LOW = 6, 10
"""Tensors like a layer's input that its norms keep, in fp32 and with passes of half of its bytes:
the inputs and the normed values, in fp32, and what comes of them (`layer_bytes`)."""
FSDP = "fsdp"
SEQUENCES, EXPERTS = "sequences", "experts"
"""What ranks share that have all else of a stage each."""
ERROR_BYTES = 2
"""A parameter, of what coding has lost of contributions."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes a parameter."""

    name: str
    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


FP32 = Precision("fp32", weights=4, gradients=4, master=0, moments=8)
BF16 = Precision("bf16", weights=2 + 4, gradients=4, master=0, moments=8)
FP16 = Precision("fp16", weights=2 + 4, gradients=4 + 2, master=0, moments=8)
MIXED = Precision("mixed", weights=2, gradients=2, master=4, moments=8)
"""The ZeRO paper's: fp16 or bf16 weights and gradients, everything else fp32."""
PRECISIONS = {p.name: p for p in (FP32, BF16, FP16, MIXED)}


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of one replica of a stage, in bytes."""

    stage: int
    num_parameters: int
    weights: float
    gradients: float
    optimizer: float
    """Master copy and moments."""
    exchange: float
    """What the run's sync mode needs beside: see the module's text."""
    sent: float
    """To other replicas of the stage in a round, on average."""
    activations: float | None
    """None for a custom model: nobody knows but its author."""
    offloaded: float
    """Of the activations: what is not in the device's memory."""
    unsharded: float
    """Weights, gradients, optimizer and what exchanges need, without ZeRO."""

    @property
    def state(self) -> float:
        """All but activations."""
        return self.weights + self.gradients + self.optimizer + self.exchange

    @property
    def total(self) -> float:
        return self.state + (self.activations or 0.0)


def optimizer_share(num_replicas: int, replication: int) -> float:
    """Part of a stage's optimizer state that a replica of average bandwidth holds."""
    return min(replication, num_replicas) / num_replicas


def state_bytes(
    num_parameters: int,
    num_replicas: int,
    replication: int,
    precision: Precision = FP32,
    mode: str = ZERO,
    codec: str = NONE,
    num_muon: int = 0,
) -> tuple[float, float, float, float]:
    """(weights, gradients, optimizer, what exchanges need beside) of one replica. `num_muon`: of
    the parameters, those that Muon steps; what coding has lost of their results, the primary alone
    knows."""
    share = optimizer_share(num_replicas, replication)
    optimizer = precision.optimizer * num_parameters - FP32_BYTES * num_muon
    exchange = exchange_bytes(mode, num_replicas, replication, precision, codec) * num_parameters
    if mode == ZERO and codec_in(mode, codec).results != NONE:
        exchange -= FP32_BYTES * (share - 1 / num_replicas) * num_muon
    return (
        float(precision.weights * num_parameters),
        float(precision.gradients * num_parameters),
        optimizer * (1.0 if mode in (LOCAL, GOSSIP) else share),
        exchange,
    )


def base_bytes(spec: RunSpec, stage: int, precision: Precision) -> float:
    """Of what is not trained at a stage: on every replica, in the precision of the passes, or of
    `[lora] base_dtype` where linear layers keep it so (the few others are counted alike, as long as
    it is not one of few bits; stacks of experts never are)."""
    plan = model_plan(spec)
    return layers_base_bytes(
        spec, plan, split_stages(plan, spec.pipeline.num_stages)[stage], precision
    )


def layers_base_bytes(
    spec: RunSpec, plan: ModelPlan, layers: Sequence[LayerBuilder], precision: Precision
) -> float:
    """The same of some layers."""
    buffers = FP32_BYTES * num_parameters(describe_buffers(layers))
    if not plan.has_base:
        return float(buffers)
    is_low = precision is not FP32 or plan.base_dtype is not None
    ranges = describe_frozen(layers)
    each, packing = LOW_BYTES if is_low else FP32_BYTES, packing_of(spec.lora)
    matrices = [r for r in ranges if packing and is_packed(r.name, r.shape)]
    num_packed = sum(math.prod(r.shape) for r in matrices)
    kept = each * (num_parameters(ranges) - num_packed)
    kept += (element_bytes(precision) - each) * sum(
        r.num_elements for r in ranges if is_stack(r.name)
    )
    return float(buffers + kept + BITS.get(packing, 0.0) / 8 * num_packed)


def streamed_bytes(spec: RunSpec, stage: int, precision: Precision) -> tuple[float, float]:
    """(weights, gradients) on the device of a stage whose weights lie elsewhere and come layer by
    layer: those of two layers that follow each other, and the gradient of one."""
    plan = model_plan(spec)
    layers = split_stages(plan, spec.pipeline.num_stages)[stage]
    trained = [num_parameters(describe_parameters([layer])) for layer in layers]
    base = [layers_base_bytes(spec, plan, [layer], precision) for layer in layers]
    return layers_streamed_bytes(trained, base, precision)


def layers_streamed_bytes(
    trained: Sequence[int], base: Sequence[float], precision: Precision
) -> tuple[float, float]:
    """The same of layers with so many trained parameters, and so many bytes of others."""
    own = [element_bytes(precision) * n for n in trained]
    held = [a + b for a, b in zip(own, base, strict=True)]
    return max([*held, *(a + b for a, b in pairwise(held))]), float(max(own))


def element_bytes(precision: Precision) -> int:
    """Of a number in a pass."""
    return FP32_BYTES if precision is FP32 else LOW_BYTES


def host_weights_bytes(num_parameters: int, base: float, precision: Precision) -> float:
    """On the host, of such a stage: parameters, what passes compute with where that is another
    precision, the gradient, and what is not trained."""
    low = 0 if precision is FP32 else LOW_BYTES
    return (2 * FP32_BYTES + low) * num_parameters + base


def exchange_bytes(
    mode: str,
    num_replicas: int,
    replication: int,
    precision: Precision = FP32,
    codec: str = NONE,
) -> float:
    """What exchanges need beside, a parameter."""
    if mode == GOSSIP:
        return 2.0 * FP32_BYTES
    share = optimizer_share(num_replicas, replication)
    coded = coding_bytes(mode, num_replicas, replication, codec)
    if mode in (DELAYED, AUTO):
        return precision.weights + precision.gradients + FP32_BYTES * (1 + share) + coded
    return FP32_BYTES * (1 + share) + coded if mode == LOCAL else coded


def coding_bytes(mode: str, num_replicas: int, replication: int, codec: str) -> float:
    """What coding needs, a parameter: what it has lost of contributions, and at owners what it has
    lost of results; where backups get these in place of sums, at the primary alone. (Who has
    fetched that from it has it too, until the next result.) Where exchanges are delayed, owners
    keep that anyway, but the results of the one that is under way lie beside."""
    names = codec_in(mode, codec)
    if names.results == NONE:
        return 0.0
    if mode in (DELAYED, AUTO):
        return ERROR_BYTES + number_bytes(names.results)
    owners = 1 if names.tells_results else replication
    return ERROR_BYTES + FP32_BYTES * optimizer_share(num_replicas, owners)


def copy_bytes(num_parameters: int, precision: Precision = FP32) -> int:
    """Of the copy of a stage's parameters that the texts of one round hold."""
    return (FP32_BYTES if precision is FP32 else LOW_BYTES) * num_parameters


def layer_bytes(model: ModelSpec, layer: str, positions: int, element: int = FP32_BYTES) -> int:
    """Bytes that one layer of the Llama keeps between forward and backward, for a microbatch of
    `positions` tokens whose passes are made in numbers of `element` bytes.

    A decoder layer, for each position: what both norms keep (their input and the normed value
    before the weight, and one number, all in fp32; the result), rotated queries, keys, values, the
    attention's output and one fp32 number a head, gate, its SiLU, up, and their product. In fp32
    the norms' inputs are the layer's input and the residual between.
    """
    width, kv_width = model.hidden_size, model.num_key_value_heads * model.head_size
    if layer == "model.embed_tokens":
        return positions * FP32_BYTES  # the tokens
    if layer == "model.norm":
        return positions * (FP32_BYTES * (2 * width + 1) + element * width)
    if layer == "lm_head":
        return positions * FP32_BYTES * (model.vocab_size + 2)  # log-probabilities; int64 targets
    exact = 4 * width + model.num_attention_heads + 2
    kept = positions * (FP32_BYTES * exact + element * (4 * width + 2 * kv_width))
    if model.num_experts:
        return kept + experts_bytes(model, positions, element)
    return kept + positions * element * 4 * model.intermediate_size


def experts_bytes(model: ModelSpec, positions: int, element: int, *, has_inner: bool = True) -> int:
    """Of it, in place of what a dense feed-forward layer keeps, the experts and their router. An
    expert keeps of each of its tokens what a dense layer does, its input and its output; the router
    the probabilities of all experts, and the logits and more where it has losses of its own, in
    fp32; and of each choice its expert, its place and its weight. That is without a limit to an
    expert's tokens (`capacity_factor`), under which there are fewer. `has_inner`: with what lies
    between an expert's matrices."""
    width, chosen = model.hidden_size, model.num_experts_per_tok
    shared = model.shared_expert_intermediate_size
    balance, z = model.router_losses
    tables = 1 + (2 if balance or z else 0) + (1 if z else 0)
    numbers = (
        tables * model.num_experts + 2 * bool(z) + chosen + model.norm_topk_prob * (chosen + 1)
    )
    inner = 4 * model.expert_size if has_inner else 0
    of_choices = chosen * (element * (2 * width + inner) + 2 * INDEX_BYTES)
    of_shared = element * (4 * shared * has_inner + width + 1) if shared else 0
    routed = 0
    if element != FP32_BYTES:  # the router has a copy of its input, and of its weights
        routed = (FP32_BYTES - (0 if shared else element)) * width
        routed += element * chosen
    whole = positions * (FP32_BYTES * numbers + of_choices + of_shared + routed)
    return whole + (FP32_BYTES * model.num_experts * width if element != FP32_BYTES else 0)


def pairs_bytes(spec: RunSpec, positions: int, element: int) -> int:
    """What a layer keeps beside `experts_bytes` where its experts have adapters: of each choice,
    what it is between the two matrices of a pair."""
    if spec.lora is None:
        return 0
    num_pairs = sum(names_experts(name) for name in spec.lora.target_modules)
    return positions * spec.model.num_experts_per_tok * element * spec.lora.rank * num_pairs


def document_bytes(spec: RunSpec, element: int, *, masked: bool) -> tuple[int, int, int]:
    """With `document_mask`, of one microbatch: the positions that a stage keeps, and what a pass
    makes of them once for all decoder layers (masks, rotary tables). `masked`: one mask of all
    scores; else masks of short documents, which may be fewer."""
    if not spec.data.document_mask:
        return 0, 0, 0
    batch, length = spec.pipeline.microbatch, spec.sequence_length
    tables = 2 * FP32_BYTES * batch * length * spec.model.head_size
    masks = element * batch * length**2 if masked else _part_masks(spec, length)
    return INDEX_BYTES * batch * length, masks, tables


def _part_masks(spec: RunSpec, length: int) -> int:
    """At most, where attention is made document by document."""
    return spec.pipeline.microbatch * length * min(length, JOINED)


def plan_memory(
    spec: RunSpec,
    *,
    num_replicas: int,
    in_flight: int,
    precision: Precision = FP32,
    activations: str | None = None,
    mode: str | None = None,
    num_ranks: int = 1,
    shared: str = SEQUENCES,
    row_size: int = 1,
    known: Callable[[RunSpec, int, Precision, int, str], Activations | None] | None = None,
) -> list[StageMemory]:
    """What a replica of each stage holds; `in_flight`: microbatches between their forward and their
    backward pass. The last stage does both at once: one microbatch, whatever is in flight.
    `activations`: the policy; None for the spec's, which may be "auto": then "keep". `mode`: of
    `[sync]`; None for the spec's. `num_ranks`: that share each sequence, or experts and samples, as
    `shared` says; then activations are those of one rank, and weights and gradients those that it
    computes with. `row_size`: ranks in the place of each of these, which cut matrices among them
    (the few parameters that each of them has are counted alike). `known`: tells the activations of
    a stage, at one of so many; `stage_activations` where not given.

    Raises:
        SpecError: the model cannot be built or cut so; a number is not positive.
    """
    if num_replicas < 1 or in_flight < 0:
        raise SpecError("a stage needs at least one replica, and no fewer than 0 microbatches")
    policy = activations or spec.pipeline.activations
    mode = mode or spec.sync.mode
    codec = spec.sync.update_codec
    stages = split_stages(model_plan(spec), spec.pipeline.num_stages)
    rows = []
    for k in range(len(stages)):
        trained = num_parameters(stage_parameter_ranges(spec, k))
        base = base_bytes(spec, k, precision) + fixed_bytes(spec.model)
        part, part_of_base = held_parts(spec, k, num_ranks) if shared == EXPERTS else (1.0, 1.0)
        part /= row_size
        base *= part_of_base / row_size
        of_stage = trained, num_replicas, spec.sync.replication
        num_muon = stage_matrix_parameters(spec, k)
        how = precision, mode, codec, num_muon
        weights, gradients, optimizer, exchange = state_bytes(
            trained, num_replicas, spec.sync.replication, *how
        )
        weights, gradients = part * weights, part * gradients
        alone = state_bytes(trained, 1, 1, *how)
        one = (known or stage_activations)(spec, k, precision, num_ranks, shared)
        if one is not None:
            one = of_rank_in_row(one, row_size, precision)
        held = None if one is None else one.held(policy, in_flight)
        rows.append(
            StageMemory(
                stage=k,
                num_parameters=trained,
                weights=weights + base,
                gradients=gradients,
                optimizer=optimizer,
                exchange=exchange,
                sent=exchanged_bytes(
                    *of_stage, mode, spec.sync.local_steps, codec, num_muon=num_muon
                )[0],
                activations=None if held is None else float(held[0]),
                offloaded=0.0 if held is None else float(held[1]),
                unsharded=part * sum(alone[:2]) + sum(alone[2:]) + base,
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class Activations:
    """Of one microbatch at one stage, in bytes. Every tensor counts once."""

    graph: int
    """What autograd keeps of all layers and of the loss."""
    came: int
    """What the stage got, where that is not in the graph: in low precision."""
    inputs: int
    """The copy of it that layers compute with."""
    outputs: int
    """What the layers gave, and the graph hangs on; 0 where that is what is sent."""
    sent: int
    """What goes to the next stage, in fp32."""
    borders: int
    """What autograd keeps where each layer is computed again: their inputs."""
    largest_layer: int
    """Where each layer is computed again, of the one whose backward pass is made: what autograd
    keeps of it and of the loss beside its input, and what the pass takes besides (`pass_peaks`)."""
    largest_streamed: int
    """The same without gradients of parameters."""
    largest_offloaded: int
    """What there is of the layer that is at work, where what autograd keeps is elsewhere."""
    passing: int
    """Where the graph of all layers is there, what a backward pass takes besides."""
    grad_came: int
    """The gradient that a stage gets, as it came, where passes use it in another precision."""
    is_input_in_graph: bool
    is_last: bool
    masks: int = 0
    """Of the graph: masks of short documents, which stay where they are."""
    rows: int = 0
    """Of the graph: what comes to experts and from them, which ranks that cut these have whole."""
    rows_of_layer: int = 0

    def held(self, policy: str, in_flight: int) -> tuple[int, int]:
        """(in the device's memory, elsewhere) with so many microbatches in flight and one of them
        in its backward pass."""
        if in_flight == 0:
            return 0, 0
        inputs = 0 if self.is_input_in_graph else self.inputs
        each = self.came + inputs + self.outputs + self.sent + self.graph
        back = self.grad_came
        if self.is_last:
            in_flight = 1
        if policy == "recompute" and not self.is_last:
            waiting = self.came + self.inputs + self.sent
            again = 0 if self.outputs else self.sent
            return (in_flight - 1) * waiting + each + again + self.passing + back, 0
        if policy == "blocks":
            waiting = self.came + self.borders + self.outputs + self.sent
            return in_flight * waiting + self.largest_layer + back, 0
        if policy == "offload":
            waiting = self.came + self.inputs + self.outputs + self.sent + self.masks
            moved = in_flight * (self.graph - self.masks)
            return in_flight * waiting + self.largest_offloaded + back, moved
        return in_flight * each + self.passing + back, 0


def is_of_formula(spec: RunSpec) -> bool:
    """Whether `llama_activations` tells what a stage keeps. It counts all matrices as trained ones:
    with adapters it is an upper bound, for what a pass without a context or numbers cannot show."""
    beside = bool(spec.model.subspace or spec.model.num_experts) or spec.data.document_mask
    return spec.model.kind == "llama" and (spec.lora is None or beside)


def of_streamed(one: Activations) -> Activations:
    """Where weights come layer by layer: whatever the policy, each layer is computed again in the
    backward pass, so of the stage a pass has the inputs of layers, and one layer's graph."""
    return replace(
        one,
        graph=one.borders + one.largest_streamed,
        largest_layer=one.largest_streamed,
        passing=0,
        is_input_in_graph=True,
    )


def of_ranks(one: Activations, num_ranks: int, local: str, precision: Precision) -> Activations:
    """The same on all ranks of a peer together. With `fsdp` they divide the samples. With `tensor`
    each has all that lies between the cut matrices: what enters and leaves, and of a layer what its
    two norms keep."""
    if num_ranks == 1 or local == FSDP:
        return one
    more = num_ranks - 1
    uncut = (UNCUT if precision is FP32 else UNCUT_LOW) * one.borders

    def of_layer(num_bytes: int) -> int:
        rows = one.rows_of_layer
        return num_bytes + more * min(num_bytes // 2 + rows, uncut + rows)

    return replace(
        one,
        graph=one.graph + more * min(one.graph, uncut + one.rows),
        came=num_ranks * one.came,
        inputs=num_ranks * one.inputs,
        outputs=num_ranks * one.outputs,
        sent=num_ranks * one.sent,
        borders=num_ranks * one.borders,
        largest_layer=of_layer(one.largest_layer),
        largest_offloaded=of_layer(one.largest_offloaded),
        passing=one.passing + more * min(one.passing // 2, one.borders),
        grad_came=num_ranks * one.grad_came,
    )


def of_rank_in_row(one: Activations, num_ranks: int, precision: Precision) -> Activations:
    """The same at each of so many ranks that cut matrices."""
    every = of_ranks(one, num_ranks, "tensor", precision)
    return replace(
        one,
        graph=every.graph // num_ranks,
        largest_layer=every.largest_layer // num_ranks,
        largest_offloaded=every.largest_offloaded // num_ranks,
        passing=every.passing // num_ranks,
    )


def held_parts(spec: RunSpec, stage: int, num_ranks: int) -> tuple[float, float]:
    """(of what is trained at a stage, of the rest), the part that a rank computes with that has
    some of the experts, and all else: the rank with most of them."""
    layers = split_stages(model_plan(spec), spec.pipeline.num_stages)[stage]
    experts = num_experts(spec.model)
    absent = 1 - -(-experts // num_ranks) / experts if experts else 0.0

    def is_expert_s(name: str) -> bool:
        return is_stack(name) or expert_of(name) is not None or adapted_stack(name) is not None

    def part(ranges: Sequence[ParameterRange]) -> float:
        of_experts = sum(r.num_elements for r in ranges if is_expert_s(r.name))
        return 1 - absent * of_experts / max(1, num_parameters(ranges))

    return part(describe_parameters(layers)), part(describe_frozen(layers))


def samples_of_rank(spec: RunSpec, num_ranks: int) -> RunSpec:
    """The run as a rank sees it that has some samples of each microbatch: the rank with most."""
    samples = -(-spec.pipeline.microbatch // num_ranks)
    pipeline = spec.pipeline.model_copy(update={"microbatch": samples})
    return spec.model_copy(update={"pipeline": pipeline})


def positions_of_rank(spec: RunSpec, num_ranks: int) -> RunSpec:
    """The run as a rank sees it that has two pieces of each sequence: the rank with most."""
    data = spec.data.model_copy(update={"sequence_length": _most_positions(spec, num_ranks)})
    return spec.model_copy(update={"data": data})


def _most_positions(spec: RunSpec, num_ranks: int) -> int:
    return 2 * -(-spec.sequence_length // (2 * num_ranks))


def of_samples(whole: Activations, part: Activations) -> Activations:
    """At a rank that has some samples of each microbatch, and whose experts get as many tokens as
    it has; or some positions. `part`: of its own alone. What comes from other stages and goes to
    them is whole."""
    return replace(
        whole,
        graph=part.graph,
        borders=part.borders + whole.inputs,
        largest_layer=part.largest_layer,
        largest_offloaded=part.largest_offloaded,
        passing=part.passing,
        is_input_in_graph=False,
        rows=part.rows,
        rows_of_layer=part.rows_of_layer,
    )


def with_rows(
    one: Activations, spec: RunSpec, num_layers: int, precision: Precision
) -> Activations:
    """The same of another model than the built-in one, with what comes to experts and from them at
    `num_layers` layers of a stage told apart."""
    chosen, width = experts_met(spec.model)
    numbers = 2 * element_bytes(precision) * width
    each = spec.pipeline.microbatch * spec.sequence_length * chosen * (numbers + 3 * INDEX_BYTES)
    return replace(one, rows=num_layers * each, rows_of_layer=each if num_layers else 0)


def stage_activations(
    spec: RunSpec,
    stage: int,
    precision: Precision,
    num_ranks: int = 1,
    shared: str = SEQUENCES,
    *,
    masked: bool = False,
) -> Activations | None:
    """Of one microbatch at a stage, at each of `num_ranks`, as for `plan_memory`; None for another
    model than the built-in one. `masked`: documents that share a sample are kept apart by a mask of
    all scores, as on devices without a kernel for them (`attention.packed`). Raises `SpecError`."""
    if spec.model.kind != "llama":
        return None
    stages = split_stages(model_plan(spec), spec.pipeline.num_stages)
    names = [layer.name for layer in stages[stage]]
    about = spec, names, precision, stage == 0, stage == len(stages) - 1
    if num_ranks == 1:
        return llama_activations(*about, masked=masked)
    if shared == EXPERTS:
        whole = llama_activations(*about, masked=masked)
        alone = samples_of_rank(spec, num_ranks)
        part = llama_activations(alone, *about[1:], masked=masked)
        positions = alone.pipeline.microbatch * spec.sequence_length
        places = INDEX_BYTES * positions * spec.model.num_experts_per_tok  # of rows that come
        num_layers = sum(name.startswith("model.layers.") for name in names)
        part = replace(
            part,
            graph=part.graph + num_layers * places,
            largest_layer=part.largest_layer + places,
            rows=part.rows + num_layers * places,
            rows_of_layer=part.rows_of_layer + places,
        )
        return of_samples(whole, part)
    whole = llama_activations(*about)
    length = _most_positions(spec, num_ranks)
    return _of_part(spec, whole, llama_activations(*about, length), length)


def _of_part(spec: RunSpec, whole: Activations, part: Activations, length: int) -> Activations:
    """At a rank that has `length` positions of each sequence. What comes from other stages and goes
    to them is whole. Its rotary tables are its own, and so are masks of short documents."""
    batch, has_documents = spec.pipeline.microbatch, spec.data.document_mask
    samples = batch if has_documents else 1
    tables = samples * length * (2 * FP32_BYTES * spec.model.head_size + INDEX_BYTES)
    masks = _part_masks(spec, length) if has_documents else 0
    return replace(
        whole,
        graph=part.graph + tables + masks,
        borders=part.borders + whole.inputs + masks,
        largest_layer=part.largest_layer + tables,
        largest_offloaded=part.largest_offloaded + tables,
        passing=part.passing,
        is_input_in_graph=False,
        masks=masks,
    )


def llama_activations(
    spec: RunSpec,
    names: Sequence[str],
    precision: Precision,
    is_first: bool,
    is_last: bool,
    length: int = 0,
    *,
    masked: bool = False,
) -> Activations:
    """Of one microbatch at a stage that has the layers of these names, of the built-in Llama.
    `length`: of its sequences, if that is not the run's; then without documents. `masked`: as
    `stage_activations`."""
    model, batch = spec.model, spec.pipeline.microbatch
    element = FP32_BYTES if precision is FP32 else LOW_BYTES
    is_low = precision is not FP32
    positions = batch * (length or spec.sequence_length)
    is_narrow = bool(model.subspace)
    border = positions * (model.subspace or model.hidden_size)
    parts = {name: layer_bytes(model, name, positions, element) for name in names}
    for name in parts:
        if model.num_experts and name.startswith("model.layers."):
            parts[name] += pairs_bytes(spec, positions, element)
    tokens = FP32_BYTES * positions if is_first else 0
    borders = positions * sum(_input_width(model, name) for name in names)
    beside = mask = tables = 0
    if not length:
        beside, mask, tables = document_bytes(spec, element, masked=masked)
    if is_narrow and not is_first:
        beside += TOKEN_BYTES * positions
    fixed = element * positions * model.hidden_size if is_narrow else 0
    if not any(name.startswith("model.layers.") for name in names):
        mask = tables = fixed = 0
    has_own_input = is_low or is_narrow
    code = FP32_BYTES * border + (TOKEN_BYTES * positions if is_narrow else 0)
    whole = FP32_BYTES * positions * model.hidden_size
    own = {name: 0 if _is_apart(model, name, is_low) else whole for name in parts}
    own |= {"model.embed_tokens": tokens, "lm_head": 0}
    layers = [
        LayerPart(
            parts[name],
            own[name],
            element * positions * _input_width(model, name),
            llama_peak(model, name, positions, element),
        )
        for name in names
    ]
    gradient = element * border
    peaks = stage_peaks(layers, gradient, is_last=is_last, adds_at_once=precision.name != FP16.name)
    rows = experts_bytes(model, positions, element, has_inner=False) if model.num_experts else 0
    num_layers = sum(name.startswith("model.layers.") for name in names)
    return Activations(
        graph=sum(parts.values()) + mask + tables,
        came=code if has_own_input and not is_first else 0,
        inputs=(tokens or element * border) + beside,
        outputs=element * border if has_own_input and not is_last else 0,
        sent=0 if is_last else code,
        borders=tokens + element * borders + beside + mask + fixed,
        largest_layer=tables + peaks.layer,
        largest_streamed=tables + peaks.streamed,
        largest_offloaded=tables + peaks.offloaded,
        passing=peaks.passing,
        grad_came=FP32_BYTES * border if is_low and not is_last else 0,
        is_input_in_graph=is_first or not has_own_input,
        is_last=is_last,
        masks=0 if masked else mask,
        rows=num_layers * rows,
        rows_of_layer=rows if num_layers else 0,
    )


def _input_width(model: ModelSpec, layer: str) -> int:
    """Numbers of a position that a layer gets; 0 for tokens."""
    if layer == "model.embed_tokens":
        return 0
    is_decoder = layer.startswith("model.layers.")
    return model.subspace if is_decoder and model.subspace else model.hidden_size


def _is_apart(model: ModelSpec, layer: str, is_low: bool) -> bool:
    """The norm's input is another tensor than the layer's own."""
    return is_low or _input_width(model, layer) != model.hidden_size


def fixed_bytes(model: ModelSpec) -> int:
    """Of what all tokens have beside the trained embedding, where a table of that is kept."""
    return FP32_BYTES * model.vocab_size * model.hidden_size if has_table(model) else 0
