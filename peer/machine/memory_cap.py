"""`--max-memory`: what it leaves room for. The memory of a peer is that of its process tree: the
interpreter with torch, the network daemon, other ranks, and the stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from swarmnet.protocol.resource_limits import size_text
from swarmnet.spec import RunSpec

MIB = float(1 << 20)
WORKING_COPIES_BYTES = 8
"""A parameter, beside its weight, gradient and optimizer state: the next round's parameters, and a
shard of each as it is summed, sent and received."""
KEPT_FREE_MICROBATCHES = 4
"""That each stage keeps room for, whatever texts the model writes: training goes first."""
UNTIL_LARGEST = 1_000_000
"""More microbatches are no bound."""


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Of one replica of a stage, in bytes."""

    state: float
    microbatch: float | None
    """Of each microbatch inside it; None for a custom model."""


def stage_needs(spec: RunSpec) -> list[StageNeed]:
    """Of every stage, where this peer is its only replica. Raises `SpecError`."""
    from swarmnet.training.memory.activation_choice import known_activations
    from swarmnet.training.memory.plan import FP32_BYTES, plan_memory

    model, pipeline = spec.model, spec.pipeline
    width = model.hidden_size or int(model.config.get("hidden_size", 0))
    border = pipeline.microbatch * spec.sequence_length * width
    known = None if model.kind == "custom" else known_activations
    needs = []
    rows = [plan_memory(spec, num_replicas=1, in_flight=n, known=known) for n in (1, 2)]
    for one, two in zip(*rows, strict=True):
        each = None
        state = one.state + WORKING_COPIES_BYTES * one.num_parameters
        if one.activations is not None and two.activations is not None:
            # Its input and output with their gradients are kept for whoever may ask again.
            each = two.activations - one.activations + 4.0 * FP32_BYTES * border
            state += one.activations - (two.activations - one.activations)
        needs.append(StageNeed(state, each))
    return needs


@dataclass(slots=True)
class MemoryCap:
    """The cap against what is needed."""

    needs: list[StageNeed]
    base_bytes: float
    """Of the process tree before there is a stage."""
    cap_bytes: float | None = None

    def cap(self, num_bytes: float | None) -> None:
        """So much may be taken from now on; None: no limit."""
        self.cap_bytes = num_bytes

    def unfit(self, stage_index: int, beside: Sequence[int] = ()) -> str:
        """Why a stage does not fit; empty where it does. `beside`: stages that the machine serves
        too."""
        if self.cap_bytes is None:
            return ""
        needs = [self.needs[k] for k in (stage_index, *beside)]
        total = self.base_bytes + sum(need.state + (need.microbatch or 0.0) for need in needs)
        if total <= self.cap_bytes:
            return ""
        others = f" beside {len(beside)} more" if beside else ""
        return (
            f"stage {stage_index}{others} takes {total / MIB:,.0f} MiB with one microbatch in "
            f"flight, and this peer's --max-memory, which is kept in its state folder, allows "
            f"{self.cap_bytes / MIB:,.0f} MiB ({size_text(self.cap_bytes)}); allow more "
            "(--max-memory none for no limit), or join a smaller run"
        )

    def max_open_steps(
        self, stage_index: int, beside: Sequence[int] = (), text_bytes: float = 0.0
    ) -> int | None:
        """Microbatches that may be inside the stage; None = no bound. Stages `beside` it get as
        much of what is left. `text_bytes`: what texts that the model writes take."""
        each = self.needs[stage_index].microbatch
        if self.cap_bytes is None or not each:
            return None
        states = sum(self.needs[k].state for k in (stage_index, *beside))
        room = (self.cap_bytes - self.base_bytes - states - text_bytes) / (1 + len(beside))
        return max(1, min(int(room / each), UNTIL_LARGEST))

    def text_room_bytes(self, stages: Sequence[int]) -> float:
        """For texts that the model writes at these stages: copies of parameters
        (`training.memory.plan.copy_bytes`), keys and values."""
        if self.cap_bytes is None:
            return float("inf")
        needs = [self.needs[k] for k in stages]
        training = sum(
            need.state + KEPT_FREE_MICROBATCHES * (need.microbatch or 0.0) for need in needs
        )
        return max(0.0, self.cap_bytes - self.base_bytes - training)

    @property
    def room_bytes(self) -> float:
        """For stages; infinite where there is no cap."""
        return float("inf") if self.cap_bytes is None else self.cap_bytes - self.base_bytes

    def is_full(self, used_bytes: float) -> bool:
        """Is all taken that may be taken?"""
        return self.cap_bytes is not None and used_bytes >= self.cap_bytes


def tree_bytes(process: psutil.Process) -> float:
    """Resident memory of a process and all below it."""
    total = 0.0
    for each in [process, *_children(process)]:
        try:
            total += each.memory_info().rss
        except psutil.Error:
            continue
    return total


def tree_cpu_s(process: psutil.Process) -> dict[int, float]:
    """By pid, CPU seconds of a process and all below it."""
    seconds = {}
    for each in [process, *_children(process)]:
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        seconds[each.pid] = times.user + times.system
    return seconds


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []
