"""How many entries the tables of a live object have, those of its parts included."""

from __future__ import annotations

import functools
import types
from collections import Counter, deque
from collections.abc import Collection
from typing import Any

TABLES = (dict, set, frozenset, list, tuple, deque)
OURS = ("swarmnet.", "peer.", "hivemind.dht.", "hivemind.utils.timed_storage")


def table_sizes(root: object, skip: Collection[object] = ()) -> Counter[str]:
    """Entries by class and attribute, of all objects of `OURS` that `root` leads to: through
    attributes, tables, bound methods and closures. Tables within tables count where the outermost
    one is. `skip`: objects that are not walked through, such as the network under test."""
    sizes: Counter[str] = Counter()
    seen = {id(other) for other in skip}
    todo: list[tuple[str, object]] = [("", root)]
    kept: list[object] = []  # or an id might be given out again
    while todo:
        name, found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        kept.append(found)
        if isinstance(found, TABLES):
            if name:
                sizes[name] += len(found)
            inner = [*found, *found.values()] if isinstance(found, dict) else list(found)
            todo += [(name, each) for each in inner if _leads_on(each)]
        elif isinstance(found, types.MethodType):
            todo.append(("", found.__self__))
        elif isinstance(found, functools.partial):
            todo += [("", each) for each in (found.func, *found.args)]
        elif isinstance(found, types.FunctionType):
            todo += [("", cell.cell_contents) for cell in found.__closure__ or ()]
        elif type(found).__module__.startswith(OURS):
            kind = type(found).__qualname__
            todo += [(f"{kind}.{key}", value) for key, value in _attributes(found)]
    return sizes


def _leads_on(value: object) -> bool:
    return not isinstance(value, str | bytes | int | float | type(None))


def _attributes(found: object) -> list[tuple[str, Any]]:
    slots = [s for c in type(found).__mro__ for s in getattr(c, "__slots__", ())]
    names = [*slots, *getattr(found, "__dict__", {})]
    return [(name, getattr(found, name)) for name in names if hasattr(found, name)]
