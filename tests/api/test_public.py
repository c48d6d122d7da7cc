"""What `import swarmnet` offers stays: names and signatures are compared with a written list."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import swarmnet

ROOT = Path(__file__).parents[2]
WRITTEN = Path(__file__).with_name("public.txt")
LIGHT = {"swarmnet", "swarmnet.version"}


def described() -> list[str]:
    """A line for each name, and for each public part of a class."""
    return [line for name in swarmnet.__all__ for line in _lines(name, getattr(swarmnet, name))]


def _lines(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield f"{name}: {type(value).__name__}"
        return
    if not inspect.isclass(value):
        yield f"{name}{inspect.signature(value)}"
        return
    names = set(dir(value)) - set(dir(Exception if issubclass(value, Exception) else object))
    if name == "RunSpec":  # its tables are those of run.toml, which the run's id holds fast
        yield f"{name}({', '.join(value.model_fields)})"
        return
    if dataclasses.is_dataclass(value):
        fields = {field.name: field for field in dataclasses.fields(value)}
        hints = get_type_hints(value)
        shown = (_field(field, hints[name]) for name, field in fields.items())
        yield f"{name}({', '.join(shown)})"
        names -= set(fields)
    else:
        bases = (base.__name__ for base in value.__bases__)
        yield f"{name}({', '.join(base for base in bases if base[0] != '_')})"
    for member in sorted(names - {"panel"}):
        if not member.startswith("_") or member in ("__enter__", "__aenter__"):
            yield f"    {member}{_signature(getattr(value, member))}"


def _field(field: dataclasses.Field[Any], hint: Any) -> str:
    kind = inspect.formatannotation(hint).replace("pathlib.", "").replace("typing.", "")
    if field.default is dataclasses.MISSING:
        return f"{field.name}: {kind}"
    return f"{field.name}: {kind} = {field.default!r}"


def _signature(member: Any) -> str:
    if isinstance(member, property):
        return f" -> {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]
    return str(inspect.signature(member)) if callable(member) else f" = {member!r}"


def test_names_and_signatures_are_those_of_the_list() -> None:
    """A line that goes or changes breaks programs of others: CHANGELOG.md says so then. A new one
    is added here, and to docs/python.md."""
    assert described() == WRITTEN.read_text().splitlines()


def test_every_public_name_is_on_the_page_and_has_a_docstring() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    for name in swarmnet.__all__:
        assert re.search(rf"[`.=]{name}\b", page), name
        assert inspect.getdoc(getattr(swarmnet, name)), name


def test_to_import_it_costs_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); import swarmnet; "
        "print(*sorted(set(sys.modules) - before - sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {n for n in done.stdout.split() if n.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == LIGHT


def test_a_name_that_is_none_is_none() -> None:
    assert not hasattr(swarmnet, "nothing")
    assert set(swarmnet.__all__) <= set(dir(swarmnet))
