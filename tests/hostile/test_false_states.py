"""A holder of optimizer state that gives another one to whoever comes to own a shard."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from swarmnet.errors import NotReady
from swarmnet.methods.state import FETCH_OPTIMIZER
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.hostile.attacker import NamedSigner
from tests.hostile.test_false_primaries import LIAR, barred_by, spec_of, turned
from tests.swarm.handlers import handler_of
from tests.swarm.harness import Swarm, in_virtual_time

HONEST = ("peer-0", "peer-1")
MIN_GIVEN = 3
Handler = Callable[[Request[Any]], Coroutine[Any, Any, Message[Any]]]


def test_who_has_been_given_a_false_state_accuses_no_honest_primary(tmp_path: Path) -> None:
    """The newcomer makes other steps with it than the primaries do, which had no time for it at
    first. It fetches the state again."""
    given = set[int]()

    def false(honest: Handler) -> Handler:
        async def give(request: Request[Any]) -> Message[Any]:
            told = await honest(request)
            given.add(request.message.body.shard)
            return Message(told.body, tuple(turned(a, 3.0) for a in told.arrays))

        return give

    def busy(honest: Handler) -> Handler:
        async def give(request: Request[Any]) -> Message[Any]:
            if len(given) < MIN_GIVEN:
                raise NotReady("others are being served")
            return await honest(request)

        return give

    async def scenario(swarm: Swarm) -> None:
        for name in (*HONEST, LIAR):
            swarm.start(name)
        await swarm.until_round(1)
        for name in (*HONEST, LIAR):
            transport: Any = swarm.members[name].peer.transport
            changed = (false if name == LIAR else busy)(handler_of(transport, FETCH_OPTIMIZER.name))
            transport.handle(FETCH_OPTIMIZER.name, changed)
        swarm.start("peer-2")
        await swarm.until(lambda: len(given) >= MIN_GIVEN)
        await swarm.until_round(max(swarm.rounds()) + 4)
        print(sorted(given), barred_by(swarm))
        assert not {p for found in barred_by(swarm).values() for p in found} - {LIAR}
        states = swarm.members["peer-2"].peer.exchanges.ownership.states
        assert LIAR in states.doubted
        now = swarm.members["peer-2"].peer.exchanges.current
        assert all(states.has_input(j, now) for j in given if j in states.here())

    in_virtual_time(scenario, spec_of(tmp_path, 40), signer=NamedSigner)
