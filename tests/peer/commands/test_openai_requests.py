"""Each field and each error of the endpoint, as the API, vLLM and the server of llama.cpp have
them; what programs see of it through the `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import openai
import pytest

from peer.commands.openai_api import Api
from peer.commands.openai_requests import NOT_TO_BE_HAD
from swarmnet.errors import Busy
from swarmnet.runtime.text_codec import ByteCodec
from swarmnet.runtime.writing.sampling import Sampling

LONGEST, NAME = 64, "a run/of mine"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
COMPLETION = {"prompt": "abc"}
CHAT = {"messages": [{"role": "user", "content": "abc"}]}
BOTH = ("completions", "chat/completions")


class Known:
    """A writer whose text is known; it keeps what it was asked for."""

    def __init__(self) -> None:
        self.codec, self.files = ByteCodec(), {"chat_template.jinja": TEMPLATE.encode()}
        self.longest, self.vocabulary = LONGEST, 256
        self.finish_reason, self.num_prompt_tokens, self.num_new_tokens = "stop", 3, 2
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.stops: list[str] = []

    def text(self, prompt: list[int], sampling: Sampling, *, stops: list[str], **_: Any) -> Known:
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        self.stops = stops
        return self

    async def __aiter__(self) -> AsyncIterator[str]:
        for piece in "xy":
            yield piece


def ask(
    method: str, path: str, *, writer: Any = None, **options: Any
) -> tuple[httpx.Response, Known]:
    """`options`: of httpx."""
    known = writer or Known()

    async def main() -> httpx.Response:
        app = Api(known, Sampling(), NAME).app()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **options)

    return asyncio.run(main()), known


def post(path: str, **fields: Any) -> tuple[httpx.Response, Known]:
    body = {**(COMPLETION if path == "completions" else CHAT), **fields}
    return ask("POST", f"/v1/{path}", json=body)


TAKEN: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (BOTH, {"model": ""}),
    (BOTH, {"model": None}),
    (BOTH, {"model": NAME}),
    (BOTH, {"temperature": 2, "top_p": 1}),
    (BOTH, {"top_p": 0}),
    (BOTH, {"top_k": -1, "repetition_penalty": 1.2, "do_sample": True}),
    (BOTH, {"max_tokens": LONGEST}),
    (BOTH, {"max_tokens": 3.0}),
    (BOTH, {"max_completion_tokens": 3, "max_tokens": 100_000}),
    (BOTH, {"seed": -5}),
    (BOTH, {"seed": 2**63 - 1}),
    (BOTH, {"stop": None}),
    (BOTH, {"stop": []}),
    (BOTH, {"stop": "x"}),
    (BOTH, {"stop": ["x", "y"]}),
    (BOTH, {"n": 1, "best_of": 1, "logprobs": None, "top_logprobs": None, "echo": False}),
    (BOTH, {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": None}),
    (BOTH, {"response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"]}),
    (BOTH, {"stream": False, "stream_options": None}),
    (BOTH, {"user": "me", "metadata": {"a": "b"}, "store": True, "no_such_field": [1]}),
    (("completions",), {"prompt": ["abc"]}),
    (("completions",), {"prompt": [97, 98, 255]}),
    (("completions",), {"prompt": [[97, 98, 255]]}),
    (("chat/completions",), {"logprobs": False, "top_logprobs": 0}),
    (
        ("chat/completions",),
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            ]
        },
    ),
    (
        ("chat/completions",),
        {
            "messages": [
                {"role": "assistant", "content": None},
                {"role": "user", "content": "a", "name": "me"},
            ]
        },
    ),
]


@pytest.mark.parametrize(("paths", "fields"), TAKEN, ids=str)
def test_what_is_taken(paths: tuple[str, ...], fields: dict[str, Any]) -> None:
    for path in paths:
        answer, _ = post(path, **fields)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert (choice["text"] if path == "completions" else choice["message"]["content"]) == "xy"


REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str, str]] = [
    (BOTH, {"max_tokens": LONGEST + 1}, "max_tokens", "at most 64 tokens"),
    (BOTH, {"max_completion_tokens": 10**6}, "max_completion_tokens", "too large: 1000000"),
    (BOTH, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (BOTH, {"max_tokens": "8"}, "max_tokens", "integer"),
    (BOTH, {"max_tokens": 8.5}, "max_tokens", "integer"),
    (BOTH, {"max_tokens": True}, "max_tokens", "integer"),
    (BOTH, {"seed": 2**63}, "seed", "less than"),
    (BOTH, {"seed": "1"}, "seed", "integer"),
    (BOTH, {"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    (BOTH, {"temperature": "hot"}, "temperature", "number"),
    (BOTH, {"temperature": True}, "temperature", "number"),
    (BOTH, {"top_p": 1.1}, "top_p", "less than or equal to 1"),
    (BOTH, {"top_p": -0.1}, "top_p", "greater than or equal to 0"),
    (BOTH, {"top_k": -2}, "top_k", "greater than or equal to -1"),
    (BOTH, {"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    (BOTH, {"stop": ""}, "stop", "1 to 256 characters"),
    (BOTH, {"stop": ["x"] * 9}, "stop", "at most 8"),
    (BOTH, {"stop": [1]}, "stop[0]", "string"),
    (BOTH, {"stop": 1}, "stop", "string"),
    (BOTH, {"stream": "yes"}, "stream", "boolean"),
    (BOTH, {"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
    (
        BOTH,
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "boolean",
    ),
    (BOTH, {"stream": True, "stream_options": 1}, "stream_options", "dictionary"),
    (BOTH, {"model": 1}, "model", "string"),
    (BOTH, {"n": 2}, "n", "not to be had"),
    (BOTH, {"n": True}, "n", "not to be had"),
    (BOTH, {"best_of": 3}, "best_of", "not to be had"),
    (BOTH, {"logprobs": True}, "logprobs", "not to be had"),
    (BOTH, {"logprobs": 0}, "logprobs", "not to be had"),
    (BOTH, {"top_logprobs": 2}, "top_logprobs", "not to be had"),
    (BOTH, {"echo": True}, "echo", "not to be had"),
    (BOTH, {"suffix": "."}, "suffix", "not to be had"),
    (BOTH, {"presence_penalty": 0.5}, "presence_penalty", "not to be had"),
    (BOTH, {"frequency_penalty": -1}, "frequency_penalty", "not to be had"),
    (BOTH, {"logit_bias": {"5": 3}}, "logit_bias", "not to be had"),
    (BOTH, {"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    (BOTH, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "leave it out"),
    (BOTH, {"tool_choice": "required"}, "tool_choice", "required"),
    (("completions",), {"prompt": None}, "prompt", "one text"),
    (("completions",), {"prompt": ""}, "prompt", "empty"),
    (("completions",), {"prompt": []}, "prompt", "empty"),
    (("completions",), {"prompt": ["a", "b"]}, "prompt", "one text"),
    (("completions",), {"prompt": [1.5]}, "prompt", "one text"),
    (("completions",), {"prompt": [-1]}, "prompt", "one text"),
    (("completions",), {"prompt": [True]}, "prompt", "one text"),
    (("completions",), {"prompt": {"a": 1}}, "prompt", "one text"),
    (("completions",), {"prompt": [97, 256]}, "prompt", "token 256, and the model has 256"),
    (("completions",), {"prompt": "a" * LONGEST}, "prompt", "64 tokens; with the answer"),
    (("chat/completions",), {"messages": []}, "messages", "at least 1 item"),
    (("chat/completions",), {"messages": "hello"}, "messages", "list"),
    (("chat/completions",), {"messages": [5]}, "messages[0]", "ChatMessage"),
    (("chat/completions",), {"messages": [{}]}, "messages[0].role", "required"),
    (
        ("chat/completions",),
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content",
        "string",
    ),
    (
        ("chat/completions",),
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image_url", "image_url": {"url": "x"}},
                    ],
                }
            ]
        },
        "messages[0].content[1].type",
        "'text'",
    ),
    (
        ("chat/completions",),
        {"messages": [{"role": "user", "content": "a" * LONGEST}]},
        "messages",
        "64 tokens; with the answer",
    ),
    (("chat/completions",), {"messages": [{"role": "user", "content": ""}]}, "messages", "empty"),
]


@pytest.mark.parametrize(("paths", "fields", "param", "line"), REFUSED, ids=str)
def test_what_is_refused_is_named(
    paths: tuple[str, ...], fields: dict[str, Any], param: str, line: str
) -> None:
    for path in paths:
        answer, writer = post(path, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert line in error["message"]
        assert error["message"].startswith(param.partition("[")[0].partition(".")[0])
        assert "\n" not in error["message"]
        assert writer.prompts == []


def test_a_missing_field_is_named() -> None:
    for path, param in (("completions", "prompt"), ("chat/completions", "messages")):
        answer, _ = ask("POST", f"/v1/{path}", json={})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert answer.json()["error"]["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"abc", b'{"prompt": "\xff"}', b'{"top_p": NaN}', b"[" * 10_000]
)
def test_a_body_that_is_no_json_says_so(body: bytes) -> None:
    for path in BOTH:
        headers = {"content-type": "application/json; charset=utf-8"}
        answer, _ = ask("POST", f"/v1/{path}", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the body is no JSON: ")
        assert answer.json()["error"]["param"] is None


@pytest.mark.parametrize("body", ["[]", "5", "null", '"abc"'])
def test_a_body_that_is_no_object_says_so(body: str) -> None:
    headers = {"content-type": "application/json"}
    answer, _ = ask("POST", "/v1/completions", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "the body is no JSON object",
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/completions", 405, "method_not_supported"),
        ("PUT", "/v1/chat/completions", 405, "method_not_supported"),
        ("POST", "/v1/models", 405, "method_not_supported"),
        ("DELETE", "/v1/models/a", 405, "method_not_supported"),
        ("POST", "/v1/embeddings", 404, None),
        ("GET", "/", 404, None),
        ("GET", "/v1/models/another", 404, "model_not_found"),
    ],
)
def test_what_is_not_served_is_an_error_in_json(
    method: str, path: str, status: int, code: str | None
) -> None:
    answer, _ = ask(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert path.rpartition("/")[2] in error["message"]
    assert ("allow" in answer.headers) == (status == 405)


def test_bodies_of_another_kind_or_size_are_refused() -> None:
    answer, _ = ask("POST", "/v1/completions", content=json.dumps(COMPLETION))
    assert answer.status_code == 415
    answer, _ = post("completions", prompt="a" * (1 << 20))
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_another_model_than_the_run_s_is_not_there() -> None:
    for path in BOTH:
        answer, writer = post(path, model="gpt")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert NAME in error["message"]
        assert writer.prompts == []


def sampling_of(**fields: Any) -> Sampling:
    answer, writer = post("completions", **fields)
    assert answer.status_code == 200, answer.text
    return writer.samplings[0]


def test_fields_mean_what_they_mean_in_the_api() -> None:
    assert sampling_of(temperature=0, seed=1) == Sampling(seed=1)
    assert sampling_of(temperature=0.5, top_p=0.9, top_k=3) == Sampling(True, 0.5, 3, 0.9)
    assert sampling_of(top_k=-1).top_k == 0
    assert sampling_of(max_tokens=5).max_new_tokens == 5
    assert sampling_of(max_completion_tokens=7, max_tokens=5).max_new_tokens == 7
    assert sampling_of(seed=3) == Sampling(True, seed=3)
    assert sampling_of(seed=-3) == Sampling(True, seed=2**64 - 3)
    assert sampling_of(seed=-1) == Sampling(True), "another one each time"
    least = sampling_of(temperature=1.0, top_p=0)
    assert least.do_sample
    assert 0.0 < least.top_p < 1e-300, "the likeliest alone"
    assert post("completions", stop="x")[1].stops == ["x"]
    assert post("completions", prompt=[[97, 255]])[1].prompts == [[97, 255]]


def through_the_client(
    scenario: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, None]], writer: Any = None
) -> None:
    async def main() -> None:
        app = Api(writer or Known(), Sampling(), NAME).app()
        async with openai.AsyncOpenAI(
            api_key="any",
            base_url="http://127.0.0.1/v1",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=httpx.ASGITransport(app)),
        ) as client:
            await scenario(client)

    asyncio.run(main())


def test_the_client_finds_models_and_errors() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        (listed,) = (await client.models.list()).data
        assert listed == await client.models.retrieve(NAME)
        assert (listed.id, listed.object, listed.owned_by) == (NAME, "model", "swarmnet")
        assert listed.created > 1_600_000_000
        with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
            await client.models.retrieve("another")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="max_tokens is too large") as wrong:
            await client.completions.create(model=NAME, prompt="a", max_tokens=LONGEST + 1)
        assert (wrong.value.param, wrong.value.type) == ("max_tokens", "invalid_request_error")
        long = "a" * LONGEST
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.completions.create(model=NAME, prompt=long)
        assert wrong.value.code == "context_length_exceeded"

    through_the_client(scenario)


def test_the_client_puts_the_pieces_of_a_stream_together() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        said: Any = CHAT["messages"]
        options = {"include_usage": True}
        async with client.chat.completions.stream(
            model=NAME,
            messages=said,
            stream_options=options,  # type: ignore[arg-type]
        ) as stream:
            made = await stream.get_final_completion()
        assert made.choices[0].message.role == "assistant"
        assert made.choices[0].message.content == "xy"
        assert made.choices[0].finish_reason == "stop"
        assert made.usage is not None
        assert made.usage.total_tokens == 5
        chunks: Any = await client.completions.create(
            model=NAME, prompt="abc", stream=True, stream_options=options
        )  # type: ignore[call-overload]
        found = [chunk async for chunk in chunks]
        assert "".join(c.choices[0].text for c in found if c.choices) == "xy"
        assert [c.usage is None for c in found] == [True] * (len(found) - 1) + [False]

    through_the_client(scenario)


def test_a_fault_of_the_program_is_an_error_in_json() -> None:
    class Broken(Known):
        def text(self, *args: Any, **options: Any) -> Known:
            raise RuntimeError("broken")

    async def main() -> httpx.Response:
        app = Api(Broken(), Sampling(), NAME).app()  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/v1/completions", json=COMPLETION)

    answer = asyncio.run(main())
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


def test_too_much_at_once_is_the_error_that_clients_know() -> None:
    class Full(Known):
        def text(self, *args: Any, **options: Any) -> Known:
            raise Busy("too many texts")

    async def scenario(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(model=NAME, prompt="a")
        assert full.value.code == "rate_limit_exceeded"

    through_the_client(scenario, Full())


def test_every_field_that_is_not_to_be_had_is_in_the_table() -> None:
    """That each is refused, and taken where it asks for nothing."""
    refused = {name for _, fields, _, _ in REFUSED for name in fields}
    others = {"min_p", "functions", "function_call", "modalities", "audio"}
    assert set(NOT_TO_BE_HAD) <= refused | others
    for name in others:
        answer, _ = post("completions", **{name: ["another"]})
        assert answer.json()["error"]["param"] == name
