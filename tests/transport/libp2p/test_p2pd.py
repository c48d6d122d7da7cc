"""The carrier on hivemind's daemon: real daemons, and what happens when they or we die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from swarmnet.errors import (
    AddressError,
    ChannelClosed,
    DeadlineExceeded,
    PortTaken,
    TransportError,
    Unreachable,
    WrongProtocol,
)
from swarmnet.system import RUN_WITH_PARENT
from swarmnet.transport.base import PROTOCOL_NAME, Request
from swarmnet.transport.channel import ChannelTransport
from swarmnet.transport.libp2p import p2pd
from swarmnet.transport.libp2p.interfaces import ANY_INTERFACE, listening_hosts
from swarmnet.transport.libp2p.knocking import Heard, knock
from swarmnet.transport.libp2p.p2pd import P2pdCarrier, byte_stream
from swarmnet.wire import Array, Message
from tests.transport.streams import PATIENCE_S, Collector, Echo, identity

ROOT = Path(__file__).parents[3]
MEGABYTE = 1 << 20


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder for runtime folders; short, for the names of unix sockets are."""
    path = Path(tempfile.mkdtemp(prefix="sn-test-", dir="/tmp"))
    yield path
    left = list(path.iterdir())
    shutil.rmtree(path)
    assert left == []


async def echo(request: Request) -> Message:
    return request.message


@contextlib.asynccontextmanager
async def peer(number: int, base: Path, **options: Any) -> AsyncIterator[ChannelTransport]:
    transport = ChannelTransport(P2pdCarrier(identity(number), runtime_base=base, **options))
    transport.handle("echo", echo)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


@contextlib.asynccontextmanager
async def bare(number: int, base: Path, **options: Any) -> AsyncIterator[P2pdCarrier]:
    carrier = P2pdCarrier(identity(number), runtime_base=base, **options)
    await carrier.start(lambda stream: Echo(stream) and None)
    try:
        yield carrier
    finally:
        await carrier.close()


def carrier_of(transport: ChannelTransport) -> P2pdCarrier:
    assert isinstance(transport.carrier, P2pdCarrier)
    return transport.carrier


def daemon_pid(transport: ChannelTransport) -> int:
    pid = carrier_of(transport).daemon_pid
    assert pid
    return pid


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while is_alive(pid):  # noqa: ASYNC110 - a process of another parent sends no event
            await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def play(scenario: Any, loop: Any = uvloop.new_event_loop) -> None:
    async def main() -> None:
        async with asyncio.timeout(3 * PATIENCE_S):
            await scenario

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


async def call(a: ChannelTransport, b: ChannelTransport, body: Any = None, *arrays: Array) -> Any:
    reply = await a.call(b.peer_id, "echo", Message(body, arrays), timeout_s=PATIENCE_S)
    return reply.body


# ---- calls ------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_calls_go_both_ways_with_one_stream(base: Path, loop: Any) -> None:
    async def scenario() -> None:
        async with peer(1, base) as a, peer(2, base) as b:
            assert await a.dial(b.addresses()[0]) == b.peer_id == identity(2).peer_id
            data = os.urandom(3 * MEGABYTE + 1)
            message = Message([1], (Array("uint8", (len(data),), data),))
            for one, other in ((a, b), (b, a)):
                reply = await one.call(other.peer_id, "echo", message, timeout_s=PATIENCE_S)
                assert bytes(reply.arrays[0].data) == data
            assert len(a.channels.all()) == len(b.channels.all()) == 1

    play(scenario(), loop)


@pytest.mark.processes
def test_the_daemon_relays_for_nobody(base: Path) -> None:
    """It would for everybody, outside all limits, and keep 22 MB for that."""

    async def scenario() -> None:
        async with bare(1, base) as a, bare(2, base) as b:
            await a.connect(b.addresses()[0])
            (await a.open(b.peer_id)).transport.abort()
            with pytest.raises(WrongProtocol):
                await a.open(b.peer_id, "/libp2p/circuit/relay/0.2.0/hop")

    play(scenario())


@pytest.mark.processes
def test_hivemind_shares_the_daemon(base: Path) -> None:
    """`carrier.p2p` is what the DHT runs on."""

    async def scenario() -> None:
        async with bare(1, base) as a, bare(2, base) as b:
            await a.connect(b.addresses()[0])
            async with asyncio.timeout(PATIENCE_S):
                found = await a.p2p.list_peers()
            assert [p.peer_id.to_base58() for p in found] == [b.peer_id]

    play(scenario())


# ---- addresses --------------------------------------------------------------------------------


@pytest.mark.processes
def test_each_reason_for_no_answer_has_its_line(base: Path) -> None:
    async def scenario() -> None:
        async with bare(1, base) as a, bare(2, base) as b:
            other = identity(9).peer_id
            bare_b = b.addresses()[0].split("/p2p/")[0]
            with pytest.raises(Unreachable, match="the peer id in the address is wrong"):
                await a.connect(f"{bare_b}/p2p/{other}")
            with socket.socket() as bound:
                bound.bind(("127.0.0.1", 0))
                address = f"/ip4/127.0.0.1/tcp/{bound.getsockname()[1]}/p2p/{other}"
                for _ in range(2):  # the second time the daemon does not even try
                    with pytest.raises(Unreachable, match=r"^connection refused: nothing listens"):
                        await a.connect(address)
            with pytest.raises(Unreachable, match="no address of it is known"):
                await a.open(identity(10).peer_id)
            with pytest.raises(Unreachable, match="is no peer id"):
                await a.open("nonsense")
            await b.p2p.remove_binary_stream_handler(PROTOCOL_NAME)
            await a.connect(b.addresses()[0])
            with pytest.raises(Unreachable, match="does not speak"):
                await a.open(b.peer_id)

    play(scenario())


@pytest.mark.processes
def test_the_daemon_has_one_connection_to_a_peer_and_keeps_its_address(base: Path) -> None:
    """Which is why calls move to a faster address over direct channels, and libp2p does not: see
    docs/decisions/0022-calls-move-libp2p-stays.md."""

    async def scenario() -> None:
        async with bare(1, base) as a, bare(2, base, host="0.0.0.0") as b:
            port = b.addresses()[0].split("/tcp/")[1]
            for number in (2, 3):
                await a.connect(f"/ip4/127.0.0.{number}/tcp/{port}")
                assert (await a.observed(b.peer_id)).startswith("/ip4/127.0.0.2/")
            await a.drop(b.peer_id)
            await a.connect(f"/ip4/127.0.0.3/tcp/{port}")
            assert await a.observed(b.peer_id)

    play(scenario())


@pytest.mark.processes
def test_who_is_away_is_looked_for_without_the_daemon(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would refuse to dial it for minutes, after many failures; and is found again."""

    async def scenario() -> None:
        async with bare(1, base) as a:
            with socket.socket() as bound:
                bound.bind(("127.0.0.1", 0))
                port = bound.getsockname()[1]
            address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity(2).peer_id}"
            knocks = []

            async def counted(addresses: list[str]) -> Heard:
                knocks.append(addresses)
                return await knock(addresses)

            monkeypatch.setattr(p2pd, "knock", counted)
            for _ in range(20):
                with pytest.raises(Unreachable, match=r"^connection refused: nothing listens"):
                    await a.connect(address)
            assert len(knocks) == 19  # all but the first
            async with bare(2, base, port=port) as b, asyncio.timeout(PATIENCE_S):
                with pytest.raises(Unreachable, match="no address of it is known"):
                    await b.open(a.peer_id)
                while True:
                    try:
                        await a.connect(address)
                        break
                    except Unreachable:  # it was dialled seconds ago
                        await asyncio.sleep(0.2)
                # Who has dialled us is connected, whatever is known of it.
                stream = await b.open(a.peer_id)
                stream.transport.abort()

    play(scenario())


@pytest.mark.processes
@pytest.mark.parametrize(
    "address",
    [
        "",
        "hello",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/300.0.0.1/tcp/1/p2p/{peer}",
        "/ip4/127.0.0.1/tcp/70000/p2p/{peer}",
        "/ip4/127.0.0.1/tcp/4001/p2p/not-a-peer-id",
        "/ip4/127.0.0.1/tcp/4001/p2p/{own}",
    ],
)
def test_an_address_that_cannot_be_dialled_is_refused(address: str) -> None:
    carrier = P2pdCarrier(identity(1))  # not even started
    text = address.format(peer=identity(2).peer_id, own=carrier.peer_id)
    with pytest.raises(AddressError, match=r"address|/p2p/"):
        asyncio.run(carrier.connect(text))


@pytest.mark.processes
def test_a_malformed_address_does_not_spoil_the_others(base: Path) -> None:
    async def scenario() -> None:
        async with peer(1, base) as a, peer(2, base) as b:
            wrong = ["garbage", "/ip4/127.0.0.1/tcp/1/p2p/" + identity(3).peer_id, ""]
            a.learn(b.peer_id, [*wrong, *b.addresses()])
            assert await call(a, b, 5) == 5

    play(scenario())


@pytest.mark.processes
def test_where_it_cannot_listen_is_said_with_the_remedy(base: Path) -> None:
    async def scenario() -> None:
        async with bare(1, base) as a:
            port = int(a.addresses()[0].split("/")[4])
            with pytest.raises(AddressError, match=f"port {port} .* is taken; choose another"):
                async with bare(2, base, port=port):
                    pass
        with pytest.raises(AddressError, match="no address of this machine"):
            async with bare(2, base, host="192.0.2.7"):
                pass
        with pytest.raises(AddressError, match="nonsense is no IP address"):
            async with bare(2, base, host="nonsense"):
                pass
        with pytest.raises(AddressError, match="is no address"):
            async with bare(2, base, announce=["nonsense"]):
                pass
        with pytest.raises(TransportError, match="cannot make a folder for sockets"):
            async with bare(2, base / "missing"):
                pass

    play(scenario())


@pytest.mark.processes
def test_it_listens_at_one_port_of_both_kinds_of_addresses(base: Path) -> None:
    hosts = ("127.0.0.1", "::1")[: len(listening_hosts(ANY_INTERFACE))]

    async def scenario() -> None:
        async with bare(1, base, host=ANY_INTERFACE) as a, bare(2, base) as b:
            port = int(a.addresses()[0].split("/")[4])
            for host in hosts:
                at = f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}/p2p/{a.peer_id}"
                b.learn(a.peer_id, ())
                assert await b.connect(at) == a.peer_id
                await b.drop(a.peer_id)
            with pytest.raises(PortTaken, match=f"port {port} is taken; choose another"):
                async with bare(3, base, host=ANY_INTERFACE, port=port):
                    pass

    play(scenario())


@pytest.mark.processes
def test_announced_addresses_are_told_first(base: Path) -> None:
    async def scenario() -> None:
        async with bare(1, base, announce=["/ip4/192.0.2.7/tcp/4001"]) as a:
            assert a.addresses()[0] == f"/ip4/192.0.2.7/tcp/4001/p2p/{a.peer_id}"
            assert all(x.endswith(f"/p2p/{a.peer_id}") for x in a.addresses())

    play(scenario())


# ---- death ------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_daemon_that_dies_or_hangs_is_replaced_at_the_same_address(
    base: Path, how: signal.Signals
) -> None:
    async def scenario() -> None:
        async with peer(1, base) as a, peer(2, base) as b:
            b.learn(a.peer_id, a.addresses())
            await a.dial(b.addresses()[0])
            before, pid = a.addresses(), daemon_pid(a)
            restarted = asyncio.Event()
            carrier_of(a).on_restart(restarted.set)
            entered = asyncio.Event()

            async def slow(request: Request) -> Message:
                entered.set()
                await asyncio.sleep(PATIENCE_S)
                return Message()

            b.handle("slow", slow)
            open_call = asyncio.create_task(
                a.call(b.peer_id, "slow", Message(), timeout_s=PATIENCE_S)
            )
            await entered.wait()
            os.kill(pid, how)
            with pytest.raises(ChannelClosed):
                await open_call
            await restarted.wait()
            assert a.addresses() == before
            assert daemon_pid(a) != pid
            assert not is_alive(pid)
            assert await eventually(a, b) == "back"
            assert await eventually(b, a) == "back"

    play(scenario())


async def eventually(a: ChannelTransport, b: ChannelTransport) -> Any:
    """A call that is made again until it gets through, as callers do."""
    while True:
        try:
            reply = await a.call(b.peer_id, "echo", Message("back"), timeout_s=2)
            return reply.body
        except (Unreachable, ChannelClosed, DeadlineExceeded):
            await asyncio.sleep(0.1)


@pytest.mark.processes
def test_a_daemon_that_dies_again_and_again_is_started_less_often(base: Path) -> None:
    async def scenario() -> None:
        async with bare(1, base) as a:
            restarted: asyncio.Queue[float] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            pauses = []
            a.on_restart(lambda: restarted.put_nowait(loop.time()))
            real_sleep = asyncio.sleep

            async def sleep(delay: float, *rest: Any) -> None:
                if delay >= p2pd.FIRST_BACKOFF_S:
                    pauses.append(delay)
                await real_sleep(0)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(p2pd.asyncio, "sleep", sleep)
                for _ in range(3):
                    assert a.daemon_pid
                    os.kill(a.daemon_pid, signal.SIGKILL)
                    await restarted.get()
            assert pauses == sorted(pauses)
            assert pauses[-1] >= 4 * pauses[0]

    play(scenario())


@contextlib.contextmanager
def process(number: int, base: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A peer in another process, and what it printed."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.libp2p.p2pd_process", str(number), str(base)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    try:
        yield child, child.stdout.readline().split()
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@pytest.mark.processes
def test_sigkill_leaves_no_daemon_and_the_next_start_clears_its_folder(base: Path) -> None:
    async def scenario() -> None:
        with process(2, base) as (child, (address, pid, folder)):
            async with peer(1, base) as a:
                other = await a.dial(address)
                lost = asyncio.Event()
                a.on_disconnected(lambda _: lost.set())
                assert (await a.call(other, "echo", Message(1), timeout_s=PATIENCE_S)).body == 1
                assert is_alive(int(pid))
                child.send_signal(signal.SIGKILL)
                await until_gone(int(pid))
                await lost.wait()
                with pytest.raises(TransportError):
                    await a.call(other, "echo", Message(1), timeout_s=PATIENCE_S)
        assert Path(folder).name in names(base)
        assert "identity" not in names(Path(folder))  # no key lies about
        async with bare(3, base):
            assert Path(folder).name not in names(base)

    play(scenario())


START_AND_WAIT = """
import os, subprocess, sys, time
wrapper, *command = sys.argv[1:]
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
wrapped = [sys.executable, "-I", "-S", "-c", wrapper, str(os.getpid()), *command]
child = subprocess.Popen(wrapped, **quiet)
print(child.pid, flush=True)
time.sleep(1000)
"""


def test_the_kernel_ends_what_the_wrapper_started_when_its_parent_is_killed() -> None:
    """With a program that has no reason of its own to end. The daemon is no proof: one that runs
    ends over its broken pipes, one that is stopped over the SIGHUP of an orphaned group."""
    sleep = shutil.which("sleep")
    assert sleep
    command = [sys.executable, "-c", START_AND_WAIT, RUN_WITH_PARENT, sleep, "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        try:
            wait_for(lambda: program(pid) == Path(sleep).resolve())
            parent.kill()
            parent.wait()
            wait_for(lambda: not is_alive(pid))
        finally:
            parent.kill()
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def program(pid: int) -> Path | None:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe"))
    except FileNotFoundError:
        return None


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.processes
def test_ctrl_c_in_the_terminal_does_not_reach_the_daemon(base: Path) -> None:
    async def scenario() -> None:
        async with peer(1, base) as a:
            assert os.getpgid(daemon_pid(a)) == daemon_pid(a) != os.getpgid(0)

    play(scenario())


@pytest.mark.processes
def test_close_leaves_nothing_and_may_be_repeated(base: Path) -> None:
    async def scenario() -> None:
        async with peer(1, base) as a:
            pid = daemon_pid(a)
            assert len(names(base)) == 1
        assert not is_alive(pid)
        assert names(base) == []
        held = os.open(base, os.O_RDONLY)  # gets the number that the lock's file had
        await a.close()
        os.close(held)
        assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []

    play(scenario())


@pytest.mark.processes
def test_a_stream_that_ended_before_it_was_taken_over_is_refused(base: Path) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        class Reader(asyncio.StreamReader):
            def feed_eof(self) -> None:
                super().feed_eof()
                ended.set()

        reader, far = Reader(), socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader), sock=far[0]
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        far[1].sendall(b"hello")
        far[1].close()
        await ended.wait()
        with pytest.raises(Unreachable, match="ended at once"):
            byte_stream("x", reader, writer)

    play(scenario())


@pytest.mark.processes
def test_what_was_read_with_the_opening_is_not_lost(base: Path) -> None:
    """An opener writes at once, so its first bytes may arrive with the news of the stream."""

    async def scenario() -> None:
        async with bare(1, base) as a, bare(2, base) as b:  # which echo
            await a.connect(b.addresses()[0])
            for _ in range(10):
                stream = Collector(await a.open(b.peer_id))
                stream.transport.write(b"first")
                assert await stream.receive(5) == b"first"
                stream.transport.abort()

    play(scenario())
