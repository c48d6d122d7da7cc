"""The owner of a run ends it for everybody: virtual time, memory transport."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.commands import stop as stopping
from peer.commands.stop import check_owner, stop_run
from peer.options import StopOptions
from swarmnet.errors import FinalError, Forged, ProtocolViolation, Refused
from swarmnet.identity import Identity
from swarmnet.methods.contact import STOP, StopRequest
from swarmnet.observe.events import Event
from swarmnet.observe.notices import STILL_S, Notices
from swarmnet.protocol.membership.records import LEFT
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.joining.stopped import keep_stop, known_stop, refuse_stopped, stop_file
from swarmnet.runtime.local.watching import watch_run
from swarmnet.runtime.observer import Observer
from swarmnet.runtime.observing import monitor_of
from swarmnet.simulation.device import InlineWorker
from swarmnet.spec import RunSpec
from swarmnet.stop_order import MAX_AHEAD_MS, StopCheck, issue
from swarmnet.swarm.calls import call
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.recovery.checkpointing import Disk
from swarmnet.training.checkpoint import CheckpointStore, read_metas
from swarmnet.wire import Message
from tests.swarm.generation.test_generating import Asker
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec

OWNER, STRANGER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
ROUNDS = 40
LAST = 6
NOW_MS = 1_700_000_000_000
SYNC: dict[str, dict[str, Any]] = {
    "zero": {},
    "delayed": {"mode": "delayed"},
    "local": {"mode": "local", "local_steps": 2},
    "gossip": {"mode": "gossip", "local_steps": 2},
}


def closed(folder: Path, **options: Any) -> RunSpec:
    spec = tiny_spec(folder, num_stages=2, rounds=ROUNDS, **options)
    security = spec.security.model_copy(update={"admission": "invite", "owner": OWNER.peer_id})
    return spec.model_copy(update={"security": security})


def start(swarm: Swarm, folder: Path, name: str) -> Peer:
    """As a process does: it leaves when it is to."""
    store = CheckpointStore(folder / name, swarm.spec)
    peer = swarm.start(name, disk=Disk(store, InlineWorker(), 100))

    async def heed() -> None:
        await peer.stopping.until_over()
        peer.stop()

    heeding = asyncio.ensure_future(heed())
    swarm.members[name].life.add_done_callback(lambda _: heeding.cancel())
    return peer


def saved_rounds(folder: Path) -> dict[int, set[int]]:
    """By stage, what lies on the disks."""
    found: dict[int, set[int]] = {}
    for path in folder.glob("*/checkpoints/*"):
        for meta in read_metas(path):
            found.setdefault(meta.stage, set()).add(meta.round)
    return found


async def until_left(swarm: Swarm) -> None:
    await swarm.until(lambda: all(m.life.done() for m in swarm.members.values()))
    left = {n: m.peer.gossip.own.state for n, m in swarm.members.items()}
    assert set(left.values()) == {LEFT}, left


@pytest.mark.parametrize("mode", SYNC)
def test_all_save_the_last_round_and_leave(tmp_path: Path, mode: str) -> None:
    spec = closed(tmp_path, sync=SYNC[mode])

    async def scenario(swarm: Swarm) -> None:
        swarm.owner = OWNER.peer_id
        for n in range(4):
            start(swarm, tmp_path, f"peer-{n}")
        await swarm.until_round(2)
        order = issue(OWNER, spec.run_id, LAST, NOW_MS)
        async with Asker(swarm) as owner:
            await call(owner.gossip.transport, "peer-2", STOP, Message(order), timeout_s=10.0)
        await until_left(swarm)
        saved = saved_rounds(tmp_path)
        assert LAST in saved[0] & saved[1], saved
        assert max(swarm.counted) == LAST - 1, "nothing is begun after it"

    in_virtual_time(scenario, spec)


def test_a_run_that_is_stopped_comes_to_rest_in_its_last_round(tmp_path: Path) -> None:
    """Where nobody leaves, nothing is begun any more."""
    spec = closed(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        swarm.owner = OWNER.peer_id
        swarm.start_grid(2, 2)
        await swarm.until_round(2)
        swarm.members["peer-1"].peer.stopping.take(issue(OWNER, spec.run_id, LAST, NOW_MS))
        await swarm.until_round(LAST)
        await asyncio.sleep(100.0)
        assert swarm.rounds() == [LAST] * 4

    in_virtual_time(scenario, spec)


def test_a_newcomer_and_one_that_slept_hear_of_it(tmp_path: Path) -> None:
    spec = closed(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        swarm.owner = OWNER.peer_id
        for n in range(4):
            start(swarm, tmp_path, f"peer-{n}")
        await swarm.until_round(1)
        swarm.hub.freeze("peer-3")
        order = issue(OWNER, spec.run_id, 12, NOW_MS)
        swarm.members["peer-1"].peer.stopping.take(order)
        others = [swarm.members[f"peer-{n}"].peer for n in range(3)]
        await swarm.until(lambda: all(peer.settings.end == 12 for peer in others))
        await asyncio.sleep(1.0)  # nobody has anything left to tell
        late = start(swarm, tmp_path, "late")
        await swarm.until(lambda: late.settings.end == 12)
        swarm.hub.thaw("peer-3")
        await until_left(swarm)
        assert swarm.members["peer-3"].peer.settings.end == 12

    in_virtual_time(scenario, spec)


def test_an_order_is_the_owners_for_this_run_and_newer() -> None:
    def order(run_id: str = "run", unix_ms: int = NOW_MS, by: Identity = OWNER) -> StopRequest:
        return issue(by, run_id, 7, unix_ms)

    check = StopCheck("run", OWNER.peer_id, clock=lambda: NOW_MS / 1000)
    known = order()
    assert check.check(known).round == 7
    assert check.check(known, known).round == 7, "the same again"
    assert check.check(order(unix_ms=NOW_MS + 1), known).unix_ms == NOW_MS + 1
    for replayed in (order(unix_ms=NOW_MS - 1), issue(OWNER, "run", 8, NOW_MS)):
        with pytest.raises(Refused, match="newer order"):
            check.check(replayed, known)
    with pytest.raises(Refused, match="another run"):
        check.check(order("another"))
    with pytest.raises(Refused, match="to come"):
        check.check(order(unix_ms=NOW_MS + MAX_AHEAD_MS + 1))
    with pytest.raises(Forged):
        check.check(order(by=STRANGER))
    with pytest.raises(Forged):
        check.check(StopRequest(known.order[:-1] + b"\x07", known.signature))
    with pytest.raises(Refused, match="this run is open"):
        StopCheck("run", "").check(known)
    signed = b"\xc1"
    with pytest.raises(ProtocolViolation):
        check.check(StopRequest(signed, OWNER.sign(b"swarmnet/1/stop\0" + signed)))


def test_a_stopped_run_does_not_begin_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer that is started again tells one that goes on, for it slept through the order."""
    spec = closed(tmp_path)
    order = issue(OWNER, spec.run_id, LAST, NOW_MS)
    keep_stop(tmp_path, spec.run_id)(order)
    known = known_stop(spec, tmp_path)
    assert known is not None
    assert known[1].round == LAST

    async def scenario(swarm: Swarm) -> None:
        swarm.owner = OWNER.peer_id
        slept = start(swarm, tmp_path, "slept")
        start(swarm, tmp_path, "slept-too")
        await swarm.until_round(1)
        transport = swarm.hub.transport("again")
        transport.set_run(spec.run_id)
        with pytest.raises(FinalError, match=f"ended it with round {LAST}: write its model"):
            await refuse_stopped(spec, tmp_path, transport, ["slept", "gone"])
        assert slept.settings.end == LAST
        await until_left(swarm)
        await refuse_stopped(tiny_spec(tmp_path, num_stages=2), tmp_path, transport, [])

    in_virtual_time(scenario, spec)
    stop_file(tmp_path, spec.run_id).write_bytes(b"something else")
    with caplog.at_level(logging.WARNING, "swarmnet"):
        assert known_stop(spec, tmp_path) is None
    assert "is no order of the run's owner" in caplog.text


def test_an_order_that_cannot_be_kept_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_stop(tmp_path / "none", "run")(issue(OWNER, "run", LAST, NOW_MS))
    assert "a restart would go on" in caplog.text


def test_the_command_tells_all_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = closed(tmp_path)
    (tmp_path / "owner.key").write_bytes(b"")
    said: list[str] = []
    monkeypatch.setattr(Identity, "load_or_create", lambda path: OWNER)
    monkeypatch.setattr(stopping, "say", said.append)

    async def scenario(swarm: Swarm) -> None:
        swarm.owner = OWNER.peer_id
        for n in range(4):
            start(swarm, tmp_path, f"peer-{n}")
        await swarm.until_round(2)

        async with Asker(swarm) as asker:

            async def wait_news(timeout_s: float) -> None:
                await asker.gossip.changed.wait(timeout_s)

            async def close() -> None:
                """Its owner does."""

            async def join(*_: Any) -> Any:
                return SimpleNamespace(
                    spec=spec,
                    gossip=asker.gossip,
                    view=asker.gossip.view,
                    transport=asker.gossip.transport,
                    wait_news=wait_news,
                    close=close,
                )

            options = StopOptions(tmp_path / "owner.key", ("/x",))
            await stop_run(options, join)
        await until_left(swarm)
        ends = {m.peer.settings.end for m in swarm.members.values()}
        assert len(ends) == 1
        assert f"ends with round {ends.pop()}: 4 of 4 peers have taken the order" in said[0]
        assert said[-1] == "all peers have left: the run is over"

    in_virtual_time(scenario, spec)


class Watcher:
    """An `Onlooker` that keeps what it is told, and the notices that are due."""

    def __init__(self, spec: RunSpec) -> None:
        self.monitor = monitor_of(spec)
        self.notices = Notices("run")
        self.told: list[str] = []

    def look(self, view: View, now: float, unix_s: float) -> list[Event]:
        events = self.monitor.look(view, now, unix_s)
        self.told += [n.text for n in self.notices.look(self.monitor.view_model(), now)]
        return events


@pytest.mark.parametrize("comes", ["first", "later"])
def test_who_watches_hears_of_it(tmp_path: Path, comes: str) -> None:
    """Whether it was there when the order came or not. It takes no run that its owner has ended for
    one that stands still."""
    spec = closed(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        swarm.owner = OWNER.peer_id
        for n in range(4):
            start(swarm, tmp_path, f"peer-{n}")
        watcher, said = Watcher(spec), list[str]()
        own, beside = Watcher(spec), swarm.members["peer-0"].peer.view
        ways: Any = SimpleNamespace(remembered=dict, keep=asyncio.Event().wait)
        loop = asyncio.get_running_loop()

        async def watch() -> None:
            asker = Asker(swarm)
            await asker.gossip.reconcile("peer-0")
            async with Observer(spec, asker.gossip, asker.gossip.transport, ways) as observer:
                await watch_run(observer, watcher, None, said.append)

        await swarm.until_round(2)
        own.look(beside, loop.time(), 0.0)
        order = issue(OWNER, spec.run_id, LAST, NOW_MS)
        if comes == "later":
            swarm.members["peer-1"].peer.stopping.take(order)
        watching = asyncio.ensure_future(watch())
        if comes == "first":
            await swarm.until_round(3)
            swarm.members["peer-1"].peer.stopping.take(order)
        await until_left(swarm)
        await asyncio.wait_for(watching, 60.0)
        assert said == [f"the run's owner has ended it after {LAST} rounds"]
        model = watcher.monitor.view_model()
        assert (model.done, model.round, model.ends_with, model.end) == (True, LAST, LAST, LAST)
        for seconds in (0.0, 2 * STILL_S):
            own.look(beside, loop.time() + seconds, 0.0)
        for told in (watcher.told, own.told):
            (line,) = told
            assert line.startswith(f"run: ended by its owner after {LAST} rounds, ")

    in_virtual_time(scenario, spec)


def test_only_the_owner_of_a_closed_run_ends_it(tmp_path: Path) -> None:
    spec = closed(tmp_path)
    check_owner(spec, OWNER, "owner.key")
    with pytest.raises(FinalError, match=r"other\.key is not the key of the run's owner"):
        check_owner(spec, STRANGER, "other.key")
    with pytest.raises(FinalError, match=r"there is no key gone\.key; name the one that closed"):
        check_owner(spec, None, "gone.key")
    for key in (OWNER, None):  # nobody looks for a key that nobody has
        with pytest.raises(FinalError, match="is open: nobody owns it"):
            check_owner(tiny_spec(tmp_path, num_stages=2), key, "owner.key")


def test_a_run_that_stands_still_ends_too(tmp_path: Path) -> None:
    """Nobody serves one of its stages, so that it never comes to the round."""
    spec = closed(tmp_path)

    async def scenario(swarm: Swarm) -> None:
        swarm.owner = OWNER.peer_id
        for n in range(2):
            start(swarm, tmp_path, f"peer-{n}")
        await swarm.until_round(2)
        swarm.kill("peer-1")
        own = swarm.members["peer-0"].peer
        own.stopping.take(issue(OWNER, spec.run_id, 1000, NOW_MS))
        monitor, loop = monitor_of(spec), asyncio.get_running_loop()
        monitor.look(own.view, loop.time(), 0.0)
        assert not monitor.done, "one is still there"
        await until_left(swarm)
        monitor.look(own.view, loop.time(), 0.0)
        assert monitor.done, "nobody is left, and it does not go on"

    in_virtual_time(scenario, spec)
