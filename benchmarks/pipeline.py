"""Pipeline throughput: swarmnet against torch's own pipeline, in one run on one machine.

    python benchmarks/pipeline.py [--repeat 3]

The same small Llama (about 10 M parameters, sequence 256, fp32), the same microbatches and global
batch, one torch thread a process, the update (AdamW, global clipping) included:

  (a) one process
  (b) torch.distributed.pipelining, Schedule1F1B, two stages over gloo
  (c) swarmnet, two stages x one replica: two real peer processes over libp2p
  (d) as (b), with torch's zero-bubble schedule, ScheduleInterleavedZeroBubble

Tokens a second of the median round. The ways are timed in turn, `--repeat` times, since the
machine may not be quiet; the ratio is that of the medians. `--profile` samples the peers of (c)
with py-spy (if it is installed) and prints where their time goes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for what is of tests/

SPEC = """
name = "pipeline benchmark"
[model]
kind = "llama"
hidden_size = 320
num_hidden_layers = 8
num_attention_heads = 5
num_key_value_heads = 5
intermediate_size = 864
vocab_size = 256
max_position_embeddings = 256
[data]
paths = ["python-stdlib"]
include = ["*.py"]
tokenizer = "bytes"
held_out_microbatches = 0
[optimizer]
learning_rate = 1e-3
warmup_rounds = 2
rounds = {rounds}
grad_clip_norm = 1.0
[pipeline]
num_stages = {stages}
global_batch = 32
microbatch = 2
evaluate_every = 0
"""
WARM_ROUNDS = 2
CHILD_TIMEOUT_S = 900
END_TIMEOUT_S = 30


def rounds_of(path: Path) -> list[float]:
    """Seconds of each finished round in a file of JSON lines."""
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [e["time_unix_s"] for e in events if e.get("event") == "round"]


def intervals(times: list[float]) -> list[float]:
    """Seconds between the ends of rounds, the warm-up left out."""
    return [b - a for a, b in itertools.pairwise(times)][WARM_ROUNDS:]


# ---- (a) and (b): children of this script ------------------------------------------------------


def one_process(rounds: int, out: Path) -> None:
    """The plain loop."""
    import torch

    torch.set_num_threads(1)
    from swarmnet.spec import parse_spec
    from tests.oracles.reference import ReferenceTrainer

    spec = parse_spec(SPEC.format(rounds=rounds, stages=1))
    trainer = ReferenceTrainer(spec)
    per_round = spec.pipeline.global_batch // spec.pipeline.microbatch
    with out.open("w") as file:
        for r in range(rounds):
            trainer.step(r, range(r * per_round, (r + 1) * per_round))
            tell(file, r)


def torch_pipeline(rank: int, port: int, rounds: int, out: Path, *, splits: bool) -> None:
    """One rank of torch.distributed.pipelining. `splits`: backward passes in two parts."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleInterleavedZeroBubble,
    )

    torch.set_num_threads(1)
    from swarmnet.spec import parse_spec
    from swarmnet.training.arrays import to_tensor
    from swarmnet.training.data import open_data
    from swarmnet.training.models.base import build_layer
    from swarmnet.training.models.registry import model_plan, split_stages
    from swarmnet.training.optimizer.rates import learning_rate

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    spec = parse_spec(SPEC.format(rounds=rounds, stages=2))
    plan, data = model_plan(spec), open_data(spec)
    layers = split_stages(plan, 2)[rank]
    module = nn.Sequential(*(build_layer(plan, layer, spec.seed) for layer in layers))
    per_round = spec.pipeline.global_batch // spec.pipeline.microbatch
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule: Schedule1F1B | ScheduleInterleavedZeroBubble
    if splits:
        schedule = ScheduleInterleavedZeroBubble(
            [stage], per_round, loss_fn=plan.loss, scale_grads=False
        )
    else:
        schedule = Schedule1F1B(stage, per_round, loss_fn=plan.loss, scale_grads=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    size = spec.pipeline.microbatch
    tokens = spec.pipeline.global_batch * spec.sequence_length
    with out.open("w") as file:
        for r in range(rounds):
            batch = [
                data.microbatch([n % data.num_samples for n in range(i * size, (i + 1) * size)])
                for i in range(r * per_round, (r + 1) * per_round)
            ]
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(torch.cat([to_tensor(b.inputs) for b in batch]))
            else:
                schedule.step(target=torch.cat([to_tensor(b.targets) for b in batch]), losses=[])
            squares = torch.zeros(())
            for p in module.parameters():
                assert p.grad is not None
                p.grad /= tokens
                squares += p.grad.square().sum()
            dist.all_reduce(squares)
            clip = min(1.0, 1.0 / (squares.sqrt().item() + 1e-6))
            for p in module.parameters():
                assert p.grad is not None
                p.grad *= clip
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(spec.optimizer, r)
            optimizer.step()
            tell(file, r)
    dist.destroy_process_group()


def tell(file: object, r: int) -> None:
    line = json.dumps({"event": "round", "round": r, "time_unix_s": time.time()})
    print(line, file=file, flush=True)  # type: ignore[call-overload]


# ---- the four ways ----------------------------------------------------------------------------


def child(*arguments: object) -> subprocess.Popen[bytes]:
    """This script again, in the role that the arguments name."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def time_one(folder: Path, rounds: int, profile: bool) -> list[float]:
    out = folder / "one.jsonl"
    assert child("--role", "one", "--rounds", rounds, "--out", out).wait(CHILD_TIMEOUT_S) == 0
    return intervals(rounds_of(out))


def time_torch(folder: Path, rounds: int, profile: bool, role: str = "rank") -> list[float]:
    """`role`: of both ranks, without their number."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    outs = [folder / f"torch-{rank}.jsonl" for rank in range(2)]
    ranks = [
        child("--role", f"{role}{k}", "--port", port, "--rounds", rounds, "--out", outs[k])
        for k in range(2)
    ]
    for process in ranks:
        assert process.wait(CHILD_TIMEOUT_S) == 0
    return intervals(rounds_of(outs[1]))


def time_swarm(folder: Path, rounds: int, profile: bool) -> list[float]:
    spec = folder / "run.toml"
    spec.write_text(SPEC.format(rounds=rounds, stages=2))
    ready, metrics = folder / "ready.json", folder / "swarm.jsonl"
    metrics.unlink(missing_ok=True)
    ready.unlink(missing_ok=True)
    common = [sys.executable, "-m", "peer", "peer", "--host", "127.0.0.1", "--threads", "1"]
    common += ["--quiet", "--exit-when-done"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [
            *common,
            "--spec",
            str(spec),
            "--ready-file",
            str(ready),
            "--metrics",
            str(metrics),
            "--state-dir",
            str(folder / "state-1"),
            "--stage",
            "0",
        ],
        env=env,
        stdout=subprocess.DEVNULL,
    )
    peers = [first]
    try:
        end = time.time() + CHILD_TIMEOUT_S
        while not ready.exists():
            assert first.poll() is None, "the first peer ended early"
            assert time.time() < end, "the first peer did not start"
            time.sleep(0.1)
        address = json.loads(ready.read_text())["address"]
        peers.append(
            subprocess.Popen(
                [
                    *common,
                    "--join",
                    address,
                    "--state-dir",
                    str(folder / "state-2"),
                    "--stage",
                    "1",
                ],
                env=env,
                stdout=subprocess.DEVNULL,
            )
        )
        if profile:
            profile_peers(peers, metrics, folder)
        while len(rounds_of(metrics)) < rounds:
            alive = all(p.poll() is None for p in peers)
            assert alive or len(rounds_of(metrics)) >= rounds, "a peer ended early"
            assert time.time() < end, "the run took too long"
            time.sleep(0.2)
    finally:
        for process in peers:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in peers:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
    return intervals(rounds_of(metrics))


def profile_peers(peers: list[subprocess.Popen[bytes]], metrics: Path, folder: Path) -> None:
    """Samples every peer for some rounds, native frames left out."""
    while len(rounds_of(metrics)) < WARM_ROUNDS:
        time.sleep(0.2)
    samplers = [
        subprocess.Popen(
            [
                str(Path(sys.executable).with_name("py-spy")),
                "record",
                "-p",
                str(p.pid),
                "-d",
                "15",
                "-r",
                "200",
                "-f",
                "raw",
                "-t",
                "-o",
                str(folder / f"profile-{k}.txt"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for k, p in enumerate(peers)
    ]
    for k, sampler in enumerate(samplers):
        sampler.wait(120)
        report_profile(k, folder / f"profile-{k}.txt")


def report_profile(peer_index: int, path: Path) -> None:
    """Samples by thread and by the deepest frame that is swarmnet's own."""
    seen: dict[str, int] = {}
    for line in path.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        own = [f for f in frames if "swarmnet/" in f or "peer/" in f]
        where = f"{frames[0][:24]:24} {own[-1] if own else frames[-1]}"
        seen[where] = seen.get(where, 0) + int(count)
    total = sum(seen.values()) or 1
    print(f"\nstage {peer_index}: where its threads are (share of samples)")
    for where, count in sorted(seen.items(), key=lambda item: -item[1])[:14]:
        print(f"  {100 * count / total:5.1f} %  {where}")


WAYS: dict[str, tuple[str, Callable[[Path, int, bool], list[float]]]] = {
    "a": ("one process", time_one),
    "b": ("torch 1F1B, 2 stages, gloo", time_torch),
    "c": ("swarmnet, 2 stages, libp2p", time_swarm),
    "d": ("torch zero-bubble, 2 stages, gloo", partial(time_torch, role="zero")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ways", default="abdc")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--role", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.role == "one":
        return one_process(options.rounds, options.out)
    if options.role[:4] in ("rank", "zero"):
        return torch_pipeline(
            int(options.role[4:]),
            options.port,
            options.rounds,
            options.out,
            splits=options.role.startswith("zero"),
        )
    tokens = 32 * 256
    seconds: dict[str, list[float]] = {way: [] for way in options.ways}
    with tempfile.TemporaryDirectory() as name:
        for k in range(options.repeat):
            for way in options.ways:
                last = k == options.repeat - 1
                folder = Path(name) / f"{way}{k}"
                folder.mkdir()
                seconds[way] += WAYS[way][1](folder, options.rounds, options.profile and last)
    print(f"\n{'':38}{'tokens/s':>10}{'min':>8}{'max':>8}")
    medians = {}
    for way, values in seconds.items():
        medians[way] = statistics.median(values)
        rates = [tokens / medians[way], tokens / max(values), tokens / min(values)]
        print(f"({way}) {WAYS[way][0]:34}" + f"{rates[0]:10.0f}{rates[1]:8.0f}{rates[2]:8.0f}")
    for one, other in (("c", "b"), ("c", "d"), ("d", "b")):
        if one in medians and other in medians:
            print(f"({one}) / ({other}) = {medians[other] / medians[one]:.3f}")
    return None


if __name__ == "__main__":
    main()
