"""The carrier on hivemind's libp2p daemon, p2pd.

The daemon is a process of ours (started through a tiny Python that asks the kernel to end it with
us, however we end) and hivemind's `P2P` is attached to it, so that the DHT shares it. Raw streams
to `/swarmnet/1` come through a unix socket each; their asyncio transports are handed to `Channel`.

The kernel ends the daemon with the *thread* that started it: run the event loop in a thread that
lives as long as the carrier does (the main one, as a rule).

A watchdog notices when the daemon dies or stops answering and starts another with the same
identity and port; channels close, and are opened again when they are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarmnet.errors import AddressError, TransportError, Unreachable, WrongProtocol
from swarmnet.identity import Identity
from swarmnet.protocol.membership.addresses import full_address, to_tell
from swarmnet.transport.base import PROTOCOL_NAME, RELAY_PROTOCOL, ByteStream
from swarmnet.transport.libp2p.interfaces import own_hosts
from swarmnet.transport.libp2p.knocking import knock

log = logging.getLogger("swarmnet.transport")

START_TIMEOUT_S = 20.0
START_ATTEMPTS = 3
PING_EVERY_S = 0.5
PING_TIMEOUT_S = 1.0
LOOK_AT_HOSTS_EVERY_S = 5.0
"""Between two looks at which of the own addresses is of use: a route may come after its address."""
MAX_MISSED_PINGS = 2
"""More than one: after a pause of *our* process a ping may time out although it was answered."""
CONNECT_TIMEOUT_S = 10.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0
END_TIMEOUT_S = 3.0
MAX_KNOWN_PEERS = 65_536
MAX_ADDRESSES = 16
MAX_SOCKET_PATH = 80
RUNTIME_PREFIX = "swarmnet-p2pd-"
RUNTIME_PATTERN = re.compile(RUNTIME_PREFIX + r"[0-9]+-[a-z0-9_]{8}")
"""Nothing else is ever removed: other folders of swarmnet, and of its users, lie beside them."""
MAX_UNLOCKED_S = 3600.0
"""A runtime folder without a lock file this old was never finished."""
MAX_REASONS = 1024
"""Addresses of which the reason of the last failed dial is remembered."""
DIAL_FAILURE = re.compile(r"\* \[([^\]]+)\] ([^\n]*)")
"""How the daemon says what was wrong with each address of a peer."""

# PR_SET_PDEATHSIG, and a process group of its own: Ctrl-C is for us, the daemon ends after us.
END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
os.setpgid(0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class RuntimeDir:
    """A folder for sockets that says, by a lock of the kernel's, whether its process lives."""

    def __init__(self, base: Path | None = None) -> None:
        """Raises `TransportError`."""
        base = base or Path(tempfile.gettempdir())
        if len(str(base)) > MAX_SOCKET_PATH - 40:
            base = Path("/tmp")
        clean_up(base)
        try:
            self._make(base)
            while not (self.path / "lock").exists():  # another process cleaned it up half made
                os.close(self._lock)
                self._make(base)
        except OSError as e:
            raise TransportError(f"cannot make a folder for sockets in {base}: {e}") from None
        self._is_open = True

    def _make(self, base: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{RUNTIME_PREFIX}{os.getpid()}-", dir=base))
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Idempotent."""
        if self._is_open:
            self._is_open = False
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


def clean_up(base: Path) -> list[Path]:
    """Removes the runtime folders of processes that are gone; returns them."""
    removed = []
    for path in sorted(base.glob(f"{RUNTIME_PREFIX}*")):
        if RUNTIME_PATTERN.fullmatch(path.name) and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _is_abandoned(path: Path) -> bool:
    """Is its process gone? Its lock went with it, however it ended."""
    try:
        lock = os.open(path / "lock", os.O_RDWR)
    except FileNotFoundError:  # being made, or its maker died
        with contextlib.suppress(OSError):
            return path.is_dir() and time.time() - path.stat().st_mtime > MAX_UNLOCKED_S
        return False
    except OSError:  # somebody else's
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


class P2pdCarrier:
    """A `transport.base.Carrier` on p2pd."""

    def __init__(
        self,
        identity: Identity,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        announce: Sequence[str] = (),
        runtime_base: Path | None = None,
        nat_port_map: bool = False,
    ) -> None:
        """`host`, `port`: where to listen (0: any free port). `announce`: further addresses to tell
        others. `runtime_base`: where the folder with the sockets is made."""
        self.peer_id = identity.peer_id
        self.p2p: Any = None
        self._identity = identity
        self._host, self._port = host, port
        self._announce = tuple(announce)
        self._nat_port_map = nat_port_map
        self._runtime_base = runtime_base
        self._runtime: RuntimeDir | None = None
        self._daemon: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._accept: Callable[[ByteStream], None] = lambda stream: stream.transport.abort()
        self._listening: list[str] = []
        self._addresses: list[str] = []
        self._looked_at = float("-inf")
        self._known: dict[str, list[str]] = {}
        self._restart_callbacks: list[Callable[[], None]] = []
        self._starts = 0
        self._last_lines: list[str] = []
        self._reasons: dict[str, str] = {}
        self._away: dict[str, None] = {}
        """Peers that the daemon could not reach the last time: `knocking` says why that matters."""

    # ---- the port ---------------------------------------------------------------------------

    async def start(self, accept: Callable[[ByteStream], None]) -> None:
        self._accept = accept
        self._runtime = RuntimeDir(self._runtime_base)
        try:
            for address in self._announce:
                _check_multiaddr(address)
            for attempt in range(START_ATTEMPTS):
                try:
                    await self._start_daemon()
                    break
                except TransportError:
                    await self._stop_daemon()
                    if attempt + 1 == START_ATTEMPTS:
                        raise
        except BaseException:
            await self._stop_daemon()
            self._runtime.close()
            raise
        self._watchdog = asyncio.get_running_loop().create_task(self._watch())

    def addresses(self) -> list[str]:
        return list(self._addresses)

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        bare = [_without_peer(address, peer_id) for address in addresses[:MAX_ADDRESSES]]
        known = [address for address in bare if address]
        if not known:
            return
        self._known.pop(peer_id, None)
        if len(self._known) >= MAX_KNOWN_PEERS:
            del self._known[next(iter(self._known))]
        self._known[peer_id] = known

    def on_restart(self, callback: Callable[[], None]) -> None:
        """`callback()` after the daemon was replaced."""
        self._restart_callbacks.append(callback)

    async def connect(self, address: str) -> str:
        _check_multiaddr(address)
        peer_id = address.rpartition("/p2p/")[2]
        if "/p2p/" not in address or not peer_id:
            raise AddressError(f"{address} does not end in /p2p/<peer id>; copy the whole line")
        if peer_id == self.peer_id:
            raise AddressError(f"{address} is this peer's own address")
        bare = _without_peer(address, peer_id)
        others = [a for a in self._known.get(peer_id, []) if a != bare]
        self.learn(peer_id, [address, *others])
        await self._connect(peer_id)
        return peer_id

    async def open(self, peer_id: str, protocol: str = PROTOCOL_NAME) -> ByteStream:
        from hivemind.proto import p2pd_pb2

        await self._connect(peer_id)
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=_peer_bytes(peer_id), proto=[protocol]),
        )
        reader, writer = await self._ask(peer_id, request)
        return _byte_stream(peer_id, reader, writer, protocol)

    async def drop(self, peer_id: str) -> None:
        from hivemind.p2p import PeerID

        if self.p2p is None:
            return
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await self.p2p._client.disconnect(PeerID.from_base58(peer_id))
        except Exception as e:
            log.debug("the daemon does not disconnect from %s: %r", peer_id[-8:], e)

    async def observed(self, peer_id: str) -> str:
        if self.p2p is None:
            return ""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                peers = await self.p2p.list_peers()
        except Exception as e:
            log.debug("the daemon does not say who is connected: %r", e)
            return ""
        found = [str(a) for p in peers if p.peer_id.to_base58() == peer_id for a in p.addrs]
        return next((a for a in found if "/p2p-circuit" not in a), "")

    async def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
            self._watchdog = None
        await self._stop_daemon()
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    # ---- streams ----------------------------------------------------------------------------

    async def _connect(self, peer_id: str) -> None:
        """Makes sure that the daemon has a connection to a peer. Raises `Unreachable`."""
        from hivemind.proto import p2pd_pb2
        from multiaddr import Multiaddr

        known = self._known.get(peer_id, [])
        if peer_id in self._away and not await self.observed(peer_id):
            reason = await knock(known)
            if reason:
                raise Unreachable(reason)
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=_peer_bytes(peer_id),
                addrs=[Multiaddr(a).to_bytes() for a in known],
            ),
        )
        try:
            _, writer = await self._ask(peer_id, request)
        except Unreachable:
            self._away[peer_id] = None
            while len(self._away) > MAX_KNOWN_PEERS:
                del self._away[next(iter(self._away))]
            raise
        self._away.pop(peer_id, None)
        writer.close()

    async def _ask(
        self, peer_id: str, request: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Asks the daemon for something about a peer, on a control connection of its own, which is
        closed when it fails. Raises `Unreachable`."""
        from google.protobuf.message import DecodeError
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
        from hivemind.proto import p2pd_pb2

        if self.p2p is None:
            raise Unreachable("this peer's network daemon is not running")
        connector = self.p2p._client.control.daemon_connector
        writer: asyncio.StreamWriter | None = None
        response = p2pd_pb2.Response()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await connector.open_connection()
                await write_pbmsg(writer, request)
                await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                reason = self._explain(peer_id, response.error.msg)
                raise (WrongProtocol if OTHER_PROTOCOL in reason else Unreachable)(reason)
        except BaseException as e:
            if writer is not None:
                writer.transport.abort()
            if isinstance(e, TimeoutError):
                raise Unreachable(f"no answer within {CONNECT_TIMEOUT_S:.0f} s") from None
            if isinstance(e, (OSError, EOFError, ValueError, DecodeError)):
                raise Unreachable("this peer's network daemon does not answer") from None
            raise
        return reader, writer

    def _explain(self, peer_id: str, text: str) -> str:
        """One line: what is wrong with the address that was asked for. The daemon dials none again
        for some seconds after it failed, and then says only that; the reason is from before."""
        for address, reason in DIAL_FAILURE.findall(text):
            if "dial backoff" not in reason:
                self._reasons.pop(address, None)
                if len(self._reasons) >= MAX_REASONS:
                    del self._reasons[next(iter(self._reasons))]
                self._reasons[address] = _reason(reason)
        for address in self._known.get(peer_id, []):
            if f"[{address}]" in text and address in self._reasons:
                return self._reasons[address]
        return _reason(text)

    async def _on_relay_stream(self, info: Any, reader: Any, writer: Any) -> None:
        await self._on_stream(info, reader, writer, RELAY_PROTOCOL)

    async def _on_stream(
        self, info: Any, reader: Any, writer: Any, protocol: str = PROTOCOL_NAME
    ) -> None:
        try:
            stream = _byte_stream(info.peer_id.to_base58(), reader, writer, protocol)
        except Unreachable:
            return
        self._accept(stream)

    # ---- the daemon -------------------------------------------------------------------------

    async def _start_daemon(self) -> None:
        """Starts p2pd and attaches to it. Raises `AddressError` or `TransportError`."""
        from importlib import resources

        from hivemind.p2p import P2P
        from multiaddr import Multiaddr

        assert self._runtime is not None
        self._check_port()
        self._starts += 1
        folder = self._runtime.path
        control = folder / f"p2pd-{self._starts}.sock"
        binary = str(resources.files("hivemind.hivemind_cli") / "p2pd")
        arguments = self._arguments(control)
        self._last_lines = []
        identity = folder / "identity"
        identity.touch(mode=0o600)
        identity.write_bytes(self._identity.to_file_bytes())
        self._daemon = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            END_WITH_PARENT,
            str(os.getpid()),
            binary,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"GOLOG_LOG_LEVEL": "error"},
        )
        ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.get_running_loop().create_task(self._read(self._daemon, ready))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if not await ready:
                    self._raise_start_failure()
        except TimeoutError:
            raise TransportError(f"p2pd did not start within {START_TIMEOUT_S:.0f} s") from None

        class OwnP2P(P2P):  # type: ignore[misc,unused-ignore]
            """Keeps its sockets in our folder."""

            _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

        identity.unlink()  # the daemon has read it
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.p2p = await OwnP2P.replicate(Multiaddr(f"/unix{control}"))
                await self.p2p.add_binary_stream_handler(PROTOCOL_NAME, self._on_stream)
                await self.p2p.add_binary_stream_handler(RELAY_PROTOCOL, self._on_relay_stream)
                _, listening = await self.p2p._client.identify()
        except Exception as e:
            raise TransportError(f"p2pd cannot be spoken to: {e!r}") from None
        self._listens([str(a) for a in listening])
        self._port = _tcp_port(self._listening) or self._port

    def _check_port(self) -> None:
        """Daemons listen with SO_REUSEPORT: a second one on a taken port would start, and get some
        of the first one's visitors. Raises `AddressError`."""
        if not self._port:
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, self._port))
            except OSError as e:
                if e.errno == errno.EADDRINUSE:
                    raise self._taken() from None
                # What else is wrong the daemon says.

    def _taken(self) -> AddressError:
        return AddressError(
            f"port {self._port} on {self._host} is taken; choose another --port, "
            "or 0 for any that is free"
        )

    def _listens(self, listening: list[str]) -> None:
        """The daemon listens at these addresses, now: interfaces come and go."""
        now = asyncio.get_running_loop().time()
        if listening == self._listening and now - self._looked_at < LOOK_AT_HOSTS_EVERY_S:
            return
        self._listening, self._looked_at = listening, now
        told = [*self._announce, *to_tell(listening, own_hosts())]
        self._addresses = [full_address(a, self.peer_id) for a in dict.fromkeys(told)]

    def _arguments(self, control: Path) -> list[str]:
        assert self._runtime is not None
        kind = "ip6" if ":" in self._host else "ip4"
        flags: dict[str, object] = {
            "listen": f"/unix{control}",
            "id": self._runtime.path / "identity",
            "hostAddrs": f"/{kind}/{self._host}/tcp/{self._port}",
            "dhtServer": 1,
            "autonat": 0,
            "b": 0,
            "connManager": 0,
            "idleTimeout": "30s",
            "natPortMap": int(self._nat_port_map),
            "relay": 0,  # ours is `transport.relay`
            "tls": 1,
            "persistentConnMaxMsgSize": 4 << 20,
        }
        return [f"-{key}={value}" for key, value in flags.items()]

    def _raise_start_failure(self) -> None:
        text = " ".join(self._last_lines[-3:])
        where = f"port {self._port} on {self._host}"
        if "address already in use" in text:
            raise self._taken()
        if "permission denied" in text:
            raise AddressError(f"{where} is not allowed to this user; choose a --port above 1023")
        if "cannot assign requested address" in text:
            raise AddressError(f"{self._host} is no address of this machine; choose another --host")
        if "failed to parse multiaddr" in text:
            raise AddressError(f"{self._host} is no IP address to listen on; choose another --host")
        if "failed to listen" in text:
            raise AddressError(f"{where} cannot be used; choose another --host or --port")
        raise TransportError(f"p2pd did not start: {text[-300:]}")

    async def _read(self, daemon: asyncio.subprocess.Process, ready: asyncio.Future[bool]) -> None:
        """Reads what the daemon prints, until it ends."""
        assert daemon.stdout is not None
        while line := await daemon.stdout.readline():
            text = line.decode(errors="replace").rstrip()
            self._last_lines = [*self._last_lines[-9:], text]
            if text.startswith("Peer ID:") and not ready.done():
                ready.set_result(True)
        if not ready.done():
            ready.set_result(False)

    async def _stop_daemon(self) -> None:
        if self.p2p is not None:
            with contextlib.suppress(Exception):
                await self.p2p.shutdown()
            self.p2p = None
        daemon, self._daemon = self._daemon, None
        if daemon is not None and daemon.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                daemon.terminate()
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await daemon.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    daemon.kill()
                await daemon.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    async def _watch(self) -> None:
        """Notices a daemon that died or hangs, and replaces it."""
        backoff_s = FIRST_BACKOFF_S
        started_s = asyncio.get_running_loop().time()
        while True:
            reason = await self._until_broken()
            # One that dies again and again is started less and less often.
            lived_s = asyncio.get_running_loop().time() - started_s
            backoff_s = FIRST_BACKOFF_S if lived_s > LONGEST_BACKOFF_S else 2 * backoff_s
            backoff_s = min(backoff_s, LONGEST_BACKOFF_S)
            log.warning("p2pd %s; starting another", reason)
            while True:
                try:
                    await self._stop_daemon()
                    await asyncio.sleep(backoff_s)
                    await self._start_daemon()
                    break
                except Exception as e:
                    backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                    log.warning("%s; trying again in %.1f s", e or repr(e), backoff_s)
            started_s = asyncio.get_running_loop().time()
            for callback in self._restart_callbacks:
                try:
                    callback()
                except Exception:
                    log.exception("a listener failed")

    async def _until_broken(self) -> str:
        assert self._daemon is not None
        ended = asyncio.get_running_loop().create_task(self._daemon.wait())
        try:
            missed = 0
            while missed < MAX_MISSED_PINGS:
                await asyncio.wait((ended,), timeout=0 if missed else PING_EVERY_S)
                if ended.done():
                    return f"ended with code {ended.result()}"
                missed = 0 if await self._ping() else missed + 1
            with contextlib.suppress(ProcessLookupError):
                self._daemon.kill()
            return "does not answer"
        finally:
            ended.cancel()

    async def _ping(self) -> bool:
        """Does the daemon answer?"""
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                _, listening = await self.p2p._client.identify()
            self._listens([str(a) for a in listening])
            return True
        except TimeoutError:
            return False
        except Exception:  # refused: it has just died, or soon
            await asyncio.sleep(PING_EVERY_S)
            return False


def _peer_bytes(peer_id: str) -> bytes:
    """Raises `Unreachable` where that is no peer id."""
    from hivemind.p2p import PeerID

    try:
        data = bytes(PeerID.from_base58(peer_id).to_bytes())
    except Exception:
        data = b""
    # A multihash: of a small key the key itself (0), of a large one its SHA-256 (0x12).
    if len(data) < 3 or data[0] not in (0, 0x12) or data[1] != len(data) - 2:
        raise Unreachable(f"{peer_id[:64]!r} is no peer id")
    return data


def _byte_stream(
    remote: str, reader: Any, writer: Any, protocol: str = PROTOCOL_NAME
) -> ByteStream:
    """Takes a stream from asyncio's reader and writer, with what was read already. Raises
    `Unreachable` where its other end is gone: a protocol set later would never hear of it."""
    transport = writer.transport
    if reader._eof or reader.exception() is not None or transport.is_closing():
        transport.abort()
        raise Unreachable("the stream ended at once")
    transport.pause_reading()
    leftover = bytes(reader._buffer)
    return ByteStream(remote, transport, leftover, keep=(reader, writer), protocol=protocol)


def _check_multiaddr(address: str) -> None:
    from multiaddr import Multiaddr

    try:
        Multiaddr(address)
    except Exception:
        raise AddressError(
            f"{address[:200]} is no address; one looks like /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo..."
        ) from None


def _without_peer(address: str, peer_id: str) -> str:
    """What stands before `/p2p/<peer id>`; empty where the address is malformed or another's."""
    if not isinstance(address, str):
        return ""
    bare, _, named = address.rpartition("/p2p/")
    if not bare or named != peer_id:
        bare = address if f"/p2p/{peer_id}" not in address else ""
    try:
        _check_multiaddr(bare)
    except AddressError:
        return ""
    return bare


def _tcp_port(addresses: Sequence[str]) -> int:
    for address in addresses:
        parts = address.split("/")
        if "tcp" in parts:
            return int(parts[parts.index("tcp") + 1])
    return 0


OTHER_PROTOCOL = "it does not speak this version of swarmnet's protocol"


def _reason(text: str) -> str:
    """One line that says which of the things that can be wrong it is."""
    for sign, reason in (
        ("peer id mismatch", "another peer answers there: the peer id in the address is wrong"),
        ("connection refused", "connection refused: nothing listens there"),
        ("protocols not supported", OTHER_PROTOCOL),
        ("protocol not supported", OTHER_PROTOCOL),
        ("no route to host", "no route to that host"),
        ("network is unreachable", "no route to that host"),
        ("no transport for protocol", "that kind of address cannot be dialled"),
        ("failed to negotiate", "what answers there is no libp2p peer"),
        ("no addresses", "no address of it is known"),
        ("failed to find any peer", "no address of it is known"),
        ("no good addresses", "no address of it can be dialled from here"),
        ("deadline exceeded", "no answer in time"),
        ("i/o timeout", "no answer in time"),
        ("dial to self", "that is this peer's own address"),
    ):
        if sign in text:
            return reason
    return " ".join(text.split())[-200:]
