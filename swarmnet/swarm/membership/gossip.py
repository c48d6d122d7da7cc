"""The bus that others hold: every peer's signed record reaches every other peer.

Every `interval_s` a peer exchanges records with a random other one (`anti_entropy`). News that
cannot wait is pushed at once (`pushes`). A record is a heartbeat: its version grows at least every
`heartbeat_s` (`records`), more rarely in a large swarm (`protocol.membership.pace`). What happens
to a peer that falls silent is in `liveness`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from swarmnet.admission import OPEN, Admission
from swarmnet.methods.records import MAX_RECORD_BYTES
from swarmnet.protocol.membership.failure_detector import PROBE_TIMEOUT_S
from swarmnet.protocol.membership.pace import PUSH_FANOUT, GossipPace, GossipSettings, first_targets
from swarmnet.protocol.membership.records import MAX_ADDRESSES, Record, RoundCount
from swarmnet.protocol.membership.run_bounds import ANY_RUN, RunBounds
from swarmnet.protocol.membership.view import View
from swarmnet.swarm.membership.anti_entropy import RECONCILE_S, AntiEntropy
from swarmnet.swarm.membership.callers import CallerChecks, Served
from swarmnet.swarm.membership.liveness import Liveness
from swarmnet.swarm.membership.pushes import Pushes, UnreachedNotices
from swarmnet.swarm.membership.record_checks import Signer
from swarmnet.swarm.membership.records import KnownRecords, News, OwnRecord
from swarmnet.swarm.tasks import Tasks
from swarmnet.transport.base import Transport


@dataclass
class Gossip:
    """Keeps `view` equal to the views of all others, and makes the own record known.

    `own_record`, `records`, `pushes`, `liveness` and `unreached` are its parts. What most of the
    swarm code needs of them is here."""

    transport: Transport
    view: View
    signer: Signer
    record: InitVar[Record]
    """The own one, as it is at first."""
    rng: random.Random
    settings: GossipSettings = field(default_factory=GossipSettings)
    quiet: bool = False
    """An observer: listens, but makes no record of its own known."""
    admission: Admission = OPEN
    bounds: RunBounds = ANY_RUN
    """Of what a record can say in this run."""
    max_record_bytes: int = MAX_RECORD_BYTES
    """In this run; a longer record is refused."""

    def __post_init__(self, record: Record) -> None:
        transport, view, rng = self.transport, self.view, self.rng
        self._tasks = Tasks("gossip")
        self._pace = GossipPace(self.settings, view)
        self._news = News(self._pace)
        self.changed = self._news.changed
        """Notified when the view has changed, and whenever a part of this peer says so."""
        own = self.own_record = OwnRecord(
            record, transport, view, self.signer, self._pace, self._news, is_quiet=self.quiet
        )
        self.gate = CallerChecks(record.run_id, view, self.admission)
        transport.guard(self.gate)
        self.records = KnownRecords(
            own,
            transport,
            view,
            self.signer,
            self.admission,
            self.bounds,
            self.max_record_bytes,
            news=self._news,
            tasks=self._tasks,
        )
        self.pushes = Pushes(
            own,
            transport,
            view,
            records=self.records,
            pace=self._pace,
            rng=rng,
            delay_s=self.settings.push_delay_s,
        )
        self.unreached = UnreachedNotices(own.peer_id, transport, view, rng)
        self.liveness = Liveness(
            own,
            transport,
            view,
            pushes=self.pushes,
            unreached=self.unreached,
            gate=self.gate,
            changed=self.changed,
            tasks=self._tasks,
        )
        self.records.on_news(self.liveness.on_news)
        self.records.on_news(self.pushes.pass_on)
        self._exchange = AntiEntropy(
            own,
            transport,
            view,
            records=self.records,
            liveness=self.liveness,
            unreached=self.unreached,
            gate=self.gate,
            pace=self._pace,
            rng=rng,
        )
        if not self.admission.is_open:
            transport.on_connected(self.pushes.introduce)

    async def run(self) -> None:
        """Gossips until cancelled."""
        self.liveness.start()
        try:
            while True:
                await asyncio.sleep(self._pace.interval_s * self.rng.uniform(0.7, 1.3))
                self._tend()
                peer_id = self._exchange.partner()
                if peer_id is not None:
                    self._tasks.start(self._exchange.hear_from(peer_id, RECONCILE_S))
        finally:
            self.liveness.stop()
            self.pushes.close()
            self.records.close()
            self._news.close()
            await self._tasks.close()

    def _tend(self) -> None:
        """Heartbeat, the own addresses as they are now, and forgetting."""
        self._pace.adapt(len(self.view.counted(asyncio.get_running_loop().time())))
        if not self.quiet:
            self.tell_addresses()
        self.own_record.beat()
        self.own_record.seal_if_due()
        self.records.forget_old()
        self._news.tell()

    # ---- own record -------------------------------------------------------------------------

    @property
    def own(self) -> Record:
        return self.own_record.record

    def update(self, *, urgent: bool = False, **changes: Any) -> None:
        """Changes fields of the own record; it is published with the next exchange, or at once."""
        self.own_record.change(**changes)
        if urgent:
            self.pushes.soon()

    def update_count(self, count: RoundCount, *, urgent: bool = False) -> None:
        """Replaces this feeder's counters of one round. In a small swarm that is always urgent: one
        push reaches every peer, and no feeder launches what others have launched already."""
        self.own_record.change_count(count)
        if urgent or self.is_small:
            self.pushes.soon()

    def amend(self, **changes: Any) -> None:
        """Changes fields of the own record that are no news: they travel with the next change."""
        self.own_record.amend(**changes)

    def add_total(self, name: str, amount: int = 1) -> None:
        """Adds to one of the own record's totals."""
        self.own_record.add_total(name, amount)

    def set_totals(self, values: Mapping[str, int]) -> None:
        """Replaces these of the own record's totals."""
        self.own_record.set_totals(values)

    def worked(self, peer_id: str) -> None:
        """A peer was seen at work (see `protocol.membership.reputation`). Where it counts only now,
        all are told."""
        if self.view.delivered(peer_id):
            self._tell_vouches()

    def found_loss(self, peer_id: str) -> None:
        """As `worked`, of a trial pass."""
        if self.view.found_loss(peer_id):
            self._tell_vouches()

    def _tell_vouches(self) -> None:
        self.update(vouches=self.view.reputation.vouches(), urgent=True)
        self.changed.notify_all()

    def tell_addresses(self) -> None:
        """Puts those that the transport has now into the own record."""
        addresses = tuple(self.transport.addresses()[:MAX_ADDRESSES])
        if addresses != self.own.addresses:
            self.update(addresses=addresses, urgent=True)

    async def declare_join(self, peer_ids: Iterable[str], timeout_s: float, **changes: Any) -> None:
        """Before the own record changes so: returns when these peers know of it (see
        `AntiEntropy.declare_join`)."""
        await self._exchange.declare_join(peer_ids, timeout_s, **changes)

    # ---- the other peers --------------------------------------------------------------------

    @property
    def is_small(self) -> bool:
        """Whether a push reaches every peer."""
        return self._pace.is_small

    @property
    def spread_s(self) -> float:
        """About how long it takes until news that is not urgent is known everywhere."""
        return self._pace.spread_s

    async def reconcile(self, peer_id: str, timeout_s: float = RECONCILE_S) -> bool:
        """Exchanges records with one peer; False where that fails. Raises `WrongRun`."""
        return await self._exchange.reconcile(peer_id, timeout_s)

    async def exchange(self, peer_id: str, timeout_s: float = RECONCILE_S) -> None:
        """The same. Raises `SwarmnetError` where it fails."""
        await self._exchange.exchange(peer_id, timeout_s)

    async def catch_up(self) -> None:
        """Hears what was urgent in the last moments: in a large swarm from one of those peers that
        are told all of that. In a small one every peer is told."""
        told = first_targets(self.view, PUSH_FANOUT, asyncio.get_running_loop().time())
        if told and not self.is_small:
            await self._exchange.hear_from(self.rng.choice(told), PROBE_TIMEOUT_S)

    def serves(self, replica: Served | None) -> None:
        """What other replicas of its stage may ask of this one from now on; None: nothing."""
        self.gate.serves(replica)
