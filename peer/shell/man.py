"""`swarmnet man`: the commands as a page for `man`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from peer.shell.described import DescribedCommand, DescribedOption
from swarmnet.runtime.options import INVITE_VARIABLE, NOTIFY_VARIABLE

VARIABLES = {
    INVITE_VARIABLE: "What --invite says, unseen by the machine's other users.",
    NOTIFY_VARIABLE: "What --notify says, likewise.",
}


def page(
    about: str, commands: Sequence[DescribedCommand], exit_codes: Mapping[int, str], version: str
) -> str:
    """In man's macros (`man 7 man`). `about`: one sentence about the program."""
    lines = [
        f'.TH SWARMNET 1 "" "swarmnet {_text(version)}"',
        ".SH NAME",
        f"swarmnet \\- {_text(about.rstrip('.'))}",
        ".SH SYNOPSIS",
        ".B swarmnet",
        "COMMAND [OPTION]...",
        ".SH COMMANDS",
    ]
    for command in commands:
        lines += _command(command)
    lines += [".SH ENVIRONMENT", *_tagged(VARIABLES)]
    lines += [".SH EXIT STATUS", *_tagged({str(k): text for k, text in exit_codes.items()})]
    return "\n".join(lines)


def _command(command: DescribedCommand) -> Iterator[str]:
    yield f".SS {_text(command.usage)}"
    yield _line(command.paragraphs[0])
    for paragraph in command.paragraphs[1:]:
        yield from (".PP", _line(paragraph))
    for panel, options in command.panels():
        yield from (".PP", f".I {_text(panel)}")
        yield from _tagged({option.typed: _meaning(option) for option in options})


def _meaning(option: DescribedOption) -> str:
    notes = [option.bounds, f"default: {option.default}" if option.default else ""]
    notes.append("required" if option.is_required else "")
    note = "; ".join(filter(None, notes))
    return f"{option.text} ({note})" if note else option.text


def _tagged(texts: Mapping[str, str]) -> Iterator[str]:
    for tag, text in texts.items():
        yield from (".TP", f".B {_text(tag)}", _line(text))


def _line(text: str) -> str:
    """Of its own: one that begins with a dot or a quote would be a macro."""
    return f"\\&{_text(text)}" if text[:1] in (".", "'") else _text(text)


def _text(text: str) -> str:
    """Every character as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga")
    return text.replace("~", "\\(ti").replace("^", "\\(ha").replace('"', "\\(dq")
