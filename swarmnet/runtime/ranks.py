"""How many ranks this machine's peer has, on which devices, and its end with theirs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from swarmnet.errors import SpecError, UsageError, UserError
from swarmnet.plurals import counted
from swarmnet.runtime.computing import check_options
from swarmnet.runtime.options import ComputeOptions, PeerOptions
from swarmnet.spec import RunSpec

if TYPE_CHECKING:
    from swarmnet.training.computing import Computing
    from swarmnet.training.ranks.local_group import LocalGroup
    from swarmnet.training.stage import TorchStage

log = logging.getLogger("swarmnet.peer")


def choose_devices(spec: RunSpec, options: ComputeOptions) -> list[str]:
    """A device for each rank. Raises `SpecError` where `--tp`, `--cp` or `--ep` does not go with
    the model, `UserError` where the machine has GPUs and fewer than ranks, none and `--device`
    wants one, or is too small.

    Without them: all GPUs of CUDA, or as many as the model can be cut into, and one device of
    another type: ranks of these were never run."""
    import swarmnet.training.accelerators as accelerators

    here = accelerators.kind()
    num_gpus = 0 if options.device == accelerators.CPU else accelerators.num_devices()
    if here != accelerators.CUDA:
        num_gpus = min(num_gpus, 1)
    wanted = options.num_ranks
    check_wanted(options.device, wanted or 1)
    if wanted is not None:
        check_ranks(spec, options, wanted)
        if num_gpus:
            _check_cards(options, num_gpus, wanted)
            return [f"{here}:{i}" for i in range(wanted)]
        if options.ranks_option != "--tp":
            _check_cores(options, wanted)
        return [accelerators.CPU] * wanted
    if num_gpus < 2:
        return [f"{here}:0" if num_gpus else accelerators.CPU]

    return [f"{here}:{i}" for i in range(most_ranks(spec, options, num_gpus))]


def most_ranks(spec: RunSpec, options: ComputeOptions, num_devices: int) -> int:
    """Into how many the model can be cut, on so many devices. Raises `UsageError` as
    `check_ranks`."""

    def is_possible(num_ranks: int) -> bool:
        try:
            check_ranks(spec, options, num_ranks)
        except SpecError:
            return False
        return True

    return max(filter(is_possible, range(1, num_devices + 1)))


def check_wanted(device: str, num_devices: int) -> None:
    """Raises `UserError` where `--device` wants what this machine has not so often."""
    import swarmnet.training.accelerators as accelerators

    here = accelerators.kind()
    found = accelerators.num_devices() if device == here else 0
    if here != accelerators.CUDA:
        found = min(found, 1)
    if device in accelerators.KINDS and found < num_devices:
        raise UserError(
            f"--device {device}: this machine has {found} such devices that torch can use, "
            f"and {num_devices} are wanted; --device auto takes what there is"
        )


def _check_cards(options: ComputeOptions, num_cards: int, num_ranks: int) -> None:
    """Raises `UsageError` where ranks are more than the devices that they can have here: it is for
    the machine's person to say that they are to compute on its CPUs."""
    if num_ranks > num_cards:
        raise UsageError(
            f"{options.ranks_given}: each rank takes a GPU, and this machine has {num_cards} for "
            f"them; take {_so_many(options, num_cards)}, or --device cpu"
        )


def _so_many(options: ComputeOptions, num_ranks: int) -> str:
    """In the words of the command line."""
    rows = counted(num_ranks, "rank")
    return rows if options.are_in_rows else f"{options.ranks_option} {num_ranks}"


def check_ranks(spec: RunSpec, options: ComputeOptions, num_ranks: int) -> None:
    """Raises `SpecError` or `UsageError` where so many ranks do not go with the model, or with
    other options."""
    from swarmnet.training.ranks.context_parallel_stage import check_sequences
    from swarmnet.training.ranks.cut_check import check_cut
    from swarmnet.training.ranks.expert_stage import check_experts
    from swarmnet.training.ranks.fsdp import check_split
    from swarmnet.training.ranks.rows.row_stage import check_rows

    if options.ranks_option != "--tp":
        _check_alone(options)
    if options.are_in_rows:
        check_rows(spec, _mode(options), options.num_rows, num_ranks // options.num_rows)
    elif options.shares_sequences:
        check_sequences(spec, num_ranks)
    elif options.shares_experts:
        check_experts(spec, num_ranks)
    elif options.local == "fsdp":
        if options.sequence_parallel and num_ranks > 1:
            raise UsageError("--sequence-parallel goes with --local tensor; leave it out")
        check_split(spec, num_ranks)
    else:
        check_cut(spec, num_ranks, sequence_parallel=options.sequence_parallel)


def _check_alone(options: ComputeOptions) -> None:
    """Raises `UsageError` where another option divides something else among ranks."""
    own = options.ranks_option
    others = {
        "--ep": own != "--ep" and (options.ep or 1) > 1,
        "--local fsdp": options.local == "fsdp",
        "--sequence-parallel": options.sequence_parallel,
    }
    for name, is_given in others.items():
        if is_given:
            raise UsageError(f"{own} does not go with {name}; leave one of them out")


def _check_cores(options: ComputeOptions, num_ranks: int) -> None:
    """Raises `UsageError` where ranks on CPUs would wait for each other's core."""
    cores = os.cpu_count() or 1
    if num_ranks > cores:
        raise UsageError(
            f"{options.ranks_given}: this machine has {counted(cores, 'core')}, and not a GPU for "
            f"each rank; take {_so_many(options, cores)}, or less"
        )


def open_ranks(spec: RunSpec, options: PeerOptions) -> LocalGroup | None:
    """The other ranks of this peer, started; None where it has one only. Blocks for seconds. They
    too build a custom model from this machine's code, never from a path that the run names.
    Raises `SpecError`, `UserError` or `RankLost`."""
    devices = choose_devices(spec, options)
    check_options(spec, options, devices)
    if len(devices) == 1:
        if line := without_effect(spec, options):
            log.warning(line)
        return None
    return start_ranks(spec.with_builder(options.model_builder(spec)), options, devices)


def without_effect(spec: RunSpec, options: ComputeOptions) -> str:
    """A line where a way of several ranks is asked for, nobody said how many, and one device
    computes; else empty. Raises as `choose_devices`."""
    given = "--local fsdp" if options.local == "fsdp" else ""
    if not given and options.sequence_parallel:
        given = "--sequence-parallel"
    if not given or options.num_ranks is not None or len(choose_devices(spec, options)) > 1:
        return ""
    return f"{given} has no effect: one device computes; --tp N makes N ranks"


def start_ranks(spec: RunSpec, options: PeerOptions, devices: list[str]) -> LocalGroup:
    """Ranks 1 and on, where this process is rank 0. `spec`: as this machine builds it. Blocks for
    seconds. Raises `RankLost`."""
    from swarmnet.training.ranks.fsdp import open_default_group
    from swarmnet.training.ranks.local_group import LocalGroup, open_process_group
    from swarmnet.training.ranks.tensor_parallel_stage import rank_options

    row_size = 1
    open_group: Callable[..., Any] = open_process_group
    if options.local == "fsdp":
        open_group = open_default_group
    elif options.are_in_rows:
        row_size = len(devices) // options.num_rows
        open_group = partial(open_process_group, row_size=row_size)
    told = rank_options(
        spec,
        sequence_parallel=options.sequence_parallel,
        mode=_mode(options),
        row_size=row_size,
    )
    return LocalGroup(
        len(devices),
        devices=devices,
        threads=options.threads,
        options=told,
        open_group=open_group,
    )


def _mode(options: ComputeOptions) -> str:
    """What ranks divide, or rows of them: of `rank_options`."""
    if options.shares_sequences:
        return "context"
    return "experts" if options.shares_experts else options.local


def build_ranked_stage(
    spec: RunSpec,
    stage_index: int,
    options: PeerOptions,
    group: LocalGroup,
    computing: Computing,
) -> TorchStage:
    """A stage on all ranks."""
    if options.are_in_rows:
        from swarmnet.training.ranks.rows.row_stage import build_row_stage

        return build_row_stage(spec, stage_index, group, computing)
    if options.shares_sequences:
        from swarmnet.training.ranks.context_parallel_stage import build_context_parallel_stage

        return build_context_parallel_stage(spec, stage_index, group, computing)
    if options.shares_experts:
        from swarmnet.training.ranks.expert_stage import build_expert_stage

        return build_expert_stage(spec, stage_index, group, computing)
    if options.local == "fsdp":
        from swarmnet.training.ranks.fsdp import build_fsdp_stage

        return build_fsdp_stage(spec, stage_index, group, computing)
    from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage

    return build_parallel_stage(spec, stage_index, group, computing)


async def until_over(
    life: asyncio.Task[None], group: LocalGroup | None, watch: Coroutine[Any, Any, None]
) -> None:
    """Returns as `life` does; where a rank is lost meanwhile, or `watch` raises, ends it at once
    and raises `RankLost`, or that. When this is cancelled, `life` goes on."""
    loop = asyncio.get_running_loop()
    watching = [loop.create_task(watch)]
    if group is not None:
        watching.append(loop.create_task(group.watch()))
    try:
        await asyncio.wait((life, *watching), return_when=asyncio.FIRST_COMPLETED)
        failure: BaseException | None = None
        if group is not None and group.failure is not None:
            failure = type(group.failure)(f"this peer ends: {group.failure}")
        elif watching[0].done():
            failure = watching[0].exception()
        if failure is not None:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            raise failure
        life.result()
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
