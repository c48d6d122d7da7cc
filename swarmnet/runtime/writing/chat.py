"""A conversation as a prompt, by the chat template that a model's files have.

A template is a program in a language of its own, from whoever made the model. It is run with the
names that it finds in `transformers`, in the sandbox of the training data's templates, which ends
what takes too long or makes too much, and that in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from swarmnet.errors import UserError
from swarmnet.parsing.frames import GivenFiles, given
from swarmnet.parsing.process import parsing
from swarmnet.training.data.chat_sandbox import Meter, open_sandbox
from swarmnet.training.tokenizer_files import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, json_table

MAX_PROMPT_CHARS = 1 << 20
ABOUT, PROMPT_S = "the model's chat template", 30.0

Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""


def chat_template(files: Mapping[str, bytes]) -> str:
    """The template in a model's files, by name. Raises `UserError` where there is none."""
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE].decode(errors="replace")
    found = json_table(files.get(TOKENIZER_CONFIG_FILE, b"")).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UserError(
            "this run's model has no chat template (tokenizer_config.json or "
            f"{TEMPLATE_FILE}): leave --chat out and give it a text to go on with"
        )
    return found


def chat_prompt(files: Mapping[str, bytes], messages: Sequence[Message]) -> str:
    """The text that an answer to the last message follows. A process of its own makes it: not to be
    called on an event loop. Raises `UserError`."""
    chat_template(files)
    return parsing().call(
        prompt_of, ABOUT, PROMPT_S, given(files), json.dumps([dict(m) for m in messages])
    )


def prompt_of(files: GivenFiles, messages: str) -> str:
    """The same, in the process that parses. `messages`: JSON."""
    template = chat_template(files)
    try:
        from jinja2.exceptions import TemplateError
    except ImportError:
        from swarmnet.needs import install_command  # slow to import

        raise UserError(f"--chat needs jinja2: {install_command('jinja2')}") from None
    try:
        environment, meter = _sandbox()
        program = environment.from_string(template)
        meter.begin()
        text: str = program.render(
            messages=json.loads(messages),
            add_generation_prompt=True,
            **_special_tokens(files),
        )
    except TemplateError as e:
        raise UserError(f"the model's chat template does not take this: {_line(e)}") from None
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as e:
        raise UserError(f"the model's chat template cannot be used: {_line(e)}") from None
    if len(text) > MAX_PROMPT_CHARS:
        raise UserError("the model's chat template makes too long a prompt of this")
    return text


def _sandbox() -> tuple[Any, Meter]:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension

    class Generation(Extension):
        """`{% generation %}`: marks what an assistant says; here it is nothing but its content."""

        tags = {"generation"}  # noqa: RUF012  as jinja2 has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    return open_sandbox(
        [Generation, "jinja2.ext.loopcontrols"],
        {"tojson": tojson},
        {"raise_exception": raise_exception, "strftime_now": time.strftime},
    )


def _special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on."""
    found = {}
    for name, value in json_table(files.get(TOKENIZER_CONFIG_FILE, b"")).items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
