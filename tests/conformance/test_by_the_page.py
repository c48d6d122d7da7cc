"""The parts of the conformance client that need no peer, against the program: whoever writes these
from `docs/protocol.md` gets what swarmnet gets. Nothing that they import is swarmnet's."""

from __future__ import annotations

import ast
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from swarmnet.protocol import slots
from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.sync_modes import SyncPlan
from swarmnet.protocol.update import placement
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import from_tensor, to_tensor
from swarmnet.training.computing import Computing
from swarmnet.training.data.held_out import divide
from swarmnet.training.data.order import seed_of
from swarmnet.training.data.packing import DialogueSamples, Documents, TextSamples
from swarmnet.training.data.store import Store, StoreWriter
from swarmnet.training.models.base import ParameterRange
from swarmnet.training.models.registry import stage_parameter_ranges, stage_shard_sizes
from swarmnet.training.optimizer.rates import learning_rate
from swarmnet.training.optimizer.shards import ShardedAdamW
from swarmnet.training.stage import build_stage
from swarmnet.transport import frames as ours
from swarmnet.wire import Array, pack
from tests.conformance import channel, model, records, rounds, samples
from tests.protocol.making import mask_of
from tests.transport.test_frames import read

HERE = Path(__file__).parent
CLIENT = sorted(p for p in HERE.glob("*.py") if not p.name.startswith(("test_", "__")))
PACKAGES = {
    "base58",
    "cryptography",
    "libp2p",
    "msgpack",
    "multiaddr",
    "numpy",
    "rfc8785",
    "trio",
    "xxhash",
}
"""Of others, that the client is made of."""
STANDARD = {
    "__future__",
    "argparse",
    "collections",
    "contextlib",
    "dataclasses",
    "hashlib",
    "importlib",
    "itertools",
    "json",
    "math",
    "ssl",
    "pathlib",
    "struct",
    "sys",
    "time",
    "typing",
}


@pytest.mark.parametrize("path", CLIENT, ids=lambda path: path.stem)
def test_the_client_has_nothing_of_swarmnet(path: Path) -> None:
    known = {f"tests.conformance.{p.stem}" for p in CLIENT} | {"tests.conformance"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = {node.module or ""}
            assert not node.level
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        else:
            assert not (isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"))
            continue
        for name in names:
            top = name.partition(".")[0]
            assert top in PACKAGES or top in STANDARD or name in known, name


# ---- what follows from a spec ---------------------------------------------------------------


def drawn_spec(rng: random.Random) -> RunSpec:
    heads = rng.choice([1, 2, 4, 6])
    layers = rng.randint(1, 7)
    stages = rng.randint(1, layers)
    spec = {
        "seed": rng.randrange(1 << 53),
        "model": {
            "hidden_size": 2 * heads * rng.randint(2, 6),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": rng.choice([k for k in (1, 2, 3, 6) if heads % k == 0]),
            "intermediate_size": rng.randint(16, 40),
            "vocab_size": 256 + rng.randint(0, 9),
            "max_position_embeddings": 16,
        },
        "data": {"paths": ["x"]},
        "optimizer": {
            "learning_rate": rng.uniform(1e-4, 1e-2),
            "rounds": rng.randint(10, 30),
            "warmup_rounds": rng.randint(0, 9),
            "beta1": rng.choice([0.9, 0.4, 0.5, 0.0]),
            "weight_decay": rng.choice([0.1, 0.0, 0.5]),
        },
        "pipeline": {"num_stages": stages, "global_batch": 8, "microbatch": 2},
    }
    run = RunSpec.model_validate(spec)
    cut = random_cut(rng, layers + 3, stages)
    return run.resolved(layers=cut, shard_parameters=rng.choice([1000, 1024, 4096, 1 << 20]))


def random_cut(rng: random.Random, num_layers: int, num_stages: int) -> tuple[int, ...]:
    edges = sorted(rng.sample(range(1, num_layers), num_stages - 1))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, num_layers], strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_parameters_and_shards_of_each_stage_follow_from_the_canonical_spec(seed: int) -> None:
    run = drawn_spec(random.Random(seed))
    spec = json.loads(run.canonical())
    for stage in range(run.pipeline.num_stages):
        theirs = [(p.name, p.shape, p.start, p.stop) for p in model.parameters(spec, stage)]
        ranges = stage_parameter_ranges(run, stage)
        assert theirs == [(p.name, p.shape, p.start, p.stop) for p in ranges]
        assert tuple(model.shard_sizes(spec, stage)) == stage_shard_sizes(run, stage)


@pytest.mark.parametrize("seed", range(3))
def test_first_weights_follow_from_the_canonical_spec(seed: int) -> None:
    run = drawn_spec(random.Random(seed))
    spec = json.loads(run.canonical())
    stage = run.pipeline.num_stages - 1
    built = build_stage(run, stage)
    shards = [to_tensor(built.parameter_shard(j)) for j in range(len(built.shard_sizes))]
    difference = np.abs(torch.cat(shards).numpy() - model.first_weights(spec, stage)).max()
    assert difference < 1e-5 * 0.02


@pytest.mark.parametrize("seed", range(2))
def test_a_pass_gives_the_loss_and_the_gradient_of_the_head(seed: int) -> None:
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    run = drawn_spec(rng)
    spec = json.loads(run.canonical())
    stages, weights = [], {}
    for stage in range(run.pipeline.num_stages):
        built = build_stage(run, stage, computing=Computing(activations="keep"))
        stages.append(built)
        weights |= {name: p.numpy() for name, p in built.state_dict().items()}
    inputs, targets = (draw.integers(0, 256, (2, 16)).astype(np.int32) for _ in range(2))
    targets[0, :5] = samples.IGNORED
    passed = Array("int32", (2, 16), inputs.tobytes())
    wanted = Array("int32", (2, 16), targets.tobytes())
    for built in stages[:-1]:
        passed = built.forward((0, 1), passed)
    done = stages[-1].forward_backward((0, 1), passed, wanted)
    found = model.passed(spec, weights, inputs, targets)
    assert found.num_tokens == done.num_tokens == 27
    assert found.loss_sum == pytest.approx(done.loss_sum, rel=1e-5)
    shards = range(len(stages[-1].shard_sizes))
    gradient = torch.cat([to_tensor(stages[-1].gradient_shard(j)) for j in shards]).numpy()
    head = gradient[-weights["lm_head.weight"].size :].reshape(found.head_gradient.shape)
    np.testing.assert_allclose(found.head_gradient, head, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_steps_are_those_of_the_page(seed: int) -> None:
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    run = drawn_spec(rng)
    spec = json.loads(run.canonical())["optimizer"]
    shapes = [(7, 11), (13,), (5, 4, 3), (64, 8)]
    has_decay = np.concatenate([np.full(math.prod(s), len(s) > 1) for s in shapes])
    size, start, ranges = len(has_decay), 0, []
    for i, shape in enumerate(shapes):
        ranges.append(ParameterRange(str(i), start, shape, math.prod(shape)))
        start += math.prod(shape)
    optimizer = ShardedAdamW(ranges, [size], run.optimizer)
    optimizer.create(0)
    values = draw.normal(0, 0.02, size).astype(np.float32)
    state = model.State(np.zeros(size, np.float32), np.zeros(size, np.float32), 0)
    for r in range(5):
        gradient = draw.normal(0, 10, size).astype(np.float32)
        scale = rng.uniform(1e-4, 1e-3)
        sums = from_tensor(torch.tensor(gradient))
        _, result = optimizer.step(0, from_tensor(torch.tensor(values)), sums, scale, r)
        scaled = gradient * np.float32(scale)
        values, state = model.step(spec, r, values, state, scaled, has_decay)
        mean, square = (to_tensor(a).numpy() for a in optimizer.export(0)[1])
        np.testing.assert_array_equal(to_tensor(result).numpy(), values)
        np.testing.assert_array_equal(mean, state.mean)
        np.testing.assert_array_equal(square, state.square)
        values = to_tensor(result).numpy().copy()


def test_learning_rates_are_those_of_the_page() -> None:
    for seed in range(20):
        drawn = drawn_spec(random.Random(seed))
        rounds, warmup = drawn.optimizer.rounds, drawn.optimizer.warmup_rounds
        for schedule in (
            {},
            {"schedule": "wsd", "decay_rounds": random.Random(seed).randint(1, rounds - warmup)},
            {"schedule": "constant", "rounds": rounds * (seed % 2)},
        ):
            values = drawn.model_dump()
            values["optimizer"] |= schedule
            run = RunSpec.model_validate(values)
            spec = json.loads(run.canonical())["optimizer"]
            for r in range(rounds + 2):
                assert model.learning_rate(spec, r) == learning_rate(run.optimizer, r)


# ---- rounds ---------------------------------------------------------------------------------


def test_feeders_are_those_of_the_page() -> None:
    rng = random.Random(1)
    states = ("joining", "active", "active", "leaving", "left", "observing")
    for _ in range(200):
        view, said = View("me"), []
        for name in "abcde"[: rng.randint(0, 5)]:
            record = Record(
                name,
                "run",
                1,
                1,
                state=rng.choice(states),
                stage=rng.choice([-1, 0, 0, 1]),
                has_data=rng.random() < 0.6,
            )
            view.merge(record, 0.0)
            if record.state != "left":
                said.append(as_read(record))
        assert rounds.feeders(said) == list(assignment.feeders(view, 0.0))


def as_read(record: Record) -> dict[str, Any]:
    return msgpack.unpackb(pack(record))


def test_shares_and_sets_of_slots_are_those_of_the_page() -> None:
    rng = random.Random(2)
    for _ in range(200):
        num_slots, num_feeders = rng.randint(1, 100), rng.randint(1, 20)
        for rank in range(num_feeders):
            share = slots.share_of(rank, num_feeders, num_slots)
            assert rounds.share(rank, num_feeders, num_slots) == share
        some = {s for s in range(num_slots) if rng.random() < 0.3}
        found = slots.SlotSet.of(mask_of(some))
        assert rounds.slots_of({"first": found.first, "bits": found.bits}) == some


@pytest.mark.parametrize("replication", [1, 2, 3, 6])
def test_owners_are_those_of_the_page(replication: int) -> None:
    rng = random.Random(3)
    for _ in range(20):
        weights = {f"peer-{i}": 2.0 ** rng.randint(0, 3) for i in range(rng.randint(1, 8))}
        stage, num_shards = rng.randint(0, 3), rng.randint(1, 20)
        of = placement.Placement(stage, num_shards, weights, replication)
        found = rounds.orders(stage, num_shards, weights, replication)
        assert found == [list(of.order(j)) for j in range(num_shards)]


def test_due_shards_are_those_of_the_page() -> None:
    for local_steps, fragments in ((1, 1), (20, 1), (20, 7), (5, 5), (3, 8)):
        plan = SyncPlan("local", 50, local_steps, fragments, warmup_rounds=7)
        for j in range(10):
            for r in range(50):
                due = rounds.is_due(
                    j, r, rounds=50, warmup=7, local_steps=local_steps, fragments=fragments
                )
                assert due == plan.is_due(j, r)


# ---- samples --------------------------------------------------------------------------------

END_OF_TEXT = 3


def made_store(folder: Path, rng: random.Random, *, dialogues: bool) -> Store:
    """Documents of random lengths, some equal, with random tokens."""
    draw = np.random.default_rng(rng.randrange(1 << 30))
    writer = StoreWriter(folder, np.dtype(np.uint16), END_OF_TEXT, dialogues)
    longest = rng.choice([12, 40, 600])
    for _ in range(rng.randint(3, 60)):
        ids = draw.integers(4, 400, rng.randint(2, min(longest, 24 if dialogues else 600)))
        for _ in range(rng.choice([1, 1, 1, 2])):
            learned = draw.integers(0, 2, len(ids)).astype(np.uint8) if dialogues else None
            writer.write(ids.astype(np.uint16), 0, learned)
            writer.end_document()
    about = writer.finish({}, ())
    writer.close()
    return Store(folder, about)


@pytest.mark.parametrize("dialogues", [False, True], ids=["text", "dialogues"])
@pytest.mark.parametrize("least", ["sample", "document"])
@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.3])
def test_samples_are_those_of_the_page(
    tmp_path: Path, dialogues: bool, least: str, fraction: float
) -> None:
    rng = random.Random(f"{dialogues} {least} {fraction}")
    num_held_out = 0
    for k in range(4):
        (tmp_path / str(k)).mkdir()
        store = made_store(tmp_path / str(k), rng, dialogues=dialogues)
        length, seed, masks = 24, samples.seed_of(rng.randrange(99), "documents", 0), k % 2 == 0
        division = divide(store, fraction, length, holds_samples=least == "sample")
        documents = Documents(division, seed, held_out=False)
        if dialogues:
            ours = DialogueSamples(documents, length, END_OF_TEXT)
        else:
            ours = TextSamples(documents, length, END_OF_TEXT, masks=masks)

        ends, hashes = (store.file(f"{name}.bin").view("<u8") for name in ("ends", "hashes"))
        source = samples.Source(store.tokens, store.learned, ends, hashes)
        trained = samples.Trained(source, fraction, length, least=least)
        if dialogues:
            found = samples.of_dialogues(source, trained, seed, length, END_OF_TEXT)
        else:
            found = samples.of_text(source, trained, seed, length, END_OF_TEXT, masks=masks)
        assert len(found) == ours.num_samples
        for i, sample in enumerate(found):
            assert sample.inputs.tolist() == ours.sample(i).inputs.tolist()
            assert sample.targets.tolist() == ours.sample(i).targets.tolist()
            assert sample.documents == ours.sample(i).documents
        num_held_out += len(store.tokens) - ours.num_tokens
    assert (num_held_out > 0) == (fraction > 0)


def test_seeds_and_places_are_those_of_the_page() -> None:
    rng = random.Random(4)
    for _ in range(50):
        seed, size = rng.randrange(1 << 53), rng.randint(1, 1000)
        epoch, position = rng.randrange(9), rng.randrange(size)
        assert samples.permuted(seed, epoch, position, size) == slots.permuted(
            seed, epoch, position, size
        )
        assert samples.seed_of(seed, "samples", 3) == seed_of(seed, "samples", 3)


# ---- bytes ----------------------------------------------------------------------------------


def test_what_the_client_writes_is_read_and_what_we_write_is_read_by_it() -> None:
    values = np.array([1.0, -2.0, 3.5], np.float32)
    tokens = np.arange(300_000, dtype=np.int32).reshape(3, -1)
    head = {"m": "x", "b": {"k": 1}}
    written = channel.frames(channel.REQUEST, 7, head, values, tokens)
    arrays = (
        Array("float32", (3,), values.tobytes()),
        Array("int32", (3, 100_000), tokens.tobytes()),
    )
    packed = ours.head_frame(ours.REQUEST, 7, head, arrays)
    assert written == packed + b"".join(ours.part_frames(ours.REQUEST_PART, 7, arrays))
    assert len(read(written).done) == 1
    reader, found = channel.Reader(), []
    for at in range(0, len(written), 65_537):
        found += reader.feed(written[at : at + 65_537])
    (message,) = found
    assert message.body == {"k": 1}
    assert all(map(np.array_equal, message.arrays, (values, tokens)))


def test_the_reader_of_the_client_takes_no_broken_frame() -> None:
    whole = channel.frames(channel.REQUEST, 7, {"m": "x"}, np.ones(3, np.float32))
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 1
        try:
            found = channel.Reader().feed(bytes(broken))
        except channel.Broken:
            continue
        assert not found, f"byte {at}"  # a length that has become longer: the rest has to come
    early = channel.frame(channel.REQUEST, 7, b"\x80", b"", is_end=True)
    assert len(channel.Reader().feed(early)) == 1
    with pytest.raises(channel.Broken):
        channel.Reader().feed(channel.frame(channel.REPLY_PART, 7, b"", b"x", is_end=True))
    with pytest.raises(channel.Broken):
        channel.Reader().feed(channel.frame(channel.REPLY, 7, b"\x80", b"", is_end=False))


def test_keys_of_the_client_are_ours() -> None:
    seed = bytes(range(32))
    peer_id = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    assert records.peer_id_of(seed) == peer_id
    signature = records.sign(seed, b"swarmnet")
    assert records.is_signed(f"{peer_id}/3", b"swarmnet", signature)
    assert not records.is_signed(peer_id, b"swarmnot", signature)
    assert struct.unpack("<I", channel.frames(6, 0, {"m": "x"})[16:20])[0] == 0xB7570667
