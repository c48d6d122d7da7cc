"""Who a peer is: an Ed25519 key whose public half *is* its peer id.

The file is a libp2p `PrivateKey` protobuf, so that any libp2p reads it. The peer id is the
identity multihash of the public key (libp2p peer-id specification), so a signature can be checked
with nothing but the peer id at hand.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmnet.errors import FinalError, ProtocolViolation, UserError
from swarmnet.protocol.membership.peer_ids import split_seat

PRIVATE_HEAD = b"\x08\x01\x12\x40"
"""Protobuf of PrivateKey: type Ed25519, 64 bytes of data (seed, public key)."""
PUBLIC_HEAD = b"\x00\x24\x08\x01\x12\x20"
"""Identity multihash of 36 bytes: protobuf of PublicKey, type Ed25519, 32 bytes of data."""
KEY_BYTES = 32
FILE_BYTES = len(PRIVATE_HEAD) + 2 * KEY_BYTES
MAX_CACHED_KEYS = 8192
MAX_PEER_ID_CHARS = 64


@dataclass(frozen=True)
class Identity:
    """A peer's key pair."""

    seed: bytes
    """The 32 secret bytes."""

    @classmethod
    def generate(cls) -> Identity:
        """A new one."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in a file, made there (mode 0600) if there is none. Raises `UserError`."""
        try:
            return cls._parse(path.read_bytes(), path)
        except FileNotFoundError:
            pass
        except OSError as e:
            raise UserError(f"cannot read the identity {path}: {e.strerror}") from None
        identity = cls.generate()
        try:
            identity.save(path)
        except OSError as e:
            raise UserError(f"cannot write the identity {path}: {e.strerror}") from None
        return identity

    def save(self, path: Path) -> None:
        """Writes the file, which its owner alone can read. Raises `OSError`."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(self.to_file_bytes())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    @classmethod
    def _parse(cls, data: bytes, path: Path) -> Identity:
        seed = data[len(PRIVATE_HEAD) : len(PRIVATE_HEAD) + KEY_BYTES]
        if len(data) != FILE_BYTES or not data.startswith(PRIVATE_HEAD):
            raise FinalError(f"{path} is no Ed25519 key; move it away and a new one is made")
        identity = cls(seed)
        if identity.to_file_bytes() != data:
            raise FinalError(f"{path} is damaged; move it away and a new key is made")
        return identity

    @property
    def public_bytes(self) -> bytes:
        """The 32 bytes of the public key."""
        return self._key.public_key().public_bytes_raw()

    @property
    def peer_id(self) -> str:
        """In base58, as libp2p writes it: 12D3Koo..."""
        return base58.b58encode(PUBLIC_HEAD + self.public_bytes).decode()

    @property
    def _key(self) -> Ed25519PrivateKey:
        return _private_key(self.seed)

    def sign(self, data: bytes) -> bytes:
        """A 64-byte Ed25519 signature."""
        return self._key.sign(data)

    def to_file_bytes(self) -> bytes:
        """As libp2p stores a private key."""
        return PRIVATE_HEAD + self.seed + self.public_bytes


@lru_cache(maxsize=16)
def _private_key(seed: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed)


@lru_cache(maxsize=MAX_CACHED_KEYS)
def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    """The key that a peer id is; None where it is not of that kind."""
    try:
        data = base58.b58decode(peer_id)
        if len(data) != len(PUBLIC_HEAD) + KEY_BYTES or not data.startswith(PUBLIC_HEAD):
            return None
        return Ed25519PublicKey.from_public_bytes(data[len(PUBLIC_HEAD) :])
    except ValueError:
        return None


def is_peer_id(text: str) -> bool:
    """Is this the id of an Ed25519 key?"""
    return len(text) <= MAX_PEER_ID_CHARS and _public_key(text) is not None


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Did the machine of the peer with this id sign these bytes?"""
    try:
        peer_id, _ = split_seat(peer_id)
    except ProtocolViolation:
        return False
    key = _public_key(peer_id) if len(peer_id) <= MAX_PEER_ID_CHARS else None
    if key is None:
        return False
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True
