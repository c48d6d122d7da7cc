"""Looking at a run, and asking its model, without taking part in it."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from swarmnet.causes import Failures
from swarmnet.errors import AddressError, NotNow, ProtocolViolation, SwarmnetError
from swarmnet.identity import Identity as Key
from swarmnet.methods.microbatch import LOGITS, InferReply, InferRequest
from swarmnet.parsing.frames import given
from swarmnet.protocol.membership.records import OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.admission import admission_of, admit
from swarmnet.runtime.compose import run_settings
from swarmnet.runtime.joining.find import Backoff, WaysIn, find_run, read_addresses
from swarmnet.runtime.joining.known_peers import KnownPeers
from swarmnet.runtime.net import KeySigner, open_net
from swarmnet.runtime.options import TransportName
from swarmnet.runtime.text_codec import text_codec_of
from swarmnet.runtime.writing.pieces import text_after
from swarmnet.spec import RunSpec
from swarmnet.stop_order import StopCheck
from swarmnet.swarm.initial.files import fetch_file
from swarmnet.swarm.lifecycle.stopping import Stopping
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.swarm.membership.reconnecting import Reconnecting
from swarmnet.swarm.pipeline.dispatcher import Dispatcher
from swarmnet.swarm.pipeline.infer import infer_through
from swarmnet.swarm.settings import WaitLimits
from swarmnet.swarm.tasks import Tasks
from swarmnet.transport.base import Transport
from swarmnet.wire import Array, Message

JOIN_ATTEMPTS_S = 30.0


class Observer:
    """Looks at a run without taking part in it: no record of its own, no stage."""

    def __init__(
        self, spec: RunSpec, gossip: Gossip, transport: Transport, ways: WaysIn | None = None
    ) -> None:
        self.spec = spec
        self.gossip = gossip
        self.view = gossip.view
        self.transport = transport
        self._tasks = Tasks("observer")
        self._dispatcher = Dispatcher(
            gossip,
            WaitLimits(),
            spec.pipeline.num_stages,
            spec.pipeline.microbatch,
            gossip.rng,
        )
        self._tasks.start(gossip.run())
        Stopping(gossip, StopCheck(spec.run_id, spec.security.owner))
        ways = ways or WaysIn(KnownPeers(Path()), ())
        missing = Reconnecting(gossip, random.Random(gossip.own.peer_id), ways.remembered)
        self._tasks.start(missing.run())
        self._tasks.start(ways.keep())

    @classmethod
    async def join(
        cls,
        addresses: Sequence[str],
        *,
        transport: TransportName = "auto",
        host: str = "127.0.0.1",
        patience_s: float | None = JOIN_ATTEMPTS_S,
        invite: str = "",
    ) -> Observer:
        """Finds a run through any of the addresses. Waits `patience_s` for files with them, and
        not for who does not answer; or waits for ever, for both. Looking needs no invite, not even
        where the run is closed; what costs its peers something (a sample of text, the parameters)
        does. Raises `AddressError` or `UserError`."""
        key = Key.generate()
        net = await open_net(transport, key, host=host, port=0, announce=())
        ways = WaysIn(KnownPeers(Path()), addresses)
        failures = Failures()
        try:
            async with asyncio.timeout(patience_s):
                if patience_s is not None:
                    await read_addresses(addresses, patience_s=patience_s)
                neighbour, spec = await find_run(
                    net.transport,
                    addresses,
                    ways.known,
                    patience_s=None if patience_s is None else 0.0,
                )
                net.transport.set_run(spec.run_id)
                shown = admit(spec, key.peer_id, invite, None).credential if invite else b""
                own = Record(
                    key.peer_id,
                    spec.run_id,
                    int(time.time() * 1000),
                    0,
                    state=OBSERVING,
                    credential=shown,
                )
                gossip = Gossip(
                    net.transport,
                    View(key.peer_id),
                    KeySigner(key),
                    own,
                    random.Random(key.peer_id),
                    quiet=not shown,
                    admission=admission_of(spec),
                    bounds=run_settings(spec).bounds,
                )
                await _hear(gossip, neighbour, patience_s, failures)
                return cls(spec, gossip, net.transport, ways)
        except TimeoutError:
            await net.transport.close()
            why = failures.told() or "try again"
            raise AddressError(f"no answer within {patience_s:.0f} s; {why}") from None
        except BaseException:
            await net.transport.close()
            raise

    async def wait_news(self, timeout_s: float) -> None:
        """Returns when something changed, or after `timeout_s`."""
        await self.gossip.changed.wait(timeout_s)

    async def generate(
        self,
        prompt: str,
        num_tokens: int,
        seconds: float = math.inf,
        failures: Failures | None = None,
    ) -> str:
        """Continues a prompt, token by token, through the swarm's own stages: until a token ends
        the text, or for so many tokens or seconds; empty where the tokenizer is not known.
        `failures`: takes why replicas do not write."""
        from swarmnet.training.end_tokens import end_tokens

        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        files = await self.fetch_files()
        codec = await asyncio.to_thread(text_codec_of, self.spec, files)
        if codec is None:
            return ""
        ends = await asyncio.to_thread(end_tokens, self.spec, files)  # it runs a template
        rng = random.Random(0)
        prefix = await asyncio.to_thread(codec.encode, prompt)
        tokens = list(prefix)
        for _ in range(num_tokens):
            window = tokens[-self.spec.sequence_length :]
            inputs = Array("int32", (1, len(window)), _int32(window))
            reply = await infer_through(
                self._dispatcher,
                InferRequest(stage=0, mode=LOGITS),
                (inputs,),
                functools.partial(check_logits, num_positions=len(window)),
                failures=failures,
            )
            token = sample_token(reply.arrays[0], rng, codec.num_tokens)
            if token in ends or loop.time() >= until:
                break
            tokens.append(token)
        return await asyncio.to_thread(text_after, codec, prefix, tokens[len(prefix) :])

    async def fetch_files(self) -> dict[str, bytes]:
        """The run's files, by name. Raises `SwarmnetError` where nobody gives one."""
        now = asyncio.get_running_loop().time()
        peers = [r.peer_id for r in self.view.live(now) if r.is_replica]
        found = {}
        for name, about in self.spec.files.items():
            if not peers:
                raise NotNow(f"the run's {name} is not to be had: no peer of the run serves now")
            failures, rng = Failures(), self.gossip.rng
            try:
                found[name] = await fetch_file(
                    self.transport, peers, about.sha256, about.size, rng, failures
                )
            except SwarmnetError:
                raise failures.as_error(f"the run's {name} is not to be had") from None
        return given(found)

    async def close(self) -> None:
        """Leaves; nobody notices."""
        await self._tasks.close()
        await self.transport.close()

    async def __aenter__(self) -> Observer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _hear(
    gossip: Gossip, neighbour: str, patience_s: float | None, failures: Failures
) -> None:
    """The records that a peer of the run has: without them nothing is known of it. `failures`:
    takes why it gives none. Raises `UserError` which says so."""
    backoff = Backoff(None if patience_s is None else patience_s / 2)
    while True:
        try:
            await gossip.exchange(neighbour)
            return gossip.view.named(neighbour)
        except SwarmnetError as e:
            failures.add(e, neighbour)
            failed = failures.as_error("nothing is known of the run's peers", AddressError)
            if not isinstance(failed, AddressError):
                raise failed from None
        await backoff.wait(str(failed))


TEMPERATURE = 0.7


def _int32(tokens: list[int]) -> bytes:
    return b"".join(t.to_bytes(4, "little") for t in tokens)


def check_logits(reply: Message[InferReply], num_positions: int) -> None:
    """Raises `ProtocolViolation` where these are no logits of so many tokens."""
    (logits,) = reply.arrays
    if logits.dtype != "float32" or logits.shape[:2] != (1, num_positions):
        raise ProtocolViolation("no logits")
    if len(logits.shape) != 3 or not all(map(math.isfinite, last_row(logits))):
        raise ProtocolViolation("logits of another shape, or not finite")
    if not logits.shape[2]:
        raise ProtocolViolation("logits of no tokens")


def last_row(logits: Array) -> tuple[float, ...]:
    """The last position's (float32 [1, S, V])."""
    vocab = logits.shape[-1]
    row = bytes(memoryview(logits.data).cast("B")[-4 * vocab :]) if vocab else b""
    return struct.unpack(f"<{vocab}f", row)


def sample_token(logits: Array, rng: random.Random, num_tokens: int) -> int:
    """One of the first `num_tokens` tokens, from the last position's logits (float32 [1, S, V])."""
    row = last_row(logits)[:num_tokens]
    top = max(row)
    weights = [math.exp((x - top) / TEMPERATURE) for x in row]
    return rng.choices(range(len(row)), weights)[0]
