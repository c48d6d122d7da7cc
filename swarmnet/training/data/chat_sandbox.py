"""The sandbox in which a chat template runs: a Jinja program of somebody else's, which must neither
hold a peer up nor fill its memory.

Jinja's own sandbox keeps a program from what it must not touch, and its ranges at 100,000. That
alone bounds nothing: loops nest, macros call each other, strings double. Here all that a program
makes is counted, characters and elements alike, and so is each run of a block. Where that comes to
more than `BUDGET`, or takes longer than `LONGEST_S`, it is stopped. Between two looks at the clock
lies one operation, and how large its result may be is checked before it is made.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from swarmnet.errors import DataError

LONGEST_S = 5.0
"""On a core, of one text. Those of real templates take milliseconds."""
BUDGET = 1 << 27
LARGEST = 1 << 23
"""Characters and elements of one value."""
TEXTS = str | bytes | bytearray
MAX_BITS = 4096
"""Of a whole number."""
WIDE = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*")
"""In a format: a field as wide as nobody needs, or as an argument says."""
LEFT_OUT = ("urlize", "striptags", "wordwrap", "sum", "pprint", "xmlattr")
"""Filters whose work is not bounded by what they are given; no chat needs them."""
TOO_MUCH = "it makes too much of its input, or does not come to an end"


def jinja(module: str) -> Any:
    """Raises `DataError` where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        from swarmnet.needs import install_command  # slow to import

        raise DataError(
            f"[data] messages_field needs jinja2; bring it with: {install_command('jinja2')}"
        ) from None


class TooSlow(ValueError):
    """A program takes too long on this machine."""


class Meter:
    """What one run of a program has used. Methods raise `ValueError` where it is too much."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """A new text."""
        self._left = BUDGET
        self._until = self._clock() + LONGEST_S

    def tick(self, size: int = 1) -> None:
        """A block runs that writes so many characters, or a value of this size was made."""
        self._left -= size
        if self._left < 0:
            raise ValueError(TOO_MUCH)
        if self._clock() > self._until:
            raise TooSlow(f"it takes longer than {LONGEST_S:g} s")

    def made(self, value: Any) -> Any:
        """The value itself, whose size is counted."""
        self.tick(1 + _size(value, LARGEST))
        return value

    def call(self, function: Any, arguments: Sequence[Any]) -> None:
        """Before a method, or a filter: it makes no more than the product of what it is given."""
        self.tick()
        own = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(own, TEXTS):
            arguments = (own, *arguments)
        if name in ("format", "format_map", "do_format") and WIDE.search(str(arguments[0])):
            raise ValueError("a format has too wide a field")
        size = 1
        for value in arguments:
            size *= max(1, abs(value) if isinstance(value, int) else _length(value))
        if name == "translate" and len(arguments) > 1:  # a character becomes any text of the table
            size = _length(arguments[0]) * _size(arguments[1], LARGEST)
        if name in ("join", "do_join"):  # each element is in it
            size = sum(_size(value, LARGEST) + 1 for value in arguments) + size
        if size > LARGEST:
            raise ValueError(TOO_MUCH)

    def operation(self, operator: str, left: Any, right: Any) -> None:
        """Before `left operator right`."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if numbers:
            bits = [abs(n).bit_length() for n in (left, right)]
            most = {"**": bits[0] * abs(right) if bits[1] < MAX_BITS else MAX_BITS + 1}
            too_much = most.get(operator, sum(bits)) > MAX_BITS
        elif operator == "*":
            amount = left if isinstance(left, int) else right
            value = right if isinstance(left, int) else left
            too_much = isinstance(amount, int) and _size(value, LARGEST) * amount > LARGEST
        elif operator == "%":
            too_much = isinstance(left, str) and WIDE.search(left) is not None
        else:
            too_much = _length(left) + _length(right) > LARGEST
        if too_much:
            raise ValueError(TOO_MUCH)


def open_sandbox(
    extensions: Sequence[Any], filters: Mapping[str, Any], functions: Mapping[str, Any]
) -> tuple[Any, Meter]:
    """An environment of Jinja, and what measures its programs: `Meter.begin` comes before each run.
    Raises `DataError` where Jinja is missing."""
    sandbox, runtime = jinja("jinja2.sandbox"), jinja("jinja2.runtime")
    meter = Meter()

    class Bounded(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[name-defined]
        intercepted_binops = frozenset(("+", "*", "**", "%"))
        code_generator_class = _generator()

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(__obj, runtime.Macro | runtime.LoopContext | type):
                meter.call(__obj, (*args, *kwargs.values()))
            return meter.made(super().call(__context, __obj, *args, **kwargs))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            meter.operation(operator, left, right)
            return meter.made(super().call_binop(context, operator, left, right))

    environment = Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=extensions,
        finalize=meter.made,
        optimized=False,
    )
    environment.meter = meter
    environment.globals.pop("lipsum")
    environment.globals.update(functions)
    environment.filters.update(filters)
    for name in LEFT_OUT:
        environment.filters.pop(name)
    for name, function in environment.filters.items():
        environment.filters[name] = _measured(function, meter)
    return environment, meter


def _measured(function: Callable[..., Any], meter: Meter) -> Any:
    """A filter that is measured. What Jinja passes to it first stays first."""
    num_own = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        meter.call(function, (*args[num_own:], *kwargs.values()))
        return meter.made(function(*args, **kwargs))

    return measured


def _generator() -> type:
    """Jinja's compiler, which counts each run of a block, and what is made of lists and texts."""
    compiler, nodes = jinja("jinja2.compiler"), jinja("jinja2.nodes")

    class Generator(compiler.CodeGenerator):  # type: ignore[name-defined]
        def blockvisit(self, body: Any, frame: Any) -> None:
            body = list(body)
            parts = [p for node in body if isinstance(node, nodes.Output) for p in node.nodes]
            size = 1 + sum(len(p.data) for p in parts if isinstance(p, nodes.TemplateData))
            self.writeline(f"environment.meter.tick({size})")
            super().blockvisit(body, frame)

        def _counted(self, name: str, node: Any, frame: Any) -> None:
            self.write("environment.meter.made(")
            getattr(super(), name)(node, frame)
            self.write(")")

        def visit_List(self, node: Any, frame: Any) -> None:
            self._counted("visit_List", node, frame)

        def visit_Dict(self, node: Any, frame: Any) -> None:
            self._counted("visit_Dict", node, frame)

        def visit_Concat(self, node: Any, frame: Any) -> None:
            self._counted("visit_Concat", node, frame)

        def visit_Tuple(self, node: Any, frame: Any) -> None:
            if node.ctx == "load":
                self._counted("visit_Tuple", node, frame)
            else:
                super().visit_Tuple(node, frame)

    return Generator


def _length(value: Any) -> int:
    return len(value) if isinstance(value, TEXTS | list | tuple | dict | range) else 1


def _size(value: Any, limit: int) -> int:
    """Characters and elements of a value and of all in it, as often as they are in it. Raises
    `ValueError` where that is more than `limit`."""
    if isinstance(value, TEXTS | range):
        size = len(value)
    elif isinstance(value, list | tuple | dict):
        size = len(value)
        for part in value.values() if isinstance(value, dict) else value:
            size += _size(part, limit - size)
    else:
        size = 1
    if size > limit:
        raise ValueError(TOO_MUCH)
    return size
