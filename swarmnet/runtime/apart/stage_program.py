"""The process that computes the stage of one seat. Started by `seat`; nobody else runs it."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet.errors import SwarmnetError
from swarmnet.training.processes.frames import Link, live

if TYPE_CHECKING:
    from swarmnet.runtime.options import PeerOptions
    from swarmnet.spec import RunSpec
    from swarmnet.training.ranks.local_group import LocalGroup
    from swarmnet.training.stage import TorchStage

PROGRAM = "swarmnet.runtime.apart.stage_program"


def told(
    spec: RunSpec, options: PeerOptions, stage_index: int, devices: tuple[str, ...]
) -> dict[str, Any]:
    """What the process is told, as plain values. `spec`: as this machine builds it."""
    from swarmnet.runtime.options import ComputeOptions, group_of

    return {
        "spec": spec.canonical().decode(),
        "stage": stage_index,
        "devices": list(devices),
        "options": group_of(options, ComputeOptions)
        | {"stages": options.stages, "threads": options.threads},
        "state_dir": str(options.state_dir),
    }


class Builder:
    """Builds what the peer tells, on ranks where it tells of several."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._devices = ["cpu"]

    def free_bytes(self) -> float:
        """Of the memory that the stage computes with."""
        from swarmnet.runtime.computing import free_bytes_of

        return float(free_bytes_of(self._devices[0]))

    def build(self, values: dict[str, Any]) -> tuple[TorchStage, str]:
        """As `stage_host.Build`."""
        from swarmnet.runtime.computing import choose_computing
        from swarmnet.runtime.options import PeerOptions
        from swarmnet.runtime.ranks import build_ranked_stage, start_ranks
        from swarmnet.spec import RunSpec
        from swarmnet.training.device import set_num_threads
        from swarmnet.training.processes.stage_host import SharedLayers
        from swarmnet.training.stage import TorchStage, build_stage

        spec = RunSpec.from_canonical(values["spec"].encode())
        options = PeerOptions(state_dir=Path(values["state_dir"]), **values["options"])
        stage_index, devices = values["stage"], values["devices"]
        self._devices = devices
        if options.threads:
            set_num_threads(options.threads)
        group = None
        if len(devices) > 1:
            group = start_ranks(spec, options, devices)
            threading.Thread(target=self._watch, args=(group,), daemon=True).start()
        computing, line = choose_computing(spec, options, stage_index, devices)
        if group is not None:
            return build_ranked_stage(spec, stage_index, options, group, computing), line
        make = functools.partial(TorchStage, make_layers=SharedLayers)
        stage = build_stage(spec, stage_index, device=devices[0], computing=computing, make=make)
        return stage, line

    def _watch(self, group: LocalGroup) -> None:
        """Says at once that a rank is lost: between two calls nobody else looks."""
        try:
            asyncio.run(group.watch())
        except SwarmnetError as error:
            self._link.broken(str(error))


def serve(link: Link) -> None:
    """The life of the process."""
    from swarmnet.training.processes import stage_host

    builder = Builder(link)
    stage_host.serve(link, stage_host.StageHost(builder.build, builder.free_bytes))


if __name__ == "__main__":
    FD, _, PARENT = (int(word) for word in sys.argv[1:4])
    live(FD, PARENT, serve)
