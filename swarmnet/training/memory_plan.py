"""What a replica of each stage holds in memory, by formula.

ZeRO (Rajbhandari et al., 2020) counts 16 bytes a parameter for mixed-precision Adam: 2 for the
weight, 2 for its gradient, 12 for the optimizer (fp32 master copy and two moments). Of Psi
parameters on N replicas its first stage leaves 4 Psi + 12 Psi / N on each. Here the optimizer
state of a shard is on R replicas, so a replica holds

    weights * Psi + gradients * Psi + (master + moments) * Psi * min(R, N) / N

In fp32 the weights are their own master copy: 4 + 4 + 8 R / N bytes a parameter. Beside it there
are activations, by microbatch in flight. Everything is in bytes; the share of the optimizer is that
of a replica with the average upload bandwidth.

Activations of the built-in Llama are those that autograd keeps (`layer_numbers`): B samples, S
positions, D width, K width of keys and values, I width of the feed-forward layer, H heads,
V tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.errors import SpecError
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.models.registry import model_plan, split_stages
from swarmnet.training.stage import stage_parameter_ranges

FP32_BYTES = 4


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
MIXED = Precision("mixed", weights=2, gradients=2, master=4, moments=8)
"""The ZeRO paper's: fp16 or bf16 weights and gradients, everything else fp32."""
PRECISIONS = {p.name: p for p in (FP32, MIXED)}


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Of one replica of a stage, in bytes."""

    stage: int
    num_parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float | None
    """None for a custom model: nobody knows but its author."""
    unsharded: float
    """Weights, gradients and optimizer without ZeRO."""

    @property
    def state(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.state + (self.activations or 0.0)


def optimizer_share(num_replicas: int, replication: int) -> float:
    """Part of a stage's optimizer state that a replica of average bandwidth holds."""
    return min(replication, num_replicas) / num_replicas


def state_bytes(
    num_parameters: int, num_replicas: int, replication: int, precision: Precision = FP32
) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) of one replica."""
    share = optimizer_share(num_replicas, replication)
    return (
        float(precision.weights * num_parameters),
        float(precision.gradients * num_parameters),
        precision.optimizer * num_parameters * share,
    )


def layer_numbers(model: ModelSpec, layer: str, batch: int) -> int:
    """Numbers of 4 bytes that one layer of the Llama keeps between forward and backward, for a
    microbatch of `batch` samples.

    A decoder layer, for each position: its input, what both norms keep (the normed value before and
    after the weight, and one number), rotated queries, keys, values, the attention's output and
    one number a head, the residual between, gate, its SiLU, up, and their product.
    """
    positions = batch * model.max_position_embeddings
    width, inner = model.hidden_size, model.intermediate_size
    kv_width = model.num_key_value_heads * model.head_size
    if layer == "model.embed_tokens":
        return positions  # the tokens
    if layer == "model.norm":
        return positions * (3 * width + 1)
    if layer == "lm_head":
        return positions * (model.vocab_size + 2)  # log-probabilities; targets of 8 bytes
    return positions * (8 * width + 2 * kv_width + 4 * inner + model.num_attention_heads + 2)


def plan_memory(
    spec: RunSpec,
    *,
    num_replicas: int,
    in_flight: int,
    replication: int | None = None,
    precision: Precision = FP32,
) -> list[StageMemory]:
    """What a replica of each stage holds; `in_flight`: microbatches between their forward and their
    backward pass. The last stage does both at once: one microbatch, whatever is in flight.

    Raises:
        SpecError: the model cannot be built or cut so; a number is not positive.
    """
    if num_replicas < 1 or in_flight < 0:
        raise SpecError("a stage needs at least one replica, and no fewer than 0 microbatches")
    copies = spec.sync.replication if replication is None else replication
    stages = split_stages(model_plan(spec), spec.pipeline.num_stages)
    rows = []
    for k, layers in enumerate(stages):
        num_parameters = stage_parameter_ranges(spec, k)[-1].stop
        weights, gradients, optimizer = state_bytes(num_parameters, num_replicas, copies, precision)
        names = [layer.name for layer in layers]
        rows.append(
            StageMemory(
                stage=k,
                num_parameters=num_parameters,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                activations=_activations(spec, names, k, len(stages), in_flight),
                unsharded=float(precision.total * num_parameters),
            )
        )
    return rows


def _activations(
    spec: RunSpec, layers: list[str], stage: int, num_stages: int, in_flight: int
) -> float | None:
    """With the graph kept: what the layers keep, and the output. Recomputed: the input of each, and
    the layers' for the one that is being recomputed."""
    model, batch = spec.model, spec.pipeline.microbatch
    if model.kind != "llama":
        return None
    positions = batch * model.max_position_embeddings
    whole = sum(layer_numbers(model, name, batch) for name in layers)
    border = positions * model.hidden_size
    input_numbers = border if stage else positions
    if stage == num_stages - 1:
        return float(FP32_BYTES * whole * min(in_flight, 1))
    if spec.pipeline.activations == "recompute":
        one = whole + border if in_flight else 0
        return float(FP32_BYTES * (in_flight * input_numbers + one))
    return float(FP32_BYTES * in_flight * (whole + border))
