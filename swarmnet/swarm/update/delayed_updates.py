"""`[sync] mode = "delayed"`: the exchange of round r runs beside the microbatches of round r + 1.
Mode `auto` changes between this and `zero` (`AutoSync`).

A round begins at once when the last one is drained: the gradient is copied, the parameters of the
exchange before are put in place, and the new exchange runs while microbatches come and go. What a
round learns from is therefore one update old (Ren et al. 2021, "ZeRO-Offload", section 5.2). It
costs one more gradient buffer a replica. After the last round both exchanges that are left are
made, so that a run of n rounds ends with n updates; so it is in mode `auto` when exchanges return
between the rounds.

The exchange of round r - 1 gives the parameters of round r + 1. Where it is done before round r is,
round r + 1 opens ahead of the last microbatches of round r (`protocol.update.replica_phase`). One
exchange is under way at a time: the next one begins when the results of this one are in place.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from swarmnet.protocol.membership import assignment
from swarmnet.protocol.membership.records import Record
from swarmnet.protocol.sync_modes import AUTO, Switch
from swarmnet.protocol.update import divergence
from swarmnet.protocol.update.auto_mode import (
    Adviser,
    Chooser,
    OwnTimes,
    heard,
    known_switches,
    merge,
    pace,
)
from swarmnet.protocol.update.exchange_waits import EXCHANGE_SMOOTHING
from swarmnet.protocol.update.members import before_round
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.update.exchange.calls import Contribution
from swarmnet.swarm.update.exchanges import Behind, Exchanges
from swarmnet.swarm.update.handover import Handover
from swarmnet.wire import Array

log = logging.getLogger("swarmnet.delayed_updates")
auto_log = logging.getLogger("swarmnet.auto_sync")

SETTLE_S = 2.0
"""How long an exchange waits for others to say what they hold in the round that it runs beside."""


@dataclass
class Gradient:
    """A copy of a round's gradient."""

    num_tokens: int = 0
    shards: tuple[Array, ...] = ()
    round: int = -1
    """The round, which is the number of its exchange too."""

    async def part(self, j: int) -> Contribution:
        return self.num_tokens, self.shards[j] if self.num_tokens else None


@dataclass
class UnderWay:
    """What a replica has not in its parameters yet, as long as it keeps touch with its stage."""

    gradient: Gradient = field(default_factory=Gradient)
    """Of the newest round that is over; empty where it has been averaged."""
    exchange: asyncio.Task[None] | None = None
    """The newest one that ran beside a round."""
    begun: int = -1
    """Its number."""
    arrived: int = -1
    """The newest exchange whose result was put aside here."""
    following: asyncio.Task[None] | None = None
    """The newest fetching of state of new shards: on a slow link it goes on beside the next rounds,
    and what comes so late still counts for more than nothing."""

    @property
    def is_exchanging(self) -> bool:
        """An exchange runs beside the present round."""
        return self.exchange is not None and not self.exchange.done()

    @property
    def is_following(self) -> bool:
        """State of new shards is being fetched."""
        return self.following is not None and not self.following.done()

    def closed(self, gradient: Gradient) -> None:
        """A round is over here."""
        self.gradient = gradient

    def begins(self, number: int, exchange: asyncio.Task[None]) -> None:
        """An exchange runs beside a round from now on."""
        self.begun, self.exchange = number, exchange

    def averaged(self, number: int) -> None:
        """An exchange is over: its result was put aside."""
        self.gradient, self.arrived = Gradient(), number

    def follows(self, fetching: asyncio.Task[None]) -> None:
        """State of new shards is fetched from now on."""
        self.following = fetching

    async def end(self) -> None:
        """Ends what is under way."""
        tasks = [t for t in (self.exchange, self.following) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class DelayedUpdates:
    """Implements `swarm.update.rounds.Updates`."""

    gossip: Gossip
    replica: Replica
    exchanges: Exchanges
    handover: Handover

    def __post_init__(self) -> None:
        self.auto = AutoSync(self.gossip, self.replica, self.exchanges)
        self._now = UnderWay()

    @property
    def is_owing(self) -> bool:
        """A gradient of this replica is not averaged yet."""
        now = self._now
        if not now.gradient.num_tokens:
            return False
        has_begun = now.begun == now.gradient.round
        return not (has_begun and self.exchanges.needs_nothing_of(now.begun))

    def is_ready_ahead(self, round_index: int) -> bool:
        if not self.replica.plan.is_delayed(round_index):
            return False
        current = self.exchanges.current
        return current == round_index or self._now.arrived == current

    def attend(self) -> None:
        self.auto.learn()
        if not self.replica.synced:
            return
        exchange = self._now.exchange
        if exchange is not None and exchange.done():
            exchange.result()  # what has failed is not noticed only when the round ends
        self._begin()
        self.repair()

    def repair(self) -> None:
        if not self.replica.synced:
            return
        if self._now.is_exchanging:
            self.exchanges.repair_beside()
        else:
            self.exchanges.ownership.repair(self.replica.round)

    def _begin(self) -> None:
        """The exchange that runs beside the present round, where one does."""
        current, now = self.exchanges.current, self._now
        if current == self.replica.round or now.begun == current:
            return
        now.begins(current, asyncio.get_running_loop().create_task(self._beside(now.gradient)))

    async def make(self, round_index: int, num_tokens: int) -> bool:
        self.auto.learn()
        is_late = self.exchanges.current < round_index
        is_beside = self.replica.plan.is_delayed(round_index)
        if is_late or is_beside:
            gradient = await self._copied(num_tokens)
        else:
            gradient = await self._present(num_tokens)
        tokens, shards = await self.handover.contribution(round_index, num_tokens, gradient.shards)
        gradient = Gradient(tokens, tuple(shards), round_index)
        self._begin()  # of a newcomer, which has not been in the round before
        if self._now.exchange is not None:
            await self._now.exchange
        self._now.closed(gradient)
        if is_beside:
            return True
        if is_late:
            await self.replica.transitions.flush()
            self.exchanges.finish_round(round_index - 1)
        await self._run(gradient)
        return True

    def finish_round(self, round_index: int) -> None:
        done, replica = self.exchanges.current - 1, self.replica
        replica.counted(self.exchanges.books.samples_in(done, replica.samples))
        self.exchanges.finish_round(done)
        self.auto.finish_round(round_index, self.replica.measured.open_s)

    async def close(self) -> None:
        before, self._now = self._now, UnderWay()
        await before.end()

    async def _beside(self, gradient: Gradient) -> None:
        """The exchange beside a round. It begins when every replica can know which one holds what:
        those of whom that may change with the round have said so by opening it. New owners fetch
        their state after it, when that stays as it is until the step of the next one; nobody waits
        for them. What others own is dropped before the next one begins."""
        r, ownership = self.replica.round, self.exchanges.ownership

        def is_known() -> bool:
            now = asyncio.get_running_loop().time()
            members = self.gossip.view.members(self.replica.index, now)
            behind = before_round(members, r)
            return all(m.round == r - 1 and ownership.is_settled(m) for m in behind)

        await self.gossip.changed.until(is_known, SETTLE_S)
        await self._run(gradient)
        coming = self.exchanges.current + 1
        if not self._now.is_following:
            self._now.follows(ownership.tasks.start(ownership.fetch_owned(coming)))
        await self.exchanges.drop_spare(coming)

    async def _run(self, gradient: Gradient) -> None:
        current = self.exchanges.current
        await self.exchanges.make(gradient.part)
        self._now.averaged(current)
        self.gossip.changed.notify_all()  # the next round may be opened now

    async def _present(self, num_tokens: int) -> Gradient:
        """The gradient where it lies, for an exchange that is over before the next round."""
        return Gradient(num_tokens, await self.replica.gradient() if num_tokens else ())

    async def _copied(self, num_tokens: int) -> Gradient:
        if not num_tokens:
            return Gradient()
        stage, shards = self.replica.stage, range(self.replica.num_shards)
        return Gradient(
            num_tokens,
            # At once: the round ends when it is done, and each way to the thread and back waits
            # for all other threads of the machine.
            await self.replica.worker.run(lambda: tuple(stage.copy_gradient(j) for j in shards)),
        )


@dataclass
class AutoSync:
    """Keeps `Replica.plan` as the swarm has decided it in mode `auto`: measures, learns what was
    decided, and decides where it is this peer's turn. Does nothing in other modes.

    The first of the feeders decides. See `protocol.update.auto_mode` for the rule and for why every
    replica knows in time. A replica that still comes to know too late of a change has another idea
    than the others of the parameters with which its round began. So have the two sides of a
    partition, which have decided each for itself: what the side with the newest parameters knew
    holds, and the other one fetches its stage again."""

    gossip: Gossip
    replica: Replica
    exchanges: Exchanges
    chooser: Chooser = field(default_factory=Chooser)
    adviser: Adviser = field(default_factory=Adviser)
    times: OwnTimes = field(default_factory=OwnTimes)

    def learn(self) -> None:
        """Takes over what others know. Raises `Behind` where it comes too late."""
        plan, replica = self.replica.plan, self.replica
        if plan.mode != AUTO:
            return
        switches, is_behind = self._known()
        new = [s for s in switches if s not in plan.switches]
        if switches != plan.switches:
            replica.decided(switches)
            self.gossip.update(switches=switches, urgent=True)
        for s in new:
            auto_log.info("%s", describe(s))
        if is_behind:
            raise Behind("the mode of this round is another one, unheard of here")

    def _known(self) -> tuple[tuple[Switch, ...], bool]:
        """The changes that hold, and whether those of this replica did not."""
        view, replica, now = self.gossip.view, self.replica, asyncio.get_running_loop().time()

        def holder() -> Record | None:
            known = view.known(replica.index, now)
            return divergence.newest(r for r in known if r.is_replica)

        return known_switches(
            replica.plan,
            replica.phase.newest_open,
            heard(view.live(now)),
            holder,
            is_synced=replica.synced,
        )

    def finish_round(self, round_index: int, open_s: float) -> None:
        """A round is over: publishes its times; decides, where it is this peer's turn."""
        plan, own = self.replica.plan, self.gossip.own
        if plan.mode != AUTO or not self.replica.synced or round_index == 0:
            return  # the first round has the swarm's beginning in it
        last_s = self.exchanges.pace.durations.last_s
        round_s, exchange_s = self.times.add(own.round_s, open_s, last_s, EXCHANGE_SMOOTHING)
        self.gossip.update(round_s=round_s, exchange_s=exchange_s)
        now = asyncio.get_running_loop().time()
        view = self.gossip.view
        if assignment.feeders(view, now)[:1] != [own.peer_id]:
            self.chooser.rest()
            return
        round_s, exchange_s = pace(view.live(now))
        steps = self.adviser.steps(round_s, exchange_s)
        if steps:
            auto_log.warning("%s", advice(steps, round_s, exchange_s))
        switch = self.chooser.decide(plan, self.replica.round, round_s, exchange_s)
        if switch is not None and switch.round < plan.rounds:
            self.replica.decided(merge(plan.switches, (switch,)))
            self.gossip.update(switches=self.replica.plan.switches, urgent=True)
            auto_log.info("%s", describe(switch))


def describe(switch: Switch) -> str:
    """A decision in one line."""
    return (
        f"sync: {switch.mode} from round {switch.round} on: an exchange takes "
        f"{switch.exchange_s:.2f} s, a round {switch.round_s:.2f} s"
    )


def advice(local_steps: int, round_s: float, exchange_s: float) -> str:
    """What to do where the network is too slow for this mode, in one line."""
    return (
        f"sync: an exchange takes {exchange_s:.2f} s, a round {round_s:.2f} s: the run waits for "
        f'its network; a run with [sync] mode = "local" and local_steps = {local_steps} would not, '
        "for more memory (`swarmnet plan`) and other updates (docs/convergence.md)"
    )
