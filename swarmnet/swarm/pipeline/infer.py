"""Forward passes without a gradient, for held-out losses and for `swarmnet generate`: `infer`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from swarmnet.causes import Failures
from swarmnet.errors import (
    Busy,
    DeadlineExceeded,
    NotReady,
    ProtocolViolation,
    Refused,
    Stale,
    SwarmnetError,
    TransportError,
)
from swarmnet.methods.microbatch import EVALUATE, INFER, LOGITS, InferReply, InferRequest
from swarmnet.ports import OTHER, LossResult
from swarmnet.protocol.backoff import FIRST_PAUSE_S, GROWTH
from swarmnet.protocol.moments import Deadline, Since
from swarmnet.protocol.pipeline.dispatching import DEPTH_GRACE_S, is_refused
from swarmnet.protocol.pipeline.origins import Origins
from swarmnet.protocol.timing import BULK_S, LAPSES
from swarmnet.swarm.pipeline.dispatcher import Dispatcher
from swarmnet.swarm.pipeline.step import check_tokens
from swarmnet.swarm.replica.serving import Serving
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message

Check = Callable[[Message[InferReply]], None]
"""Raises `ProtocolViolation` where a reply cannot be right."""

MAX_INFERRING = 64
"""Forward passes that wait for the device at a time, far fewer than all work that may."""


class InferService:
    """Serves `infer` for the stage of this peer."""

    def __init__(self, dispatcher: Dispatcher, limits: WaitLimits, serving: Serving) -> None:
        self._dispatcher = dispatcher
        self._limits = limits
        self._serving = serving
        self._num_waiting = 0
        self._origins = Origins(dispatcher.gossip.view)
        dispatcher.handle(INFER, self.on_infer)

    async def on_infer(self, request: Request[InferRequest]) -> Message[InferReply]:
        """Forward only, through this stage and the following ones."""
        infer = request.message.body
        replica = self._serving.of(infer.stage)
        if replica.measured.hangs(asyncio.get_running_loop().time()):
            raise NotReady("the device does not answer")
        if infer.stage and not self._origins.may_pass_on(request.remote, infer.stage):
            raise NotReady(f"{request.remote[-8:]} may not pass on to stage {infer.stage}")
        if infer.round >= 0:
            await replica.enter(infer.round, self._limits.enter_wait_s, leaves_nothing=True)
        inputs, targets = _arrays(infer, request.message.arrays)
        last = infer.stage == replica.stage.num_stages - 1
        wanted = targets if last else None
        if self._num_waiting >= MAX_INFERRING:
            raise Busy("too many forward passes wait here", backlog_s=FIRST_PAUSE_S)
        self._num_waiting += 1
        r = replica.round if infer.round < 0 else infer.round

        def check_round() -> None:
            if infer.round >= 0 and r != replica.round and not replica.takes(r):
                raise Stale(f"round {r} is not open here any more", round=replica.round)

        try:
            result = await replica.device.run(
                OTHER,
                lambda: replica.stage.evaluate(inputs, wanted, infer.documents, r),
                r,
                check_round,
            )
            check_round()  # else it may have seen the parameters of another round
        finally:
            self._num_waiting -= 1
        if isinstance(result, LossResult):
            return Message(InferReply(result.loss_sum, result.num_tokens))
        if last:
            return Message(InferReply(), (result,))
        onward = (result,) if targets is None else (result, targets)
        onward_infer = replace(infer, stage=infer.stage + 1)
        return await infer_through(self._dispatcher, onward_infer, onward, passes_on=True)


def _arrays(infer: InferRequest, arrays: tuple[Array, ...]) -> tuple[Array, Array | None]:
    """Inputs, and for a loss targets. Raises `ProtocolViolation` here, before anything is passed
    on."""
    if infer.mode == LOGITS:
        if len(arrays) != 1:
            raise ProtocolViolation("infer takes inputs alone for logits")
        return arrays[0], None
    if len(arrays) != 2:
        raise ProtocolViolation("infer takes inputs and targets for a loss")
    inputs, targets = arrays
    if not infer.stage and targets.shape[:1] != inputs.shape[:1]:
        raise ProtocolViolation("infer with targets of another number of samples than its inputs")
    return inputs, targets


def _check_form(infer: InferRequest, arrays: tuple[Array, ...], reply: Message[InferReply]) -> None:
    """A reply has what was asked for: a loss of these targets, or outputs for these inputs. Raises
    `ProtocolViolation`."""
    if infer.mode == EVALUATE:
        if reply.arrays:
            raise ProtocolViolation("a loss with arrays")
        check_tokens(reply.body, arrays[1])
    elif len(reply.arrays) != 1 or reply.arrays[0].shape[:1] != arrays[0].shape[:1]:
        raise ProtocolViolation("not the outputs of these inputs")


async def infer_through(
    dispatcher: Dispatcher,
    infer: InferRequest,
    arrays: tuple[Array, ...],
    check: Check | None = None,
    *,
    timeout_s: float = BULK_S,
    passes_on: bool = False,
    failures: Failures | None = None,
) -> Message[InferReply]:
    """Calls `infer` on some replica of its stage; tries others when one fails, takes longer than
    such passes do, or gives what cannot be (`check`: what is known of that beyond its form). Each
    further one has twice as long. Raises the last error; `Stale` at once when
    the round that it asks for is over, `Refused` where `dispatching.is_refused`.

    `passes_on`: it has come from another peer, which tries others when this one fails. Then few
    replicas are tried, each once, and none after one that refuses: else the number of calls behind
    one would grow with each stage. `failures`: takes why replicas have not done it, also where the
    caller does not wait for the end."""
    failures = Failures() if failures is None else failures
    loop, gossip = asyncio.get_running_loop(), dispatcher.gossip
    end = Deadline.after(loop.time(), timeout_s)
    error: SwarmnetError = NotReady(f"no replica of stage {infer.stage}")
    tried: list[str] = []
    refusers: set[str] = set()
    later_s = DEPTH_GRACE_S * (dispatcher.num_stages - 1 - infer.stage)
    num_late = 0
    while not end.is_over(loop.time()):
        router, began_at = dispatcher.router(infer.stage), loop.time()
        peer_id = router.pick_to_infer(began_at, exclude=tried)
        if passes_on and (len(tried) >= LAPSES or (peer_id is None and tried)):
            break
        if peer_id is None:
            tried = []
            await gossip.changed.wait(LOOK_AGAIN_S)
            continue
        try:
            usual_s = GROWTH**num_late * (router.infer_deadline_s() + later_s)
            timeout_s = min(usual_s, end.left_s(began_at))
            message = Message(infer, arrays)
            reply = await dispatcher.call(peer_id, INFER, message, timeout_s=timeout_s)
            _check_form(infer, arrays, reply)
            if check is not None:
                check(reply)
            router.inferred(peer_id, Since(began_at).s(loop.time()))
            failures.answered(peer_id)
            return reply
        except asyncio.CancelledError:
            if not failures:  # what was said before tells more
                failures.add(DeadlineExceeded("it was waited for to the end"), peer_id)
            raise
        except SwarmnetError as e:
            failures.add(e, peer_id)
            theirs = e.details.get("round") if isinstance(e, Stale) else None
            if isinstance(theirs, int) and theirs > infer.round:
                raise
            if isinstance(e, Refused):
                refusers.add(peer_id)
                if passes_on or is_refused(gossip.view, infer.stage, refusers, loop.time()):
                    raise
            if isinstance(e, TransportError):
                router.infer_failed(peer_id, loop.time())
                num_late += 1
            error = e
            tried.append(peer_id)
    raise error
