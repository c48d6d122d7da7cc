"""A peer's numbers for Prometheus, at `/metrics` (`swarmnet peer --metrics-port PORT`).

Two kinds: what this peer itself did (its traffic, by direction and method), and what it believes of
the run (coverage, round, loss, owners of shards), which is the same at every peer but for what
gossip has not brought yet. Names and units follow Prometheus' conventions. The library's own server
answers, in a thread; the numbers are taken on the event loop, so that nothing changes while it is
looked at.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from swarmnet.errors import PortTaken, UserError
from swarmnet.observe.monitor import newest_held_out, owners_by_shard
from swarmnet.ports import RouterReport
from swarmnet.printable import printable
from swarmnet.protocol.histogram import Histogram
from swarmnet.protocol.membership.records import STATES
from swarmnet.protocol.pipeline import progress
from swarmnet.spec import RunSpec
from swarmnet.swarm.peer import Peer
from swarmnet.swarm.replica.replica import Replica
from swarmnet.version import __version__

MAX_EXPERTS_TOLD = 256
"""Of all layers of a stage; where there are more, no single ones are told of."""
COLLECT_TIMEOUT_S = 5.0
"""For the event loop to say its numbers."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What people are told of a metric."""

    kind: Any
    text: str
    labels: tuple[str, ...] = ()


COUNTED = {
    "rerouted": "Microbatches sent to another replica because one failed.",
    "retracted": "Microbatches taken out of a gradient again.",
    "samples_lost": "Samples whose gradient died with a peer.",
    "slots_doubled": "Slots that two feeders counted in one round.",
    "shard_promoted": "Optimizer shards taken over from an owner that was lost.",
    "shard_reset": "Optimizer shards begun afresh because every owner was lost.",
    "shard_stale": "Optimizer shards that went on from a state that lacks steps.",
    "shard_unlike": "Backups of optimizer shards that had seen other gradients than the primary.",
    "moved": "Moves of this peer to another stage.",
    "contributions_dropped": "Contributions refused because they were not finite.",
    "contributions_clipped": "Contributions made smaller by robust aggregation.",
    "checkpoints": "Checkpoints saved.",
    "checkpoints_failed": "Times that saving began to fail, on a full disk, say.",
    "checkpoints_resumed": "Times that saving worked again.",
    "diverged": "Times that this peer went over to another result after a partition.",
}
"""Of the own record's totals."""
GAUGE, COUNTER, HISTOGRAM = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily
OF_PEER = {
    "swarmnet_peer_info": Metric(
        GAUGE, "This peer, in labels. Always 1.", ("peer_id", "stage", "state", "version")
    ),
    "swarmnet_transport_bytes": Metric(COUNTER, "Bytes on the wire.", ("direction", "method")),
    "swarmnet_direct_bytes": Metric(COUNTER, "Bytes sent over direct connections."),
    "swarmnet_direct_links": Metric(GAUGE, "Peers with a direct connection."),
    "swarmnet_call_seconds": Metric(
        HISTOGRAM, "Calls to other peers that were answered.", ("method",)
    ),
    "swarmnet_failed_calls": Metric(
        COUNTER, "Calls that no peer answered, or too late.", ("method",)
    ),
    "swarmnet_microbatch_device_seconds": Metric(
        HISTOGRAM, "Device time of a microbatch, by every forward and every backward pass."
    ),
    "swarmnet_round_seconds": Metric(HISTOGRAM, "Rounds, from opening to opening."),
    "swarmnet_exchange_seconds": Metric(HISTOGRAM, "Exchanges of gradients."),
    "swarmnet_queue_length": Metric(GAUGE, "Pieces of work that wait."),
    "swarmnet_device_samples_per_second": Metric(
        GAUGE, "What the device could do of its stage, were it never idle."
    ),
    **{f"swarmnet_{name}": Metric(COUNTER, text) for name, text in COUNTED.items()},
}
"""What a peer itself did."""
OF_RUN = {
    "swarmnet_peers": Metric(GAUGE, "Live peers, by stage and state.", ("stage", "state")),
    "swarmnet_shard_owners_min": Metric(
        GAUGE, "Live owners of the optimizer shard of a stage that has the fewest.", ("stage",)
    ),
    "swarmnet_round": Metric(GAUGE, "The round being made."),
    "swarmnet_round_samples": Metric(
        GAUGE, "Samples of the present round: launched, committed, due.", ("state",)
    ),
    "swarmnet_spread_ratio": Metric(
        GAUGE, "Largest distance of two replicas that met, over the norm of their parameters."
    ),
    "swarmnet_loss_nats": Metric(GAUGE, "Training loss of the last round, nats per token."),
    "swarmnet_round_tokens": Metric(GAUGE, "Tokens of the last round."),
    "swarmnet_held_out_loss_nats": Metric(GAUGE, "Newest loss on held-out data, nats per token."),
}
"""What it believes of the run."""
OF_ROUTERS = {
    "swarmnet_expert_share": Metric(
        GAUGE,
        "Share of an expert in the choices of its layer's router, in the last round.",
        ("layer", "expert"),
    ),
    "swarmnet_dropped_choices_ratio": Metric(
        GAUGE,
        "Share of the choices for which an expert had no room, in the last round.",
        ("layer",),
    ),
    "swarmnet_router_entropy_nats": Metric(
        GAUGE,
        "Entropy of a token's probabilities of experts, the mean of the last round.",
        ("layer",),
    ),
}
"""What a peer knows of its stage's layers that have experts."""
METRICS = OF_PEER | OF_ROUTERS | OF_RUN


def _family(name: str) -> Any:
    about = METRICS[name]
    return about.kind(name, about.text, labels=about.labels)


def _one(name: str, value: float) -> Any:
    """Of a metric without labels."""
    about = METRICS[name]
    return about.kind(name, about.text, value=value)


class PeerCollector(Collector):
    """Reads a peer, and the run as it sees it."""

    def __init__(self, peer: Peer, spec: RunSpec, loop: asyncio.AbstractEventLoop) -> None:
        self._peer = peer
        self._spec = spec
        self._loop = loop

    def collect(self) -> Iterator[Any]:
        """On the server's thread. Nothing where the loop is too busy to answer."""
        taken: concurrent.futures.Future[list[Any]] = asyncio.run_coroutine_threadsafe(
            self._take(), self._loop
        )
        try:
            yield from taken.result(COLLECT_TIMEOUT_S)
        except TimeoutError:
            taken.cancel()

    async def _take(self) -> list[Any]:
        return [*self._of_peer(), *self._of_run()]

    def _of_peer(self) -> Iterator[Any]:
        own, traffic = self._peer.gossip.own, self._peer.transport.traffic
        about = _family("swarmnet_peer_info")
        about.add_metric([own.peer_id, str(own.stage), own.state, __version__], 1)
        yield about
        bytes_ = _family("swarmnet_transport_bytes")
        for method, amount in sorted(traffic.sent_bytes.items()):
            bytes_.add_metric(["sent", printable(method)], amount)
        for method, amount in sorted(traffic.received_bytes.items()):
            bytes_.add_metric(["received", printable(method)], amount)
        yield bytes_
        yield _one("swarmnet_direct_bytes", traffic.direct_sent_bytes)
        yield _one("swarmnet_direct_links", traffic.direct_links)
        calls = _family("swarmnet_call_seconds")
        for method, histogram in sorted(traffic.call_s.items()):
            calls.add_metric([printable(method)], *_buckets(histogram))
        yield calls
        failed = _family("swarmnet_failed_calls")
        for method, amount in sorted(traffic.failed_calls.items()):
            failed.add_metric([printable(method)], amount)
        yield failed
        if self._peer.replica is not None:
            yield from _times_of(self._peer.replica)
            yield from routers_of(self._peer.replica.stage.routed)
        yield _one("swarmnet_queue_length", own.queue_length)
        yield _one("swarmnet_device_samples_per_second", own.samples_per_s)
        for name in COUNTED:
            yield _one(f"swarmnet_{name}", own.totals.get(name, 0))

    def _of_run(self) -> Iterator[Any]:
        now, view = self._loop.time(), self._peer.view
        live = view.live(now)
        stages = range(self._spec.pipeline.num_stages)
        peers = _family("swarmnet_peers")
        for k in stages:
            for state in STATES:
                count = sum(r.stage == k and r.state == state for r in live)
                peers.add_metric([str(k), state], count)
        yield peers
        owners = _family("swarmnet_shard_owners_min")
        for k in stages:
            of_shards = owners_by_shard([r for r in live if r.stage == k and r.is_replica])
            if of_shards:
                owners.add_metric([str(k)], min(of_shards))
        yield owners
        newest = progress.newest_round(view, now)
        yield _one("swarmnet_round", newest)
        pipeline = self._spec.pipeline
        made = progress.round_progress(view, newest, now, pipeline.slots.of(newest))
        samples = _family("swarmnet_round_samples")
        samples.add_metric(["launched"], made.launched * pipeline.microbatch)
        samples.add_metric(["committed"], made.committed * pipeline.microbatch)
        samples.add_metric(["due"], pipeline.batch_of(newest))
        yield samples
        yield _one(
            "swarmnet_spread_ratio", max((r.spread for r in live if r.is_replica), default=0.0)
        )
        yield from self._losses(newest, live)

    def _losses(self, newest: int, live: Sequence[Any]) -> Iterator[Any]:
        counts = [r.count(newest - 1) for r in live] if newest else []
        tokens = sum(c.tokens for c in counts)
        if tokens:
            yield _one("swarmnet_loss_nats", sum(c.loss_sum for c in counts) / tokens)
            yield _one("swarmnet_round_tokens", tokens)
        measured = newest_held_out(live, live, self._spec.optimizer.end)
        if measured is not None:
            yield _one("swarmnet_held_out_loss_nats", measured.loss)


def _times_of(replica: Replica) -> Iterator[Any]:
    measured = replica.measured
    for name, histogram in (
        ("swarmnet_microbatch_device_seconds", measured.services),
        ("swarmnet_round_seconds", measured.rounds),
        ("swarmnet_exchange_seconds", measured.exchanges),
    ):
        family = _family(name)
        family.add_metric([], *_buckets(histogram))
        yield family


def routers_of(reports: Sequence[RouterReport]) -> Iterator[Any]:
    """Of the layers of this machine's stage that have experts. Each expert's share is told where
    they are few; of many the largest and the smallest."""
    if not reports:
        return
    shares, dropped, entropy = map(_family, OF_ROUTERS)
    for r in reports:
        told = {"most": max(r.shares), "least": min(r.shares)}
        if sum(len(one.shares) for one in reports) <= MAX_EXPERTS_TOLD:
            told |= {str(i): share for i, share in enumerate(r.shares)}
        for expert, share in told.items():
            shares.add_metric([r.layer, expert], share)
        dropped.add_metric([r.layer], r.dropped)
        entropy.add_metric([r.layer], r.entropy)
    yield from (shares, dropped, entropy)


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, int]], float]:
    ends = [(floatToGoString(bound), count) for bound, count in histogram.cumulative()]
    return ends, histogram.sum


def serve_metrics(peer: Peer, spec: RunSpec, host: str, port: int) -> Any:
    """Serves `/metrics` until the result's `shutdown()`. Raises `PortTaken`, or `UserError`
    where the address is not this machine's."""
    registry = CollectorRegistry()
    registry.register(PeerCollector(peer, spec, asyncio.get_running_loop()))
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as e:
        kind = PortTaken if e.errno == errno.EADDRINUSE else UserError
        raise kind(
            f"cannot serve metrics on {host}:{port}: {e.strerror}; choose another --metrics-port"
        ) from None
    return server


async def shut_down_when_cancelled(server: Any) -> None:
    """Its thread may wait for this loop: the loop goes on while the server ends."""
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(server.shutdown)
