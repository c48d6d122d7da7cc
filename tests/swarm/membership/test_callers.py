"""Which callers a peer answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from swarmnet.admission import OPEN, Admission
from swarmnet.errors import Busy, NotReady, ProtocolViolation, Refused, WrongRun
from swarmnet.methods.method import (
    LIST_BYTES,
    SHARED_CALL_BYTES,
    STRANGERS,
    STRANGERS_AT_A_TIME,
    Arrays,
    Callee,
    Caller,
    Quota,
)
from swarmnet.methods.state import FetchRequest
from swarmnet.methods.table import METHODS
from swarmnet.methods.update import NormRequest, ReduceRequest
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, LEFT
from swarmnet.protocol.membership.view import View
from swarmnet.simulation.clock import run
from swarmnet.swarm.membership.callers import CallerChecks
from swarmnet.transport.base import Envelope
from tests.swarm.harness import Swarm, in_virtual_time, tiny_spec
from tests.swarm.membership.parts import RUN, now, record

CALLER = "caller"
STAGE = 1
SHARD_BYTES = 4000


def envelope(
    method: str, run_id: str = RUN, *, body_bytes: int = 0, array_bytes: int = 0
) -> Envelope:
    return Envelope(CALLER, run_id, method, body_bytes, array_bytes)


@dataclass
class Invited:
    """Admits who shows the word."""

    is_open: bool = field(default=False, init=False)

    def check(self, peer_id: str, credential: bytes) -> None:
        if credential != b"word":
            raise ProtocolViolation("no invite")


@dataclass
class Replica:
    """Of stage 1."""

    index: int = STAGE
    num_shards: int = 3
    largest_shard_bytes: int = SHARD_BYTES
    synced: bool = True


def gate_of(
    view: View, admission: Admission = OPEN, replica: Replica | None = None
) -> CallerChecks:
    gate = CallerChecks(RUN, view, admission)
    gate.serves(replica)
    return gate


@pytest.mark.parametrize("method", sorted(METHODS))
def test_callers_of_another_run_are_refused_all_but_what_anyone_may_ask(method: str) -> None:
    gate = gate_of(View("a"))
    for run_id in ("f" * 32, ""):
        if METHODS[method].caller is Caller.ANYONE:
            gate.check(envelope(method, run_id))
        else:
            with pytest.raises(WrongRun):
                gate.check(envelope(method, run_id))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_in_a_closed_run_the_record_has_to_show_an_invite(method: str) -> None:
    async def scenario() -> None:
        view = View("a")
        gate = gate_of(view, Invited(), Replica())
        is_for_all = METHODS[method].caller in (Caller.ANYONE, Caller.RUN)
        for credential, admitted in ((None, False), (b"no", False), (b"word", True)):
            if credential is not None:
                said = record(
                    CALLER, len(credential), credential=credential, stage=STAGE, state=LEAVING
                )
                view.merge(said, now())
            assert gate.is_admitted(CALLER) == gate.has_standing(CALLER) == admitted
            if admitted or is_for_all:
                gate.check(envelope(method))
            else:
                with pytest.raises(Refused):
                    gate.check(envelope(method))

    run(scenario())


@pytest.mark.parametrize(
    "method",
    sorted(
        m for m in METHODS if METHODS[m].caller in (Caller.STAGE, Caller.WORKING, Caller.LEAVING)
    ),
)
def test_only_replicas_of_the_stage_take_part_in_what_it_does(method: str) -> None:
    states = {
        Caller.STAGE: {JOINING, ACTIVE, LEAVING},
        Caller.WORKING: {ACTIVE, LEAVING},
        Caller.LEAVING: {LEAVING},
    }[METHODS[method].caller]

    async def scenario() -> None:
        view = View("a")
        gate = gate_of(view, replica=Replica())
        with pytest.raises(NotReady):  # nothing is known of it
            gate.check(envelope(method))
        version = 0
        for stage in (STAGE, STAGE + 1):
            for state in (JOINING, ACTIVE, LEAVING, LEFT):
                version += 1
                view.merge(record(CALLER, version, stage=stage, state=state), now())
                if stage == STAGE and state in states:
                    gate.check(envelope(method))
                else:
                    with pytest.raises(NotReady):
                        gate.check(envelope(method))
        gate.serves(None)
        with pytest.raises(NotReady):
            gate.check(envelope(method))

    run(scenario())


def test_a_caller_speaks_for_the_stage_that_its_record_names() -> None:
    async def scenario() -> None:
        view = View("a")
        gate = gate_of(view, replica=Replica())
        norm = NormRequest(0, STAGE, (0,), (1.0,))
        view.merge(record(CALLER, 1, stage=STAGE + 1), now())
        with pytest.raises(NotReady):
            gate.enter(envelope("norm"), norm)
        view.merge(record(CALLER, 2, stage=STAGE), now())
        assert gate.enter(envelope("norm"), norm) is norm
        view.merge(record(CALLER, 3, stage=STAGE, state=JOINING), now())
        with pytest.raises(NotReady):
            gate.enter(envelope("norm"), norm)

    run(scenario())


def test_what_a_body_names_has_to_be_here() -> None:
    async def scenario() -> None:
        view = View("a")
        view.merge(record(CALLER, 1, stage=STAGE), now())
        replica = Replica()
        gate = gate_of(view, replica=replica)
        gate.enter(envelope("reduce"), ReduceRequest(0, STAGE, (0, 2), (0, 0), (1, 1)))
        gate.enter(envelope("fetch_optimizer"), FetchRequest(0, STAGE, 2))
        for stage, shard in ((STAGE, 3), (STAGE + 1, 1)):
            with pytest.raises(NotReady):
                gate.enter(envelope("reduce"), ReduceRequest(0, stage, (0, shard), (0, 0), (1, 1)))
            with pytest.raises(NotReady):
                gate.enter(envelope("fetch_optimizer"), FetchRequest(0, stage, shard))
        replica.synced = False
        for method, row in METHODS.items():
            if row.request is FetchRequest and row.caller is not Caller.LEAVING:
                if row.callee is Callee.SYNCED:
                    with pytest.raises(NotReady, match="joining"):
                        gate.enter(envelope(method), FetchRequest(0, STAGE, 0))
                else:
                    gate.enter(envelope(method), FetchRequest(0, STAGE, 0))

    run(scenario())


def test_who_serves_no_stage_answers_nothing_of_one() -> None:
    async def scenario() -> None:
        view = View("a")
        view.merge(record(CALLER, 1, stage=STAGE), now())
        replica = Replica()
        gate = gate_of(view, replica=replica)
        norm = NormRequest(0, STAGE, (0,), (1.0,))
        replica.synced = False
        assert gate.enter(envelope("norm"), norm) is norm, "it may be joining"
        gate.serves(None)
        with pytest.raises(NotReady, match="no stage"):
            gate.enter(envelope("norm"), norm)
        with pytest.raises(NotReady, match="no stage"):
            gate.enter(envelope("fetch_parameters"), FetchRequest(0, STAGE, 0))

    run(scenario())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_nothing_is_larger_than_its_row_says(method: str) -> None:
    async def scenario() -> None:
        view, row = View("a"), METHODS[method]
        view.merge(record(CALLER, 1, stage=STAGE, state=LEAVING), now())
        gate = gate_of(view, replica=Replica())
        gate.check(envelope(method, body_bytes=row.body_bytes))
        with pytest.raises(ProtocolViolation):
            gate.check(envelope(method, body_bytes=row.body_bytes + 1))
        most = {
            Arrays.NONE: 0,
            Arrays.SHARD: SHARD_BYTES,
            Arrays.SHARDS: SHARED_CALL_BYTES,
            Arrays.PROBE: 4 << 20,
            Arrays.MICROBATCH: None,
        }[row.arrays]
        gate.check(envelope(method, array_bytes=most or 0))
        if most is not None:
            with pytest.raises(ProtocolViolation):
                gate.check(envelope(method, array_bytes=most + 1))

    run(scenario())


def test_a_stranger_may_not_ask_often() -> None:
    async def scenario() -> None:
        view = View("a")
        gate = gate_of(view)
        for _ in range(int(STRANGERS.burst)):
            gate.check(envelope("ping"))  # which does not count
            gate.enter(envelope("ping"), None)
        for method in ("ping", "spec"):
            with pytest.raises(Busy):
                gate.enter(envelope(method), None)
        view.merge(record(CALLER), now())
        gate.enter(envelope("ping"), None)

    run(scenario())


def asks(gate: CallerChecks, caller: str, method: str) -> bool:
    """Whether a call counts as one of those that a caller may make."""
    try:
        gate.enter(replace(envelope(method), remote=caller), None)
    except Busy:
        return False
    return True


@pytest.mark.parametrize(("method", "shows_records"), [("ping", False), ("data_sizes", True)])
def test_many_names_have_no_more_than_a_few_quotas(method: str, shows_records: bool) -> None:
    """Names without a record, and those in a flood of records: who takes part has its own."""

    async def scenario() -> None:
        view, quota = View("a"), METHODS[method].quota
        assert quota is not None
        gate = gate_of(view)
        view.merge(record("member", state=ACTIVE, stage=0), now())
        view.delivered("member")
        names = [f"liar-{n}" for n in range(3 * STRANGERS_AT_A_TIME)]
        for name in names if shows_records else ():
            view.merge(record(name, state=ACTIVE, stage=0), now())
        tries = int(quota.burst) + 1
        taken = [sum(asks(gate, name, method) for _ in range(tries)) for name in names]
        assert max(taken) <= quota.burst
        assert sum(taken) == STRANGERS_AT_A_TIME * quota.burst
        assert sum(asks(gate, "member", method) for _ in range(int(quota.burst))) == quota.burst
        await asyncio.sleep(10.0)
        taken = [sum(asks(gate, name, method) for _ in range(tries)) for name in names]
        most = STRANGERS_AT_A_TIME * min(quota.burst, 10.0 * quota.calls_per_s)
        assert sum(taken) == pytest.approx(most, abs=1)

    run(scenario())


def test_forty_newcomers_at_once_ask_for_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one asks of one peer, while it joins and after it, forty times."""
    asked = Counter[tuple[int, Quota]]()
    count = CallerChecks._count  # noqa: SLF001  what it is called for is seen nowhere else
    after_s, num_newcomers = 10.0, 40

    def noted(gate: CallerChecks, remote: str, quota: Quota) -> None:
        if remote == "newcomer":
            asked[id(gate), quota] += 1
        count(gate, remote, quota)

    monkeypatch.setattr(CallerChecks, "_count", noted)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_grid(2, 2)
        await swarm.until_round(3)
        newcomer = swarm.start("newcomer")
        await asyncio.sleep(after_s)
        assert newcomer.gossip.own.state == ACTIVE

    in_virtual_time(scenario, tiny_spec(tmp_path, num_stages=2, rounds=1000), is_synthetic=True)
    assert asked
    for (_, quota), num in asked.items():
        most = STRANGERS_AT_A_TIME * (quota.burst + after_s * quota.calls_per_s)
        assert num_newcomers * num <= most, (quota, num)


def test_what_costs_a_connection_is_rare_for_members_too() -> None:
    async def scenario() -> None:
        view = View("a")
        view.merge(record(CALLER), now())
        gate = gate_of(view)
        quota = METHODS["look_back"].quota
        assert quota is not None
        body = {"ports": [5000]}
        for _ in range(int(quota.burst)):
            gate.enter(envelope("look_back"), body)
        with pytest.raises(Busy):
            gate.enter(envelope("look_back"), body)

    run(scenario())


def test_the_list_bounds_leave_room_for_the_largest_run() -> None:
    """A number for each slot of a round, and a sum for each shard of a stage."""
    assert LIST_BYTES > 65_536 * (3 + 9)
