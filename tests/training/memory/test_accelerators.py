"""Devices that are no GPU of NVIDIA's: what they have is used, and what they lack done without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import swarmnet.training.accelerators as accelerators
from swarmnet.runtime.computing import free_bytes_of
from swarmnet.training.codecs.fused import is_right_on
from swarmnet.training.codecs.registry import codec_of
from swarmnet.training.computing import choose_precision
from swarmnet.training.memory.device_copies import StreamCopies, WaitingCopies, copies_of
from swarmnet.training.passes import crossing
from swarmnet.training.stage import build_stage
from tests.training.flights import fly, gradient, optimizers_of, parameters, update
from tests.training.memory.fake_device import COMPILER, NAME, build
from tests.training.specs import small_spec

MPS, XPU = torch.device("mps:0"), torch.device("xpu:0")
GIB = 1 << 30


def has(monkeypatch: pytest.MonkeyPatch, **module: Any) -> None:
    """Every type of device is one whose module has this alone."""
    monkeypatch.setattr(accelerators, "module_of", lambda kind: SimpleNamespace(**module))


@pytest.mark.parametrize(
    ("able", "precision"),
    [({torch.bfloat16, torch.float16}, "bf16"), ({torch.float16}, "fp16"), (set(), "fp32")],
)
def test_the_precision_is_one_that_the_device_has(
    monkeypatch: pytest.MonkeyPatch, able: set[torch.dtype], precision: str
) -> None:
    monkeypatch.setattr(accelerators, "computes_in", lambda device, dtype: dtype in able)
    spec = small_spec()
    assert choose_precision(spec, device=MPS) == precision
    assert choose_precision(spec, "fp32", MPS) == "fp32", "who asks for it gets it"
    assert choose_precision(spec) == "fp32", "of a CPU"


def test_what_a_device_says_of_bfloat16_comes_before_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerators.computes_in.cache_clear()
    has(monkeypatch, is_bf16_supported=lambda: False)
    assert not accelerators.computes_in(torch.device("cpu"), torch.bfloat16)
    accelerators.computes_in.cache_clear()
    has(monkeypatch)
    assert accelerators.computes_in(torch.device("cpu"), torch.bfloat16)
    assert not accelerators.computes_in(XPU, torch.float32), "there is none here"
    accelerators.computes_in.cache_clear()


def test_copies_go_beside_where_there_are_streams_and_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams: dict[str, Any] = {
        name: lambda *_, **__: SimpleNamespace() for name in ("Stream", "stream", "current_stream")
    }
    has(monkeypatch, Event=None, **streams)
    monkeypatch.setattr(accelerators, "has_pinned_memory", lambda device: True)
    assert isinstance(copies_of(XPU), StreamCopies)
    monkeypatch.setattr(accelerators, "has_pinned_memory", lambda device: False)
    assert isinstance(copies_of(XPU), WaitingCopies)
    has(monkeypatch, Event=None)
    monkeypatch.setattr(accelerators, "has_pinned_memory", lambda device: True)
    assert isinstance(copies_of(MPS), WaitingCopies)


def test_memory_is_what_the_device_says_and_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, mem_get_info=lambda device: (3 * GIB, 8 * GIB))
    assert free_bytes_of(XPU) == 3 * GIB
    says = {"recommended_max_memory": lambda: 3000, "driver_allocated_memory": lambda: 1000}
    has(monkeypatch, **says)
    assert free_bytes_of(MPS) == 2000, "less than the host has, which it shares"
    has(monkeypatch, **says | {"driver_allocated_memory": lambda: 4000})
    assert free_bytes_of(MPS) == 0
    has(monkeypatch)
    assert free_bytes_of(XPU) > 1000, "it does not say"


def test_a_bound_on_a_device_s_memory_is_one_for_all_that_is_planned_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerators, "_most_bytes", {})
    bounds: list[tuple[float, torch.device]] = []
    card = SimpleNamespace(total_memory=8 * GIB)
    says = {
        "mem_get_info": lambda device: (5 * GIB, 8 * GIB),
        "memory_reserved": lambda device: GIB,
        "get_device_properties": lambda device: card,
        "set_per_process_memory_fraction": lambda *told: bounds.append(told),
    }
    has(monkeypatch, **says)
    accelerators.bound_memory(torch.device("xpu"), 4 * GIB)
    assert free_bytes_of(XPU) == 3 * GIB, "what it has already is of the four"
    assert bounds == [(0.5, XPU)], "torch's allocator gives no more"
    assert free_bytes_of(torch.device("xpu:1")) == 5 * GIB
    has(monkeypatch, **says | {"mem_get_info": lambda device: (GIB, 8 * GIB)})
    assert free_bytes_of(XPU) == GIB, "others have the rest"
    has(monkeypatch)
    assert free_bytes_of(XPU) == 4 * GIB, "it does not say what is free"


def test_want_of_memory_is_known_by_its_word_where_it_has_no_type() -> None:
    assert accelerators.is_out_of_memory(torch.OutOfMemoryError())
    assert accelerators.is_out_of_memory(RuntimeError("MPS backend out of memory (MPS ...)"))
    assert not accelerators.is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not accelerators.is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int6", "int4"])
@pytest.mark.parametrize("codes_there", [True, False])
def test_a_device_with_one_order_of_work_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, codec: str, codes_there: bool
) -> None:
    """Coded there, or by the host where it cannot be trusted."""
    asked: list[bool] = []
    monkeypatch.setattr(
        crossing, "is_right_on", lambda *_: asked.append(codes_there) or codes_there
    )
    spec = small_spec(pipeline={"num_stages": 2, "codec": codec})
    copies = WaitingCopies(torch.device("cpu"))
    here = [build_stage(spec, i) for i in range(2)]
    there = [build_stage(spec, i, make=_with(copies)) for i in range(2)]
    assert asked
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (2, 17), generator=rng, dtype=torch.int32)
    batch = [crossing.from_tensor(t.contiguous()) for t in (tokens[:, :-1], tokens[:, 1:])]
    optimizers = [optimizers_of(spec, row) for row in (here, there)]
    for r in range(2):
        results = [fly(row, (r, 0), *batch) for row in (here, there)]
        assert results[0].loss_sum == results[1].loss_sum
        for ours, theirs in zip(there, here, strict=True):
            assert torch.equal(gradient(ours), gradient(theirs))
        for row, owned in zip((here, there), optimizers, strict=True):
            update(row, owned, results[0].num_tokens, 1.0, r)
        for ours, theirs in zip(there, here, strict=True):
            assert torch.equal(parameters(ours), parameters(theirs))


def _with(copies: WaitingCopies) -> Any:
    from swarmnet.training.stage import TorchStage

    return lambda *args, **options: TorchStage(*args, **options, copies=copies)


def test_a_codec_that_a_device_has_not_is_the_host_s_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    codec: Any = codec_of("int8")
    is_right_on.cache_clear()
    assert is_right_on(codec, 96, torch.device("cpu"))
    assert not is_right_on(codec, 96, XPU)
    (line,) = [r.getMessage() for r in caplog.records if "coded by the host" in r.getMessage()]
    assert line.startswith("int8 is coded by the host, not on xpu:0: ")
    is_right_on.cache_clear()


ON_FAKE_DEVICE = """
import logging, sys
from dataclasses import replace
from itertools import product
from pathlib import Path
import torch
from tests.training.memory import fake_device
fake = fake_device.install(Path(sys.argv[1]))
import swarmnet.training.accelerators as accelerators
from swarmnet.training.arrays import from_tensor
from swarmnet.runtime.computing import choose_computing, updates_right_on
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.ranks import choose_devices
from swarmnet.training.computing import Computing
import swarmnet.training.device_trial as trial
from swarmnet.training.device_trial import SPEC, train, try_device
from swarmnet.training.memory.plan import PRECISIONS, of_streamed, stage_activations, streamed_bytes
from swarmnet.training.stage import build_stage
from swarmnet.training.memory.device_copies import WaitingCopies, copies_of
from swarmnet.training.optimizer import adamw
from swarmnet.training.codecs.fused import is_right_on
from swarmnet.errors import UserError
from swarmnet.spec import RunSpec

device, spec = torch.device("fake:0"), RunSpec.model_validate(SPEC)
assert accelerators.kind() == "fake"
assert isinstance(copies_of(device), WaitingCopies)
options = PeerOptions(Path(sys.argv[2]))
assert choose_devices(spec, options) == ["fake:0"]
computing, line = choose_computing(spec, options, 0, ["fake:0"])
assert computing.precision == "bf16" and computing.updates_on_device, line
assert "bf16 on fake:0" in line

# Whatever it keeps and wherever the update is made: the same bits, and nearly a CPU's (torch has
# other ways through attention there).
here = train(spec, Computing("fp32"), "fake:0")[0]
on_cpu = train(spec, Computing("fp32"), "cpu")[0]
assert abs(here - on_cpu) < 1e-4 * on_cpu, (here, on_cpu)
for activations in ("keep", "blocks", "recompute", "offload"):
    for updates_on_device in (False, True):
        there = Computing("fp32", activations, updates_on_device=updates_on_device)
        assert train(spec, there, "fake:0")[0] == here, there
for activations in ("blocks", "recompute"):
    assert train(spec, Computing("fp32", activations, weights="host"), "fake:0")[0] == here
assert fake.fake_used() < 1 << 20, "nothing stays there"

# Weights that come layer by layer need what the plan says.
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
large = dict(SPEC, model=dict(SPEC["model"], **sizes))
large = RunSpec.model_validate(large)
rng = torch.Generator().manual_seed(1)
shape = trial.SAMPLES, trial.LENGTH
tokens = from_tensor(torch.randint(8, shape, generator=rng, dtype=torch.int32))
for precision, policy in product(("fp32", "bf16"), ("blocks", "recompute")):
    for k in range(2):
        pair = [Computing(precision, policy)] * 2
        pair[k] = replace(pair[k], weights="host")
        stages = [
            build_stage(large, i, computing=c, device="fake:0" if i == k else "cpu")
            for i, c in enumerate(pair)
        ]
        fake.fake_reset_peak()
        before = fake.fake_used()
        for i in range(2):
            trial._pass(stages, (0, i), tokens, tokens)
        peak = fake.fake_peak() - before
        numbers = PRECISIONS[precision]
        held = of_streamed(stage_activations(large, k, numbers)).held(policy, 1)[0]
        plan = sum(streamed_bytes(large, k, numbers)) + held
        weights = numbers.weights * stages[k].num_parameters
        assert plan < 0.9 * (weights + held), "less than where they stay"
        assert 0.9 * plan < peak < 1.12 * plan, (precision, policy, k, peak, plan)
        del stages
from swarmnet.training.passes import crossing
crossing.is_right_on = lambda *_: False  # the host codes
assert train(spec, Computing("fp32"), "fake:0")[0] == here
crossing.is_right_on = is_right_on
assert fake.fake_used() < 1 << 20, "nothing stays there"
for precision in ("bf16", "fp16"):
    assert abs(train(spec, Computing(precision), "fake:0")[0] - here) < 0.05 * here

# Little memory: less is kept, and the numbers are the same.
lines = []
logging.getLogger("swarmnet").addHandler(
    type("Kept", (logging.Handler,), {"emit": lambda self, r: lines.append(r.getMessage())})()
)
for left in range(2_400_000, 400_000, -100_000):
    fake.fake_limit(left)
    try:
        assert train(spec, Computing(), "fake:0")[0] == here
    except RuntimeError as e:
        assert accelerators.is_out_of_memory(e), e
    if any("out of memory in a pass" in line for line in lines):
        break
else:
    raise AssertionError("memory was never short in a pass")
fake.fake_limit(1 << 40)

# `--max-device-memory`: what is kept follows, the peak stays below, and too little is refused.
kept = []
for most in ("200MB", "60MB", "20MB"):
    little = replace(options, max_device_memory=most, precision="fp32")
    computing, line = choose_computing(large, little, 0, ["fake:0"])
    kept.append((computing.activations, computing.updates_on_device, computing.weights))
    before = fake.fake_used()
    fake.fake_reset_peak()
    stage = build_stage(large, 0, computing=computing, device="fake:0")
    in_flight = min(4, computing.max_in_flight)
    outs = [stage.forward((0, i), tokens) for i in range(in_flight)]
    for i, out in enumerate(outs):
        stage.backward((0, i), out)
    peak = fake.fake_peak() - before
    assert peak < float(most[:-2]) * 1e6, (most, peak, kept)
    del stage
assert len(set(kept)) == 3, kept
try:
    choose_computing(large, replace(little, max_device_memory="1MB"), 0, ["fake:0"])
    raise AssertionError("it was not refused")
except UserError as e:
    assert "of this machine's memory" in str(e)
accelerators.bound_memory(device, 1 << 40)

# Without doubles, as mps: the host steps, and it trains all the same.
fake.fake_without_doubles()
for known in (adamw.kernel_of, adamw.is_right_on, is_right_on, accelerators.computes_in):
    known.cache_clear()
assert not updates_right_on(device, spec)
computing, line = choose_computing(spec, options, 0, ["fake:0"])
assert not computing.updates_on_device and "in the host's memory" in line
assert train(spec, replace(computing, precision="fp32"), "fake:0")[0] == here
assert try_device("fake:0", updates_on_device=False).is_right
print("all of it")
"""


@pytest.mark.skipif(COMPILER is None, reason="the fake device needs a C++ compiler")
def test_a_peer_computes_on_a_device_that_torch_takes_for_a_real_one(tmp_path: Path) -> None:
    """In a process of its own: torch has such a device for good."""
    library = build(tmp_path)
    assert NAME == "fake"
    done = subprocess.run(
        [sys.executable, "-c", ON_FAKE_DEVICE, str(library), str(tmp_path / "state")],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "all of it\n", done.stderr[-3000:]
