"""The gate of a peer: enforces `methods.table` for every call that comes in, by what callers say of
themselves in their signed records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from swarmnet.admission import Admission
from swarmnet.errors import Busy, NotReady, ProtocolViolation, Refused, WrongRun
from swarmnet.methods.method import (
    MAX_PROBE_BYTES,
    SHARED_CALL_BYTES,
    STRANGERS_AT_A_TIME,
    Arrays,
    Callee,
    Caller,
    Method,
    Quota,
)
from swarmnet.methods.table import METHODS
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import ACTIVE, JOINING, LEAVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.protocol.moments import LONG_AGO
from swarmnet.protocol.rate import RateLimiter, TokenBucket
from swarmnet.transport.base import Envelope

STATES_OF: Mapping[Caller, tuple[str, ...]] = {
    Caller.STAGE: (JOINING, ACTIVE, LEAVING),
    Caller.WORKING: (ACTIVE, LEAVING),
    Caller.LEAVING: (LEAVING,),
    Caller.REPLICA: (ACTIVE, LEAVING),
}
"""What the record of a caller that is a replica must say."""


def is_replica_of(record: Record | None, stage: int, caller: Caller) -> bool:
    """Whether a peer's record makes it such a replica of a stage."""
    return record is not None and record.stage == stage and record.state in STATES_OF[caller]


class Served(Protocol):
    """What the gate knows of the replica here."""

    @property
    def index(self) -> int:
        """Of its stage."""

    @property
    def num_shards(self) -> int: ...

    @property
    def largest_shard_bytes(self) -> int: ...

    @property
    def synced(self) -> bool:
        """It has joined: it has the parameters of its round."""


class CallerChecks:
    """A `transport.base.Gate`."""

    def __init__(self, run_id: str, view: View, admission: Admission) -> None:
        self._served: Served | None = None
        self._run_id = run_id
        self._view = view
        self._admission = admission
        quotas = {row.quota for row in METHODS.values() if row.quota is not None}
        self._limiters = {q: RateLimiter(q.calls_per_s, q.burst) for q in quotas}
        self._of_strangers = {q: _bucket_of_strangers(q) for q in quotas}
        """Of all of them together."""
        self._on_call: list[Callable[[str], None]] = []

    def on_call(self, callback: Callable[[str], None]) -> None:
        """`callback(peer_id)` for every call and notification that is checked here."""
        self._on_call.append(callback)

    def serves(self, replica: Served | None) -> None:
        """The replica here from now on; None between two stages, and at a peer that serves none."""
        self._served = replica

    # ---- the gate ---------------------------------------------------------------------------

    def knows(self, method: str) -> bool:
        return method in METHODS

    def has_standing(self, machine: str) -> bool:
        return self._view.get(machine) is not None and self.is_admitted(machine)

    def check(self, envelope: Envelope) -> None:
        row = METHODS[envelope.method]
        self._check_caller(envelope, row)
        self._check_size(envelope, row)

    def enter(self, envelope: Envelope, body: Any) -> Any:
        row = METHODS[envelope.method]
        self.check(envelope)
        for callback in self._on_call:
            callback(envelope.remote)
        if row.quota is not None:
            self._count(envelope.remote, row.quota)
        decoded: Any = row.request_in(body)
        self._check_stage(decoded, envelope.remote, row)
        return decoded

    # ---- the caller -------------------------------------------------------------------------

    def is_admitted(self, peer_id: str) -> bool:
        """Whether a peer may take part. In a closed run its record has to show an invite."""
        if self._admission.is_open:
            return True
        machine = machine_of(peer_id)  # an invite admits all seats of a machine
        record = self._view.get(peer_id) or self._view.get(machine)
        try:
            self._admission.check(machine, record.credential if record is not None else b"")
        except ProtocolViolation:
            return False
        return True

    def _check_caller(self, envelope: Envelope, row: Method[Any, Any]) -> None:
        if row.caller is Caller.ANYONE:
            return
        if envelope.run_id != self._run_id:
            theirs = envelope.run_id[:8] or "none"
            raise WrongRun(f"this peer trains run {self._run_id[:8]}, not {theirs}")
        if row.caller is Caller.RUN:
            return
        if not self.is_admitted(envelope.remote):
            raise Refused("this run is closed, and you have shown no valid invite", closed=True)
        if row.caller in STATES_OF and row.caller is not Caller.REPLICA:
            if self._served is None:
                raise NotReady("this peer serves no stage")
            self._check_replica(envelope.remote, self._served.index, row.caller)

    def _check_replica(self, remote: str, stage: int, caller: Caller) -> None:
        if not is_replica_of(self._view.get(remote), stage, caller):
            raise NotReady(f"{remote[-8:]} is not known here as a {caller.value} ({stage})")

    def _count(self, remote: str, quota: Quota) -> None:
        now = asyncio.get_running_loop().time()
        known = self._takes_part(remote, now)
        if known and not quota.of_members:
            return
        is_within = self._limiters[quota].allows(remote, now)
        if not is_within or not (known or self._of_strangers[quota].take(now)):
            raise Busy("you ask too often", backlog_s=FIRST_PAUSE_S)

    def _takes_part(self, remote: str, now: float) -> bool:
        """In the run, as this peer sees it; of names that have told of themselves and fallen silent
        there may be many, and they are no flood any more."""
        view = self._view
        if view.get(remote) is None:
            return False
        if view.reputation.counts(remote):
            return True
        return view.is_live(remote, now) and view.takes_part(remote, now)

    # ---- what it says -----------------------------------------------------------------------

    def _check_size(self, envelope: Envelope, row: Method[Any, Any]) -> None:
        if envelope.body_bytes > row.body_bytes:
            raise ProtocolViolation(
                f"{envelope.method} with a body of {envelope.body_bytes} bytes; "
                f"at most {row.body_bytes}"
            )
        most = self._most_array_bytes(row.arrays)
        if most is not None and envelope.array_bytes > most:
            raise ProtocolViolation(
                f"{envelope.method} with arrays of {envelope.array_bytes} bytes; at most {most}"
            )

    def _most_array_bytes(self, arrays: Arrays) -> int | None:
        """None: what a message may have."""
        if arrays is Arrays.MICROBATCH:
            return None
        if arrays is Arrays.PROBE:
            return MAX_PROBE_BYTES
        if arrays is Arrays.NONE or self._served is None:
            return 0
        shard = self._served.largest_shard_bytes
        return shard if arrays is Arrays.SHARD else max(shard, SHARED_CALL_BYTES)

    def _check_stage(self, body: Any, remote: str, row: Method[Any, Any]) -> None:
        if row.caller is Caller.REPLICA:
            self._check_replica(remote, body.stage, row.caller)
        if row.callee is Callee.ANY:
            return
        served = self._served
        if served is None:
            raise NotReady("this peer serves no stage")
        if row.callee is Callee.REPLICA:
            return
        if body.stage != served.index or _last_shard(body) >= served.num_shards:
            raise NotReady(f"stage {body.stage} is not served here")
        if row.callee is Callee.SYNCED and not served.synced:
            raise NotReady("still joining")


def _bucket_of_strangers(quota: Quota) -> TokenBucket:
    calls_per_s, burst = (STRANGERS_AT_A_TIME * x for x in (quota.calls_per_s, quota.burst))
    return TokenBucket(calls_per_s, burst, burst, LONG_AGO)


def _last_shard(body: Any) -> int:
    """Of those that a body names; -1 where it names none."""
    shards: tuple[int, ...] = getattr(body, "shards", ())
    shard: int = getattr(body, "shard", -1)
    return max(shard, *shards) if shards else shard
