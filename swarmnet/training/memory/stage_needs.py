"""What a machine's memory has to hold of a stage, and what it would choose for it: the peer that
joins asks, and so does who plans a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmnet.training.computing import ActivationsName
from swarmnet.training.memory.activation_choice import (
    FREE_PART,
    Choice,
    choose_activations,
)
from swarmnet.training.memory.plan import Activations

AUTO, DEVICE, HOST, DISK = "auto", "device", "host", "disk"
"""Where optimizer state lies."""


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """Of one replica of a stage, in bytes, as if it were alone: all optimizer state is its own."""

    weights: float
    gradients: float
    optimizer: float
    exchange: float
    base: float
    activations: Activations | None
    """Of a microbatch; None where nobody knows."""

    @property
    def updating(self) -> float:
        return self.exchange + self.optimizer

    def of_rank(self, part: float, part_of_base: float) -> StageNeeds:
        """Of a rank with a device of its own, which computes with these parts of the stage."""
        return replace(
            self,
            weights=part * self.weights,
            gradients=part * self.gradients,
            base=part_of_base * self.base,
        )

    def of_ranks(
        self, num_ranks: int, parameters: float, part: float = 1.0, part_of_base: float = 1.0
    ) -> StageNeeds:
        """Of all ranks together, in one memory, where each computes with the whole stage, or these
        parts of it, and with a part of each microbatch. `parameters`: bytes of those in fp32, which
        all map. The activations stay those of one rank."""
        copies = self.weights - parameters
        return replace(
            self,
            weights=parameters + num_ranks * part * copies,
            gradients=num_ranks * part * self.gradients,
            base=num_ranks * part_of_base * self.base,
        )

    def on_device(self, place: str, *, is_apart: bool) -> float:
        """All but activations, where that is the device's memory. `place`: of the optimizer state,
        other than `AUTO` where the device has no memory of its own."""
        held = self.weights + self.gradients + self.base
        if not is_apart:
            held += self.exchange + (self.optimizer if place == HOST else 0)
        return held + (self.updating if place == DEVICE else 0)


@dataclass(frozen=True, slots=True)
class Chosen:
    """How a machine would keep a stage."""

    choice: Choice
    is_on_device: bool
    """The optimizer state."""
    left: float
    """Bytes for activations."""


def choose_memory(
    needs: StageNeeds,
    place: str,
    *,
    free: float,
    policies: Sequence[ActivationsName],
    in_flight: int,
    is_apart: bool,
    may_be_on_device: bool,
    num_devices: int = 1,
    num_parts: int = 1,
) -> Chosen:
    """The policy for activations, and whether the optimizer state goes to the device too: with
    `AUTO` where activations need not change for it. `free`: bytes of a device, of which there are
    `num_devices`, each with a part of the stage; `is_apart`: its memory is not the host's;
    `may_be_on_device`: the run makes its updates there. `num_parts`: ranks that have as many
    activations as `needs` tells, in this memory."""
    room = FREE_PART * free * (num_devices if is_apart else 1)
    left = max(0.0, room - needs.on_device(place, is_apart=is_apart)) / num_parts

    def choice_of(num_bytes: float) -> Choice:
        return choose_activations(
            needs.activations, free_bytes=num_bytes, in_flight=in_flight, policies=policies
        )

    choice, is_there = choice_of(left), place == DEVICE
    if place == AUTO and may_be_on_device and needs.updating < left:
        beside = choice_of(left - needs.updating)
        has_room = beside.max_in_flight >= min(choice.max_in_flight, in_flight)
        is_there = has_room and beside.activations == choice.activations
        choice = beside if is_there else choice
        left -= needs.updating if is_there else 0
    return Chosen(choice, is_there, left)
