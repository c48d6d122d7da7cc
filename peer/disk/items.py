"""What of a machine's disk may be removed: by name, or the oldest until a bound is kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet.errors import UsageError
from swarmnet.plurals import counted

CHECKPOINTS, WEIGHTS, FILES, COUNTED, TOKENS, LOCAL = (
    "checkpoints",
    "weights",
    "files",
    "counted",
    "tokens",
    "local run",
)
"""Kinds. `weights`: those that a run began from; `files`: its tokenizer and the like; `counted`:
which microbatches counted; `local run`: logs and checkpoints of a `swarmnet local`."""
SHORTEST_ID = 4
"""Characters of a run's id that name it."""


@dataclass(frozen=True, slots=True)
class Item:
    """A part of what is there that can be removed alone."""

    name: str
    """Its path, from where the machine's state folders or caches are."""
    kind: str
    size: int
    """Bytes."""
    used_unix_s: float
    """When it was last written or, of tokens, opened."""
    run_id: str = ""
    """The beginning of it; empty where it is of no run, or of several."""
    run_name: str = ""
    held_by: str = ""
    """Who is at work with it, in words; empty for nobody."""


def named(items: Sequence[Item], name: str) -> list[Item]:
    """What a person means: an item, all in a folder, or all of a run (its name, or the beginning of
    its id). Raises `UsageError` where that is nothing, several runs, or held by a peer at work."""
    name = name.rstrip("/")
    found = [i for i in items if i.name == name or i.name.startswith(f"{name}/")]
    if not found:
        found = [i for i in items if i.run_name == name and name]
        found += [i for i in items if len(name) >= SHORTEST_ID and i.run_id.startswith(name)]
        found = list(dict.fromkeys(found))
        if len(runs := sorted({i.run_id for i in found})) > 1:
            raise UsageError(
                f"{counted(len(runs), 'run')} are called so; name one by its id: {_list(runs)}"
            )
    if not found:
        raise UsageError(f"there is nothing called {name}; `swarmnet state` lists what is there")
    for item in found:
        if item.held_by:
            raise UsageError(f"{item.name} stays: {item.held_by}")
    return found


def beyond(items: Sequence[Item], keep_bytes: float) -> list[Item]:
    """The oldest that nobody holds, of which the rest takes no more than `keep_bytes`, or as little
    as may be."""
    left = sum(item.size for item in items)
    going = []
    for item in sorted(items, key=lambda i: (i.used_unix_s, i.name)):
        if left <= keep_bytes:
            break
        if not item.held_by:
            going.append(item)
            left -= item.size
    return going


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
