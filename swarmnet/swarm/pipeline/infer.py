"""Forward passes without a gradient, for held-out losses and for `swarmnet generate`: `infer`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from swarmnet.errors import Busy, NotReady, ProtocolViolation, Refused, Stale, SwarmnetError
from swarmnet.methods.microbatch import INFER, LOGITS, InferReply, InferRequest
from swarmnet.ports import OTHER, LossResult
from swarmnet.protocol.backoff import FIRST_PAUSE_S
from swarmnet.protocol.timing import BULK_S
from swarmnet.swarm.calls import serve
from swarmnet.swarm.pipeline.wiring import Wiring
from swarmnet.swarm.replica.replica import Replica
from swarmnet.swarm.settings import Limits
from swarmnet.swarm.timing import LOOK_AGAIN_S
from swarmnet.transport.base import Request
from swarmnet.wire import Array, Message

MAX_INFERRING = 64
"""Forward passes that wait for the device at a time, far fewer than all work that may."""


class InferService:
    """Serves `infer` for the stage of this peer."""

    def __init__(self, wiring: Wiring, limits: Limits, serving: Callable[[int], Replica]) -> None:
        """`serving(stage_index)` is the replica of that stage here, or raises `NotReady`."""
        self._wiring = wiring
        self._limits = limits
        self._serving = serving
        self._num_waiting = 0
        serve(wiring.transport, INFER, self.on_infer)
        wiring.local[INFER] = self.on_infer

    async def on_infer(self, request: Request[InferRequest]) -> Message[InferReply]:
        """Forward only, through this stage and the following ones."""
        infer = request.message.body
        replica = self._serving(infer.stage)
        if replica.measured.hangs(asyncio.get_running_loop().time()):
            raise NotReady("the device does not answer")
        if infer.round >= 0:
            await replica.enter(infer.round, self._limits.enter_wait_s)
        arrays = request.message.arrays
        inputs = arrays[0] if arrays else None
        if inputs is None or len(arrays) > 2:
            raise ProtocolViolation("infer takes inputs and, for a loss, targets")
        targets = arrays[1] if len(arrays) > 1 else None
        last = infer.stage == replica.stage.num_stages - 1
        wanted = None if infer.mode == LOGITS or not last else targets
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
        return await infer_through(self._wiring, replace(infer, stage=infer.stage + 1), onward)


async def infer_through(
    wiring: Wiring,
    infer: InferRequest,
    arrays: tuple[Array, ...],
    timeout_s: float = BULK_S,
) -> Message:
    """Calls `infer` on some replica of its stage; tries others when one fails. Raises the last
    error; `Stale` at once when the round that it asks for is over, `Refused` where
    `Wiring.is_refused`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    error: SwarmnetError = NotReady(f"no replica of stage {infer.stage}")
    tried: list[str] = []
    refusers: set[str] = set()
    while loop.time() < end:
        peer_id = wiring.router(infer.stage).pick_to_infer(loop.time(), exclude=tried)
        if peer_id is None:
            tried = []
            await wiring.gossip.changed.wait(LOOK_AGAIN_S)
            continue
        message = Message(infer, arrays)
        try:
            if peer_id == wiring.gossip.own.peer_id:
                reply = await wiring.call_self(INFER, message, lambda _: None)
            else:
                timeout_s = end - loop.time()
                reply = await wiring.gossip.liveness.call_while_live(
                    peer_id, INFER, message, timeout_s=timeout_s
                )
            return reply
        except SwarmnetError as e:
            theirs = e.details.get("round") if isinstance(e, Stale) else None
            if isinstance(theirs, int) and theirs > infer.round:
                raise
            if isinstance(e, Refused):
                refusers.add(peer_id)
                if wiring.is_refused(infer.stage, refusers):
                    raise
            error = e
            tried.append(peer_id)
    raise error
