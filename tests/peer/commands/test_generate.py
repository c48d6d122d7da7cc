"""Texts in words: what is drawn, how pieces come, what a chat looks like, and the API for programs
(through the `openai` client), over a whole swarm in one process."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from peer.cli import run_command
from peer.commands.generate import converse
from peer.commands.openai_api import Api, open_api
from peer.observe.dashboard.server import listen
from peer.options import LOOPBACK
from swarmnet.errors import Busy, NotNow, ProtocolViolation, UserError
from swarmnet.parsing.frames import GivenFiles
from swarmnet.protocol.generation import EXACT_PARTS
from swarmnet.protocol.membership.records import OBSERVING, Record
from swarmnet.protocol.membership.view import View
from swarmnet.runtime.text_codec import ByteCodec, TextCodec
from swarmnet.runtime.writing import writer
from swarmnet.runtime.writing.chat import chat_prompt, prompt_of
from swarmnet.runtime.writing.pieces import text_after
from swarmnet.runtime.writing.sampling import Sampling, choose, read_logits, sampling_of
from swarmnet.runtime.writing.writer import Text, Writer
from swarmnet.swarm.membership.gossip import Gossip
from swarmnet.training.data import chat_sandbox
from swarmnet.training.data.chat import turns_of
from swarmnet.training.data.tokenizer import FileTokenizer
from swarmnet.wire import Array
from tests.swarm.harness import OpenSigner, Swarm, tiny_spec
from tests.training.data.making import CHATML

VOCABULARY = 24
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{% generation %}<assistant>{% endgeneration %}{% endif %}"
)


# ---- sampling -------------------------------------------------------------------------------


def drawn_odds(logits: Any, seen: list[int], sampling: Sampling, num_logits: int) -> Any:
    """How often each token is chosen, of the largest logits that come over the wire."""
    kept = np.argsort(-logits, kind="stable")[: num_logits or None].astype(np.int32)

    class Rng:
        """Tells the odds."""

        def choice(self, n: int, p: Any) -> int:
            self.odds = p
            return 0

    rng: Any = Rng()
    choose(logits[kept], kept, seen, sampling, rng)
    found = np.zeros(len(logits))
    scores = logits[kept].astype(np.float64)
    punished = np.where(
        scores < 0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty
    )
    scores = np.where(np.isin(kept, seen), punished, scores) / sampling.temperature
    order = np.argsort(-scores, kind="stable")[: sampling.top_k or None]
    found[kept[order]] = rng.odds
    return found


@given(
    st.integers(0, 1000),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 5, 50]),
    st.sampled_from([0.2, 0.9, 1.0]),
    st.sampled_from([0.7, 1.0, 1.3]),
)
def test_tokens_are_as_likely_as_transformers_has_them(
    seed: int, temperature: float, top_k: int, top_p: float, penalty: float
) -> None:
    """Though only the largest logits come over the wire."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=VOCABULARY).astype(np.float32) * 3
    seen = sorted({int(t) for t in rng.integers(0, VOCABULARY, 6)})
    sampling = Sampling(True, temperature, top_k, top_p, penalty)
    found = drawn_odds(logits, seen, sampling, sampling.num_logits(len(seen)))
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    chain.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    scores = chain(torch.tensor([seen]), torch.tensor(logits)[None])
    np.testing.assert_allclose(found, scores.softmax(-1)[0].numpy(), atol=1e-5)
    greedy = Sampling(repetition_penalty=penalty)
    kept = np.argsort(-logits)[: greedy.num_logits(len(seen)) or None].astype(np.int32)
    assert choose(logits[kept], kept, seen, greedy, rng) == int(
        RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([seen]), torch.tensor(logits)[None]
        ).argmax()
    )


def test_a_seed_draws_the_same_and_another_one_does_not() -> None:
    logits, tokens = np.zeros(VOCABULARY, np.float32), np.arange(VOCABULARY, dtype=np.int32)

    def drawn(seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return [choose(logits, tokens, (), Sampling(True), rng) for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_new_tokens": 10**6}, "max_new_tokens"),
        ({"seed": -1}, "seed"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        Sampling().with_options(options)


def test_the_model_s_own_file_says_what_is_usual() -> None:
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": "x", "min_p": 0.1}
    assert sampling_of(said) == Sampling(True, 0.6, 20)
    assert sampling_of({"temperature": -1, "do_sample": 1}) == Sampling()
    assert Sampling().with_options({"top_k": None, "seed": 3}).do_sample
    assert not Sampling().with_options({"seed": 3, "do_sample": False}).do_sample


def floats(*values: float) -> Array:
    return Array("float32", (1, len(values)), np.array(values, np.float32).tobytes())


def ints(*values: int) -> Array:
    return Array("int32", (1, len(values)), np.array(values, np.int32).tobytes())


@pytest.mark.parametrize(
    "arrays",
    [
        (),
        (floats(0.0, 1.0),),
        (floats(0.0, float("nan")), ints(0, 1)),
        (floats(0.0, 1.0), ints(0, 3)),
        (floats(0.0, 1.0), ints(-1, 0)),
        (floats(0.0, 1.0), ints(0)),
        (floats(), ints()),
        (ints(0, 1), ints(0, 1)),
    ],
)
def test_logits_of_a_peer_are_checked(arrays: tuple[Array, ...]) -> None:
    with pytest.raises(ProtocolViolation):
        read_logits(arrays, 3)


# ---- pieces ---------------------------------------------------------------------------------


class Scripted:
    """A remote text whose tokens are known."""

    def __init__(self, tokens: list[int]) -> None:
        self.round, self.closed = 7, False
        self._left: Iterator[int] = iter(tokens)

    async def extend(self, tokens: list[int], num_logits: int) -> tuple[Array, ...]:
        return floats(1.0), ints(next(self._left))

    async def close(self) -> None:
        self.closed = True


def pieces_of(
    text: str | bytes,
    stops: tuple[str, ...] = (),
    length: int = 100,
    codec: TextCodec | None = None,
) -> tuple[list[str], str]:
    """`codec`: of tokens that are bytes."""
    tokens = [*(text.encode() if isinstance(text, str) else text), 0]
    return pieces_after([1], tokens, [0], codec or ByteCodec(), stops, length)


def pieces_after(
    prompt: list[int],
    tokens: list[int],
    ends: list[int],
    codec: TextCodec,
    stops: tuple[str, ...] = (),
    length: int = 100,
    *,
    is_answer: bool = False,
) -> tuple[list[str], str]:
    """The pieces of a text whose tokens are known, and why it ended."""
    remote: Any = Scripted(tokens)
    written = Text(
        prompt,
        remote,
        codec,
        ends,
        Sampling(max_new_tokens=length),
        vocabulary=512,
        stops=stops,
        is_answer=is_answer,
    )

    async def gather() -> list[str]:
        return [piece async for piece in written]

    pieces = asyncio.run(gather())
    assert remote.closed
    return pieces, written.finish_reason


def test_pieces_are_whole_characters_and_together_the_text() -> None:
    pieces, reason = pieces_of("né € \N{GRINNING FACE}.")
    assert "".join(pieces) == "né € \N{GRINNING FACE}."
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert len(pieces) == 7
    assert reason == "stop"
    assert pieces_of("abcdef", length=3) == (["a", "b", "c"], "length")


class LocalCodec:
    """As `FileCodec`, without another process."""

    def __init__(self, data: bytes) -> None:
        self._tokenizer = FileTokenizer({"tokenizer.json": data})
        self.num_tokens = self._tokenizer.highest + 1
        self.special = self._tokenizer.special()

    def encode(self, text: str, *, adds_special: bool = False) -> list[int]:
        return self._tokenizer.encode_one(text, adds_special=adds_special)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skips_special=True)


def bytes_of_llama_2() -> LocalCodec:
    """Tokens that are bytes, decoded as by Llama 2's tokenizer: each byte of a character that is
    not whole is a replacement character."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True)
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    return LocalCodec(tokenizer.to_str().encode())


def test_no_byte_of_a_character_is_shown_before_the_last_one() -> None:
    codec = bytes_of_llama_2()
    assert codec.decode(list("é€".encode()[:4])) == "\N{REPLACEMENT CHARACTER}" * 4
    pieces, _ = pieces_of("né € \N{GRINNING FACE}€.", codec=codec)
    assert pieces == ["n", "é", " ", "€", " ", "\N{GRINNING FACE}", "€", "."]
    broken, reason = pieces_of("né €".encode()[:-1], codec=codec)
    assert "".join(broken).startswith("né")
    assert broken[-1].endswith("\N{REPLACEMENT CHARACTER}")  # nothing is to come any more
    assert reason == "stop"


def test_a_stop_and_its_beginning_are_not_given() -> None:
    pieces, reason = pieces_of("one\nUsual\nUser: two", stops=("\nUser:", "xyz"))
    assert "".join(pieces) == "one\nUsual"
    assert reason == "stop"
    assert "".join(pieces_of("one\nUs", stops=("\nUser:",))[0]) == "one\nUs"


WORDS = ["The", "cat", "sat", "on", "a", "mat", ".", "s", "don", "'", "t", "né", "x" * 9, "</s>"]


def with_words(
    pre: Any, decoder: Any, names: Sequence[str], *, byte_fallback: bool = False
) -> LocalCodec:
    """The codec of a tokenizer that has all bytes as tokens, and these."""
    fallback = [f"<0x{i:02X}>" for i in range(256)] if byte_fallback else []
    names = [*dict.fromkeys([*fallback, *names, "[UNK]"])]
    model = tokenizers.models.BPE(
        {name: i for i, name in enumerate(names)}, [], byte_fallback=byte_fallback
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoder
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|im_end|>", special=True)])
    return LocalCodec(tokenizer.to_str().encode())


def metaspace() -> LocalCodec:
    pre, decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    return with_words(pre, decoder, [*("▁" + w for w in WORDS), *WORDS, "▁"])


def llama_2() -> LocalCodec:
    """Spaces as Llama 2's tokenizer writes them, bytes for what it has no token for."""
    steps = [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
    names = [*("▁" + w for w in WORDS), *WORDS, "▁"]
    decoder = tokenizers.decoders.Sequence(steps)
    return with_words(None, decoder, names, byte_fallback=True)


def byte_level() -> LocalCodec:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pre = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = [*alphabet, *("Ġ" + w for w in WORDS), *WORDS]
    return with_words(pre, tokenizers.decoders.ByteLevel(), names)


def word_pieces() -> LocalCodec:
    names = [*WORDS, *("##" + w for w in WORDS)]
    return with_words(None, tokenizers.decoders.WordPiece(), names)


def suffixes() -> LocalCodec:
    """As GPT-1's tokenizer: a word's last token says that it ends."""
    names = [*WORDS, *(w + "</w>" for w in WORDS)]
    return with_words(None, tokenizers.decoders.BPEDecoder(), names)


CODECS = {f.__name__: f for f in (metaspace, llama_2, byte_level, word_pieces, suffixes)}


@pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
@given(data=st.data())
def test_pieces_are_what_the_whole_text_gains(make: Callable[[], LocalCodec], data: Any) -> None:
    """Whatever the decoder does with the first token, or with two that follow each other."""
    codec = made(make)
    end = codec.num_tokens - 1
    words = st.lists(st.integers(0, end - 1), max_size=12)
    prompt, tokens = data.draw(words.filter(bool)), data.draw(words)
    before, whole = codec.decode(prompt), codec.decode(prompt + tokens)
    pieces, reason = pieces_after(prompt, [*tokens, end], [end], codec)
    assert reason == "stop"
    if "\N{REPLACEMENT CHARACTER}" not in before + whole:
        assert before + "".join(pieces) == whole
    assert "".join(pieces_after(prompt, [*tokens, end], [end], codec, is_answer=True)[0]) == (
        text_after(codec, [], tokens)
    ), "an answer is a text of its own"


@lru_cache
def made(make: Callable[[], LocalCodec]) -> LocalCodec:
    return make()


@pytest.mark.parametrize("make", [metaspace, llama_2])
def test_a_text_goes_on_with_the_space_between(make: Callable[[], LocalCodec]) -> None:
    codec = made(make)
    ids = {codec.decode([i, i])[len(codec.decode([i])) :]: i for i in range(codec.num_tokens)}
    prompt, tokens = [ids[" The"], ids[" cat"]], [ids[" sat"], ids[" on"], ids[" mat"], ids["."]]
    pieces, _ = pieces_after(prompt, [*tokens, 0], [0], codec)
    assert pieces == [" sat", " on", " mat", "."]
    assert pieces_after(prompt, [*tokens, 0], [0], codec, is_answer=True)[0][0] == "sat"


def test_a_character_that_the_prompt_began_is_finished() -> None:
    for codec in (ByteCodec(), bytes_of_llama_2(), made(llama_2)):
        begun, rest = list("né €".encode()[:-1]), list("€€".encode()[2:])
        assert "".join(pieces_after(begun, [*rest, 0], [0], codec)[0]) == "€€"


def test_a_stop_may_be_a_token_that_no_text_shows() -> None:
    codec = made(byte_level)
    token = next(i for i, text in codec.special.items() if text == "<|im_end|>")
    yo, on = codec.encode("yo\n"), codec.encode("\nyo")
    tokens = [*yo, token, *on, 0]
    for stop, text in (
        ("<|im_end|>", "yo\n"),
        ("<|im_end|>\n", "yo\n"),
        ("\n<|im_end|>", "yo"),
        ("o\n<|im_end|>\ny", "y"),
        ("<|im_end|>x", "yo\n\nyo"),
    ):
        pieces, reason = pieces_after([1], tokens, [0], codec, (stop,))
        assert "".join(pieces) == text, stop
        assert reason == "stop"


def test_an_answer_ends_where_the_next_turn_would_begin() -> None:
    """Where no token of the template ends a turn; else that token does."""
    plain = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    assert turns_of({"chat_template.jinja": plain.encode()}).next_turn == "\n\n### user:"
    tokenizer = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}]}
    files = {
        "chat_template.jinja": CHATML.encode(),
        "tokenizer.json": json.dumps(tokenizer).encode(),
    }
    turns = turns_of(files)
    assert (turns.next_turn, turns.end) == ("", "<|im_end|>")
    assert turns_of({}).end == turns_of({"chat_template.jinja": b"{% for"}).end == ""


# ---- chat -----------------------------------------------------------------------------------


def test_a_template_makes_the_prompt_and_can_do_no_harm() -> None:
    said = [{"role": "user", "content": "hello"}]
    files = {"chat_template.jinja": TEMPLATE.encode()}
    assert chat_prompt(files, said) == "<user>hello\n<assistant>"
    config = {
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ messages | tojson }}"}
        ],
        "bos_token": {"content": "<s>"},
    }
    files = {"tokenizer_config.json": json.dumps(config).encode()}
    assert chat_prompt(files, said) == '<s>[{"role": "user", "content": "hello"}]'
    for template, line in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for", "chat template"),
        ("{{ messages[0].content + 1 }}", "chat template"),
        ("{{ 'x' * 3000000 }}", "too long"),
    ):
        with pytest.raises(UserError, match=line):
            chat_prompt({"chat_template.jinja": template.encode()}, said)
    with pytest.raises(UserError, match="no chat template"):
        chat_prompt({}, said)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.3 s"),
        ("{{ 'a'|center(10000000000) }}", "too much"),
        ("{{ messages[0]|tojson(indent=10000000000) }}", "too much"),
    ],
)
def test_a_template_that_would_never_end_is_stopped(
    monkeypatch: pytest.MonkeyPatch, template: str, line: str
) -> None:
    monkeypatch.setattr(chat_sandbox, "LONGEST_S", 0.3)
    files = GivenFiles({"chat_template.jinja": template.encode()})
    with pytest.raises(UserError, match=line):
        prompt_of(files, json.dumps([{"role": "user", "content": "a"}]))


# ---- the API by itself ----------------------------------------------------------------------


class Beside(ByteCodec):
    """Knows on which threads it works."""

    def __init__(self) -> None:
        self.threads = set[int]()

    def encode(self, text: str, *, adds_special: bool = False) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, adds_special=adds_special)


class Endless:
    """A writer whose texts have one piece, and never end; or they fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.codec, self.files = Beside(), {"chat_template.jinja": TEMPLATE.encode()}
        self.longest, self.vocabulary = 4096, 256
        self.begun, self.ended = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.error = error

    def text(
        self, prompt: list[int], sampling: Sampling, *, stops: list[str], is_answer: bool
    ) -> Endless:
        return self

    async def __aiter__(self) -> AsyncIterator[str]:
        self.begun.release()
        try:
            if self.error is not None:
                raise self.error
            yield "a"
            await asyncio.Event().wait()
        finally:
            self.ended.release()


def api_of(writer: Any) -> Api:
    return Api(writer, Sampling(), "a run")


def test_texts_end_with_the_api(caplog: pytest.LogCaptureFixture) -> None:
    """Whole answers and streams, with an error that says so."""

    async def main() -> None:
        writer: Any = Endless()
        async with asyncio.timeout(60), AsyncExitStack() as api:
            listener = listen(LOOPBACK, 0)
            address = await open_api(api, writer, Sampling(), "a run", listener)
            body = {"prompt": "abc"}
            async with (
                httpx.AsyncClient(base_url=address, timeout=30) as program,
                program.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
            ):
                whole = asyncio.ensure_future(program.post("/v1/completions", json=body))
                for _ in range(2):
                    await writer.begun.acquire()
                ending = asyncio.ensure_future(api.aclose())
                said = [json.loads(line[6:]) async for line in answer.aiter_lines() if line]
                assert "being closed" in said[-1]["error"]["message"]
                assert (await whole).status_code == 503
                await ending
                for _ in range(2):
                    await writer.ended.acquire()

    asyncio.run(main())
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_whole_answer_ends_with_its_program() -> None:
    async def main() -> None:
        writer = Endless()
        received, sent = asyncio.Queue[Any](), list[Any]()
        received.put_nowait({"type": "http.request", "body": b'{"prompt": "abc"}'})

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        async with asyncio.timeout(60):
            asking = asyncio.ensure_future(api_of(writer).app()(scope, received.get, send))
            await writer.begun.acquire()
            received.put_nowait({"type": "http.disconnect"})
            await writer.ended.acquire()
            await asking

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "status"), [(NotNow("not now"), 503), (UserError("wrong"), 400), (Busy("full"), 429)]
)
def test_only_what_is_wrong_is_never_asked_again(error: Exception, status: int) -> None:
    """Clients of the API try again after the other answers."""

    async def main() -> None:
        transport = httpx.ASGITransport(api_of(Endless(error)).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as program:
            answer = await program.post("/v1/completions", json={"prompt": "abc"})
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == str(error)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "abc"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
def test_prompts_are_made_beside_the_event_loop(path: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        writer = Endless(UserError("wrong"))
        transport = httpx.ASGITransport(api_of(writer).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as program:
            await program.post(f"/v1/{path}", json=body)
        assert writer.codec.threads
        assert threading.get_ident() not in writer.codec.threads

    asyncio.run(main())


@pytest.mark.parametrize(
    ("codec", "asked", "is_exact"),
    [("int8", True, True), ("int8", False, False), ("none", True, False)],
)
def test_texts_are_exact_unless_somebody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, asked: bool, is_exact: bool
) -> None:
    """Where the run codes nothing, all is exact as it is, and passes need not be shorter."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(writer, "RemoteText", lambda *args, **options: made.append(options))
    spec = tiny_spec(tmp_path, num_stages=2, rounds=4, codec=codec)
    gossip: Any = None
    options = {} if asked else {"exact": False}
    Writer(spec, gossip, ByteCodec(), {}, **options).text([1, 2], Sampling())
    tokens = spec.pipeline.microbatch * spec.sequence_length
    assert made[0]["exact"] is is_exact
    assert made[0]["pass_tokens"] == (tokens // EXACT_PARTS if is_exact else tokens)


# ---- a whole swarm --------------------------------------------------------------------------


@dataclass
class Talk:
    writer: Writer
    swarm: Swarm


@asynccontextmanager
async def talking(folder: Path) -> AsyncIterator[Talk]:
    """In real time, since clients have threads of their own."""
    spec = tiny_spec(folder, num_stages=2, rounds=2000)
    swarm = Swarm(spec)
    swarm.start("peer-0", stage=0)
    swarm.start("peer-1", stage=1)
    transport = swarm.hub.transport("asker")
    transport.set_run(spec.run_id)
    own = Record("asker", spec.run_id, 1, 0, state=OBSERVING)
    gossip = Gossip(transport, View("asker"), OpenSigner(), own, random.Random(0), quiet=True)
    try:
        await swarm.until_round(1)
        await gossip.reconcile("peer-0")
        life = asyncio.ensure_future(gossip.run())
        files = {"chat_template.jinja": TEMPLATE.encode()}
        yield Talk(Writer(spec, gossip, ByteCodec(), files), swarm)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
    finally:
        await swarm.close()


def in_real_time(scenario: Callable[[Talk], Coroutine[Any, Any, None]], folder: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), talking(folder) as talk:
            await scenario(talk)

    asyncio.run(main())


def test_programs_ask_through_the_openai_client(tmp_path: Path) -> None:
    async def scenario(talk: Talk) -> None:
        app = Api(talk.writer, talk.writer.sampling, "a run").app()
        async with openai.AsyncOpenAI(
            api_key="any",
            base_url="http://127.0.0.1/v1",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=httpx.ASGITransport(app)),
        ) as client:
            assert [m.id for m in (await client.models.list()).data] == ["a run"]
            whole = await client.completions.create(
                model="a run", prompt="abc def", max_tokens=12, temperature=0
            )
            assert whole.usage is not None
            assert whole.usage.prompt_tokens == 7
            assert 1 <= whole.usage.completion_tokens <= 12
            assert whole.choices[0].finish_reason in ("length", "stop")
            said = [{"role": "user", "content": "abc"}]
            chat: Any = client.chat.completions
            answer = await chat.create(
                model="a run", messages=said, max_completion_tokens=6, temperature=0.5, seed=1
            )
            assert answer.choices[0].message.role == "assistant"
            assert answer.usage.prompt_tokens == len("<user>abc\n<assistant>")
            stream = await chat.create(
                model="a run",
                messages=said,
                max_completion_tokens=6,
                temperature=0.5,
                seed=1,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage.completion_tokens <= 6
            reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
            assert set(reasons[:-1]) <= {None}
            assert reasons[-1] in ("length", "stop")
            for wrong in (
                {"prompt": ""},
                {"prompt": "a", "top_p": 2.0},
                {"prompt": "a" * 5000},
                {"prompt": "a", "n": 2},
                {"prompt": [300]},
            ):
                with pytest.raises(openai.BadRequestError):
                    await client.completions.create(model="a run", **wrong)  # type: ignore[call-overload]

    in_real_time(scenario, tmp_path)


def test_pages_elsewhere_cannot_ask(tmp_path: Path) -> None:
    async def scenario(talk: Talk) -> None:
        app = Api(talk.writer, talk.writer.sampling, "a run").app()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"prompt": "abc", "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            text = json.dumps(body)
            assert (await client.post("/v1/completions", content=text)).status_code == 415
            elsewhere = {"host": "evil.example"}
            answer = await client.post("/v1/completions", json=body, headers=elsewhere)
            assert answer.status_code == 400
            long = {"prompt": "a" * (2 << 20)}
            assert (await client.post("/v1/completions", json=long)).status_code == 413
            broken = {"content-type": "application/json"}
            answer = await client.post("/v1/completions", content="{", headers=broken)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"]

    in_real_time(scenario, tmp_path)


def test_a_chat_answers_the_prompt(tmp_path: Path) -> None:
    async def scenario(talk: Talk) -> None:
        put: list[str] = []
        await converse(talk.writer, Sampling(max_new_tokens=4), "hello", "be short", put=put.append)
        assert put[-1] == "\n"
        answer = talk.writer.text([1], Sampling(), is_answer=True)
        assert answer.stops == ("\n<user>",), "no token of the template ends a turn"
        assert talk.writer.text([1], Sampling(), stops=["x"]).stops == ("x",)

    in_real_time(scenario, tmp_path)


CHAT = """
from peer.commands.generate import typed
from peer.loop import Stopped, run

async def chat():
    while True:
        print(await typed(), flush=True)

try:
    run(chat())
except Stopped:
    print("stopped")
"""


def test_a_signal_ends_a_chat_that_waits_for_a_line() -> None:
    """Standard input stays open."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHAT], stdin=pipe, stdout=pipe) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        try:
            chat.stdin.write("\nhello\nagain, größer\n".encode())
            chat.stdin.flush()
            assert chat.stdout.readline() == b"hello\n"
            assert chat.stdout.readline().decode() == "again, größer\n"
            chat.send_signal(signal.SIGINT)
            assert chat.wait(timeout=20) == 0
            assert chat.stdout.read() == b"stopped\n"
        finally:
            chat.kill()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["abc"], "give --join"),
        (["--join", "x"], "give a text"),
        (["--join", "x", "--serve", "0", "--chat"], "--serve takes"),
        (["--join", "x", "abc", "--system", "y"], "--system goes with --chat"),
        (["--join", "x", "abc", "--temperature", "0"], "temperature"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["generate", *arguments]) != 0
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
