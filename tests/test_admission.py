"""Invites: who they let in, and who they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnet.admission import (
    INVITE_PREFIX,
    Credential,
    Grant,
    Invite,
    InviteOnly,
    Open,
)
from swarmnet.errors import ProtocolViolation, UserError
from swarmnet.identity import Identity
from swarmnet.wire import pack, unpack

OWNER, STRANGER, PEER, OTHER = (Identity(bytes([n]) * 32) for n in range(1, 5))
RUN = "a" * 32
NOW = 1_800_000_000


def run(now: float = NOW, run_id: str = RUN) -> InviteOnly:
    return InviteOnly(OWNER.peer_id, run_id, clock=lambda: now)


def test_whoever_holds_an_invite_gets_in_with_any_peer_id() -> None:
    invite = Invite.parse(str(Invite.issue(OWNER, RUN, NOW + 10)))
    for peer in (PEER, OTHER):
        run().check(peer.peer_id, invite.credential(peer.peer_id))


def test_an_invite_for_a_named_peer_is_good_for_that_peer_only() -> None:
    invite = Invite.parse(str(Invite.issue(OWNER, RUN, NOW + 10, PEER.peer_id)))
    assert not invite.seed
    shown = invite.credential(PEER.peer_id)
    run().check(PEER.peer_id, shown)
    with pytest.raises(ProtocolViolation, match="somebody else"):
        run().check(OTHER.peer_id, shown)
    with pytest.raises(UserError, match="one of your own"):
        invite.credential(OTHER.peer_id)


def test_a_credential_that_was_seen_is_of_no_use_to_another_peer() -> None:
    shown = Invite.issue(OWNER, RUN, NOW + 10).credential(PEER.peer_id)
    with pytest.raises(ProtocolViolation, match="somebody else"):
        run().check(OTHER.peer_id, shown)
    bare = pack(replace(unpack(shown, Credential), binding=b""))
    with pytest.raises(ProtocolViolation, match="somebody else"):
        run().check(OTHER.peer_id, bare)


def test_an_invite_ends() -> None:
    shown = Invite.issue(OWNER, RUN, NOW + 10).credential(PEER.peer_id)
    run(NOW + 10).check(PEER.peer_id, shown)
    with pytest.raises(ProtocolViolation, match="expired"):
        run(NOW + 11).check(PEER.peer_id, shown)


def test_an_invite_is_for_one_run() -> None:
    shown = Invite.issue(OWNER, RUN, NOW + 10).credential(PEER.peer_id)
    with pytest.raises(ProtocolViolation, match="another run"):
        run(run_id="b" * 32).check(PEER.peer_id, shown)


def test_only_the_owner_issues() -> None:
    for shown in (
        Invite.issue(STRANGER, RUN, NOW + 10).credential(PEER.peer_id),
        pack(Credential(pack(Grant(RUN, PEER.peer_id, NOW + 10)), bytes(64))),
    ):
        with pytest.raises(ProtocolViolation, match="not signed by the run's owner"):
            run().check(PEER.peer_id, shown)


def test_a_guest_cannot_invite_others() -> None:
    """A holder's key binds peer ids; it signs no grants."""
    guest = Identity(Invite.issue(OWNER, RUN, NOW + 10).seed)
    shown = Invite.issue(guest, RUN, NOW + 10).credential(OTHER.peer_id)
    with pytest.raises(ProtocolViolation, match="not signed by the run's owner"):
        run().check(OTHER.peer_id, shown)


def test_nobody_can_lengthen_a_grant() -> None:
    invite = Invite.issue(OWNER, RUN, NOW + 10)
    longer = pack(replace(unpack(invite.grant, Grant), not_after_unix_s=NOW + 10_000))
    with pytest.raises(ProtocolViolation, match="not signed by the run's owner"):
        run().check(PEER.peer_id, replace(invite, grant=longer).credential(PEER.peer_id))


@pytest.mark.parametrize("shown", [b"", b"x", b"\xc1", pack({}), bytes(2000), pack({"grant": 1})])
def test_rubbish_is_a_violation_and_nothing_else(shown: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        run().check(PEER.peer_id, shown)


def test_an_open_run_asks_nothing() -> None:
    Open().check(PEER.peer_id, b"")


def test_a_damaged_invite_says_so() -> None:
    text = str(Invite.issue(OWNER, RUN, NOW + 10))
    assert Invite.parse(f"  {text[:40]}\n  {text[40:]}\n")
    for wrong, said in (
        ("hello", "no invite"),
        ("", "no invite"),
        (INVITE_PREFIX, "damaged"),
        (text[:-7], "damaged"),
        (text[:40] + "0" + text[41:], "damaged"),
        (INVITE_PREFIX + "z" * 5000, "no invite"),
    ):
        with pytest.raises(UserError, match=said):
            Invite.parse(wrong)


def test_a_peer_hears_before_the_others_that_its_invite_is_refused() -> None:
    for invite, said in (
        (Invite.issue(OWNER, RUN, NOW - 1), "expired"),
        (Invite.issue(OWNER, "b" * 32, NOW + 10), "another run"),
        (Invite.issue(STRANGER, RUN, NOW + 10), "owner"),
    ):
        with pytest.raises(UserError, match=said):
            run().accepts(invite, PEER.peer_id)
