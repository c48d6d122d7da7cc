"""A model's layers as the planner sees them, and what any run of them takes of a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swarmnet.protocol.codecs import TOKEN_BYTES, boundary_codec, row_bytes
from swarmnet.protocol.planning.model import Held, Job, Layer, Machine, Update
from swarmnet.protocol.sync_modes import ZERO
from swarmnet.protocol.update.ownership import majority
from swarmnet.spec import RunSpec
from swarmnet.training.computing import KEEP_NO_WEIGHTS, ActivationsName, WeightsPlace
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
    FP16,
    FP32_BYTES,
    FSDP,
    PRECISIONS,
    Activations,
    Precision,
    element_bytes,
    fixed_bytes,
    host_weights_bytes,
    is_of_formula,
    layers_base_bytes,
    layers_streamed_bytes,
    llama_activations,
    of_ranks,
    of_streamed,
    state_bytes,
)
from swarmnet.training.memory.stage_needs import (
    AUTO,
    DEVICE,
    DISK,
    HOST,
    StageNeeds,
    choose_memory,
)
from swarmnet.training.models.base import (
    LayerBuilder,
    ModelPlan,
    describe_parameters,
    num_parameters,
)
from swarmnet.training.models.lora import packing_of
from swarmnet.training.models.matrices import (
    check_matrices,
    matrix_parameters,
    orthogonal_flops,
)
from swarmnet.training.models.registry import model_plan, muon_parts

T = TypeVar("T")
SUMS_OF_A_BLOCK = 2
"""Over all ranks, in either pass: after attention, and after the feed-forward layer."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Of one machine, and how it computes."""

    device_bytes: float
    """Free: of the GPU, or where there is none of the machine."""
    host_bytes: float
    """Free main memory beside a GPU; the same again where there is none."""
    is_apart: bool
    precision: str
    cards: int = 1
    """With so much memory each."""
    ranks: tuple[tuple[int, str], ...] = ((1, ""),)
    """Numbers of ranks that a peer could have there with this model, and what they divide: as
    `Held.local`."""
    flops_per_s: float = 1e12
    """Of all cards, that training reaches."""
    between_bytes_per_s: float = math.inf
    """From a card to another."""
    host_bytes_per_s: float = math.inf
    """From main memory to a card."""
    disk_bytes_per_s: float = math.inf


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
    traced: dict[tuple[str, bool, int], tuple[LayerActivations, ...] | None] = field(
        default_factory=dict
    )
    """What is kept of each layer of a model whose layers were traced, by precision, whether in a
    stage that begins with the model, and microbatch; None where they cannot be."""
    _alike: tuple[int, ...] = field(init=False)
    """Of each layer, the first one that takes as much in all that is asked here."""
    _held: dict[Hashable, Held | None] = field(default_factory=dict)
    """What was found before, for all specs of the model: searches ask for the same again."""

    def __post_init__(self) -> None:
        """Raises `SpecError` where the model cannot be built, or not be cut as the run says."""
        self.plan = model_plan(self.spec)
        layers = self.plan.layers
        self.kinds = layer_kinds(layers)
        self.trained = self._by_kind(lambda x: num_parameters(describe_parameters([x])))
        if self.spec.optimizer.kind == "muon":
            parts = muon_parts(self.spec, layers)
            check_matrices(layers, parts, self.spec.sync)
            self.muon = self._by_kind(lambda x: matrix_parameters([x], parts))
            self.orthogonal = self._by_kind(lambda x: orthogonal_flops([x], parts))
        else:
            self.muon, self.orthogonal = [0] * len(layers), [0.0] * len(layers)
        self.tied = sum(self.trained) - num_parameters(describe_parameters(layers))
        about = [(k, x.cost, x.is_block) for k, x in zip(self.kinds, layers, strict=True)]
        first = {one: i for i, one in reversed(list(enumerate(about)))}
        self._alike = tuple(first[one] for one in about)

    def _by_kind(self, value: Callable[[LayerBuilder], T]) -> list[T]:
        """Of each layer; asked for once a kind, for layers are built for it."""
        first = dict(zip(self.kinds, self.plan.layers, strict=True))
        values = {kind: value(layer) for kind, layer in first.items()}
        return [values[kind] for kind in self.kinds]

    def with_spec(self, spec: RunSpec) -> StageTable:
        """Of the same model with another `[pipeline]` or `[sync]`, without building it again."""
        other = copy(self)
        other.spec = spec
        return other

    @property
    def _backward(self) -> float:
        """As `Job.backward`."""
        return 1.0 if self.plan.has_base else 2.0

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
            update=Update(
                sync.mode,
                sync.update_codec,
                sync.replication,
                sync.local_steps,
                majority(sync.aggregation),
                sync.shard_parameters,
            ),
            memory=self.held,
            backward=self._backward,
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

    def needs(
        self, first: int, end: int, precision: Precision, *, masked: bool = False
    ) -> StageNeeds:
        """Of a stage that has these layers. `masked`: as `stage_activations`."""
        spec, sync = self.spec, self.spec.sync
        whole = end - first == len(self.plan.layers)
        trained = sum(self.trained[first:end]) - self.tied * whole
        how = precision, sync.mode, sync.update_codec, sum(self.muon[first:end])
        state = state_bytes(trained, 1, sync.replication, *how)
        if precision.name not in self._base:
            self._base[precision.name] = self._by_kind(
                lambda x: layers_base_bytes(spec, self.plan, [x], precision)
            )
        base = sum(self._base[precision.name][first:end]) + fixed_bytes(spec.model)
        return StageNeeds(*state, base, self._activations(first, end, precision, masked))

    def _activations(
        self, first: int, end: int, precision: Precision, masked: bool
    ) -> Activations | None:
        is_first, is_last = first == 0, end == len(self.plan.layers)
        if is_of_formula(self.spec):
            names = [x.name for x in self.plan.layers[first:end]]
            about = names, precision, is_first, is_last
            return llama_activations(self.spec, *about, masked=masked)
        key = precision.name, is_first, self.spec.pipeline.microbatch
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
        """What the stage takes of a machine as it would be quickest there; None where it does not
        fit. Weights lie elsewhere than on the device only where there is no other way. For
        `Job.memory`."""
        assert isinstance(memory, MachineMemory)
        pipeline = self.spec.pipeline
        key = (
            self._alike[first:end],
            (first == 0, end == len(self._alike)),
            self._expected(num_stages),
            memory,
            (pipeline.microbatch, pipeline.activations, self.spec.sync.model_dump_json()),
        )
        if key not in self._held:
            self._held[key] = self._found(first, end, num_stages, memory)
        return self._held[key]

    def _expected(self, num_stages: int) -> int:
        """As `expected_in_flight`, of a run of so many stages."""
        stages = self.spec.pipeline.model_copy(update={"num_stages": num_stages})
        return expected_in_flight(self.spec.model_copy(update={"pipeline": stages}))

    def _found(self, first: int, end: int, num_stages: int, memory: MachineMemory) -> Held | None:
        for ways in (
            self._resident(first, end, num_stages, memory),
            self._streamed(first, end, num_stages, memory),
        ):
            fits = [x for x in ways if _lacks(x, memory) <= 1]
            if fits:
                return min(fits, key=lambda x: self._sample_s(x, first, end, memory))
        return None

    def needed(self, first: int, end: int, num_stages: int, memory: object) -> Held:
        """The same; where nothing fits, the way that lacks least."""
        assert isinstance(memory, MachineMemory)
        about = first, end, num_stages, memory
        ways = (*self._resident(*about), *self._streamed(*about))
        return self.held(*about) or min(ways, key=lambda x: _lacks(x, memory))

    def _resident(
        self, first: int, end: int, num_stages: int, memory: MachineMemory
    ) -> Iterator[Held]:
        """The ways in which weights are on the device or devices."""
        microbatch = self.spec.pipeline.microbatch
        for num_ranks, local in memory.ranks:
            if local != FSDP or microbatch % num_ranks == 0:
                yield self._way(first, end, num_stages, memory, num_ranks, local, "device")

    def _streamed(
        self, first: int, end: int, num_stages: int, memory: MachineMemory
    ) -> Iterator[Held]:
        """Those in which they come layer by layer, as far as a peer allows it."""
        spec = self.spec
        if (
            spec.pipeline.activations in (AUTO, *KEEP_NO_WEIGHTS)
            and memory.precision != FP16.name
            and not packing_of(spec.lora)
        ):
            places: tuple[WeightsPlace, ...] = ("host", "disk") if memory.is_apart else ("disk",)
            for place in places:
                yield self._way(first, end, num_stages, memory, 1, "", place)

    def _way(
        self,
        first: int,
        end: int,
        num_stages: int,
        memory: MachineMemory,
        num_ranks: int,
        local: str,
        weights: WeightsPlace,
    ) -> Held:
        """One of them."""
        is_apart, pipeline = memory.is_apart, self.spec.pipeline
        precision, is_sharded = PRECISIONS[memory.precision], local == FSDP
        needs = self.needs(first, end, precision, masked=is_apart)
        parameters = needs.gradients / precision.gradients
        base, trained = self._base[precision.name][first:end], self.trained[first:end]
        on_device, gradients = layers_streamed_bytes(trained, base, precision)
        store = DISK if self.spec.sync.optimizer_store == DISK else HOST
        place = AUTO if is_apart else store
        policies: tuple[ActivationsName, ...] = POLICIES if is_apart else POLICIES[:-1]
        if pipeline.activations != "auto":
            policies = (pipeline.activations,)
        if weights != DEVICE:
            policies, place = tuple(p for p in policies if p in KEEP_NO_WEIGHTS), store
            whole_base = needs.base
            needs = replace(needs, weights=on_device, gradients=gradients, base=0.0)
        elif is_sharded:  # while a layer computes, it is whole at every rank
            policies = ("recompute",)
            needs = replace(needs, base=needs.base + num_ranks * (on_device + gradients))
        if needs.activations is not None:
            kept_of = of_ranks(needs.activations, num_ranks, local, precision)
            if weights != DEVICE:
                kept_of = of_streamed(kept_of)
            needs = replace(needs, activations=kept_of)
        expected = self._expected(num_stages)
        chosen = choose_memory(
            needs,
            place,
            free=memory.device_bytes,
            policies=policies,
            in_flight=expected,
            is_apart=is_apart,
            may_be_on_device=is_apart and num_ranks == 1 and self.spec.sync.mode == ZERO,
            num_devices=num_ranks,
        )
        policy, in_flight = chosen.choice.activations, min(expected, chosen.choice.max_in_flight)
        if expected >= MIN_IN_FLIGHT:
            in_flight = max(MIN_IN_FLIGHT, in_flight)
        kept = (0, 0) if needs.activations is None else needs.activations.held(policy, in_flight)
        device, host = needs.on_device(place, is_apart=is_apart) + kept[0], float(kept[1])
        if chosen.is_on_device:
            device += needs.updating
        elif is_apart:
            host += needs.exchange + (needs.optimizer if store == HOST else 0.0)
            if weights == DEVICE:
                host += 2 * FP32_BYTES * parameters
            elif weights == HOST:
                host += host_weights_bytes(int(parameters), whole_base, precision)
        computes_again = policy in ("blocks", "recompute")
        between_s = self._between_s(first, end, memory, num_ranks, local, computes_again)
        if policy == "offload" and needs.activations is not None:
            rate = memory.host_bytes_per_s if is_apart else memory.disk_bytes_per_s
            between_s += 2 * needs.activations.graph / num_ranks / pipeline.microbatch / rate
        return Held(
            device / num_ranks,
            host,
            policy,
            in_flight,
            computes_again,
            splits=self._splits(first, memory, num_ranks, policy),
            ranks=num_ranks,
            local=local,
            weights=weights,
            part=num_ranks / memory.cards,
            between_s=between_s,
            moved_s=self._moved_s(first, end, memory, num_ranks, local, weights),
        )

    def _splits(self, first: int, memory: MachineMemory, num_ranks: int, policy: str) -> bool:
        """As `Held.splits`: where `Stage` may owe gradients of weights."""
        is_plain = num_ranks == 1 and not memory.is_apart and memory.precision != FP16.name
        is_whole = self.plan.has_base or policy != "keep" or self.spec.sync.mode != ZERO
        return first > 0 and is_plain and not is_whole

    def _between_s(
        self,
        first: int,
        end: int,
        memory: MachineMemory,
        num_ranks: int,
        local: str,
        computes_again: bool,
    ) -> float:
        """As `Held.between_s`: a block's two sums over all ranks forward, and as many backward, in
        a ring."""
        if num_ranks == 1 or local == FSDP:
            return 0.0
        blocks = (x for x in self.plan.layers[first:end] if x.is_block)
        numbers = sum(math.prod(x.output_shape) for x in blocks)
        sums = SUMS_OF_A_BLOCK * (2 + computes_again) * element_bytes(PRECISIONS[memory.precision])
        return sums * numbers * 2 * (num_ranks - 1) / num_ranks / memory.between_bytes_per_s

    def _moved_s(
        self,
        first: int,
        end: int,
        memory: MachineMemory,
        num_ranks: int,
        local: str,
        weights: WeightsPlace,
    ) -> float:
        """As `Held.moved_s`. Weights come forward and backward, and where ranks have parts of them
        once more between; gradients go once."""
        precision = PRECISIONS[memory.precision]
        own = element_bytes(precision) * sum(self.trained[first:end])
        whole = own + sum(self._base[precision.name][first:end])
        if local == FSDP:
            moved = 3 * whole + FP32_BYTES * sum(self.trained[first:end])
            return (num_ranks - 1) / num_ranks * moved / memory.between_bytes_per_s
        if weights == DEVICE:
            return 0.0
        rates = (memory.host_bytes_per_s,) if memory.is_apart else ()
        if weights == DISK:
            rates = (*rates, memory.disk_bytes_per_s)
        return (2 * whole + own) / min(rates)

    def _sample_s(self, held: Held, first: int, end: int, memory: MachineMemory) -> float:
        """Of a pass forth and back, as `Costs` has it; what other layers take is the same."""
        flops = sum(x.cost for x in self.plan.layers[first:end])
        computing_s = held.computing_s(flops, self._backward, memory.flops_per_s)
        return max(computing_s + held.between_s, held.moved_s / self.spec.pipeline.microbatch)


def _lacks(held: Held, memory: MachineMemory) -> float:
    """What is needed over what is there, of the memory of which more is lacking."""
    host = held.host_bytes / memory.host_bytes if memory.is_apart else 0.0
    return max(held.device_bytes / memory.device_bytes, host)
