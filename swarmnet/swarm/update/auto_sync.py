"""Mode `auto` at one replica: it measures, learns what was decided, and decides where it is its
turn.

The first of the feeders decides. See `protocol.update.auto_mode` for the rule and for why every
replica knows in time. A replica that still comes to know too late of a change has another idea than
the others of the parameters with which its round began. So have the two sides of a partition, which
have decided each for itself: what the side with the newest parameters knew holds, and the other one
fetches its stage again (`protocol.update.divergence.newest`)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

from swarmnet.protocol.membership import assignment
from swarmnet.protocol.sync_modes import AUTO, Switch
from swarmnet.protocol.update import divergence
from swarmnet.protocol.update.auto_mode import AHEAD_ROUNDS, Adviser, Chooser, merge, pace
from swarmnet.protocol.update.exchange_waits import EXCHANGE_SMOOTHING
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.update.averaging import Averaging, Behind

log = logging.getLogger("swarmnet.auto_sync")

KEPT_EXCHANGES = 4
"""The shortest of so many counts: a replica that is early in an exchange waits for the others,
too."""


@dataclass
class AutoSync:
    """Keeps `Replica.plan` as the swarm has decided it. Does nothing in other modes."""

    gossip: Gossip
    replica: Replica
    averaging: Averaging
    chooser: Chooser = field(default_factory=Chooser)
    adviser: Adviser = field(default_factory=Adviser)
    _exchanges: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_EXCHANGES))

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
            log.info("%s", describe(s))
        if is_behind:
            raise Behind("the mode of this round is another one, unheard of here")

    def _known(self) -> tuple[tuple[Switch, ...], bool]:
        """The changes that hold, and whether those of this replica did not."""
        plan, newest = self.replica.plan, self.replica.phase.newest_open
        is_synced, heard = self.replica.synced, self._heard()
        switches = merge(plan.switches, heard)
        if is_synced and (switches == plan.switches or plan.agrees(switches, newest)):
            return switches, False
        now = asyncio.get_running_loop().time()
        winner = divergence.newest(self.gossip.view.replicas(self.replica.index, now))
        if not is_synced:
            if winner is None:
                return switches, False
            return merge(winner.switches, (s for s in heard if s.round > winner.round)), False
        is_behind = winner is not None and not plan.agrees(winner.switches, newest)
        holding = winner.switches if winner is not None and is_behind else plan.switches
        return merge(holding, (s for s in heard if s.round > newest)), is_behind

    def _heard(self) -> list[Switch]:
        """What is known now of what others have decided, but for what nobody can decide yet."""
        return [
            s
            for r in self.gossip.view.live(asyncio.get_running_loop().time())
            for s in r.switches
            if s.round <= r.round + AHEAD_ROUNDS + 1
        ]

    def finish_round(self, round_index: int, open_s: float) -> None:
        """A round is over: publishes its times; decides, where it is this peer's turn."""
        plan, own = self.replica.plan, self.gossip.own
        if plan.mode != AUTO or not self.replica.synced or round_index == 0:
            return  # the first round has the swarm's beginning in it
        self._exchanges.append(self.averaging.pace.last_s)
        exchange_s = min(self._exchanges)
        if own.round_s:
            open_s = own.round_s + EXCHANGE_SMOOTHING * (open_s - own.round_s)
        self.gossip.update(round_s=open_s, exchange_s=exchange_s)
        now = asyncio.get_running_loop().time()
        view = self.gossip.view
        if assignment.feeders(view, now)[:1] != [own.peer_id]:
            self.chooser.votes = 0
            return
        round_s, exchange_s = pace(view.live(now))
        steps = self.adviser.steps(round_s, exchange_s)
        if steps:
            log.warning("%s", advice(steps, round_s, exchange_s))
        switch = self.chooser.decide(plan, self.replica.round, round_s, exchange_s)
        if switch is not None and switch.round < plan.rounds:
            self.replica.decided(merge(plan.switches, (switch,)))
            self.gossip.update(switches=self.replica.plan.switches, urgent=True)
            log.info("%s", describe(switch))


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
