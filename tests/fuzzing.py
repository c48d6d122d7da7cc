"""Fuzzes everything that decodes bytes of a stranger: frames, bodies, records, credentials.

Inputs are valid ones, mutated: bits flipped, pieces cut, doubled, spliced from another input,
numbers made extreme. Frames get their checksum mended half of the time, so that what lies behind
it is reached. The only exception that a decoder may raise is `ProtocolViolation`; a decoder that is
not done within `LIMIT_S` counts as hanging.

    python -m tests.fuzzing --inputs 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from types import FrameType
from typing import Any, get_args, get_type_hints

import msgpack

from swarmnet.admission import Credential, Grant, Invite, InviteOnly
from swarmnet.errors import ProtocolViolation, UserError
from swarmnet.identity import Identity, verify
from swarmnet.methods.records import GossipRequest, Records, SignedRecord, Suspicion
from swarmnet.methods.table import METHODS
from swarmnet.protocol.membership.records import ACTIVE, HeldOut, Record, Restorable
from swarmnet.spec import RunSpec
from swarmnet.transport import frames
from swarmnet.transport.calls.heads import MAX_TEXT, parse_error
from swarmnet.transport.calls.hello import (
    MAX_FEATURE_CHARS,
    MAX_FEATURES,
    features_of,
    hello_head,
    mismatch,
    offer,
    run_of,
    versions_of,
)
from swarmnet.wire import Array, convert, pack, unpack, unpack_plain
from tests.protocol.making import counted

LIMIT_S = 2
"""For one input; the slowest valid one takes a few milliseconds."""
MAX_INPUT_BYTES = 1 << 16
FUZZED_ARRAY_BYTES = 1 << 16
"""Memory given to the arrays that a fuzzed head announces."""
OWNER, PEER = Identity(b"o" * 32), Identity(b"p" * 32)
EXTREMES = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7)
EXTREMES += (b"\xcb\x7f\xf8" + b"\x00" * 6, b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff")
EXTREMES += (b"\xc6\xff\xff\xff\xff", b"\x91" * 600, b"\xc0", b"\xc1", b"\xc3", b"\xa0")
OFFER = offer((2, 4), ("a", "b"))
HELLOS = (
    {"v": 1, "r": "r" * 32, "g": "swarmnet/0.1.0"},
    hello_head(offer(), "", ""),
    hello_head(OFFER, "r" * 32, "swarmnet/0.2.0"),
)


def bodies_in(*kinds: Any) -> set[type]:
    """The dataclasses among some types, and those that these are made of."""
    found = set[type]()
    for kind in kinds:
        if isinstance(kind, type) and is_dataclass(kind):
            found |= {kind, *bodies_in(*get_type_hints(kind).values())}
        found |= bodies_in(*get_args(kind))
    return found


BODIES = sorted(
    bodies_in(*(cls for row in METHODS.values() for cls in (row.request, row.reply, row.progress))),
    key=lambda cls: cls.__name__,
)
"""Of every method, with what is in them."""


@dataclass(frozen=True)
class Target:
    """A decoder, and inputs that it takes."""

    name: str
    decode: Callable[[bytes], Any]
    seeds: tuple[bytes, ...]


class Listener:
    """Hears frames as a channel does, with bounded memory."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], frames.Assembly] = {}

    def head(self, head: frames.Head, num_bytes: int) -> None:
        for cls in BODIES:
            try:
                convert(head.values.get("b"), cls)
            except ProtocolViolation:
                pass
        if head.kind == frames.ERROR:
            parse_error(head.values.get("e"))
        if head.kind == frames.HELLO:
            read_hello(head)
        if head.array_bytes:
            small = head.array_bytes <= FUZZED_ARRAY_BYTES
            allocate = (lambda size: memoryview(bytearray(size))) if small else None
            key = (frames.PARTS_OF[head.kind], head.call_id)
            self._open[key] = frames.Assembly(head, allocate)

    def opening(self, kind: int, head_bytes: int) -> None:
        pass

    def assembly(self, kind: int, call_id: int) -> frames.Assembly:
        if (kind, call_id) not in self._open:
            raise ProtocolViolation("a part of no message")
        return self._open[kind, call_id]

    def part(self, kind: int, call_id: int, payload_bytes: int, is_end: bool) -> None:
        assembly = self._open[kind, call_id]
        if is_end != (assembly.left_bytes == 0):
            raise ProtocolViolation("a message that ends too early or not at all")
        if is_end:
            del self._open[kind, call_id]
            assembly.arrays()


def read_hello(head: frames.Head) -> None:
    """A hello, as a channel reads it; what is taken is in bounds."""
    versions = versions_of(head)
    version = OFFER.versions.common(versions)
    if version is None:
        line = mismatch(PEER.peer_id, versions, OFFER.versions, head.values.get("g"))
        assert len(line) < 200, line
        assert line.isprintable(), line
        return
    assert versions.lowest <= version <= versions.highest
    features = features_of(head)
    assert len(features) <= MAX_FEATURES
    assert all(0 < len(f) <= MAX_FEATURE_CHARS for f in features)
    assert len(run_of(head)) <= MAX_TEXT


def read_stream(data: bytes) -> None:
    """A stream of frames, as a channel reads it."""
    frames.Reader(Listener()).feed_bytes(data)


def take_record(data: bytes) -> None:
    """What `KnownRecords.take` does with a signed record before it believes it."""
    envelope = unpack(data, SignedRecord)
    record = unpack(envelope.payload, Record)
    verify(record.peer_id, envelope.payload, envelope.signature)


def read_body(data: bytes) -> None:
    """A body, as the handler of each method reads it."""
    value = unpack_plain(data)
    wrong = 0
    for cls in BODIES:
        try:
            convert(value, cls)
        except ProtocolViolation:
            wrong += 1
    if wrong == len(BODIES):
        raise ProtocolViolation("no body of any method")


def parse_invite(data: bytes) -> None:
    try:
        Invite.parse(data.decode("latin-1")).credential(PEER.peer_id)
    except UserError as e:
        raise ProtocolViolation(str(e)) from None


def read_spec(data: bytes) -> None:
    try:
        RunSpec.from_canonical(data)
    except UserError as e:
        raise ProtocolViolation(str(e)) from None


def targets() -> list[Target]:
    """Every decoder of what a stranger sends."""
    record = Record(
        PEER.peer_id,
        "r" * 32,
        5,
        7,
        state=ACTIVE,
        stage=1,
        round=3,
        addresses=("/ip4/127.0.0.1/tcp/4001/p2p/" + PEER.peer_id,),
        has_data=True,
        counts=(counted(2, 9, 8, True, 100, 3.5), counted(3, 4, 2, first=70)),
        samples_per_s=3.0,
        digests=bytes(range(32)),
        holds=b"\x0f",
        held_out=HeldOut(2, 2.5, 3.0),
        totals={"sent_bytes": 1 << 40},
        agent="swarmnet/0.1.0",
        restorable=(Restorable(2, 1, 4, b"\x0f", 9),),
        history=1,
    )
    payload = pack(record)
    envelope = SignedRecord(payload, PEER.sign(payload))
    stamps = {PEER.peer_id: (5, 7), OWNER.peer_id: (1, 2)}
    suspicion = Suspicion(PEER.peer_id, 5, 7)
    bodies: list[Any] = [
        GossipRequest(stamps, (suspicion,)),
        Records((envelope,), (PEER.peer_id,), (suspicion,)),
        {"round": 1, "microbatch_id": 7, "stage": 0, "feeder": "p", "num_samples": 4, "hint": []},
        {"round": 1, "shard": 3, "num_samples": 8, "num_tokens": 64, "loss_sum": 0.5, "stage": 0},
        None,
    ]
    arrays = (Array("float32", (4, 3), bytes(48)), Array("int32", (5,), bytes(20)))
    invite = Invite.issue(OWNER, "r" * 32, 2_000_000_000)
    shown = invite.credential(PEER.peer_id)
    closed = InviteOnly(OWNER.peer_id, "r" * 32)
    return [
        Target("stream", read_stream, tuple(streams(bodies, arrays))),
        Target("record", lambda d: unpack(d, Record), (payload,)),
        Target("signed record", take_record, (pack(envelope),)),
        Target("body", read_body, tuple(pack(b) for b in bodies)),
        Target("credential", lambda d: closed.check(PEER.peer_id, d), (shown,)),
        Target("grant", lambda d: unpack(d, Grant), (invite.grant,)),
        Target("credential map", lambda d: unpack(d, Credential), (shown,)),
        Target("invite", parse_invite, (str(invite).encode(),)),
    ]


def spec_target(spec: RunSpec) -> Target:
    """The spec of a run, as a joiner reads it."""
    return Target("spec", read_spec, (spec.canonical(),))


def streams(bodies: list[Any], arrays: tuple[Array, ...]) -> list[bytes]:
    """Streams of frames of every kind."""
    found = [
        *(frames.head_frame(frames.HELLO, 0, hello) for hello in HELLOS),
        frames.head_frame(frames.ERROR, 3, {"e": ["busy", "full", {"backlog_s": 1.0}]}),
        frames.head_frame(frames.CANCEL, 3, {}),
    ]
    for call_id, body in enumerate(bodies, start=1):
        for kind in (frames.REQUEST, frames.REPLY):
            head = frames.head_frame(kind, call_id, {"m": "step", "b": body}, arrays)
            parts = frames.part_frames(frames.PARTS_OF[kind], call_id, arrays)
            found.append(head + b"".join(parts))
        found.append(frames.head_frame(frames.NOTIFY, 0, {"m": "records", "b": body}))
        found.append(frames.head_frame(frames.PROGRESS, call_id, {"b": body}))
    return [*found, b"".join(found)]


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One to a few mutations."""
    out = bytearray(data)
    for _ in range(1 + min(int(rng.expovariate(0.8)), 12)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at % len(out)] = rng.randrange(256)
        elif kind == 2:
            del out[at : at + 1 + rng.randrange(16)]
        elif kind == 3:
            piece = out[at : at + 1 + rng.randrange(64)]
            out[at:at] = piece
        elif kind == 4:
            start = rng.randrange(len(other) + 1)
            out[at : at + rng.randrange(16)] = other[start : start + rng.randrange(64)]
        elif kind == 5:
            extreme = rng.choice(EXTREMES)
            out[at : at + rng.choice((0, 1, len(extreme)))] = extreme
        elif len(out) >= 4:
            at %= len(out) - 3
            struct.pack_into(
                "<I", out, at, rng.choice((0, 1, 2**31, 2**32 - 1, rng.getrandbits(20)))
            )
    return bytes(out[:MAX_INPUT_BYTES])


def mutate_value(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """A well-formed value with something of it exchanged for what nobody expects."""
    strange = (None, True, -1, 0, 2**63, -(2**63), 2**64 - 1, 1e308, float("nan"), float("inf"))
    if depth > 6 or rng.random() < 0.15:
        return rng.choice((*strange, "", "x" * 300, b"", b"\xff" * 40, [], {}, [[]], {"a": 1}))
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value, key=str))
        changed = dict(value)
        if rng.random() < 0.2:
            del changed[key]
        else:
            changed[key] = mutate_value(value[key], rng, depth + 1)
        return changed
    if isinstance(value, list) and value:
        i = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:i] + value[i:] * rng.choice((2, 40))
        return [*value[:i], mutate_value(value[i], rng, depth + 1), *value[i + 1 :]]
    return rng.choice((*strange, value, value))


def mend_checksums(data: bytes) -> bytes:
    """The same bytes with the checksum of every frame that can be made out set right."""
    out, at = bytearray(data), 0
    while at + frames.HEADER.size <= len(out):
        fields = frames.HEADER.unpack_from(out, at)
        magic, _, flagged, call_id, head_bytes, payload_bytes, _ = fields
        end = at + frames.HEADER.size + head_bytes + payload_bytes
        if magic != frames.MAGIC or end > len(out):
            break
        content = bytes(out[at + frames.HEADER.size : end])
        head, payload = content[:head_bytes], content[head_bytes:]
        out[at : at + frames.HEADER.size] = frames.frame_header(flagged, call_id, head, payload)
        at = end
    return bytes(out)


def make_input(target: Target, rng: random.Random) -> bytes:
    """One input."""
    seed = rng.choice(target.seeds)
    if target.name == "stream":
        if rng.random() < 0.3:
            kind = rng.choice(list(frames.KINDS))
            step = {"m": "step", "b": {"round": 1}, "a": [["float32", [2]]]}
            value = mutate_value(rng.choice(HELLOS) if kind == frames.HELLO else step, rng)
            head = msgpack.packb(value if isinstance(value, dict) else {"b": value})
            kind |= rng.choice((0, frames.END))
            return frames.frame_header(kind, rng.randrange(4), head) + head + seed
        data = mutate(seed, rng.choice(target.seeds), rng)
        return mend_checksums(data) if rng.random() < 0.5 else data
    if target.name in ("invite", "spec") or rng.random() < 0.5:
        return mutate(seed, rng.choice(target.seeds), rng)
    return msgpack.packb(mutate_value(msgpack.unpackb(seed, strict_map_key=False), rng))


class Hang(Exception):
    """A decoder did not come back."""


def fuzz(all_targets: list[Target], inputs: int, seed: int) -> Counter[str]:
    """Feeds `inputs` inputs; returns how many were taken and refused, a target.

    Raises:
        AssertionError: a decoder crashed or hung; the text has the seed and the input in hex."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()

    def hung(_: int, __: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hung)
    try:
        for index in range(inputs):
            target = all_targets[index % len(all_targets)]
            data = make_input(target, rng)
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            try:
                target.decode(data)
                outcomes[f"{target.name}: taken"] += 1
            except ProtocolViolation:
                outcomes[f"{target.name}: refused"] += 1
            except Exception as e:
                shown = data[:2000].hex()
                raise AssertionError(
                    f"{target.name}, seed {seed}, input {index}: {e!r}; input {shown}"
                ) from e
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    return outcomes


def main() -> None:
    from swarmnet.runtime.options import default_spec_path
    from swarmnet.spec import load_spec

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began = time.perf_counter()
    every = [*targets(), spec_target(load_spec(default_spec_path()))]
    outcomes = fuzz(every, asked.inputs, asked.seed)
    for name in sorted(outcomes):
        print(f"{name:<28} {outcomes[name]:>10,}")
    print(f"{asked.inputs:,} inputs in {time.perf_counter() - began:.0f} s: no crash, no hang")


if __name__ == "__main__":
    sys.exit(main())
