"""The parts of py-libp2p that we use, imported without the rest, and so that hivemind fits beside
them.

py-libp2p's package files import all of it: every discovery, transport and store, with libraries
that we do not need, of which one has to be compiled. Where they are not loaded already, empty
packages stand in for them (docs/decisions/0016-py-libp2p-without-its-pins.md).

hivemind and py-libp2p both register protobuf messages named `crypto.pb.*`, and protobuf
allows a name once in a process. The two files of py-libp2p that use the name therefore go
into a descriptor pool of their own. Importing this module takes half a second: import it where it
is used. It raises `UserError`, one line with the command that helps, where py-libp2p is missing or
cannot be imported.
"""

from __future__ import annotations

import logging
from typing import Any

from google.protobuf import descriptor_pool, symbol_database  # noqa: F401  (before the detour)

from swarmnet.errors import UserError
from swarmnet.needs import PY_LIBP2P, install_command
from swarmnet.transport.libp2p.hollow import hollow

APART = (b"libp2p/crypto/pb/crypto.proto", b"libp2p/security/insecure/pb/plaintext.proto")
HOLLOW = ("libp2p", "libp2p.transport", "libp2p.transport.quic")
"""Packages whose own file is not run; the modules in them are found as ever."""


class _Detour:
    """Stands in for the shared descriptor pool while py-libp2p is imported."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._apart = descriptor_pool.DescriptorPool()

    def AddSerializedFile(self, data: bytes) -> Any:
        name = data[2 : 2 + data[1]]  # a FileDescriptorProto begins with its name
        pool = self._apart if name in APART else self._shared
        return pool.AddSerializedFile(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)


_pools: Any = descriptor_pool
_default = _pools.Default
_detour = _Detour(_default())
_pools.Default = lambda: _detour
try:
    for _name in HOLLOW:
        hollow(_name)
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
    from libp2p.custom_types import TProtocol
    from libp2p.identity.identify.pb.identify_pb2 import Identify
    from libp2p.io.abc import ReadWriteCloser
    from libp2p.network.connection.raw_connection import RawConnection
    from libp2p.peer.id import ID
    from libp2p.protocol_muxer.exceptions import ProtocolNotSupportedError
    from libp2p.protocol_muxer.multiselect import Multiselect
    from libp2p.protocol_muxer.multiselect_client import MultiselectClient
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
    from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
    from libp2p.security.noise.transport import Transport as NoiseTransport
    from libp2p.transport.upgrader import TransportUpgrader
    from libp2p.utils.varint import encode_varint_prefixed
    from multiaddr import Multiaddr
    from multiaddr.utils import get_network_addrs
except ImportError as _error:
    _name = (getattr(_error, "name", None) or PY_LIBP2P).partition(".")[0]
    _why = "is not installed" if _name == PY_LIBP2P else f"cannot be imported ({_error})"
    raise UserError(f"py-libp2p {_why}: {install_command(_name)}") from None
finally:
    _pools.Default = _default

__all__ = [
    "ID",
    "NOISE",
    "Identify",
    "Multiaddr",
    "Multiselect",
    "MultiselectClient",
    "MultiselectCommunicator",
    "NoiseTransport",
    "PeerIDMismatchesPubkey",
    "ProtocolNotSupportedError",
    "RawConnection",
    "ReadWriteCloser",
    "TProtocol",
    "TransportUpgrader",
    "create_new_key_pair",
    "create_noise_key_pair",
    "encode_varint_prefixed",
    "get_network_addrs",
]


def set_logging(is_debug: bool) -> None:
    """py-libp2p warns about every stranger that hangs up: silent, but for a debug run."""
    logger = logging.getLogger("libp2p")
    logger.setLevel(logging.WARNING if is_debug else logging.CRITICAL + 1)
    logger.propagate = is_debug
