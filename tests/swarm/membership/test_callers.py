"""Which callers a peer answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from swarmnet.admission import OPEN
from swarmnet.errors import Busy, ProtocolViolation, Refused, WrongRun
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.clock import run
from swarmnet.swarm.membership.callers import STRANGER_BURST, CallerChecks
from swarmnet.transport.base import Request
from swarmnet.wire import Message
from tests.swarm.membership.parts import RUN, now, record

CALLER = "caller"


def request(run_id: str = RUN) -> Request:
    return Request(CALLER, run_id, "any", Message(), lambda message: None)


@dataclass
class Invited:
    """Admits who shows the word."""

    is_open: bool = field(default=False, init=False)

    def check(self, peer_id: str, credential: bytes) -> None:
        if credential != b"word":
            raise ProtocolViolation("no invite")


def test_callers_of_another_run_are_refused() -> None:
    callers = CallerChecks(RUN, View("a"), OPEN)
    callers.check_run(request())
    with pytest.raises(WrongRun):
        callers.check_run(request("f" * 32))
    with pytest.raises(WrongRun):
        callers.check_run(request(""))


def test_in_a_closed_run_the_record_has_to_show_an_invite() -> None:
    async def scenario() -> None:
        view = View("a")
        callers = CallerChecks(RUN, view, Invited())
        for credential, admitted in ((None, False), (b"no", False), (b"word", True)):
            if credential is not None:
                view.merge(record(CALLER, len(credential), credential=credential), now())
            assert callers.is_admitted(CALLER) == admitted
            callers.check_same_run(request())
            if admitted:
                callers.check_run(request())
            else:
                with pytest.raises(Refused):
                    callers.check_run(request())

    run(scenario())


def test_a_stranger_may_not_ask_often() -> None:
    async def scenario() -> None:
        view = View("a")
        callers = CallerChecks(RUN, view, OPEN)
        for _ in range(int(STRANGER_BURST)):
            callers.check_stranger(request())
        with pytest.raises(Busy):
            callers.check_stranger(request())
        view.merge(record(CALLER), now())
        callers.check_stranger(request())

    run(scenario())
