"""Each command that asks other peers says which cause it was, of whom, and what to do: every pair
of command and cause, over the memory transport in virtual time, against peers that fail so."""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from peer.commands import doctor, local, stop
from peer.commands.dashboard import show_live
from peer.commands.generate import generate_text
from peer.commands.invites import issue_invite
from peer.commands.status import show_status
from peer.options import (
    DashboardOptions,
    DoctorOptions,
    InviteOptions,
    PlanOptions,
    StatusOptions,
    StopOptions,
    TextOptions,
)
from peer.planning import live
from swarmnet.causes import TABLE, Failures, cause_of, told
from swarmnet.errors import (
    REMOTE_ERRORS,
    Busy,
    DeadlineExceeded,
    FinalError,
    InviteError,
    NoRoute,
    NotNow,
    NotReady,
    Redirect,
    Refused,
    RemoteError,
    Stale,
    SwarmnetError,
    TransportError,
    Unreachable,
    Unsupported,
    UserError,
    WrongProtocol,
    WrongRun,
    WrongVersion,
)
from swarmnet.identity import Identity
from swarmnet.protocol.membership.records import ACTIVE, DIGEST_BYTES, OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime import observer as observers
from swarmnet.runtime.exporting.base_weights import fetch_base
from swarmnet.runtime.exporting.models import export_live
from swarmnet.runtime.joining.find import find_run
from swarmnet.runtime.joining.known_peers import KnownPeers
from swarmnet.runtime.joining.starting import start_run
from swarmnet.runtime.net import KeySigner, Net
from swarmnet.runtime.observing import join_run
from swarmnet.runtime.options import default_spec_path
from swarmnet.runtime.run_files import RunFiles
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import FileSpec, RunSpec
from swarmnet.swarm.initial.files import SpecService
from swarmnet.swarm.lifecycle.arrival import meet
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.training.models.registry import stage_shard_sizes
from swarmnet.transport.base import Request
from swarmnet.transport.libp2p.knocking import Answer, Heard
from swarmnet.transport.memory import MemoryHub, MemoryTransport
from swarmnet.wire import Message
from tests.swarm.initial.test_weights import folder_of
from tests.swarm.lora_runs import lora_run

RUN = start_run(default_spec_path()).spec
A_FILE = {"tokenizer.json": FileSpec(sha256="0" * 64, size=10)}
RUN_OF_FILES = RUN.model_copy(update={"files": A_FILE})
KEYS = [Identity(bytes([n]) * 32) for n in (1, 2)]
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{KEYS[0].peer_id}"
LONG_S = 200.0
"""A command that goes on waiting has said by then what for."""

Fail = Callable[[Request[Any]], Awaitable[Message[Any]]]


def answers(error: RemoteError) -> Fail:
    async def fail(_: Request[Any]) -> Message[Any]:
        raise error

    return fail


async def says_nothing(_: Request[Any]) -> Message[Any]:
    await asyncio.sleep(1e6)
    raise AssertionError


async def says_nonsense(_: Request[Any]) -> Message[Any]:
    return Message("nonsense")


async def goes(_: Request[Any]) -> Message[Any]:
    """Ends, as by kill -9."""
    raise AssertionError("in its place is what knows the peer")


FAILS: dict[str, Fail] = {
    "closed": answers(Refused("you have shown none", closed=True)),
    "version": answers(WrongVersion("it has version 7")),
    "another_run": answers(WrongRun("this peer trains another")),
    "unknown": answers(Unsupported("no such method")),
    "refused": answers(Refused("not that")),
    "wrong": says_nonsense,
    "failed": answers(RemoteError("ValueError")),
    "not_yet": answers(NotReady("still joining")),
    "past": answers(Stale("round 3 is over")),
    "no_next": answers(NoRoute("stage 1 has nobody")),
    "elsewhere": answers(Redirect("ask another")),
    "busy": answers(Busy("serving others", backlog_s=1.0)),
    "too_slow": says_nothing,
    "gone": goes,
}
"""What a peer does by the code of the cause."""
OF_THE_LINK: dict[str, SwarmnetError] = {
    "no_peer": WrongProtocol("no channels of ours"),
    "unreachable": Unreachable("connection refused"),
    "too_slow": DeadlineExceeded("no answer within 10 s"),
    "gone": TransportError("the connection ended"),
}
"""Causes that are known before a peer is asked anything."""
ROWS = {row.code: row for row in TABLE}


@dataclass
class Stage:
    """What the gate of a replica looks at."""

    index: int
    num_shards: int
    largest_shard_bytes: int
    synced: bool = True


class FailingSwarm:
    """Two peers that know each other, one a stage, which fail in one way at some methods."""

    def __init__(self, spec: RunSpec = RUN) -> None:
        self.spec = spec
        self.hub = MemoryHub()
        self._gossips = [self._peer(stage, key) for stage, key in enumerate(KEYS)]
        self._tasks: list[asyncio.Future[None]] = []

    def _peer(self, stage: int, key: Identity) -> Gossip:
        transport = self.hub.transport(key.peer_id)
        transport.set_run(self.spec.run_id)
        record = Record(
            key.peer_id,
            self.spec.run_id,
            int(time.time() * 1000),
            1,
            state=ACTIVE,
            stage=stage,
            round=3,
            digests=bytes(DIGEST_BYTES * len(stage_shard_sizes(RUN, stage))),
            addresses=(f"/ip4/127.0.0.1/tcp/{4001 + stage}/p2p/{key.peer_id}",),
        )
        rng = random.Random(stage)
        gossip = Gossip(transport, View(key.peer_id), KeySigner(key), record, rng)
        SpecService(transport, self.spec.run_id, self.spec.canonical())
        shards = stage_shard_sizes(RUN, stage)
        gossip.serves(Stage(stage, len(shards), 4 * max(shards)))
        return gossip

    async def begin(self, methods: Sequence[str], fail: Fail, *, does: Fail | None = None) -> None:
        """`does`: what the second peer does instead."""
        await self._gossips[0].exchange(KEYS[1].peer_id)
        self._tasks = [asyncio.ensure_future(g.run()) for g in self._gossips]
        await asyncio.sleep(5.0)
        for gossip in self._gossips:
            fails = does if does is not None and gossip is self._gossips[1] else fail
            for method in methods:
                gossip.transport.handle(method, self._goes(gossip) if fails is goes else fails)

    def _goes(self, gossip: Gossip) -> Fail:
        async def end(request: Request[Any]) -> Message[Any]:
            self.hub.kill(gossip.own.peer_id)
            return await says_nothing(request)

        return end

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# ---- the commands -------------------------------------------------------------------------------

Command = Callable[[MemoryHub, Path], Coroutine[Any, Any, str]]


async def joins(hub: MemoryHub, folder: Path) -> str:
    await find_run(hub.transport("joiner"), [ADDRESS], KnownPeers(folder), patience_s=0.0)
    return ""


async def meets(hub: MemoryHub, folder: Path) -> str:
    key = Identity.generate()
    transport = hub.transport(key.peer_id)
    transport.set_run(RUN.run_id)
    own = Record(key.peer_id, RUN.run_id, 1, 0)
    gossip = Gossip(transport, View(key.peer_id), KeySigner(key), own, random.Random(0))
    for method in ("gossip", "records"):  # nor does it hear of the run otherwise
        transport.handle(method, says_nothing)
    await meet(gossip, [KEYS[0].peer_id])
    return ""


async def fetches_files(hub: MemoryHub, folder: Path) -> str:
    files = RunFiles(folder, A_FILE)
    await files.fetch(hub.transport("joiner"), [KEYS[0].peer_id])
    return ""


async def looks(hub: MemoryHub, folder: Path) -> str:
    await show_status(StatusOptions(ADDRESS), Console(file=io.StringIO()))
    return ""


async def shows_page(hub: MemoryHub, folder: Path) -> str:
    await show_live(DashboardOptions(join=(ADDRESS,), port=0))
    return ""


async def invites(hub: MemoryHub, folder: Path) -> str:
    Identity.load_or_create(folder / "owner.key")
    return await issue_invite(InviteOptions(folder / "owner.key", join=(ADDRESS,)))


async def exports(hub: MemoryHub, folder: Path) -> str:
    return await export_live([ADDRESS], folder / "model")


async def generates(hub: MemoryHub, folder: Path) -> str:
    await generate_text(TextOptions("Once", (ADDRESS,)), {})
    return ""


async def is_examined(hub: MemoryHub, folder: Path) -> str:
    transport = cast(Any, hub.transport("doctor"))
    transport.own_addresses = lambda: [f"/ip4/198.51.100.1/tcp/1/p2p/{transport.peer_id}"]
    options = DoctorOptions(join=(ADDRESS,))
    findings, _ = await doctor.ask_run(transport, ["/ip4/198.51.100.1/tcp/1/p2p/x"], 2, options)
    return "; ".join(f"{f.found}: {f.mend}" for f in findings)


async def stops(hub: MemoryHub, folder: Path) -> str:
    key = folder / "owner.key"
    Identity.load_or_create(key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop, "check_owner", lambda *_: None)  # that is known without asking
        await stop.stop_run(StopOptions(key, (ADDRESS,)))
    return ""


async def samples(hub: MemoryHub, folder: Path) -> str:
    observer = await join_run([ADDRESS], "auto")
    try:
        return "; ".join(await local.written_sample(observer))
    finally:
        await observer.close()


async def plans(hub: MemoryHub, folder: Path) -> str:
    await live.show_live(PlanOptions(join=(ADDRESS,)), Console(file=io.StringIO()))
    return ""


class Disk(InlineWorker):
    """In place of a thread."""

    def __init__(self, _: str) -> None:
        super().__init__()

    async def close(self) -> None:
        """There is none."""


FIRST, FILES = ("spec",), ("run_file",)
COMMANDS: dict[str, tuple[Command, tuple[str, ...]]] = {
    "a joining peer asks for the run": (joins, FIRST),
    "a joining peer asks who is there": (meets, ("gossip",)),
    "a joining peer asks for files": (fetches_files, ("run_file",)),
    "status asks for the run": (looks, FIRST),
    "status asks who is there": (looks, ("gossip",)),
    "dashboard asks for the run": (shows_page, FIRST),
    "dashboard asks who is there": (shows_page, ("gossip",)),
    "invite asks for the run": (invites, FIRST),
    "invite asks who is there": (invites, ("gossip",)),
    "export asks for the run": (exports, FIRST),
    "export asks for the model": (exports, ("saved", "fetch_parameters")),
    "export asks who is there": (exports, ("gossip",)),
    "generate asks for the run": (generates, FIRST),
    "generate asks for files": (generates, FILES),
    "generate asks who is there": (generates, ("gossip",)),
    "generate asks for a text": (generates, ("generate",)),
    "stop asks for the run": (stops, FIRST),
    "stop asks who is there": (stops, ("gossip",)),
    "stop tells the peers": (stops, ("stop",)),
    "plan asks for the run": (plans, FIRST),
    "plan asks who is there": (plans, ("gossip",)),
    "doctor asks for the run": (is_examined, FIRST),
    "doctor asks who is there": (is_examined, ("gossip",)),
    "local asks for a sample": (samples, ("infer",)),
    "doctor asks for help": (is_examined, ("dial_back", "look_back", "bandwidth", "relay_reserve")),
}
"""What people start, and the methods that fail."""
IN_OTHER_WORDS = {
    ("export asks for the model", "past"): "updates while the model was on its way",
    ("a joining peer asks who is there", "gone"): "not reached",
}
"""Rounds that pass under a download are its own cause; who joins asks again, and reaches nobody."""
SAYS_NOTHING = ("stop tells the peers", "wrong")
"""The answer to an order has no form, so none is wrong."""


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "swarmnet")
    return caplog


@pytest.fixture
def hub_of_net(monkeypatch: pytest.MonkeyPatch) -> list[MemoryHub]:
    """Observers open their transport in this hub."""
    hubs: list[MemoryHub] = []

    async def open_net(_: object, key: Identity, **__: object) -> Net:
        return Net(cast(Any, hubs[0].transport(key.peer_id)), None, None)

    async def beside(work: Callable[..., Any], *values: Any, **named: Any) -> Any:
        return work(*values, **named)

    monkeypatch.setattr(observers, "open_net", open_net)

    async def knock(_: str, __: int) -> Answer:
        return Answer(heard=Heard.CLOSED)

    monkeypatch.setattr(doctor, "knock_at", knock)
    monkeypatch.setattr(asyncio, "to_thread", beside)  # there are no threads in virtual time
    monkeypatch.setattr("swarmnet.training.device.WorkerThread", Disk)
    return hubs


def said_by(
    command: Command,
    hubs: list[MemoryHub],
    folder: Path,
    methods: Sequence[str],
    fail: Fail,
    spec: RunSpec = RUN,
) -> tuple[str, SwarmnetError | None]:
    """What a command returns or raises, where it does not wait."""

    async def main() -> tuple[str, SwarmnetError | None]:
        swarm = FailingSwarm(spec)
        hubs.append(swarm.hub)
        await swarm.begin(methods, fail)
        try:
            async with asyncio.timeout(LONG_S):
                return await command(swarm.hub, folder), None
        except TimeoutError:
            return "", None
        except SwarmnetError as e:
            return str(e), e
        finally:
            await swarm.end()

    return run_virtual(main())


@pytest.mark.parametrize("code", FAILS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_the_cause_the_peer_and_what_to_do(
    name: str,
    code: str,
    tmp_path: Path,
    warned: pytest.LogCaptureFixture,
    hub_of_net: list[MemoryHub],
) -> None:
    if (name, code) == SAYS_NOTHING:
        return
    command, methods = COMMANDS[name]
    spec = RUN if methods != FILES or command is fetches_files else RUN_OF_FILES
    said, error = said_by(command, hub_of_net, tmp_path, methods, FAILS[code], spec)
    text = " ".join([said, *(record.getMessage() for record in warned.records)])
    if other := IN_OTHER_WORDS.get((name, code)):
        assert other in text
        return
    row = ROWS[code]
    assert row.says in text
    assert row.mend in text
    assert command is not is_examined or f"; {row.mend}: " not in text, "it says it twice"
    assert any(key.peer_id[-8:] in text for key in KEYS)
    assert isinstance(error, (UserError, NotNow)) or not said or error is None
    if code == "closed" and command not in (is_examined, samples):
        assert isinstance(error, FinalError), "who starts it again hears the same"


@pytest.mark.parametrize("code", OF_THE_LINK)
@pytest.mark.parametrize("name", [n for n, (_, methods) in COMMANDS.items() if methods == FIRST])
def test_what_is_known_before_a_peer_is_asked(
    name: str,
    code: str,
    tmp_path: Path,
    warned: pytest.LogCaptureFixture,
    hub_of_net: list[MemoryHub],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def dial(self: MemoryTransport, address: str, timeout_s: float = 10.0) -> str:
        raise OF_THE_LINK[code]

    monkeypatch.setattr(MemoryTransport, "dial", dial)
    said, _ = said_by(COMMANDS[name][0], hub_of_net, tmp_path, (), says_nothing)
    text = " ".join([said, *(record.getMessage() for record in warned.records)])
    assert ROWS[code].says in text
    assert ADDRESS in text
    if COMMANDS[name][0] is is_examined and code != "no_peer":  # which a knock tells more of
        assert "doctor" not in text, "who reads it has started that"
        assert "nothing listens at port 4001: ask who gave you the address" in text
    else:
        assert ROWS[code].mend in text


@pytest.mark.parametrize("code", FAILS)
@pytest.mark.usefixtures("hub_of_net")
def test_an_export_of_adapters_says_who_does_not_give_the_base(code: str, tmp_path: Path) -> None:
    """Nobody who only looks is asked: this peer and another one."""
    spec, hashes = lora_run(folder_of(tmp_path / "model"), tmp_path)

    async def main() -> str:
        swarm = FailingSwarm(spec)
        lookers = []
        for n in (5, 6):
            key = Identity(bytes([n]) * 32)
            transport = swarm.hub.transport(key.peer_id)
            transport.set_run(spec.run_id)
            own = Record(key.peer_id, spec.run_id, 1, 1, state=OBSERVING)
            gossip = Gossip(transport, View(key.peer_id), KeySigner(key), own, random.Random(n))
            lookers.append(gossip)
        await swarm.begin(["initial_shard"], FAILS[code])
        for gossip in lookers:
            await gossip.exchange(KEYS[0].peer_id)
        files = {"weights.sha256": hashes}
        asker = lookers[-1]
        with pytest.raises(SwarmnetError) as raised:
            await fetch_base(spec, asker.transport, asker, InlineWorker(), files, None)
        await swarm.end()
        assert isinstance(raised.value, (UserError, NotNow))
        return str(raised.value)

    line = run_virtual(main())
    assert line.startswith("no peer gives the base of stage ")
    assert "--weights" in line
    assert ROWS[code].says in line
    assert line.endswith(f"; {ROWS[code].mend}")
    for key in KEYS:
        assert key.peer_id[-8:] in line


async def takes(_: Request[Any]) -> Message[Any]:
    """The order."""
    return Message(None)


async def order_stop(folder: Path) -> None:
    """By the owner of the run."""
    key = folder / "owner.key"
    Identity.load_or_create(key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop, "check_owner", lambda *_: None)
        await stop.stop_run(StopOptions(key, (ADDRESS,), wait=False))


def test_an_order_is_for_peers_that_serve_or_rest_and_not_for_who_looks(
    tmp_path: Path, hub_of_net: list[MemoryHub], capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        swarm = FailingSwarm()
        hub_of_net.append(swarm.hub)
        more = []
        for n, paused in ((3, ""), (4, "on battery")):
            key = Identity(bytes([n]) * 32)
            transport = swarm.hub.transport(key.peer_id)
            transport.set_run(RUN.run_id)
            transport.handle("stop", takes)
            clock = int(time.time() * 1000)
            record = Record(key.peer_id, RUN.run_id, clock, 1, state=OBSERVING, paused=paused)
            gossip = Gossip(transport, View(key.peer_id), KeySigner(key), record, random.Random(n))
            await gossip.exchange(KEYS[0].peer_id)
            more.append(asyncio.ensure_future(gossip.run()))
        await swarm.begin(["stop"], takes)
        await order_stop(tmp_path)
        for task in more:
            task.cancel()
        await swarm.end()

    run_virtual(main())
    assert "3 of 3 peers have taken the order" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("code", [code for code in FAILS if code != "wrong"])
def test_an_order_that_some_take_names_those_who_do_not(
    code: str, tmp_path: Path, hub_of_net: list[MemoryHub], capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        swarm = FailingSwarm()
        hub_of_net.append(swarm.hub)
        await swarm.begin(["stop"], FAILS[code], does=takes)
        await order_stop(tmp_path)
        await swarm.end()

    run_virtual(main())
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 peers have taken the order" in said
    assert ROWS[code].says in said
    assert ROWS[code].mend in said
    assert KEYS[0].peer_id[-8:] in said
    assert KEYS[1].peer_id[-8:] not in said


# ---- the table ----------------------------------------------------------------------------------


def test_every_error_of_another_peer_has_a_row() -> None:
    of_others = {*REMOTE_ERRORS.values(), *TransportError.__subclasses__()}
    of_others |= set(Unreachable.__subclasses__())
    for kind in of_others:
        assert cause_of(kind("x")) is not None, kind
    assert not any(";" in row.mend for row in TABLE), "it is the last part of a line"
    assert len({row.code for row in TABLE}) == len(TABLE)
    assert len({row.says for row in TABLE}) == len(TABLE)
    assert {*FAILS, *OF_THE_LINK} == set(ROWS), "a cause without a test"


def test_a_line_names_the_peers_and_what_can_be_mended_first() -> None:
    failures = Failures()
    for n in range(5):
        failures.add(Busy("serving others"), f"peer-number-{n:08d}")
    failures.add(Refused("none shown", closed=True), "peer-that-refuses")
    line = failures.told()
    assert line.startswith("peer ...-refuses: the run is closed")
    assert "peers ...00000000, ...00000001, ...00000002 and 2 more: busy (serving others)" in line
    assert line.endswith(TABLE[0].mend)
    assert isinstance(failures.as_error("no"), InviteError)
    failures.answered("peer-that-refuses")
    assert failures.told().endswith(ROWS["busy"].mend)
    failures.add(Refused("no"), "another-that-refuses")
    assert isinstance(failures.as_error("no"), NotNow), "others are only busy"
    assert isinstance(Failures([Refused("no")]).as_error("no"), UserError)
    assert told(UserError("one line")) == "one line"
    assert Failures().told() == ""
    of_seats = Failures()
    for seat in ("peer-number-00000007", "peer-number-00000007/1"):
        of_seats.add(Busy("serving others"), seat)
    assert of_seats.told().startswith("peers ...00000007, ...00000007/1: busy")
