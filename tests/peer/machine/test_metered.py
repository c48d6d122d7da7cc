"""Whether a network is metered, asked of a real message bus: a `dbus-daemon` of the test's own, and
on it a service with NetworkManager's name and property, in the bytes of the D-Bus specification."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from peer.machine.metered import COMMAND, SERVICE, is_metered

CONFIG = """<busconfig><type>system</type><listen>unix:path={0}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*"/><allow receive_sender="*"/><allow own="*"/>
<allow user="*"/></policy></busconfig>"""
BUS = "org.freedesktop.DBus"
CALL, RETURN = 1, 2
PATH, INTERFACE, MEMBER, REPLY_SERIAL, DESTINATION, SIGNATURE = 1, 2, 3, 5, 6, 8
ANSWER_S = 20.0
DAEMON = ("--nofork", "--nopidfile", "--print-address")


def text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode() + b"\0"


def padded(data: bytes, to: int) -> bytes:
    return data + bytes(-len(data) % to)


def message(kind: int, fields: dict[int, str | int], body: bytes = b"") -> bytes:
    """Little-endian, version 1."""
    data = b""
    for code, value in fields.items():
        data = padded(data, 8) + bytes([code])
        if isinstance(value, int):
            data = padded(data + b"\1u\0", 4) + struct.pack("<I", value)
        elif code == SIGNATURE:
            data += b"\1g\0" + bytes([len(value)]) + value.encode() + b"\0"
        else:
            data = padded(data + (b"\1o\0" if code == PATH else b"\1s\0"), 4) + text(value)
    head = struct.pack("<BBBBIII", ord("l"), kind, 0, 1, len(body), 1, len(data))
    return padded(head + data, 8) + body


def call_bus(member: str, signature: str = "", body: bytes = b"") -> bytes:
    fields: dict[int, str | int] = {PATH: "/org/freedesktop/DBus", INTERFACE: BUS, MEMBER: member}
    fields[DESTINATION] = BUS
    if signature:
        fields[SIGNATURE] = signature
    return message(CALL, fields, body)


class NetworkManager:
    """Has the one property; whoever calls gets it."""

    def __init__(self, path: Path) -> None:
        self.metered = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_S)
        self._socket.connect(str(path))
        self._socket.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode())
        self._socket.sendall(b"\r\n")
        assert self._socket.recv(256).startswith(b"OK")
        self._socket.sendall(b"BEGIN\r\n" + call_bus("Hello"))
        name = padded(text(SERVICE), 4) + struct.pack("<I", 0)
        self._socket.sendall(call_bus("RequestName", "su", name))
        while (found := self._next())[0] != RETURN or found[2] != struct.pack("<I", 1):
            pass  # until the name is this one's
        self._socket.settimeout(None)
        threading.Thread(target=self._serve, daemon=True).start()

    def _next(self) -> tuple[int, int, bytes, bytes]:
        """Kind, serial, body and fields of a message that comes."""
        head = self._read(16)
        kind, body_bytes, serial, field_bytes = struct.unpack("<xBxxIII", head)
        fields = self._read(field_bytes + -field_bytes % 8)
        return kind, serial, self._read(body_bytes), fields

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            more = self._socket.recv(num_bytes - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def _serve(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                kind, serial, _, fields = self._next()
                sender = re.search(rb":1\.\d+", fields)
                if kind != CALL or sender is None:
                    continue
                to = {REPLY_SERIAL: serial, DESTINATION: sender[0].decode(), SIGNATURE: "v"}
                body = padded(b"\1u\0", 4) + struct.pack("<I", self.metered)
                self._socket.sendall(message(RETURN, to, body))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A message bus that `is_metered` asks; its socket."""
    for program in ("dbus-daemon", COMMAND[0]):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}, which .ci/run installs")
    with tempfile.TemporaryDirectory(prefix="bus") as folder:
        path, config = Path(folder, "socket"), Path(folder, "config")
        config.write_text(CONFIG.format(path))
        daemon = subprocess.Popen(
            [
                "dbus-daemon",
                f"--config-file={config}",
                "--nofork",
                "--nopidfile",
                "--print-address",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline(), "it listens"
            monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={path}")
            yield path
        finally:
            daemon.terminate()
            daemon.wait()
            daemon.stdout.close()


def test_a_real_bus_is_asked(bus: Path) -> None:
    assert not is_metered(), "nobody has the name"
    manager = NetworkManager(bus)
    try:
        for value, expected in enumerate((False, True, False, True, False)):
            manager.metered = value
            assert is_metered() is expected
    finally:
        manager.close()
