"""How this machine's peer is admitted to its run: by an invite, where the run is closed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from swarmnet.admission import INVITE_PREFIX, OPEN, Admission, Invite, InviteOnly, Open
from swarmnet.errors import InviteError, UserError
from swarmnet.files import lines_of, text_of
from swarmnet.spec import RunSpec

INVITE_FILE = "invite"
MAX_FILE_BYTES = 4096


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
    folder, where a given one is kept. Raises `InviteError` that says what
    to do; `UserError` where it cannot be kept."""
    admission = admission_of(spec)
    if isinstance(admission, Open):
        return Admitted()
    invite = _given(given) if given else _kept(state_dir)
    if invite is None:
        raise InviteError(
            f"the run {spec.name!r} is closed; ask its owner for an invite, then add "
            "--invite INVITE"
        )
    credential = admission.accepts(invite, peer_id)
    if given and state_dir is not None:
        _keep(invite, state_dir)
    return Admitted(admission, credential, invite.terms.not_after_unix_s)


def _given(text: str) -> Invite:
    written = text.strip().removeprefix("\ufeff")
    if written.startswith(INVITE_PREFIX):
        return Invite.parse(written)
    path = Path(text)
    try:
        with path.open("rb") as file:
            return Invite.parse("".join(lines_of(text_of(file.read(MAX_FILE_BYTES), path))))
    except OSError as e:
        raise InviteError(
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


def date_of(unix_s: int) -> str:
    """For people."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
