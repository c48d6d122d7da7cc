"""Of a dialogue only what the assistant says is learned, and it never falls apart."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from swarmnet.batch import IGNORED
from swarmnet.errors import DataError
from swarmnet.training.arrays import to_tensor
from swarmnet.training.data import TextData, chat_sandbox
from swarmnet.training.data.chat import ChatTemplate
from swarmnet.training.end_tokens import end_tokens
from swarmnet.training.tokenizer_files import text_end
from tests.training.data.making import (
    CHATML,
    DEFAULT_SYSTEM,
    END_AT_LAST,
    GEMMA,
    GLM,
    LLAMA_3,
    MISTRAL,
    PHI,
    PLAIN,
    REWRITES,
    SPECIAL,
    WITH_MARKS,
    opened,
    tokenizer_folder,
    write_records,
)
from tests.training.specs import small_spec


def turns(*texts: str) -> list[dict[str, str]]:
    """A user's and an assistant's texts in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"chat_template.jinja": text.encode()})


def dialogues(folder: Path, *texts: list[dict[str, Any]], **data: Any) -> TextData:
    path = write_records(folder / "d.jsonl", [{"messages": messages} for messages in texts])
    data = {"template": CHATML, "length": 48, "special": tuple(SPECIAL), **data}
    tokenizer = tokenizer_folder(folder / "t", data.pop("template"), data.pop("special"))
    values = {"held_out_fraction": 0.0, "messages_field": "messages", **data}
    return opened(path, tokenizer=tokenizer, **values)


def learned_texts(data: TextData) -> list[str]:
    """What is learned, by sample."""
    samples = data.sources[0].samples
    found = []
    for i in range(samples.num_samples):
        targets = samples.sample(i).targets
        found.append(data.encoder.decode(targets[targets != IGNORED].tolist()))
    return found


def test_what_the_assistant_says_by_differences_of_prefixes() -> None:
    rendered = template(CHATML).render(turns("hi", "yo", "bye", "so long"), "")
    said = [rendered.text[a:b] for a, b in rendered.spans]
    assert said == ["yo<|im_end|>\n", "so long<|im_end|>\n"], "no token is known to end a turn"


def test_what_the_assistant_says_by_marks() -> None:
    messages = turns("hi \ufdd0x\ufdd1", "yo", "bye", "so long")
    rendered = template(WITH_MARKS).render(messages, "")
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["yo<|im_end|>", "so long<|im_end|>"]
    assert (
        rendered.text == template(CHATML).render(turns("hi x", *("yo", "bye", "so long")), "").text
    )


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    long = turns("a", "b", "c", "d")
    with pytest.raises(DataError, match="2 of 2 records cannot be used, the first") as raised:
        dialogues(tmp_path, long, long, template=REWRITES)
    assert "line 1: the chat template rewrites earlier turns" in str(raised.value)
    assert "\n" not in str(raised.value)
    data = dialogues(tmp_path, turns("a", "b"), long, turns("c", "d"), template=REWRITES)
    assert data.sources[0].about.left_out == {"rewritten by the chat template": 1}
    (line,) = data.sources[0].about.lines
    assert "d.jsonl, line 2: the chat template rewrites earlier turns" in line


def test_a_dialogue_may_begin_with_the_assistant(tmp_path: Path) -> None:
    """Though the template writes a system's text before it, which a generation prompt has not."""
    greeting = turns("", "Good day.", "hi", "yo")[1:]
    for template_text in (DEFAULT_SYSTEM, CHATML):
        data = dialogues(tmp_path, greeting, turns("hi", "yo"), template=template_text, length=90)
        assert sorted(learned_texts(data)) in (
            ["Good day.<|im_end|>yo<|im_end|>", "yo<|im_end|>"],
            ["Good day.<|im_end|>yo<|im_end|>yo<|im_end|>"],
            ["yo<|im_end|>Good day.<|im_end|>yo<|im_end|>"],
        )
        assert data.sources[0].about.left_out == {}


ENDS = {
    "Llama 3": (LLAMA_3, ["<|begin|>", "<|start|>", "<|stop|>", "<|eot_id|>"], "<|eot_id|>"),
    "Gemma": (GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"], "<end_of_turn>"),
    "Phi": (PHI, ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"], "<|end|>"),
    "Mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], "</s>"),
    "ChatML": (CHATML, SPECIAL, "<|im_end|>"),
}


@pytest.mark.parametrize(("text", "special", "end"), ENDS.values(), ids=ENDS)
def test_what_ends_a_turn_is_learned_and_ends_texts(
    tmp_path: Path, text: str, special: list[str], end: str
) -> None:
    """And nothing after it: no newline, and no end of the text."""
    said = turns("hi", "yo", "bye", "so long")
    data = dialogues(tmp_path, said, template=text, special=tuple(special), length=96)
    lead = " " if text == MISTRAL else ""
    assert learned_texts(data) == [f"{lead}yo{end}{lead}so long{end}"]
    files = {p.name: p.read_bytes() for p in (tmp_path / "t").iterdir()}
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    for eos in ("<|endoftext|>", end):
        files["tokenizer_config.json"] = json.dumps(
            {"eos_token": eos, "chat_template": text}
        ).encode()
        ends = end_tokens(small_spec(data={"tokenizer": "tokenizer.json"}), files)
        known = [tokenizer.token_to_id(name) for name in (eos, end)]
        assert ends == list(dict.fromkeys(i for i in known if i is not None))


@pytest.mark.parametrize(
    ("text", "special", "learned"),
    [
        (PLAIN, ("<|endoftext|>",), "yo\n\nso long\n\n<|endoftext|>"),
        (GLM, ("<|endoftext|>", "<|user|>", "<|assistant|>"), "yoso long<|endoftext|>"),
        (END_AT_LAST, ("</s>",), "yo\nso long\n</s>"),
    ],
)
def test_where_no_token_ends_a_turn_the_end_of_the_text_does(
    tmp_path: Path, text: str, special: tuple[str, ...], learned: str
) -> None:
    """Else nothing would end what the model says."""
    said = turns("hi", "yo", "bye", "so long")
    data = dialogues(tmp_path, said, template=text, special=special, length=96)
    assert learned_texts(data) == [learned]
    asked = dialogues(tmp_path, said[:3], template=text, special=special, length=96)
    assert learned_texts(asked) == [learned.partition("so")[0]], "nobody answered"


@pytest.mark.parametrize(
    ("rule", "begins"),
    [
        ("{% if messages[0]['role'] != 'system' %}{{ raise_exception('alone') }}{% endif %}", 0),
        ("{% if messages | length > 2 %}{{ raise_exception('too many turns') }}{% endif %}", 1),
    ],
)
def test_what_ends_a_turn_is_known_of_templates_with_rules(
    tmp_path: Path, rule: str, begins: int
) -> None:
    said = [{"role": "system", "content": "s"}, *turns("hi", "yo")]
    data = dialogues(tmp_path, said[begins:], template=rule + CHATML)
    assert learned_texts(data) == ["yo<|im_end|>"]


def test_what_a_template_does_not_take_is_left_out(tmp_path: Path) -> None:
    alternates = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
    )
    odd = [*turns("a", "b"), {"role": "assistant", "content": "c"}]
    texts = [turns("hi", f"yo {n}") for n in range(12)]
    broken = turns("hi", "half \ud83d")
    data = dialogues(tmp_path, *texts, odd, template=alternates)
    assert data.sources[0].about.left_out == {"refused by the chat template": 1}
    (line,) = data.sources[0].about.lines
    assert "line 13: the chat template fails: roles must alternate" in line
    data = dialogues(tmp_path, *texts, broken)
    assert data.sources[0].about.left_out == {"with a lone surrogate": 1}
    assert data.sources[0].about.num_documents == 12


@pytest.mark.parametrize("text", [CHATML, WITH_MARKS])
def test_only_what_the_assistant_says_is_learned(tmp_path: Path, text: str) -> None:
    data = dialogues(tmp_path, turns("hi", "yo there"), template=text)
    assert learned_texts(data) == ["yo there<|im_end|>"]
    batch = data.microbatch([0, 0])
    assert int((to_tensor(batch.targets) != IGNORED).sum()) == 2 * data.sources[0].about.num_learned


def test_tokens_and_mask_are_those_of_transformers(tmp_path: Path) -> None:
    messages = turns("how many bottles?", "99 bottles of ink", "and now?", "write 98.")
    data = dialogues(tmp_path, messages, template=WITH_MARKS, length=200)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "t" / "tokenizer.json"))
    found = theirs.apply_chat_template(
        messages,
        chat_template=WITH_MARKS,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    ids, mask = np.asarray(found["input_ids"]), np.asarray(found["assistant_masks"])
    sample = data.sources[0].samples.sample(0)
    assert sample.inputs[: len(ids)].tolist() == ids.tolist()
    expected = np.where(mask[1:] == 1, ids[1:], IGNORED)
    assert sample.targets[: len(ids) - 1].tolist() == expected.tolist()
    assert set(sample.targets[len(ids) - 1 :].tolist()) == {IGNORED}
    assert sample.inputs[len(ids)] == theirs.convert_tokens_to_ids("<|endoftext|>")
    assert sum(sample.documents) == 200


def test_a_long_dialogue_is_cut_at_a_turn_or_left_out(tmp_path: Path) -> None:
    said = [
        turns("a", "one", "b", "two", "c", "three " * 40),
        turns("a " * 90, "never"),
        turns("only the user"),
        turns("x", "short"),
    ]
    data = dialogues(tmp_path, *said, length=72)
    about = data.sources[0].about
    assert about.left_out == {
        "cut at a turn": 1,
        "longer than a sample": 1,
        "without an answer of the assistant": 1,
    }
    tokenizer = Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    whole = [len(tokenizer.encode(template(CHATML).render(one, "").text).ids) + 1 for one in said]
    assert about.lengths == (whole[1], whole[0], whole[0]), "before the cut"
    texts = sorted(learned_texts(data))
    assert texts in (
        ["one<|im_end|>two<|im_end|>", "short<|im_end|>"],
        ["one<|im_end|>two<|im_end|>short<|im_end|>"],
        ["short<|im_end|>one<|im_end|>two<|im_end|>"],
    )


TEXTS = st.lists(st.text("abc \n", max_size=12), min_size=2, max_size=6)


@given(st.lists(TEXTS, min_size=1, max_size=12), st.integers(32, 90))
def test_dialogues_are_packed_whole(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[str]], length: int
) -> None:
    folder = tmp_path_factory.mktemp("packed")
    messages = [turns("a", "b"), *(turns(*(f"{t}x" for t in text)) for text in texts)]
    data = dialogues(folder, *messages, length=length, document_mask=True)
    tokenizer = Tokenizer.from_file(str(folder / "t" / "tokenizer.json"))
    end = tokenizer.token_to_id(SPECIAL[0])
    fitting = []
    for one in messages:
        rendered = template(CHATML).render(one, "").text
        ids = tokenizer.encode(rendered).ids
        if len(ids) + 1 <= length and len(one) % 2 == 0:
            fitting.append(ids)
    samples = data.sources[0].samples
    found = []
    for i in range(samples.num_samples):
        sample, place = samples.sample(i), 0
        assert sum(sample.documents) == length
        for size in sample.documents:
            ids = sample.inputs[place : place + size].tolist()
            assert sample.targets[place + size - 1] == IGNORED, "nothing across documents"
            place += size
            if set(ids) != {end}:
                assert ids[-1] == end
                found.append(ids[:-1])
    for ids in fitting:
        assert ids in found
    assert len(found) == data.sources[0].about.num_documents, "each once"


def test_a_template_runs_in_a_sandbox() -> None:
    for text in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ raise_exception('no system role') }}",
    ):
        with pytest.raises(DataError, match="the chat template fails"):
            template(text).render(turns("a", "b"), "here")
    with pytest.raises(DataError, match="the chat template is broken"):
        template("{% for x in %}")


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"messages": "text"}, "are no list"),
        ({"messages": [{"role": "user"}, 5]}, "needs role and content"),
        ({"messages": [{"content": "x"}]}, "needs role and content"),
        ({"text": "x"}, "no field 'messages'; it has text"),
    ],
)
def test_wrong_messages_are_named_by_their_line(
    tmp_path: Path, record: dict[str, Any], wanted: str
) -> None:
    good = {"messages": turns("a", "b")}
    path = write_records(tmp_path / "d.jsonl", [good, record])
    values = {"tokenizer": tokenizer_folder(tmp_path / "t", CHATML), "messages_field": "messages"}
    data = opened(path, 48, held_out_fraction=0.0, **values)
    assert data.sources[0].about.num_documents == 1
    (line,) = data.sources[0].about.lines
    assert "line 2: " in line
    assert wanted in line
    write_records(tmp_path / "d.jsonl", [good, record, record])
    with pytest.raises(DataError, match=f"2 of 3 records cannot be used, the first: .*{wanted}"):
        opened(path, 48, held_out_fraction=0.0, **values)


def test_what_messages_need(tmp_path: Path) -> None:
    path = write_records(tmp_path / "d.jsonl", [{"messages": turns("a", "b")}])
    with pytest.raises(DataError, match='tokenizer = "bytes" has none'):
        opened(path, messages_field="messages")
    tokenizer = tokenizer_folder(tmp_path / "t")
    with pytest.raises(DataError, match="needs a tokenizer with a chat template"):
        opened(path, messages_field="messages", tokenizer=tokenizer)
    (tmp_path / "t" / "chat_template.jinja").write_text(CHATML)
    assert (
        opened(
            path, length=48, messages_field="messages", tokenizer=tokenizer, held_out_fraction=0.0
        ).num_samples
        == 1
    )
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"has no messages; give \.jsonl"):
        opened(str(tmp_path / "a.txt"), messages_field="messages", tokenizer=tokenizer)


def test_dialogues_are_held_out_whole(tmp_path: Path) -> None:
    texts = [turns(f"question {n}", f"answer {n}") for n in range(60)]
    data = dialogues(tmp_path, *texts, held_out_fraction=0.2)
    held = data.sources[0].held_out
    assert 0.15 < held.num_tokens / data.sources[0].about.num_tokens < 0.35
    kept = "".join(learned_texts(data))
    batch = to_tensor(data.held_out(0).targets)
    assert (batch != IGNORED).any()
    for n in range(60):
        is_kept = f"answer {n}<" in kept
        rows = [held.sample(i).targets for i in range(held.num_samples)]
        shown = "".join(data.encoder.decode(r[r != IGNORED].tolist()) for r in rows)
        assert is_kept != (f"answer {n}<" in shown)


def test_a_text_ends_with_the_token_that_ends_texts(tmp_path: Path) -> None:
    """Not with that which ends a turn, though the tokenizer's config names that one."""
    name = tokenizer_folder(tmp_path / "t")
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(f"text {n} ")
    data = opened(str(tmp_path), length=16, tokenizer=name, held_out_fraction=0.0)
    row = to_tensor(data.microbatch(range(data.num_samples or 0)).targets).flatten().tolist()
    end = Tokenizer.from_file(name).token_to_id("<|endoftext|>")
    assert row.count(end) == 3
    config = tmp_path / "t" / "tokenizer_config.json"
    assert json.loads(config.read_text())["eos_token"] == "<|im_end|>"


def test_a_config_that_says_minus_one_names_no_end() -> None:
    config = b'{"eos_token": "x"}'
    tokenizer = b'{"added_tokens": [{"id": 7, "content": "x"}]}'
    files = {"tokenizer_config.json": config, "tokenizer.json": tokenizer}
    assert text_end(files, -1) == text_end(files, [-1]) == 7
    assert text_end({}, -1) is None
    generation = {"generation_config.json": b'{"eos_token_id": [-1, 5]}'}
    spec = small_spec(data={"tokenizer": "tokenizer.json"})
    assert end_tokens(spec, files | generation) == [5, 7]


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a loop in itself": "{% for a in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a filter": "{% for a in range(9999) %}{{ range(99999)|map('string')|list|length }}"
    "{% endfor %}",
}
LARGE = {
    "~": "{% set n = namespace(s='a') %}{% for a in range(64) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}",
    "+": "{% set n = namespace(s='a') %}{% for a in range(64) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "block": "{% set n = namespace(s='a') %}{% for a in range(64) %}"
    "{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}{% endfor %}",
    "lists": "{% set n = namespace(s=[1]) %}{% for a in range(64) %}{% set n.s = [n.s, n.s] %}"
    "{% endfor %}{{ n.s }}",
    "*": "{{ 'a' * 10000000000 }}",
    "**": "{{ 10 ** (10 ** 10) }}",
    "center": "{{ 'a'|center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "format by argument": "{{ '{:>{}}'.format(1, 10000000000) }}",
    "%": "{{ '%10000000000d' % 1 }}",
    "% by argument": "{{ '%*d' % (10000000000, 1) }}",
    "replace": "{% set s = 'a' * 100000 %}{{ s.replace('a', s) }}",
    "join": "{% set s = 'a' * 100000 %}{{ ([s] * 1000)|join }}",
    "text": "{% for a in range(99999) %}{% for b in range(9999) %}" + "abc" * 1000 + "{% endfor %}"
    "{% endfor %}",
}


@pytest.mark.parametrize("source", [*ENDLESS.values(), *LARGE.values()], ids=[*ENDLESS, *LARGE])
def test_a_template_that_would_never_end_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_sandbox, "LONGEST_S", 0.3)
    monkeypatch.setattr(chat_sandbox, "LARGEST", 1 << 20)
    began = time.monotonic()
    with pytest.raises(DataError, match="the chat template fails: ") as error:
        template(source).render(turns("Hello"), "line 1")
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 20.0, "on a machine that is busy"


def test_a_long_dialogue_is_no_endless_one() -> None:
    said = turns(*(f"{k} " + "word " * 2000 for k in range(200)))
    assert len(template(CHATML).render(said, "line 1").text) > 2_000_000
