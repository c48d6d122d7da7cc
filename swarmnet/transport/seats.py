"""Several peers on one machine's channels.

A `Seat` is a `Transport` of its own for the swarm code, with an id of its own
(`protocol.membership.seats`). On the wire its messages say from which seat to which they go;
between the seats of one machine there is no wire: the handler is called, arrays are handed over as
they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from swarmnet.errors import ProtocolViolation
from swarmnet.protocol.membership.seats import MAX_SEATS, seat_id
from swarmnet.transport.base import Handler, Traffic
from swarmnet.wire import Message

if TYPE_CHECKING:
    from swarmnet.transport.channel import ChannelTransport

Route = tuple[int, int]
"""(seat of the caller, seat of the callee)"""
FIRST_SEATS: Route = (0, 0)
"""What a message without a route says."""


def parse_route(value: Any) -> Route:
    """A message's route as it travels; absent: between first seats. Raises `ProtocolViolation`."""
    if value is None:
        return FIRST_SEATS
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(seat) is int and 0 <= seat < MAX_SEATS for seat in value)
    ):
        return value[0], value[1]
    raise ProtocolViolation("a route that is not two seats")


class Seat:
    """A further peer behind a machine's channels; the first is the `ChannelTransport` itself."""

    def __init__(self, machine: ChannelTransport, seat: int) -> None:
        self.peer_id = seat_id(machine.peer_id, seat)
        self.seat = seat
        self.traffic: Traffic = machine.traffic
        """The machine's: a link is shared."""
        self.handlers: dict[str, Handler] = {}
        self._machine = machine

    def addresses(self) -> list[str]:
        return self._machine.addresses()

    def set_run(self, run_id: str) -> None:
        if run_id != self._machine.run_id:
            self._machine.set_run(run_id)

    def handle(self, method: str, handler: Handler) -> None:
        self.handlers[method] = handler

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        self._machine.learn(peer_id, addresses)

    async def dial(self, address: str, timeout_s: float = 10.0) -> str:
        return await self._machine.dial(address, timeout_s)

    async def call(
        self,
        peer_id: str,
        method: str,
        message: Message,
        *,
        timeout_s: float,
        on_progress: Callable[[Message], None] | None = None,
    ) -> Message:
        return await self._machine.call_from(
            self.seat, peer_id, method, message, timeout_s=timeout_s, on_progress=on_progress
        )

    async def drop(self, peer_id: str) -> None:
        await self._machine.drop(peer_id)

    def notify(self, peer_id: str, method: str, message: Message) -> None:
        self._machine.notify_from(self.seat, peer_id, method, message)

    def connected(self) -> list[str]:
        return [*self._machine.connected(), self._machine.peer_id]

    def on_connected(self, callback: Callable[[str], None]) -> None:
        self._machine.on_connected(callback)

    def on_disconnected(self, callback: Callable[[str], None]) -> None:
        self._machine.on_disconnected(callback)

    async def close(self) -> None:
        """Nothing is served here any more; the machine's channels stay."""
        self._machine.remove_seat(self.seat)
