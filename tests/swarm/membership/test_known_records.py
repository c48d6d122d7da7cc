"""Which records are believed, what is news, and what is forgotten."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import pytest

from swarmnet.errors import Forged, ProtocolViolation
from swarmnet.household import household_of
from swarmnet.identity import Identity
from swarmnet.methods.records import MAX_RECORD_BYTES, SignedRecord
from swarmnet.protocol.membership.failure_detector import SILENCE_S
from swarmnet.protocol.membership.records import LEFT, Record, record_bytes
from swarmnet.protocol.membership.run_bounds import RunBounds
from swarmnet.simulation.clock import run
from swarmnet.swarm.membership.records import FORGET_AFTER_S
from swarmnet.transport.memory import MemoryHub
from swarmnet.wire import pack
from tests.swarm.harness import OpenSigner
from tests.swarm.membership.parts import Site, record


def signed(of: Record) -> SignedRecord:
    return SignedRecord(pack(of), b"")


def test_a_newer_record_is_news_and_an_older_one_is_not() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        heard: list[int] = []
        site.records.on_news(lambda r: heard.append(r.version))
        assert site.records.take(signed(record("b", 2)))
        assert not site.records.take(signed(record("b", 2)))
        assert not site.records.take(signed(record("b", 1)))
        assert site.records.take(signed(record("b", 3)))
        assert heard == [2, 3]
        assert site.records.envelopes(["nobody", "b"]) == (signed(record("b", 3)),)

    run(scenario())


def test_a_peer_is_of_a_household_that_has_signed_for_it_and_of_no_other() -> None:
    """All seats of its machine are. Another's signature, or one of another key, is false."""
    key, other = Identity(b"h" * 32), Identity(b"o" * 32)
    own = household_of(key, "b")

    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        for name in ("b", "b/1"):
            assert site.records.take(signed(replace(record(name), household=own)))
            known = site.view.get(name)
            assert known is not None
            assert known.house == key.peer_id
        for household in (own, replace(own, key=other.peer_id), replace(own, key="nobody")):
            with pytest.raises(Forged, match="household"):
                site.records.take(signed(replace(record("c"), household=household)))
        assert site.view.get("c") is None

    run(scenario())


def test_a_living_copy_of_the_own_identity_is_known_and_a_dead_one_is_not() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        late = replace(record("a"), incarnation=site.own.record.incarnation + 1, addresses=("x",))
        assert not site.records.take(signed(replace(late, version=3)))
        await asyncio.sleep(100.0)
        assert not site.records.take(signed(replace(late, version=3)))
        assert not site.records.take(signed(replace(late, version=4)))
        assert site.records.copy is None, "its last words, which came late: it has died"
        for version in range(5, 5 + int(SILENCE_S)):
            assert site.records.copy is None
            await asyncio.sleep(1.0)
            assert not site.records.take(signed(replace(late, version=version)))
        assert site.records.copy == replace(late, version=4 + int(SILENCE_S))

    run(scenario())


@pytest.mark.parametrize(
    ("false", "why"),
    [
        (replace(record("b"), run_id="f" * 32), "of run"),
        (record("b", round=11), "round 11 of 10"),
        (record("b", samples=1 << 61), "samples of a round"),
        (record("b", history=1 << 61), "a run that began in"),
    ],
)
def test_what_cannot_be_is_refused(false: Record, why: str) -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a", bounds=RunBounds(rounds=10, samples_per_slot=4))
        with pytest.raises(ProtocolViolation, match=why):
            site.records.take(signed(false))
        assert await site.records.take_all(
            "", [signed(false), signed(record("c"))], is_asked=True
        ), "the other is taken"
        assert site.view.get("b") is None
        assert site.view.get("c") is not None

    run(scenario())


def of_a_later_version(before: Record, **said: object) -> SignedRecord:
    """As a program would write it that knows more."""
    plain = msgpack.unpackb(pack(before))
    return SignedRecord(msgpack.packb({**plain, **said}), b"")


def test_of_a_record_in_an_unknown_state_the_one_before_holds() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        site.records.take(signed(record("b", 2)))
        for unknown in ({"state": "dreaming"}, {"state": 3}, {"state": ""}):
            newer = of_a_later_version(record("b", 3), **unknown)
            with pytest.raises(ProtocolViolation, match="state"):
                site.records.take(newer)
        assert site.view.get("b") == record("b", 2)
        assert site.records.envelopes(["b"]) == (signed(record("b", 2)),)

    run(scenario())


def test_unknown_keys_of_a_record_are_passed_over_and_passed_on() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        newer = of_a_later_version(record("b", 2), dreams=[{"of": b"sheep"}])
        assert site.records.take(newer)
        assert site.view.get("b") == record("b", 2)
        assert site.records.envelopes(["b"]) == (newer,)

    run(scenario())


def test_a_record_beyond_what_the_run_has_is_refused() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a", max_bytes=record_bytes(8, 16))
        site.records.take(signed(record("b", digests=bytes(8 * 8))))
        with pytest.raises(ProtocolViolation, match="bytes; in this run at most"):
            site.records.take(signed(record("c", digests=bytes(8 * 8000))))

    run(scenario())


def test_an_address_is_learned_with_the_record() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        learned: list[tuple[str, tuple[str, ...]]] = []
        site.transport.learn = lambda p, to: learned.append((p, tuple(to)))  # type: ignore[method-assign]
        address = "/ip4/10.0.0.1/tcp/1/p2p/b"
        site.records.take(signed(record("b", 1, addresses=(address,))))
        site.records.take(signed(record("b", 2, addresses=(address,))))
        assert learned == [("b", (address,))], "once"

    run(scenario())


def test_the_own_record_from_elsewhere_is_no_news() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        assert not site.records.take(signed(record("a", 40, stage=3)))
        assert site.own.record.stage == -1
        site.own.seal()
        assert site.own.published == (1, 41)
        assert site.records.envelopes(["a"]) == (site.own.sealed,)

    run(scenario())


def test_who_is_long_gone_is_forgotten() -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        site.records.take(signed(record("b", state=LEFT)))
        site.records.forget_old()
        assert site.records.envelopes(["b"])
        await asyncio.sleep(FORGET_AFTER_S + 1)
        site.records.forget_old()
        assert not site.records.envelopes(["b"])
        assert site.view.get("b") is None

    run(scenario())


def test_nothing_is_kept_of_a_peer_that_a_full_view_has_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fresh identities are free in an open run."""
    monkeypatch.setattr("swarmnet.protocol.membership.view.MAX_PEERS", 4)

    async def scenario() -> None:
        site = Site(MemoryHub(), "a")
        for i in range(20):
            await asyncio.sleep(SILENCE_S + 1.0)
            site.records.take(signed(record(f"fresh-{i}")))
            site.records.forget_old()
        names = [f"fresh-{i}" for i in range(20)]
        known = [name for name in names if site.view.get(name) is not None]
        assert len(known) <= 4
        assert len(site.records.envelopes(names)) == len(known)

    run(scenario())


class Strict(OpenSigner):
    """Knows no signature but one."""

    def __init__(self) -> None:
        self.verified = 0

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        self.verified += 1
        return signature == b"right"


@dataclass
class Invited:
    """Admits who shows the word."""

    is_open: bool = field(default=False, init=False)

    def check(self, peer_id: str, credential: bytes) -> None:
        if credential != b"word":
            raise ProtocolViolation("no invite")


MANY, LARGE = 400, 200_000
KEPT_BYTES = 2 << 20
"""What many large records that are not believed may leave behind, for all that is said of them."""


def large(n: int, **said: Any) -> Record:
    return record(f"peer-{n}", 1, digests=bytes([n % 256]) * LARGE, **said)


@pytest.mark.parametrize(
    ("make", "max_bytes"),
    [
        (lambda n: SignedRecord(pack(large(n)), b"right"), MAX_RECORD_BYTES),
        (lambda n: SignedRecord(pack(large(n, credential=b"false")), b"right"), MAX_RECORD_BYTES),
        (lambda n: SignedRecord(pack(large(n, credential=b"word")), b"wrong"), MAX_RECORD_BYTES),
        (
            lambda n: SignedRecord(
                pack(replace(large(n, credential=b"word"), run_id="f" * 32)), b"right"
            ),
            MAX_RECORD_BYTES,
        ),
        (lambda n: SignedRecord(pack(large(n, credential=b"word")), b"right"), LARGE),
        (lambda n: SignedRecord(bytes([n % 256]) * LARGE, b"right"), MAX_RECORD_BYTES),
    ],
    ids=["no invite", "false invite", "unsigned", "another run", "too long", "no record"],
)
def test_nothing_is_kept_of_many_records_that_are_not_believed(
    make: Callable[[int], SignedRecord], max_bytes: int
) -> None:
    async def scenario() -> None:
        site = Site(MemoryHub(), "a", admission=Invited(), signer=Strict(), max_bytes=max_bytes)
        gc.collect()
        tracemalloc.start()
        for n in range(MANY):
            assert not await site.records.take_all("", [make(n)], is_asked=True)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(site.view) == 0
        assert kept < KEPT_BYTES

    run(scenario())


def test_a_record_that_is_believed_is_kept_with_its_signature() -> None:
    async def scenario() -> None:
        signer = Strict()
        site = Site(MemoryHub(), "a", admission=Invited(), signer=signer)
        envelope = SignedRecord(pack(large(1, credential=b"word")), b"right")
        assert await site.records.take_all("", [envelope, envelope], is_asked=True)
        assert site.records.envelopes(["peer-1"]) == (envelope,)
        assert signer.verified == 1, "the second is no news"

    run(scenario())


def test_a_signature_is_looked_at_only_where_the_peer_may_be_in_the_run() -> None:
    async def scenario() -> None:
        signer = Strict()
        site = Site(MemoryHub(), "a", admission=Invited(), signer=signer)
        stranger = SignedRecord(pack(large(1)), b"right")
        elsewhere = SignedRecord(pack(replace(large(2), run_id="f" * 32)), b"right")
        assert not await site.records.take_all("", [stranger, elsewhere], is_asked=True)
        assert signer.verified == 0

    run(scenario())


def test_a_record_that_nobody_has_any_more_takes_no_memory() -> None:
    async def scenario() -> None:
        sites = [Site(hub, name) for hub in (MemoryHub(),) for name in "ab"]
        for site in sites:
            site.records.take(signed(record("c", 2, totals={"made": 1})))
        one, other = (site.view.get("c") for site in sites)
        assert one is other, "of one process, it is decoded once"
        decoded = weakref.ref(one)
        del one, other
        for site in sites:
            site.records.take(signed(record("c", 3)))
        gc.collect()
        assert decoded() is None

    run(scenario())


def test_where_a_machine_was_is_forgotten_with_the_last_record_of_its_seats() -> None:
    async def scenario() -> None:
        site, forgotten = Site(MemoryHub(), "a"), list[str]()
        site.transport.forget = forgotten.append  # type: ignore[method-assign]
        site.records.take(signed(record("b")))
        await asyncio.sleep(FORGET_AFTER_S / 2)
        site.records.take(signed(record("b/1")))
        await asyncio.sleep(FORGET_AFTER_S / 2)
        site.records.forget_old()
        assert (site.view.get("b"), forgotten) == (None, [])
        await asyncio.sleep(FORGET_AFTER_S / 2)
        site.records.forget_old()
        assert forgotten == ["b"]

    run(scenario())
