"""Seconds of a round.

A stage with replicas of the rates r_i (samples/s) has the flow F = sum r_i, where a rate is the
least of what a machine computes and of what its link carries: a middle stage sends an activation
and a gradient for every sample, and receives as much. The swarm has that of its poorest stage (the
max-flow bound). A microbatch of b samples is at a stage for b n / F seconds on average, and P is
the sum of these and of the latencies of its way forth and back. A round of B samples takes, before
its update,

    max(B / F - t + P + R,  M P / W)

with t the passage of the poorest stage, M microbatches and W of them in flight: of equal stages
with one replica it is the (M + K - 1) t of GPipe (Huang et al., 2019), whose bubble is
(K - 1) / (M + K - 1). R is what replicas of a stage wait for each other at a round's end: who
gets the last microbatch ends after the others, at a stage of n by up to (1 - 1/n) of the slowest
one's passage (as of a list of jobs on n machines; Graham, 1969). Where the next round is fed
meanwhile (`delayed` and `auto`), filling and draining take no time, and R stays. An exchange takes
as long as the busiest link of its replicas. In these two modes it runs beside the next round; in
all others the round waits for it, and in `local` for those that are in time (`late`).

Of a backward pass that has two parts, where these pay (`Job.splits_pay`), a stage waits for the
first one only: P is shorter by the
second parts of all stages, and what the poorest stage has left is made while those before it make
their last passes. So fill and drain of K equal stages are (K - 1) t / 3 (ZB-H1; Qi et al., 2024).

Machines of a house share its link, over which goes what leaves the house (`houses`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from swarmnet.protocol.planning.exchange import (
    Home,
    auto_shard_parameters,
    codec_in,
    contributed_bytes,
    crossing_bytes,
    exchanged_bytes,
    inside_bytes,
    number_bytes,
)
from swarmnet.protocol.planning.flow import (
    IN_FLIGHT_PER_REPLICA,
    Rates,
    carried,
    flow_of,
    link_bytes,
    max_flow,
)
from swarmnet.protocol.planning.houses import (
    INSIDE_BYTES_PER_S,
    INSIDE_LATENCY_S,
    AtHome,
    Bytes,
    Sharing,
    carried_together,
    ways_inside,
)
from swarmnet.protocol.planning.houses import exchange_s as exchange_of_houses_s
from swarmnet.protocol.planning.late import Late, waited_s
from swarmnet.protocol.planning.model import Cut, Held, Job, Machine
from swarmnet.protocol.planning.owed import most_owed
from swarmnet.protocol.sync_modes import AUTO, DELAYED, GOSSIP, LOCAL, least_quorum, least_to_lead

EXCHANGE_WAYS = ("gradient", "sum", "norm", "result")
"""Messages of an exchange that wait for each other."""
MAX_REMEMBERED, MAX_STAGES = 32, 1 << 14
"""Replicas of a stage whose cost is remembered, and such stages, and rounds of them. A search asks
for most of them many times."""
LOOKS_AT_LATE = 2
"""How long rounds are depends on who is late, and that on how long they are."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Of a stage with its replicas, but for those that are late."""

    num_replicas: float
    """At work, on average."""
    compute: float
    """Samples/s."""
    flow: float
    slowest: float
    """Flow of its slowest replica."""
    latency_s: float
    """Mean of its replicas'."""
    exchange_s: float
    update_s: float
    """Of the end of a round, on the slowest replica."""
    late: tuple[Late, ...] = ()
    sharing: Sharing | None = None
    """What depends on the other stages, where machines share links; the numbers above are as if
    all crossed these, and each machine had an even part."""
    left: float = 0.0
    """Of what its devices do for a microbatch, the part that they may leave for later."""
    most_left: float = 0.0
    """Microbatches of which they may have left it, by memory."""
    ways_s: float = 0.0
    """Of `exchange_s`, what is not the bytes of a link."""

    def with_late(self, open_s: float) -> StageCost:
        """With what the late ones do while rounds are open for `open_s`."""
        parts = [(x.rates, part) for x in self.late if (part := x.at_work(open_s))]
        return replace(
            self,
            num_replicas=self.num_replicas + sum(part for _, part in parts),
            compute=self.compute + sum(r.compute * part for r, part in parts),
            flow=self.flow + sum(r.flow * part for r, part in parts),
            slowest=min([self.slowest, *(r.flow for r, _ in parts)]),
        )


@dataclass(frozen=True, slots=True)
class Round:
    """Where the seconds of a round go."""

    compute_s: float
    """Of the poorest stage."""
    links_s: float
    """Beyond it, because links carry less than machines compute."""
    bubble_s: float
    """The pipeline fills and drains, and replicas of a stage end one after the other."""
    latency_s: float
    exchange_s: float
    """That the round waits for."""
    update_s: float
    tokens: int

    @property
    def seconds(self) -> float:
        parts = self.compute_s, self.links_s, self.bubble_s, self.latency_s
        return sum(parts) + self.exchange_s + self.update_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class Costs:
    """The costs of one run. Remembers what was asked before."""

    job: Job
    _flops: list[float] = field(init=False)
    _parameters: list[int] = field(init=False)
    _rates: dict[tuple[int, int, int, int], tuple[Machine, Rates | None]] = field(
        default_factory=dict
    )
    _held: dict[object, Held | None] = field(default_factory=dict)
    _kinds: dict[Machine, int] = field(default_factory=dict)
    _known: dict[int, tuple[Machine, int]] = field(default_factory=dict)
    """By the id of a machine, which is kept for it, its kind."""
    _stages: dict[tuple[int, ...], StageCost | None] = field(default_factory=dict)
    _rounds: dict[tuple[int, ...], tuple[tuple[StageCost, ...], Round]] = field(
        default_factory=dict
    )
    """By the ids of stages, which are kept for them."""

    def __post_init__(self) -> None:
        layers = self.job.layers
        self._flops = list(accumulate((x.flops for x in layers), initial=0.0))
        self._parameters = list(accumulate((x.parameters for x in layers), initial=0))

    def muon_parameters(self, first: int, end: int) -> int:
        """Of a stage's, those that Muon steps."""
        return sum(x.muon_parameters for x in self.job.layers[first:end])

    def flops(self, first: int, end: int) -> float:
        """Of a forward pass over a sample."""
        return self._flops[end] - self._flops[first]

    def parameters(self, first: int, end: int) -> int:
        """Trained ones of a stage."""
        whole = end - first == len(self.job.layers)
        return self._parameters[end] - self._parameters[first] - self.job.tied * whole

    def held(self, first: int, end: int, num_stages: int, machine: Machine) -> Held | None:
        """None where the stage does not fit, or has nothing to train: with adapters, layers that
        have none. No stage of a run may be so."""
        if not self.parameters(first, end):
            return None
        key = first, end, num_stages, machine.memory
        if key not in self._held:
            self._held[key] = self.job.memory(first, end, num_stages, machine.memory)
        return self._held[key]

    def link_bytes(self, first: int, end: int) -> tuple[float, float]:
        """(sent, received) of a stage for one sample."""
        return link_bytes(*self._boundaries(first, end))

    def _boundaries(self, first: int, end: int) -> tuple[Bytes | None, Bytes | None]:
        """Of a stage, before it and after it."""
        layers = self.job.layers

        def boundary(after: int) -> Bytes:
            return layers[after].activation_bytes, layers[after].gradient_bytes

        return (
            boundary(first - 1) if first else None,
            boundary(end - 1) if end < len(layers) else None,
        )

    def rates(self, machine: Machine, first: int, end: int, num_stages: int) -> Rates | None:
        """None where the stage does not fit."""
        key = id(machine), first, end, num_stages  # the machine is kept, so that its id is its own
        found = self._rates.get(key)
        if found is None:
            found = self._rates[key] = machine, self._rates_of(machine, first, end, num_stages)
        return found[1]

    def _rates_of(self, machine: Machine, first: int, end: int, num_stages: int) -> Rates | None:
        held = self.held(first, end, num_stages, machine)
        if held is None:
            return None
        job = self.job
        computing_s = held.computing_s(self.flops(first, end), job.backward, machine.flops_per_s)
        working_s = max(computing_s + held.between_s, held.moved_s / job.microbatch)
        took_s = working_s + machine.microbatch_s / job.microbatch
        compute = 1 / took_s if took_s else float("inf")
        link = machine.up_bytes_per_s, machine.down_bytes_per_s
        return Rates(compute, carried(compute, self.link_bytes(first, end), link))

    def stage(
        self, first: int, end: int, num_stages: int, replicas: Sequence[Machine]
    ) -> StageCost | None:
        """None where it has no replica, or one that it does not fit into."""
        if len(replicas) > MAX_REMEMBERED:
            return self._stage(first, end, num_stages, replicas)
        of_kinds = sorted(self._kind(m) for m in replicas)
        key = (first, end, num_stages, *of_kinds)
        if key not in self._stages:
            if len(self._stages) >= MAX_STAGES:
                self._stages.clear()
            self._stages[key] = self._stage(first, end, num_stages, replicas)
        return self._stages[key]

    def _kind(self, machine: Machine) -> int:
        known = self._known.get(id(machine))
        if known is None:
            kind = self._kinds.setdefault(machine, len(self._kinds))
            known = self._known[id(machine)] = machine, kind
        return known[1]

    def _stage(
        self, first: int, end: int, num_stages: int, replicas: Sequence[Machine]
    ) -> StageCost | None:
        found = [self.rates(m, first, end, num_stages) for m in replicas]
        rates = [r for r in found if r is not None]
        if not replicas or len(rates) < len(replicas):
            return None
        n = len(replicas)
        products = self._products(first, end)
        exchange_s, ways_s, behind_s = self._exchange(first, end, replicas, rates)
        in_time = [r for r, late_s in zip(rates, behind_s, strict=True) if not late_s]
        sharing = None
        if any(m.house for m in replicas):
            over_links = [(0.0, 0.0)] * n
            if self._all_are_waited_for:
                over_links = self.exchanged_bytes(first, end, replicas)
            at_work = zip(replicas, rates, over_links, behind_s, strict=True)
            sharing = self._sharing(first, end, [(m, r, x) for m, r, x, s in at_work if not s])
        return StageCost(
            num_replicas=len(in_time),
            compute=flow_of(r.compute for r in in_time),
            flow=flow_of(r.flow for r in in_time),
            slowest=min(r.flow for r in in_time),
            latency_s=sum(m.latency_s for m in replicas) / n,
            exchange_s=exchange_s,
            update_s=max(
                self._update_s(first, end, m, part, is_alone=n == 1)
                for m, part in zip(replicas, self._led_by(replicas, products), strict=True)
            ),
            late=tuple(
                Late(m, r, s) for m, r, s in zip(replicas, rates, behind_s, strict=True) if s
            ),
            sharing=sharing,
            left=self._left(first, end, num_stages, replicas),
            most_left=min(
                held.in_flight for m in replicas if (held := self.held(first, end, num_stages, m))
            ),
            ways_s=ways_s,
        )

    def _left(self, first: int, end: int, num_stages: int, replicas: Sequence[Machine]) -> float:
        """As `StageCost.left`. The gradients of inputs take as long as a forward pass."""
        if not self.job.splits_pay:
            return 0.0
        found = [self.held(first, end, num_stages, m) for m in replicas]
        num_splitting = sum(held is not None and held.splits for held in found)
        backward = self.job.backward
        return max(0.0, backward - 1) / (1 + backward) * num_splitting / len(replicas)

    def _sharing(
        self, first: int, end: int, at_work: Sequence[tuple[Machine, Rates, tuple[float, float]]]
    ) -> Sharing:
        """Of replicas, with what each exchanges over its link in a round."""
        homes: dict[str, AtHome] = {}
        apart = [r.flow for m, r, _ in at_work if not m.house]
        for m, r, (up, down) in at_work:
            if not m.house:
                continue
            whole = m.up_bytes_per_s * m.sharing, m.down_bytes_per_s * m.sharing
            known = homes.get(m.house, AtHome(m.house, 0, 0.0, float("inf"), *whole))
            homes[m.house] = replace(
                known,
                replicas=known.replicas + 1,
                compute=known.compute + r.compute,
                slowest=min(known.slowest, r.compute),
                exchanged=(known.exchanged[0] + up, known.exchanged[1] + down),
            )
        slowest = min(apart, default=float("inf"))
        return Sharing(
            tuple(homes.values()), flow_of(apart), slowest, *self._boundaries(first, end)
        )

    def _update_s(
        self, first: int, end: int, machine: Machine, part: float, *, is_alone: bool
    ) -> float:
        """Of the end of a round. Of Muon's steps each replica makes those whose primary it is,
        `part` of them, or all where it steps alone."""
        flops = sum(x.muon_flops for x in self.job.layers[first:end])
        if self.job.update.mode not in (LOCAL, GOSSIP):
            flops *= part
        parameters = self.parameters(first, end)
        per_s, shard_s = machine.shared_parameters_per_s, machine.shared_shard_s
        if is_alone:
            per_s, shard_s = machine.update_parameters_per_s, machine.shard_s
        seconds = parameters / per_s + self._num_exchanged(parameters) * shard_s
        return seconds + flops / machine.exact_flops_per_s

    def _products(self, first: int, end: int) -> float:
        """FLOPs of Muon's steps that a primary makes, for each byte of its results."""
        update, parameters = self.job.update, self.parameters(first, end)
        flops = sum(x.muon_flops for x in self.job.layers[first:end])
        if not flops or update.mode in (LOCAL, GOSSIP):
            return 0.0
        return flops / parameters / number_bytes(codec_in(update.mode, update.codec).results)

    def _num_exchanged(self, parameters: int) -> float:
        """Shards of a stage that a round waits for, on average."""
        update = self.job.update
        if update.mode in (DELAYED, AUTO):
            return 0.0
        size = update.shard_parameters or auto_shard_parameters(parameters)
        num_shards = -(-parameters // size)
        return num_shards / update.local_steps if update.mode in (LOCAL, GOSSIP) else num_shards

    def exchanged_bytes(
        self, first: int, end: int, replicas: Sequence[Machine]
    ) -> list[tuple[float, float]]:
        """(sent, received) of each replica of a stage in a round, over its link: of a house, its
        part."""
        parameters, muon = self.parameters(first, end), self.muon_parameters(first, end)
        products = self._products(first, end)
        update, n = self.job.update, len(replicas)
        how = update.replication, update.mode, update.local_steps, update.codec
        if not any(m.house for m in replicas):
            of = parameters, n, *how
            return [exchanged_bytes(*of, part, muon) for part in self._led_by(replicas, products)]
        homes = self._homes(replicas, products)
        crossing = crossing_bytes(parameters, list(homes.values()), *how, muon)
        each = {
            name: (sent / home.replicas, received / home.replicas)
            for (name, home), (sent, received) in zip(homes.items(), crossing, strict=True)
        }
        return [each[name] for name in _names_of_homes(replicas)]

    def _homes(self, replicas: Sequence[Machine], products: float = 0.0) -> dict[str | int, Home]:
        """The replicas by their house; who is of none is its own."""
        homes: dict[str | int, Home] = {}
        names, led = _names_of_homes(replicas), self._led_by(replicas, products)
        for m, name, part in zip(replicas, names, led, strict=True):
            known = homes.get(name, Home(0, 0.0))
            homes[name] = Home(known.replicas + 1, known.part + part, m.has_key)
        return homes

    def _led_by(self, replicas: Sequence[Machine], products: float) -> list[float]:
        """The part of the shards that each replica leads: by how much it sends in the time that it
        multiplies and sends in. `products`: FLOPs for each byte of results."""
        weights = [m.up_bytes_per_s for m in replicas]
        if products:
            each = products / max(1, len(replicas) - 1)
            seconds = [1 / m.up_bytes_per_s + each / m.exact_flops_per_s for m in replicas]
            weights = [1 / s if s else float("inf") for s in seconds]
        least = least_to_lead(weights) if self.job.update.mode == LOCAL else 0.0
        led = [w if w >= least else 0.0 for w in weights]
        return [w / sum(led) if sum(led) < float("inf") else 1 / len(led) for w in led]

    @property
    def _every(self) -> int:
        """Rounds from an exchange to the next one."""
        update = self.job.update
        return update.local_steps if update.mode in (LOCAL, GOSSIP) else 1

    @property
    def _all_are_waited_for(self) -> bool:
        """By an exchange, however late."""
        return self.job.update.mode != LOCAL or self._every < 2

    def _exchange(
        self, first: int, end: int, replicas: Sequence[Machine], rates: Sequence[Rates]
    ) -> tuple[float, float, list[float]]:
        """Seconds of an exchange, of these the ones of latency, and by how much later each
        replica's contribution comes than those that it waits for: all by round."""
        update, n, every = self.job.update, len(replicas), self._every
        parameters = self.parameters(first, end)
        if n < 2:
            return 0.0, 0.0, [0.0] * n
        of_houses = Counter(m.house for m in replicas if m.house)
        most = max(of_houses.values(), default=1)
        is_inside = most == n
        latency_s = INSIDE_LATENCY_S if is_inside else max(m.latency_s for m in replicas)
        ways_s = len(EXCHANGE_WAYS) * latency_s / every
        inside = inside_bytes(parameters, most, update.mode, update.codec) / every
        all_wait = self._all_are_waited_for
        took_s = []
        over_links = self.exchanged_bytes(first, end, replicas)
        for m, (sent, received) in zip(replicas, over_links, strict=True):
            # parts of a link that no other stage uses: `round` looks at all stages
            parts = m.sharing / of_houses[m.house] if m.house and all_wait else 1.0
            link_s = max(sent / m.up_bytes_per_s, received / m.down_bytes_per_s) / parts
            took_s.append(max(link_s, inside / INSIDE_BYTES_PER_S))
        if all_wait:
            return max(took_s) + ways_s, ways_s, [0.0] * n
        of = parameters, update.mode, update.local_steps, update.codec
        homes = self._homes(replicas)
        uploads_s = [
            contributed_bytes(*of, homes[name].part) / m.up_bytes_per_s
            for m, name in zip(replicas, _names_of_homes(replicas), strict=True)
        ]
        least = least_quorum(update.majority, n)
        end_s = waited_s(uploads_s, [r.flow for r in rates], least)
        behind_s = [max(0.0, s - end_s) for s in uploads_s]
        if not any(behind_s):
            return max(took_s) + ways_s, ways_s, behind_s
        in_time = [a - b for a, b, s in zip(took_s, uploads_s, behind_s, strict=True) if not s]
        return end_s + max(in_time) + ways_s, ways_s, behind_s

    def round(self, stages: Sequence[StageCost]) -> Round:
        """Of all stages in order."""
        key = tuple(map(id, stages))
        known = self._rounds.get(key)
        if known is None:
            if len(self._rounds) >= MAX_STAGES:
                self._rounds.clear()
            known = self._rounds[key] = tuple(stages), self._found(stages)
        return known[1]

    def _found(self, stages: Sequence[StageCost]) -> Round:
        inside = [0.0] * (len(stages) - 1)
        if any(s.sharing is not None for s in stages):
            stages, inside = _together(stages)
        found, with_all = self._round(stages, inside), stages
        for _ in range(LOOKS_AT_LATE if any(s.late for s in stages) else 0):
            open_s = found.seconds - found.exchange_s
            with_all = [s.with_late(open_s) for s in stages]
            found = self._round(with_all, inside)
        return found

    def _round(self, stages: Sequence[StageCost], inside: Sequence[float]) -> Round:
        """`inside`: between each two stages, the part of the ways that stay in a house."""
        job = self.job
        samples, each = job.global_batch, job.microbatch
        poorest = min(stages, key=lambda s: s.flow)
        passages = [each * s.num_replicas / s.flow for s in stages]
        own = each * poorest.num_replicas / poorest.flow
        ragged = sum(each / s.slowest * (1 - 1 / s.num_replicas) * (1 - s.left) for s in stages)
        ways = sum(  # forth and back, at the mean latency of both ends
            (1 - part) * (a.latency_s + b.latency_s) + part * (INSIDE_LATENCY_S + INSIDE_LATENCY_S)
            for (a, b), part in zip(pairwise(stages), inside, strict=True)
        )
        left = [each * s.num_replicas / s.compute * s.left for s in stages]
        fill = sum(passages) - own - self._left_s(stages, passages, left, ways)
        passage = sum(passages) - sum(left) + ways
        wanted = IN_FLIGHT_PER_REPLICA * sum(s.num_replicas for s in stages)
        window = max(1.0, min(job.num_microbatches, wanted))
        steady = max(samples / poorest.flow, own)
        is_beside = job.update.mode in (DELAYED, AUTO)
        bubble = ragged if is_beside else fill + ragged
        waiting = bubble if is_beside else bubble + ways
        full = max(steady + waiting, job.num_microbatches * passage / window)
        compute = max(samples / max_flow([s.compute for s in stages]), own * _part(poorest))
        links = max(0.0, steady - compute)
        exchange = max(s.exchange_s for s in stages)
        if is_beside:
            exchange = max(0.0, exchange - full)
        return Round(
            compute_s=compute,
            links_s=links,
            bubble_s=bubble,
            latency_s=max(0.0, full - compute - links - bubble),
            exchange_s=exchange,
            update_s=max(s.update_s for s in stages),
            tokens=samples * job.tokens,
        )

    def _left_s(
        self,
        stages: Sequence[StageCost],
        passages: Sequence[float],
        left: Sequence[float],
        ways: float,
    ) -> float:
        """By how much a round is shorter since gradients of weights are left for later. `left`: of
        a microbatch at each stage, seconds.

        The poorest stage gets its last microbatch and gives it back earlier by what the others
        leave, and makes what it has left itself while those before it make their last passes."""
        if not any(left):
            return 0.0
        job, least = self.job, min(s.flow for s in stages)
        poorest = max(k for k, s in enumerate(stages) if s.flow <= least * (1 + 1e-9))
        back = job.backward / (1 + job.backward)
        drain = sum(back * t - w for t, w in zip(passages[:poorest], left, strict=False))
        drain += ways / 2 * poorest / max(1, len(stages) - 1)
        num = min(most_owed(poorest), stages[poorest].most_left, job.num_microbatches)
        return sum(left) - left[poorest] + min(drain, num * left[poorest])

    def loads(
        self, cut: Cut, machines: Sequence[Machine], serves: Sequence[int]
    ) -> list[list[tuple[float, float, float]]]:
        """Of each replica of each stage, in the order of the machines: its samples/s, and the
        bytes (sent, received) of one over its link. Raises `ValueError` where `of` has none."""
        stages, replicas = [], []
        for k, (first, end) in enumerate(cut):
            mine = [m for m, s in zip(machines, serves, strict=True) if s == k]
            stage = self.stage(first, end, len(cut), mine)
            if stage is None:
                raise ValueError(f"stage {k} has no replica, or one that it does not fit into")
            stages.append(stage)
            replicas.append(mine)
        together = carried_together(_sharings(stages))
        found = []
        for k, (stage, mine, (first, end)) in enumerate(zip(stages, replicas, cut, strict=True)):
            homes = {} if stage.sharing is None else {h.house: h for h in stage.sharing.homes}
            of_stage = []
            for m in mine:
                rates = self.rates(m, first, end, len(cut))
                assert rates is not None
                load = rates.flow, *self.link_bytes(first, end)
                if m.house in homes:  # others are late
                    here = together[k].parts[m.house] * together[k].flow
                    samples = here * rates.compute / homes[m.house].compute
                    load = samples, *together[k].crossing[m.house]
                of_stage.append(load)
            found.append(of_stage)
        return found

    def of(self, cut: Cut, machines: Sequence[Machine], serves: Sequence[int]) -> Round | None:
        """`serves`: the stage of each machine; -1 of one that is left out. None where a stage has
        no replica or does not fit."""
        stages = []
        for k, (first, end) in enumerate(cut):
            mine = [m for m, s in zip(machines, serves, strict=True) if s == k]
            stage = self.stage(first, end, len(cut), mine)
            if stage is None:
                return None
            stages.append(stage)
        return self.round(stages)


def _sharings(stages: Sequence[StageCost]) -> list[Sharing]:
    return [s.sharing or Sharing((), s.flow, s.slowest, None, None) for s in stages]


def _together(stages: Sequence[StageCost]) -> tuple[list[StageCost], list[float]]:
    """The stages with what links carry of all of them, and between each two the part of the ways
    that stay in a house."""
    sharings = _sharings(stages)
    found = carried_together(sharings)
    exchange_s = max(s.ways_s for s in stages) + exchange_of_houses_s(sharings)
    together = [
        replace(
            s,
            flow=c.flow,
            slowest=c.slowest,
            exchange_s=max(s.exchange_s, exchange_s),
            sharing=None,
        )
        for s, c in zip(stages, found, strict=True)
    ]
    return together, ways_inside(found)


def _names_of_homes(replicas: Sequence[Machine]) -> list[str | int]:
    """The house of each, or its number where it is of none."""
    return [m.house or i for i, m in enumerate(replicas)]


def _part(stage: StageCost) -> float:
    """Of the time at a stage that is computing."""
    return stage.flow / stage.compute
