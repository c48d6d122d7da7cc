from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarmnet.runtime import speed
from swarmnet.runtime.compose import _products
from swarmnet.runtime.machine import build_machine
from swarmnet.runtime.options import PeerOptions
from swarmnet.spec import RunSpec
from swarmnet.training.models.matrices import step_flops
from swarmnet.training.models.registry import (
    model_plan,
    stage_costs,
    stage_matrices,
    stage_parameter_ranges,
)
from tests.swarm.harness import tiny_spec
from tests.training.specs import small_spec, write_text


def expected(spec: RunSpec, folder: Path) -> float:
    costs = stage_costs(model_plan(spec), spec.pipeline.num_stages)
    options = PeerOptions(folder, precision="fp32", threads=1)
    return speed.expected_stage_s(spec, options, costs, "cpu")


def test_a_machine_is_measured_once_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec()
    first = expected(spec, tmp_path)
    assert first > 0
    measured = []
    monkeypatch.setattr(speed, "_measure_layer_s", lambda *args: measured.append(args) or 1.0)
    assert expected(spec, tmp_path) == first
    assert not measured
    wider = spec.model_copy(
        update={"model": spec.model.model_copy(update={"intermediate_size": 512})}
    )
    assert expected(wider, tmp_path) > 0
    assert len(measured) == 1
    (tmp_path / speed.SPEED_FILE).write_text("[]")
    assert expected(spec, tmp_path) > 0
    assert len(measured) == 2


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_run_that_codes_is_measured_too(tmp_path: Path, codec: str) -> None:
    spec = small_spec()
    pipeline = spec.pipeline.model_copy(update={"codec": codec})
    assert expected(spec.model_copy(update={"pipeline": pipeline}), tmp_path) > 0


def test_two_stages_take_half_of_one_each(tmp_path: Path) -> None:
    spec = small_spec()
    one = spec.model_copy(update={"pipeline": spec.pipeline.model_copy(update={"num_stages": 1})})
    assert expected(one, tmp_path) == pytest.approx(
        spec.pipeline.num_stages * expected(spec, tmp_path)
    )


def test_a_slow_machine_is_measured_by_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[float] = []

    def clock() -> float:  # read before and after each pass
        passes.append(3.0)
        return sum(passes)

    monkeypatch.setattr(speed.time, "perf_counter", clock)
    assert expected(small_spec(), tmp_path) > 0
    assert len(passes) == 2


def test_what_cannot_be_measured_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (RuntimeError("out of memory\nand a long story"), MemoryError()):

        def fail(*args: object, error: Exception = error) -> float:
            raise error

        monkeypatch.setattr(speed, "_measure_layer_s", fail)
        assert expected(small_spec(), tmp_path) == 0.0
    assert caplog.messages == [
        "this machine's speed was not measured: out of memory",
        "this machine's speed was not measured: MemoryError",
    ]
    assert not (tmp_path / speed.SPEED_FILE).exists()


def test_who_lends_a_quarter_of_the_device_says_a_quarter_of_its_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_measure_layer_s", lambda *args: 1.0)
    machine = build_machine(small_spec(), PeerOptions(state_dir=tmp_path, feed=False))
    assert machine.measure is not None
    whole_s = machine.measure()
    device: Any = machine.device
    device.limit_share(0.25)
    assert machine.measure() == pytest.approx(4 * whole_s)
    device.limit_share(None)
    assert machine.measure() == whole_s
    costs = machine.stage_costs
    assert costs is not None
    assert len(costs) == small_spec().pipeline.num_stages


@pytest.mark.parametrize(
    ("kind", "of_run", "wish"),
    [
        ("memory", "memory", "auto"),
        ("disk", "disk", "auto"),
        ("memory", "disk", "host"),
        ("disk", "memory", "disk"),
    ],
)
@pytest.mark.parametrize("mode", ["zero", "delayed", "local", "gossip"])
def test_the_optimizer_is_where_this_machine_wants_it_else_the_run(
    tmp_path: Path, kind: str, of_run: str, wish: Any, mode: str
) -> None:
    spec = tiny_spec(tmp_path, num_stages=1, sync={"optimizer_store": of_run, "mode": mode})
    options = PeerOptions(state_dir=tmp_path, feed=False, optimizer_memory=wish)
    machine = build_machine(spec, options)
    stage, optimizer = machine.build(0)

    def num_mapped() -> int:
        folder = str(tmp_path / "optimizer")
        return sum(folder in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = num_mapped()
    optimizer.create(0)
    own_steps = machine.build_local(stage, optimizer)
    assert (own_steps is not None) == (mode in ("local", "gossip"))
    # Mean and square of the one shard; or the outer momentum of that, and both of all own shards.
    expected = 2 if own_steps is None else 1 + 2 * len(stage.shard_sizes)
    assert num_mapped() - before == (expected if kind == "disk" else 0)


@pytest.mark.parametrize(("asked", "device", "other"), [(2, 2, 1), (None, 3, 1)])
def test_threads_are_the_devices(
    tmp_path: Path, asked: int | None, device: int, other: int
) -> None:
    """In a process of its own: how many threads an operation has is a process's setting."""
    script = f"""
import asyncio, pathlib, torch
from swarmnet.runtime.machine import build_machine
from swarmnet.runtime.options import PeerOptions
from tests.training.specs import small_spec, write_text
torch.set_num_threads(3)
options = PeerOptions(pathlib.Path({str(tmp_path)!r}), precision="fp32", threads={asked})

async def main():
    machine = build_machine(small_spec(), options)
    print(await machine.device.run("other", torch.get_num_threads), torch.get_num_threads())
    await machine.device.close()

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == f"{device} {other}"


def test_products_are_measured_where_primaries_make_them(tmp_path: Path) -> None:
    """Muon's, in modes in which primaries make its steps."""
    assert 1e8 < speed.product_flops_per_s("cpu") < 1e14
    plain = small_spec(write_text(tmp_path))
    muon = small_spec(write_text(tmp_path), optimizer={"kind": "muon"})
    alone = small_spec(write_text(tmp_path), optimizer={"kind": "muon"}, sync={"mode": "local"})
    options = PeerOptions(tmp_path, precision="fp32", threads=1)
    measures = [build_machine(s, options).measure_products for s in (plain, muon, alone)]
    assert [measure is not None for measure in measures] == [False, True, False]
    assert _products(plain, options) == _products(alone, options) == ()
    flops = [step_flops(m.shape) for k in range(2) for m in stage_matrices(muon, k)]
    sizes = [stage_parameter_ranges(muon, k)[-1].stop for k in range(2)]
    found = _products(muon, options)
    assert sum(4 * p * n for p, n in zip(found, sizes, strict=True)) == pytest.approx(sum(flops))
