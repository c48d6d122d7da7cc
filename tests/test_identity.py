"""Keys, their files, and signatures that need nothing but the peer id."""

from __future__ import annotations

import stat
from pathlib import Path

import base58
import pytest

from swarmnet.errors import UserError
from swarmnet.identity import Identity, verify


def test_the_peer_id_is_the_one_that_libp2p_computes() -> None:
    """Against py-libp2p."""
    from swarmnet.transport.libp2p.imports import ID, create_new_key_pair

    seed = bytes(range(32))
    identity = Identity(seed)
    pair = create_new_key_pair(seed)
    assert ID.from_pubkey(pair.public_key).to_base58() == identity.peer_id
    assert identity.peer_id.startswith("12D3Koo")
    assert verify(identity.peer_id, b"data", pair.private_key.sign(b"data"))


def test_a_key_is_made_once_and_read_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "identity.key"
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["identity.key"]
    assert Identity.generate() != made


def corruptions(good: bytes) -> list[bytes]:
    flipped = bytearray(good)
    flipped[-1] ^= 1
    return [b"", b"x", good[:-1], good + b"\0", bytes(len(good)), bytes(flipped)]


@pytest.mark.parametrize("number", range(6))
def test_a_damaged_file_is_named_with_what_to_do_and_is_kept(tmp_path: Path, number: int) -> None:
    path = tmp_path / "identity.key"
    damaged = corruptions(Identity.generate().to_file_bytes())[number]
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"identity\.key is .*; move it away"):
        Identity.load_or_create(path)
    assert path.read_bytes() == damaged


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the identity"):
        Identity.load_or_create(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot (read|write) the identity"):
        Identity.load_or_create(tmp_path / "file" / "identity.key")


def test_signatures() -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(b"data")
    assert verify(one.peer_id, b"data", signature)
    assert not verify(one.peer_id, b"date", signature)
    assert not verify(other.peer_id, b"data", signature)
    assert not verify(one.peer_id, b"data", signature[:-1])
    assert not verify(one.peer_id, b"data", b"")


@pytest.mark.parametrize(
    "peer_id",
    [
        "",
        "x",
        "0OIl",
        "é" * 20,
        "1" * 52,
        "Z" * 10_000,
        base58.b58encode(b"\x12\x20" + bytes(32)).decode(),  # the hash of an RSA key
        base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + b"\xff" * 32).decode(),  # no point
    ],
)
def test_a_peer_id_that_is_no_key_signs_nothing(peer_id: str) -> None:
    assert not verify(peer_id, b"data", bytes(64))
