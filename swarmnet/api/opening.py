"""How a program opens a run."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from swarmnet.api.answers import Answer
from swarmnet.api.given import NOTHING, DataLike, Given, SpecLike
from swarmnet.api.life import Life
from swarmnet.api.runs import AsyncRun, Run
from swarmnet.api.session import Session, local_session, peer_session, watching_session
from swarmnet.api.telling import Wishes, telling_session
from swarmnet.errors import SwarmnetError, UsageError
from swarmnet.observe.events import RoundFinished
from swarmnet.runtime.options import (
    LocalChoices,
    LocalPeerOptions,
    PeerChoices,
    TransportName,
    group_of,
)

if TYPE_CHECKING:
    from torch import nn

    from swarmnet.training.models.given_layers import Loss

log = logging.getLogger("swarmnet.api")
OnRound = Callable[[RoundFinished], object]
"""Called with each finished round."""


class Opening:
    """A run that is to be opened: `with` it for a `Run`, `async with` it for an `AsyncRun`; both
    stop the run at the end of the block. `open()` leaves that to `Run.stop`, or to the end of the
    program, for notebooks whose cells share a run. One of the three, once."""

    def __init__(
        self,
        session: Callable[[], AbstractAsyncContextManager[Session]],
        on_round: OnRound | None = None,
    ) -> None:
        self._session = session
        self._on_round = on_round
        self._life: Life | None = None

    def open(self) -> Run:
        """Opens it, and waits until it is. Raises `SwarmnetError` with the line that the command
        would print."""
        life, opened = self._begin()
        try:
            return self._followed(Run(life, opened.result()))
        except BaseException:
            with suppress(Exception):
                life.wait_end()
            raise

    def _begin(self) -> tuple[Life, Answer[Session]]:
        if self._life is not None:
            raise UsageError("it is open already, or was: call the function again")
        self._life = Life(self._session)
        return self._life, self._life.start()

    def _followed(self, run: Run) -> Run:
        if self._on_round is not None and self._life is not None:
            self._life.follow(functools.partial(_tell_rounds, run, self._on_round))
        return run

    def __enter__(self) -> Run:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._life is not None
        if error is None:
            self._life.wait_end()
            return
        with suppress(Exception):  # the first error is the one to tell
            self._life.wait_end()

    async def __aenter__(self) -> AsyncRun:
        life, opened = self._begin()
        try:
            session = await opened.on_loop()
            self._followed(Run(life, session))
            return AsyncRun(life, session)
        except BaseException:
            with suppress(Exception):
                await life.ended()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._life is not None
        if error is None:
            await self._life.ended()
            return
        with suppress(Exception):
            await self._life.ended()


def local(
    spec: SpecLike | None = None,
    peers: int = 4,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    data: DataLike | None = None,
    model: Iterable[nn.Module] | None = None,
    loss: Loss | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    on_round: OnRound | None = None,
    log_to: str = "",
    notify: str = "",
    invite: str = "",
    options: LocalPeerOptions | None = None,
) -> Opening:
    """A whole swarm on this machine, as `swarmnet local`: a process for each peer.

    Args:
        spec: the run; a small language model by default.
        peers: processes, at least one for each stage.
        rounds, seed: in place of the spec's.
        data: samples in place of `[data] paths`: tables with the run's `text_field` or
            `messages_field`, read once. With `model` also pairs of an input and a target.
        model: layers in place of `[model]`, first to last: a list of modules or an `nn.Sequential`,
            with float32 parameters that begin with the values that they have. Each takes what the
            one before gives; stages are cut between them. Of text, the first takes int32 tokens
            (samples, `sequence_length`), the last gives logits (samples, `sequence_length`,
            vocabulary). This machine's processes get them through a file that only they read.
        loss: of the last layer's outputs and the targets, summed over the batch. Cross-entropy by
            default, where targets are tokens or classes.
        state_dir: a folder that keeps the peers' checkpoints and logs: the same call goes on from
            them. A temporary one by default.
        on_round: called with each `RoundFinished`, in order, on a thread of its own: it may take
            its time, and ask or stop the run. When it raises, it is called no more, and whoever
            waits for the end of the run (the end of the block, `Run.stop`) is told the error.
        log_to: `tensorboard:FOLDER` draws the run there, by round.
        notify: an address (ntfy, or a webhook: Slack's, Discord's or your own) that gets a message
            when a stage is about to be lost, the run stands still, or is done.
        invite: to a closed run.
        options: what each peer is told of links and computing.
    """
    choices = LocalChoices(
        num_peers=peers,
        rounds=rounds,
        seed=seed,
        invite=invite,
        **group_of(options or LocalPeerOptions(), LocalPeerOptions),
    )
    kept = None if state_dir is None else Path(state_dir).absolute()
    session = functools.partial(local_session, spec, Given(data, model, loss), choices, kept)
    return _opening(session, on_round, log_to, notify)


def start(
    spec: SpecLike,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    data: DataLike | None = None,
    on_round: OnRound | None = None,
    log_to: str = "",
    notify: str = "",
    options: PeerChoices | None = None,
) -> Opening:
    """Starts a run that other machines join (`Run.address`), as `swarmnet peer --spec`: this
    machine's peer, in a process of its own.

    Args:
        spec, rounds, seed, data: as for `local`. Other machines have `data` where this peer gives
            it to them (`serve_data`), or from files of their own.
        on_round, log_to, notify: as for `local`.
        options: of this machine's peer; `spec` and `join` are left out.
    """
    choices = replace(_without_run(options), rounds=rounds, seed=seed)
    session = functools.partial(peer_session, spec, Given(data), choices)
    return _opening(session, on_round, log_to, notify)


def join(
    address: str | Sequence[str],
    *,
    on_round: OnRound | None = None,
    log_to: str = "",
    notify: str = "",
    options: PeerChoices | None = None,
) -> Opening:
    """Takes part in a run with this machine, as `swarmnet peer --join`: its peer is a process of
    its own.

    Args:
        address: of any peer of the run, or several.
        on_round, log_to, notify: as for `local`.
        options: of this machine's peer; `spec` and `join` are left out. Its `data`, `tokenizer`
            and `builder` name files of this machine: none is chosen by the network.
    """
    choices = replace(_without_run(options), join=_addresses(address))
    session = functools.partial(peer_session, None, NOTHING, choices)
    return _opening(session, on_round, log_to, notify)


def watch(
    address: str | Sequence[str],
    *,
    on_round: OnRound | None = None,
    log_to: str = "",
    notify: str = "",
    transport: TransportName = "auto",
    invite: str = "",
) -> Opening:
    """Looks at a run without taking part, as `swarmnet status`, `export` and `generate` do.

    Args:
        address: of any peer of the run, or several.
        on_round, log_to, notify: as for `local`.
        transport: what carries the bytes.
        invite: to a closed run, for texts and parameters.
    """
    session = functools.partial(watching_session, _addresses(address), transport, invite)
    return _opening(session, on_round, log_to, notify)


def _opening(
    session: Callable[[], AbstractAsyncContextManager[Session]],
    on_round: OnRound | None,
    log_to: str,
    notify: str,
) -> Opening:
    telling = functools.partial(telling_session, session, Wishes(log_to, notify))
    return Opening(telling, on_round)


def _tell_rounds(run: Run, on_round: OnRound) -> None:
    """Raises what `on_round` raises. That the run fails is told to others."""
    rounds = run.rounds()
    while True:
        try:
            done = next(rounds, None)
        except SwarmnetError:
            return
        if done is None:
            return
        try:
            on_round(done)
        except Exception:
            log.warning("on_round failed, and is called no more", exc_info=True)
            raise


def _addresses(address: str | Sequence[str]) -> tuple[str, ...]:
    found = (address,) if isinstance(address, str) else tuple(address)
    if not found:
        raise UsageError("give an address of a peer of the run")
    return found


def _without_run(options: PeerChoices | None) -> PeerChoices:
    """Raises `UsageError` where options say what arguments do."""
    if options is None:
        return PeerChoices()
    if options.spec is not None or options.join:
        raise UsageError("the run is an argument of its own: leave spec and join out of options")
    if options.rounds is not None or options.seed is not None:
        raise UsageError("rounds and seed are arguments of their own: leave them out of options")
    return options
