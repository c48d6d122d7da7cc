"""The observer as whoever watches a run sees it: a peer that serves no stage and watches.

`swarmnet.runtime.observer.Observer` is the real one; tests pass their own.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from swarmnet.causes import Failures
from swarmnet.observe.events import Event
from swarmnet.observe.monitor import RunMonitor
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.options import TransportName
from swarmnet.spec import RunSpec

if TYPE_CHECKING:
    from swarmnet.swarm.membership.gossip import Gossip
    from swarmnet.transport.base import Transport

Say = Callable[[str], None]
"""Takes a line for people."""


class RunObserver(Protocol):
    """A joined observer."""

    gossip: Gossip
    transport: Transport

    @property
    def spec(self) -> RunSpec: ...

    @property
    def view(self) -> View: ...

    async def wait_news(self, timeout_s: float) -> None:
        """Returns when the view has changed, or after `timeout_s`."""

    async def generate(
        self, prompt: str, num_tokens: int, seconds: float, failures: Failures | None = None
    ) -> str:
        """Continues `prompt` through the swarm's stages. `failures`: takes why replicas do not
        write. Raises `SwarmnetError`."""

    async def fetch_files(self) -> dict[str, bytes]:
        """The run's files, by name. Raises `SwarmnetError`."""

    async def close(self) -> None: ...


JoinRun = Callable[..., Awaitable[RunObserver]]
"""(addresses, transport, invite="") -> an observer. Raises `AddressError` or another
`SwarmnetError`."""


async def join_run(
    addresses: Sequence[str], transport: TransportName, invite: str = ""
) -> RunObserver:
    """Joins as an observer over the real network; gives up after half a minute."""
    from swarmnet.runtime.observer import Observer

    return await Observer.join(addresses, transport=transport, invite=invite)


async def wait_for_run(
    addresses: Sequence[str], transport: TransportName, invite: str = ""
) -> RunObserver:
    """The same, for who looks for as long as there is something to see: it waits until somebody
    answers."""
    from swarmnet.runtime.observer import Observer

    return await Observer.join(addresses, transport=transport, invite=invite, patience_s=None)


def with_invite(join: JoinRun, invite: str) -> JoinRun:
    """The same, with an invite, where there is one."""
    return functools.partial(join, invite=invite) if invite else join


class Onlooker(Protocol):
    """Whom each look at a run is for."""

    @property
    def monitor(self) -> RunMonitor: ...

    def look(self, view: View, now: float, unix_s: float) -> list[Event]:
        """Takes a view in. `now`: the clock of the view, seconds; `unix_s`: for the events."""


def monitor_of(spec: RunSpec) -> RunMonitor:
    """A monitor for a run."""
    return RunMonitor(
        num_stages=spec.pipeline.num_stages,
        global_batch=spec.pipeline.global_batch,
        samples_per_slot=spec.pipeline.microbatch,
        rounds=spec.optimizer.rounds,
        batch_ramp=spec.pipeline.batch_ramp,
        replication=spec.sync.replication,
        measures=spec.data.measures,
    )
