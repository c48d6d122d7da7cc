"""What a plan is made for: layers, machines with their links, and how the run trains."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

from swarmnet.protocol.sync_modes import LEAST_QUORUM


@dataclass(frozen=True, slots=True)
class Layer:
    """One of the model, in order."""

    flops: float
    """Of its forward pass over one sample; or its measured seconds, in a unit that machines'
    `flops_per_s` share."""
    parameters: int
    """That are trained."""
    activation_bytes: float
    """On the wire, of one sample, where a stage ends with this layer: coded."""
    gradient_bytes: float
    """Likewise, of the gradient that comes back."""
    muon_parameters: int = 0
    """Of the parameters, those that Muon steps."""
    muon_flops: float = 0.0
    """Of such a step, in fp32."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One that serves a stage."""

    name: str
    flops_per_s: float
    """That training reaches there."""
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    """Of its way to any other, one way."""
    hours: float = 24.0
    """A day."""
    microbatch_s: float = 0.0
    """That each microbatch takes beside what its samples do."""
    update_parameters_per_s: float = float("inf")
    """That the end of a round steps and codes there, where the stage has no other replica."""
    shared_parameters_per_s: float = float("inf")
    """Where it has others: with what is coded for them, decoded and summed."""
    shard_s: float = 0.0
    """That each shard of a stage takes there at the end of a round, beside its numbers, where the
    stage has no other replica."""
    shared_shard_s: float = 0.0
    """Where it has others."""
    exact_flops_per_s: float = float("inf")
    """That products of matrices in fp32 reach there."""
    memory: Hashable = None
    """What `Job.memory` knows it by."""
    house: str = ""
    """Machines of one house share its link, of which each has an even part here, and reach each
    other by a fast one; empty: of none."""
    sharing: int = 1
    """Machines of the house, whatever they do."""
    has_key: bool = False
    """The house is a household: where a round has an exchange, one machine gives and takes for
    all."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a stage would take of a machine that it fits into."""

    device_bytes: float
    host_bytes: float
    """0 where the device computes in the host's memory."""
    activations: str
    """The policy that the machine would choose by itself."""
    in_flight: int
    """Microbatches that it would let in."""
    computes_again: bool
    """Forward, in the backward pass."""
    splits: bool = False
    """Of a backward pass the gradient of the inputs goes on at once, and those of weights are made
    when nothing else is to be done (`owed`)."""
    ranks: int = 1
    """Of the peer, each with a card of its own; memory is that of one card."""
    local: str = ""
    """What ranks divide: `tensor` or `fsdp`; empty for one rank."""
    weights: str = "device"
    """Where they lie: there, or on the `host` or its `disk`, from where each layer's come."""
    part: float = 1.0
    """Of the machine's FLOP/s that are at work."""
    between_s: float = 0.0
    """Of a sample, that ranks exchange activations, or these go to the host and come back: a pass
    waits for it."""
    moved_s: float = 0.0
    """Of a microbatch, that weights come and gradients go, beside the computing."""

    def passes(self, backward: float) -> float:
        """A pass forth and back, in forward passes; `backward` as in `Job`."""
        return 1 + backward + self.computes_again

    def computing_s(self, forward_flops: float, backward: float, flops_per_s: float) -> float:
        """Seconds of such a pass, without what is moved for it."""
        return self.passes(backward) * forward_flops / (flops_per_s * self.part)


Fits: TypeAlias = Callable[[int, int, int, Hashable], Held | None]
"""`(first layer, end, stages of the run, memory of a machine)`: None where it does not fit."""


@dataclass(frozen=True, slots=True)
class Update:
    """How replicas of a stage stay one: `[sync]`."""

    mode: str
    codec: str
    replication: int
    local_steps: int
    majority: int = LEAST_QUORUM
    """Contributions that the rule of aggregation needs to find a wrong one among them."""
    shard_parameters: int = 0
    """Of a shard; 0 where the program chooses."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run, but for its machines and its cut."""

    layers: tuple[Layer, ...]
    tokens: int
    """Of a sample."""
    microbatch: int
    """Samples."""
    global_batch: int
    """Samples."""
    update: Update
    memory: Fits
    backward: float = 2.0
    """FLOPs of a backward pass over those of its forward pass. 1 where matrices are not trained."""
    last_layers: int = 1
    """That cannot be cut apart, at the end."""
    tied: int = 0
    """Parameters that the first and the last layer share, and one stage has once."""
    splits_pay: bool = False
    """Rounds are shorter where gradients of weights are left for later (`Held.splits`). Peers in
    virtual time showed it, and real processes nothing beyond the noise."""

    @property
    def num_microbatches(self) -> int:
        return -(-self.global_batch // self.microbatch)


Cut: TypeAlias = tuple[tuple[int, int], ...]
"""First layer and end of each stage."""
