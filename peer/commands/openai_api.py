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
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from peer.commands.openai_requests import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    Options,
    error_of,
    read_request,
    said,
)
from peer.observe.dashboard.app import LOCAL_NAMES
from peer.observe.dashboard.server import serving
from swarmnet.errors import Busy, NotNow, SwarmnetError, UserError
from swarmnet.plurals import counted
from swarmnet.protocol.generation import MAX_SESSIONS_EACH
from swarmnet.runtime.writing.chat import chat_prompt
from swarmnet.runtime.writing.sampling import Sampling
from swarmnet.runtime.writing.writer import Text, Writer

MAX_BODY_BYTES = 1 << 20
MAX_WAITING = 32
"""Requests, those that are being answered included."""
GONE = 499
"""Status of an answer that nobody waits for any more."""
UNKNOWN_MODEL = "model_not_found"
"""The API's code of the error."""

T = TypeVar("T")
Answer = Callable[[Request, bytes], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What answers look like."""

    kind: str
    """Of a whole answer."""
    piece_kind: str
    prefix: str
    """Of their ids."""
    is_chat: bool
    param: str
    """The field that has the prompt."""

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        """The choice of a whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice({"message": message} if self.is_chat else {"text": text}, reason)

    @property
    def beginning(self) -> list[dict[str, Any]]:
        """The choices that a stream begins with: the role is in no other, for clients put deltas
        together."""
        delta = {"role": "assistant", "content": ""}
        return [self._choice({"delta": delta}, None)] if self.is_chat else []

    def piece(self, text: str) -> dict[str, Any]:
        """A choice of a stream."""
        return self._choice({"delta": {"content": text}} if self.is_chat else {"text": text}, None)

    def end(self, reason: str) -> dict[str, Any]:
        """The choice that says why a stream ends."""
        return self._choice({"delta": {}} if self.is_chat else {"text": ""}, reason)

    def _choice(self, part: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, "finish_reason": reason, "logprobs": None, **part}


COMPLETION = _Shape("text_completion", "text_completion", "cmpl", False, "prompt")
CHAT = _Shape("chat.completion", "chat.completion.chunk", "chatcmpl", True, "messages")


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
        self._writer = writer
        self._sampling = sampling
        self._name = name
        self._created = int(time.time())
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
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/completions", self._guarded(self._completion), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES, www_redirect=False)
        errors = {HTTPException: _not_served, Exception: _failed}
        return Starlette(routes=routes, middleware=[hosts], exception_handlers=errors)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:
            return await self._models(request)
        try:
            self._check_model(name)
        except BadRequest as error:
            return _refused(error)
        return JSONResponse(self._model)

    @property
    def _model(self) -> dict[str, Any]:
        about = {"object": "model", "created": self._created, "owned_by": "swarmnet"}
        return {"id": self._name, **about}

    def _check_model(self, name: str | None) -> None:
        """Raises `BadRequest` where a program wants another one."""
        if name and name != self._name:
            line = f"the model {name[:80]!r} does not exist; {self._name!r} is served here"
            raise BadRequest(line, "model", UNKNOWN_MODEL)

    async def _completion(self, request: Request, body: bytes) -> Response:
        asked = read_request(body, CompletionRequest)
        self._check_model(asked.model)
        prompt = asked.one_prompt()
        if isinstance(prompt, str):
            encode = self._writer.codec.encode
            prompt = await asyncio.to_thread(encode, prompt, adds_special=True)
        elif (highest := max(prompt, default=0)) >= self._writer.vocabulary:
            line = f"prompt: token {highest}, and the model has {self._writer.vocabulary}"
            raise BadRequest(line, "prompt", "invalid_value")
        return await self._answer(request, asked, prompt, COMPLETION)

    async def _chat(self, request: Request, body: bytes) -> Response:
        asked = read_request(body, ChatRequest)
        self._check_model(asked.model)
        messages = [message.said() for message in asked.messages]
        try:
            tokens = await asyncio.to_thread(self._tokens_of, messages)
        except UserError as error:
            raise BadRequest(str(error), CHAT.param) from None
        return await self._answer(request, asked, tokens, CHAT)

    def _tokens_of(self, messages: list[dict[str, str]]) -> list[int]:
        """Beside the event loop: a template may take seconds, and so may a long text."""
        return self._writer.codec.encode(chat_prompt(self._writer.files, messages))

    async def _answer(
        self, request: Request, asked: Options, prompt: list[int], shape: _Shape
    ) -> Response:
        longest = self._writer.longest
        sampling = asked.sampling(self._sampling, longest)
        if not prompt:
            raise BadRequest(f"{shape.param}: empty; give the model a text", shape.param)
        if len(prompt) >= longest:
            raise BadRequest(
                f"{shape.param}: {counted(len(prompt), 'token')}; with the answer a text of this "
                f"run's model has at most {longest}",
                shape.param,
                "context_length_exceeded",
            )
        text = self._writer.text(prompt, sampling, stops=asked.stops, is_answer=shape.is_chat)
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
            whole = await _before(gone, ClientDisconnect(), self._whole(text))
        finally:
            gone.cancel()
        choice = shape.whole(whole, text.finish_reason)
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
        if wants_usage:
            about["usage"] = None
        self._num_waiting += 1
        pieces = self._pieces(text)
        try:
            for choice in shape.beginning:
                yield _event({**about, "choices": [choice]})
            while (piece := await self._unless_closed(_next(pieces))) is not None:
                yield _event({**about, "choices": [shape.piece(piece)]})
        except SwarmnetError as e:
            yield _event(error_of(e))
            return
        finally:
            self._num_waiting -= 1
        yield _event({**about, "choices": [shape.end(text.finish_reason)]})
        if wants_usage:
            yield _event({**about, "choices": [], "usage": _usage(text)})
        yield b"data: [DONE]\n\n"

    def _guarded(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def read(request: Request) -> Response:
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    line = f"the body has more than {MAX_BODY_BYTES} bytes"
                    return JSONResponse(said(line), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return await answer(request, bytes(body))

        async def guarded(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip()
            if kind != "application/json":
                line = "content-type: application/json, please"
                return JSONResponse(said(line), HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            if self._num_waiting >= MAX_WAITING:
                return _refused(Busy("too many requests wait here"))
            self._num_waiting += 1
            try:
                return await self._unless_closed(read(request))
            except ClientDisconnect:
                return Response(status_code=GONE)
            except SwarmnetError as e:
                return _refused(e)
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


def _refused(error: SwarmnetError) -> Response:
    """The answer that is an error: clients ask again after the last two."""
    if isinstance(error, BadRequest) and error.code == UNKNOWN_MODEL:
        status = HTTPStatus.NOT_FOUND
    elif isinstance(error, UserError):
        status = HTTPStatus.BAD_REQUEST
    elif isinstance(error, Busy):
        status = HTTPStatus.TOO_MANY_REQUESTS
    else:
        status = HTTPStatus.SERVICE_UNAVAILABLE
    return JSONResponse(error_of(error), status)


async def _not_served(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    asked, code = f"{request.method} {request.url.path[:80]}", None
    line = f"there is no {asked} here"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        line, code = f"{asked}: another method, please", "method_not_supported"
    return JSONResponse(said(line, code=code), error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of this program, which its log has."""
    line = f"{type(error).__name__}: the answer failed; see what swarmnet generate says"
    return JSONResponse(said(line, "server_error"), HTTPStatus.INTERNAL_SERVER_ERROR)
