"""A peer of another program, which speaks with real ones: it looks at a run, takes part in gossip,
downloads, and makes a step again. Whatever is not as `docs/protocol.md` says ends it with an error.

A program of its own, without anything of swarmnet:

    python -m tests.conformance.client begins ADDRESS FOLDER
    python -m tests.conformance.client ends ADDRESS ADDRESS FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785
import trio
import xxhash

from tests.conformance import model, records, rounds, samples
from tests.conformance.channel import Answered, Channel, opened
from tests.conformance.streams import connected, dial_directly, open_stream

SEED = bytes(range(32, 64))
OWN = records.peer_id_of(SEED)
LOOK_S, LIMIT_S = 0.05, 120.0
Record = dict[str, Any]


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[Channel]:
    async with connected(address, SEED) as muxer, opened(await open_stream(muxer)) as channel:
        assert channel.remote == address.rpartition("/p2p/")[2]
        yield channel


# ---- a run ----------------------------------------------------------------------------------


async def spec_of(channel: Channel) -> tuple[str, model.Spec]:
    """The run's id and its spec; says hello with the run."""
    told = (await channel.call("spec")).body
    text = told["spec"]
    assert len(text) <= 65_536
    assert told["run_id"] == blake2b(text, digest_size=16).hexdigest()
    spec = json.loads(text)
    assert rfc8785.dumps(spec) == text, "not in canonical form"
    assert channel.hello["r"] == told["run_id"]
    await channel.say_hello(told["run_id"])
    return told["run_id"], spec


async def known_to(channel: Channel, run_id: str) -> dict[str, Record]:
    """All records that a peer has, by peer id, their signatures checked."""
    reply = (await channel.call("gossip", {"stamps": {}})).body
    found = [records.read(envelope, run_id) for envelope in reply["records"]]
    return {record["peer_id"]: record for record in found}


async def envelope_at(channel: Channel, peer_id: str) -> dict[str, bytes] | None:
    """The signed record of a peer, as another one passes it on."""
    reply = (await channel.call("gossip", {"stamps": {}})).body
    return next((e for e in reply["records"] if peer_id.encode() in e["payload"]), None)


async def until_known(channel: Channel, envelope: dict[str, bytes]) -> None:
    """A peer has this very record of this client."""
    with trio.fail_after(LIMIT_S):
        while await envelope_at(channel, OWN) != envelope:  # noqa: ASYNC110  it is elsewhere
            await trio.sleep(LOOK_S)


# ---- a stage --------------------------------------------------------------------------------


async def stage_of(channel: Channel, spec: model.Spec, record: Record) -> np.ndarray:
    """The parameters of a replica's round, checked by the digests in its record."""
    stage, r, digests = record["stage"], record["round"], record["digests"]
    sizes = model.shard_sizes(spec, stage)
    assert len(digests) == 8 * len(sizes), "shards of another number"
    parts = []
    for j, size in enumerate(sizes):
        reply = await channel.call("fetch_parameters", {"round": r, "stage": stage, "shard": j})
        (values,) = reply.arrays
        assert (values.dtype, values.shape) == (np.float32, (size,))
        assert reply.body["round"] == r
        assert xxhash.xxh3_64_digest(values.tobytes()) == digests[8 * j : 8 * j + 8]
        parts.append(values)
    return np.concatenate(parts)


def holds(record: Record, j: int) -> bool:
    """Whether a replica has the optimizer state of a shard."""
    bits = record["holds"]
    return j // 8 < len(bits) and bool(bits[j // 8] >> j % 8 & 1)


async def optimizer_of(channel: Channel, spec: model.Spec, record: Record) -> model.State:
    """AdamW's state of all shards of a stage, at a replica that holds them all."""
    parts = []
    for j in range(len(model.shard_sizes(spec, record["stage"]))):
        assert holds(record, j)
        body = {"round": record["round"], "stage": record["stage"], "shard": j}
        reply = await channel.call("fetch_optimizer", body)
        mean, square = reply.arrays
        assert reply.body["round"] == record["round"]
        parts.append((mean, square, reply.body["values"]["steps"]))
    means, squares, steps = zip(*parts, strict=True)
    (number,) = set(steps)
    return model.State(np.concatenate(means), np.concatenate(squares), number)


# ---- the two halves of the test -------------------------------------------------------------


async def begins(address: str, folder: Path) -> None:
    """One peer serves stage 0 of a run in round 0, and nobody the others."""
    async with channel_to(address) as channel:
        await check_calls(channel)
        assert await channel.refused("gossip", {"stamps": {}}) == "wrong_run"
        run_id, spec = await spec_of(channel)
        record = (await known_to(channel, run_id))[channel.remote]
        assert (record["state"], record["stage"], record["round"]) == ("active", 0, 0)
        assert rounds.feeders([record]) == [channel.remote]
        assert any(address.startswith(told) or told == address for told in record["addresses"])

        values = await stage_of(channel, spec, record)
        difference = np.abs(values - model.first_weights(spec, 0)).max()
        assert difference < 1e-6, f"first weights differ by {difference}"
        await check_fetches(channel, spec)
        await check_direct(channel, run_id, spec, record)
        np.save(folder / "round-0.npy", values)


async def check_calls(channel: Channel) -> None:
    """Of any peer, in any run."""
    assert (await channel.call("ping")).body is None
    assert await channel.refused("of_a_later_version", {"k": 1}) == "unsupported"
    assert await channel.refused("of_a_later_version", None, np.ones(9, np.int8)) == "unsupported"
    await channel.notify("of_a_later_version", {})
    assert await channel.refused("ping", seat=5) == "not_ready"
    sent = np.zeros(1_200_000, np.uint8)
    (got,) = (await channel.call("bandwidth", {"reply_bytes": 700_001}, sent)).arrays
    assert got.nbytes == 700_001
    await channel.begin_and_give_up("bandwidth", {"reply_bytes": 1}, sent)
    nothing = {"sha256": "0" * 64, "offset": 0, "of_a_later_version": [1]}
    assert await channel.refused("run_file", nothing) == "not_ready"
    assert await channel.refused("run_file", {**nothing, "offset": -1}) == "refused"
    assert await channel.refused("run_file", {**nothing, "offset": True}) == "refused"
    assert await channel.refused("run_file", {"sha256": "0" * 64}) == "refused"
    assert await channel.refused("run_file", "no map") == "refused"


async def check_fetches(channel: Channel, spec: model.Spec) -> None:
    """What else `fetch_parameters` is answered with."""
    asked = {"round": 0, "stage": 0, "shard": 0}
    number = len(model.shard_sizes(spec, 0))
    method = "fetch_parameters"
    assert await channel.refused(method, {**asked, "shard": number}) == "not_ready"
    assert await channel.refused(method, {**asked, "stage": 1}) == "not_ready"
    assert await channel.refused(method, {**asked, "shard": -1}) == "refused"
    assert await channel.refused(method, {**asked, "more": "x" * 1024}) == "refused"
    assert await channel.refused(method, asked, np.zeros(1, np.uint8)) == "refused"
    error = await channel.error(method, {**asked, "round": 1})
    assert (error.code, error.details["round"]) == ("stale", 0)
    # 8 at a time may be open; how many are, when 40 come at once, is a matter of luck.
    answers: list[Answered | None] = []

    async def ask() -> None:
        try:
            await channel.call(method, asked)
            answers.append(None)
        except Answered as e:
            answers.append(e)

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(ask)
    refused = [e for e in answers if e is not None]
    assert len(answers) - len(refused) >= 8
    assert all(e.code == "busy" and 0 < e.details["backlog_s"] < 3600 for e in refused)


async def check_direct(channel: Channel, run_id: str, spec: model.Spec, record: Record) -> None:
    """The same over a direct connection, where the peer listens for some."""
    ticket = (await channel.call("ticket")).body
    stream = await dial_directly(channel.remote, ticket)
    async with opened(stream, run_id, is_direct=True) as direct:
        sent = np.arange(300_000, dtype=np.int32)
        (got,) = (await direct.call("bandwidth", {"reply_bytes": 600_000}, sent)).arrays
        assert got.nbytes == 600_000
        await stage_of(direct, spec, record)


async def ends(addresses: Sequence[str], folder: Path) -> None:
    """Each of the peers serves a stage, and the only round is over."""
    async with channel_to(addresses[0]) as one, channel_to(addresses[1]) as other:
        run_id, spec = await spec_of(one)
        assert (run_id, spec) == await spec_of(other)
        own = {"peer_id": OWN, "run_id": run_id, "incarnation": int(time.time() * 1000)}
        await check_gossip(one, other, {**own, "state": "observing"})

        served = await until_over(one, other, run_id, spec)
        batch = await batch_of(one, spec)
        begun = [np.load(folder / "round-0.npy"), model.first_weights(spec, 1)]
        gradients = []
        for version, (record, before) in enumerate(zip(served, begun, strict=True), start=10):
            channel = one if record["peer_id"] == one.remote else other
            asked = {"round": record["round"], "stage": record["stage"], "shard": 0}
            assert await channel.refused("fetch_optimizer", asked) == "not_ready"
            joining = {"version": version, "state": "joining", "stage": record["stage"]}
            await channel.call("records", {"records": [records.signed(SEED, own | joining)]})
            after = await stage_of(channel, spec, record)
            state = await optimizer_of(channel, spec, record)
            gradients.append(check_step(spec, record["stage"], before, after, state))
        check_batch(spec, served, batch, begun, gradients)
        left = records.signed(SEED, own | {"version": 20, "state": "left"})
        await one.notify("records", {"records": [left]})
        await until_known(other, left)


async def check_gossip(one: Channel, other: Channel, own: Record) -> None:
    """What this client says of itself to one peer comes back from another, unchanged."""
    news = records.signed(SEED, {**own, "version": 3, "of_a_later_version": {"k": [1]}})
    assert (await one.call("records", {"records": [news]})).body is None
    await until_known(other, news)

    false = records.signed(SEED, {**own, "version": 4})
    forged = {**false, "signature": bytes(64)}
    older = records.signed(SEED, {**own, "version": 2})
    unknown = records.signed(SEED, {**own, "version": 5, "state": "of_a_later_version"})
    elsewhere = records.signed(SEED, {**own, "version": 6, "run_id": "0" * 32})
    late = records.signed(SEED, {**own, "version": 7, "round": 1 << 40})
    wrong = [forged, older, unknown, elsewhere, late]
    assert (await one.call("records", {"records": wrong})).body is None
    assert await envelope_at(one, OWN) == news, "a wrong record was taken"

    stamps = {OWN: [own["incarnation"], 9]}
    assert (await one.call("gossip", {"stamps": stamps})).body["wanted"] == [OWN]


async def until_over(one: Channel, other: Channel, run_id: str, spec: model.Spec) -> list[Record]:
    """The records of both, by stage, when each is in the round after the last and has told what it
    holds."""
    last = spec["optimizer"]["rounds"]

    def is_over(record: Record | None) -> bool:
        if record is None or record["round"] < last or record["state"] != "active":
            return False
        number = len(record["digests"]) // 8
        return number > 0 and all(holds(record, j) for j in range(number))

    with trio.fail_after(LIMIT_S):
        while True:
            found = [(await known_to(c, run_id)).get(c.remote) for c in (one, other)]
            if all(map(is_over, found)):
                return sorted((r for r in found if r is not None), key=lambda r: r["stage"])
            await trio.sleep(LOOK_S)


async def batch_of(channel: Channel, spec: model.Spec) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of all samples of round 0, from the data that a peer gives."""
    data, length = spec["data"], spec["model"]["max_position_embeddings"]
    ((about),) = (await channel.call("data_sizes")).body["sources"]
    number, size = about["num_documents"], about["num_tokens"]
    dtypes = {"tokens": ("<u1", size), "ends": ("<u8", number), "hashes": ("<u8", number)}
    files = {}
    for name, (dtype, count) in dtypes.items():
        body = {"source": 0, "file": name, "offset": 0, "length": 1 << 20}
        (part,) = (await channel.call("data_part", body)).arrays
        files[name] = np.frombuffer(part.tobytes(), dtype)
        assert len(files[name]) == count
    summed = xxhash.xxh3_128_hexdigest(files["ends"].tobytes() + files["hashes"].tobytes())
    assert summed == about["fingerprint"]
    assert blake2b(summed.encode(), digest_size=16).hexdigest() == data["fingerprint"]
    whole = files["tokens"].tobytes()
    for start, end, told in zip((0, *files["ends"]), files["ends"], files["hashes"], strict=False):
        assert xxhash.xxh3_64_intdigest(whole[start:end]) == told

    source = samples.Source(learned=np.empty(0), **files)
    trained = samples.Trained(
        source,
        data.get("held_out_fraction", 0.02),
        length,
        least=data.get("held_out_least", "sample"),
    )
    order = samples.seed_of(spec["seed"], "documents", 0)
    made = samples.of_text(source, trained, order, length, 0, masks=False)
    places = range(spec["pipeline"]["global_batch"])  # of round 0, all slots
    batch = [made[samples.permuted(spec["seed"], 0, p, len(made))] for p in places]
    return np.stack([s.inputs for s in batch]), np.stack([s.targets for s in batch])


def check_step(
    spec: model.Spec, stage: int, before: np.ndarray, after: np.ndarray, state: model.State
) -> np.ndarray:
    """The only step so far, from moments of zero. Returns its gradient, which follows from the
    first moment."""
    optimizer = spec["optimizer"]
    assert state.steps == optimizer["rounds"] == 1
    gradient = state.mean / np.float32(1 - optimizer.get("beta1", 0.9))
    zeros = np.zeros_like(gradient)
    empty = model.State(zeros, zeros, 0)
    made, moments = model.step(optimizer, 0, before, empty, gradient, model.decayed(spec, stage))
    np.testing.assert_allclose(moments.square, state.square, rtol=1e-5, atol=1e-30)
    assert np.abs(after - before).max() > optimizer["learning_rate"] / 2
    np.testing.assert_allclose(made, after, rtol=0, atol=5e-8)  # a few of the last bits
    return gradient


def check_batch(
    spec: model.Spec,
    served: Sequence[Record],
    batch: tuple[np.ndarray, np.ndarray],
    begun: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
) -> None:
    """What the feeders counted in round 0, and the gradient of the step, are those of the batch."""
    weights, made = {}, {}
    for stage, (before, gradient) in enumerate(zip(begun, gradients, strict=True)):
        for p in model.parameters(spec, stage):
            weights[p.name] = before[p.start : p.stop].reshape(p.shape)
            made[p.name] = gradient[p.start : p.stop].reshape(p.shape)
    wanted = model.passed(spec, weights, *batch)

    pipeline = spec["pipeline"]
    num_slots = pipeline["global_batch"] // pipeline["microbatch"]
    names, tokens, loss_sum = rounds.feeders(served), 0, 0.0
    for rank, name in enumerate(names):
        (record,) = (r for r in served if r["peer_id"] == name)
        (count,) = (c for c in record["counts"] if c["round"] == 0)
        share = set(rounds.share(rank, len(names), num_slots))
        assert rounds.slots_of(count["committed"]) == rounds.slots_of(count["launched"]) == share
        assert count["sealed"]
        tokens += count["tokens"]
        loss_sum += count["loss_sum"]
    assert tokens == wanted.num_tokens
    assert math.isclose(loss_sum, wanted.loss_sum, rel_tol=1e-5)

    limit = spec["optimizer"]["grad_clip_norm"]
    norm = math.sqrt(sum(float(np.square(g.astype(np.float64)).sum()) for g in gradients))
    mean = wanted.head_gradient / wanted.num_tokens
    head = made["lm_head.weight"]
    clip = float((head * mean).sum() / np.square(mean).sum())
    np.testing.assert_allclose(head, clip * mean, rtol=1e-3, atol=1e-7)
    assert clip < 1 - 1e-3, "this batch is to be clipped"
    assert math.isclose(norm, limit, rel_tol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="half", required=True)
    for name, number in (("begins", 1), ("ends", 2)):
        command = commands.add_parser(name)
        command.add_argument("addresses", nargs=number)
        command.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.half == "begins":
        trio.run(begins, given.addresses[0], given.folder)
    else:
        trio.run(ends, given.addresses, given.folder)
    assert not [name for name in sys.modules if name.partition(".")[0] in ("swarmnet", "peer")]
    print(f"{given.half}: as the page says")


if __name__ == "__main__":
    main()
