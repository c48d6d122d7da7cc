"""How a machine computes: its options before the run's, the run's before what suits it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import swarmnet.training.accelerators as accelerators
from swarmnet.errors import UsageError, UserError
from swarmnet.runtime.computing import choose_computing, free_bytes_of
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.ranks import choose_devices
from swarmnet.spec import RunSpec
from swarmnet.training.memory.activation_choice import expected_in_flight, known_activations
from swarmnet.training.memory.plan import EXPERTS, FP32, SEQUENCES, of_ranks
from swarmnet.training.models.registry import stage_parameter_ranges
from tests.training.ranks.test_family_ranks import spec_of
from tests.training.specs import small_spec

CPU = ["cpu"]
LARGE = {"hidden_size": 256, "intermediate_size": 704, "max_position_embeddings": 256}


def large(**pipeline: Any) -> RunSpec:
    wanted = {"num_stages": 2, "global_batch": 64} | pipeline
    return small_spec(model=LARGE, pipeline=wanted)


def choose(
    folder: Path, spec: RunSpec, devices: list[str] = CPU, **options: Any
) -> tuple[Any, str]:
    return choose_computing(spec, PeerOptions(state_dir=folder, **options), 0, devices)


def test_a_machine_differs_from_its_run(tmp_path: Path) -> None:
    spec = large(precision="bf16", activations="recompute")
    computing, line = choose(tmp_path, spec)
    assert (computing.precision, computing.activations) == ("bf16", "recompute")
    assert line.startswith("stage 0: bf16 on cpu, activations recompute, about ")
    computing, _ = choose(tmp_path, spec, precision="fp16", activations="offload")
    assert (computing.precision, computing.activations) == ("fp16", "offload")
    assert computing.folder == str(tmp_path / "activations")


def test_free_memory_decides_and_the_person_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_free(num_bytes: float) -> tuple[Any, str]:
        monkeypatch.setattr("swarmnet.runtime.computing.free_bytes_of", lambda device: num_bytes)
        return choose(tmp_path, large())

    computing, line = with_free(64e9)
    assert computing.activations == "keep"
    assert "with 6 microbatches in flight (51.2 GB free)" in line
    assert "let in" not in line
    seen = [with_free(megabytes * 1e6)[0].activations for megabytes in (400, 160, 110)]
    assert seen[0] == "keep"
    assert seen[1] in ("blocks", "recompute")
    with pytest.raises(UserError, match=r"stage 0 needs .* of this machine's memory"):
        with_free(1e6)
    computing, line = with_free(26e6)
    assert line.endswith("; no more than 2 are let in; optimizer state in the host's memory")
    assert computing.max_in_flight == 2
    assert computing.activations != "offload"  # to a disk only where somebody wants it


@pytest.mark.parametrize(
    ("devices", "cores", "where"),
    [
        (["cuda:0"], 4, "cuda:0"),
        (["cuda:0", "cuda:1"], 1, "cuda:0, cuda:1 (2 ranks)"),
        (["cpu", "cpu"], 2, "cpu (2 ranks)"),
        (["cpu"] * 4, 2, "cpu (4 ranks, which share 2 cores)"),
    ],
)
def test_the_person_is_told_of_all_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: list[str],
    cores: int,
    where: str,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr("swarmnet.runtime.computing.free_bytes_of", lambda _: 64 << 30)
    monkeypatch.setattr(accelerators, "total_bytes", lambda _: 64 << 30)
    _, line = choose(tmp_path, small_spec(), devices, precision="fp32", tp=len(devices))
    assert line.startswith(f"stage 0: fp32 on {where}, activations ")


def test_the_smallest_of_several_devices_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has an equal part. The first is asked what is free; the others, what they have."""
    sizes = {"cuda:0": 400e6, "cuda:1": 400e6}
    monkeypatch.setattr(
        "swarmnet.runtime.computing.free_bytes_of",
        lambda device: int(sizes.get(str(device), 64e9) - 10e6),
    )
    monkeypatch.setattr(accelerators, "total_bytes", lambda device: int(sizes[str(device)]))

    def chosen() -> tuple[Any, str]:
        return choose(tmp_path, large(), ["cuda:0", "cuda:1"], precision="fp32", tp=2)

    alike, line = chosen()
    assert alike.activations == "keep"
    assert "smallest" not in line
    sizes["cuda:1"] = 36e6
    less, line = chosen()
    assert less.activations != "keep" or less.max_in_flight < alike.max_in_flight
    assert "; cuda:1 is the smallest of its devices, and decides for all; optimizer state" in line
    sizes.update({"cuda:0": 36e6, "cuda:1": 400e6})
    of_the_first, line = chosen()
    assert of_the_first.activations == less.activations
    assert "; cuda:0 is the smallest of its devices, and decides for all; optimizer state" in line
    sizes.update({"cuda:0": 400e6, "cuda:1": 5e6})
    with pytest.raises(UserError, match=r"needs .* of this machine's memory"):
        chosen()


@pytest.mark.parametrize(
    ("megabytes", "options", "mode", "place"),
    [
        (64_000, {}, "zero", "in the device's memory"),
        (64_000, {"optimizer_memory": "device"}, "zero", "in the device's memory"),
        (64_000, {"optimizer_memory": "host"}, "zero", "in the host's memory"),
        (64_000, {"optimizer_memory": "disk"}, "zero", "in files"),
        (64_000, {}, "delayed", "in the host's memory"),
        (44, {}, "zero", "in the host's memory"),
        (44, {"optimizer_memory": "device"}, "zero", "in the device's memory"),
    ],
)
def test_optimizer_state_lies_where_there_is_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    megabytes: int,
    options: dict[str, Any],
    mode: str,
    place: str,
) -> None:
    monkeypatch.setattr("swarmnet.runtime.computing.free_bytes_of", lambda device: megabytes * 1e6)
    spec = small_spec(
        model=LARGE, pipeline={"num_stages": 2, "global_batch": 64}, sync={"mode": mode}
    )
    asked: list[torch.device] = []

    def is_right(device: torch.device, _: object) -> bool:
        asked.append(device)
        return True

    monkeypatch.setattr("swarmnet.runtime.computing.updates_right_on", is_right)
    computing, line = choose(tmp_path, spec, ["cuda:0"], precision="fp32", **options)
    assert place in line.rsplit(";", 1)[1]
    assert computing.updates_on_device == ("device's" in place)
    assert bool(asked) == computing.updates_on_device, "kernels run only where they may be used"


def test_optimizer_state_that_fits_nowhere_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(match: str, devices: list[str], mode: str = "zero") -> None:
        with pytest.raises(UserError, match=match):
            choose(tmp_path, small_spec(sync={"mode": mode}), devices, optimizer_memory="device")

    refused("there is no GPU at work here; use host", CPU)
    refused("mode delayed makes its updates beside a round", ["cuda:0"], "delayed")
    refused("device is for one rank", ["cuda:0", "cuda:1"])
    refused("makes other bits than the CPUs", ["cuda:0"])  # this torch has no CUDA
    monkeypatch.setattr("swarmnet.runtime.computing.updates_right_on", lambda *_: True)
    monkeypatch.setattr("swarmnet.runtime.computing.free_bytes_of", lambda device: 1e5)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: False)
    refused(r"needs .* of this machine's memory", ["cuda:0"])


@pytest.mark.parametrize(
    ("size", "devices", "why"),
    [
        ("8GB", CPU, "there is no GPU at work here; --max-memory bounds what a CPU"),
        ("a lot", ["cuda:0"], "'a lot': an amount is written 4GB"),
    ],
)
def test_a_bound_on_device_memory_that_means_nothing_is_refused(
    tmp_path: Path, size: str, devices: list[str], why: str
) -> None:
    with pytest.raises(UsageError, match=f"--max-device-memory:? {why}"):
        choose(tmp_path, large(), devices, max_device_memory=size)


def test_weights_that_have_no_room_on_a_device_lie_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_free(megabytes: float, host: float = 64_000, **options: Any) -> tuple[Any, str]:
        def free(device: Any) -> float:
            return 1e6 * (host if torch.device(device).type == "cpu" else megabytes)

        monkeypatch.setattr("swarmnet.runtime.computing.free_bytes_of", free)
        return choose(tmp_path, large(), ["cuda:0"], precision="fp32", **options)

    monkeypatch.setattr("swarmnet.runtime.computing.updates_right_on", lambda *_: True)
    computing, line = with_free(64_000)
    assert computing.weights == "device"
    assert "weights" not in line
    for computing, line in (with_free(10), with_free(64_000, weights_memory="host")):
        assert computing.weights == "host"
        assert computing.activations in ("blocks", "recompute")
        assert not computing.updates_on_device
        assert "; weights in the host's memory, from where each layer's come; optimizer" in line
    assert "weights in files" in with_free(64_000, weights_memory="disk")[1]
    with pytest.raises(UserError, match=r"of this machine's memory"):
        with_free(10, weights_memory="device")
    with pytest.raises(UserError, match=r"of this machine's memory"):
        with_free(0.1)
    with pytest.raises(UserError, match=r"of the host's memory for its weights"):
        with_free(64_000, host=1, weights_memory="host")


@pytest.mark.parametrize(
    ("options", "devices", "why"),
    [
        ({"weights_memory": "host"}, CPU, "there is no GPU at work here .*; use disk"),
        ({"tp": 2}, ["cuda:0", "cuda:1"], "it is for one rank; use device, or take --tp 1"),
        ({"precision": "fp16"}, ["cuda:0"], "add --precision bf16 or fp32"),
        ({"compile": True}, ["cuda:0"], "leave --compile out"),
        ({"optimizer_memory": "device"}, ["cuda:0"], "use --optimizer-memory host"),
        ({"activations": "keep"}, ["cuda:0"], "use blocks or recompute"),
    ],
)
def test_what_does_not_go_with_weights_elsewhere_is_refused(
    tmp_path: Path, options: dict[str, Any], devices: list[str], why: str
) -> None:
    wanted = {"weights_memory": "host", "precision": "fp32"} | options
    with pytest.raises(UsageError, match=rf"--weights-memory host: .*{why}"):
        choose(tmp_path, large(), devices, **wanted)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cp": 5}, "--cp 5: this machine has 4 cores, and not a GPU for each rank; take --cp 4"),
        ({"cp": 2, "tp": 4}, "--cp 2 --tp 4: this machine has 4 cores.*; take 4 ranks, or less"),
        ({"cp": 2, "tp": 3}, "--tp 3: .*; possible: 1, 2, 4"),
        ({"cp": 2, "local": "fsdp"}, "--cp does not go with --local fsdp; leave"),
        ({"cp": 2, "sequence_parallel": True}, "--cp does not go with --sequence-parallel; leave"),
        ({"cp": 9}, "--cp 9: sequences of 16 tokens are too short.*take --cp 8, or less"),
        ({"cp": 2, "ep": 2}, "--cp does not go with --ep; leave one of them out"),
        ({"ep": 5}, "--ep 5: this machine has 4 cores, and not a GPU for each rank; take --ep 4"),
        ({"ep": 9, "tp": 2}, "--ep 9: each rank has one at least of the 8 experts; take --ep 8"),
        ({"ep": 2, "local": "fsdp"}, "--ep does not go with --local fsdp; leave"),
        ({"ep": 2, "sequence_parallel": True}, "--ep does not go with --sequence-parallel; leave"),
        ({"ep": 9}, "--ep 9: each rank has one at least of the 8 experts; take --ep 8, or less"),
    ],
)
def test_ranks_that_cannot_share_a_microbatch_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    spec = small_spec()
    if "cp" not in options:
        spec = small_spec(model={"num_experts": 8}, pipeline={"microbatch": 16, "global_batch": 32})
    with pytest.raises(UserError, match=why):
        choose_devices(spec, PeerOptions(state_dir=tmp_path, **options))


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_ranks_that_share_sequences_have_the_stage_each_and_a_part_of_the_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What has to be free so that all is kept: of a GPU less, of the memory of all ranks more."""
    spec = large()
    one, two = (kept(spec, num_ranks) for num_ranks in (1, 2))
    expected = two - one
    assert expected < -0.4 * one
    if kind == "cpu":
        expected = 2 * two - one + 4 * stage_parameter_ranges(spec, 0)[-1].stop
        assert expected > 0
    more = least(tmp_path, monkeypatch, spec, kind, cp=2)
    more -= least(tmp_path, monkeypatch, spec, kind, cp=1)
    assert 0.8 * more == pytest.approx(expected, abs=4e3)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_ranks_that_divide_experts_have_some_each_and_some_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of eight experts four each, which are in memory once where that is of all ranks."""
    spec = small_spec(
        model=LARGE | {"num_experts": 8}, pipeline={"num_stages": 2, "global_batch": 64}
    )
    ranges = stage_parameter_ranges(spec, 0)
    experts, all_of_it = 2 * 8 * 3 * 256 * 704, ranges[-1].stop
    one, two = kept(spec, 1), kept(spec, 2, EXPERTS)
    expected = two - one - 8 * experts // 2
    if kind == "cpu":
        expected = 2 * two - one + 4 * (all_of_it - experts)
    more = least(tmp_path, monkeypatch, spec, kind, ep=2)
    more -= least(tmp_path, monkeypatch, spec, kind, ep=1)
    assert 0.8 * more == pytest.approx(expected, abs=4e3)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_ranks_of_a_row_have_what_one_rank_has_and_more_between_their_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Beside one row: of two rows of GPUs a GPU has less, in one memory they have more."""
    spec = large()
    needs = [
        2 * least(tmp_path, monkeypatch, spec, kind, **ranks)
        if kind == "cuda"
        else least(tmp_path, monkeypatch, spec, kind, **ranks)
        for ranks in ({"tp": 2}, {"cp": 2, "tp": 2})
    ]
    row, rows = (
        of_ranks(one, 2, "tensor", FP32).held("keep", expected_in_flight(spec))[0]
        for one in (known_activations(spec, 0, FP32, n) for n in (1, 2))
        if one is not None
    )
    expected = rows - row
    if kind == "cpu":
        expected = 2 * rows - row + 4 * stage_parameter_ranges(spec, 0)[-1].stop
    assert 0.8 * (needs[1] - needs[0]) == pytest.approx(expected, abs=1e4)


def kept(spec: RunSpec, num_ranks: int, shared: str = SEQUENCES) -> int:
    """Of activations, where all are kept."""
    one = known_activations(spec, 0, FP32, num_ranks, shared)
    assert one is not None
    return one.held("keep", expected_in_flight(spec))[0]


def least(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spec: RunSpec, kind: str, **ranks: int
) -> float:
    """Bytes that have to be free so that a machine keeps all activations of stage 0 in fp32."""
    monkeypatch.setattr("swarmnet.runtime.computing.updates_right_on", lambda *_: False)
    num_ranks = math.prod(ranks.values())
    devices = [kind if kind == "cpu" else f"{kind}:{i}" for i in range(num_ranks)]

    def keeps(free: float) -> bool:
        monkeypatch.setattr("swarmnet.runtime.computing.free_bytes_of", lambda _: free)
        try:
            computing, _ = choose(folder, spec, devices, precision="fp32", **ranks)
        except UserError:  # no room for the weights
            return False
        return bool(computing.weights == "device" and computing.activations == "keep")

    too_little, enough = 0.0, 2e9
    while enough - too_little > 1e3:
        middle = (too_little + enough) / 2
        if keeps(middle):
            enough = middle
        else:
            too_little = middle
    return enough


def test_what_is_fully_sharded_is_recomputed(tmp_path: Path) -> None:
    computing, _ = choose(tmp_path, large(), ["cpu", "cpu"], local="fsdp", tp=2, activations="keep")
    assert computing.activations == "recompute"


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    whole = free_bytes_of(torch.device("cpu"))
    monkeypatch.setattr("swarmnet.system.CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_bytes_of(torch.device("cpu")) == 600_000
    cached = "anon 300000\ninactive_file 50000\nactive_file 20000\nunevictable 7\n"
    (tmp_path / "memory.stat").write_text(cached)
    assert free_bytes_of(torch.device("cpu")) == 670_000
    (tmp_path / "memory.stat").write_text("inactive_file 900000\n")
    assert free_bytes_of(torch.device("cpu")) == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes_of(torch.device("cpu")) > whole / 2


def test_what_does_not_go_together_is_one_line(tmp_path: Path) -> None:
    for own in ("cp", "ep"):
        message = f"--compile: what ranks of --{own} do .*; leave it out, or leave --{own} out"
        with pytest.raises(UsageError, match=message):
            choose(tmp_path, large(), ["cpu", "cpu"], compile=True, **{own: 2})
    drawing = spec_of("llama", 1, document_mask=False, attention_dropout=0.1)
    with pytest.raises(UsageError, match=r"--compile: .* no dropout; leave it out, or take --tp 1"):
        choose(tmp_path, drawing, ["cpu", "cpu"], compile=True, tp=2)


def _has(monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    """torch finds so many accelerators."""
    monkeypatch.setattr(accelerators, "kind", lambda: kind)
    monkeypatch.setattr(accelerators, "num_devices", lambda: number)


@pytest.mark.parametrize(
    ("kind", "num_gpus", "options", "devices"),
    [
        ("cpu", 0, {}, ["cpu"]),
        ("cuda", 1, {}, ["cuda:0"]),
        ("cuda", 1, {"device": "cpu"}, ["cpu"]),
        ("cuda", 2, {}, ["cuda:0", "cuda:1"]),
        ("cuda", 2, {"device": "cpu"}, ["cpu"]),
        ("cuda", 2, {"tp": 1}, ["cuda:0"]),
        ("cpu", 0, {"tp": 2}, ["cpu", "cpu"]),
        ("cuda", 1, {"device": "cpu", "tp": 2}, ["cpu", "cpu"]),
        ("cpu", 0, {"device": "cuda"}, None),
        ("cuda", 1, {"device": "cuda", "tp": 2}, None),
        ("mps", 1, {}, ["mps:0"]),
        ("mps", 1, {"device": "mps"}, ["mps:0"]),
        ("mps", 1, {"device": "cuda"}, None),
        ("xpu", 4, {}, ["xpu:0"]),
        ("xpu", 4, {"device": "xpu", "tp": 2}, None),
        ("a new one", 1, {}, ["a new one:0"]),
        ("cuda", 4, {"cp": 2}, ["cuda:0", "cuda:1"]),
        ("cuda", 4, {"ep": 1}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cuda", 4, {"cp": 1}, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cpu", 0, {"cp": 3}, ["cpu", "cpu", "cpu"]),
        ("cuda", 1, {"device": "cuda", "cp": 2}, None),
    ],
)
def test_devices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    num_gpus: int,
    options: dict[str, Any],
    devices: list[str] | None,
) -> None:
    _has(monkeypatch, kind, num_gpus)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    wanted = PeerOptions(state_dir=tmp_path, **options)
    if devices is None:
        with pytest.raises(UserError, match="such devices that torch can use"):
            choose_devices(small_spec(), wanted)
    else:
        assert choose_devices(small_spec(), wanted) == devices


@pytest.mark.parametrize(
    ("kind", "num_gpus", "options", "message"),
    [
        ("cuda", 2, {"tp": 4}, "--tp 4: .* has 2 for them; take --tp 2, or --device cpu"),
        ("cuda", 1, {"tp": 2, "local": "fsdp"}, "take --tp 1, or --device cpu"),
        ("cuda", 1, {"cp": 3}, "--cp 3: .* has 1 for them; take --cp 1, or --device cpu"),
        ("cuda", 3, {"cp": 2, "tp": 2}, "--cp 2 --tp 2: .* take 3 ranks, or --device cpu"),
        ("xpu", 4, {"tp": 2}, "--tp 2: .* has 1 for them; take --tp 1, or --device cpu"),
        ("mps", 1, {"tp": 2}, "take --tp 1, or --device cpu"),
    ],
)
def test_more_ranks_than_cards_do_not_become_processes_on_the_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    num_gpus: int,
    options: dict[str, Any],
    message: str,
) -> None:
    _has(monkeypatch, kind, num_gpus)
    with pytest.raises(UsageError, match=message):
        choose_devices(small_spec(), PeerOptions(state_dir=tmp_path, **options))
