from __future__ import annotations

import pytest

from swarmnet.protocol.membership import indices
from swarmnet.protocol.membership.indices import Digest


def digest_of(**stamps: int) -> Digest:
    digest = Digest()
    for peer_id, version in stamps.items():
        digest.put(peer_id, (1, version))
    return digest


def test_two_digests_tell_which_records_have_to_be_sent() -> None:
    mine, theirs = digest_of(a=3, b=1, d=4), digest_of(a=2, b=2, c=1, d=4)
    assert mine.newer_than(theirs.stamps()) == ["a"]
    assert mine.wanted_from(theirs.stamps()) == ["b", "c"]
    assert theirs.newer_than(mine.stamps()) == mine.wanted_from(theirs.stamps())


def test_only_a_higher_stamp_is_news() -> None:
    digest = digest_of(a=3)
    assert [digest.is_news("a", (1, version)) for version in (2, 3, 4)] == [False, False, True]
    assert digest.is_news("a", (2, 0)), "a peer that restarted"
    assert digest.is_news("b", (0, 0))


def test_a_forgotten_record_comes_back_with_a_higher_stamp_or_after_a_while() -> None:
    digest = digest_of(a=3)
    digest.forget("a", now=100.0)
    assert digest.stamps() == {}
    assert not digest.is_news("a", (1, 3))
    assert digest.wanted_from({"a": (1, 3)}) == []
    assert digest.wanted_from({"a": (1, 4)}) == ["a"]
    digest.expire(now=159.0, after_s=60.0)
    assert not digest.is_news("a", (1, 3))
    digest.expire(now=160.0, after_s=60.0)
    assert digest.wanted_from({"a": (1, 3)}) == ["a"]


def test_the_number_of_forgotten_stamps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "MAX_FORGOTTEN", 2)
    digest = digest_of(a=1, b=1, c=1)
    for peer_id in "abc":
        digest.forget(peer_id, 0.0)
    assert [digest.is_news(p, (1, 1)) for p in "abc"] == [True, False, False]
