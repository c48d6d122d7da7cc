"""The production peers over a simulated network, on synthetic machines, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

from swarmnet.errors import SwarmnetError
from swarmnet.protocol.membership.records import ACTIVE, LEFT
from swarmnet.simulation import churn
from swarmnet.simulation.baselines import assigner, limits_for
from swarmnet.simulation.bound import Capacity, Integral, best_flow, max_flow, replica_rate
from swarmnet.simulation.breakdown import Breakdown
from swarmnet.simulation.churn import ChurnEvent
from swarmnet.simulation.clock import run
from swarmnet.simulation.device import InlineWorker, SyntheticDevice
from swarmnet.simulation.invariants import InvariantBroken, Member, Monitor
from swarmnet.simulation.local_steps import SyntheticLocalSteps
from swarmnet.simulation.network import Link, SimulatedNetwork, home_link
from swarmnet.simulation.scenario import Result, Sample, Scenario
from swarmnet.simulation.stage import SyntheticData, SyntheticOptimizer, SyntheticStage
from swarmnet.swarm.peer import Identity, Machine, Peer
from swarmnet.swarm.ports import BACKWARD, FORWARD, Optimizer, Stage, StepKey
from swarmnet.swarm.settings import RunSettings
from swarmnet.transport.memory import MemoryHub

BENCHMARK_SIGMA = 0.2
"""Of the logarithm: by how much machines misjudge their speed before they have served."""
FORWARD_PART = 1 / 3
"""Of a microbatch's device time."""
OTHER_S = 0.001
BOOTSTRAP_PEERS = 3
COLLECT_AT = (100_000, 50, 100)
"""Thresholds of the garbage collector, as of `gc.set_threshold`."""
SAMPLES_KEPT = 200
"""Points of the curves over time."""
CONTROL_METHODS = frozenset(
    (
        "gossip",
        "records",
        "ping",
        "unreached",
        "admit",
        "commit",
        "committed",
        "norm",
        "stage_norm",
        "spec",
    )
)
RUN_ID = "simulated"


class OpenSigner:
    """Signs nothing and believes everything: all peers live in one process."""

    def sign(self, data: bytes) -> bytes:
        return b""

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        return True


@dataclass
class Host:
    """A machine; it outlives the peers that run on it."""

    name: str
    speed: float
    link: Link
    benchmark_s: float
    """What its own benchmark finds, of the middle machine's seconds."""
    incarnation: int = 0
    life: asyncio.Task[None] | None = None
    frozen_until: float = 0.0


class _Errors(logging.Handler):
    """What a peer logs as an error is a bug: nobody else in the simulation makes any."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__(logging.ERROR)
        self._monitor = monitor

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._monitor.fail(f"{record.name}: {record.getMessage()}: {error!r}")


def simulate(
    scenario: Scenario,
    stop: Callable[[], bool] = lambda: False,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> Result:
    """Runs a scenario to its end, until `stop` says so, or until an invariant breaks
    (`Result.broken`). An error that a peer logs is a broken invariant too. `on_sample` hears of
    every point of the curves."""
    with _rare_collections():
        return run(Simulation(scenario, stop, on_sample).run(), seed=scenario.seed)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A large swarm is millions of objects that live long: looking through all of them for cycles,
    as often as Python does it, takes half of the time of an exchange."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECT_AT)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Simulation:
    """One run. To be used inside a virtual loop."""

    def __init__(
        self,
        scenario: Scenario,
        stop: Callable[[], bool] = lambda: False,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        self.scenario = scenario
        self._stop = stop
        self._on_sample = on_sample
        self.rng = self._rng("swarm")
        self.network = SimulatedNetwork(self._rng("network"), loss=scenario.loss)
        self.hub = MemoryHub(network=self.network, copy=False)
        self.hosts: dict[str, Host] = {}
        self.settings = RunSettings(
            run_id=RUN_ID,
            num_stages=scenario.stages,
            global_batch=scenario.global_batch,
            samples_per_microbatch=scenario.samples_per_microbatch,
            rounds=scenario.rounds,
            grad_clip_norm=1.0 if scenario.clip else 0.0,
            sync_mode=scenario.sync_mode,
            local_steps=scenario.local_steps,
            fragments=scenario.fragments,
            sync_warmup_rounds=scenario.warmup_rounds,
        )
        self.monitor = Monitor(
            self._now,
            self._log,
            scenario.stages,
            scenario.sizes.num_shards,
            scenario.bounds,
            on_commit=self._on_commit,
            tokens_per_microbatch=scenario.sizes.tokens_per_microbatch,
            samples_per_microbatch=scenario.samples_per_microbatch,
            plan=self.settings.plan,
            keeps_books=scenario.keeps_books,
            is_cut=lambda: self.network.is_cut(self._now()),
        )
        self._hash = blake2b(digest_size=16)
        self._lines: list[str] = []
        self._faults: dict[str, int] = {}
        self._num_hosts = 0
        self._gone: dict[str, int] = {}
        self._gone_bytes = [0, 0]
        self._peer_seconds = 0.0
        self._waiting: dict[StepKey, float] = {}
        self._recovery: dict[float, float] = {}
        self._bound, self._best = Integral(), Integral()
        self._curve: list[Sample] = []
        self._breakdown = Breakdown(self.network, scenario.global_batch)
        self._marks = [0.0, 0.0, 0.0, 0.0]
        self._mending = 0
        """Stalls, cuts and absences that have not ended."""
        self._calm_round: int | None = None
        """The newest round when nothing was broken any more."""

    # ---- the run ----------------------------------------------------------------------------

    async def run(self) -> Result:
        loop = asyncio.get_running_loop()
        self._loop = loop
        scenario = self.scenario
        for i in range(scenario.peers):
            loop.call_at(scenario.start_s * i / scenario.peers, self._start, self._new_host())
        for event in self._events():
            loop.call_at(event.at_s, self._happen, event)
        broken: str | None = None
        errors = _Errors(self.monitor)
        logging.getLogger("swarmnet").addHandler(errors)
        warm: tuple[int, float, float] | None = None
        try:
            while loop.time() < scenario.until_s and not self._done() and not self._stop():
                await asyncio.sleep(scenario.check_s)
                self._account()
                if warm is None and loop.time() >= scenario.warmup_s:
                    warm = (self.monitor.num_committed, self._bound.total, self._best.total)
                    warm_at = loop.time()
                    self._breakdown.clear()
                    self._clear_traffic()
                self.monitor.look()
                self._check_lives()
            self.monitor.finish()
        except InvariantBroken as e:
            broken = str(e)
        finally:
            logging.getLogger("swarmnet").removeHandler(errors)
        if warm is None:
            warm, warm_at = (0, 0.0, 0.0), 0.0
        result = self._result(broken, warm, warm_at)
        await self._close()
        return result

    def _events(self) -> list[ChurnEvent]:
        scenario = self.scenario
        if scenario.trace:
            return list(scenario.trace)
        until_s = min(scenario.until_s, scenario.churn_until_s)
        return churn.poisson(scenario.churn, until_s, self._rng("churn"), scenario.start_s)

    def _done(self) -> bool:
        """Every peer has come as far as it is to."""
        members = self.monitor.members.values()
        goal = self.scenario.rounds
        if self.scenario.settled_rounds and self._now() >= self.scenario.churn_until_s:
            if self._calm_round is None and not self._mending:
                self._calm_round = max((m.peer.gossip.own.round for m in members), default=0)
            if self._calm_round is not None:
                goal = min(goal, self._calm_round + self.scenario.settled_rounds)
        return bool(members) and all(
            m.peer.replica is not None and m.peer.replica.synced and m.peer.replica.round >= goal
            for m in members
        )

    def _check_lives(self) -> None:
        """A peer whose life ended by an error is a broken invariant too."""
        for name, host in self.hosts.items():
            life, member = host.life, self.monitor.members.get(name)
            if life is None or not life.done():
                continue
            host.life = None  # how it ended holds on to all that the peer was
            if member is None:
                continue
            error = None if life.cancelled() else life.exception()
            if error is not None and not isinstance(error, SwarmnetError):
                self.monitor.fail(f"{name} died of {type(error).__name__}: {error}")
            self._log("ended", peer=name, error=str(error or ""))
            self._lose(member)
            self.hub.kill(name)

    async def _close(self) -> None:
        lives = [h.life for h in self.hosts.values() if h.life is not None]
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)

    # ---- peers ------------------------------------------------------------------------------

    def _new_host(self) -> Host:
        scenario = self.scenario
        name = f"peer-{self._num_hosts:04d}"
        rng = self._rng(f"host {self._num_hosts}")
        self._num_hosts += 1
        half = scenario.speed_ratio**0.5
        speed = half ** rng.uniform(-1.0, 1.0)
        link = home_link(rng) if scenario.home_links else scenario.link
        benchmark_s = rng.lognormvariate(0.0, BENCHMARK_SIGMA) / speed
        host = self.hosts[name] = Host(name, speed, link, benchmark_s)
        self.network.add(name, link)
        return host

    def _start(self, host: Host) -> None:
        host.incarnation += 1
        host.frozen_until = 0.0
        incarnation = host.incarnation
        name, scenario, monitor = host.name, self.scenario, self.monitor

        def build(stage_index: int) -> tuple[Stage, Optimizer]:
            observer = monitor.observer(name, incarnation, stage_index)
            stage = SyntheticStage(stage_index, scenario.stages, scenario.sizes, observer)
            return stage, SyntheticOptimizer(stage_index, scenario.sizes, observer)

        def build_local(stage: Any, outer: Any) -> SyntheticLocalSteps | None:
            if not self.settings.plan.is_local:
                return None
            observer = monitor.observer(name, incarnation, stage.stage_index)
            tokens = scenario.sizes.tokens_per_microbatch
            return SyntheticLocalSteps(stage, outer, tokens, observer)

        peer = Peer(
            transport=self.hub.transport(name),
            signer=OpenSigner(),
            identity=Identity(RUN_ID, b"", 1000 + incarnation),
            settings=self.settings,
            machine=Machine(
                build,
                SyntheticDevice(self._costs(host)),
                InlineWorker(),
                SyntheticData(scenario.samples_per_microbatch),
                build_local=build_local,
                measure=lambda: host.benchmark_s * scenario.service_s,
            ),
            rng=self._rng(f"peer {name} {incarnation}"),
            limits=limits_for(scenario.assignment, scenario.rebalance_every_s, scenario.limits),
            assigner=assigner(scenario.assignment, scenario.rebalance_every_s),
            gossip_settings=scenario.gossip,
            on_loss=partial(monitor.reported, name),
        )
        ways = self._ways_in()
        known = self.rng.sample(ways, min(BOOTSTRAP_PEERS, len(ways)))
        peer.reconnecting.remembered = lambda: {n: self.hub.addresses_of(n) for n in known}
        monitor.members[name] = Member(peer)
        host.life = self._loop.create_task(peer.run(known))
        self._log("started", peer=name, known=known)

    def _ways_in(self) -> list[str]:
        """Whom a newcomer is told of: anybody; where some peers last, those whom one of the others
        sees."""
        members, now = self.monitor.members, self._now()
        others = sorted(set(members) - set(list(self.hosts)[: self.scenario.lasting]))
        serving = [
            name
            for name in others
            if members[name].frozen_until <= now and members[name].peer.gossip.own.is_replica
        ]
        if not self.scenario.lasting or not serving:
            return sorted(members)
        seen = members[self.rng.choice(serving)].peer.view.live(now)
        return sorted(r.peer_id for r in seen if r.is_replica)

    def _costs(self, host: Host) -> Callable[[str], float]:
        service_s = self.scenario.service_s / host.speed
        forward_s = FORWARD_PART * service_s
        last = self.scenario.stages - 1
        costs = {FORWARD: forward_s, BACKWARD: service_s - forward_s}

        def seconds(kind: str) -> float:
            stall_s = max(0.0, host.frozen_until - self._now())
            member = self.monitor.members.get(host.name)
            if kind == FORWARD and member and member.peer.gossip.own.stage == last:
                return stall_s + service_s
            return stall_s + costs.get(kind, OTHER_S)

        return seconds

    def _lose(self, member: Member) -> None:
        """The last look at a peer that is no more."""
        self.monitor.collect(member)
        own = member.peer.gossip.own
        for name, amount in own.totals.items():
            self._gone[name] = self._gone.get(name, 0) + amount
        control, all_bytes = _traffic(member.peer)
        self._gone_bytes[0] += control
        self._gone_bytes[1] += all_bytes
        del self.monitor.members[own.peer_id]

    # ---- what happens -----------------------------------------------------------------------

    def _happen(self, event: ChurnEvent) -> None:
        handler = {
            churn.JOIN: self._join,
            churn.LEAVE: self._leave,
            churn.CRASH: self._crash,
            churn.REJOIN: self._crash,
            churn.STALL: self._stall,
            churn.PARTITION: self._partition,
            churn.ONE_WAY: self._one_way,
        }[event.action]
        name = event.peer or self._victim(event.action)
        if event.action == churn.JOIN or name in self.monitor.members:
            handler(name, event)

    def _count(self, action: str, **facts: Any) -> None:
        self._faults[action] = self._faults.get(action, 0) + 1
        self._log(action, **facts)
        self.monitor.fault()

    def _victim(self, action: str) -> str:
        """Somebody whom the fault may hit; nobody where it would uncover a stage."""
        members = self.monitor.members
        serving: dict[int, list[str]] = {}
        for name, m in sorted(members.items()):
            own = m.peer.gossip.own
            replica = m.peer.replica
            sound = m.frozen_until <= self._now() and not m.leaving
            if own.state == ACTIVE and sound and replica is not None and replica.synced:
                serving.setdefault(own.stage, []).append(name)
        names = [n for n, m in sorted(members.items()) if not m.leaving]
        if self.scenario.keep_covered and action != churn.JOIN:
            last = {n for group in serving.values() if len(group) == 1 for n in group}
            names = [n for n in names if n not in last]
        if action in (churn.CRASH, churn.REJOIN, churn.LEAVE):
            lasting = list(self.hosts)[: self.scenario.lasting]
            names = [n for n in names if n not in lasting]
        return self.rng.choice(names) if names else ""

    def _join(self, name: str, event: ChurnEvent) -> None:
        if len(self.monitor.members) >= self.scenario.max_peers:
            return
        host = self._new_host()
        self._count(churn.JOIN, peer=host.name)
        self._start(host)

    def _leave(self, name: str, event: ChurnEvent) -> None:
        member = self.monitor.members[name]
        if member.leaving:
            return
        member.leaving = True
        self._count(churn.LEAVE, peer=name)
        member.peer.stop()

    def _crash(self, name: str, event: ChurnEvent) -> None:
        member = self.monitor.members[name]
        host = self.hosts[name]
        self._count(event.action, peer=name, stage=member.peer.gossip.own.stage)
        self._note_inside(member)
        self._lose(member)
        self.hub.kill(name)
        if host.life is not None:
            host.life.cancel()
        if event.action == churn.REJOIN:
            self._mending += 1
            self._loop.call_later(event.duration_s, self._come_back, host)

    def _come_back(self, host: Host) -> None:
        self._mending -= 1
        if host.name not in self.monitor.members:
            self._count("back", peer=host.name)
            self._start(host)

    def _note_inside(self, member: Member) -> None:
        replica = member.peer.replica
        if replica is None:
            return
        own = member.peer.gossip.own.peer_id
        ledger, r = replica.ledger, replica.round
        rounds = (r, r + 1)
        for entry in [e for q in rounds for e in (*ledger.running(q), *ledger.pending(q))]:
            if entry.feeder != own:
                self._waiting[entry.key] = self._now()

    def _on_commit(self, key: StepKey) -> None:
        crashed_at = self._waiting.pop(key, None)
        if crashed_at is not None:
            self._recovery[crashed_at] = self._now() - crashed_at

    def _stall(self, name: str, event: ChurnEvent) -> None:
        member, host = self.monitor.members[name], self.hosts[name]
        if host.frozen_until > self._now():
            return
        member.frozen_until = host.frozen_until = self._now() + event.duration_s
        self._count(churn.STALL, peer=name, duration=event.duration_s)
        self.hub.freeze(name)
        self._mending += 1
        self._loop.call_later(event.duration_s, self._thaw, name, member)

    def _thaw(self, name: str, member: Member) -> None:
        self._mending -= 1
        if self.monitor.members.get(name) is member:
            self.hub.thaw(name)
            self._count("thaw", peer=name)

    def _partition(self, name: str, event: ChurnEvent) -> None:
        """A random part of the swarm, the victim in it, is cut off from the rest."""
        others = sorted(n for n in self.monitor.members if n != name)
        side = {name, *self.rng.sample(others, self.rng.randint(0, len(others) // 2))}
        rest = [n for n in others if n not in side]
        pairs = [(a, b) for a in sorted(side) for b in rest]
        pairs += [(b, a) for a, b in pairs]
        self._cut(pairs, churn.PARTITION, sorted(side), event.duration_s)

    def _one_way(self, name: str, event: ChurnEvent) -> None:
        """What the victim says no longer reaches one other peer."""
        others = sorted(n for n in self.monitor.members if n != name)
        if others:
            other = self.rng.choice(others)
            self._cut([(name, other)], churn.ONE_WAY, [name, other], event.duration_s)

    def _cut(
        self, pairs: list[tuple[str, str]], action: str, side: list[str], duration_s: float
    ) -> None:
        for a, b in pairs:
            self.network.block(a, b, self._now() + duration_s)
        self._count(action, side=side, duration=duration_s)
        self._mending += 1

        def heal() -> None:
            self._mending -= 1
            self._count("healed", side=side)

        self._loop.call_later(duration_s, heal)

    # ---- accounts ---------------------------------------------------------------------------

    def _capacity(self, host: Host) -> Capacity:
        scenario = self.scenario
        rate = host.speed * scenario.samples_per_microbatch / scenario.service_s
        return Capacity(rate, host.link.up_bytes_per_s, host.link.down_bytes_per_s)

    def _account(self) -> None:
        """The bound from now on, and a point of the curves."""
        scenario, now = self.scenario, self._now()
        per_sample = scenario.sizes.activation_bytes / scenario.samples_per_microbatch
        alive, serving = [], []
        for name, m in self.monitor.members.items():
            capacity = self._capacity(self.hosts[name])
            rate = replica_rate(capacity, 1, 3, per_sample)
            self._breakdown.add(m.peer, m.frozen_until > now, rate, scenario.check_s, now)
            if m.frozen_until > now:
                continue
            alive.append(capacity)
            replica = m.peer.replica
            if replica is not None and replica.synced and m.peer.gossip.own.state != LEFT:
                serving.append((replica.index, capacity))
        self._peer_seconds += len(self.monitor.members) * scenario.check_s
        self._bound.set(max_flow(serving, scenario.stages, per_sample), now)
        self._best.set(best_flow(alive, scenario.stages, per_sample), now)
        at, committed, bound, best = self._marks
        newest = max((m.peer.gossip.own.round for m in self.monitor.members.values()), default=0)
        if now - at >= scenario.until_s / SAMPLES_KEPT:
            samples = self.monitor.num_committed * scenario.samples_per_microbatch
            self._curve.append(
                Sample(
                    now,
                    (samples - committed) / (now - at),
                    (self._bound.total - bound) / (now - at),
                    (self._best.total - best) / (now - at),
                    len(self.monitor.members),
                    newest,
                )
            )
            self._on_sample(self._curve[-1])
            self._marks = [now, samples, self._bound.total, self._best.total]

    def _clear_traffic(self) -> None:
        """Bytes are counted from now on: those of the warm-up are all the joins at once."""
        traffic = [_traffic(m.peer) for m in self.monitor.members.values()]
        self._gone_bytes = [-sum(c for c, _ in traffic), -sum(b for _, b in traffic)]
        self._peer_seconds = 0.0

    def _total(self, name: str) -> int:
        members = self.monitor.members.values()
        return self._gone.get(name, 0) + sum(m.peer.gossip.own.totals.get(name, 0) for m in members)

    def _result(self, broken: str | None, warm: tuple[int, float, float], warm_at: float) -> Result:
        scenario, monitor, now = self.scenario, self.monitor, self._now()
        span_s = max(1e-9, now - warm_at)
        per_microbatch = scenario.samples_per_microbatch
        traffic = [_traffic(m.peer) for m in monitor.members.values()]
        peer_seconds = max(1e-9, self._peer_seconds)
        worst: dict[int, int] = {}
        for (r, _), lost in monitor.lost.items():
            worst[r] = max(worst.get(r, 0), lost)
        self._log("end", network=self.network.digest(), committed=monitor.num_committed)
        return Result(
            log_hash=self._hash.hexdigest(),
            broken=broken,
            virtual_s=now,
            rounds=max((m.peer.gossip.own.round for m in monitor.members.values()), default=0),
            samples=monitor.num_committed * per_microbatch,
            samples_per_s=(monitor.num_committed - warm[0]) * per_microbatch / span_s,
            bound_per_s=(self._bound.total - warm[1]) / span_s,
            best_per_s=(self._best.total - warm[2]) / span_s,
            rerouted=self._total("rerouted"),
            retracted=self._total("retracted"),
            moved=self._total("moved"),
            settled_samples=monitor.num_settled * per_microbatch,
            samples_lost=sum(worst.values()) * per_microbatch,
            samples_lost_mean=monitor.lost_part * per_microbatch,
            reported_lost=self._total("samples_lost"),
            stages_restarted=self._total("stage_restarted"),
            shards_reset=self._total("shard_reset"),
            faults=dict(sorted(self._faults.items())),
            recovery_s=tuple(s for _, s in sorted(self._recovery.items())),
            control_bytes_per_peer_s=(self._gone_bytes[0] + sum(c for c, _ in traffic))
            / peer_seconds,
            bytes_per_peer_s=(self._gone_bytes[1] + sum(b for _, b in traffic)) / peer_seconds,
            longest_island_s=monitor.islands.longest_s,
            breakdown=self._breakdown.parts(),
            checks=monitor.num_checks,
            samples_over_time=tuple(self._curve),
            log=tuple(self._lines),
        )

    # ---- small parts ------------------------------------------------------------------------

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self.scenario.seed}|{name}")

    def _now(self) -> float:
        return self._loop.time()

    def _log(self, kind: str, **facts: Any) -> None:
        """One line of the event log; it decides the hash."""
        line = f"{self._now():.6f} {kind} " + " ".join(f"{k}={v}" for k, v in facts.items())
        self._hash.update(line.encode() + b"\n")
        if self.scenario.keep_log:
            self._lines.append(line)


def _traffic(peer: Peer) -> tuple[int, int]:
    """Bytes that a peer sent: control, and all."""
    sent = peer.transport.traffic.sent_bytes
    return sum(b for m, b in sent.items() if m in CONTROL_METHODS), sum(sent.values())


def shorter(scenario: Scenario, until_s: float) -> Scenario:
    """The same scenario, cut off."""
    return replace(scenario, until_s=until_s)
