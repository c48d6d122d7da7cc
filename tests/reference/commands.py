"""Commands, their options, and with which codes they end."""

from __future__ import annotations

from collections.abc import Iterator

from peer.cli import EXIT_CODES, EXIT_FAILED, EXIT_USAGE, app
from peer.shell.described import DescribedCommand, DescribedOption, described
from swarmnet import errors
from tests.reference.docstrings import of_class
from tests.reference.tables import code, either, page, table


def commands() -> str:
    return page(
        "Commands",
        "Each command has a `--help`, which says the same. Options may stand in any order. With "
        "`peer`, the file `peer.toml` in the state folder (or `--config FILE`) may hold options "
        "by their names. [Exit codes](exit-codes.md) are the same for all commands.",
        table(
            ("command", "what it does"),
            ((f"[{c.name}](#{c.name})", c.paragraphs[0]) for c in described(app)),
        ),
        *(_command(c) for c in described(app)),
    )


def _command(command: DescribedCommand) -> str:
    parts = [f"## {command.name}", f"    {command.usage}", *command.paragraphs]
    for panel, options in command.panels():
        parts += [f"**{panel}**", table(("option", "meaning", "default"), map(_row, options))]
    return "\n\n".join(parts)


def _row(option: DescribedOption) -> tuple[str, str, str]:
    name = "<br>".join(map(code, option.flags[:-1])) + "<br>" * (len(option.flags) > 1)
    last = option.flags[-1:]
    choices = option.value.split("|")
    value = option.value if len(choices) == 1 else ""
    name += code(" ".join(filter(None, (*last, value))))
    notes = [option.bounds, "" if value else either(list(map(code, filter(None, choices))))]
    if option.repeats and option.flags and "repeat" not in option.text.lower():
        notes.append("may be repeated")
    note = ", ".join(filter(None, notes))
    text = option.text + (f" ({note})" if note else "")
    return name, text, "required" if option.is_required else code(option.default)


def exit_codes() -> str:
    return page(
        "Exit codes",
        "All commands end with one of four codes. An error is one line on standard error that "
        "says what to do; `--debug` adds a traceback.",
        table(("code", "meaning"), ((code(str(k)), text) for k, text in EXIT_CODES.items())),
        "A process that a signal has killed, or the kernel for want of memory, has the code that "
        "the shell gives it: 128 and the number of the signal.",
        "## Errors",
        "Errors that a person can mend, by their class. From Python they are exceptions ([From "
        "Python](../python.md#errors)), all of them a `swarmnet.UserError`.",
        table(("class", "code", "what is wrong"), _errors()),
    )


def _errors() -> Iterator[tuple[str, str, str]]:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and k is not errors.FinalError]
    for kind in kinds:
        if issubclass(kind, errors.UserError):
            exit_code = EXIT_USAGE if issubclass(kind, errors.FinalError) else EXIT_FAILED
            yield code(kind.__name__), code(str(exit_code)), of_class(kind)
