"""Peer ids, signatures and records, by the words of `docs/protocol.md`."""

from __future__ import annotations

from typing import Any

import base58
import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

PREFIX = bytes.fromhex("00 24 08 01 12 20")
"""Of the multihash of a public key."""


def peer_id_of(seed: bytes) -> str:
    key = Ed25519PrivateKey.from_private_bytes(seed).public_key()
    return base58.b58encode(PREFIX + key.public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def sign(seed: bytes, message: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).sign(message)


def is_signed(peer_id: str, message: bytes, signature: bytes) -> bool:
    """By the machine of the peer, whose id may end with a seat."""
    decoded = base58.b58decode(peer_id.partition("/")[0])
    if decoded[: len(PREFIX)] != PREFIX:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(decoded[len(PREFIX) :]).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def signed(seed: bytes, record: dict[str, Any]) -> dict[str, bytes]:
    """A signed record."""
    payload = msgpack.packb(record)
    return {"payload": payload, "signature": sign(seed, payload)}


def read(envelope: dict[str, Any], run_id: str) -> dict[str, Any]:
    """The record in a signed one, of this run. Raises `AssertionError` where it is false."""
    record = msgpack.unpackb(envelope["payload"], strict_map_key=False)
    assert record["run_id"] == run_id
    assert is_signed(record["peer_id"], envelope["payload"], envelope["signature"])
    return record


def stamp_of(record: dict[str, Any]) -> list[int]:
    return [record["incarnation"], record["version"]]
