"""Dialogues as text, and which part of it the assistant says.

A chat template is a Jinja program that comes from others, so it runs in a sandbox. Which characters
are the assistant's is found in one of two ways:

- A template with generation marks (`{% generation %}`) says it itself.
- Without marks, what the assistant says in turn k is what the text of the first k messages has
  more than the text of those before it with the generation prompt. This needs that each of these
  texts begins the next one. Where a template does not do so (it rewrites earlier turns, as that
  of Qwen3 does), it is refused, for then no cut is right.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from swarmnet.errors import DataError
from swarmnet.training.data.chat_sandbox import jinja, open_sandbox
from swarmnet.training.end_tokens import TOKENIZER_CONFIG_FILE, json_table

TEMPLATE_FILE = "chat_template.jinja"
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, which stand around what the assistant says while a template works."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A dialogue as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """What the assistant says, characters from and to, one a turn."""


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: of the tokenizer, by name. Raises `DataError` where there is no template, or it
        is broken."""
        config = json_table(files.get(TOKENIZER_CONFIG_FILE, b""))
        source = _template_of(files, config)
        self._names = {name: _content(config.get(name)) for name in SPECIAL_TOKENS}
        self.identity = hashlib.sha256(json.dumps([source, self._names]).encode()).hexdigest()
        """Of all that its texts depend on."""
        self._has_marks = MARKS.search(source) is not None
        errors = jinja("jinja2").TemplateError, RecursionError, MemoryError
        environment, self._meter = open_sandbox(
            [_generation_extension(), "jinja2.ext.loopcontrols"],
            {"tojson": _to_json},
            {
                "raise_exception": _raise,
                "strftime_now": lambda form: datetime(2000, 1, 1).strftime(form),
            },
        )
        self._errors = (*errors, TypeError, ValueError, LookupError, ArithmeticError)
        try:
            self._template = environment.from_string(source)
        except errors as error:
            raise DataError(f"[data] the chat template is broken: {_line(error)}") from None

    def render(self, messages: list[dict[str, Any]], where: str) -> Rendered:
        """The text of a dialogue. `where`: for people. Raises `DataError`."""
        messages = [{key: _without_marks(v) for key, v in m.items()} for m in messages]
        if self._has_marks:
            return _unmarked(self._text(messages, where))
        whole = self._text(messages, where)
        spans = []
        for k, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = self._text(messages[:k], where, prompts=True)
            so_far = whole if k + 1 == len(messages) else self._text(messages[: k + 1], where)
            if not (so_far.startswith(prompt) and whole.startswith(so_far)):
                raise DataError(
                    f"[data] {where}: the chat template rewrites earlier turns, so what the "
                    "assistant says cannot be found; use a template with {% generation %} marks"
                )
            spans.append((len(prompt), len(so_far)))
        return Rendered(whole, tuple(spans))

    def _text(self, messages: list[dict[str, Any]], where: str, *, prompts: bool = False) -> str:
        self._meter.begin()
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=prompts, **self._names
            )
        except self._errors as error:
            raise DataError(f"[data] {where}: the chat template fails: {_line(error)}") from None
        return text


def _unmarked(text: str) -> Rendered:
    """The text without its marks, and where they were."""
    parts, spans, length, start = [], [], 0, 0
    for part in re.split(f"([{OPEN}{CLOSE}])", text):
        if part == OPEN:
            start = length
        elif part == CLOSE:
            spans.append((start, length))
        else:
            parts.append(part)
            length += len(part)
    return Rendered("".join(parts), tuple(spans))


def _without_marks(value: Any) -> Any:
    return value.replace(OPEN, "").replace(CLOSE, "") if isinstance(value, str) else value


def _template_of(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str:
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE].decode(errors="replace")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if not isinstance(template, str) or not template:
        raise DataError(
            "[data] messages_field needs a tokenizer with a chat template: "
            f"{TEMPLATE_FILE} or {TOKENIZER_CONFIG_FILE} beside tokenizer.json"
        )
    return template


def _generation_extension() -> type:
    """Jinja's `{% generation %}` block, which puts marks around what is in it."""
    ext, nodes = jinja("jinja2.ext"), jinja("jinja2.nodes")

    class Generation(ext.Extension):  # type: ignore[name-defined]
        tags = {"generation"}  # noqa: RUF012  jinja's own way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    return Generation


def _content(token: Any) -> str:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> str:
    raise ValueError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
