"""Bodies and records drawn at random, by their types: nearly right ones, with a lie in one field.

What a field is called says what is nearly right for it (`Truth`). A field that no name here covers
gets any value of its type, so a method that is new is attacked too."""

from __future__ import annotations

import math
import random
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from swarmnet.errors import ProtocolViolation
from swarmnet.methods.method import Arrays, Method
from swarmnet.methods.microbatch import EVALUATE, LOGITS, TRAIN
from swarmnet.methods.update import ShardReply
from swarmnet.ports import DATA_FILES
from swarmnet.protocol.membership.records import DIGEST_BYTES, STATES
from swarmnet.protocol.slots import SlotSet, all_slots, flight_id
from swarmnet.simulation.stage import NUMBERS, Gradient, Sizes, activation, packed
from swarmnet.wire import Array, convert, pack, unpack_plain

TRIES = 16
"""To draw what its own class takes; then it is sent as it is."""
MOST_ITEMS = 300
"""Of a tuple that is a lie."""
INTS = (0, 1, -1, 2, 255, 1 << 16, 1 << 31, 1 << 40, 1 << 53, (1 << 62) - 1, (1 << 63) - 1)
FLOATS = (0.0, -1.0, 1e-300, 0.5, 1.0, 3600.0, 1e15, 1e60, 1e300, math.inf, math.nan)
TEXTS = ("", "x", "x" * 255, "x" * 5000, "\x1b[31m", "\u202e", "/ip4/127.0.0.1/tcp/4001", "\n")
BYTES = (0, 1, 7, 8, 32, 64, 1000, 60_000)


@dataclass(frozen=True)
class Truth:
    """What is so in a swarm, as far as anybody can know it."""

    run_id: str
    own: str
    peers: tuple[str, ...]
    """The honest ones, and other names of the liar."""
    num_stages: int
    num_shards: int
    num_slots: int
    microbatch: int
    round: int
    stage: int
    """Of whom it is said to."""
    history: int
    incarnations: dict[str, int] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    num_asked: int = 1
    """What an answer is about: so many shards, or microbatches."""

    def flight(self, rng: random.Random) -> int:
        """A microbatch of some feeder in this round, as its id would be without the secret."""
        feeder = rng.choice(self.peers)
        slot = rng.randrange(self.num_slots)
        n = rng.randrange(self.num_slots)
        return flight_id(self.run_id, feeder, self.incarnations.get(feeder, 1), self.round, n, slot)


Near = Callable[[Truth, random.Random], Any]

NEAR: dict[str, Near] = {
    "round": lambda t, rng: max(0, t.round + rng.choice((0, 0, 0, 0, 1, -1))),
    "active_from": lambda t, rng: t.round,
    "history": lambda t, rng: t.history,
    "stage": lambda t, rng: t.stage,
    "shard": lambda t, rng: rng.randrange(t.num_shards),
    "num_shards": lambda t, rng: t.num_shards,
    "microbatch_id": lambda t, rng: t.flight(rng),
    "num_samples": lambda t, rng: t.microbatch,
    "samples": lambda t, rng: t.num_slots * t.microbatch,
    "tokens": lambda t, rng: 64,
    "num_tokens": lambda t, rng: 64,
    "loss": lambda t, rng: 1.0,
    "loss_sum": lambda t, rng: 64.0,
    "term": lambda t, rng: rng.choice((0, 0, 1, 2, 7)),
    "feeder": lambda t, rng: rng.choice((t.own, *t.peers)),
    "primary": lambda t, rng: rng.choice(("", t.own, *t.peers)),
    "peer_id": lambda t, rng: rng.choice(t.peers),
    "by": lambda t, rng: rng.choice(("", *t.peers)),
    "path": lambda t, rng: rng.choice((t.own, *t.peers)),
    "run_id": lambda t, rng: t.run_id,
    "incarnation": lambda t, rng: 10**12,
    "version": lambda t, rng: rng.randrange(1000),
    "digest": lambda t, rng: rng.randbytes(DIGEST_BYTES),
    "digests": lambda t, rng: rng.randbytes(DIGEST_BYTES * t.num_shards),
    "holds": lambda t, rng: b"\xff" * ((t.num_shards + 7) // 8),
    "fresh": lambda t, rng: b"\xff" * ((t.num_shards + 7) // 8),
    "bits": lambda t, rng: b"\xff",
    "first": lambda t, rng: 0,
    "launched": lambda t, rng: SlotSet.of(all_slots(t.num_slots)),
    "committed": lambda t, rng: SlotSet.of(rng.choice((0, all_slots(t.num_slots)))),
    "settled": lambda t, rng: SlotSet(),
    "documents": lambda t, rng: None,
    "mode": lambda t, rng: rng.choice((TRAIN, EVALUATE, LOGITS)),
    "state": lambda t, rng: rng.choice(STATES),
    "addresses": lambda t, rng: "/memory",
    "file": lambda t, rng: rng.choice(DATA_FILES),
    "samples_per_s": lambda t, rng: rng.choice((10.0, 1e6)),
    "scale": lambda t, rng: rng.choice((0.01, 1.0)),
    "norm": lambda t, rng: rng.choice((-1.0, 1.0)),
    "sums": lambda t, rng: rng.choice((0.0, 1.0, 1e60)),
    "wait_s": lambda t, rng: 0.0,
}
NEAR |= {
    "shards": NEAR["shard"],
    "terms": NEAR["term"],
    "microbatch_ids": NEAR["microbatch_id"],
    "in_flight": NEAR["microbatch_id"],
    "hint": NEAR["path"],
    "peers": NEAR["path"],
    "primaries": NEAR["primary"],
    "wanted": NEAR["peer_id"],
    "unreached": NEAR["peer_id"],
    "moving_to": lambda t, rng: -1,
}


@lru_cache(maxsize=256)
def shape_of(cls: type) -> tuple[tuple[str, Any, bool], ...]:
    """By field of a class, its name, its type, and whether it has a default."""
    hints = get_type_hints(cls)
    return tuple(
        (f.name, hints[f.name], f.default is not MISSING or f.default_factory is not MISSING)
        for f in fields(cls)
    )


NO_PARTS: tuple[None, tuple[()]] = (None, ())
parts_of_generic = lru_cache(maxsize=256)(lambda hint: (get_origin(hint), get_args(hint)))


def parts_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The origin of a type, and its arguments."""
    return NO_PARTS if type(hint) is type else parts_of_generic(hint)


def near(hint: Any, name: str, truth: Truth, rng: random.Random) -> Any:
    """A value that could be right: plain, or a dataclass."""
    origin, args = parts_of(hint)
    is_told = hint is ShardReply  # its field is called as the numbers of shards are
    if name in NEAR and origin not in (tuple, dict) and not is_told:
        return NEAR[name](truth, rng)
    if origin is tuple:
        if name == "results":
            return list(range(truth.num_asked))
        if len(args) == 2 and args[1] is ...:
            return [near(args[0], name, truth, rng) for _ in range(truth.num_asked)]
        return [near(arg, name, truth, rng) for arg in args]
    if origin is dict:
        return {near(args[0], "peer_id", truth, rng): near(args[1], "", truth, rng)}
    if origin in (typing.Union, types.UnionType):
        return near(rng.choice(args), name, truth, rng)
    if hint is int:
        return rng.choice((0, 1))
    if hint is float:
        return rng.choice((0.0, 1.0))
    if hint is bool:
        return rng.random() < 0.5
    if hint is str:
        return rng.choice((truth.own, *truth.peers))
    if hint is bytes:
        return rng.randbytes(8)
    return plain(hint, truth, rng) if is_dataclass(hint) else None


def lie(hint: Any, name: str, truth: Truth, rng: random.Random) -> Any:
    """Any value of a type, and now and then of another one."""
    origin, args = parts_of(hint)
    if name and rng.random() < 0.05:
        return rng.choice((None, "x", [], {}, -1, 1.5))
    if origin is tuple:
        num = rng.choice((0, 1, 2, MOST_ITEMS)) if args[1:] == (...,) else len(args)
        return [
            lie(args[min(i, len(args) - 1) if args[1:] != (...,) else 0], name, truth, rng)
            for i in range(num)
        ]
    if origin is dict:
        num = rng.choice((0, 1, 50))
        keys = [lie(args[0], "", truth, rng) for _ in range(num)]
        return {str(k) if args[0] is str else k: lie(args[1], "", truth, rng) for k in keys if k}
    if origin in (typing.Union, types.UnionType):
        return lie(rng.choice(args), name, truth, rng)
    if hint is int:
        near_round = (truth.round + 1, truth.round + 2, truth.round + 10, truth.round + 10**6)
        return rng.choice(INTS + near_round)
    if hint is float:
        return rng.choice(FLOATS)
    if hint is bool:
        return rng.random() < 0.5
    if hint is str:
        return rng.choice((*TEXTS, truth.own, *truth.peers))
    if hint is bytes:
        return rng.randbytes(rng.choice(BYTES))
    return plain(hint, truth, rng, lies=1) if is_dataclass(hint) else None


def plain(
    cls: type,
    truth: Truth,
    rng: random.Random,
    lies: int = 0,
    only: str = "",
    also: Collection[str] | None = None,
    **given: Any,
) -> dict[str, Any]:
    """The fields of a class as plain values: `given` ones, those that have no default, and of the
    others those in `also` (None: some); `lies` of them anything, one of which is `only`."""
    shape = shape_of(cls)
    names = [name for name, _, _ in shape]
    liars = {only} & set(names)
    if lies > len(liars):
        liars |= set(rng.sample(names, min(len(names), lies - len(liars))))
    found: dict[str, Any] = {}
    for name, hint, has_default in shape:
        if name in liars:
            found[name] = lie(hint, name, truth, rng)
        elif name in given:
            found[name] = given[name]
        elif not has_default or (rng.random() < 0.3 if also is None else name in also):
            found[name] = near(hint, name, truth, rng)
    return found


def body(
    cls: type,
    truth: Truth,
    rng: random.Random,
    lies: int,
    only: str = "",
    also: Collection[str] | None = None,
    **given: Any,
) -> Any:
    """A body as it comes over the wire, mostly one that its class takes; as `plain`."""
    if not is_dataclass(cls):
        return rng.choice((None, None, None, {"round": 1}, [1], "x"))
    for _ in range(TRIES):
        found = plain(cls, truth, rng, lies, only, also, **given)
        try:
            told = unpack_plain(pack(found))
            convert(told, cls)
        except (ProtocolViolation, ValueError, TypeError, OverflowError):
            continue
        return told
    try:
        return unpack_plain(pack(found))
    except (ProtocolViolation, ValueError, TypeError, OverflowError):
        return None


def arrays(method: Method[Any, Any], truth: Truth, rng: random.Random) -> tuple[Array, ...]:
    """Of a call or its reply: as many as there should be or not, and of some form."""
    num = rng.choice((0, 0, 1, 1, 2, 3))
    return tuple(_array(method, truth, rng) for _ in range(num))


def asked_arrays(method: Method[Any, Any], truth: Truth, rng: random.Random) -> tuple[Array, ...]:
    """As many and of such a form as an answer has that is right."""
    if method.arrays is Arrays.MICROBATCH:
        return (activation((truth.round, truth.flight(rng)), truth.sizes),)
    shape = (truth.sizes.shard_parameters,)
    return tuple(Array("float32", shape, false_gradient(rng)) for _ in range(truth.num_asked))


def _array(method: Method[Any, Any], truth: Truth, rng: random.Random) -> Array:
    kind = rng.randrange(5)
    if method.arrays is Arrays.MICROBATCH and kind < 3:
        return activation((truth.round, truth.flight(rng)), truth.sizes)
    if kind < 3:
        return Array("float32", (truth.sizes.shard_parameters,), false_gradient(rng))
    if kind == 3:
        return Array("float32", (4,), packed(rng.choice(FLOATS[:7]) for _ in range(4)))
    size = rng.choice((0, 5, 1 << 20))
    return Array("uint8", (size,), bytes(size))


def false_gradient(rng: random.Random) -> Gradient:
    """Numbers that no microbatch has given."""
    ids: Counter[tuple[int, int]] = Counter({(-1, -1): 1})
    return Gradient.of([rng.choice((1.0, 3.0, 1e6)) for _ in range(NUMBERS)], ids)
