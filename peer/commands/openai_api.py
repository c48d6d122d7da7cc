"""`swarmnet generate --serve`: completions and chats as the OpenAI API has them, for programs on
this machine.

Only requests that name this machine are answered, and only those with a body of JSON: so a page
elsewhere cannot have a browser ask."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from peer.observe.dashboard.app import LOCAL_NAMES
from peer.observe.dashboard.server import serving
from swarmnet.errors import Busy, NotNow, SwarmnetError, UserError
from swarmnet.protocol.generation import MAX_SESSIONS_EACH
from swarmnet.runtime.writing.chat import chat_prompt
from swarmnet.runtime.writing.sampling import Sampling
from swarmnet.runtime.writing.writer import Text, Writer

MAX_BODY_BYTES = 1 << 20
MAX_WAITING = 32
"""Requests, those that are being answered included."""
MAX_MESSAGES = 1024
GONE = 499
"""Status of an answer that nobody waits for any more."""

T = TypeVar("T")
Answer = Callable[[Request, bytes], Awaitable[Response]]
Stop = str | list[str] | None


class _Options(BaseModel):
    """Of both kinds of requests; what is not here is passed over."""

    model: str = ""
    temperature: Annotated[float | None, Field(ge=0.0, le=100.0)] = None
    """0: the likeliest token."""
    top_p: Annotated[float | None, Field(gt=0.0, le=1.0)] = None
    seed: Annotated[int | None, Field(ge=0)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False, 0] | None = None
    echo: Literal[False] | None = None
    do_sample: bool | None = None
    """As `transformers` has it, like the next two."""
    top_k: Annotated[int | None, Field(ge=0)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0.0, le=100.0)] = None

    def sampling(self, usual: Sampling) -> Sampling:
        """Raises `UserError`."""
        options = {
            "top_p": self.top_p,
            "seed": self.seed,
            "max_new_tokens": self.max_completion_tokens or self.max_tokens,
            "do_sample": self.do_sample,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
        }
        if self.temperature == 0:
            options["do_sample"] = False
        else:
            options["temperature"] = self.temperature
        return usual.with_options(options)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def wants_usage(self) -> bool:
        """At the end of a stream."""
        return bool((self.stream_options or {}).get("include_usage"))


class CompletionRequest(_Options):
    prompt: str | list[int] | list[str]


class ContentPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    role: Annotated[str, Field(max_length=64)]
    content: str | list[ContentPart] | None = None

    def said(self) -> dict[str, str]:
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content
        return {"role": self.role, "content": text or ""}


class ChatRequest(_Options):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What answers look like."""

    kind: str
    """Of a whole answer."""
    piece_kind: str
    prefix: str
    """Of their ids."""
    is_chat: bool

    def choice(self, text: str, reason: str | None, *, is_piece: bool) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            key = "delta" if is_piece else "message"
            said = {key: {"role": "assistant", "content": text}}
        return {"index": 0, "finish_reason": reason, "logprobs": None, **said}


COMPLETION = _Shape("text_completion", "text_completion", "cmpl", False)
CHAT = _Shape("chat.completion", "chat.completion.chunk", "chatcmpl", True)


async def open_api(
    stack: AsyncExitStack, writer: Writer, sampling: Sampling, name: str, listener: socket.socket
) -> str:
    """Serves the API until the stack ends; returns its address. The other arguments: of `Api`."""
    api = Api(writer, sampling, name)
    address = await stack.enter_async_context(serving(api.app(), listener))
    stack.callback(api.close)  # before the server ends: it would cut texts off, with a traceback
    return address


class Api:
    """What answers programs. To be made on the event loop that serves it."""

    def __init__(self, writer: Writer, sampling: Sampling, name: str) -> None:
        """`sampling`: where a request says nothing. `name`: of the model."""
        self._writer, self._sampling, self._name = writer, sampling, name
        self._turn = asyncio.Semaphore(MAX_SESSIONS_EACH)
        self._num_waiting = 0
        self._closed = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Ends the texts that are being written; those who wait for them are told. Idempotent."""
        if not self._closed.done():
            self._closed.set_result(None)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._guarded(self._completion), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES, www_redirect=False)
        return Starlette(routes=routes, middleware=[hosts])

    async def _models(self, request: Request) -> Response:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "swarmnet"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _completion(self, request: Request, body: bytes) -> Response:
        asked = CompletionRequest.model_validate_json(body)
        prompt = asked.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            encode = self._writer.codec.encode
            tokens = await asyncio.to_thread(encode, prompt, adds_special=True)
        else:
            tokens = [t for t in prompt if isinstance(t, int) and t >= 0]
            if len(tokens) != len(prompt):
                raise UserError("prompt: one text, or the tokens of one")
        return await self._answer(request, asked, tokens, COMPLETION)

    async def _chat(self, request: Request, body: bytes) -> Response:
        asked = ChatRequest.model_validate_json(body)
        tokens = await asyncio.to_thread(self._tokens_of, [m.said() for m in asked.messages])
        return await self._answer(request, asked, tokens, CHAT)

    def _tokens_of(self, messages: list[dict[str, str]]) -> list[int]:
        """Beside the event loop: a template may take seconds, and so may a long text."""
        return self._writer.codec.encode(chat_prompt(self._writer.files, messages))

    async def _answer(
        self, request: Request, asked: _Options, prompt: list[int], shape: _Shape
    ) -> Response:
        sampling = asked.sampling(self._sampling)
        text = self._writer.text(prompt, sampling, stops=asked.stops)
        about = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._name,
        }
        if asked.stream:
            stream = self._stream(text, about, shape, asked.wants_usage)
            return StreamingResponse(stream, media_type="text/event-stream")
        gone = asyncio.ensure_future(_gone(request))
        try:
            said = await _before(gone, ClientDisconnect(), self._whole(text))
        finally:
            gone.cancel()
        choice = shape.choice(said, text.finish_reason, is_piece=False)
        return JSONResponse(
            {**about, "object": shape.kind, "choices": [choice], "usage": _usage(text)}
        )

    async def _whole(self, text: Text) -> str:
        return "".join([piece async for piece in self._pieces(text)])

    async def _pieces(self, text: Text) -> AsyncIterator[str]:
        async with self._turn:
            async for piece in text:
                yield piece

    async def _unless_closed(self, step: Coroutine[Any, Any, T]) -> T:
        return await _before(self._closed, NotNow("this API is being closed; try again"), step)

    async def _stream(
        self, text: Text, about: dict[str, Any], shape: _Shape, wants_usage: bool
    ) -> AsyncIterator[bytes]:
        about = {**about, "object": shape.piece_kind}
        self._num_waiting += 1
        pieces = self._pieces(text)
        try:
            while (piece := await self._unless_closed(_next(pieces))) is not None:
                choice = shape.choice(piece, None, is_piece=True)
                yield _event({**about, "choices": [choice]})
        except SwarmnetError as e:
            yield _event(_error(e))
            return
        finally:
            self._num_waiting -= 1
        choice = shape.choice("", text.finish_reason, is_piece=True)
        yield _event({**about, "choices": [choice]})
        if wants_usage:
            yield _event({**about, "choices": [], "usage": _usage(text)})
        yield b"data: [DONE]\n\n"

    def _guarded(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def read(request: Request) -> Response:
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    return JSONResponse(_said(f"more than {MAX_BODY_BYTES} bytes"), 413)
            return await answer(request, bytes(body))

        async def guarded(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip()
            if kind != "application/json":
                return JSONResponse(_said("content-type: application/json, please"), 415)
            if self._num_waiting >= MAX_WAITING:
                return JSONResponse(_said("too many requests wait here"), 429)
            self._num_waiting += 1
            try:
                return await self._unless_closed(read(request))
            except ClientDisconnect:
                return Response(status_code=GONE)
            except ValidationError as e:
                first = e.errors()[0]
                where = ".".join(str(part) for part in first["loc"][:4])
                return JSONResponse(_said(f"{where}: {first['msg']}"), 400)
            except UserError as e:
                return JSONResponse(_error(e), 400)
            except SwarmnetError as e:
                return JSONResponse(_error(e), 429 if isinstance(e, Busy) else 503)
            finally:
                self._num_waiting -= 1

        return guarded


async def _before(end: asyncio.Future[Any], error: Exception, step: Coroutine[Any, Any, T]) -> T:
    """What comes of a step. Where `end` comes before it, the step is cancelled and the error is
    raised."""
    task = asyncio.ensure_future(step)
    try:
        await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise error
        return task.result()
    finally:
        task.cancel()


async def _next(pieces: AsyncIterator[str]) -> str | None:
    """None at the end."""
    return await anext(pieces, None)


async def _gone(request: Request) -> None:
    """Until the program that asked is gone. Its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _usage(text: Text) -> dict[str, int]:
    prompt, new = text.num_prompt_tokens, text.num_new_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(values: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(values)}\n\n".encode()


def _error(error: SwarmnetError) -> dict[str, Any]:
    line = " ".join(str(error).split()) or type(error).__name__
    return _said(line, "invalid_request_error" if isinstance(error, UserError) else "server_error")


def _said(line: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": line, "type": kind, "code": None}}
