"""How fast this machine is likely to be, found out before it serves a stage: its first choice of
one, and how many it takes, depend on that."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from swarmnet.errors import SwarmnetError
from swarmnet.files import write_whole
from swarmnet.protocol.codecs import NONE
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL
from swarmnet.runtime.options import PeerOptions
from swarmnet.spec import RunSpec

if TYPE_CHECKING:
    from swarmnet.training.computing import Computing

log = logging.getLogger("swarmnet.peer")

SPEED_FILE = "speed.json"
"""In the state folder: what the self-benchmark measured."""
WARM_PASSES, TIMED_PASSES = 1, 3
LEAST_SIDE, MOST_SIDE = 256, 4096
"""Of the matrix that is made orthogonal."""
ENOUGH_OF_PRODUCTS_S = 0.05
ENOUGH_S = 2.0
"""Of passes; a machine that takes so long for one is measured by that one."""


def expected_stage_s(
    spec: RunSpec, options: PeerOptions, costs: Sequence[float], device: str
) -> float:
    """Seconds that this machine is likely to take for forward and backward of one microbatch in a
    stage of middle cost: by one decoder layer, measured once and kept in the state folder. 0 for a
    custom model, whose layers nobody knows, and where the layer cannot be run. `costs`: of each
    stage, in FLOPs. Blocks."""
    import torch

    if spec.model.kind != "llama":
        return 0.0
    from swarmnet.training.computing import Computing, choose_precision
    from swarmnet.training.models.llama import decoder_flops

    computing = Computing(choose_precision(spec, options.precision, device))
    how = f"{torch.__version__}|{options.threads}|{device}|{computing.precision}"
    what = f"{spec.model}|{spec.pipeline.microbatch}|{how}"
    key = sha256(what.encode()).hexdigest()[:16]
    path = options.state_dir / SPEED_FILE
    layer_s = _kept(path, key)
    if not layer_s:
        try:
            layer_s = _measure_layer_s(spec, computing, device)
        except (RuntimeError, MemoryError, SwarmnetError) as e:  # too large for memory, or for fp16
            why = (str(e) or type(e).__name__).splitlines()[0]
            log.warning("this machine's speed was not measured: %s", why)
            return 0.0
        _keep(path, key, layer_s)
    return layer_s * fmean(costs) / decoder_flops(spec.model, spec.sequence_length)


def has_products(spec: RunSpec) -> bool:
    """Whether primaries multiply matrices in their steps."""
    return spec.optimizer.kind == "muon" and spec.sync.mode not in (LOCAL, GOSSIP)


def product_flops_per_s(device: str) -> float:
    """FLOP/s of Muon's steps, measured on the smallest matrix that takes long enough; 0 where the
    device has no room for any. Blocks."""
    import torch

    from swarmnet.training.accelerators import is_out_of_memory
    from swarmnet.training.models.matrices import step_flops
    from swarmnet.training.optimizer.muon import orthogonal

    size, found = LEAST_SIDE, 0.0
    while size <= MOST_SIDE:
        matrix = torch.randn((size, size), generator=torch.Generator().manual_seed(0))
        try:
            on_device = matrix.to(device)
            start_s = time.perf_counter()
            orthogonal(on_device).cpu()  # which waits for the device
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            break
        took_s = time.perf_counter() - start_s
        found = max(found, step_flops((size, size)) / took_s)
        if took_s >= ENOUGH_OF_PRODUCTS_S:
            break
        size *= 2
    return found


def _kept(path: Path, key: str) -> float:
    """What was measured before; 0 where nothing was, or something else."""
    try:
        kept = json.loads(path.read_text())
        layer_s = float(kept["layer_s"])
        return layer_s if kept["key"] == key and 0 < layer_s < float("inf") else 0.0
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _keep(path: Path, key: str, layer_s: float) -> None:
    try:
        write_whole(path, json.dumps({"key": key, "layer_s": layer_s}) + "\n")
    except OSError as e:
        log.warning("the measured speed cannot be kept in %s: %s", path, e.strerror)


def _measure_layer_s(spec: RunSpec, computing: Computing, device: str) -> float:
    """The middle of a pipeline of three stages, one decoder layer each. Nothing is coded: that is
    done beside the device."""
    import torch

    from swarmnet.training.arrays import from_tensor
    from swarmnet.training.stage import build_stage

    model = spec.model.model_copy(update={"num_hidden_layers": 3, "vocab_size": 256})
    pipeline = spec.pipeline.model_copy(update={"num_stages": 3, "layers": (), "codec": NONE})
    spec = spec.model_copy(update={"model": model, "pipeline": pipeline})
    stage = build_stage(spec, 1, device=device, computing=computing)
    shape = (spec.pipeline.microbatch, spec.sequence_length, model.hidden_size)
    inputs = from_tensor(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    best, all_s = float("inf"), 0.0
    for i in range(WARM_PASSES + TIMED_PASSES):
        start_s = time.perf_counter()
        outputs = stage.forward((0, i), inputs)
        stage.backward((0, i), outputs)
        took_s = time.perf_counter() - start_s
        stage.forget((0, i))
        all_s += took_s
        if i >= WARM_PASSES or took_s >= ENOUGH_S:
            best = min(best, took_s)
        if all_s >= ENOUGH_S and best < float("inf"):
            break
    return best
