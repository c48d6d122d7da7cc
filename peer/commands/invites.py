"""Invites to closed runs: issued with an owner's key, kept by the peers that were given one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from peer.options import TransportName, with_overrides
from swarmnet.admission import INVITE_PREFIX, OPEN, Admission, Invite, InviteOnly, Open
from swarmnet.errors import UserError
from swarmnet.identity import Identity, is_peer_id
from swarmnet.spec import RunSpec, load_spec

INVITE_FILE = "invite"
MAX_FILE_BYTES = 4096
SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
LONGEST_S = 3650 * SECONDS["d"]


@dataclass(frozen=True, slots=True)
class Admitted:
    """How this peer takes part in its run."""

    admission: Admission = OPEN
    credential: bytes = b""
    not_after_unix_s: int = 0
    """0 = without end."""


def admission_of(spec: RunSpec) -> Open | InviteOnly:
    """Who may take part in a run."""
    if spec.security.admission == "open":
        return Open()
    return InviteOnly(spec.security.owner, spec.run_id)


def admit(spec: RunSpec, peer_id: str, given: str, state_dir: Path | None) -> Admitted:
    """The own credential for a run, from an invite just given or from the one in the state
    folder, where a given one is kept. Raises `UserError` that says what to do."""
    admission = admission_of(spec)
    if isinstance(admission, Open):
        return Admitted()
    invite = _given(given) if given else _kept(state_dir)
    if invite is None:
        raise UserError(
            f"the run {spec.name!r} is closed; ask its owner for an invite, then add "
            "--invite INVITE"
        )
    credential = admission.accepts(invite, peer_id)
    if given and state_dir is not None:
        _keep(invite, state_dir)
    return Admitted(admission, credential, invite.terms.not_after_unix_s)


def _given(text: str) -> Invite:
    if text.startswith(INVITE_PREFIX):
        return Invite.parse(text)
    path = Path(text)
    try:
        with path.open("rb") as file:
            return Invite.parse(file.read(MAX_FILE_BYTES).decode("ascii", "replace"))
    except OSError as e:
        raise UserError(
            f"--invite {text[:64]} is neither an invite ({INVITE_PREFIX}...) nor a file: "
            f"{e.strerror}"
        ) from None


def _kept(state_dir: Path | None) -> Invite | None:
    path = state_dir / INVITE_FILE if state_dir is not None else None
    return _given(str(path)) if path is not None and path.exists() else None


def _keep(invite: Invite, state_dir: Path) -> None:
    """Readable by its owner only: a secret key is in it."""
    path = state_dir / INVITE_FILE
    beside = path.with_name(f".{INVITE_FILE}.{os.getpid()}")
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"{invite}\n")
        beside.replace(path)
    except OSError as e:
        raise UserError(f"cannot keep the invite in {path}: {e.strerror}") from None


def parse_duration_s(text: str) -> int:
    """`90m`, `12h`, `30d` or `4w` in seconds. Raises `UserError`."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text.strip())
    duration_s = int(match[1]) * SECONDS[match[2]] if match else 0
    if not 0 < duration_s <= LONGEST_S:
        raise UserError(f"--valid {text[:32]!r}: say 90m, 12h, 30d or 4w, at most ten years")
    return duration_s


@dataclass(frozen=True, slots=True)
class InviteOptions:
    """What `swarmnet invite` is asked for."""

    key: Path
    """The owner's key; made where there is none."""
    spec: Path | None = None
    join: Sequence[str] = ()
    rounds: int | None = None
    seed: int | None = None
    valid: str = "30d"
    peer_id: str = ""
    transport: TransportName = "p2pd"


async def issue_invite(options: InviteOptions) -> str:
    """What `swarmnet invite` prints: an invite, or, where no run is named, the line that makes a
    run closed. Raises `UserError`."""
    valid_s = parse_duration_s(options.valid)
    if options.peer_id and not is_peer_id(options.peer_id):
        raise UserError(f"--peer {options.peer_id[:64]!r} is no peer id (12D3Koo...)")
    if (options.spec is not None or options.join) and not options.key.exists():
        raise UserError(f"there is no key {options.key}; name the one that closed the run")
    owner = Identity.load_or_create(options.key)
    if options.spec is None and not options.join:
        return f'[security]\nadmission = "invite"\nowner = "{owner.peer_id}"'
    spec = await _run_spec(options)
    if spec.security.admission != "invite":
        raise UserError(
            f"the run {spec.name!r} is open: nobody needs an invite; `swarmnet invite --key "
            f"{options.key}` prints the lines that close a new run"
        )
    if spec.security.owner != owner.peer_id:
        raise UserError(f"{options.key} is not the key of the run's owner {spec.security.owner}")
    return str(Invite.issue(owner, spec.run_id, int(time.time()) + valid_s, options.peer_id))


async def _run_spec(options: InviteOptions) -> RunSpec:
    if options.spec is not None:
        spec = load_spec(options.spec)
        return with_overrides(spec, rounds=options.rounds, seed=options.seed)
    from peer.daemon import Observer

    async with await Observer.join(options.join, transport=options.transport) as observer:
        return observer.spec


def date_of(unix_s: int) -> str:
    """For people."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
