"""The observer as the commands see it: a peer that serves no stage and watches.

`swarmnet.runtime.observer.Observer` is the real one; tests pass their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from swarmnet.protocol.membership.view import View
from swarmnet.runtime.options import TransportName
from swarmnet.spec import RunSpec


class RunObserver(Protocol):
    """A joined observer."""

    @property
    def spec(self) -> RunSpec: ...

    @property
    def view(self) -> View: ...

    async def wait_news(self, timeout_s: float) -> None:
        """Returns when the view has changed, or after `timeout_s`."""

    async def generate(self, prompt: str, num_tokens: int, seconds: float) -> str:
        """Continues `prompt` through the swarm's stages. Raises `SwarmnetError`."""

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
