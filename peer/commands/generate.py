"""`swarmnet generate`: the model of a live run goes on with a text, or answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from peer.console import put
from peer.options import LOOPBACK, TextOptions
from swarmnet.errors import UsageError
from swarmnet.runtime.observer import Observer
from swarmnet.runtime.texts import answer, continue_text, open_writer
from swarmnet.runtime.writing.chat import Message, chat_template
from swarmnet.runtime.writing.sampling import Sampling
from swarmnet.runtime.writing.writer import Text, Writer, longest_text

log = logging.getLogger("swarmnet.generate")

Put = Callable[[str], None]


def check_options(text: TextOptions) -> None:
    """Raises `UsageError`."""
    if not text.join:
        raise UsageError("give --join ADDR: any peer of the run")
    if text.serve is not None and (text.prompt is not None or text.chat or text.system):
        raise UsageError("--serve takes its prompts from programs: leave prompt and --chat out")
    if text.system and not text.chat:
        raise UsageError("--system goes with --chat")
    if text.serve is None and text.prompt is None and not text.chat:
        raise UsageError('give a text to go on with: swarmnet generate --join ADDR "Once"')


async def generate_text(text: TextOptions, options: Mapping[str, Any]) -> None:
    """Does what was asked for. `options`: of `Sampling`, None for what was not said. Raises
    `SwarmnetError`."""
    Sampling().with_options(options)  # wrong ones are known at once
    async with await Observer.join(
        text.join, transport=text.transport, invite=text.invite
    ) as observer:
        longest_text(observer.spec)
        writer = await open_writer(observer, text.tokenizer, exact=text.exact)
        sampling = writer.sampling.with_options(options)
        if text.serve is not None:
            await _serve(writer, sampling, observer.spec.name, text.serve)
        elif text.chat:
            await converse(writer, sampling, text.prompt, text.system, put=put)
        else:
            await _write(await continue_text(writer, text.prompt or "", sampling, _tell), put)


async def converse(
    writer: Writer, sampling: Sampling, prompt: str | None, system: str, *, put: Put
) -> None:
    """Answers the prompt; without one, each line that is typed until there is no more."""
    chat_template(writer.files)  # that there is none is known before anything is typed
    said: list[Message] = [{"role": "system", "content": system}] if system else []
    line: str | None = prompt if prompt is not None else await typed()
    while line is not None:
        said.append({"role": "user", "content": line})
        answered = await _write(await answer(writer, said, sampling, _tell), put)
        said.append({"role": "assistant", "content": answered})
        line = None if prompt is not None else await typed()


async def _write(text: Text, put: Put) -> str:
    pieces = []
    async for piece in text:
        put(piece)
        pieces.append(piece)
    put("\n")
    return "".join(pieces)


async def typed() -> str | None:
    """The next line that is not empty; None at the end."""
    while True:
        if sys.stdin.isatty():
            put("> ")
        line = (await _next_line()).removeprefix("\ufeff")  # of a file that is piped in
        if not line:
            return None
        if line.strip():
            return line.strip()


async def _next_line() -> str:
    """Of standard input; empty at its end. A thread that waits for a key cannot be interrupted:
    this one nobody waits for, and it holds no lock that the end of the process would wait for."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[bytes] = loop.create_future()

    def tell(found: bytes) -> None:
        if not line.done():
            line.set_result(found)

    def read() -> None:
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as typing:
            found = typing.readline()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=read, daemon=True).start()
    return (await line).decode(sys.stdin.encoding, "replace")


async def _serve(writer: Writer, sampling: Sampling, name: str, port: int) -> None:
    """Until it is stopped."""
    from peer.commands.openai_api import open_api
    from peer.observe.dashboard.server import listen

    listener = listen(LOOPBACK, port)
    async with AsyncExitStack() as stack:
        address = await open_api(stack, writer, sampling, name, listener)
        put(f"the run's model answers at {address}v1 (any key); Ctrl-C ends it\n")
        await asyncio.get_running_loop().create_future()


def _tell(line: str) -> None:
    log.warning("%s", line)
