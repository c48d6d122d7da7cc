"""A text that a run's model goes on with, as the one who asks for it sees it.

The tokens go to one replica of each stage, and from stage to stage through here: so all that a
stage has been given is known here. Where a replica dies, another one is given the same again, and
the text goes on as if nothing had happened. It has to have the parameters of the same round: a
second replica of each stage keeps them too, in reserve. Where no replica has them any more, the
text goes on with those of another round, and that is said.

What a stage makes goes to the next one in fp32 where all replicas of the text can do that, whatever
the run's codec is: so the text is that of the exported model, which knows of no codec."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmnet.causes import Failures, told
from swarmnet.errors import (
    Busy,
    NotNow,
    ProtocolViolation,
    RemoteError,
    SwarmnetError,
    TransportError,
    UserError,
)
from swarmnet.methods.microbatch import GENERATE, GenerateReply, GenerateRequest
from swarmnet.protocol.generation import (
    KEEP_S,
    LONGEST_S,
    ONE_ROUND_S,
    Found,
    gives_up,
    is_round_lost,
    mixes_rounds,
    newest_common,
    next_offer,
    nobody_serves,
)
from swarmnet.protocol.moments import NEVER, Deadline, Since
from swarmnet.protocol.timing import BULK_S, PATIENCE_S
from swarmnet.swarm.calls import notify
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.timing import LOOK_AGAIN_S, MAX_TRIES, RETRY_S
from swarmnet.wire import Array, Message, array_bytes

TOKEN_BYTES = 4
KEPT_REPLICAS = 2
"""Of each stage: one that works, and one in reserve."""
Tell = Callable[[str], None]
Check = Callable[[tuple[Array, ...]], object]


class RoundLost(SwarmnetError):
    """No replica of a stage has the parameters of the round any more."""


@dataclass(slots=True)
class _Stage:
    """What is known of one stage."""

    given: bytearray = field(default_factory=bytearray)
    """All inputs of this text, of shape (1, tokens, `shape`); activations as they were coded."""
    dtype: str = "int32"
    shape: tuple[int, ...] = ()
    peers: list[str] = field(default_factory=list)
    """Replicas that have a session: the first works, others are in reserve."""
    is_copied: bool = True

    def part(self, start: int, stop: int) -> Array:
        """The inputs of some tokens."""
        each = array_bytes(self.dtype, (1, 1, *self.shape))
        data = bytes(self.given[start * each : stop * each])
        return Array(self.dtype, (1, stop - start, *self.shape), data)

    def takes(self, array: Array) -> bool:
        """Whether these are inputs of the form that it has been given before."""
        form = (array.dtype, array.shape[2:])
        return len(array.shape) > 2 and (not self.given or form == (self.dtype, self.shape))

    def give(self, array: Array) -> None:
        """The next tokens'."""
        self.dtype = array.dtype
        self.shape = array.shape[2:]
        self.given += memoryview(array.data).cast("B")

    def mixes(self) -> None:
        """No replica keeps a copy of the text's round: it goes on with others."""
        self.is_copied = False


class RemoteText:
    """One text. Not for several tasks at a time."""

    def __init__(
        self,
        gossip: Gossip,
        num_stages: int,
        name: str,
        *,
        pass_tokens: int,
        max_tokens: int,
        check: Check,
        tell: Tell,
        exact: bool = False,
    ) -> None:
        """
        Args:
            name: of the session; no other open one of this peer may have it.
            pass_tokens: that a peer of the run takes at a time.
            max_tokens: of the text, with its prompt.
            check: raises `ProtocolViolation` where these are no logits, as `extend` returns them:
                another replica is asked then.
            tell: takes lines for people.
            exact: activations go from stage to stage in fp32 where there are replicas that can do
                that; else, and otherwise, as the run codes them.
        """
        self.round = -1
        """Of the parameters that make the text."""
        self._gossip = gossip
        self._name = name
        self._check = check
        self._tell = tell
        self._wants_exact = exact
        self._is_exact = False
        self._pass_tokens = pass_tokens
        self._max_tokens = max_tokens
        self._stages = [_Stage() for _ in range(num_stages)]
        self._asked: dict[tuple[int, str], None] = {}
        """Stages and replicas of them that may have a session."""
        self._tokens: list[int] = []
        self._done = 0
        """Tokens that have gone through all stages."""
        self._is_open = False
        self._kept = Since()
        self._told: set[str] = set()
        self._lost = [Failures() for _ in range(num_stages)]
        """By stage, why replicas that were asked do nothing for this text now."""
        self._until = Deadline(NEVER)

    async def extend(self, tokens: Sequence[int], num_logits: int = 0) -> tuple[Array, ...]:
        """Takes the next tokens; returns the logits after the last one: float32 (1, V), or the
        largest `num_logits` of them and, int32, whose they are. Raises `UserError` where the run
        refuses it, `NotNow` where it cannot do it at present."""
        if not self._tokens:
            self._until = Deadline.after(asyncio.get_running_loop().time(), LONGEST_S)
        self._tokens += tokens
        while True:
            try:
                if not self._is_open:
                    await self._open()
                return await self._catch_up(num_logits)
            except RoundLost as e:
                self._check_time(e)
                await self.close()
                lost = self.round
                await self._open()
                self._say(f"{e}: the text goes on with round {self.round} instead of {lost}")

    async def close(self) -> None:
        """Ends the sessions, those too that are being opened. Never raises."""
        self._is_open = False
        for k, peer_id in list(self._asked):
            self._end(k, peer_id)
        self._stages = [_Stage() for _ in self._stages]

    # ---- opening ----------------------------------------------------------------------------

    async def _open(self) -> None:
        """Finds replicas of all stages that have the parameters of one round."""
        loop = asyncio.get_running_loop()
        began = Since(loop.time())
        wanted, mixes = self._newest(), False
        self._is_exact = self._wants_exact
        while True:
            asking = (self._ask(k, wanted, mixes) for k in range(len(self._stages)))
            found = await asyncio.gather(*asking)
            if all(f.peers for f in found):
                break
            if coded := [k for k, f in enumerate(found) if f.is_coded and not f.peers]:
                self._is_exact = False
                self._say(
                    f"the peers of stage {coded[0]} have an older version: activations go from "
                    "stage to stage coded, and the text may not be that of the exported model"
                )
            for k, f in enumerate(found):
                for peer_id in f.peers:
                    self._end(k, peer_id)
            waited_s, offer = began.s(loop.time()), next_offer(found)
            gives_up(found, waited_s)
            wanted = self._newest() if offer is None else offer
            mixes = mixes_rounds(found, waited_s)
            if offer is None:
                await self._gossip.changed.wait(LOOK_AGAIN_S)
        self._stages = [_Stage(peers=f.peers) for f in found]
        self.round = wanted
        self._done = 0
        self._is_open = True
        self._kept.begin(loop.time())

    def _newest(self) -> int:
        now, view = asyncio.get_running_loop().time(), self._gossip.view
        stages = range(len(self._stages))
        return newest_common([{r.round for r in view.in_reach(k, now)} for k in stages])

    async def _ask(self, k: int, round_index: int, mixes: bool) -> Found:
        """Opens a session at one replica of a stage, and at another one in reserve."""
        now, view = asyncio.get_running_loop().time(), self._gossip.view
        paused = [r for r in view.records() if r.paused and view.is_live(r.peer_id, now)]
        replicas = self._replicas(k)
        # Where nobody is left, who was there a moment ago is the reason.
        failures = Failures() if replicas or paused else self._lost[k]
        found = Found(error=nobody_serves(k, len(paused)), failures=failures)
        for peer_id in replicas:
            self._asked[k, peer_id] = None
            try:
                reply = await self._call(
                    peer_id,
                    GenerateRequest(
                        k,
                        self._name,
                        opens=True,
                        round=round_index,
                        max_tokens=self._max_tokens,
                        mixes=mixes and not found.peers,
                        exact=self._is_exact,
                    ),
                )
                said = reply.body
            except SwarmnetError as e:
                self._failed(k, peer_id, e)
                self._end(k, peer_id)
                found.refused(e)
                continue
            if self._is_exact and not said.exact:
                found.only_coded()
                self._end(k, peer_id)
                continue
            if not said.is_copied and found.peers:  # it would be of no use
                self._end(k, peer_id)
                continue
            found.peers.append(peer_id)
            self._lost[k].answered(peer_id)
            if not said.is_copied:
                break
            if len(found.peers) == KEPT_REPLICAS:
                break
        return found

    def _replicas(self, k: int) -> list[str]:
        """Of a stage, in an order drawn anew."""
        now = asyncio.get_running_loop().time()
        peers = [r.peer_id for r in self._gossip.view.in_reach(k, now)]
        return self._gossip.rng.sample(peers, len(peers))

    # ---- going on ---------------------------------------------------------------------------

    async def _catch_up(self, num_logits: int) -> tuple[Array, ...]:
        """Sends the tokens through all stages that have not been through them yet."""
        made: tuple[Array, ...] = ()
        while self._done < len(self._tokens):
            part = self._tokens[self._done : self._done + self._pass_tokens]
            data = b"".join(t.to_bytes(TOKEN_BYTES, "little") for t in part)
            made = (Array("int32", (1, len(part)), data),)
            for k in range(len(self._stages)):
                made = await self._through(k, made[0], num_logits)
            self._done += len(part)
        return made

    async def _through(self, k: int, array: Array, num_logits: int) -> tuple[Array, ...]:
        """A pass through one stage, at whichever replica does it."""
        stage = self._stages[k]
        stage.give(array)
        failures = Failures()
        may_pass = False
        for _ in range(MAX_TRIES):
            try:
                return await self._pass(k, stage.peers[0], self._done, array, num_logits)
            except NotNow:
                raise
            except SwarmnetError as e:
                failures.add(e)
                may_pass |= type(e) is not RemoteError  # which says that the pass itself fails
                self._failed(k, stage.peers[0], e)
                self._end(k, stage.peers.pop(0))
                await self._replace(k, e)
        if not may_pass:
            raise UserError(f"stage {k} does not write: {failures.told()}")
        raise NotNow(f"stage {k} does not write now: {failures.told()}")

    async def _pass(
        self, k: int, peer_id: str, position: int, array: Array, num_logits: int
    ) -> tuple[Array, ...]:
        request = GenerateRequest(k, self._name, position, num_logits, exact=self._is_exact)
        while True:
            await self._keep()
            try:
                reply = await self._call(peer_id, request, (array,))
                break
            except Busy as e:
                self._check_time(e)
                await asyncio.sleep(max(RETRY_S, min(e.backlog_s, KEEP_S)))
        if not reply.body.is_copied:
            self._say(f"stage {k} keeps no copy of round {self.round}: this text mixes rounds")
            self._stages[k].mixes()
        made = reply.arrays
        if k == len(self._stages) - 1:
            self._check(made)
        elif len(made) != 1 or made[0].shape[:2] != array.shape[:2]:
            raise ProtocolViolation("what a stage made is not of the tokens that it got")
        elif not self._stages[k + 1].takes(made[0]):
            raise ProtocolViolation("what a stage made is not of the form of before")
        elif self._is_exact and made[0].dtype != "float32":
            raise ProtocolViolation("what a stage made is coded, and was asked for in fp32")
        return made

    async def _replace(self, k: int, why: SwarmnetError) -> None:
        """Gives another replica of a stage what the one that failed has been given. Raises
        `RoundLost` where none has the round, `NotNow` where time is over."""
        stage = self._stages[k]
        loop = asyncio.get_running_loop()
        until = Deadline.after(loop.time(), ONE_ROUND_S)
        while True:
            self._check_time(why)
            if not stage.peers:
                found = await self._ask(k, self.round, mixes=not stage.is_copied)
                if not found.peers:
                    why = found.error
                    if is_round_lost(found, self.round, until, loop.time()):
                        raise RoundLost(f"stage {k} has lost the replicas of this text")
                    await self._gossip.changed.wait(LOOK_AGAIN_S)
                    continue
                stage.peers.extend(found.peers)
            try:
                for start in range(0, self._done, self._pass_tokens):
                    stop = min(start + self._pass_tokens, self._done)
                    await self._pass(k, stage.peers[0], start, stage.part(start, stop), 1)
                return
            except NotNow:
                raise
            except SwarmnetError as e:
                why = e
                self._failed(k, stage.peers[0], e)
                self._end(k, stage.peers.pop(0))

    async def _keep(self) -> None:
        """Tells the replicas, now and then, that the text goes on: those in reserve, and those that
        have nothing to do while others are given what they lack."""
        if not self._kept.is_due(asyncio.get_running_loop().time(), KEEP_S):
            return
        kept = [(k, p) for k, stage in enumerate(self._stages) for p in stage.peers]
        asking = (self._call(p, GenerateRequest(k, self._name)) for k, p in kept)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        for (k, peer_id), answer in zip(kept, answers, strict=True):
            reserves = self._stages[k].peers[1:]  # that others fail is found out by a pass
            if isinstance(answer, SwarmnetError) and peer_id in reserves:
                self._stages[k].peers.remove(peer_id)

    # ---- calls ------------------------------------------------------------------------------

    async def _call(
        self, peer_id: str, request: GenerateRequest, arrays: tuple[Array, ...] = ()
    ) -> Message[GenerateReply]:
        message, timeout_s = Message(request, arrays), BULK_S if arrays else PATIENCE_S
        return await self._gossip.liveness.call_while_live(
            peer_id, GENERATE, message, timeout_s=timeout_s
        )

    def _end(self, k: int, peer_id: str) -> None:
        self._asked.pop((k, peer_id), None)
        request = GenerateRequest(k, self._name, ends=True)
        notify(self._gossip.transport, peer_id, GENERATE, Message(request))

    def _failed(self, k: int, peer_id: str, error: SwarmnetError) -> None:
        self._lost[k].add(error, peer_id)
        if isinstance(error, TransportError):
            self._gossip.liveness.probe(peer_id)

    def _check_time(self, why: SwarmnetError) -> None:
        if self._until.is_over(asyncio.get_running_loop().time()):
            raise NotNow(f"the text was not done in {LONGEST_S:.0f} s: {told(why)}")

    def _say(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)
