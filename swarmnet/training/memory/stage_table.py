"""A model's layers as the planner sees them, and what any run of them takes of a machine."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import TypeVar

from swarmnet.protocol.codecs import TOKEN_BYTES, boundary_codec, row_bytes
from swarmnet.protocol.planning.model import Held, Job, Layer, Machine, Update
from swarmnet.protocol.sync_modes import ZERO
from swarmnet.spec import RunSpec
from swarmnet.training.computing import ActivationsName
from swarmnet.training.memory.activation_choice import (
    MIN_IN_FLIGHT,
    POLICIES,
    LayerActivations,
    expected_in_flight,
    joined,
    layer_kinds,
    traced_layers,
)
from swarmnet.training.memory.plan import (
    FP32_BYTES,
    PRECISIONS,
    Activations,
    Precision,
    fixed_bytes,
    is_of_formula,
    layers_base_bytes,
    llama_activations,
    state_bytes,
)
from swarmnet.training.memory.stage_needs import AUTO, DISK, HOST, StageNeeds, choose_memory
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    describe_parameters,
    num_parameters,
)
from swarmnet.training.models.matrices import (
    check_matrices,
    matrix_parameters,
    orthogonal_flops,
)
from swarmnet.training.models.registry import model_plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Of one machine, and how it computes."""

    device_bytes: float
    """Free: of the GPU, or where there is none of the machine."""
    host_bytes: float
    """Free main memory beside a GPU; the same again where there is none."""
    is_apart: bool
    precision: str


def memory_of(machine: Machine) -> MachineMemory:
    """What `StageTable` knows a machine by."""
    assert isinstance(machine.memory, MachineMemory)
    return machine.memory


@dataclass(slots=True)
class StageTable:
    """Of a run whose `[pipeline] layers` may be open."""

    spec: RunSpec
    plan: ModelPlan = field(init=False)
    kinds: tuple[object, ...] = field(init=False)
    """Of each layer; those that are alike have the same."""
    trained: list[int] = field(init=False)
    """Parameters of each layer."""
    muon: list[int] = field(init=False)
    """Of these, the ones that Muon steps."""
    orthogonal: list[float] = field(init=False)
    """FLOPs of such a step on each layer."""
    tied: int = field(init=False)
    """That the first and the last layer share."""
    _base: dict[str, list[float]] = field(default_factory=dict)
    traced: dict[tuple[str, bool], tuple[LayerActivations, ...] | None] = field(
        default_factory=dict
    )
    """What is kept of each layer of a model whose layers were traced, by precision, and whether in
    a stage that begins with the model; None where they cannot be."""

    def __post_init__(self) -> None:
        """Raises `SpecError` where the model cannot be built, or not be cut as the run says."""
        self.plan = model_plan(self.spec)
        layers = self.plan.layers
        self.kinds = layer_kinds(layers)
        self.trained = self._by_kind(lambda x: num_parameters(describe_parameters([x])))
        if self.spec.optimizer.kind == "muon":
            check_matrices(layers)
            self.muon = self._by_kind(lambda x: matrix_parameters([x]))
            self.orthogonal = self._by_kind(lambda x: orthogonal_flops([x]))
        else:
            self.muon, self.orthogonal = [0] * len(layers), [0.0] * len(layers)
        self.tied = sum(self.trained) - num_parameters(describe_parameters(layers))

    def _by_kind(self, value: Callable[[LayerBuilder], T]) -> list[T]:
        """Of each layer; asked for once a kind, for layers are built for it."""
        first = dict(zip(self.kinds, self.plan.layers, strict=True))
        values = {kind: value(layer) for kind, layer in first.items()}
        return [values[kind] for kind in self.kinds]

    def with_spec(self, spec: RunSpec) -> StageTable:
        """Of the same model with another `[pipeline]` or `[sync]`, without building it again."""
        other = copy(self)
        other.spec, other.traced = spec, dict(self.traced)
        if spec.pipeline.microbatch != self.spec.pipeline.microbatch:
            other.traced.clear()
        return other

    def job(self) -> Job:
        """The run as the planner takes it."""
        spec = self.spec
        sync, pipeline = spec.sync, spec.pipeline
        return Job(
            layers=tuple(
                self._layer(*about)
                for about in zip(
                    self.plan.layers, self.trained, self.muon, self.orthogonal, strict=True
                )
            ),
            tokens=max(1, spec.sequence_length) if self.plan.is_sequence else 1,
            microbatch=pipeline.microbatch,
            global_batch=pipeline.global_batch,
            update=Update(sync.mode, sync.codec, sync.replication, sync.local_steps),
            memory=self.held,
            backward=1.0 if self.plan.has_base else 2.0,
            last_layers=max(1, self.plan.whole_end),
            tied=self.tied,
        )

    def _layer(self, layer: LayerBuilder, trained: int, muon: int, orthogonal: float) -> Layer:
        codec, shape = boundary_codec(self.spec.pipeline.codec), layer.output_shape
        is_sequence = self.plan.is_sequence and len(shape) > 1
        rows, row = (shape[0], shape[1:]) if is_sequence else (1, shape)
        numbers = 1
        for n in row:
            numbers *= n
        tokens = TOKEN_BYTES * rows if self.spec.model.subspace else 0
        return Layer(
            flops=layer.cost,
            parameters=trained,
            activation_bytes=rows * row_bytes(codec.activations, numbers) + tokens,
            gradient_bytes=rows * row_bytes(codec.gradients, numbers),
            muon_parameters=muon,
            muon_flops=orthogonal,
        )

    def needs(self, first: int, end: int, precision: Precision) -> StageNeeds:
        """Of a stage that has these layers."""
        spec, sync = self.spec, self.spec.sync
        whole = end - first == len(self.plan.layers)
        trained = sum(self.trained[first:end]) - self.tied * whole
        how = precision, sync.mode, sync.codec, sum(self.muon[first:end])
        state = state_bytes(trained, 1, sync.replication, *how)
        if precision.name not in self._base:
            self._base[precision.name] = self._by_kind(
                lambda x: layers_base_bytes(spec, self.plan, [x], precision)
            )
        base = sum(self._base[precision.name][first:end]) + fixed_bytes(spec.model)
        return StageNeeds(*state, base, self._activations(first, end, precision))

    def _activations(self, first: int, end: int, precision: Precision) -> Activations | None:
        is_first, is_last = first == 0, end == len(self.plan.layers)
        if is_of_formula(self.spec):
            names = [x.name for x in self.plan.layers[first:end]]
            return llama_activations(self.spec, names, precision, is_first, is_last)
        key = precision.name, is_first
        if key not in self.traced:
            try:
                self.traced[key] = traced_layers(
                    self.spec, self.plan, precision, self.kinds, begins=is_first
                )
            except Exception:  # whatever a custom layer's author does there
                self.traced[key] = None
        traced = self.traced[key]
        return None if traced is None else joined(traced[first:end], precision, is_last=is_last)

    def held(self, first: int, end: int, num_stages: int, memory: object) -> Held | None:
        """What the stage takes of a machine as it would choose by itself; None where it does not
        fit. For `Job.memory`."""
        found = self.needed(first, end, num_stages, memory)
        assert isinstance(memory, MachineMemory)
        host = found.host_bytes if memory.is_apart else 0.0
        fits = found.device_bytes <= memory.device_bytes and host <= memory.host_bytes
        return found if fits else None

    def needed(self, first: int, end: int, num_stages: int, memory: object) -> Held:
        """The same, whether it fits or not."""
        assert isinstance(memory, MachineMemory)
        is_apart, pipeline = memory.is_apart, self.spec.pipeline
        needs = self.needs(first, end, PRECISIONS[memory.precision])
        policies: tuple[ActivationsName, ...] = POLICIES if is_apart else POLICIES[:-1]
        if pipeline.activations != "auto":
            policies = (pipeline.activations,)
        stages = pipeline.model_copy(update={"num_stages": num_stages})
        expected = expected_in_flight(self.spec.model_copy(update={"pipeline": stages}))
        store = DISK if self.spec.sync.optimizer_store == DISK else HOST
        place = AUTO if is_apart else store
        chosen = choose_memory(
            needs,
            place,
            free=memory.device_bytes,
            policies=policies,
            in_flight=expected,
            is_apart=is_apart,
            may_be_on_device=is_apart and self.spec.sync.mode == ZERO,
        )
        policy, in_flight = chosen.choice.activations, min(expected, chosen.choice.max_in_flight)
        if expected >= MIN_IN_FLIGHT:
            in_flight = max(MIN_IN_FLIGHT, in_flight)
        kept = (0, 0) if needs.activations is None else needs.activations.held(policy, in_flight)
        device, host = needs.on_device(place, is_apart=is_apart) + kept[0], float(kept[1])
        if chosen.is_on_device:
            device += needs.updating
        elif is_apart:
            parameters = needs.gradients / PRECISIONS[memory.precision].gradients
            host += 2 * FP32_BYTES * parameters + needs.exchange
            host += needs.optimizer if store == HOST else 0.0
        return Held(device, host, policy, in_flight, policy in ("blocks", "recompute"))
