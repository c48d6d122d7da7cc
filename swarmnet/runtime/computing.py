"""How this machine computes the stage that it is to serve: what its options say, else what the run
says, else what its memory allows. Said to the person in one line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swarmnet.errors import UsageError, UserError
from swarmnet.plurals import counted
from swarmnet.protocol.resource_limits import parse_size
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.text import size
from swarmnet.spec import RunSpec
from swarmnet.system import free_bytes_in_container

if TYPE_CHECKING:
    import torch

    from swarmnet.training.computing import Computing

OFFLOAD_FOLDER = "activations"
"""In the state folder."""
AUTO, DEVICE, HOST, DISK = "auto", "device", "host", "disk"
PLACES = {DEVICE: "in the device's memory", HOST: "in the host's memory", DISK: "in files"}
"""Of optimizer state, by `--optimizer-memory`."""


def free_bytes_of(device: torch.device | str) -> int:
    """Bytes that are free: of the GPU, or of this machine or the container that this runs in."""
    import psutil
    import torch

    import swarmnet.training.accelerators as accelerators

    device = torch.device(device)
    of_device, here = accelerators.free_bytes(device), psutil.virtual_memory().available
    if of_device is not None and not accelerators.shares_memory(device):
        return of_device
    return min(here, free_bytes_in_container(), *([] if of_device is None else [of_device]))


def bound_devices(options: PeerOptions, devices: Sequence[str]) -> int:
    """Holds this process to `--max-device-memory`; returns its bytes, 0 where it is not given.
    Raises `UsageError`."""
    if not options.max_device_memory:
        return 0
    import torch

    import swarmnet.training.accelerators as accelerators

    try:
        most = int(parse_size(options.max_device_memory))
    except ValueError as e:
        raise UsageError(f"--max-device-memory {e}") from None
    if devices[0] == accelerators.CPU:
        raise UsageError(
            "--max-device-memory: there is no GPU at work here; --max-memory bounds what a CPU "
            "computes with"
        )
    for device in devices:
        accelerators.bound_memory(torch.device(device), most)
    return most


def choose_computing(
    spec: RunSpec, options: PeerOptions, stage: int, devices: list[str]
) -> tuple[Computing, str]:
    """The choice, and the line. `spec` has this machine's builder. Raises `UsageError`; `UserError`
    where the stage does not fit into the memory that is free: before any of it is built."""
    import torch

    from swarmnet.protocol.sync_modes import ZERO
    from swarmnet.training.accelerators import shares_memory
    from swarmnet.training.attention.packed import masks_all_scores
    from swarmnet.training.computing import (
        DTYPES,
        KEEP_NO_WEIGHTS,
        ActivationsName,
        Computing,
        WeightsPlace,
        choose_precision,
    )
    from swarmnet.training.memory.activation_choice import (
        POLICIES,
        expected_in_flight,
        known_activations,
        least_bytes,
    )
    from swarmnet.training.memory.plan import (
        EXPERTS,
        FP32_BYTES,
        PRECISIONS,
        SEQUENCES,
        base_bytes,
        held_parts,
        host_weights_bytes,
        of_ranks,
        of_streamed,
        state_bytes,
        streamed_bytes,
    )
    from swarmnet.training.memory.stage_needs import Chosen, StageNeeds, choose_memory
    from swarmnet.training.models.registry import stage_matrix_parameters, stage_parameter_ranges

    device = torch.device(devices[0])
    num_sharing = min(options.num_rows, len(devices))
    row_size = len(devices) // num_sharing
    shared = EXPERTS if options.shares_experts else SEQUENCES
    is_sharded = len(devices) > 1 and options.local == "fsdp"
    check_options(spec, options, devices)
    most = bound_devices(options, devices)
    precision = choose_precision(spec, options.precision, device)
    numbers = PRECISIONS[precision]
    wanted = spec.pipeline.activations if options.activations == "auto" else options.activations
    if is_sharded:  # parts of a layer are gathered for each pass: nothing else is possible
        wanted = "recompute"
    policies: tuple[ActivationsName, ...]
    if wanted != "auto":
        policies = (wanted,)
    elif not shares_memory(device):
        policies = POLICIES
    else:  # a disk is so slow that it should be somebody's wish
        policies = POLICIES[:-1]
    ranges = stage_parameter_ranges(spec, stage)
    base = base_bytes(spec, stage, numbers)
    has_documents = spec.model.kind == "llama" and spec.data.document_mask
    masked = has_documents and masks_all_scores(device, DTYPES[precision], spec.model.head_size)
    activations = known_activations(spec, stage, numbers, num_sharing, shared, masked=masked)
    if activations is not None:
        activations = of_ranks(activations, row_size, options.local, numbers)
    needs = StageNeeds(
        *state_bytes(
            ranges[-1].stop,
            1,
            spec.sync.replication,
            numbers,
            spec.sync.mode,
            spec.sync.update_codec,
            stage_matrix_parameters(spec, stage),
        ),
        base,
        activations,
    )
    is_apart = not shares_memory(device)
    parts = held_parts(spec, stage, num_sharing) if options.shares_experts else (1.0, 1.0)
    if num_sharing > 1 and not is_apart:  # the ranks' gradients are in one memory
        needs = needs.of_ranks(num_sharing, FP32_BYTES * ranges[-1].stop, *parts)
    elif is_apart:
        needs = needs.of_rank(*parts)
    is_left = options.optimizer_memory == AUTO and not is_apart
    place = host_place(spec, options) if is_left else options.optimizer_memory
    smaller = _smallest(devices)
    free = max(0, free_bytes_of(device) - smaller.by)
    # Ranks of a row with devices of their own share the stage. Each row has all of it, or all but
    # some experts. Those on CPUs share the memory.
    num_devices = row_size if is_apart else 1
    room = num_devices * free
    weights: WeightsPlace = "device"
    if options.weights_memory != "auto":
        weights = options.weights_memory
    elif is_apart:
        least = least_bytes(activations, policies)
        is_too_large = needs.on_device(place, is_apart=True) + least > room
        if is_too_large and not _why_not_streamed(spec, options, devices, precision, HOST):
            weights = "host"
    if weights != DEVICE:
        if options.activations == AUTO:
            policies = KEEP_NO_WEIGHTS
        on_device, gradients = streamed_bytes(spec, stage, numbers)
        needs = replace(needs, weights=on_device, gradients=gradients, base=0.0)
        if activations is not None:
            needs = replace(needs, activations=of_streamed(activations))
        place = host_place(spec, options) if place in (AUTO, DEVICE) else place
    _check_room(stage, needs.on_device(place, is_apart=is_apart), room)
    if weights == HOST:
        on_host = host_weights_bytes(ranges[-1].stop, base, numbers)
        _check_room(stage, on_host, free_bytes_of("cpu"), "of the host's memory for its weights")
    if options.stages.isdecimal():  # those to come need their parts
        free //= max(1, int(options.stages))
    in_flight = expected_in_flight(spec)
    may_be_there = is_apart and len(devices) == 1 and spec.sync.mode == ZERO and place == AUTO

    def choose(*, may_be_on_device: bool) -> Chosen:
        return choose_memory(
            needs,
            place,
            free=free,
            policies=policies,
            in_flight=in_flight,
            is_apart=is_apart,
            may_be_on_device=may_be_on_device,
            num_devices=num_devices,
            num_parts=1 if is_apart else num_sharing,
        )

    chosen = choose(may_be_on_device=may_be_there)
    # Only a device that has the room is asked for its bits: that runs kernels.
    if chosen.is_on_device and may_be_there and not updates_right_on(device, spec):
        chosen = choose(may_be_on_device=False)
    choice, is_there, left = chosen.choice, chosen.is_on_device, chosen.left
    computing = Computing(
        precision=precision,
        activations=choice.activations,
        compile=options.compile,
        folder=str(options.state_dir / OFFLOAD_FOLDER),
        max_in_flight=choice.max_in_flight,
        updates_on_device=is_there,
        weights=weights,
        max_device_bytes=most,
    )
    kept = DEVICE if is_there else host_place(spec, options)
    line = _line(stage, devices, computing, choice.needed_bytes, in_flight, left)
    if smaller.is_said:
        line += f"; {smaller.name} is the smallest of its devices, and decides for all"
    if weights != DEVICE:
        line += f"; weights {PLACES[weights]}, from where each layer's come"
    return computing, f"{line}; optimizer state {PLACES[kept]}"


@dataclass(frozen=True, slots=True)
class _Smallest:
    """Of some devices."""

    name: str
    by: int
    """Bytes of memory that it has less than the first."""
    is_said: bool
    """There are larger ones."""


def _smallest(devices: list[str]) -> _Smallest:
    """Ranks have equal parts: whatever fits into the smallest fits into all."""
    import torch

    import swarmnet.training.accelerators as accelerators

    sizes = [accelerators.total_bytes(torch.device(name)) for name in devices]
    known = [(size, name) for size, name in zip(sizes, devices, strict=True) if size is not None]
    if sizes[0] is None or not known:
        return _Smallest(devices[0], 0, False)
    size, name = min(known)
    return _Smallest(name, sizes[0] - size, max(known)[0] > size)


def updates_right_on(device: torch.device, spec: RunSpec) -> bool:
    """Steps of the optimizer and codes of updates have the bits of a CPU's on a device. Muon's are
    made by the host."""
    from swarmnet.protocol.codecs import update_codec
    from swarmnet.training.codecs.fused import is_right_on as codes_right_on
    from swarmnet.training.codecs.registry import codec_of
    from swarmnet.training.codecs.shards import ROW
    from swarmnet.training.optimizer.adamw import is_right_on as steps_right_on

    names = update_codec(spec.sync.update_codec)
    used = sorted({names.contributions, names.sums, names.results})
    # Codecs are hashed by identity, which their protocol cannot say.
    codecs: list[Any] = [codec_of(name) for name in used]
    is_adamw = spec.optimizer.kind == "adamw"
    return (
        is_adamw and steps_right_on(device) and all(codes_right_on(c, ROW, device) for c in codecs)
    )


def host_place(spec: RunSpec, options: PeerOptions) -> str:
    """Where optimizer state lies that is not in the device's memory: what this machine wants, else
    what the run says."""
    if options.optimizer_memory in (HOST, DISK):
        return options.optimizer_memory
    return DISK if spec.sync.optimizer_store == DISK else HOST


def _check_room(
    stage: int, needed: float, free: float, where: str = "of this machine's memory"
) -> None:
    if needed > free:
        raise UserError(
            f"stage {stage} needs {size(needed)} {where} and {size(free)} are free; choose another "
            "one with --stage, or cut the model into more stages"
        )


def _why_not_streamed(
    spec: RunSpec, options: PeerOptions, devices: list[str], precision: str, place: str
) -> str:
    """Why weights cannot lie elsewhere than on the device, with what to do; empty where they
    can."""
    import torch

    from swarmnet.training.accelerators import shares_memory
    from swarmnet.training.computing import KEEP_NO_WEIGHTS
    from swarmnet.training.models.lora import packing_of

    if place == HOST and shares_memory(torch.device(devices[0])):
        return "there is no GPU at work here whose weights could lie elsewhere; use disk"
    if len(devices) > 1:
        return f"it is for one rank; use device, or {_one_rank(options)}"
    if precision == "fp16":
        return "gradients of fp16 have to wait on the device; add --precision bf16 or fp32"
    if options.compile:
        return "compiled layers keep their weights on the device; leave --compile out"
    if packing := packing_of(spec.lora):
        return f"weights in few bits ([lora] base_dtype = {packing}) stay on the device; use device"
    if options.optimizer_memory == DEVICE:
        return "the update is made where the weights are; use --optimizer-memory host"
    if options.activations not in (AUTO, *KEEP_NO_WEIGHTS):
        return f"activations {options.activations} keep weights; use blocks or recompute"
    return ""


def _why_not_compiled(spec: RunSpec, options: PeerOptions) -> str:
    """Why layers on several ranks cannot be compiled; empty where they can."""
    from swarmnet.training.models.registry import model_plan

    if options.ranks_option != "--tp":
        return f"what ranks of {options.ranks_option} do within a layer is no graph of torch's"
    if model_plan(spec).is_random:
        return "compiled layers on several ranks draw no dropout"
    return ""


def _one_rank(options: PeerOptions) -> str:
    """How a peer has no more than one."""
    own = options.ranks_option
    return "take --tp 1" if own == "--tp" else f"leave {own} out"


def check_options(spec: RunSpec, options: PeerOptions, devices: list[str]) -> None:
    """Raises `UsageError` where options do not go together."""
    import torch

    from swarmnet.protocol.sync_modes import ZERO
    from swarmnet.training.computing import choose_precision

    precision = choose_precision(spec, options.precision, devices[0])
    if options.weights_memory in (HOST, DISK):
        why = _why_not_streamed(spec, options, devices, precision, options.weights_memory)
        if why:
            raise UsageError(f"--weights-memory {options.weights_memory}: {why}")
    if options.optimizer_memory == DEVICE:
        if devices[0] == "cpu":
            raise UsageError("--optimizer-memory device: there is no GPU at work here; use host")
        if len(devices) > 1:
            raise UsageError(
                f"--optimizer-memory device is for one rank; use host, or {_one_rank(options)}"
            )
        if spec.sync.mode != ZERO:
            raise UsageError(
                f"--optimizer-memory device: mode {spec.sync.mode} makes its updates beside a "
                "round, on the host; use host"
            )
        if spec.optimizer.kind == "muon":
            raise UsageError(
                "--optimizer-memory device: Muon's steps are made by the host; use host"
            )
        if not updates_right_on(torch.device(devices[0]), spec):
            raise UsageError(
                f"--optimizer-memory device: {devices[0]} makes other bits than the CPUs of other "
                "machines would; use host"
            )
    if len(devices) > 1 and options.compile and (why := _why_not_compiled(spec, options)):
        raise UsageError(f"--compile: {why}; leave it out, or {_one_rank(options)}")


def _where(devices: list[str]) -> str:
    """The devices of all ranks, in words."""
    names = ", ".join(dict.fromkeys(devices))
    if len(devices) == 1:
        return names
    cores = os.cpu_count() or 1
    are_waiting = devices[0] == "cpu" and len(devices) > cores
    few = f", which share {counted(cores, 'core')}" if are_waiting else ""
    return f"{names} ({counted(len(devices), 'rank')}{few})"


def _line(
    stage: int,
    devices: list[str],
    computing: Computing,
    needed: float | None,
    in_flight: int,
    left: float,
) -> str:
    line = f"stage {stage}: {computing.precision} on {_where(devices)}"
    line += f", activations {computing.activations}"
    if needed is None:
        return f"{line}; how much memory they take is not known"
    line += (
        f", about {size(needed)} with {counted(in_flight, 'microbatch')} in flight ({size(left)} "
        "free)"
    )
    if needed > left:
        line += f"; no more than {computing.max_in_flight} are let in"
    return line
