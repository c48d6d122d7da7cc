"""Dialogues as text, and which part of it the assistant says.

A chat template is a Jinja program that comes from others, so it runs in a sandbox. Which characters
are the assistant's is found in one of two ways:

- A template with generation marks (`{% generation %}`) says it itself.
- Without marks, what the assistant says in turn k begins where the text of the messages before it
  ends, with the generation prompt, and goes on to the token that ends the turn in the text of the
  first k messages. Both must begin the text of the whole dialogue. Where a template does not do so
  (it rewrites earlier turns, as that of Qwen3 does), the dialogue is refused, for then no cut is
  right.

How a template writes turns, and what ends one, is told from a dialogue of its own (`Turns`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from typing import Any

from swarmnet.errors import DataError, one_line
from swarmnet.parsing import alarm
from swarmnet.training.data.bad_records import BadRecord, utf8_of
from swarmnet.training.data.chat_sandbox import LONGEST_S, TOO_MUCH, TooSlow, jinja, open_sandbox
from swarmnet.training.tokenizer_files import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    json_table,
    special_tokens,
)

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, which stand around what the assistant says while a template works."""
QUESTION, ANSWER, NEXT = "\ufdd2", "\ufdd3", "\ufdd4"
"""Likewise, as texts of a dialogue."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
ALARM_S = 3 * LONGEST_S
"""Of the system, for one text in a parsing process: the sandbox's own limit comes first, and names
the record, but cannot interrupt a single operation."""
RULES = 2
"""To be raised whenever the same dialogue gives another text or other spans."""


@dataclass(frozen=True, slots=True)
class Turns:
    """How a template writes what the assistant says."""

    lead: str = ""
    """From the generation prompt to the answer."""
    tail: str = ""
    """After the answer, where it is the last message."""
    between: str | None = ""
    """From the answer to the text of a user's next message; None where the template takes none."""
    end: str = ""
    """The token that ends the last answer, as text; empty where none does."""

    @property
    def always_end(self) -> bool:
        """A token ends each answer, not only the last one."""
        ending = self.tail[: self.end_at]
        return bool(self.end) and (self.between is None or self.between.startswith(ending))

    @property
    def next_turn(self) -> str:
        """What the text goes on with after an answer that no token ends, up to the words of the
        next message; empty where one does."""
        return "" if self.always_end else (self.between or "").rstrip()

    @property
    def end_at(self) -> int:
        """Characters of `tail` up to where the turn ends."""
        return self.tail.index(self.end) + len(self.end) if self.end else len(self.tail)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A dialogue as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """What the assistant says, characters from and to, one a turn."""
    needs_end: bool = False
    """No token of the template ends a turn: that which ends a text does, after the last one."""


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: of the tokenizer, by name. Raises `DataError` where there is no template, or it
        is broken."""
        config = json_table(files.get(TOKENIZER_CONFIG_FILE, b""))
        source = _template_of(files, config)
        self._names = {name: _content(config.get(name)) for name in SPECIAL_TOKENS}
        added = {text for _, text in special_tokens(files.get(TOKENIZER_FILE, b""))}
        self._tokens = sorted(text for text in added if text.strip())
        self.identity = hashlib.sha256(
            json.dumps([RULES, source, self._names]).encode()
        ).hexdigest()
        """Of all that its texts depend on, but for the tokenizer."""
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
        """The text of a dialogue. `where`: for people.

        Raises:
            BadRecord: the template does not take it, or no cut of it is right.
            DataError: the template takes too long.
        """
        messages = [{key: _without_marks(v) for key, v in m.items()} for m in messages]
        whole = self._text(messages, where)
        utf8_of(whole, where)
        needs_end = not self.turns.always_end
        if self._has_marks:
            return _unmarked(whole, needs_end)
        spans = []
        for k, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            is_last = k + 1 == len(messages)
            so_far = whole if is_last else self._text(messages[: k + 1], where)
            before = self._before(messages, k, where)
            stop = self._stop(so_far, whole, len(before))
            if not so_far.startswith(before) or stop is None:
                reason = (
                    ": the chat template rewrites earlier turns, so what the assistant says "
                    "cannot be found; use a template with {% generation %} marks"
                )
                raise BadRecord(where, reason, "rewritten by the chat template")
            spans.append((len(before), stop))
        return Rendered(whole, tuple(spans), needs_end)

    @cached_property
    def turns(self) -> Turns:
        """Nothing of it is known where the template does not take a question and its answer, alone
        or after a system's text."""
        asked: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
        told: list[dict[str, Any]] = [{"role": "system", "content": QUESTION}]
        found = self._turns(asked)
        return (found if found is not None else self._turns([*told, *asked])) or Turns()

    def _turns(self, asked: list[dict[str, Any]]) -> Turns | None:
        """By a dialogue that begins so; None where the template does not take it."""
        answered = [*asked, {"role": ASSISTANT, "content": ANSWER}]
        asked_on = [*answered, {"role": "user", "content": NEXT}]
        try:
            prompt = self._text(asked, "", prompts=True)
            last = _unmarked(self._text(answered, "")).text
        except BadRecord:
            return None
        try:
            goes_on = _unmarked(self._text(asked_on, "")).text
        except BadRecord:
            goes_on = ""
        start, _, tail = last.rpartition(ANSWER)
        between = goes_on.rpartition(ANSWER)[2].partition(NEXT)[0] if NEXT in goes_on else None
        lead = start.removeprefix(prompt) if start.startswith(prompt) else ""
        return Turns(lead, tail, between, self._first_token(tail))

    def _before(self, messages: list[dict[str, Any]], k: int, where: str) -> str:
        """All that stands before what the assistant says in message k. Nothing but the template's
        own text does where that is the first one: such as a system's, which the template writes
        where a dialogue has none, and not beside a generation prompt alone."""
        if k:
            return self._text(messages[:k], where, prompts=True)
        text = self._text([{**messages[0], "content": ANSWER}], where)
        return text.partition(ANSWER)[0].removesuffix(self.turns.lead)

    def _stop(self, so_far: str, whole: str, begin: int) -> int | None:
        """Where the last turn of `so_far` ends, which begins at `begin`; None where `whole` has
        another one there."""
        turns = self.turns
        said = len(so_far) - len(turns.tail)
        if said < begin or not so_far.endswith(turns.tail):  # it ends in a way of its own
            token = self._first_token(so_far[begin:], last=True)
            stop = so_far.rindex(token) + len(token) if token else len(so_far)
            return stop if whole.startswith(so_far[:stop]) else None
        stop = said + turns.end_at
        if whole.startswith(so_far[:stop]):
            return stop
        if turns.always_end or not whole.startswith(so_far[:said]):
            return None
        ending = turns.tail[: turns.tail.index(turns.end)] if turns.end else turns.tail
        same = takewhile(lambda pair: pair[0] == pair[1], zip(ending, whole[said:], strict=False))
        return said + sum(1 for _ in same)

    def _first_token(self, text: str, *, last: bool = False) -> str:
        """The first of the tokenizer's added tokens in a text, or the last; empty where there is
        none."""
        find = text.rfind if last else text.find
        found = [(find(token), token) for token in self._tokens if token in text]
        at = (max if last else min)((at for at, _ in found), default=0)
        return max((token for place, token in found if place == at), key=len, default="")

    def _text(self, messages: list[dict[str, Any]], where: str, *, prompts: bool = False) -> str:
        self._meter.begin()
        alarm.within(ALARM_S)
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=prompts, **self._names
            )
        except (TooSlow, MemoryError) as error:  # on another machine it may do
            raise DataError(f"[data] {where}: the chat template fails: {_line(error)}") from None
        except self._errors as error:
            reason = f": the chat template fails: {_line(error)}"
            raise BadRecord(where, reason, "refused by the chat template") from None
        return text


def turns_of(files: Mapping[str, bytes]) -> Turns:
    """How the chat template in a model's files writes turns; `Turns()` where there is none that
    can be used. `files`: by name. It runs the template: for a process that parses."""
    try:
        return ChatTemplate(files).turns
    except DataError:
        return Turns()


def _unmarked(text: str, needs_end: bool = False) -> Rendered:
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
    return Rendered("".join(parts), tuple(spans), needs_end)


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
    if isinstance(error, MemoryError):
        return TOO_MUCH
    return one_line(error)
