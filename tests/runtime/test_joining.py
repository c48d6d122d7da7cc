"""Finding the run: patience, memory, and one clear line."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from swarmnet.causes import cause_of
from swarmnet.errors import AddressError, Unreachable, UserError
from swarmnet.identity import Identity
from swarmnet.methods.contact import SpecReply
from swarmnet.protocol.dialing.addresses import STAGGER_S
from swarmnet.protocol.membership.records import ACTIVE, OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.joining.beside import (
    find_other_run,
    peers_at,
    peers_beside,
    tell_run,
    watch_rendezvous,
)
from swarmnet.runtime.joining.entry import Entry, enter
from swarmnet.runtime.joining.find import (
    Backoff,
    SeveralRuns,
    WaysIn,
    check_addresses,
    dial_any,
    find_living,
    find_run,
    read_addresses,
)
from swarmnet.runtime.joining.known_peers import MAX_KNOWN, KnownPeers
from swarmnet.runtime.joining.ready import write_ready_file
from swarmnet.runtime.joining.starting import start_run
from swarmnet.runtime.net import Net
from swarmnet.runtime.options import PeerOptions, default_spec_path
from swarmnet.simulation.clock import run as run_virtual
from swarmnet.spec import RunSpec
from swarmnet.transport.base import Request
from swarmnet.transport.memory import MemoryHub, MemoryTransport
from swarmnet.wire import Message

SPEC = start_run(default_spec_path()).spec
OTHER = start_run(default_spec_path(), seed=7).spec
IDS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 4)]


def address(peer_id: str) -> str:
    return f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id}"


def serve(hub: MemoryHub, peer_id: str, spec: RunSpec = SPEC) -> MemoryTransport:
    transport = hub.transport(peer_id)

    async def on_spec(_: Request) -> Message:
        return Message(SpecReply(spec.run_id, spec.canonical()))

    transport.handle("spec", on_spec)
    return transport


def view_of(*peer_ids: str) -> View:
    view = View("own")
    for peer_id in peer_ids:
        record = Record(peer_id, SPEC.run_id, 1, 1, state=ACTIVE, addresses=(address(peer_id),))
        view.merge(record, 0.0)
    return view


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a person is told meanwhile."""
    lines: list[str] = []

    def warning(text: str, *values: object) -> None:
        lines.append(text % values)

    monkeypatch.setattr("swarmnet.runtime.joining.find.log.warning", warning)
    return lines


def test_a_peer_waits_for_its_run_and_says_why(said: list[str]) -> None:
    async def main() -> None:
        hub = MemoryHub()
        joiner = hub.transport("joiner")
        asyncio.get_running_loop().call_later(100.0, serve, hub, IDS[0])
        found = await find_run(joiner, [address(IDS[0])], KnownPeers(Path("x")))
        assert found[0] == IDS[0]
        assert found[1].run_id == SPEC.run_id
        assert asyncio.get_running_loop().time() < 100.0 + 75.0

    run_virtual(main())
    assert 3 <= len(said) <= 12, "it tries more and more seldom"
    assert all("trying again in" in line and "\n" not in line for line in said)


def test_patience_can_end() -> None:
    async def main() -> None:
        with pytest.raises(AddressError, match="4001"):
            await find_run(
                MemoryHub().transport("joiner"),
                [address(IDS[0])],
                KnownPeers(Path("x")),
                patience_s=30.0,
            )
        assert asyncio.get_running_loop().time() < 60.0

    run_virtual(main())


def test_a_run_whose_first_peer_is_gone_is_found_through_those_met_before(tmp_path: Path) -> None:
    known = KnownPeers.load(tmp_path)
    known.meet(SPEC.run_id, view_of(*IDS), 0.0)
    known.save()

    async def main() -> None:
        hub = MemoryHub()
        serve(hub, IDS[2])
        again = KnownPeers.load(tmp_path)
        found = await find_run(hub.transport("joiner"), [address(IDS[0])], again)
        assert found[0] == IDS[2]

    run_virtual(main())


def test_peers_of_another_run_are_not_asked(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path / "peers.json")
    known.meet(SPEC.run_id, view_of(*IDS[:2]), 0.0)
    assert known.also([address(IDS[2])]) == [], "nobody knows whether that is the same run"
    assert known.also([address(IDS[0])]) == [address(IDS[1])]
    known.meet("another run", view_of(IDS[2]), 0.0)
    assert known.addresses() == [address(IDS[2])]


def test_a_remembered_peer_is_not_looked_for_on_loopback_where_it_has_another_address() -> None:
    """libp2p lists addresses in the order of their bytes: 127.0.0.1 comes before most homes."""
    outside = f"/ip4/192.168.1.7/tcp/4001/p2p/{IDS[0]}"
    known = KnownPeers(Path("x"), SPEC.run_id, {IDS[0]: (address(IDS[0]), outside)})
    assert known.addresses() == [outside]
    known = replace(known, own=lambda: [f"/ip4/192.168.1.7/tcp/1/p2p/{IDS[1]}"])
    assert known.addresses() == [outside, address(IDS[0])], "it is on this machine"


def test_what_is_saved_is_everything_that_changed() -> None:
    known = KnownPeers(Path("x"))
    view = view_of(*IDS[:2])
    assert known.meet(SPEC.run_id, view, 0.0)
    assert not known.meet(SPEC.run_id, view, 1.0)
    moved = f"/ip4/192.168.1.7/tcp/9/p2p/{IDS[0]}"
    view.merge(Record(IDS[0], SPEC.run_id, 1, 2, state=ACTIVE, addresses=(moved,)), 2.0)
    assert known.meet(SPEC.run_id, view, 2.0)
    assert known.peers[IDS[0]] == (moved,)
    view.reach.unanswered(IDS[1], (1, 1), 3.0)
    known.meet(SPEC.run_id, view, 3.0)
    assert list(known.latest_first()) == [IDS[0], IDS[1]], "who lives was met last"


def test_what_is_remembered_is_bounded_and_without_observers() -> None:
    known = KnownPeers(Path("x"))
    view = view_of(*(f"peer-{n}" for n in range(100)))
    view.merge(Record("watcher", SPEC.run_id, 1, 1, state=OBSERVING, addresses=("/a",)), 0.0)
    known.meet(SPEC.run_id, view, 0.0)
    assert len(known.peers) == MAX_KNOWN
    assert "watcher" not in known.peers


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": 1}', '{"run_id": "a", "peers": 3}'])
def test_a_damaged_memory_is_made_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "peers.json").write_text(content)
    known = KnownPeers.load(tmp_path)
    assert known.peers == {}
    known.meet(SPEC.run_id, view_of(IDS[0]), 0.0)
    known.save()
    assert KnownPeers.load(tmp_path).peers == {IDS[0]: (address(IDS[0]),)}


def test_a_first_peer_that_comes_back_finds_its_run_alive(tmp_path: Path) -> None:
    known = KnownPeers(tmp_path / "peers.json")
    known.meet(SPEC.run_id, view_of(*IDS), 0.0)

    async def main() -> None:
        hub = MemoryHub()
        first = hub.transport("first")
        assert await find_living(first, known, SPEC.run_id) == []
        serve(hub, IDS[1])
        await asyncio.sleep(5.0)
        assert await find_living(first, known, SPEC.run_id) == [IDS[1]]
        assert await find_living(first, known, "another run") == []

    run_virtual(main())


def test_the_same_run_is_found_on_the_same_machine(tmp_path: Path) -> None:
    """The command that starts a run was typed twice."""
    own, other = tmp_path / "peer-2", tmp_path / "peer-1"
    for folder in (own, other, tmp_path / "peer-3"):
        folder.mkdir()
    (tmp_path / "peer-3" / "running.json").write_text("{")
    tell_run(own, SPEC.run_id, SPEC.name, [address(IDS[2])])
    take_back = tell_run(other, SPEC.run_id, SPEC.name, [address(IDS[0])])
    [beside] = peers_beside(own)
    assert (beside.run_id, beside.addresses) == (SPEC.run_id, (address(IDS[0]),))

    async def main() -> None:
        hub = MemoryHub()
        serve(hub, IDS[0])
        known = KnownPeers(own / "peers.json")
        found = await find_living(hub.transport("own"), known, SPEC.run_id, beside.addresses)
        assert found == [IDS[0]]

    run_virtual(main())
    take_back()
    assert peers_beside(own) == []


def test_another_run_is_found_only_where_it_lives(tmp_path: Path) -> None:
    """A line of the spec was changed, and the run started again beside the first."""
    for peer_id in IDS[:2]:
        write_ready_file(tmp_path, [address(peer_id)], peer_id, SPEC.run_id, SPEC.name)
    beside = peers_at(tmp_path)
    assert len(beside) == 2

    async def main(run_id: str, living: bool) -> str:
        hub = MemoryHub()
        if living:
            serve(hub, IDS[1])
        found = await find_other_run(hub.transport("own"), beside, run_id)
        return found[1] if found else ""

    assert run_virtual(main("another run", True)) == address(IDS[1])
    assert run_virtual(main("another run", False)) == ""
    assert run_virtual(main(SPEC.run_id, True)) == ""


def test_any_peer_of_a_folder_is_a_way_in_and_stale_files_cost_nothing(tmp_path: Path) -> None:
    for number in range(40):
        peer_id = f"gone-{number}"
        write_ready_file(tmp_path, [address(peer_id)], peer_id)
    (tmp_path / "junk").write_text("{")
    write_ready_file(tmp_path, [address("joiner")], "joiner")
    write_ready_file(tmp_path, [address(IDS[0]), f"/ip4/192.168.1.7/tcp/1/p2p/{IDS[0]}"], IDS[0])

    async def main() -> float:
        hub = MemoryHub()
        for number in range(0, 40, 2):  # as hosts that are gone: no answer at all
            hub.transport(f"gone-{number}")
            hub.partition("joiner", f"gone-{number}")
        serve(hub, IDS[0])
        joiner = hub.transport("joiner")
        known = KnownPeers(Path("x"))
        found = await find_run(joiner, [f"@{tmp_path}"], known)
        assert found[0] == IDS[0]
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) < 6.0
    ways = WaysIn(KnownPeers(Path("x")), [f"@{tmp_path}"])
    asyncio.run(ways.read())
    assert len(ways.remembered()[IDS[0]]) == 2


def test_the_first_address_that_answers_wins() -> None:
    async def main() -> tuple[str, float]:
        hub = MemoryHub()
        for peer_id in ("silent-1", "silent-2"):
            hub.transport(peer_id)
            hub.partition("own", peer_id)
        serve(hub, IDS[0])
        addresses = ["/a/p2p/silent-1", "/a/p2p/silent-2", "/a/p2p/gone", address(IDS[0])]
        found = await dial_any(hub.transport("own"), addresses)
        return found, asyncio.get_running_loop().time()

    found, took_s = run_virtual(main())
    assert found == IDS[0]
    assert took_s < 3 * STAGGER_S


def test_a_long_list_of_reasons_is_cut_between_two_of_them() -> None:
    async def main() -> str:
        addresses = [f"/ip4/192.0.2.{n}/tcp/4001/p2p/gone-{n}" for n in range(9)]
        with pytest.raises(AddressError) as caught:
            await dial_any(MemoryHub().transport("own"), addresses)
        return str(caught.value)

    text = run_virtual(main())
    text, _, mend = text.rpartition("; ")
    assert mend == cause_of(Unreachable()).mend
    assert len(text) < 350
    *shown, last = text.split("; ")
    assert all(part.endswith("nothing listens there)") for part in shown)
    assert last.endswith(f"nothing listens there) and {9 - len(shown) - 1} more")


@pytest.mark.parametrize(
    "wrong", ["", "localhost:4001", "/ip4/1.2.3.4/tcp/1", "/ip4/300.1.1.1/tcp/1/p2p/x", "/p2p/x"]
)
def test_an_address_that_cannot_be_is_no_reason_to_wait(wrong: str) -> None:
    with pytest.raises(AddressError, match="looks like") as caught:
        check_addresses([wrong])
    assert "\n" not in str(caught.value)


def test_addresses_from_a_file_that_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "join"

    async def main() -> list[str]:
        content = json.dumps({"address": address(IDS[0]), "peer_id": IDS[0], "pid": 1})
        asyncio.get_running_loop().call_later(20.0, path.write_text, content)
        return await read_addresses([f"@{path}"])

    assert run_virtual(main()) == [address(IDS[0])]
    path.write_text(f"\n {address(IDS[2])}\n")
    both = [f"@{path}", f"@{tmp_path / 'never'}", address(IDS[1])]
    found = run_virtual(read_addresses(both))
    assert found == [address(IDS[2]), address(IDS[1])], "who has one way in does not wait"
    (tmp_path / "own").symlink_to(tmp_path / "own")
    with pytest.raises(UserError, match="cannot read"):
        run_virtual(read_addresses([f"@{tmp_path / 'own'}"]))


def test_waits_double_up_to_a_bound(said: list[str]) -> None:
    async def main() -> float:
        backoff = Backoff(None, random.Random(1))
        for _ in range(10):
            await backoff.wait("nobody is there")
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) < 10 * 72.0
    assert len(said) == 10


def test_what_is_new_in_a_folder_is_tried_at_once(tmp_path: Path, said: list[str]) -> None:
    """However long the wait has become."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        wait = loop.create_task(read_addresses([f"@{tmp_path}"]))
        await asyncio.sleep(100.0)
        write_ready_file(tmp_path, ["/ip4/127.0.0.1/tcp/1/p2p/" + "a" * 46], "a" * 46)
        began = loop.time()
        assert len(await wait) == 1
        assert loop.time() - began <= 1.0

    run_virtual(scenario())
    assert said[0].startswith(f"no address in {tmp_path} yet; trying again in ")
    assert len(said) < 8


@pytest.fixture
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none in virtual time."""

    async def to_thread(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    monkeypatch.setattr("asyncio.to_thread", to_thread)


def silent(hub: MemoryHub, number: int, to: str) -> None:
    """Hosts that are gone: no answer at all."""
    for i in range(number):
        hub.transport(f"gone-{i}")
        hub.partition(to, f"gone-{i}")


@pytest.mark.parametrize("after_s", [5.0, 47.0])
def test_a_peer_that_is_back_at_its_address_is_found_at_once(
    tmp_path: Path, after_s: float
) -> None:
    """In the middle of an attempt, or of a long wait; its ready file was there all the time."""

    def tell(began_unix_s: float) -> None:
        write_ready_file(tmp_path, [address(IDS[0])], IDS[0], SPEC.run_id, SPEC.name, began_unix_s)

    async def main() -> None:
        hub, loop = MemoryHub(), asyncio.get_running_loop()
        silent(hub, 20, "joiner")
        for number in range(20):
            gone = f"gone-{number}"
            write_ready_file(tmp_path, [address(gone)], gone, SPEC.run_id, SPEC.name)
        tell(1.0)
        joiner = hub.transport("joiner")
        known = KnownPeers(Path("x"))
        search = loop.create_task(find_run(joiner, [f"@{tmp_path}"], known))
        await asyncio.sleep(after_s)
        serve(hub, IDS[0])
        await asyncio.sleep(0.001)
        tell(2.0)
        began = loop.time()
        assert (await search)[0] == IDS[0]
        assert loop.time() - began <= 1.0

    run_virtual(main())


def test_a_folder_that_leads_to_two_runs_leads_to_none_until_one_of_them_has_ended(
    tmp_path: Path, said: list[str]
) -> None:
    async def main() -> None:
        hub, loop = MemoryHub(), asyncio.get_running_loop()
        serve(hub, IDS[0])
        other = serve(hub, IDS[1], OTHER)
        for peer_id, spec in ((IDS[0], SPEC), (IDS[1], OTHER)):
            write_ready_file(tmp_path, [address(peer_id)], peer_id, spec.run_id, spec.name)
        joiner, known = hub.transport("joiner"), KnownPeers(Path("x"))
        search = loop.create_task(find_run(joiner, [f"@{tmp_path}"], known))
        await asyncio.sleep(20.0)
        assert not search.done()
        await other.close()
        assert (await search)[1].run_id == SPEC.run_id

    run_virtual(main())
    assert all("lead to 2 runs" in line for line in said)
    assert all(s.run_id[:16] in said[0] and "stop all but one" in said[0] for s in (SPEC, OTHER))


def test_addresses_of_two_runs_are_an_error_but_for_who_was_in_one_of_them(said: list[str]) -> None:
    async def main(run_id: str) -> str:
        hub = MemoryHub()
        serve(hub, IDS[0])
        serve(hub, IDS[1], OTHER)
        known = KnownPeers(Path("x"), run_id)
        given = [address(IDS[0]), address(IDS[1])]
        return (await find_run(hub.transport("joiner"), given, known))[1].run_id

    with pytest.raises(SeveralRuns, match="addresses of one"):
        run_virtual(main(""))
    assert not said
    for spec in (SPEC, OTHER):
        assert run_virtual(main(spec.run_id)) == spec.run_id
    assert len(said) == 2
    assert "was in" in said[0]


def test_who_does_not_answer_is_no_other_run(tmp_path: Path) -> None:
    """And costs a joiner little."""

    async def main() -> float:
        hub = MemoryHub()
        serve(hub, IDS[0])
        for peer_id in IDS[1:]:
            hub.transport(peer_id)
            hub.partition("joiner", peer_id)
        given = list(map(address, IDS))
        await find_run(hub.transport("joiner"), given, KnownPeers(Path("x")))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) < 3.0


def entering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: MemoryHub
) -> Callable[[AsyncExitStack], Awaitable[Entry]]:
    """A peer that starts the default run and tells its addresses in a folder."""

    async def open_net(*_: object, **__: object) -> Net:
        return Net(cast(Any, hub.transport("starter")), None, None)

    monkeypatch.setattr("swarmnet.runtime.joining.entry.open_net", open_net)
    state, ready = tmp_path / "state", tmp_path / "rendezvous"
    for folder in (state, ready):
        folder.mkdir(exist_ok=True)
    options = PeerOptions(state, spec=default_spec_path(), ready_file=ready)
    return lambda stack: enter(options, stack)


@pytest.mark.usefixtures("inline_threads")
def test_a_run_does_not_begin_where_another_one_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "rendezvous"

    async def main(living: RunSpec | None, saved: str = "") -> list[str]:
        hub = MemoryHub()
        start = entering(tmp_path, monkeypatch, hub)
        KnownPeers(tmp_path / "state" / "peers.json", saved, {IDS[1]: (address(IDS[1]),)}).save()
        write_ready_file(ready, [address(IDS[0])], IDS[0], OTHER.run_id, OTHER.name)
        if living is not None:
            serve(hub, IDS[0], living)
        if saved:
            serve(hub, IDS[1])
        async with AsyncExitStack() as stack:
            return await (await start(stack)).neighbours

    with pytest.raises(UserError, match="another run, which is alive") as caught:
        run_virtual(main(OTHER))
    line = str(caught.value)
    assert OTHER.run_id[:16] in line
    for typed in ("docker compose down", "-p NAME", "--ready-file", f"--join @{ready}"):
        assert typed in line
    assert "\n" not in line
    assert run_virtual(main(None)) == [], "that run has ended"
    assert run_virtual(main(OTHER, SPEC.run_id)) == [IDS[1]], "its own run lives: it goes on there"


@pytest.mark.usefixtures("inline_threads")
def test_two_runs_behind_the_same_files_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have begun at the same moment."""

    async def main() -> None:
        hub = MemoryHub()
        own = serve(hub, IDS[0])
        watch = asyncio.ensure_future(watch_rendezvous(own, tmp_path, SPEC.run_id))
        write_ready_file(tmp_path, [address(IDS[2])], IDS[2], "killed", "killed")
        await asyncio.sleep(60.0)
        assert not caplog.messages
        serve(hub, IDS[1], OTHER)
        for began in (1.0, 2.0):
            write_ready_file(tmp_path, [address(IDS[1])], IDS[1], OTHER.run_id, OTHER.name, began)
            await asyncio.sleep(60.0)
        watch.cancel()

    run_virtual(main())
    [line] = caplog.messages
    assert OTHER.run_id[:16] in line
    assert str(tmp_path) in line
