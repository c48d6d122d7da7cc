"""The parts of a peer's gossip, one by one, over the memory transport."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from swarmnet.admission import OPEN, Admission
from swarmnet.methods.records import MAX_RECORD_BYTES
from swarmnet.protocol.membership.pace import GossipPace, GossipSettings
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.protocol.membership.run_bounds import ANY_RUN, RunBounds
from swarmnet.protocol.membership.view import View
from swarmnet.swarm.membership.anti_entropy import AntiEntropy
from swarmnet.swarm.membership.callers import CallerChecks
from swarmnet.swarm.membership.liveness import Liveness
from swarmnet.swarm.membership.pushes import Pushes, UnreachedNotices
from swarmnet.swarm.membership.records import KnownRecords, News, OwnRecord
from swarmnet.swarm.tasks import Tasks
from swarmnet.transport.memory import MemoryHub
from tests.swarm.harness import OpenSigner

RUN = "0123456789abcdef" * 2


def record(name: str, version: int = 0, **fields: Any) -> Record:
    return Record(name, RUN, 1, version, **{"state": ACTIVE, **fields})


def now() -> float:
    return asyncio.get_running_loop().time()


class Site:
    """One peer's parts, composed as `Gossip` does it, without its loop."""

    def __init__(
        self,
        hub: MemoryHub,
        name: str,
        *,
        is_quiet: bool = False,
        admission: Admission = OPEN,
        bounds: RunBounds = ANY_RUN,
        max_bytes: int = MAX_RECORD_BYTES,
        signer: OpenSigner | None = None,
        **fields: Any,
    ) -> None:
        self.transport = hub.transport(name)
        self.transport.set_run(RUN)
        self.view, rng, signer = View(name), random.Random(name), signer or OpenSigner()
        settings = GossipSettings()
        self.pace = GossipPace(settings, self.view)
        self.news = News(self.pace)
        self.own = OwnRecord(
            record(name, **fields),
            self.transport,
            self.view,
            signer,
            self.pace,
            self.news,
            is_quiet=is_quiet,
        )
        self.gate = CallerChecks(RUN, self.view, admission)
        self.transport.guard(self.gate)
        self.tasks = Tasks(name)
        self.records = KnownRecords(
            self.own,
            self.transport,
            self.view,
            signer,
            admission,
            bounds,
            max_bytes,
            news=self.news,
            tasks=self.tasks,
        )
        self.pushes = Pushes(
            self.own,
            self.transport,
            self.view,
            records=self.records,
            pace=self.pace,
            rng=rng,
            delay_s=settings.push_delay_s,
        )
        self.unreached = UnreachedNotices(name, self.transport, self.view, rng)
        self.liveness = Liveness(
            self.own,
            self.transport,
            self.view,
            pushes=self.pushes,
            unreached=self.unreached,
            gate=self.gate,
            changed=self.news.changed,
            tasks=self.tasks,
        )
        self.records.on_news(self.liveness.on_news)
        self.exchange = AntiEntropy(
            self.own,
            self.transport,
            self.view,
            records=self.records,
            liveness=self.liveness,
            unreached=self.unreached,
            gate=self.gate,
            pace=self.pace,
            rng=rng,
        )

    def knows(self, *others: Site) -> None:
        """This peer has the newest records of the others."""
        for other in others:
            self.records.take(other.own.seal())

    def sent(self, method: str) -> int:
        """Bytes of calls of a method."""
        return self.transport.traffic.sent_bytes.get(method, 0)


def acquainted(hub: MemoryHub, *names: str, **fields: Any) -> list[Site]:
    """Peers that all know each other; `fields` are those of their records."""
    sites = [Site(hub, name, **fields) for name in names]
    for site in sites:
        site.own.change()
        site.knows(*(other for other in sites if other is not site))
    return sites
