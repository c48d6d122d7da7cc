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
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarmnet.errors import AddressError, TransportError, Unreachable, WrongProtocol
from swarmnet.identity import Identity
from swarmnet.protocol.dialing.addresses import full_address, to_tell
from swarmnet.system import processor_use
from swarmnet.transport.base import PROTOCOL_NAME, RELAY_PROTOCOL, ByteStream
from swarmnet.transport.libp2p.daemon_health import until_broken
from swarmnet.transport.libp2p.daemon_process import DaemonProcess
from swarmnet.transport.libp2p.dial_reasons import OTHER_PROTOCOL, DialReasons
from swarmnet.transport.libp2p.hollow import hollow
from swarmnet.transport.libp2p.interfaces import own_hosts
from swarmnet.transport.libp2p.knocking import Heard, knock
from swarmnet.transport.libp2p.known_peers import KnownPeers, check_multiaddr, without_peer
from swarmnet.transport.libp2p.listening import ListenAddress, announced
from swarmnet.transport.libp2p.runtime_dir import RuntimeDir

log = logging.getLogger("swarmnet.transport")

ATTACH_TIMEOUT_S = 20.0
START_ATTEMPTS = 3
DROP_TIMEOUT_S = 1.0
LOOK_AT_HOSTS_EVERY_S = 5.0
"""Between two looks at which of the own addresses is of use: a route may come after its address."""
CONNECT_TIMEOUT_S = 10.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0
FROM_ANY_PORT = {"LIBP2P_TCP_REUSEPORT": "false"}
"""For the daemon: connections go out from any free port. Where two daemons dial each other from
their listening ports within the latency of the link, TCP makes one connection of it in which both
sides are the dialling one, both handshakes fail (go-libp2p issue 2925), and either daemon refuses
the other's address for five seconds. A pair of newcomers then took each other for dead."""

CONFIG_FILE = "config.json"
CONFIG = {"Relay": {"Enabled": False}}
"""For the daemon, as a file. Where it reads none it relays for everybody, whatever `-relay` says,
and keeps a table of the networks of the internet for that: 22 MB, beside which it lets as much
again fill before it frees what is not used any more."""


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
        shares_port: bool = False,
    ) -> None:
        """`host`, `port`: where to listen (`interfaces.ANY_INTERFACE`: at all addresses of this
        machine; 0: any free port). `announce`: further addresses to tell others.
        `runtime_base`: where the folder with the sockets is made. `shares_port`: it goes out from
        the port on which it listens, by which `swarmnet doctor` tells kinds of NAT apart; two that
        dial each other at once do not meet then (`FROM_ANY_PORT`). Raises `WrongAddress` for one
        that is not to be announced."""
        self.peer_id = identity.peer_id
        self.p2p: Any = None
        self._identity = identity
        self._listen = ListenAddress(host, port)
        self._announce = announced(announce, self.peer_id, host)
        self._environment = {} if shares_port else FROM_ANY_PORT
        self._runtime_base = runtime_base
        self._runtime: RuntimeDir | None = None
        self._daemon: DaemonProcess | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._accept: Callable[[ByteStream], None] = lambda stream: stream.transport.abort()
        self._listening: list[str] = []
        self._addresses: list[str] = []
        self._looked_at = float("-inf")
        self._peers = KnownPeers()
        self._reasons = DialReasons()
        self._restart_callbacks: list[Callable[[], None]] = []
        self._starts = 0

    # ---- the port ---------------------------------------------------------------------------

    async def start(self, accept: Callable[[ByteStream], None]) -> None:
        self._accept = accept
        self._runtime = RuntimeDir(self._runtime_base)
        try:
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
        self._peers.learn(peer_id, addresses)

    def forget(self, peer_id: str) -> None:
        self._peers.forget(peer_id)

    @property
    def daemon_pid(self) -> int | None:
        """Process id of the daemon that runs now."""
        return None if self._daemon is None else self._daemon.pid

    def on_restart(self, callback: Callable[[], None]) -> None:
        """`callback()` after the daemon was replaced."""
        self._restart_callbacks.append(callback)

    async def connect(self, address: str) -> str:
        check_multiaddr(address)
        peer_id = address.rpartition("/p2p/")[2]
        if "/p2p/" not in address or not peer_id:
            raise AddressError(f"{address} does not end in /p2p/<peer id>; copy the whole line")
        if peer_id == self.peer_id:
            raise AddressError(f"{address} is this peer's own address")
        bare = without_peer(address, peer_id)
        others = [a for a in self._peers.addresses(peer_id) if a != bare]
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
        reader, writer, response = await self._ask(peer_id, request)
        seen_at = _multiaddr(response.streamInfo.addr)
        return byte_stream(peer_id, reader, writer, protocol, seen_at)

    async def drop(self, peer_id: str) -> None:
        from hivemind.p2p import PeerID

        if self.p2p is None:
            return
        try:
            async with asyncio.timeout(DROP_TIMEOUT_S):
                await self._client().disconnect(PeerID.from_base58(peer_id))
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

        known = self._peers.addresses(peer_id)
        if self._peers.is_away(peer_id) and not await self.observed(peer_id):
            heard = await knock(known)
            if heard is not Heard.OPEN:
                raise Unreachable(heard.value)
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=_peer_bytes(peer_id),
                addrs=[Multiaddr(a).to_bytes() for a in known],
            ),
        )
        try:
            _, writer, _ = await self._ask(peer_id, request)
        except Unreachable:
            self._peers.missed(peer_id)
            raise
        self._peers.reached(peer_id)
        writer.close()

    async def _ask(
        self, peer_id: str, request: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
        """Asks the daemon for something about a peer, on a control connection of its own, which is
        closed when it fails; its response is the last of the three. Raises `Unreachable`."""
        from google.protobuf.message import DecodeError
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
        from hivemind.proto import p2pd_pb2

        if self.p2p is None:
            raise Unreachable("this peer's network daemon is not running")
        connector = self._client().control.daemon_connector
        writer: asyncio.StreamWriter | None = None
        response = p2pd_pb2.Response()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await connector.open_connection()
                await write_pbmsg(writer, request)
                await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                known = self._peers.addresses(peer_id)
                reason = self._reasons.explain(response.error.msg, known)
                raise (WrongProtocol if OTHER_PROTOCOL in reason else Unreachable)(reason)
        except BaseException as e:
            if writer is not None:
                writer.transport.abort()
            if isinstance(e, TimeoutError):
                raise Unreachable(f"no answer within {CONNECT_TIMEOUT_S:.0f} s") from None
            if isinstance(e, (OSError, EOFError, ValueError, DecodeError)):
                raise Unreachable("this peer's network daemon does not answer") from None
            raise
        return reader, writer, response

    def _client(self) -> Any:
        """The connection to the daemon's control socket."""
        return self.p2p._client  # noqa: SLF001  hivemind has no public name for it

    async def _on_relay_stream(self, info: Any, reader: Any, writer: Any) -> None:
        await self._on_stream(info, reader, writer, RELAY_PROTOCOL)

    async def _on_stream(
        self, info: Any, reader: Any, writer: Any, protocol: str = PROTOCOL_NAME
    ) -> None:
        try:
            remote = info.peer_id.to_base58()
            stream = byte_stream(remote, reader, writer, protocol, str(info.addr))
        except Unreachable:
            return
        self._accept(stream)

    # ---- the daemon -------------------------------------------------------------------------

    async def _start_daemon(self) -> None:
        """Starts p2pd and attaches to it. Raises `AddressError` or `TransportError`."""
        from importlib import resources

        from multiaddr import Multiaddr

        try:
            hollow("hivemind")  # its own file imports averagers, experts and scipy
            from hivemind.p2p import P2P
        except Exception as e:  # it imports many libraries, each in a version that may not suit it
            raise TransportError(f"hivemind cannot be imported: {e!r}") from None

        assert self._runtime is not None
        self._listen.claim()
        self._starts += 1
        folder = self._runtime.path
        control = folder / f"p2pd-{self._starts}.sock"
        binary = str(resources.files("hivemind.hivemind_cli") / "p2pd")
        identity = folder / "identity"
        identity.touch(mode=0o600)
        identity.write_bytes(self._identity.to_file_bytes())
        (folder / CONFIG_FILE).write_text(json.dumps(CONFIG))
        self._daemon = await DaemonProcess.start(
            binary, self._arguments(control), self._environment
        )
        if not await self._daemon.until_up():
            raise self._listen.failure(self._daemon.last_words)

        class OwnP2P(P2P):  # type: ignore[misc,unused-ignore]
            """Keeps its sockets in our folder."""

            _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

        identity.unlink()  # the daemon has read it
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                self.p2p = await OwnP2P.replicate(Multiaddr(f"/unix{control}"))
                await self.p2p.add_binary_stream_handler(PROTOCOL_NAME, self._on_stream)
                await self.p2p.add_binary_stream_handler(RELAY_PROTOCOL, self._on_relay_stream)
                _, listening = await self._client().identify()
        except Exception as e:
            raise TransportError(f"p2pd cannot be spoken to: {e!r}") from None
        self._listens([str(a) for a in listening])
        self._listen.keep_port(self._listening)

    def _listens(self, listening: list[str]) -> None:
        """The daemon listens at these addresses, now: interfaces come and go."""
        now = asyncio.get_running_loop().time()
        if listening == self._listening and now - self._looked_at < LOOK_AT_HOSTS_EVERY_S:
            return
        self._listening = listening
        self._looked_at = now
        told = [*self._announce, *to_tell(listening, own_hosts())]
        self._addresses = [full_address(a, self.peer_id) for a in dict.fromkeys(told)]

    def _arguments(self, control: Path) -> list[str]:
        assert self._runtime is not None
        flags: dict[str, object] = {
            "f": self._runtime.path / CONFIG_FILE,
            "listen": f"/unix{control}",
            "id": self._runtime.path / "identity",
            "hostAddrs": ",".join(self._listen.multiaddrs),
            "dhtServer": 1,
            "autonat": 0,
            "b": 0,
            "connManager": 0,
            "idleTimeout": "30s",
            "natPortMap": 0,
            "relay": 0,  # else `CONFIG` counts for nothing; ours is `transport.relay`
            "tls": 1,
            "persistentConnMaxMsgSize": 4 << 20,
        }
        return [f"-{key}={value}" for key, value in flags.items()]

    async def _stop_daemon(self) -> None:
        if self.p2p is not None:
            with contextlib.suppress(Exception):
                await self.p2p.shutdown()
            self.p2p = None
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            await daemon.stop()

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
        """What was wrong with the daemon, which ends where it has not."""
        assert self._daemon is not None
        daemon = self._daemon
        ended = asyncio.get_running_loop().create_task(daemon.wait())
        try:
            reason = await until_broken(ended, self._ping, lambda: processor_use(daemon.pid))
        finally:
            ended.cancel()
        daemon.kill()
        return reason

    async def _ping(self) -> None:
        """Until the daemon answers. Raises whatever hivemind does where it is gone."""
        _, listening = await self._client().identify()
        self._listens([str(a) for a in listening])


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


def _multiaddr(data: bytes) -> str:
    """Its text; empty where it is none."""
    from multiaddr import Multiaddr

    try:
        return str(Multiaddr(data))
    except Exception:
        return ""


def byte_stream(
    remote: str, reader: Any, writer: Any, protocol: str = PROTOCOL_NAME, seen_at: str = ""
) -> ByteStream:
    """Takes a stream from asyncio's reader and writer, with what was read already. Raises
    `Unreachable` where its other end is gone: a protocol set later would never hear of it."""
    transport = writer.transport
    is_ended = reader._eof  # noqa: SLF001  `at_eof` is False while bytes are left
    if is_ended or reader.exception() is not None or transport.is_closing():
        transport.abort()
        raise Unreachable("the stream ended at once")
    transport.pause_reading()
    leftover = bytes(reader._buffer)  # noqa: SLF001  asyncio has no public way to what was read
    return ByteStream(remote, transport, leftover, (reader, writer), protocol, seen_at)
