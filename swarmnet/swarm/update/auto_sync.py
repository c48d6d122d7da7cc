"""Mode `auto` at one replica: it measures, learns what was decided, and decides where it is its
turn.

The first of the feeders decides. See `protocol.update.auto_mode` for the rule and for why every
replica knows in time. A replica that still comes to know of a change too late has another idea than
the others of the parameters with which its round began: it fetches its stage again."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

from swarmnet.protocol.membership import assignment
from swarmnet.protocol.update.auto_mode import AHEAD_ROUNDS, Adviser, Chooser, merge, pace
from swarmnet.protocol.update.sync_modes import AUTO, Switch
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.update.averaging import Averaging, Behind
from swarmnet.swarm.update.exchange.pace import EXCHANGE_SMOOTHING
from swarmnet.swarm.update.replica import Replica

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
        now = asyncio.get_running_loop().time()
        heard = [
            s
            for r in self.gossip.view.live(now)
            for s in r.switches
            if s.round <= r.round + AHEAD_ROUNDS + 1
        ]
        switches = merge(plan.switches, heard)
        if switches == plan.switches:
            return
        new = [s for s in switches if s not in plan.switches]
        late = [s for s in new if s.round < replica.phase.newest_open]
        was_late = bool(late) and replica.synced
        replica.decided(switches)
        self.gossip.update(switches=switches, urgent=True)
        for s in new:
            log.info("%s", describe(s))
        if was_late:
            raise Behind(f"the mode changed in round {late[0].round}, unheard of here")

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
