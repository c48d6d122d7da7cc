"""Has replicas that nobody has seen at work yet show what they can do: find the loss of a
microbatch that has just come back, by a forward pass alone (`protocol.pipeline.trials`)."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

from swarmnet.errors import Busy, NotReady, Stale, SwarmnetError
from swarmnet.methods.microbatch import EVALUATE, INFER, InferRequest, StepReply, StepRequest
from swarmnet.plurals import counted
from swarmnet.protocol.pipeline.trials import SAMPLED_ROUNDS, Trials, agrees
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.tasks import Tasks
from swarmnet.wire import Array, Message

log = logging.getLogger("swarmnet.trials")


@dataclass(frozen=True, slots=True)
class _Sample:
    """A microbatch that came back from a stage."""

    step: StepRequest
    arrays: tuple[Array, ...]
    reply: StepReply


class TrialPasses:
    """Those of one caller, to all stages."""

    def __init__(self, gossip: Gossip, rng: random.Random) -> None:
        self._gossip = gossip
        self._rng = rng
        self._trials = Trials()
        self._samples: dict[int, dict[int, _Sample]] = {}
        """By stage, while it has newcomers, and by round: they may be a few rounds behind."""
        self._tasks = Tasks("trials")

    async def close(self) -> None:
        """Ends those that are under way."""
        await self._tasks.close()

    def came_back(self, step: StepRequest, arrays: tuple[Array, ...], reply: StepReply) -> None:
        """A microbatch came back from its stage with a loss, for which another replica may be
        asked."""
        now, view = asyncio.get_running_loop().time(), self._gossip.view
        if not view.has_newcomers(step.stage, now):
            self._samples.pop(step.stage, None)
            return
        samples = self._samples.setdefault(step.stage, {})
        samples[step.round] = _Sample(step, arrays, reply)
        for old in sorted(samples)[:-SAMPLED_ROUNDS]:
            del samples[old]
        on_trial = {r.peer_id: r.round for r in view.on_trial(step.stage, now)}
        ready = [p for p, r in on_trial.items() if r in samples]
        peer_id = self._trials.choose(ready, now, self._rng)
        if peer_id is not None:
            self._trials.begin(peer_id, list(on_trial))
            self._tasks.start(self._try(peer_id, samples[on_trial[peer_id]]))

    async def _try(self, peer_id: str, sample: _Sample) -> None:
        step, known = sample.step, sample.reply
        infer = InferRequest(step.stage, EVALUATE, step.round, step.documents)
        loop = asyncio.get_running_loop()
        try:
            reply = await self._gossip.liveness.call_while_live(
                peer_id,
                INFER,
                Message(infer, sample.arrays, is_background=True),
                timeout_s=ANSWER_S,
            )
            said = reply.body
            if agrees(said.loss_sum, said.num_tokens, known.loss_sum, known.num_tokens):
                self._gossip.found_loss(peer_id)
                return
            log.info(
                "stage %d: %s finds another loss than others (%.4g over %s, not %.4g over "
                "%d), and is not given microbatches yet",
                step.stage,
                peer_id[-8:],
                said.loss_sum,
                counted(said.num_tokens, "token"),
                known.loss_sum,
                known.num_tokens,
            )
            self._trials.failed(peer_id, loop.time())
        except (Busy, NotReady, Stale) as e:  # the next microbatch may find it ready
            log.debug("stage %d: %s is not tried now: %s", step.stage, peer_id[-8:], e)
            self._trials.refused(peer_id)
        except SwarmnetError as e:
            log.debug("stage %d: %s was tried in vain: %s", step.stage, peer_id[-8:], e)
            self._trials.failed(peer_id, loop.time())
        finally:
            self._trials.end(peer_id)
