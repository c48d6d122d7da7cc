"""A run that never was, for the page."""

from __future__ import annotations

from typing import Any

from peer.observe.dashboard.hub import Hub, Offers
from swarmnet.observe.monitor import RunMonitor
from swarmnet.protocol.membership.records import ACTIVE, HeldOut, Record
from swarmnet.spec import RunSpec, parse_spec
from tests.protocol.making import counted

GLOBAL_BATCH, TOKENS = 64, 128


def spec_of(num_stages: int, rounds: int = 100) -> RunSpec:
    return parse_spec(f"""
name = "a <b>bold</b> run"
[model]
kind = "custom"
builder = "x.py:build"
[optimizer]
learning_rate = 1e-3
rounds = {rounds}
[pipeline]
num_stages = {num_stages}
global_batch = {GLOBAL_BATCH}
microbatch = 8
""")


def replica(name: str, stage: int, round_index: int = 0, **values: Any) -> Record:
    defaults: dict[str, Any] = {"incarnation": 1, "version": 1, "state": ACTIVE, "stage": stage}
    defaults |= {"samples_per_s": 4.0, "digests": bytes(16), "holds": b"\x03", "agent": "test"}
    return Record(name, "run", **(defaults | {"round": round_index} | values))


def feeder(name: str, round_index: int, loss: float, **values: Any) -> Record:
    """A replica of stage 0 that has committed all of the round before."""
    counts = tuple(
        counted(r, GLOBAL_BATCH, GLOBAL_BATCH, True, TOKENS, TOKENS * loss)
        for r in range(max(0, round_index - 1), round_index)
    )
    return replica(name, 0, round_index, counts=counts, has_data=True, **values)


def held_out(round_index: int, loss: float) -> HeldOut:
    return HeldOut(round_index, loss, 0.0)


class Played:
    """A hub, a monitor and a clock."""

    def __init__(
        self, num_stages: int = 2, rounds: int = 100, offers: Offers | None = None
    ) -> None:
        self.spec = spec_of(num_stages, rounds)
        self.hub = Hub(self.spec, offers)
        self.monitor = RunMonitor(
            num_stages=num_stages, global_batch=GLOBAL_BATCH, samples_per_slot=1, rounds=rounds
        )
        self.now = 0.0

    def look(self, *records: Record, dead: tuple[str, ...] = ()) -> None:
        """A second later."""
        self.now += 1.0
        live = [r.peer_id for r in records if r.peer_id not in dead]
        events = self.monitor.observe(records, live, self.now, 1e9 + self.now)
        self.hub.tell(self.monitor.view_model(), events, self.now, 1e9 + self.now)
