"""Who may take part in a run: anyone, or who holds an invite of its owner.

No server decides: every peer checks every other one, with nothing but the run's spec at hand.
The spec of a closed run names its owner's public key (as a peer id). The owner signs *grants*:
"who holds this key may join this run until then". An *invite* is a grant together with the secret
key that it is for, made for the occasion; who has it signs its own peer id with that key. The
result, the *credential*, is public: it travels in the peer's record, and is worth nothing to any
other peer id. A grant for one named peer needs no such key: its holder is that peer.

    owner's key --signs--> grant {run, holder, not after} --holder's key signs--> peer id
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import base58

from swarmnet.errors import Forged, InviteError, ProtocolViolation
from swarmnet.identity import KEY_BYTES, Identity, verify
from swarmnet.protocol.membership.records import MAX_CREDENTIAL_BYTES
from swarmnet.wire import pack, unpack

INVITE_PREFIX = "swarmnet-invite-"
MAX_INVITE_CHARS = 2048
MAX_ID_CHARS = 128
SIGNATURE_BYTES = 64
GRANT_DOMAIN = b"swarmnet/1/grant\0"
BINDING_DOMAIN = b"swarmnet/1/binding\0"
"""What is signed begins with its purpose: no signature is ever good for another one."""
CHECKED_CREDENTIALS = 8192


class Admission(Protocol):
    """Decides whether a peer may take part."""

    @property
    def is_open(self) -> bool:
        """Whether anyone may, so that nothing needs to be shown."""

    def check(self, peer_id: str, credential: bytes) -> None:
        """Raises `ProtocolViolation` where the credential does not admit the peer now: `Forged`
        where a signature in it is false. Called on any thread."""


@dataclass(frozen=True, slots=True)
class Open:
    """Anyone may."""

    is_open: bool = field(default=True, init=False)

    def check(self, peer_id: str, credential: bytes) -> None:
        """Admits."""


OPEN = Open()


@dataclass(frozen=True, slots=True)
class Grant:
    """What an owner signs."""

    run_id: str
    holder: str
    """Peer id of the key that may join, or that may let others join."""
    not_after_unix_s: int

    def __post_init__(self) -> None:
        if not (0 < len(self.run_id) <= MAX_ID_CHARS and 0 < len(self.holder) <= MAX_ID_CHARS):
            raise ValueError("an id of a grant has an impossible length")
        if not 0 < self.not_after_unix_s < 2**53:
            raise ValueError("a grant ends at an impossible time")


@dataclass(frozen=True, slots=True)
class Credential:
    """What a peer shows: public, and bound to its peer id."""

    grant: bytes
    grant_signature: bytes
    binding: bytes = b""
    """The holder's signature over grant and peer id; empty where the holder is the peer."""

    def __post_init__(self) -> None:
        if len(self.grant) > MAX_CREDENTIAL_BYTES or len(self.grant_signature) != SIGNATURE_BYTES:
            raise ValueError("a grant or its signature has an impossible length")
        if len(self.binding) not in (0, SIGNATURE_BYTES):
            raise ValueError("a binding has an impossible length")


@dataclass(frozen=True, slots=True)
class Invite:
    """What an owner gives away: a grant, and the secret that it is for."""

    grant: bytes
    grant_signature: bytes
    seed: bytes = b""
    """The holder's secret key; empty where the grant names a peer."""

    def __post_init__(self) -> None:
        if len(self.grant) > MAX_CREDENTIAL_BYTES or len(self.grant_signature) != SIGNATURE_BYTES:
            raise ValueError("a grant or its signature has an impossible length")
        if len(self.seed) not in (0, KEY_BYTES):
            raise ValueError("a key has an impossible length")

    @classmethod
    def issue(
        cls, owner: Identity, run_id: str, not_after_unix_s: int, peer_id: str = ""
    ) -> Invite:
        """A new invite to a run: for one named peer, or for whoever holds it."""
        holder = None if peer_id else Identity.generate()
        grant = pack(Grant(run_id, holder.peer_id if holder else peer_id, not_after_unix_s))
        signature = owner.sign(GRANT_DOMAIN + grant)
        return cls(grant, signature, holder.seed if holder else b"")

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Reads what `str()` wrote. Raises `InviteError`."""
        text = "".join(text.split())
        if not text.startswith(INVITE_PREFIX) or len(text) > MAX_INVITE_CHARS:
            raise InviteError(f"that is no invite; one begins with {INVITE_PREFIX}")
        try:
            invite = unpack(base58.b58decode(text[len(INVITE_PREFIX) :]), cls)
            invite.terms  # noqa: B018  must be readable too
            return invite
        except (ValueError, ProtocolViolation):
            raise InviteError("the invite is damaged; copy it again, whole") from None

    def __str__(self) -> str:
        return INVITE_PREFIX + base58.b58encode(pack(self)).decode()

    @property
    def terms(self) -> Grant:
        """What was granted. Raises `ProtocolViolation`."""
        return unpack(self.grant, Grant)

    def credential(self, peer_id: str) -> bytes:
        """What the peer with this id shows. Raises `InviteError` where the invite is another's."""
        if not self.seed:
            if self.terms.holder != peer_id:
                raise InviteError(
                    f"the invite is for the peer {self.terms.holder}, and this is {peer_id}; "
                    "ask the run's owner for one of your own"
                )
            return pack(Credential(self.grant, self.grant_signature))
        binding = Identity(self.seed).sign(_binding(self.grant, peer_id))
        return pack(Credential(self.grant, self.grant_signature, binding))


@dataclass(frozen=True, slots=True)
class InviteOnly:
    """Who shows a credential that goes back to the run's owner, and is not too old."""

    owner: str
    """Peer id of the owner's key."""
    run_id: str
    clock: Callable[[], float] = time.time
    """Unix seconds: grants end at a date, which an event loop does not know."""
    is_open: bool = field(default=False, init=False)

    def check(self, peer_id: str, credential: bytes) -> None:
        """Raises `ProtocolViolation` that says what is wrong."""
        not_after_unix_s = admitted_until(self.owner, self.run_id, peer_id, credential)
        if self.clock() > not_after_unix_s:
            raise ProtocolViolation("its invite has expired")

    def accepts(self, invite: Invite, peer_id: str) -> bytes:
        """The own credential from an invite. Raises `InviteError` where others would refuse it."""
        credential = invite.credential(peer_id)
        try:
            self.check(peer_id, credential)
        except ProtocolViolation as e:
            raise InviteError(
                f"this invite is refused: {e}; ask the run's owner for a new one"
            ) from None
        return credential


def _binding(grant: bytes, peer_id: str) -> bytes:
    return BINDING_DOMAIN + len(grant).to_bytes(4, "big") + grant + peer_id.encode()


@lru_cache(maxsize=CHECKED_CREDENTIALS)
def admitted_until(owner: str, run_id: str, peer_id: str, credential: bytes) -> int:
    """Unix seconds until which a credential admits a peer. Raises `ProtocolViolation`, which is
    `Forged` where a signature is false.

    The same credential comes with every version of a record: it is checked once."""
    if not credential:
        raise ProtocolViolation("it shows no invite")
    if len(credential) > MAX_CREDENTIAL_BYTES:
        raise ProtocolViolation("its credential is too long")
    shown = unpack(credential, Credential)
    if not verify(owner, GRANT_DOMAIN + shown.grant, shown.grant_signature):
        raise Forged("its invite is not signed by the run's owner")
    grant = unpack(shown.grant, Grant)
    if grant.run_id != run_id:
        raise ProtocolViolation("its invite is for another run")
    is_holder = grant.holder == peer_id and not shown.binding
    if not is_holder and not verify(grant.holder, _binding(shown.grant, peer_id), shown.binding):
        raise Forged("its invite was given to somebody else")
    return grant.not_after_unix_s
