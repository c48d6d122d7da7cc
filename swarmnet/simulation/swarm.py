"""The production peers over a simulated network, on synthetic machines, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from swarmnet.simulation import churn
from swarmnet.simulation.accounts import Accounts
from swarmnet.simulation.churn import ChurnEvent
from swarmnet.simulation.clock import run
from swarmnet.simulation.event_log import EventLog
from swarmnet.simulation.faults import Faults
from swarmnet.simulation.invariants import InvariantBroken, InvariantMonitor
from swarmnet.simulation.network import SimulatedNetwork
from swarmnet.simulation.population import Population
from swarmnet.simulation.recovery_times import RecoveryTimes
from swarmnet.simulation.scenario import Result, Sample, Scenario
from swarmnet.swarm.settings import RunSettings
from swarmnet.transport.memory import MemoryHub

COLLECT_AT = (100_000, 50, 100)
"""Thresholds of the garbage collector, as of `gc.set_threshold`."""
RUN_ID = "simulated"


class _Errors(logging.Handler):
    """Takes every error that a peer logs for a bug: nothing else in a simulation logs errors."""

    def __init__(self, monitor: InvariantMonitor) -> None:
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
    """Runs a scenario to its end, until `stop` returns True, or until an invariant breaks
    (`Result.broken`). An error that a peer logs is a broken invariant too. `on_sample` is called
    with every point of the curves."""
    with _rare_collections():
        return run(Simulation(scenario, stop, on_sample).run(), seed=scenario.seed)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A large swarm is millions of objects that live long. Looking through all of them for cycles,
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
        """`stop` is called before every check; the run ends where it returns True."""
        self.scenario = scenario
        self._stop = stop
        self.network = SimulatedNetwork(
            scenario.rng("network"), loss=scenario.loss, is_paired=scenario.paired_links
        )
        self.hub = MemoryHub(network=self.network, copy=False)
        self._log = EventLog(self._now, keeps_lines=scenario.keep_log)
        self._recovery = RecoveryTimes(self._now)
        settings = _settings(scenario)
        self.monitor = InvariantMonitor(
            self._now,
            self._log.write,
            scenario.stages,
            scenario.sizes.num_shards,
            scenario.bounds,
            on_commit=self._recovery.committed,
            tokens_per_microbatch=scenario.sizes.tokens_per_microbatch,
            samples_per_microbatch=scenario.samples_per_microbatch,
            plan=settings.plan,
            keeps_books=scenario.keeps_books,
            is_cut=lambda: self.network.is_cut(self._now()),
            is_parted=lambda one, other: self.network.is_parted(one, other, self._now()),
        )
        rng = scenario.rng("swarm")
        self.population = Population(
            scenario, settings, self.hub, self.network, self.monitor, self._log, rng
        )
        self._faults = Faults(
            scenario,
            self.population,
            self.hub,
            self.network,
            self.monitor,
            self._recovery,
            self._log,
            rng,
        )
        self._accounts = Accounts(scenario, self.population, self.network, self.monitor, on_sample)
        self._calm_round: int | None = None
        """The newest round when no fault was open any more."""

    async def run(self) -> Result:
        """`play`, after which all peers are ended."""
        try:
            return await self.play()
        finally:
            await self.population.close()

    async def play(self) -> Result:
        """Runs to the end of the scenario, and leaves the peers as they are then."""
        self._loop = loop = asyncio.get_running_loop()
        scenario, monitor = self.scenario, self.monitor
        for i in range(scenario.peers):
            host = self.population.add_host()
            loop.call_at(scenario.start_s * i / scenario.peers, self.population.start, host)
        for event in self._events():
            loop.call_at(event.at_s, self._faults.apply, event)
        broken: str | None = None
        errors = _Errors(monitor)
        logging.getLogger("swarmnet").addHandler(errors)
        is_warm = False
        try:
            while loop.time() < scenario.until_s and not self._is_done() and not self._stop():
                await asyncio.sleep(scenario.check_s)
                self._accounts.look()
                if not is_warm and loop.time() >= scenario.warmup_s:
                    is_warm = True
                    self._accounts.end_warmup()
                monitor.look()
                self.population.check_lives()
            monitor.finish()
        except InvariantBroken as e:
            broken = str(e)
        finally:
            logging.getLogger("swarmnet").removeHandler(errors)
        return self._result(broken)

    def _events(self) -> list[ChurnEvent]:
        scenario = self.scenario
        if scenario.trace:
            return list(scenario.trace)
        until_s = min(scenario.until_s, scenario.churn_until_s)
        return churn.poisson(scenario.churn, until_s, scenario.rng("churn"), scenario.start_s)

    def _is_done(self) -> bool:
        """Every peer has made the rounds that it is to make."""
        members = self.monitor.members.values()
        goal = self.scenario.rounds
        if self.scenario.settled_rounds and self._now() >= self.scenario.churn_until_s:
            if self._calm_round is None and not self._faults.num_open:
                self._calm_round = max((m.peer.gossip.own.round for m in members), default=0)
            if self._calm_round is not None:
                goal = min(goal, self._calm_round + self.scenario.settled_rounds)
        return bool(members) and all(
            m.peer.replica is not None and m.peer.replica.synced and m.peer.replica.round >= goal
            for m in members
        )

    def _result(self, broken: str | None) -> Result:
        monitor, total, rates = self.monitor, self.population.total, self._accounts.rates()
        per_microbatch = self.scenario.samples_per_microbatch
        worst: dict[int, int] = {}
        for (r, _), lost in monitor.lost.items():
            worst[r] = max(worst.get(r, 0), lost)
        self._log.write("end", network=self.network.digest(), committed=monitor.num_committed)
        return Result(
            log_hash=self._log.digest,
            broken=broken,
            virtual_s=self._now(),
            rounds=max((m.peer.gossip.own.round for m in monitor.members.values()), default=0),
            samples=monitor.num_committed * per_microbatch,
            rerouted=total("rerouted"),
            retracted=total("retracted"),
            moved=total("moved"),
            settled_samples=monitor.num_settled * per_microbatch,
            samples_lost=sum(worst.values()) * per_microbatch,
            samples_lost_mean=monitor.lost_part * per_microbatch,
            reported_lost=total("samples_lost"),
            stages_restarted=total("stage_restarted"),
            shards_reset=total("shard_reset"),
            faults=dict(sorted(self._faults.counts.items())),
            recovery_s=self._recovery.seconds,
            longest_island_s=monitor.islands.longest_s,
            breakdown=self._accounts.breakdown.parts(),
            checks=monitor.num_checks,
            samples_over_time=tuple(self._accounts.curve),
            log=self._log.lines,
            **asdict(rates),
        )

    def _now(self) -> float:
        return self._loop.time()


def _settings(scenario: Scenario) -> RunSettings:
    return RunSettings(
        run_id=RUN_ID,
        num_stages=scenario.stages,
        global_batch=scenario.global_batch,
        samples_per_microbatch=scenario.samples_per_microbatch,
        rounds=scenario.rounds,
        grad_clip_norm=1.0 if scenario.clip else 0.0,
        replication=scenario.replication,
        sync_mode=scenario.sync_mode,
        local_steps=scenario.local_steps,
        fragments=scenario.fragments,
        sync_warmup_rounds=scenario.warmup_rounds,
    )
