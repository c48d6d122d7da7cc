"""docs/protocol.md says what the code does: its examples, and no method, field or code left out."""

from __future__ import annotations

import dataclasses
import inspect
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from pydantic import BaseModel

from swarmnet import errors, identity
from swarmnet.methods import method, microbatch, ranges
from swarmnet.methods.table import METHODS
from swarmnet.protocol import backoff, codecs, slots, timing, upgrade
from swarmnet.protocol.dialing import dial_book, zones
from swarmnet.protocol.membership import (
    failure_detector,
    intake,
    pace,
    records,
    stranger_room,
    view,
)
from swarmnet.protocol.pipeline import feeding, progress
from swarmnet.protocol.update import members, placement
from swarmnet.spec import TABLES, FileSpec, RunSpec, SourceSpec
from swarmnet.swarm.membership import anti_entropy, discovery, relaying
from swarmnet.swarm.membership.records import FORGET_AFTER_S
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S, MAX_TRIES
from swarmnet.transport import base, dialer, direct, frames, links, open_channels, relay
from swarmnet.transport.calls import (
    channel,
    heads,
    hello,
    holdings,
    inbox,
    outbox,
    served,
)
from swarmnet.wire import ITEM_BYTES, MAX_BODY_BYTES, Array, Packed, pack
from tests.fuzzing import BODIES
from tests.transport.test_frames import read

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "protocol.md").read_text()
LIMITS = WaitLimits()
NAMES = set(re.findall(r"`([a-z_0-9]+)", DOC))


def section(title: str) -> str:
    """From a heading to the next one of the same level."""
    level = title.split()[0]
    return re.split(rf"^{level} ", DOC.split(f"{title}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def dumps() -> list[bytes]:
    """The examples in hex."""
    return [bytes.fromhex(block) for block in re.findall(r"```\n([0-9a-f\s]+)```", DOC)]


def test_the_dumps_are_what_the_code_writes_and_reads() -> None:
    note, request, error = dumps()
    arrays = (Array("float32", (2,), struct.pack("<2f", 1.0, -2.0)),)
    assert note == frames.head_frame(frames.NOTIFY, 0, {"m": "x"})
    head = frames.head_frame(frames.REQUEST, 1, {"m": "x", "b": {"k": 1}}, arrays)
    parts = frames.part_frames(frames.REQUEST_PART, 1, arrays)
    assert request == head + b"".join(parts)
    busy = heads.describe(errors.Busy("full", backlog_s=0.5))
    assert error == frames.head_frame(frames.ERROR, 1, {"e": busy})
    assert [m[:3] for m in read(note + request + error).done] == [
        (frames.NOTIFY, 0, {"m": "x"}),
        (frames.REQUEST, 1, {"m": "x", "b": Packed(pack({"k": 1}))}),
        (frames.ERROR, 1, {"e": busy}),
    ]


def test_the_other_examples() -> None:
    examples = " ".join(section("## Examples").split())
    key = identity.Identity(bytes(range(32)))
    assert f"`{key.peer_id}`" in examples
    assert f"`{key.sign(b'swarmnet').hex()}`" in examples
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    assert f"shard 7 of stage 1 is {', '.join(placement.owners(1, 7, weights))}," in examples
    assert f"shard 0 of stage 0 it is {', '.join(placement.owners(0, 0, weights))}." in examples
    assert f"incarnation 1: {slots.flight_id('r', 'p', 1, 0, 0, 5)}." in examples
    order = [slots.permuted(1, 2, p, 10) for p in range(10)]
    assert f"epoch 2 has the order {', '.join(map(str, order))}." in examples
    found = slots.sample_indices(
        seed=1,
        round_index=3,
        slot=2,
        slots=slots.SlotPlan(((0, 4),)),
        samples_per_slot=2,
        num_samples=10,
    )
    assert f"with 4 slots of 2 samples: {', '.join(map(str, found))}." in examples


def test_every_kind_of_frame_has_its_row() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", section("## Frames"), flags=re.M))
    assert rows == {str(getattr(frames, name)): name for name in rows.values()}
    assert list(map(int, rows)) == list(frames.KINDS)


def test_every_error_code_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", section("## Calls"), flags=re.M)
    assert sorted(rows) == sorted(errors.REMOTE_ERRORS)


def test_every_key_of_a_hello_is_described() -> None:
    said = hello.hello_head(hello.offer(), "", "")
    rows = re.findall(r"^- ((?:`\w`(?:, )?)+):", section("## Hello"), flags=re.M)
    assert [key for row in rows for key in re.findall(r"\w", row)] == list(said)
    assert f"| {', '.join(f'`{key}`' for key in said)} | HELLO |" in section("## Messages")


def test_every_feature_is_described() -> None:
    text = section("## Hello")
    assert [name for name in base.FEATURES if f"`{name}`" not in text] == []
    assert ("Today there are none." in text) == (not base.FEATURES)


def test_every_state_of_a_record_is_described() -> None:
    (row,) = re.findall(r"^\| `state` \|.*", section("### Records"), flags=re.M)
    assert set(re.findall(r"`(\w+)`", row)) == {"state", *records.STATES}


def test_every_method_that_is_served_is_described() -> None:
    described = re.findall(r"^\*\*`(\w+)`\*\*", section("## Methods"), flags=re.M)
    assert sorted(described) == sorted(METHODS)


MESSAGES = [
    *BODIES,
    *(
        cls
        for _, cls in inspect.getmembers(records, dataclasses.is_dataclass)
        if cls.__module__ == records.__name__
    ),
]


def test_coded_rows_are_as_described() -> None:
    text = section("#### Codes")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.M) == [codecs.INT8, *codecs.TILE_BITS]
    assert f"one of each block of {codecs.BLOCK} numbers" in text
    for name, bits in codecs.TILE_BITS.items():
        size = codecs.TILE * bits // 8
        assert (
            f"| `{name}` | one of each tile of {codecs.TILE} numbers | {size} bytes a tile" in text
        )
        assert codecs.row_bytes(name, codecs.TILE) == codecs.SCALE_BYTES + size
    assert codecs.BOUNDARY_CODECS[codecs.INT4] == codecs.BoundaryCodec(codecs.INT7, codecs.INT4)
    assert codecs.BOUNDARY_CODECS[codecs.INT6] == codecs.BoundaryCodec(codecs.INT7, codecs.INT6)
    assert "with `int6` and `int4`, gradients have that form and activations `int7`" in text


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_field_is_named(cls: type) -> None:
    assert [f.name for f in dataclasses.fields(cls) if f.name not in NAMES] == []


@pytest.mark.parametrize(
    "said",
    [
        f"`{base.PROTOCOL_NAME}`",
        f"prefers, an integer from 1 to {hello.MAX_VERSION:,}: {base.PROTOCOL_VERSIONS[1]}.",
        f"integers likewise: {base.PROTOCOL_VERSIONS[0]} and {base.PROTOCOL_VERSIONS[1]}.",
        f"at most {hello.MAX_FEATURES} strings of 1 to {hello.MAX_FEATURE_CHARS} printable ASCII",
        f"at most {hello.MAX_AGENT_CHARS} characters of it are shown",
        f"header of {frames.HEADER.size} bytes",
        f"1 to {MAX_BODY_BYTES:,}; 0 in a part",
        f"1 to {frames.PART_BYTES:,} in a part",
        f"at most {outbox.MAX_TURNS} large messages",
        f"at most {outbox.MAX_NOTES} waiting",
        f"({outbox.MAX_SMALL_BYTES >> 20} MiB of small messages",
        f"more than {frames.MAX_RECEIVING_BYTES >> 30} GiB",
        f"within {channel.HELLO_TIMEOUT_S:.0f} s",
        f"open for {channel.PARTING_S} s",
        f"at most {heads.MAX_TEXT} characters",
        f"being served for a peer | {served.MAX_OPEN_CALLS:,} |",
        f"streams of a peer | {open_channels.MAX_CHANNELS} |",
        f"for {backoff.FIRST_PAUSE_S:.0f} s; with each",
        f"up to {backoff.LONGEST_PAUSE_S:.0f} s; {backoff.LONGEST_PAUSE_S / 60:.0f} minutes",
        f"{len(direct.PREAMBLE)} bytes `{direct.PREAMBLE.hex(' ')}`",
        f"`{base.RELAY_PROTOCOL}`",
        f"at most {relay.MAX_HEAD_BYTES:,}) and a msgpack map",
        f"{relay.MAX_CIRCUITS} circuits run through the relay, {relay.MAX_CIRCUITS_EACH} of one",
        f"sends {relay.NONCE_BYTES} random bytes",
        f"`{relay.CALLEE[:-1].decode()}`, a zero byte",
        f"`{relay.CALLER[:-1].decode()}`, a zero byte",
        f"Each step has {relay.HEAD_TIMEOUT_S:.0f} s",
        f"failed or taken {dialer.RELAY_AFTER_S:.0f} s",
        f"`busy` when {relaying.MAX_GRANTS} have a place",
        f"{method.LOOKS.burst:.0f} times at once and every {1 / method.LOOKS.calls_per_s:.0f} s",
        f"HELLO or CANCEL | {frames.MAX_SHORT_BYTES >> 10} KiB |",
        f"without its body | {frames.MAX_ENVELOPE_BYTES >> 10} KiB |",
        f"whose arrays are on their way | {inbox.MAX_BEGUN} |",
        f"and {holdings.CALL_BYTES >> 10} KiB a call, of a machine with standing | "
        f"{holdings.MEMBER_BYTES >> 30} GiB |",
        f"{holdings.STRANGER_BYTES >> 20} MiB, and {holdings.STRANGERS_BYTES >> 20} MiB of all",
        f"without standing | {open_channels.MAX_STRANGERS_CHANNELS} |",
        f"{channel.LEASE_S:.0f} s to {2 * channel.LEASE_S:.0f} s",
        f"the {upgrade.TOKEN_BYTES} bytes of `token`",
        f"void {timing.ANSWER_S:.0f} s after",
        f"at most {upgrade.MAX_TICKETS_EACH} that are open",
        f"said it {direct.GREETING_TIMEOUT_S:.0f} s after",
        f"At most {direct.MAX_GREETING} visitors, and {direct.MAX_GREETING_EACH} of one IP address",
        f"addresses at most {dial_book.MAX_TARGETS} are dialled",
        f"TCP or UDP from {zones.FIRST_PORT} on",
        f"peer {dial_book.NAMER_BURST:.0f} dials at once and one every "
        f"{1 / dial_book.NAMER_PER_S:.0f} s",
        f"of a host {dial_book.PORT_BURST:.0f} and one every {1 / dial_book.PORT_PER_S:.0f} s",
        f"of one host {dial_book.HOST_BURST:.0f} and {dial_book.HOST_PER_S:.0f} a second",
        f"Up to {links.MAX_DIRECT} direct channels",
        f"arrays have {links.BULK_BYTES:,} bytes or more",
        f"less than {backoff.FIRST_PAUSE_S:.0f} s or",
        f"waits {backoff.FIRST_PAUSE_S:.0f} s, then twice as long each time, up to "
        f"{timing.UPKEEP_S:.0f} s",
        f"`{' '.join(ITEM_BYTES)}`",
        f"for {discovery.EXPIRY_S:.0f} s and does",
        f"again every {discovery.REFRESH_S:.0f} s",
        f"at most {discovery.MAX_FOUND} of a key",
        discovery.stage_key("<run_id>", 0)[:-1] + "<k>",
        f"at most {ranges.MAX_RECORDS:,} entries",
        f"at most {microbatch.MAX_PATH:,} peer ids",
        f"at most {ranges.MAX_IDS:,})",
        f"newest rounds, ascending: `{dataclasses.fields(records.RoundCount)[0].name}`",
        f"news of it in the last {failure_detector.SILENCE_S:.0f} s (in swarms of more than "
        f"{pace.PUSH_FANOUT} live peers",
        f"not answered in {failure_detector.PROBE_TIMEOUT_S:.0f} s, or in "
        f"{failure_detector.PROBE_TIMEOUT_S + timing.CONNECT_S:.0f} s where a channel",
        f"a channel to it is open, for {failure_detector.SUSPECT_S:.0f} s",
        f"no news for {FORGET_AFTER_S / 60:.0f} minutes is forgotten",
        f"ours sends at most {anti_entropy.SENT_BYTES >> 20} MiB of records, and "
        f"{anti_entropy.WANTED_BYTES >> 10} KiB of ids",
        f"At most {view.MAX_PEERS:,} records are known",
        f"take {stranger_room.ROOM_BYTES >> 20} MiB of memory at most, and "
        f"{stranger_room.SENDER_BYTES >> 20} MiB those that one",
        f"{intake.SENDER_BYTES >> 20} MiB of one machine and "
        f"{sum(intake.LANE_BYTES.values()) >> 20} MiB of all;",
        f"{intake.STRANGERS_PER_S:.0f} are checked in a second, and "
        f"{intake.STRANGERS_BURST:,.0f} at once",
        f"last {feeding.MAX_REFUSED} microbatches were refused, for {feeding.REST_S:.0f} s",
        f"With more than {progress.FEW_FEEDERS} feeders ours",
        f"`round` is at least r - {members.BEHIND_ROUNDS} (",
        f"more than {placement.MOST_DRAWN} owners the parts are their weights",
        f"At a callee {2 * LIMITS.max_serving} such calls of all peers together may be open, of "
        f"which {LIMITS.max_serving} are copied",
        f"(`backlog_s`: {LOOK_AGAIN_S})",
        f"Ours asks for {LIMITS.max_fetching} shards at a time, each of any donor, {MAX_TRIES} "
        f"times, and {LOOK_AGAIN_S} s after",
        f"It waits {LIMITS.fetch_timeout_s:.0f} s for a reply to begin",
    ],
)
def test_numbers_and_names_are_those_of_the_code(said: str) -> None:
    assert LIMITS.patience_s == 1.0, "it is in words: for a second"
    assert said in re.sub(r"\s+", " ", DOC)


def written(model: type[BaseModel]) -> str:
    """The keys of a table of a canonical spec, with their defaults as it would write them."""
    found = []
    for name, field in model.model_fields.items():
        if field.alias:  # filled in before there is a canonical spec
            continue
        default = field.get_default(call_default_factory=True)
        if field.is_required() or isinstance(default, BaseModel) or default is None:
            found.append(f"`{name}`")
            continue
        found.append(f"`{name}` {rfc8785.dumps(plain(default)).decode()}")
    return ", ".join(found)


def plain(default: object) -> Any:
    return list(default) if isinstance(default, tuple) else default


def test_the_keys_of_a_spec_and_their_defaults_are_listed() -> None:
    tables = {
        "": RunSpec,
        **TABLES,
        "data.source": SourceSpec,
        "files": FileSpec,
    }
    rows = [
        f"| {f'`{name}`' if name else 'the spec'} | {written(cls)} |"
        for name, cls in tables.items()
    ]
    table = "\n".join(["| table | keys, and defaults |", "|---|---|", *rows])
    assert table in DOC, f"\n{table}"
