"""What a peer computes with and keeps its state on: device, data, disk."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from swarmnet.errors import DataError, UsageError, UserError
from swarmnet.ports import OTHER
from swarmnet.runtime.computing import (
    bound_devices,
    choose_computing,
    free_bytes_of,
    host_place,
)
from swarmnet.runtime.joining.past import open_ended, unused_states
from swarmnet.runtime.joining.starting import Run
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.ranks import build_ranked_stage, choose_devices
from swarmnet.runtime.run_files import TOKENIZER, WEIGHTS, RunFiles
from swarmnet.runtime.speed import expected_stage_s, has_products, product_flops_per_s
from swarmnet.runtime.state_dir import state_root
from swarmnet.spec import BYTES_TOKENIZER, RunSpec
from swarmnet.swarm.initial.data import SharedData
from swarmnet.swarm.peer import Machine
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.system import give_memory_back

if TYPE_CHECKING:
    from swarmnet.ports import Data, Device, InitialWeights
    from swarmnet.runtime.apart.seat import ApartSeat
    from swarmnet.training.ranks.local_group import LocalGroup

log = logging.getLogger("swarmnet.peer")

IDLE_LOOK_S = 10.0
"""A device that has done nothing for so long is idle."""
OPTIMIZER_FOLDER = "optimizer"
"""In the state folder, for optimizer state on the disk."""


def build_machine(
    spec: RunSpec,
    options: PeerOptions,
    group: LocalGroup | None = None,
    beside: Machine | None = None,
    begun: Run | None = None,
    apart: ApartSeat | None = None,
) -> Machine:
    """The device of this machine; `group`: its other ranks, where it has any. `beside`: of another
    seat of the machine, which shares its device and feeds. `begun`: the run, where this peer starts
    it. `apart`: what builds this seat's stages elsewhere: then it shares no device.

    Raises `DataError`, `SpecError` or `UserError`."""
    from swarmnet.training.cores import CORES
    from swarmnet.training.device import DeviceThread, WorkerThread, set_num_threads
    from swarmnet.training.models.registry import model_plan, stage_costs

    if apart is None:
        bound_devices(options, choose_devices(spec, options))
    if beside is None and apart is None and choose_devices(spec, options)[0] == "cpu":
        CORES.keep_for_device(options.threads)
    elif beside is None and options.threads:
        set_num_threads(options.threads)
    run, spec = spec, spec.with_builder(options.model_builder(spec))
    build, build_local = _builders(spec, options, group, apart)
    if beside is not None:
        shared = {"device": beside.device.seat()} if apart is None else _apart(apart)
        return replace(
            beside,
            **shared,
            build=build,
            data=None,
            shared=None,
            disk=open_disk(run, spec, options),
            build_local=build_local,
        )
    files = RunFiles(options.state_dir, spec.files)
    data, disk = open_data_of(spec, options, files), open_disk(run, spec, options)
    costs = stage_costs(model_plan(spec), spec.pipeline.num_stages)
    rest: dict[str, Any] = {
        "data": data,
        "disk": disk,
        "build_local": build_local,
        "free": free_memory,
        "weights": open_initial_weights(spec, options, files, begun or Run(spec)),
        "file_sizes": {about.sha256: about.size for about in files.files.values()},
        "read_file": files.read_part,
        "stage_costs": tuple(costs) if all(cost > 0 for cost in costs) else None,
        "shared": open_shared(spec, options, files, data),
    }
    if has_products(spec):
        # Of stages in other processes the host makes the steps.
        where = "cpu" if apart is not None else choose_devices(spec, options)[0]
        rest["measure_products"] = partial(product_flops_per_s, where)
    if apart is not None:
        return Machine(build, **_apart(apart), **rest)
    device = DeviceThread(has_cores=choose_devices(spec, options)[0] == "cpu")

    def measure() -> float:
        """By one rank with this share of the device: it says nothing of several ranks."""
        if group is not None:
            return 0.0
        name = choose_devices(spec, options)[0]
        ask = partial(expected_stage_s, spec, options, costs, name)
        # On the device's thread: it has the cores, and what is freed serves its passes.
        return asyncio.run(device.run(OTHER, ask)) / device.share

    return Machine(
        build,
        device,
        WorkerThread(),
        free_bytes=lambda: float(free_bytes_of(choose_devices(spec, options)[0])),
        measure=measure,
        **rest,
    )


def _apart(apart: ApartSeat) -> dict[str, Any]:
    """What a seat has of its own whose stages are in another process. How fast that is shows when
    it works."""
    from swarmnet.training.device import DeviceThread, WorkerThread

    # Passes on CPUs take the machine's cores, in whichever process they are.
    device = DeviceThread(has_cores=apart.is_on_cpu)
    return {
        "device": device,
        "worker": WorkerThread(),
        "free_bytes": apart.free_bytes,
        "until_lost": lambda: apart.until_lost(device),
        "services": {},
    }


def _builders(
    spec: RunSpec, options: PeerOptions, group: LocalGroup | None, apart: ApartSeat | None
) -> tuple[Callable[[int], tuple[Any, Any]], Callable[[Any, Any], Any]]:
    """What builds a stage with its optimizer, and its own steps."""
    from swarmnet.training.optimizer.local_steps import build_local_steps, build_optimizer
    from swarmnet.training.optimizer.store import open_store
    from swarmnet.training.stage import build_stage

    devices = [] if apart is not None else choose_devices(spec, options)
    store = open_store(host_place(spec, options), options.state_dir / OPTIMIZER_FOLDER)

    def build(stage_index: int) -> tuple[Any, Any]:
        if apart is not None:
            stage = apart.build(stage_index)
            return stage, build_optimizer(spec, stage, store)
        computing, line = choose_computing(spec, options, stage_index, devices)
        log.warning("%s", line)
        if group is None:
            stage = build_stage(spec, stage_index, device=devices[0], computing=computing)
        else:
            stage = build_ranked_stage(spec, stage_index, options, group, computing)
        return stage, build_optimizer(spec, stage, store)

    def build_local(stage: Any, optimizer: Any) -> Any:
        return build_local_steps(spec, stage, optimizer, store)

    return build, build_local


def open_initial_weights(
    spec: RunSpec, options: PeerOptions, files: RunFiles, begun: Run
) -> InitialWeights | None:
    """What the run began from; None where that is random. Raises `SpecError` or `UserError`."""
    if not spec.model.weights:
        if options.weights is not None:
            raise UsageError("--weights: this run began from random weights; leave it out")
        return None
    if spec.adapts_ended and options.weights is not None:
        raise UsageError(
            "--weights: this run's adapters are beside what another run ended with, "
            "which no folder has; leave it out"
        )
    from swarmnet.training.models.initial_weights import InitialLayout, ModelWeights
    from swarmnet.training.models.model_folder import find_folder

    hashes = files.read(spec.files[WEIGHTS].sha256)
    if hashes is None:
        raise UserError(f"{files.folder}: the run's {WEIGHTS} is damaged; start again")
    folder = options.weights
    if folder is None and begun.model:
        folder = find_folder(begun.model)
    adapter = Path(begun.adapter).expanduser() if begun.adapter else None
    ended = None
    if spec.model.continues:
        layout = InitialLayout.of(spec)
        ended = open_ended(spec, layout, options.state_dir, begun.continues)
    return ModelWeights(
        spec, hashes, folder, adapter=adapter, ended=ended, state_dir=options.state_dir
    )


def open_data_of(spec: RunSpec, options: PeerOptions, files: RunFiles) -> Data | None:
    """What this machine feeds; None, with a line that says why, where it does not. Raises
    `DataError` where the person named the data and it cannot be read."""
    from swarmnet.training.data import Place, TextData, open_data
    from swarmnet.training.data.resolving import is_same, measures_the_same

    if not options.feed:
        return None
    paths, tokenizer = options.data_paths(spec), options.data_tokenizer(spec)
    if paths and not tokenizer and files.path(TOKENIZER) is None:
        name = PurePath(spec.data.tokenizer).name
        log.warning("this machine's %s was not named (--tokenizer): it does not feed", name)
        return None
    if not paths and spec.model.kind != "custom":
        log.warning("this machine's data was not named (--data): it serves but does not feed")
        return None
    try:
        place = Place(options.data, tokenizer, files.contents(), options.starts_run)
        data = open_data(spec, place)
    except DataError as e:
        if options.starts_run or options.data:
            raise
        log.warning("%s; this peer serves but does not feed", e)
        return None
    if not is_same(spec, data):
        log.warning(
            "this machine's data are not the run's (other files or line ends, another tokenizer, "
            "for python-stdlib another Python): it serves but does not feed"
        )
        return None
    if isinstance(data, TextData) and not measures_the_same(spec, data):
        log.warning(
            "--data held-out=PATH: this machine's held-out data are not the run's (other files or "
            "line ends, another tokenizer): it feeds, and measures nothing"
        )
        return data.without_held_out()
    return data


def open_shared(
    spec: RunSpec, options: PeerOptions, files: RunFiles, data: Data | None
) -> SharedData | None:
    """What this machine gives of the data, or may get. Raises `UserError` where a person wants what
    cannot be."""
    from swarmnet.training.data import TextData
    from swarmnet.training.data.coming import ComingText
    from swarmnet.training.data.opening import Place
    from swarmnet.training.device import WorkerThread

    asked = "--serve-data" if options.serve_data else "--fetch-data" if options.fetch_data else ""
    if asked and not spec.data.fingerprint:
        raise UsageError(
            f"{asked}: leave it out; this run's data have no fingerprint (they come out of a "
            "custom model's code, or the run was started with --no-feed)"
        )
    if asked and not options.feed:
        raise UsageError(f"{asked}: only a peer that feeds has data; leave out --no-feed")
    if isinstance(data, TextData):
        return SharedData(WorkerThread("data"), given=data) if options.serve_data else None
    if options.serve_data:
        raise UsageError("--serve-data: this machine has not the run's data; name them (--data)")
    has_tokenizer = spec.data.tokenizer == BYTES_TOKENIZER or files.path(TOKENIZER) is not None
    if not (options.feed and spec.data.fingerprint and has_tokenizer):
        return None
    if options.fetch_data is False:
        return None
    coming = ComingText(spec, Place(files=files.contents()))
    return SharedData(WorkerThread("data"), coming=coming, at_once=bool(options.fetch_data))


def open_disk(run: RunSpec, model: RunSpec, options: PeerOptions) -> Disk | None:
    """This peer's checkpoints; None where `--checkpoint-every 0` wants none. `model`: the spec as
    this machine builds it. Raises `UserError` where they cannot be read."""
    from swarmnet.training.checkpoint import CheckpointStore
    from swarmnet.training.device import WorkerThread

    if not options.checkpoint_every:
        return None
    store = CheckpointStore(
        options.state_dir,
        run,
        keep=options.keep_checkpoints,
        every=options.checkpoint_every,
        model=model,
        unused=lambda: unused_states(options.state_dir, run.run_id),
    )
    found = store.available()
    for line in store.unreadable:
        log.warning("a checkpoint cannot be used: %s", line)
    disk = WorkerThread("disk")
    is_any = options.state_dir.absolute().parent == state_root().absolute()
    return Disk(store, disk, options.checkpoint_every, found, tuple(store.unreadable), is_any)


def free_memory() -> None:
    """Gives what is not used any more back to the system."""
    gc.collect()
    if "torch" in sys.modules:
        import swarmnet.training.accelerators as accelerators

        accelerators.give_memory_back(accelerators.kind())
    give_memory_back()


async def _give_back() -> None:
    await asyncio.to_thread(give_memory_back)


async def free_when_idle(device: Device, free: Callable[[], Awaitable[None]] = _give_back) -> None:
    """What passes have freed goes back to the system (`free`), once after each spell of work: glibc
    keeps what it has for the next allocation of a thread, of the passes that measure a machine's
    speed alone tens of megabytes. Until cancelled."""
    last_s, freed_s = device.busy_s, 0.0
    while True:
        await asyncio.sleep(IDLE_LOOK_S)
        busy_s = device.busy_s
        if busy_s == last_s != freed_s and not device.num_waiting:
            freed_s = busy_s
            await free()
        last_s = busy_s
