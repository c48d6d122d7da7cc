"""`peer.toml`: options of `swarmnet peer` in a file, by their names on the command line. Those that
are typed win.

A value of the file becomes the text that one would type, and the parser of the command line reads
it: so it is checked as an option is, and there is no second list of options."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from swarmnet.errors import UsageError
from swarmnet.files import text_of
from swarmnet.runtime.state_dir import first_free_dir

CONFIG_FILE = "peer.toml"
MAX_FILE_BYTES = 64 << 10
NOT_IN_A_FILE = ("config", "parent_pid", "help")


def with_config(command: Any, arguments: Sequence[str]) -> list[str]:
    """The arguments of `swarmnet peer` with those of its file, where it has one, that they do not
    name themselves. `command`: what the parser makes of it. Raises `UsageError`, one line."""
    given = _given(command, arguments)
    path, folder = _file(given)
    if path is None:
        return list(arguments)
    words = [] if folder is None else ["--state-dir", str(folder)]
    for key, value in read_config(path).items():
        parameter = _parameter(command, key, path)
        its = _words(parameter, value, f"{path}: {key}")
        _check(command, parameter, its, f"{path}: {key}")
        if parameter.name not in given and not (folder and parameter.name == "state_dir"):
            words += its
    return [*words, *arguments]


def read_config(path: Path) -> dict[str, Any]:
    """Raises `UsageError`, one line."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is too large to be a file of options")
    try:
        return tomllib.loads(text_of(raw, path, UsageError))
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is not TOML: {' '.join(str(e).split())}") from None


def _given(command: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Texts of the options that the command line names, by parameter; empty where it is wrong,
    which the parser then says."""
    try:
        context = command.context_class(command, info_name="peer", resilient_parsing=True)
        with context.scope(cleanup=False):
            values, _, _ = command.make_parser(context).parse_args(list(arguments))
    except Exception:  # of the click that typer brings
        return {}
    return dict(values)


def _file(given: dict[str, Any]) -> tuple[Path | None, Path | None]:
    """The file, and the state folder that it is of where nobody named one."""
    if given.get("config"):
        return Path(given["config"]), None
    if given.get("state_dir"):
        path = Path(given["state_dir"]) / CONFIG_FILE
        return (path if path.exists() else None), None
    folder = first_free_dir()
    path = folder / CONFIG_FILE
    return (path, folder) if path.exists() else (None, None)


def _parameter(command: Any, key: str, path: Path) -> Any:
    """Of a key, which is the option without its dashes; `max_upload` is `max-upload`."""
    by_name = {
        flag.removeprefix("--"): parameter
        for parameter in command.params
        if parameter.name not in NOT_IN_A_FILE
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    name = key.replace("_", "-")
    if name not in by_name:
        near = get_close_matches(name, by_name, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{path}: {key[:40]!r} is no option of `swarmnet peer`{hint}")
    return by_name[name]


def _words(parameter: Any, value: Any, where: str) -> list[str]:
    name = where.rpartition(" ")[2].replace("_", "-")
    flag = f"--{name}"
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: it is true or false")
        if flag in parameter.secondary_opts:
            value, flag = not value, parameter.opts[0]
        if value:
            return [flag]
        return list(parameter.secondary_opts[:1])
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not parameter.multiple:
        raise UsageError(f"{where}: one value, and no list")
    if not all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in values):
        raise UsageError(f"{where}: a text or a number" + ", or a list" * parameter.multiple)
    return [f"{flag}={v}" for v in values]


def _check(command: Any, parameter: Any, words: Sequence[str], where: str) -> None:
    """Raises `UsageError` where the command line would not take it."""
    context = command.context_class(command, info_name="peer", resilient_parsing=False)
    with context.scope(cleanup=False):
        try:
            values, _, _ = command.make_parser(context).parse_args(list(words))
            parameter.process_value(context, values.get(parameter.name))
        except Exception as error:  # of the click that typer brings
            if not hasattr(error, "format_message"):
                raise
            text = " ".join(error.format_message().split()).rstrip(".")
            why = (text.partition(": ")[2] or text).removeprefix("Value error, ")
            raise UsageError(f"{where}: {why}") from None
