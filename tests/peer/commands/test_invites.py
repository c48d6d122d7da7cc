"""`swarmnet invite`, and what a peer does with an invite."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import pytest

from peer.commands.invites import issue_invite, parse_duration_s
from peer.options import InviteOptions
from swarmnet.admission import Invite
from swarmnet.errors import SpecError, UserError
from swarmnet.identity import Identity
from swarmnet.runtime.admission import INVITE_FILE, admit
from swarmnet.runtime.joining.starting import start_run
from swarmnet.runtime.options import default_spec_path
from swarmnet.spec import RunSpec, load_spec

PEER = Identity(b"p" * 32).peer_id


def ask(options: InviteOptions) -> str:
    return asyncio.run(issue_invite(options))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "owner.key"


@pytest.fixture
def closed(tmp_path: Path, key: Path) -> Path:
    """A run.toml that is closed with the lines that the command prints."""
    path = tmp_path / "closed.toml"
    text = default_spec_path().read_text()
    path.write_text(f"{text}\n{ask(InviteOptions(key))}\n")
    return path


def test_the_printed_lines_close_a_run_and_the_invite_opens_it(
    tmp_path: Path, key: Path, closed: Path
) -> None:
    spec = start_run(closed).spec
    state = tmp_path / "state"
    state.mkdir()
    with pytest.raises(UserError, match="--invite"):
        admit(spec, PEER, "", state)
    admitted = admit(spec, PEER, ask(InviteOptions(key, closed)), state)
    admitted.admission.check(PEER, admitted.credential)
    assert stat.S_IMODE((state / INVITE_FILE).stat().st_mode) == 0o600
    again = admit(spec, PEER, "", state)
    again.admission.check(PEER, again.credential)
    from_file = admit(spec, PEER, str(state / INVITE_FILE), None)
    from_file.admission.check(PEER, from_file.credential)


def test_an_invite_is_for_the_run_as_it_is_started(key: Path, closed: Path) -> None:
    longer = start_run(closed, rounds=7).spec
    with pytest.raises(UserError, match="another run"):
        admit(longer, PEER, ask(InviteOptions(key, closed)), None)
    assert admit(longer, PEER, ask(InviteOptions(key, closed, rounds=7)), None).credential


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, key: Path, closed: Path) -> None:
    spec = start_run(closed).spec
    invite = ask(InviteOptions(key, closed))
    run_id = spec.run_id
    owner = Identity.load_or_create(key)
    Identity.load_or_create(tmp_path / "other.key")
    for given, said in (
        ("nonsense", "neither an invite"),
        (str(tmp_path), "neither an invite"),
        (invite[:-9], "damaged"),
        (str(Invite.issue(owner, run_id, int(time.time()) - 5)), "expired"),
        (str(Invite.issue(owner, run_id, int(time.time()) + 50, owner.peer_id)), "one of your own"),
        (str(Invite.issue(Identity.generate(), run_id, int(time.time()) + 50)), "owner"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            admit(spec, PEER, given, None)
        assert "\n" not in str(caught.value)
    for options, said in (
        (InviteOptions(key, default_spec_path()), "open"),
        (InviteOptions(tmp_path / "other.key", closed), "not the key"),
        (InviteOptions(key, closed, valid="soon"), "--valid"),
        (InviteOptions(key, closed, peer_id="me"), "--peer"),
    ):
        with pytest.raises(UserError, match=said):
            ask(options)


def test_a_spec_that_is_half_closed_says_what_to_do(tmp_path: Path, closed: Path) -> None:
    for lines, said in (
        ('admission = "invite"', "swarmnet invite --key"),
        ('admission = "invite"\nowner = "me"', "swarmnet invite --key"),
        (f'owner = "{PEER}"', "owner goes with"),
    ):
        path = tmp_path / "half.toml"
        path.write_text(f"{default_spec_path().read_text()}\n[security]\n{lines}\n")
        with pytest.raises(SpecError, match=said):
            load_spec(path)


def test_the_owner_is_part_of_what_the_run_is(closed: Path) -> None:
    spec: RunSpec = load_spec(closed)
    assert spec.run_id != load_spec(default_spec_path()).run_id
    assert RunSpec.from_canonical(spec.canonical()).security.owner == spec.security.owner


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("12h", 43_200), ("30d", 2_592_000), ("4w", 2_419_200)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "0d", "d", "-1d", "1.5h", "99999w", "1y"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--valid"):
        parse_duration_s(text)


def test_a_mistyped_key_is_not_made(tmp_path: Path, key: Path, closed: Path) -> None:
    with pytest.raises(UserError, match="there is no key"):
        ask(InviteOptions(tmp_path / "owner.kye", closed))
    assert not (tmp_path / "owner.kye").exists()
