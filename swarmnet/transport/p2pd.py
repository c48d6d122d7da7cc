"""The carrier on hivemind's libp2p daemon, p2pd.

The daemon is a process of ours (started through a tiny Python that asks the kernel to end it with
us, however we end) and hivemind's `P2P` is attached to it, so that the DHT shares it. Raw streams
to `/swarmnet/1` come through a unix socket each; their asyncio transports are handed to `Channel`.

A watchdog notices when the daemon dies or stops answering and starts another with the same
identity and port; channels close, and are opened again when they are needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarmnet.errors import AddressError, TransportError, Unreachable
from swarmnet.identity import Identity
from swarmnet.transport.base import PROTOCOL_NAME, ByteStream

log = logging.getLogger("swarmnet.transport")

START_TIMEOUT_S = 20.0
START_ATTEMPTS = 3
PING_EVERY_S = 2.0
PING_TIMEOUT_S = 4.0
CONNECT_TIMEOUT_S = 10.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0
END_TIMEOUT_S = 3.0
MAX_KNOWN_PEERS = 65_536
MAX_ADDRESSES = 16
MAX_SOCKET_PATH = 80
RUNTIME_PREFIX = "swarmnet-"

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
        base = base or Path(tempfile.gettempdir())
        if len(str(base)) > MAX_SOCKET_PATH - 40:
            base = Path("/tmp")
        clean_up(base)
        self.path = Path(tempfile.mkdtemp(prefix=f"{RUNTIME_PREFIX}{os.getpid()}-", dir=base))
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def clean_up(base: Path) -> list[Path]:
    """Removes the runtime folders of processes that are gone; returns them."""
    removed = []
    for path in sorted(base.glob(f"{RUNTIME_PREFIX}*-*")):
        try:
            lock = os.open(path / "lock", os.O_RDWR)
        except OSError:
            continue  # none of ours, or being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except OSError:
            pass  # its process lives
        finally:
            os.close(lock)
    return removed


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
        self._addresses: list[str] = []
        self._known: dict[str, list[str]] = {}
        self._restart_callbacks: list[Callable[[], None]] = []
        self._starts = 0
        self._last_lines: list[str] = []

    # ---- the port ---------------------------------------------------------------------------

    async def start(self, accept: Callable[[ByteStream], None]) -> None:
        self._accept = accept
        self._runtime = RuntimeDir(self._runtime_base)
        (self._runtime.path / "identity").touch(mode=0o600)
        (self._runtime.path / "identity").write_bytes(self._identity.to_file_bytes())
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
        if len(self._known) < MAX_KNOWN_PEERS or peer_id in self._known:
            self._known[peer_id] = list(addresses)[:MAX_ADDRESSES]

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
        known = self._known.get(peer_id, [])
        self.learn(peer_id, [address, *(a for a in known if a != address)])
        await self._connect(peer_id)
        return peer_id

    async def open(self, peer_id: str) -> ByteStream:
        from hivemind.p2p import PeerID

        await self._connect(peer_id)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, reader, writer = await self.p2p.call_binary_stream_handler(
                    PeerID.from_base58(peer_id), PROTOCOL_NAME
                )
        except TimeoutError:
            raise Unreachable(f"no stream within {CONNECT_TIMEOUT_S:.0f} s") from None
        except Exception as e:
            raise Unreachable(_reason(e)) from None
        return _byte_stream(peer_id, reader, writer)

    async def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
            self._watchdog = None
        await self._stop_daemon()
        if self._runtime is not None:
            self._runtime.close()

    # ---- streams ----------------------------------------------------------------------------

    async def _connect(self, peer_id: str) -> None:
        """Makes sure that the daemon has a connection to a peer. Raises `Unreachable`."""
        from hivemind.p2p import PeerID
        from multiaddr import Multiaddr

        addresses = [a.rpartition("/p2p/")[0] or a for a in self._known.get(peer_id, [])]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.p2p._client.connect(
                    PeerID.from_base58(peer_id), [Multiaddr(a) for a in addresses]
                )
        except TimeoutError:
            raise Unreachable(f"no answer within {CONNECT_TIMEOUT_S:.0f} s") from None
        except Exception as e:
            raise Unreachable(_reason(e)) from None

    async def _on_stream(self, info: Any, reader: Any, writer: Any) -> None:
        self._accept(_byte_stream(info.peer_id.to_base58(), reader, writer))

    # ---- the daemon -------------------------------------------------------------------------

    async def _start_daemon(self) -> None:
        """Starts p2pd and attaches to it. Raises `AddressError` or `TransportError`."""
        from importlib import resources

        from hivemind.p2p import P2P
        from multiaddr import Multiaddr

        assert self._runtime is not None
        self._starts += 1
        folder = self._runtime.path
        control = folder / f"p2pd-{self._starts}.sock"
        binary = str(resources.files("hivemind.hivemind_cli") / "p2pd")
        arguments = self._arguments(control)
        self._last_lines = []
        self._daemon = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), binary, *arguments,
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

        class OwnP2P(P2P):  # type: ignore[misc]
            """Keeps its sockets in our folder."""

            _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

        self.p2p = await OwnP2P.replicate(Multiaddr(f"/unix{control}"))
        await self.p2p.add_binary_stream_handler(PROTOCOL_NAME, self._on_stream)
        visible = [str(a) for a in await self.p2p.get_visible_maddrs()]
        self._addresses = [*(f"{a}" for a in self._announced()), *visible]
        self._port = _tcp_port(visible) or self._port

    def _announced(self) -> list[str]:
        end = f"/p2p/{self.peer_id}"
        return [a if a.endswith(end) else a + end for a in self._announce]

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
            "relay": 1,
            "tls": 1,
            "persistentConnMaxMsgSize": 4 << 20,
        }
        return [f"-{key}={value}" for key, value in flags.items()]

    def _raise_start_failure(self) -> None:
        text = " ".join(self._last_lines[-3:])
        if "address already in use" in text or "failed to listen" in text:
            raise AddressError(
                f"port {self._port} on {self._host} is taken or cannot be used; "
                "choose another --port, or 0 for any that is free"
            )
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
        while True:
            reason = await self._until_broken()
            log.warning("p2pd %s; starting another", reason)
            while True:
                try:
                    await self._stop_daemon()
                    await asyncio.sleep(backoff_s)
                    await self._start_daemon()
                    break
                except (TransportError, AddressError, OSError) as e:
                    backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                    log.warning("%s; trying again in %.1f s", e, backoff_s)
            backoff_s = FIRST_BACKOFF_S
            for callback in self._restart_callbacks:
                callback()

    async def _until_broken(self) -> str:
        assert self._daemon is not None
        ended = asyncio.get_running_loop().create_task(self._daemon.wait())
        try:
            while True:
                await asyncio.wait((ended,), timeout=PING_EVERY_S)
                if ended.done():
                    return f"ended with code {ended.result()}"
                try:
                    async with asyncio.timeout(PING_TIMEOUT_S):
                        await self.p2p._client.identify()
                except TimeoutError:
                    self._daemon.kill()
                    return "does not answer"
                except Exception as e:
                    return f"fails ({_reason(e)})"
        finally:
            ended.cancel()


def _byte_stream(remote: str, reader: Any, writer: Any) -> ByteStream:
    """Takes a stream from asyncio's reader and writer, with what was read already."""
    transport = writer.transport
    transport.pause_reading()
    return ByteStream(remote, transport, bytes(reader._buffer), keep=(reader, writer))


def _check_multiaddr(address: str) -> None:
    from multiaddr import Multiaddr

    try:
        Multiaddr(address)
    except Exception:
        raise AddressError(
            f"{address[:200]} is no address; one looks like /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo..."
        ) from None


def _tcp_port(addresses: Sequence[str]) -> int:
    for address in addresses:
        parts = address.split("/")
        if "tcp" in parts:
            return int(parts[parts.index("tcp") + 1])
    return 0


def _reason(error: Exception) -> str:
    """One line that says which of the things that can be wrong it is."""
    text = " ".join(str(error).split()) or type(error).__name__
    for sign, reason in (
        ("peer id mismatch", "another peer answers there: the peer id in the address is wrong"),
        ("refused", "connection refused: nothing listens there"),
        ("protocols not supported", "it does not speak swarmnet's protocol"),
        ("protocol not supported", "it does not speak swarmnet's protocol"),
        ("no route to host", "no route to that host"),
        ("no addresses", "no address of it is known"),
        ("no good addresses", "no address of it can be dialled from here"),
        ("deadline exceeded", "no answer in time"),
        ("i/o timeout", "no answer in time"),
        ("dial to self", "that is this peer's own address"),
    ):
        if sign in text:
            return reason
    return text[-200:]
