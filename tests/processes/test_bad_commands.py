"""Bad input from the keyboard and from the wire, against real processes: one clear line on the
right side, the right exit code, and the run goes on."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import xxhash

from peer.cli import run_command
from swarmnet.identity import Identity
from swarmnet.transport.libp2p.p2pd import P2pdCarrier
from tests.processes.running import SPARING, Machine, sockets_in, tiny_run

pytestmark = pytest.mark.processes
TRANSPORTS = ("p2pd", "py-libp2p")
CLOSE_LIMIT_S = 60.0
HELLO, REQUEST, REQUEST_PART, END = 1, 2, 7, 0x80


@pytest.fixture
def free_port() -> int:
    """Nobody listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Somebody else listens there."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    """The one line that a command says when it fails."""
    capsys.readouterr()
    assert run_command(arguments) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith("swarmnet: ")
    assert "Traceback" not in err
    return err


@pytest.mark.long
def test_what_would_have_been_beside_a_peer_is_no_news(tmp_path: Path, taken_port: int) -> None:
    """A warning of Python's about it would follow the line that says why."""
    arguments = ["peer", "--spec", str(tiny_run(tmp_path)), "--host", "127.0.0.1"]
    arguments += ["--state-dir", str(tmp_path / "state"), "--metrics-port", str(taken_port)]
    command = [sys.executable, "-m", "peer", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2
    assert "--metrics-port" in ended.stderr.splitlines()[-1]
    assert "never awaited" not in ended.stderr


def test_a_run_that_cannot_start_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tiny_run(tmp_path)
    state = ["--host", "127.0.0.1", "--state-dir", str(tmp_path / "state")]

    def start(spec: Path, *extra: str, code: int = 2) -> str:
        return complaint(["peer", "--spec", str(spec), *state, *extra], capsys, code)

    wrong = tmp_path / "wrong.toml"
    wrong.write_text(good.read_text().replace("hidden_size", "hiden_size"))
    assert "hiden_size" in start(wrong)
    wrong.write_text(good.read_text().replace("num_stages = 2", "num_stages = -2"))
    assert "num_stages" in start(wrong)
    wrong.write_text("[model\n")
    assert "wrong.toml" in start(wrong)
    missing = tiny_run(tmp_path, seed=2, data=str(tmp_path / "nowhere"))
    assert "nowhere" in start(missing, code=1)
    (tmp_path / "empty").mkdir()
    assert "empty" in start(tiny_run(tmp_path, seed=3, data=str(tmp_path / "empty")), code=1)
    assert "--stage 7: this run has stages 0 to 1" in start(good, "--stage", "7")
    assert "pigeon" in start(good, "--announce", "/pigeon/4")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_addresses_that_lead_nowhere(
    tmp_path: Path, transport: str, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state-dir", str(tmp_path / "state"), "--host", "127.0.0.1"]
    peer_id = Identity.generate().peer_id
    where = f"/ip4/127.0.0.1/tcp/{free_port}"

    def join(address: str, code: int = 2) -> str:
        words = ["peer", "--join", address, "--patience", "0", *state, "--transport", transport]
        line = complaint(words, capsys, code)
        assert len(line) < 400, line
        return line

    assert "refused" in join(f"{where}/p2p/{peer_id}", code=1)
    assert "/p2p/" in join(where)
    assert "nonsense" in join("nonsense")
    assert "12D3" in join(f"{where}/p2p/12D3KooWnotapeer")
    assert "tcp/70000" in join(f"/ip4/127.0.0.1/tcp/70000/p2p/{peer_id}")
    line = complaint(["status", f"{where}/p2p/{peer_id}", "--transport", transport], capsys)
    assert "refused" in line


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_taken_port(
    tmp_path: Path,
    transport: str,
    taken_port: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarmnet.runtime.net.PORT_WAIT_S", 0.0)
    arguments = ["--spec", str(tiny_run(tmp_path)), "--state-dir", str(tmp_path / "state")]
    listen = ["--host", "127.0.0.1", "--port", str(taken_port), "--transport", transport]
    line = complaint(["peer", *arguments, *listen], capsys, 2)
    assert str(taken_port) in line
    assert "taken" in line
    assert "choose another" in line


PATCHED = """
import swarmnet.transport.base as base
base.{name} = {value!r}
from peer.cli import main
main()
"""


def frame(kind: int, call_id: int, head: bytes, payload: bytes = b"") -> bytes:
    """As `docs/protocol.md` has it."""
    header = struct.pack("<2sBBIII", b"sw", 1, kind, call_id, len(head), len(payload))
    checksum = xxhash.xxh3_64_intdigest(header + head + payload) & 0xFFFFFFFF
    return header + struct.pack("<I", checksum) + head + payload


OLD_HELLO = frame(HELLO | END, 0, msgpack.packb({"v": 1, "r": "", "g": "swarmnet/0.1.0"}))
"""Of swarmnet 0.1."""


def garbage() -> dict[str, bytes]:
    """What a stream may bring that is no conversation of ours."""
    hello = frame(HELLO | END, 0, msgpack.packb({"v": 3, "r": "", "g": ""}))
    huge = struct.pack("<2sBBIIII", b"sw", 1, HELLO | END, 0, 0xFFFFFFFF, 0, 0)
    array = {"m": "step", "b": None, "a": [["float32", [1 << 40]]]}
    return {
        "noise": random.Random(0).randbytes(4096),
        "http": b"GET / HTTP/1.1\r\nHost: swarm\r\n\r\n" * 4,
        "a length of four gigabytes": huge,
        "a wrong checksum": hello[:-1] + bytes([hello[-1] ^ 1]),
        "no msgpack": frame(HELLO | END, 0, b"\xc1" * 40),
        "a request before hello": frame(REQUEST | END, 1, msgpack.packb({"m": "spec", "b": None})),
        "an array of terabytes": hello + frame(REQUEST, 1, msgpack.packb(array)),
        "a part of nothing": hello + frame(REQUEST_PART, 5, b"", b"x" * 64),
    }


async def throw(address: str, data: bytes) -> None:
    """Opens a stream to a peer as a stranger, writes, and waits until the peer closes it."""
    carrier = P2pdCarrier(Identity.generate())
    await carrier.start(lambda stream: stream.transport.abort())
    try:
        stream = await carrier.open(await carrier.connect(address))
        closed = asyncio.get_running_loop().create_future()

        class Listener(asyncio.Protocol):
            def connection_lost(self, exc: Exception | None) -> None:
                closed.set_result(None)

        stream.transport.set_protocol(Listener())
        stream.transport.resume_reading()
        stream.transport.write(data)
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await closed
    finally:
        await carrier.close()


def test_a_run_goes_on_whatever_its_visitors_say(running: Machine) -> None:
    path = tiny_run(running.folder, num_stages=1, rounds=100_000)
    peer = running.start_peer("peer-0", "--spec", str(path), *SPARING)
    running.until_ready(peer)

    def patched(name: str, value: object) -> tuple[str, ...]:
        return (sys.executable, "-c", PATCHED.format(name=name, value=value))

    join = ("--join", peer.address, "--data", str(running.folder / "text.txt"))
    newer = running.start_peer("newer", *join, command=patched("PROTOCOL_VERSIONS", (5, 6)))
    other = running.start_peer("other", *join, command=patched("PROTOCOL_NAME", "/swarmnet/2"))
    blind = running.start_peer(
        "blind", "--join", peer.address, "--data", str(running.folder / "nowhere")
    )
    expected = (
        "protocol 4 (swarmnet/",
        "version of swarmnet's protocol",
        "nowhere",
    )
    for command, words in zip((newer, other, blind), expected):
        assert running.wait(command) == 1, command.describe()
        (line,) = command.errors()
        assert line.startswith("swarmnet: ")
        assert words in line

    def times_said(words: str) -> int:
        return "\n".join(peer.errors()).count(words)

    # Another process says it, when it comes to read what the visitor sent.
    running.until(lambda: times_said("speaks protocol 5 to 6 (swarmnet/"))
    assert times_said("this program speaks 4: update this program, it is older") == 1
    asyncio.run(throw(peer.address, OLD_HELLO))
    old = "speaks protocol 1 (swarmnet/0.1.0); this program speaks 4: update the peer, it is older"
    running.until(lambda: times_said(old))
    assert times_said(old) == 1

    for data in garbage().values():  # each a stranger of its own: of one, the first is told
        asyncio.run(throw(peer.address, data))
    running.until(lambda: times_said("broke the protocol") >= len(garbage()))
    assert times_said("broke the protocol") == len(garbage()), peer.describe()
    assert times_said("Traceback") == 0

    done = max(event["round"] for event in peer.events("round"))
    running.until_round(peer, done + 5)
    running.interrupt(peer)
    assert running.wait(peer) == 0
    assert sockets_in(running.folder) == []
