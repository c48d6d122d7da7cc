"""Commands that README, docs, examples, benchmarks and the files of the build teach.

As a program it takes Python's own of them as JSON, [[where, word, ...], ...], and tells what is
wrong with them, a line for each: every script begins as it does where a person types its command in
the project's root, and ends where it has read its options. Nothing of `tests` is imported here: a
script that needs the project's root in its path has to see to that itself.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.machinery
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "examples/**/*.*",
    "benchmarks/**/*.py",
    "benchmarks/results/*.md",
    "tests/**/*.py",
    "peer/**/*.py",
    "swarmnet/**/*.py",
    "docker-compose.yml",
    "Dockerfile",
    "Makefile",
    ".ci/run",
)
OWN = ("tests", "benchmarks", "swarmnet", "peer", "examples")
"""Packages of the project."""
COMMAND = re.compile(r"(?:step |sudo |\$ )*(?:[^\s`\"']*/)?(python3?|swarmnet|make)\s+(.*)")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(\.\.\.)?|.*(=|/|@)[A-Z]{2,}")
"""A word for which a person puts a value: ADDR, NAME=PATH."""


@dataclass(frozen=True, slots=True)
class Taught:
    """One command."""

    where: str
    """The file, from the root."""
    program: str
    """`python`, `swarmnet` or `make`."""
    words: tuple[str, ...]

    @property
    def has_placeholder(self) -> bool:
        return any(PLACEHOLDER.fullmatch(word) for word in self.words)


def taught() -> list[Taught]:
    """All commands."""
    found = dict.fromkeys(
        each
        for glob in TEXTS
        for path in sorted(ROOT.glob(glob))
        if path.is_file() and path.suffix not in (".json", ".jsonl", ".png", ".svg", ".pyc")
        for each in _of_file(path)
    )
    return list(found)


def _of_file(path: Path) -> Iterator[Taught]:
    for line in _code(path):
        match = COMMAND.match(line.strip())
        if match is None:
            continue
        text = re.sub(r"\s#.*| \.\.\.| >+ \S+", "", match[2])
        text = re.sub(r"\[([^\]]*)\]", r"\1", text)  # what may be left out
        try:
            words = shlex.split(text)
        except ValueError:  # a quote that is closed in another line: no command
            continue
        program = "python" if match[1].startswith("python") else match[1]
        yield Taught(path.relative_to(ROOT).as_posix(), program, tuple(words))


def _code(path: Path) -> list[str]:
    """Lines of a file that are code of a shell: blocks and what stands in backticks, in Python's
    texts those of docstrings, and in other files every line, also as a comment."""
    text = path.read_text()
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    if path.suffix == ".py":
        blocks = re.findall(r"^    +((?:sudo )?\S*(?:python|swarmnet) .*)$", _docstring(text), re.M)
    elif path.suffix == ".md":
        fenced = "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S))
        blocks = _joined(fenced) + re.findall(r"^    (\S.*)$", text.replace("\\\n", ""), re.M)
    else:
        blocks = [re.sub(r"^[\s#]+", "", line) for line in _joined(text)]
    return [*blocks, *spans]


def _joined(text: str) -> list[str]:
    return text.replace("\\\n", "").splitlines()


def _docstring(text: str) -> str:
    return re.sub(r"^", "    ", ast.get_docstring(ast.parse(text)) or "", flags=re.M)


# ---- as a program ---------------------------------------------------------------------------


class _Parsed(BaseException):
    """The options are right."""


class _Wrong(BaseException):
    """They are not."""


def faults(where: str, words: list[str]) -> list[str]:
    """What is wrong with a command of Python."""
    command = f"{where}: python {' '.join(words)}"
    is_module = words[0] == "-m"
    name = words[1] if is_module else words[0]
    path = ROOT / (name.replace(".", "/") if is_module else name)
    if is_module:
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return [f"{command}: there is no {name}"]
    text = path.read_text()
    has_options = "ArgumentParser(" in text
    with _as_typed(ROOT if is_module else path.parent, words[1 if is_module else 0 :]):
        try:
            if has_options and is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            elif has_options:
                runpy.run_path(str(path), run_name="__main__")
            if has_options:
                return [f"{command}: it read no options"]
        except _Parsed:
            pass
        except _Wrong as error:
            return [f"{command}: {error}"]
        except Exception as error:
            return [f"{command}: {type(error).__name__}: {error}"]
        return [f"{command}: {line}" for line in _missing(text, path)]


@contextmanager
def _as_typed(first: Path, words: list[str]) -> Iterator[None]:
    """Python's arguments and path as those of a command."""
    argv, paths = sys.argv, sys.path
    sys.argv, sys.path = words, [str(first), *paths]
    parse = argparse.ArgumentParser.parse_args
    fail = argparse.ArgumentParser.error

    def parses(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        if not any(PLACEHOLDER.fullmatch(word) for word in words[1:]):
            parse(parser, words[1:])
            raise _Parsed
        for word in words[1:]:
            option = word.partition("=")[0]
            known = re.findall(r"--[\w-]+", parser.format_help())
            if option.startswith("--") and option not in known:
                raise _Wrong(f"there is no {option}")
        raise _Parsed

    def fails(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise _Wrong(message)

    argparse.ArgumentParser.parse_args = parses  # type: ignore[method-assign, assignment]
    argparse.ArgumentParser.error = fails  # type: ignore[method-assign]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, paths
        argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign]
        argparse.ArgumentParser.error = fail  # type: ignore[method-assign]


def _missing(text: str, path: Path) -> Iterator[str]:
    """What a script cannot import of the project, wherever in it that stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = {alias.name: () for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {node.module: tuple(alias.name for alias in node.names)}
        else:
            continue
        for name, of_it in names.items():
            top = name.partition(".")[0]
            if top not in OWN and not (path.parent / f"{top}.py").is_file():
                continue
            if importlib.machinery.PathFinder.find_spec(top, sys.path) is None:
                yield f"line {node.lineno}: no module named {top!r}"
                continue
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                yield f"line {node.lineno}: {error}"
                continue
            for each in of_it:
                if not hasattr(module, each) and not _is_module(f"{name}.{each}"):
                    yield f"line {node.lineno}: {name} has no {each}"


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def main() -> None:
    sys.path = [path for path in sys.path if path != str(Path(__file__).parent)]
    for where, *words in json.load(sys.stdin):
        for line in faults(where, words):
            print(line)


if __name__ == "__main__":
    main()
