"""What is sent first, and what is not sent at all."""

from __future__ import annotations

from itertools import count

import pytest

from swarmnet.transport.calls import outbox as module
from swarmnet.transport.calls.outbox import (
    FAIR_EVERY,
    MAX_NOTES,
    MAX_TURNS,
    Outbox,
    Outgoing,
    Stalled,
    outgoing,
)
from swarmnet.transport.frames import (
    BACKGROUND_PART_BYTES,
    HEADER,
    NOTIFY,
    PART_BYTES,
    REPLY,
    REQUEST,
)
from swarmnet.wire import Array

call_ids = count(1)


def large(name: str, num_parts: int, kind: int = REQUEST) -> Outgoing:
    size = num_parts * PART_BYTES
    return outgoing(kind, next(call_ids), {}, (Array("uint8", (size,), bytes(size)),), name)


def behind(name: str, num_parts: int) -> Outgoing:
    size = num_parts * BACKGROUND_PART_BYTES
    arrays = (Array("uint8", (size,), bytes(size)),)
    return outgoing(REPLY, next(call_ids), {}, arrays, name, is_background=True)


def small(name: str, kind: int = REPLY, body: object = None) -> Outgoing:
    return outgoing(kind, 1, {"b": body}, (), name)


def drain(box: Outbox, limit: int = 10**6) -> list[str]:
    taken = []
    while len(taken) < limit and (item := box.take()):
        taken.append(item[0])
    return taken


def test_small_before_notes_before_large_ones() -> None:
    box = Outbox()
    box.put(large("a", 3))
    box.put(large("b", 2))
    box.put_note(small("note", NOTIFY))
    box.put(small("small"))
    assert drain(box, 5) == ["small", "note", "a", "b", "b"]  # heads of a and b, a part of b
    box.put(small("gossip"))
    assert drain(box) == ["gossip", "b", "a", "a", "a"]


def test_large_messages_of_one_size_arrive_one_after_the_other_and_none_starves() -> None:
    box = Outbox()
    for name in "abc":
        box.put(large(name, 5))
    ends = {name: n for n, name in enumerate(drain(box)[3:])}  # without the heads
    assert list(ends) == ["a", "b", "c"]
    assert ends["a"] < 8
    box.put(large("huge", 40))
    taken = []
    for _ in range(6 * FAIR_EVERY * MAX_TURNS):
        box.put(large("short", 1))  # a stream of short ones
        taken += drain(box, 1)
    assert taken.count("huge") >= 4


def test_only_so_many_large_messages_are_begun_at_a_time() -> None:
    box = Outbox()
    for number in range(MAX_TURNS + 2):
        box.put(large(str(number), 1))
    taken = drain(box, MAX_TURNS)
    assert taken == [str(n) for n in range(MAX_TURNS)]  # heads
    assert drain(box, 1) == ["0"]  # its only part, and then another may begin
    assert drain(box, 1) == [str(MAX_TURNS)]


def test_no_more_bytes_are_announced_than_the_receiver_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_RECEIVING_BYTES", 3 * PART_BYTES)
    box = Outbox()
    box.put(large("a", 2))
    box.put(large("b", 2))
    assert drain(box) == ["a", "a", "b", "a", "b", "b"]


def test_notes_beyond_the_bound_drop_the_oldest() -> None:
    box = Outbox()
    for number in range(MAX_NOTES + 3):
        box.put_note(small(str(number), NOTIFY))
    assert drain(box) == [str(n) for n in range(3, MAX_NOTES + 3)]
    assert box.dropped_notes == 3


def test_a_peer_that_reads_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SMALL_BYTES", 1000)
    box = Outbox()
    box.put(small("one message of any size", body=bytes(5000)))
    with pytest.raises(Stalled):
        box.put(small("another"))


def test_a_message_that_is_withdrawn_is_sent_no_further() -> None:
    box = Outbox()
    waiting, begun, short = large("waiting", 1), large("begun", 3), small("short")
    box.put(begun)
    assert drain(box, 2) == ["begun", "begun"]
    box.put(waiting)
    box.put(short)
    assert box.withdraw(begun)  # the receiver knows of it
    assert not box.withdraw(waiting)
    assert not box.withdraw(short)
    assert drain(box) == []


def test_a_reply_that_nobody_waits_for_is_sent_only_where_it_was_begun() -> None:
    box = Outbox()
    begun, waiting, other = (large(n, 2, REPLY) for n in ("begun", "waiting", "other"))
    box.put(begun)
    assert drain(box, 2) == ["begun", "begun"]
    box.put(waiting)
    box.put(other)
    box.put(outgoing(REQUEST, waiting.call_id, {}, waiting.arrays, "request"))  # an id of ours
    for reply in (begun, waiting):
        box.withdraw_reply(reply.call_id)
    taken = drain(box)
    assert taken.count("begun") == 1, "its last part"
    assert (taken.count("waiting"), taken.count("other"), taken.count("request")) == (0, 3, 3)
    assert not box.has_bulk


def test_an_array_may_change_once_its_part_was_taken() -> None:
    data = bytearray(2 * PART_BYTES)
    box = Outbox()
    box.put(outgoing(REQUEST, 1, {}, (Array("uint8", (len(data),), data),), "x"))
    box.take()
    item = box.take()
    assert item is not None
    data[:] = b"\xff" * len(data)
    (frame,) = item[1]
    assert frame[HEADER.size :] == bytes(PART_BYTES)


def test_a_sealed_stream_gets_the_array_itself() -> None:
    data = bytearray(PART_BYTES + 5)
    box = Outbox(is_sealed=True)
    box.put(outgoing(REQUEST, 1, {}, (Array("uint8", (len(data),), data),), "x"))
    box.take()
    sizes = []
    while item := box.take():
        header, payload = item[1]
        assert isinstance(payload, memoryview)
        assert payload.obj is data
        sizes.append((len(header), len(payload)))
    assert sizes == [(HEADER.size, PART_BYTES), (HEADER.size, 5)]
    assert not box.has_bulk
    assert box.bulk_bytes == 0


def background(box: Outbox) -> list[str]:
    taken = []
    while item := box.take_background():
        taken.append(item[0])
    return taken


def test_the_background_is_not_taken_with_the_rest_and_goes_one_after_the_other() -> None:
    box = Outbox()
    box.put(behind("first", 2))
    box.put(behind("second", 1))
    box.put(large("a", 1))
    assert drain(box) == ["a", "a"]
    assert box.has_background
    assert (box.has_bulk, box.bulk_bytes) == (False, 0)
    assert background(box) == ["first"] * 3 + ["second"] * 2
    assert not box.has_background


def test_the_background_is_withdrawn_like_any_message() -> None:
    box = Outbox()
    begun, waiting, unwanted = behind("begun", 3), behind("waiting", 1), behind("unwanted", 1)
    for message in (begun, waiting, unwanted):
        box.put(message)
    assert [box.take_background() is not None for _ in range(2)] == [True, True]
    assert box.withdraw(begun)
    assert not box.withdraw(waiting)
    box.withdraw_reply(unwanted.call_id)
    assert background(box) == []
    assert not box.has_background


def test_what_does_not_fit_beside_the_background_has_it_sent_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_RECEIVING_BYTES", PART_BYTES)
    box = Outbox()
    box.put(behind("behind", 2))
    assert box.take_background() is not None  # its head: the receiver knows of all of it
    box.put(large("a", 1))
    assert drain(box) == ["behind", "behind", "a", "a"]
    box.put(large("a", 1))
    assert drain(box, 1) == ["a"]
    box.put(behind("behind", 2))
    assert background(box) == [], "nor is it begun beside what leaves it no room"
    assert drain(box) == ["a"]
    assert background(box) == ["behind"] * 3
