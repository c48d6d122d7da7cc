"""What cutting a model over ranks takes: by collectives of our own, and by torch's DTensor.

    python benchmarks/tensor_parallel.py [--ranks 2] [--layers 8] [--width 256] [--family llama]
        [--passes 9] [--json FILE]

A microbatch goes forward and back through a model of a family of transformers, in fp32 on CPUs with
one thread a rank: `one` on one rank; `swarmnet` cut over ranks as `--tp` does it, calls to the
ranks included; `dtensor` cut by the same plan with `torch.distributed.tensor.parallel`, every
matrix of attention and feed-forward (embedding and output matrix are whole there). The median of
wall-clock seconds, and the CPU seconds of rank 0. The first pass is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.models.model_config import load_config, model_classes
from swarmnet.training.ranks.local_group import LocalGroup
from swarmnet.training.ranks.tensor_parallel_stage import build_parallel_stage, rank_options
from swarmnet.training.stage import build_stage

SAMPLES, LENGTH, VOCABULARY = 2, 256, 256
HEADS = 8


@dataclass(frozen=True)
class Row:
    """How long a microbatch took, in seconds."""

    way: str
    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--family", default="llama")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = {
        "model_type": options.family,
        "hidden_size": options.width,
        "intermediate_size": 3 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "pad_token_id": None,
    }
    spec = run_of(config)
    rows = [
        of_stage("one", build_stage(spec, 0, computing=Computing()), options.passes),
        of_ranks(spec, options.ranks, options.passes),
        of_dtensor(config, options.ranks, options.passes),
    ]
    for row in rows:
        gain = rows[0].wall_s / row.wall_s
        print(f"{row.way:10}{row.wall_s:8.3f} s{row.cpu_s:8.3f} s of the CPU{gain:7.2f} x one")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))


def run_of(config: dict[str, Any]) -> RunSpec:
    canonical = load_config(config).canonical_values
    return RunSpec.model_validate(
        {
            "model": {"kind": "transformers", "config": canonical},
            "data": {"paths": ["python-stdlib"], "sequence_length": LENGTH},
            "optimizer": {"learning_rate": 1e-3, "rounds": 4},
            "pipeline": {"num_stages": 1, "global_batch": SAMPLES, "microbatch": SAMPLES},
        }
    )


def tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator, dtype=torch.int32)


def of_ranks(spec: RunSpec, num_ranks: int, passes: int) -> Row:
    group = LocalGroup(num_ranks, threads=1, options=rank_options(spec))
    try:
        return of_stage("swarmnet", build_parallel_stage(spec, 0, group, Computing()), passes)
    finally:
        group.close()


def of_stage(way: str, stage: Any, passes: int) -> Row:
    inputs, targets = from_tensor(tokens(1)), from_tensor(tokens(2))

    def once(number: int) -> None:
        stage.forward_backward((0, number), inputs, targets)
        stage.forget((0, number))

    return measured(way, once, passes)


def of_dtensor(config: dict[str, Any], num_ranks: int, passes: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (config, num_ranks, passes, folder)
        torch.multiprocessing.spawn(dtensor_rank, arguments, nprocs=num_ranks)
        return Row(**json.loads((Path(folder) / "row").read_text()))


def dtensor_rank(
    rank: int, config: dict[str, Any], num_ranks: int, passes: int, folder: str
) -> None:
    """One process: the model by transformers, cut by DTensor."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    loaded = load_config(config)
    model: Any = model_classes(loaded)[1](loaded)
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {
        name: styles[style]()
        for name, style in loaded.base_model_tp_plan.items()
        if style in styles
    }
    parallelize_module(model.model, init_device_mesh("cpu", (num_ranks,)), plan)
    inputs, targets = tokens(1).long(), tokens(2).long()

    def once(_: int) -> None:
        logits = model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        loss.backward()

    row = measured("dtensor", once, passes)
    if rank == 0:
        (Path(folder) / "row").write_text(json.dumps(asdict(row)))
    dist.barrier()
    dist.destroy_process_group()


def measured(way: str, once: Callable[[int], None], passes: int) -> Row:
    once(0)
    walls, cpus = [], []
    for number in range(1, passes + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        once(number)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Row(way, statistics.median(walls), statistics.median(cpus))


if __name__ == "__main__":
    main()
