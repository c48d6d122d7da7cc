"""Two cuts between machines that swarmnet does not make, beside the one that it makes: experts of a
stage on several peers, and a sequence over two.

    python benchmarks/far_cuts.py experts sequences [--write]

Machines are equal. Each has a device, an uplink and a downlink, which do one thing after the other;
what waits for one of them waits in order, on a device backward passes first. A message takes the
bytes on both links and `LATENCY_S`. Microbatches are fed so that `WINDOW` a machine are in flight,
and seconds are those of `MICROBATCHES` of them. Sizes are those of the wire in `int8`. FLOPs are
those by which swarmnet plans a decoder layer; embedding and output matrix are left out. Nothing is
charged for coding, for the exchange of gradients, nor for peers that come and go: all of this is in
favour of the two cuts, which exchange more often.

`experts`: a Llama of width 1,024 and 8 layers whose feed-forward has 8 experts of which a token
meets 2, with a routing that is drawn. On four peers (and eight):

- *replicas*: the dense model of the same active parameters, whole on every peer, by swarmnet's
  estimate (`protocol/planning/cost.py`), mode `delayed`;
- *stages*: as many stages as peers, of that dense model, or with all experts of a layer on one
  peer: the same FLOPs and the same bytes;
- *across*: every expert on one of the four peers of a stage. A peer has microbatches of its own,
  attends, and sends each token once to every other peer that has experts for it; these send the
  sum of what their experts made of it. An expert takes `CAPACITY` times its even share of the
  tokens of a microbatch; what is beyond is dropped.

`--skew`: routers prefer experts, by a normal deviate of this size in the logits of each layer.

`sequences`: a Llama of width 1,024, 16 layers, 4 of 16 heads for keys and values; a microbatch is
one sequence. Two peers, each with half of the layers, or all layers and half of the positions in
zigzag order (what a peer sends is what `--cp 2` sends). `one at a time`: a round has one sequence.
Memory is that of activations by swarmnet's formula with `--activations blocks`.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script runs as it stands

from benchmarks.simulated_links import with_table
from swarmnet.protocol.codecs import INT8, row_bytes
from swarmnet.protocol.planning.cost import Costs
from swarmnet.protocol.planning.model import Held, Job, Layer, Machine, Update
from swarmnet.protocol.sync_modes import DELAYED
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.memory.plan import FP32, stage_activations
from swarmnet.training.models.llama import decoder_flops

PAGE = Path(__file__).parent / "results" / "far_cuts.md"
LATENCY_S, NEAR_LATENCY_S = 0.025, 0.0005
NEAR_MBIT_S = 1000
"""From here on machines are in one building."""
MICROBATCHES, WINDOW = 48, 3
BACKWARD = 2.0
"""FLOPs over those of the forward pass."""
WIDTH, LAYERS, EXPERTS, CHOSEN, EXPERT_WIDTH = 1024, 8, 8, 2, 1408
SEQUENCE, SAMPLES = 1024, 4
CAPACITY, SKEW = 1.25, 0.3
SPREAD = 4
"""Peers that a stage's experts lie on."""
SPEEDS = (1e12, 1e13)
LINKS = (20, 100, 1000, 10_000)
LENGTHS = (8192, 32_768, 131_072)
LONG_LAYERS, LONG_HEADS, LONG_KV_HEADS, LONG_FEED = 16, 16, 4, 2816
AWAY_PER_HOUR, AWAY_S = 0.3, 90.0
"""Three of ten peers leave in an hour, and a minute and a half goes by until another has the
experts."""

Work = Generator[Any, None, None]
"""What happens to a microbatch: gives what it waits for."""


@dataclass
class Line:
    """What does one thing at a time."""

    busy: bool = False
    waiting: list[Any] = field(default_factory=list)


@dataclass
class Peer:
    """A machine."""

    device: Line = field(default_factory=Line)
    up: Line = field(default_factory=Line)
    down: Line = field(default_factory=Line)
    sent: float = 0.0
    """Bytes."""


class Clock:
    """Events in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), act))

    def run(self) -> None:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def use(self, line: Line, seconds: float, done: Callable[[], None], rank: int = 0) -> None:
        """`rank`: smaller ones first."""
        heapq.heappush(line.waiting, (rank, next(self._number), seconds, done))
        self._next(line)

    def _next(self, line: Line) -> None:
        if line.busy or not line.waiting:
            return
        line.busy = True
        _, _, seconds, done = heapq.heappop(line.waiting)

        def end() -> None:
            line.busy = False
            done()
            self._next(line)

        self.at(self.now + seconds, end)


@dataclass
class Swarm:
    """Equal machines on equal links."""

    num_peers: int
    flops_per_s: float
    mbit_s: float

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.peers = [Peer() for _ in range(self.num_peers)]
        self._latency_s = NEAR_LATENCY_S if self.mbit_s >= NEAR_MBIT_S else LATENCY_S

    def compute(self, peer: int, flops: float, rank: int) -> Callable[[Callable[[], None]], None]:
        def begin(done: Callable[[], None]) -> None:
            self.clock.use(self.peers[peer].device, flops / self.flops_per_s, done, rank)

        return begin

    def send(self, source: int, target: int, size: float) -> Callable[[Callable[[], None]], None]:
        """The downlink is taken as soon as the first byte is there."""
        seconds = size / (self.mbit_s * 1e6 / 8)

        def begin(done: Callable[[], None]) -> None:
            left = [2]

            def half() -> None:
                left[0] -= 1
                if not left[0]:
                    done()

            def arrives() -> None:
                self.clock.use(self.peers[target].down, seconds, half)

            def begun() -> None:
                self.clock.at(self.clock.now + self._latency_s, arrives)
                self.clock.use(self.peers[source].up, seconds, late, -1)

            def late() -> None:
                self.clock.at(self.clock.now + self._latency_s, half)

            self.peers[source].sent += size
            self.clock.use(self.peers[source].up, 0.0, begun)

        return begin

    def play(self, make: Callable[[int], Work], num: int, window: int) -> float:
        """Seconds of so many microbatches, `window` of them at a time."""
        started = iter(range(num))

        def feed() -> None:
            i = next(started, None)
            if i is not None:
                goes_on(make(i))

        def goes_on(work: Work) -> None:
            try:
                wanted: Sequence[Callable[[Callable[[], None]], None]] = next(work)
            except StopIteration:
                feed()
                return
            left = [len(wanted)]

            def one() -> None:
                left[0] -= 1
                if not left[0]:
                    goes_on(work)

            if not wanted:
                goes_on(work)
            for begin in wanted:
                begin(one)

        for _ in range(window):
            feed()
        self.clock.run()
        return self.clock.now


# ---- experts --------------------------------------------------------------------------------


@cache
def routed(layer: int, home: int, skew: float) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """Of a microbatch of peer `home` at a layer: the tokens that go to each peer, the pairs of
    token and expert that each peer computes, and the part of all pairs that is dropped."""
    tokens = SAMPLES * SEQUENCE
    rng = np.random.default_rng([layer, home])
    liked = np.random.default_rng([layer]).normal(size=EXPERTS) * skew
    scores = liked + rng.gumbel(size=(tokens, EXPERTS))
    chosen = np.argsort(-scores, axis=1)[:, :CHOSEN]
    is_pair = np.zeros((tokens, EXPERTS), dtype=bool)
    np.put_along_axis(is_pair, chosen, values=True, axis=1)
    capacity = int(CAPACITY * CHOSEN * tokens / EXPERTS)
    kept = is_pair & (is_pair.cumsum(axis=0) <= capacity)
    of_peer = kept.reshape(tokens, SPREAD, EXPERTS // SPREAD)
    dropped = 1 - kept.sum() / is_pair.sum()
    return (
        tuple(of_peer.any(axis=2).sum(axis=0).tolist()),
        tuple(of_peer.sum(axis=(0, 2)).tolist()),
        float(dropped),
    )


ATTENTION_FLOPS = SAMPLES * SEQUENCE * (2 * 4 * WIDTH**2 + 2 * SEQUENCE * WIDTH)
PAIR_FLOPS = 2 * 3 * WIDTH * EXPERT_WIDTH
ROW = row_bytes(INT8, WIDTH)


@dataclass(frozen=True)
class Result:
    """Of one way."""

    tokens_per_s: float
    kb_per_token: float
    """Sent by all peers together."""


def in_stages(num_peers: int, flops_per_s: float, mbit_s: float) -> Result:
    """A stage a peer; experts that a token does not meet take no time."""
    swarm, tokens = Swarm(num_peers, flops_per_s, mbit_s), SAMPLES * SEQUENCE
    flops = (ATTENTION_FLOPS + tokens * CHOSEN * PAIR_FLOPS) * LAYERS / num_peers

    def make(i: int) -> Work:
        for k in range(num_peers):
            yield [swarm.compute(k, flops, num_peers)]
            if k + 1 < num_peers:
                yield [swarm.send(k, k + 1, tokens * ROW)]
        for k in reversed(range(num_peers)):
            yield [swarm.compute(k, BACKWARD * flops, 0)]
            if k:
                yield [swarm.send(k, k - 1, tokens * ROW)]

    return _result(swarm, swarm.play(make, MICROBATCHES, WINDOW * num_peers), tokens)


def across(num_peers: int, flops_per_s: float, mbit_s: float, skew: float) -> Result:
    """Stages of `SPREAD` peers. Peer j of a stage hands on to peer j of the next."""
    swarm, tokens = Swarm(num_peers, flops_per_s, mbit_s), SAMPLES * SEQUENCE
    num_stages = num_peers // SPREAD

    def layer(k: int, home: int, number: int, *, is_back: bool) -> Iterator[Any]:
        rows, pairs, _ = routed(number, home, skew)
        base, here = k * SPREAD, k * SPREAD + home
        times, rank = (BACKWARD, 0) if is_back else (1.0, 1)
        attention = swarm.compute(here, times * ATTENTION_FLOPS, rank)
        if not is_back:
            yield [attention]
        yield [
            _there_and_back(
                swarm, here, base + j, rows[j] * ROW, times * pairs[j] * PAIR_FLOPS, rank
            )
            for j in range(SPREAD)
        ]
        if is_back:
            yield [attention]

    def make(i: int) -> Work:
        home = i % SPREAD
        of_stage = LAYERS // num_stages
        for number in range(LAYERS):
            k = number // of_stage
            if number and number % of_stage == 0:
                yield [swarm.send((k - 1) * SPREAD + home, k * SPREAD + home, tokens * ROW)]
            yield from layer(k, home, number, is_back=False)
        for number in reversed(range(LAYERS)):
            k = number // of_stage
            yield from layer(k, home, number, is_back=True)
            if number and number % of_stage == 0:
                yield [swarm.send(k * SPREAD + home, (k - 1) * SPREAD + home, tokens * ROW)]

    return _result(swarm, swarm.play(make, MICROBATCHES, WINDOW * num_peers), tokens)


def _there_and_back(
    swarm: Swarm, here: int, there: int, size: float, flops: float, rank: int
) -> Callable[[Callable[[], None]], None]:
    """Tokens go to experts, and what these make of them comes back."""
    work = swarm.compute(there, flops, rank)
    if here == there:
        return work
    return lambda done: swarm.send(here, there, size)(
        lambda: work(lambda: swarm.send(there, here, size)(done))
    )


def _result(swarm: Swarm, seconds: float, tokens: int) -> Result:
    total = MICROBATCHES * tokens
    return Result(total / seconds, sum(p.sent for p in swarm.peers) / total / 1000)


def in_replicas(num_peers: int, flops_per_s: float, mbit_s: float) -> float:
    """Tokens/s of the dense model."""
    rate, near = mbit_s * 1e6 / 8, mbit_s >= NEAR_MBIT_S
    layer = Layer(
        flops=ATTENTION_FLOPS / SAMPLES + SEQUENCE * CHOSEN * PAIR_FLOPS,
        parameters=4 * WIDTH**2 + CHOSEN * 3 * WIDTH * EXPERT_WIDTH,
        activation_bytes=SEQUENCE * ROW,
        gradient_bytes=SEQUENCE * ROW,
    )
    job = Job(
        layers=(layer,) * LAYERS,
        tokens=SEQUENCE,
        microbatch=SAMPLES,
        global_batch=SAMPLES * MICROBATCHES,
        update=Update(DELAYED, INT8, 2, 1),
        memory=lambda first, end, num_stages, memory: Held(0, 0, "keep", 4, computes_again=False),
        backward=BACKWARD,
    )
    latency_s = NEAR_LATENCY_S if near else LATENCY_S
    machines = [Machine(str(i), flops_per_s, rate, rate, latency_s) for i in range(num_peers)]
    found = Costs(job).of(((0, LAYERS),), machines, [0] * num_peers)
    assert found is not None
    return found.tokens_per_s


def parameters_of(num_peers: int, *, across: bool) -> float:
    """Millions on a peer."""
    attention, expert = 4 * WIDTH**2, 3 * WIDTH * EXPERT_WIDTH
    if not across:
        return LAYERS / num_peers * (attention + EXPERTS * expert) / 1e6
    return LAYERS * SPREAD / num_peers * (attention + EXPERTS / SPREAD * expert) / 1e6


def experts(skew: float) -> Iterator[str]:
    """The table."""
    dropped = float(
        np.mean([routed(n, home, skew)[2] for n in range(LAYERS) for home in range(SPREAD)])
    )
    yield (
        "| peers | TFLOP/s of each | Mbit/s | dense, replicas | stages | across "
        f"{SPREAD} | kB a token, stages | across |"
    )
    yield "|" + "---|" * 8
    for num_peers in (SPREAD, 2 * SPREAD):
        for speed in SPEEDS:
            for mbit_s in LINKS:
                stages = in_stages(num_peers, speed, mbit_s)
                far = across(num_peers, speed, mbit_s, skew)
                yield (
                    f"| {num_peers} | {speed / 1e12:.0f} | {mbit_s:,} "
                    f"| {in_replicas(num_peers, speed, mbit_s):,.0f} "
                    f"| {stages.tokens_per_s:,.0f} | {far.tokens_per_s:,.0f} "
                    f"| {stages.kb_per_token:.1f} | {far.kb_per_token:.1f} |"
                )
    gone = AWAY_PER_HOUR * AWAY_S / 3600
    yield (
        f"\nTokens/s. Routers with a skew of {skew}: {100 * dropped:.1f} % of all pairs of token "
        f"and expert are beyond the capacity. With three of ten peers replaced in an hour and "
        f"{AWAY_S:.0f} s until experts are served again, {100 * gone:.2f} % more find nobody. "
        f"Of four peers, each has {parameters_of(SPREAD, across=False):.0f} million parameters in "
        f"stages, and {parameters_of(SPREAD, across=True):.0f} across."
    )


# ---- sequences ------------------------------------------------------------------------------


def long_spec(length: int, num_stages: int) -> RunSpec:
    model = {
        "hidden_size": WIDTH,
        "intermediate_size": LONG_FEED,
        "num_hidden_layers": LONG_LAYERS,
        "num_attention_heads": LONG_HEADS,
        "num_key_value_heads": LONG_KV_HEADS,
        "vocab_size": 256,
        "max_position_embeddings": length,
    }
    return RunSpec.model_validate(
        {
            "model": model,
            "data": {"paths": ["python-stdlib"]},
            "optimizer": {"learning_rate": 1e-3, "rounds": 1},
            "pipeline": {"num_stages": num_stages, "global_batch": 2, "microbatch": 1},
        }
    )


def memory_of(length: int, num_stages: int, num_ranks: int) -> float:
    """GB of activations of one sequence at the first stage, in its backward pass."""
    one = stage_activations(long_spec(length, num_stages), 0, FP32, num_ranks)
    assert one is not None
    return one.held("blocks", 1)[0] / 1e9


def by_layers(model: ModelSpec, length: int, speed: float, mbit_s: float, at_once: int) -> Swarm:
    swarm, flops = Swarm(2, speed, mbit_s), decoder_flops(model, length) * LONG_LAYERS / 2

    def make(i: int) -> Work:
        yield [swarm.compute(0, flops, 1)]
        yield [swarm.send(0, 1, length * ROW)]
        yield [swarm.compute(1, flops, 1)]
        yield [swarm.compute(1, BACKWARD * flops, 0)]
        yield [swarm.send(1, 0, length * ROW)]
        yield [swarm.compute(0, BACKWARD * flops, 0)]

    swarm.play(make, MICROBATCHES if at_once > 1 else 1, at_once)
    return swarm


def by_positions(model: ModelSpec, length: int, speed: float, mbit_s: float, at_once: int) -> Swarm:
    """Keys and values are under way while a peer attends to its own; half of the scores are of
    these. Backward they come once more, and their gradients go back."""
    swarm = Swarm(2, speed, mbit_s)
    half = decoder_flops(model, length) / 2
    block = length**2 * model.hidden_size / 2
    each = 2 * row_bytes(INT8, model.num_key_value_heads * model.head_size)
    sizes = [each * length / 4, each * length / 2]
    """That a peer sends: the later ones need the early piece only, the first one all."""

    def both(flops: float, rank: int) -> list[Any]:
        return [swarm.compute(peer, flops, rank) for peer in range(2)]

    def keys() -> list[Any]:
        return [swarm.send(peer, 1 - peer, sizes[peer]) for peer in range(2)]

    def make(i: int) -> Work:
        for _ in range(LONG_LAYERS):
            yield [*both(half - block, 1), *keys()]
            yield both(block, 1)
        for _ in range(LONG_LAYERS):
            yield [*both(BACKWARD * (half - block), 0), *keys()]
            yield both(BACKWARD * block, 0)
            yield [swarm.send(1 - peer, peer, sizes[peer]) for peer in range(2)]

    swarm.play(make, MICROBATCHES if at_once > 1 else 1, at_once)
    return swarm


def sequences() -> Iterator[str]:
    """The table."""
    yield (
        "| tokens | TFLOP/s of each | Mbit/s | layers, one at a time | positions, one at a time "
        "| layers, four at a time | positions, four at a time | MB a sequence, layers | positions "
        "| GB of a peer, layers | positions |"
    )
    yield "|" + "---|" * 11
    for length in LENGTHS:
        model = long_spec(length, 2).model
        memory = f"{memory_of(length, 2, 1):.1f} | {memory_of(length, 1, 2):.1f}"
        for speed in SPEEDS:
            for mbit_s in LINKS[:3]:
                cells, sent = [], []
                for at_once in (1, 4):
                    for way in (by_layers, by_positions):
                        swarm = way(model, length, speed, mbit_s, at_once)
                        num = MICROBATCHES if at_once > 1 else 1
                        cells.append(f"{num * length / swarm.clock.now:,.0f}")
                        sent.append(sum(p.sent for p in swarm.peers) / num / 1e6)
                yield (
                    f"| {length:,} | {speed / 1e12:.0f} | {mbit_s:,} | {' | '.join(cells)} "
                    f"| {sent[0]:,.0f} | {sent[1]:,.0f} | {memory} |"
                )
    yield "\nTokens/s of both peers together."


TABLES = ("experts", "sequences")


def table(name: str, skew: float = SKEW) -> str:
    """In Markdown."""
    return "\n".join(experts(skew) if name == "experts" else sequences())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+", choices=TABLES, metavar="TABLE")
    parser.add_argument("--skew", type=float, default=SKEW)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/far_cuts.md")
    options = parser.parse_args()
    for name in options.tables:
        text = table(name, options.skew)
        print(text, end="\n\n", flush=True)
        if options.write:
            PAGE.write_text(with_table(PAGE.read_text(), name, text))


if __name__ == "__main__":
    main()
