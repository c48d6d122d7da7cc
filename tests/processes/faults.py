"""Death of a real process at an exact moment: it sends itself SIGKILL there. No handler runs,
nothing is flushed, its channels close as those of any killed process do.

A moment is `NAME[:round=N][:nth=N]`: the `nth` time (1 where not said) that it comes in round `N`
or a later one (0 where not said). Several moments, between commas: the first that comes. Of several
processes with one folder only the first that comes to a moment dies there: who is the primary of
shards, or feeds first, follows from what the machine has just measured.

| name | where the process dies |
|---|---|
| `forward` | on the device thread: a forward is computed, nobody has it yet |
| `backward` | on the device thread: a gradient is added, its microbatch not answered |
| `push` | as contributor: the gradient of a shard is on its way, the answer is not here |
| `aggregate` | as primary: the gradients of a shard are summed, no step is made |
| `mirror` | as primary: the step is on its way to a backup, no contributor has its result |
| `donate` | as donor: a joiner has asked for a shard, it has not got it |
| `feed` | as feeder: it takes up a microbatch, others are in flight |
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarmnet.methods.state import FETCH_PARAMETERS
from swarmnet.methods.update import MIRROR, REDUCE
from swarmnet.runtime import run
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.pipeline.feeder import Feeder

ON_DEVICE = {"forward": ("forward_pass", "loss_pass"), "backward": ("backward_pass",)}
CALLS = {"push": REDUCE.name, "mirror": MIRROR.name}
MOMENTS = ("forward", "backward", "push", "aggregate", "mirror", "donate", "feed")


@dataclass
class Moment:
    """When to die; `nth` counts down."""

    name: str
    round: int = 0
    nth: int = 1


def parse_moments(text: str) -> list[Moment]:
    """Raises `ValueError` where the text makes no sense."""
    moments = []
    for entry in text.split(","):
        name, *settings = entry.strip().split(":")
        values = {"round": 0, "nth": 1}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in values or not value.isdecimal():
                raise ValueError(f"{setting!r}: write round=N or nth=N")
            values[key] = int(value)
        if name not in MOMENTS:
            raise ValueError(f"{name!r} is none of {', '.join(MOMENTS)}")
        moments.append(Moment(name, values["round"], max(1, values["nth"])))
    return moments


def kill_this_process() -> None:
    """SIGKILL to itself; the kernel does the rest."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Faults:
    """Wraps the ports of one peer, before it runs."""

    moments: list[Moment]
    peer: Peer
    die: Callable[[], None] = kill_this_process
    folder: Path | None = None
    """Of the processes that share these moments, with the names of those that came; None: no other
    process has them."""

    def arm(self) -> None:
        names = {m.name for m in self.moments}
        machine, transport = self.peer.machine, self.peer.transport
        build = machine.build

        def built(stage_index: int) -> tuple[Any, Any]:
            stage, optimizer = build(stage_index)
            for name, methods in ON_DEVICE.items():
                for method in methods if name in names else ():
                    self._after_pass(stage, method, name)
            # The last stage has its backward in the same piece of work as its forward.
            if "backward" in names and stage_index == stage.num_stages - 1:
                self._after_pass(stage, "loss_pass", "backward")
            if "aggregate" in names:
                self._after(optimizer, "sum", "aggregate")
            return stage, optimizer

        machine.build = built
        if "feed" in names and machine.data is not None:
            self._after(machine.data, "microbatch", "feed")
        if "donate" in names:
            self._before_serving(transport, FETCH_PARAMETERS.name, "donate")
        if names & CALLS.keys():
            self._while_calling(transport, {CALLS[n]: n for n in CALLS if n in names})

    def reached(self, name: str) -> bool:
        """Takes down that a moment has come; True where it is the one."""
        replica = self.peer.replica
        now = replica.round if replica is not None else 0
        for moment in self.moments:
            if moment.name == name and now >= moment.round:
                moment.nth -= 1
                if moment.nth == 0:
                    return self._is_first(name)
        return False

    def _is_first(self, name: str) -> bool:
        """No other process has come to this moment."""
        if self.folder is None:
            return True
        try:
            (self.folder / f"died-in-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _after(self, port: Any, method: str, name: str) -> None:
        inner = getattr(port, method)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            return self._die_here(name, inner(*arguments, **named))

        setattr(port, method, wrapped)

    def _after_pass(self, stage: Any, method: str, name: str) -> None:
        inner = getattr(stage, method)

        def wrapped(*arguments: Any) -> Any:
            return inner(*arguments).then(lambda result: self._die_here(name, result))

        setattr(stage, method, wrapped)

    def _die_here(self, name: str, result: Any) -> Any:
        if self.reached(name):
            self.die()
        return result

    def _before_serving(self, transport: Any, method: str, name: str) -> None:
        handle = transport.handle

        def handle_wrapped(served: str, handler: Any, **options: Any) -> None:
            async def dying(request: Any) -> Any:
                if self.reached(name):
                    self.die()
                return await handler(request)

            handle(served, dying if served == method else handler, **options)

        transport.handle = handle_wrapped

    def _while_calling(self, transport: Any, names: dict[str, str]) -> None:
        call = transport.call
        sent = transport.traffic.sent_bytes

        async def wrapped(peer_id: str, method: str, message: Any, **options: Any) -> Any:
            if method not in names or not self.reached(names[method]):
                return await call(peer_id, method, message, **options)
            before = sent.get(method, 0)
            task = asyncio.ensure_future(call(peer_id, method, message, **options))
            while sent.get(method, 0) == before and not task.done():  # noqa: ASYNC110
                await asyncio.sleep(0)  # until its first bytes are on the wire
            self.die()
            return await task

        transport.call = wrapped


def arm(text: str, folder: str | None = None) -> None:
    """In a peer's process, before it has begun: it dies at one of these moments. `folder`: of
    `Faults`."""
    moments, inner = parse_moments(text), run.compose

    def armed(*arguments: Any, **named: Any) -> Peer:
        peer = inner(*arguments, **named)
        run.compose = inner  # further seats are not armed
        Faults(moments, peer, folder=Path(folder) if folder else None).arm()
        return peer

    run.compose = armed


def hold_feeding(folder: str, rounds: Sequence[int]) -> None:
    """In a peer's process, before it has begun: it launches no microbatch of these rounds, nor of
    later ones, before `may_begin` has said so. Else a run of tiny rounds may be over before its
    last peers have started."""
    compose = run.compose

    def held(*arguments: Any, **named: Any) -> Peer:
        peer = compose(*arguments, **named)
        if peer.feeder is not None:
            _hold(peer.feeder, Path(folder), sorted(rounds))
        return peer

    run.compose = held


def _hold(feeder: Feeder, folder: Path, rounds: Sequence[int]) -> None:
    feed, whole = feeder.run, feeder.settings

    async def let_go() -> None:
        for r in rounds:
            feeder.settings = replace(whole, rounds=min(r, whole.rounds))
            while not _said(folder, r).exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        feeder.settings = whole

    async def feeds(replica: Any) -> None:
        letting_go = asyncio.create_task(let_go())
        await asyncio.sleep(0)  # until it has begun
        try:
            await feed(replica)
        finally:
            letting_go.cancel()

    setattr(feeder, "run", feeds)  # noqa: B010


def may_begin(folder: Path, round_index: int) -> None:
    """What `hold_feeding` holds back with this folder: the round goes on."""
    _said(folder, round_index).touch()


def _said(folder: Path, round_index: int) -> Path:
    return folder / f"round-{round_index}-may-begin"
