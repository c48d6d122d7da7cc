"""What programs ask of `swarmnet generate --serve`: requests of the OpenAI API, and its errors.

Fields mean what they mean there. One that would change the text and is not to be had is refused by
its name; others are passed over, as vLLM and the server of llama.cpp do, so that programs which are
made for those can ask. An error says which field of the caller's is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from swarmnet.errors import Busy, SwarmnetError, UserError
from swarmnet.plurals import counted
from swarmnet.runtime.writing.sampling import Sampling
from swarmnet.runtime.writing.writer import MAX_STOP_CHARS, MAX_STOPS

MAX_MESSAGES = 1024
MAX_SHOWN_CHARS = 80
"""Of a value in an error."""
ANY_SEED = -1
"""Another one each time, as vLLM and llama.cpp have it."""

NOT_TO_BE_HAD: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
}
"""Fields of the API that would change the text, with the values, beside null, that ask for nothing:
only these are taken."""

R = TypeVar("R", bound="Options")


class BadRequest(UserError):
    """A request is wrong."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        """`param`: the field of the request that is wrong. `code`: for programs, as the API has
        them."""
        super().__init__(message)
        self.param = param
        self.code = code


def _whole(value: Any) -> Any:
    """3.0 is an integer in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    """At the end of a stream."""


class Options(BaseModel):
    """Of both kinds of requests."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = None
    """Empty: the one that there is."""
    temperature: Annotated[float | None, Field(ge=0.0, le=100.0)] = None
    """0: the likeliest token."""
    top_p: Annotated[float | None, Field(ge=0.0, le=1.0)] = None
    seed: Annotated[Integer | None, Field(ge=-(1 << 63), lt=1 << 63)] = None
    max_tokens: Annotated[Integer | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[Integer | None, Field(ge=1)] = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    do_sample: bool | None = None
    """As `transformers` has it, like the next two."""
    top_k: Annotated[Integer | None, Field(ge=-1)] = None
    """-1 and 0: of all tokens."""
    repetition_penalty: Annotated[float | None, Field(gt=0.0, le=100.0)] = None

    def check(self) -> None:
        """What fields say together. Raises `BadRequest`."""
        stops = self.stops
        if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            line = f"stop: at most {MAX_STOPS} texts, of 1 to {MAX_STOP_CHARS} characters"
            raise BadRequest(line, "stop", "invalid_value")
        if self.stream_options is not None and not self.stream:
            line = "stream_options: only with stream = true"
            raise BadRequest(line, "stream_options", "invalid_value")

    def sampling(self, usual: Sampling, longest: int) -> Sampling:
        """`longest`: tokens of a text of this model. Raises `BadRequest`."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        most = getattr(self, name)
        if most is not None and most > longest:
            raise BadRequest(
                f"{name} is too large: {most}; a text of this run's model has at most "
                f"{counted(longest, 'token')}, with its prompt",
                name,
                "invalid_value",
            )
        options: dict[str, Any] = {
            "top_p": math.ulp(0.0) if self.top_p == 0 else self.top_p,  # the likeliest token
            "seed": None if self.seed in (None, ANY_SEED) else self.seed % (1 << 64),
            "max_new_tokens": most,
            "do_sample": self.do_sample,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "repetition_penalty": self.repetition_penalty,
        }
        if self.seed == ANY_SEED and self.do_sample is None:
            options["do_sample"] = True
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
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Options):
    prompt: Any

    def one_prompt(self) -> str | list[int]:
        """A text, or its tokens. Raises `BadRequest`."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt):
            return prompt
        raise BadRequest("prompt: one text, or the tokens of one", "prompt", "invalid_value")


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Annotated[str, Field(max_length=64)]
    content: str | list[ContentPart] | None = None

    def said(self) -> dict[str, str]:
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content
        return {"role": self.role, "content": text or ""}


class ChatRequest(Options):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def read_request(body: bytes, kind: type[R]) -> R:
    """The request that a body is. Raises `BadRequest`."""
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadRequest("the body is no JSON object")
    for name, nothing in NOT_TO_BE_HAD.items():
        value = values.get(name)
        if value is not None and not any(_is_same(value, each) for each in nothing):
            line = f"{name}: {_shown(value)} is not to be had here; leave it out"
            raise BadRequest(line, name, "unsupported_value")
    try:
        asked = kind.model_validate(values)
    except ValidationError as error:
        raise _bad(error, values) from None
    asked.check()
    return asked


def error_of(error: SwarmnetError) -> dict[str, Any]:
    """The body of an answer that says what is wrong."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, BadRequest):
        return said(line, param=error.param, code=error.code)
    if isinstance(error, UserError):
        return said(line)
    code = "rate_limit_exceeded" if isinstance(error, Busy) else None
    return said(line, "server_error", code=code)


def said(
    line: str,
    kind: str = "invalid_request_error",
    *,
    param: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    """Likewise."""
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


def _bad(error: ValidationError, values: Any) -> BadRequest:
    """Of the faults that were found the one that lies deepest: where a value may have several
    forms, that is in the form which it has."""
    found = max(error.errors(), key=lambda each: len(each["loc"]))
    param = _written(found["loc"], values)
    code = "missing_required_parameter" if found["type"] == "missing" else "invalid_value"
    return BadRequest(f"{param}: {found['msg']}", param, code)


def _written(place: Iterable[str | int], values: Any) -> str:
    """A place in a request as the API writes it; pydantic's names of types are not in it."""
    written = ""
    for part in place:
        if isinstance(part, int) and isinstance(values, list) and part < len(values):
            values = values[part]
            written += f"[{part}]"
        elif isinstance(part, str) and isinstance(values, dict):
            values = values.get(part)
            written += f".{part}" if written else part
    return written


def _is_same(value: Any, other: Any) -> bool:
    """True is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _shown(value: Any) -> str:
    text = pydantic_core.to_json(value).decode()
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
