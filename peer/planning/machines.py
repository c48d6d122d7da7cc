"""`--machines` and `--links`: what people write of the machines that are to train a run."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peer.planning.cards import (
    ALONE_SHARD_S,
    CARDS,
    CPU_FLOPS_PER_S,
    HOST_GB,
    MAC_FLOPS_PER_S,
    MICROBATCH_S,
    PLAIN_GPU,
    SHARD_S,
    SHARED_SHARD_S,
    SYSTEM_GB,
    SYSTEM_PART,
    TERA,
    UPDATE_PARAMETERS_PER_S,
    USABLE,
    USABLE_LINK,
    Card,
    card_named,
    known_cards,
)
from swarmnet.errors import UsageError, one_line
from swarmnet.files import text_of
from swarmnet.protocol.planning.houses import INSIDE_BYTES_PER_S, INSIDE_LATENCY_S
from swarmnet.protocol.planning.model import Machine

GB, MBIT = 1e9, 1e6 / 8
MAX_MACHINES, MAX_FILE_BYTES = 4096, 1 << 20
MAX_CARDS = 64
MOST = 1_000_000
"""Of any number that is said of a machine or a link: GB, TFLOP/s, Mbit/s, ms."""
MAX_NAME = 40
"""Characters of a machine's name, which stands in a table."""
EXAMPLE = '--machines "24GB-gpu*2, 2x rtx4090, 16GB-cpu*3, mac-32GB"'
LINKS_EXAMPLE = (
    "--links 20Mbit/100Mbit,30ms (up/down, and one way between two machines), or with ,house=4 "
    "where four machines share such a link"
)
FILE_EXAMPLE = 'card = "rtx4090", or memory_gb = 24 and tflops = 71'
HOME = "20Mbit/100Mbit,30ms"
HERE = "here"
HERE_COUNT = re.compile(rf"{HERE}(?:\s*\*\s*(\d{{1,9}}))?", re.IGNORECASE)
MAX_HERE = 256
"""As of `swarmnet local`."""
AMOUNT = r"(\d+(?:\.\d+)?)"
MEMORY = rf"{AMOUNT}\s*GI?B"
KIND = re.compile(rf"(?:{MEMORY}-(gpu|cpu|mac)|(gpu|cpu|mac)-{MEMORY})", re.IGNORECASE)
CARDS_IN_ONE = re.compile(r"(\d{1,9})\s*x\s*(.+)", re.IGNORECASE)
ITEM = re.compile(
    rf"(.+?)(?:\+{MEMORY})?(?:@{AMOUNT}\s*TFLOPS?)?(?:\s*\*\s*(\d{{1,9}}))?", re.IGNORECASE
)
RATE = rf"{AMOUNT}\s*([kMG])bit(?:/s)?"
OF_RATE = {"K": 0.001, "M": 1, "G": 1000}
"""Mbit/s."""
LINKS = re.compile(
    rf"{RATE}(?:\s*/\s*{RATE})?\s*,\s*{AMOUNT}\s*ms(?:\s*,\s*house\s*=\s*(\d{{1,9}}))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Links:
    """Of a machine, or of a house."""

    up: float
    """Bytes/s."""
    down: float
    latency_s: float
    house: int = 1
    """So many machines share it."""


@dataclass(frozen=True, slots=True)
class RoundEnds:
    """Parameters a second at the end of a round, beside messages."""

    alone_per_s: float
    """Of a stage's only replica."""
    shared_per_s: float
    """Of one of several."""


@dataclass(frozen=True, slots=True)
class Described:
    """A machine as a person names it."""

    name: str
    device_gb: float
    """Of one card."""
    host_gb: float
    is_gpu: bool
    card: Card | None
    flops_per_s: float
    """That it reaches, or one of its cards, where it has none of a name; 0 where the card says."""
    note: str = ""
    """What was assumed."""
    ends: RoundEnds | None = None
    """What the end of a round was measured to take; None where it was not."""
    links: Links | None = None
    hours: float = 24.0
    is_free: bool = False
    """Its memory is what is free there, as it was looked up."""
    cards: int = 1
    host_gb_s: float = 0.0
    """GB/s that copies from main memory to a card reach; 0 where the card says."""
    between_gb_s: float = 0.0
    """Likewise, of sums over ranks, from a card to another."""
    part: float = 1.0
    """Of the machine's work that one of several peers there gets."""
    household: str = ""
    """The house that it is in; empty: none."""
    sharing: int = 1
    """Peers that share its link."""
    seat_of: str = ""
    """The machine that has this peer and others; empty where it is alone there."""

    def precision(self, wanted: str) -> str:
        """Of its passes, as it would choose it. `wanted`: fp32, bf16, fp16 or auto."""
        if wanted != "auto":
            return wanted
        if not self.is_gpu:
            return "fp32"
        return "bf16" if self.card is None or self.card.has_bf16 else "fp16"

    def machine(self, precision: str, links: Links, memory: Any) -> Machine:
        """As the planner takes it: with a key, where it is in a house."""
        flops = self.flops(precision)
        exact = USABLE * self.card.flops_per_s("fp32") if self.card is not None else flops
        own, ends = self.links or links, self.ends
        alone = shared = UPDATE_PARAMETERS_PER_S
        if ends is not None:
            alone, shared = ends.alone_per_s, ends.shared_per_s
        return Machine(
            name=self.name,
            flops_per_s=flops,
            up_bytes_per_s=own.up / self.sharing,
            down_bytes_per_s=own.down / self.sharing,
            latency_s=own.latency_s,
            house=self.household or (self.seat_of if self.sharing > 1 else ""),
            sharing=self.sharing,
            has_key=bool(self.household),
            hours=self.hours,
            microbatch_s=MICROBATCH_S,
            shard_s=SHARD_S if ends is None else ALONE_SHARD_S,
            shared_shard_s=SHARD_S if ends is None else SHARED_SHARD_S,
            update_parameters_per_s=self.part * alone,
            shared_parameters_per_s=self.part * shared,
            exact_flops_per_s=self.part * exact,
            memory=memory,
        )

    def flops(self, precision: str) -> float:
        """FLOP/s of all its cards."""
        one = self.flops_per_s
        if not one and self.card is not None:
            one = USABLE * self.card.flops_per_s(precision)
        return self.part * self.cards * one

    @property
    def host_bytes_per_s(self) -> float:
        """From main memory to a card."""
        usual = self.card or CARDS[PLAIN_GPU]
        return GB * (self.host_gb_s or USABLE_LINK * usual.host_gb_s)

    @property
    def between_bytes_per_s(self) -> float:
        """From a card to another one."""
        usual = self.card or CARDS[PLAIN_GPU]
        return GB * (self.between_gb_s or USABLE_LINK * (usual.between_gb_s or usual.host_gb_s))

    def divided(
        self, num_peers: int, links: Links, machine: str, *, by_cards: bool
    ) -> list[Described]:
        """So many peers on the machine, that share it evenly: with a card each, or with a part of
        its device. They reach each other as in a house, or by its link where that is quicker.
        `links`: of machines that have none of their own; `machine`: no other one's name."""
        own = self.links or links
        each = Links(own.up / num_peers, own.down / num_peers, own.latency_s)
        quick = min(each.up, each.down) > INSIDE_BYTES_PER_S and own.latency_s < INSIDE_LATENCY_S
        is_home = bool(self.household) or not quick
        one = replace(
            self,
            name=f"{'card' if by_cards else 'seat'} of {self.name}",
            device_gb=self.device_gb if by_cards else self.device_gb / num_peers,
            host_gb=self.free_host_bytes / GB / num_peers,
            is_free=True,
            links=own if is_home else each,
            cards=1 if by_cards else self.cards,
            part=1.0 if by_cards else self.part / num_peers,
            sharing=num_peers if is_home else 1,
            seat_of=machine,
        )
        return [one] * num_peers

    @property
    def free_device_bytes(self) -> float:
        return GB * self.device_gb if self.is_gpu else self.free_host_bytes

    @property
    def free_host_bytes(self) -> float:
        own = 0.0 if self.is_free else min(SYSTEM_GB, SYSTEM_PART * self.host_gb)
        return GB * (self.host_gb - own)


def read_links(text: str) -> Links:
    """Raises `UsageError`."""
    found = LINKS.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--links {text!r} cannot be read; write for example {LINKS_EXAMPLE}")
    up, up_unit, down, down_unit, ms, house = found.groups()
    up_mbit = float(up) * OF_RATE[up_unit.upper()]
    down_mbit = float(down or up) * OF_RATE[(down_unit or up_unit).upper()]
    if min(up_mbit, down_mbit) <= 0 or max(up_mbit, down_mbit, float(ms)) > MOST:
        raise UsageError(
            f"--links {text!r}: a link carries more than nothing, and no number is above "
            f"{MOST:,} Mbit/s or ms; write for example {LINKS_EXAMPLE}"
        )
    num = int(house or 1)
    if not 1 <= num <= MAX_MACHINES:
        raise UsageError(
            f"--links {text!r}: 1 to {MAX_MACHINES} machines share a link; write for example "
            f"{LINKS_EXAMPLE}"
        )
    return Links(MBIT * up_mbit, MBIT * down_mbit, float(ms) / 1000, num)


def in_houses(machines: Sequence[Described], links: Links) -> list[Described]:
    """The machines, with who shares the link of each: those of one household, and of the others
    that have no link of their own so many in a row as `links` says."""
    open_ = [i for i, m in enumerate(machines) if not m.household and m.links is None]
    names = {i: m.household for i, m in enumerate(machines)}
    if links.house > 1:
        names |= {i: f"house {1 + at // links.house}" for at, i in enumerate(open_)}
    return sharing_links([replace(m, household=names[i]) for i, m in enumerate(machines)])


def sharing_links(peers: Sequence[Described]) -> list[Described]:
    """The same peers, with how many are behind each one's link."""
    of_houses = Counter(p.household for p in peers)
    return [replace(p, sharing=of_houses[p.household]) if p.household else p for p in peers]


def alone(one: Described) -> Described:
    """Such a machine behind a link of its own."""
    return replace(one, household="", sharing=1, seat_of="")


def peers_here(text: str) -> int | None:
    """Of `here*4`: so many peers on this machine; None where others are meant. Raises
    `UsageError`."""
    found = HERE_COUNT.fullmatch(text.strip())
    if found is None:
        return None
    count = int(found[1] or 1)
    if not 1 <= count <= MAX_HERE:
        raise UsageError(f"--machines: 1 to {MAX_HERE} peers here; write for example here*4")
    return count


def read_machines(text: str) -> list[Described]:
    """Of `--machines`: a list, or the path of a TOML file. Raises `UsageError`."""
    if text.strip().endswith(".toml"):
        return _from_file(Path(text.strip()))
    found: list[Described] = []
    for part in text.split(","):
        item = ITEM.fullmatch(part.strip())
        if item is None:
            raise UsageError(f"--machines {text!r} cannot be read; write for example {EXAMPLE}")
        name, host, tflops, count = item.groups()
        _check_amounts(part.strip(), host, tflops)
        one = _named(name.strip(), host, tflops)
        if several := CARDS_IN_ONE.fullmatch(name.strip()):
            one = _with_cards(_named(several[2].strip(), host, tflops), int(several[1]), host)
        if one is None:
            raise UsageError(
                f"--machines: {name.strip()!r} is no known card, and no memory of a gpu, cpu or "
                f"mac; write for example {EXAMPLE}; {known_cards(name)}; of others "
                "say memory and speed: 12GB-gpu@10TFLOPS; here*4 are four peers on this machine, "
                "and go with no others"
            )
        found += _counted(one, int(count or 1), len(found))
    return found


def _check_amounts(text: str, *amounts: str | None) -> None:
    """Raises `UsageError` where one is no number of GB or TFLOP/s that a machine has."""
    if any(not 0 < float(x) <= MOST for x in amounts if x):
        raise UsageError(
            f"--machines {text!r}: numbers are above 0, {MOST:,} at most; write for example "
            f"{EXAMPLE}"
        )


def _with_cards(one: Described | None, cards: int, host: str | None) -> Described | None:
    """Several of them in one machine. Raises `UsageError`."""
    if one is None:
        return None
    if not one.is_gpu or not 1 <= cards <= MAX_CARDS:
        raise UsageError(
            f"--machines: 2x24GB-gpu is one machine with two cards; 1 to {MAX_CARDS}, and of GPUs "
            f"only; write for example {EXAMPLE}"
        )
    own = one.host_gb if host else HOST_GB * cards
    name = f"{cards}x {one.name}" if cards > 1 else one.name
    return replace(one, name=name, cards=cards, host_gb=own)


def _counted(one: Described, count: int, others: int) -> list[Described]:
    if not 1 <= count <= MAX_MACHINES - others:
        raise UsageError(f"--machines: 1 to {MAX_MACHINES} machines; write for example {EXAMPLE}")
    return [one] * count


def _named(name: str, host: str | None, tflops: str | None) -> Described | None:
    flops = TERA * float(tflops) if tflops else 0.0
    host_gb = float(host) if host else HOST_GB
    if card := card_named(name):
        return Described(name, card.memory_gb, host_gb, True, card, flops)
    kind = KIND.fullmatch(name)
    if kind is None:
        return None
    before, first, second, after = kind.groups()
    _check_amounts(name, before or after)
    which, memory_gb = (first or second).lower(), float(before or after)
    if which == "gpu":
        note = "" if flops else f"{name}: reckoned as quick as an {PLAIN_GPU}"
        card = None if flops else CARDS[PLAIN_GPU]
        return Described(name, memory_gb, host_gb, True, card, flops, note)
    assumed = MAC_FLOPS_PER_S if which == "mac" else CPU_FLOPS_PER_S
    note = "" if flops else f"{name}: reckoned with {assumed / TERA:g} TFLOP/s, an assumption"
    return Described(name, memory_gb, memory_gb, False, None, flops or assumed, note)


KEYS = {
    "name",
    "card",
    "cards",
    "card_link_gb_s",
    "host_link_gb_s",
    "memory_gb",
    "host_memory_gb",
    "tflops",
    "count",
    "up_mbit",
    "down_mbit",
    "latency_ms",
    "hours",
    "household",
}


def _from_file(path: Path) -> list[Described]:
    """`[[machine]]` tables. Raises `UsageError`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES)
        values = tomllib.loads(text_of(raw, path, UsageError))
    except OSError as e:
        raise UsageError(
            f"--machines: cannot read {path}: {e.strerror or e}; write [[machine]] tables into it, "
            f"each with {FILE_EXAMPLE}"
        ) from None
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise UsageError(f"--machines: {path} is not valid TOML: {one_line(e)}") from None
    tables = values.get("machine")
    if not isinstance(tables, list) or not tables or set(values) != {"machine"}:
        raise UsageError(
            f"--machines: {path} has [[machine]] tables only, each with {FILE_EXAMPLE}"
        )
    found: list[Described] = []
    for number, table in enumerate(tables, 1):
        where = f"--machines: {path}, machine {number}"
        if not isinstance(table, dict):
            raise UsageError(f"{where}: write a table with {FILE_EXAMPLE}")
        found += _counted(
            _of_table(table, where, found),
            int(_number(table, "count", 1, where, most=MAX_MACHINES, is_whole=True)),
            len(found),
        )
    return found


def _of_table(table: Mapping[str, Any], where: str, before: Sequence[Described]) -> Described:
    """`before`: machines of the tables above."""
    if unknown := sorted(set(table) - KEYS):
        raise UsageError(f"{where}: {unknown[0]} is unknown; known are {', '.join(sorted(KEYS))}")
    names = card_name, name, household = [
        table.get(key, "") for key in ("card", "name", "household")
    ]
    if not all(isinstance(x, str) for x in names):
        raise UsageError(
            f'{where}: name, card and household are texts; write for example household = "attic"'
        )
    if any(len(x) > MAX_NAME or not x.isprintable() for x in names):
        raise UsageError(f"{where}: names are lines of {MAX_NAME} characters at most")
    card = card_named(card_name) if card_name else None
    if card_name and card is None and "tflops" not in table:
        raise UsageError(
            f"{where}: no card {card_name!r} is known; write memory_gb and tflops; "
            f"{known_cards(card_name)}"
        )
    if card is None and not {"memory_gb", "tflops"} & set(table):
        raise UsageError(f"{where}: write {FILE_EXAMPLE}")
    memory = _number(table, "memory_gb", 0, where)
    is_gpu = card is not None or memory > 0
    cards = int(_number(table, "cards", 1, where, most=MAX_CARDS, is_whole=True))
    if not 1 <= cards <= (MAX_CARDS if is_gpu else 1):
        raise UsageError(f"{where}: cards are GPUs with memory_gb each, 1 to {MAX_CARDS}")
    host = _number(table, "host_memory_gb", HOST_GB * cards if is_gpu else 0, where)
    tflops = _number(table, "tflops", 0, where)
    if card is None and not tflops:
        raise UsageError(f"{where}: nobody knows how fast it is; write {FILE_EXAMPLE}")
    if not is_gpu and not host:
        raise UsageError(
            f"{where}: write memory_gb of its GPU, or host_memory_gb of a machine without one"
        )
    links = None
    if {"up_mbit", "down_mbit", "latency_ms"} & set(table):
        usual = read_links(HOME)
        links = Links(
            MBIT * _number(table, "up_mbit", usual.up / MBIT, where),
            MBIT * _number(table, "down_mbit", usual.down / MBIT, where),
            _number(table, "latency_ms", 1000 * usual.latency_s, where, is_above=False) / 1000,
        )
    if household and any(m.household == household and m.links != links for m in before):
        raise UsageError(
            f"{where}: machines of household {household!r} share one link; write the same up_mbit, "
            "down_mbit and latency_ms for each"
        )
    return Described(
        name or card_name or f"machine-{where.rpartition(' ')[2]}",
        memory or (card.memory_gb if card else host),
        host,
        is_gpu,
        card,
        TERA * tflops,
        links=links,
        hours=_number(table, "hours", 24, where, most=24),
        cards=cards,
        host_gb_s=_number(table, "host_link_gb_s", 0, where),
        between_gb_s=_number(table, "card_link_gb_s", 0, where),
        household=household,
    )


def _number(
    table: Mapping[str, Any],
    key: str,
    usual: float,
    where: str,
    *,
    most: int = MOST,
    is_above: bool = True,
    is_whole: bool = False,
) -> float:
    """What a table says, or what is usual. `is_above`: it may not be 0. Raises `UsageError`."""
    if key not in table:
        return usual
    value = table[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if (
        not is_number
        or not 0 <= value <= most
        or (is_above and not value)
        or (is_whole and value != int(value))
    ):
        kind = "a whole number" if is_whole else "a number"
        least = "above 0" if is_above else "from 0 on"
        raise UsageError(f"{where}: {key} = {value!r}: write {kind} {least}, {most:,} at most")
    return float(value)
