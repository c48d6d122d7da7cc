"""`swarmnet state`: what peers have left on this machine, and its removal."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from peer.disk.finding import Found, find, folders_of, remove
from peer.disk.items import CHECKPOINTS, Item, beyond, named
from peer.observe.layout import Column
from peer.observe.table import FittedTable
from peer.options import DiskOptions
from swarmnet.errors import UsageError, UserError
from swarmnet.observe.text import size
from swarmnet.protocol.resource_limits import parse_size
from swarmnet.runtime.state_dir import state_root
from swarmnet.training.data.cache import cache_root

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400


def show_state(options: DiskOptions, console: Console) -> None:
    """Lists, or removes what is asked for and says what went. Raises `UserError`."""
    keep = None if options.keep is None else _size(options.keep)
    if options.remove and keep is not None:
        raise UsageError("give --remove or --keep, not both")
    peers = [folder for root in _roots(options) for folder in folders_of(root)]
    found = find(peers, cache_root() / "data")
    items = [one.item for one in found]
    if not options.remove and keep is None:
        _show(items, options, console)
        return
    going = [i for name in options.remove for i in named(items, name)]
    if keep is not None:
        going = beyond(items, keep)
    gone, failures = _remove([one for one in found if one.item in going], peers)
    left = sum(i.size for i in items) - sum(i.size for i in gone)
    if options.as_json:
        console.print_json(json.dumps([asdict(i) for i in gone]), ensure_ascii=True)
        _raise(failures)
        return
    for item in gone:
        console.print(f"removed {item.name} ({size(item.size)})", soft_wrap=True)
    console.print(f"{size(left)} are left")
    _raise(failures)
    if keep is not None and left > keep:
        held = sum(i.size for i in items if i.held_by)
        raise UserError(
            f"{size(left)} are more than --keep {options.keep}: {size(held)} are held by peers at "
            "work; stop them first"
        )


def removable_line(state_dir: Path, run_id: str) -> str:
    """What a run that is over has left in a peer's state folder, and how to remove it; empty where
    that is nothing. Blocks."""
    items = [one.item for one in find([state_dir], cache_root() / "data")]
    of_run = [i for i in items if i.kind == CHECKPOINTS and run_id.startswith(i.run_id)]
    total = sum(item.size for item in of_run)
    if not total:
        return ""
    where = "" if state_dir.parent == state_root() else f" --state-dir {state_dir}"
    return (
        f"its checkpoints take {size(total)} of {state_dir}; when the peer has ended and the model "
        f"is exported, `swarmnet state --remove {of_run[0].run_id}{where}` removes them"
    )


def _roots(options: DiskOptions) -> Sequence[Path]:
    for folder in options.state_dir:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is no folder; name a peer's state folder, or one that has some"
            )
    return [path.absolute() for path in options.state_dir] or [state_root()]


def _size(text: str) -> float:
    try:
        return parse_size(text)
    except ValueError:
        raise UsageError(f"--keep {text!r}: an amount is written 20GB or 512MiB") from None


def _remove(found: Sequence[Found], peers: Sequence[Path]) -> tuple[list[Item], list[UserError]]:
    """What went, and why the rest did not."""
    gone, failures = list[Item](), list[UserError]()
    for one in found:
        try:
            remove(one, peers)
            gone.append(one.item)
        except UserError as error:
            failures.append(error)
    return gone, failures


def _raise(failures: Sequence[UserError]) -> None:
    if failures:
        raise UserError("; ".join(map(str, failures)))


def _show(items: Sequence[Item], options: DiskOptions, console: Console) -> None:
    if options.as_json:
        console.print_json(json.dumps([asdict(i) for i in items]), ensure_ascii=True)
        return
    if not items:
        console.print("nothing of any run is on this machine")
        return
    items = sorted(items, key=lambda i: -i.used_unix_s)
    now = time.time()
    columns = [
        Column("what", [i.name for i in items]),
        Column("size", [size(i.size) for i in items]),
        Column("age", [age(now - i.used_unix_s) for i in items], goes=2),
        Column("run", [i.run_name or i.run_id for i in items], goes=3),
        Column("held", [i.held_by for i in items], 1, ["yes" * bool(i.held_by) for i in items], 4),
    ]
    console.print(FittedTable(columns, to_right=("size", "age"), folds="what"))
    total = size(sum(i.size for i in items))
    console.print(
        f"{total}; `swarmnet state --remove NAME` removes one of them, or all of a run; "
        "`swarmnet state --keep 20GB` the oldest",
        soft_wrap=True,
    )


def age(seconds: float) -> str:
    """In one unit."""
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(0.0, seconds) / MINUTE_S:.0f} min"
