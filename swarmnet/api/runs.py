"""An open run, for programs that wait and for those that `await`. Both do the same: what is asked
goes to the thread of its `Life`."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from swarmnet.api.history import History
from swarmnet.api.life import Life
from swarmnet.api.session import Session
from swarmnet.errors import UsageError
from swarmnet.observe.events import Event, RoundFinished
from swarmnet.observe.view_model import ViewModel
from swarmnet.runtime.options import DtypeName
from swarmnet.spec import RunSpec

T = TypeVar("T")
Prompt = str | Sequence[Mapping[str, str]]
"""A text to go on with, or messages (`role` and `content`), of which the last is answered."""
Work = Callable[[Session], Coroutine[Any, Any, T]]


class _Opened:
    """What both kinds know without asking."""

    def __init__(self, life: Life, session: Session) -> None:
        self._life = life
        self._session = session

    @property
    def spec(self) -> RunSpec:
        """The run, as all its peers have it."""
        return self._session.spec

    @property
    def address(self) -> str:
        """By which others join: `swarmnet peer --join ADDRESS`, `swarmnet.join(address)`."""
        return self._session.address

    def __repr__(self) -> str:
        state = "stopped" if self._life.is_over else self.address
        return f"<{type(self).__name__} of {self.spec.name!r}, {state}>"


class Run(_Opened):
    """An open run. Methods wait until what they do is done; Ctrl-C ends the wait, and the run goes
    on. They may be called on any thread."""

    def events(self) -> Iterator[Event]:
        """What happened since the run was opened, and then what happens, as it does. Ends when the
        run has done its rounds, or was stopped; each call begins anew, with the newest 100,000 at
        most. Raises `SwarmnetError` when no peer of this machine is left."""
        num_read = 0
        while True:
            new, num_read = self._after(num_read)
            if not new:
                return
            yield from new

    def rounds(self) -> Iterator[RoundFinished]:
        """Of the events, those that tell of a finished round."""
        return (event for event in self.events() if isinstance(event, RoundFinished))

    def status(self) -> ViewModel:
        """The run as it is now: round, loss, speed, stages, peers; when it was stopped, as it was
        last seen."""
        if self._life.is_over:
            return self._session.monitor.view_model()
        return self._call(lambda session: session.status(time.time()))

    def export(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: DtypeName = "",
        merge: bool = False,
        round: int | None = None,
        best: bool = False,
        weights: str | os.PathLike[str] | None = None,
    ) -> str:
        """Writes the model into a new folder, as `swarmnet export` does; returns what was done, in
        a line. Raises `UserError`.

        Args:
            dtype: of the weights; that of the model which the run began from, else fp32.
            merge: where adapters are trained, the whole model in place of them.
            round: of the rounds that were saved, this one; the newest by default.
            best: the saved round with the lowest held-out loss.
            weights: where this machine has the model that adapters are for.
        """
        out, options = _export_options(folder, dtype, merge, round, best, weights)
        return self._call(lambda session: session.export(out, options))

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stream: Literal[False] = False,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stream: Literal[True],
    ) -> Iterator[str]: ...

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stream: bool = False,
    ) -> str | Iterator[str]:
        """What the model writes, as `swarmnet generate` does, while it trains. The peers of the run
        see it. Options mean what they do in `transformers`; what is not given is as the model's own
        files say. Raises `SwarmnetError`.

        Args:
            stop: texts before which it ends.
            stream: the pieces of the text as they come, and not the text when it is whole. What is
                no longer read is no longer written.
        """
        options = _sampling_options(
            max_new_tokens, do_sample, temperature, top_k, top_p, repetition_penalty, seed
        )
        if stream:
            return self._stream(prompt, options, tuple(stop))
        return self._call(lambda session: session.generate(prompt, options, tuple(stop)))

    def stop(self) -> None:
        """Ends what this process has started, and waits until it is gone: peers hand over and leave
        first. Ctrl-C kills them. Raises `SwarmnetError` where none was left. Once is enough; what
        was seen of the run may be read afterwards."""
        self._life.wait_end()

    def _stream(
        self, prompt: Prompt, options: dict[str, Any], stops: tuple[str, ...]
    ) -> Iterator[str]:
        pieces: History[str] = History()
        writing = self._life.submit(lambda s: s.write(prompt, options, stops, pieces))

        def read() -> Iterator[str]:
            num_read = 0
            try:
                while True:
                    new, num_read = self._call(partial(_more, pieces, num_read))
                    if not new:
                        return
                    yield from new
            finally:
                self._life.give_up(writing)

        return read()

    def _after(self, num_read: int) -> tuple[list[Event], int]:
        history = self._session.history
        try:
            return self._call(lambda session: session.history.after(num_read))
        except UsageError:
            if not self._life.is_over:
                self._life.stop().wait()  # it is on its way
            return history.rest(num_read)

    def _call(self, work: Work[T]) -> T:
        answer = self._life.submit(work)
        try:
            return answer.result()
        except BaseException:
            self._life.give_up(answer)
            raise


class AsyncRun(_Opened):
    """An open run, for programs with an event loop of their own, of any kind. Methods do what those
    of `Run` do."""

    async def events(self) -> AsyncIterator[Event]:
        """As `Run.events`."""
        num_read = 0
        while True:
            new, num_read = await self._after(num_read)
            if not new:
                return
            for event in new:
                yield event

    async def rounds(self) -> AsyncIterator[RoundFinished]:
        """As `Run.rounds`."""
        async for event in self.events():
            if isinstance(event, RoundFinished):
                yield event

    async def status(self) -> ViewModel:
        """As `Run.status`."""
        if self._life.is_over:
            return self._session.monitor.view_model()
        return await self._call(lambda session: session.status(time.time()))

    async def export(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: DtypeName = "",
        merge: bool = False,
        round: int | None = None,
        best: bool = False,
        weights: str | os.PathLike[str] | None = None,
    ) -> str:
        """As `Run.export`."""
        out, options = _export_options(folder, dtype, merge, round, best, weights)
        return await self._call(lambda session: session.export(out, options))

    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stream: Literal[False] = False,
    ) -> str: ...

    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stream: Literal[True],
    ) -> AsyncIterator[str]: ...

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stream: bool = False,
    ) -> str | AsyncIterator[str]:
        """As `Run.generate`. With `stream` it is awaited for the iterator:
        `async for piece in await run.generate(prompt, stream=True)`."""
        options = _sampling_options(
            max_new_tokens, do_sample, temperature, top_k, top_p, repetition_penalty, seed
        )
        if stream:
            return self._stream(prompt, options, tuple(stop))
        return await self._call(lambda session: session.generate(prompt, options, tuple(stop)))

    async def stop(self) -> None:
        """As `Run.stop`; cancelled, it kills what is left."""
        await self._life.ended()

    def _stream(
        self, prompt: Prompt, options: dict[str, Any], stops: tuple[str, ...]
    ) -> AsyncIterator[str]:
        pieces: History[str] = History()
        writing = self._life.submit(lambda s: s.write(prompt, options, stops, pieces))

        async def read() -> AsyncIterator[str]:
            num_read = 0
            try:
                while True:
                    new, num_read = await self._call(partial(_more, pieces, num_read))
                    if not new:
                        return
                    for piece in new:
                        yield piece
            finally:
                self._life.give_up(writing)

        return read()

    async def _after(self, num_read: int) -> tuple[list[Event], int]:
        try:
            return await self._call(lambda session: session.history.after(num_read))
        except UsageError:
            with suppress(Exception):
                await self._life.stop().on_loop()
            return self._session.history.rest(num_read)

    async def _call(self, work: Work[T]) -> T:
        answer = self._life.submit(work)
        try:
            return await answer.on_loop()
        except BaseException:
            self._life.give_up(answer)
            raise


async def _more(pieces: History[str], num_read: int, _: Session) -> tuple[list[str], int]:
    return await pieces.after(num_read)


def _export_options(
    folder: str | os.PathLike[str],
    dtype: DtypeName,
    merge: bool,
    round_index: int | None,
    best: bool,
    weights: str | os.PathLike[str] | None,
) -> tuple[Path, dict[str, Any]]:
    if best and round_index is not None:
        raise UsageError("give round or best, not both")
    options = {
        "dtype": dtype,
        "merge": merge,
        "round": round_index,
        "best": best,
        "weights": None if weights is None else Path(weights),
    }
    return Path(folder), options


def _sampling_options(
    max_new_tokens: int | None,
    do_sample: bool | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float | None,
    seed: int | None,
) -> dict[str, Any]:
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
