"""`/metrics` of a real peer, as Prometheus reads it, and the Grafana dashboard that shows it."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peer.observe.prometheus import METRICS, OF_ROUTERS
from tests.processes.running import Machine, tiny_run

pytestmark = pytest.mark.processes
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "swarmnet.json"
ROUNDS = 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name; each by the values of its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, {})  # also of one that has no sample yet
        for sample in family.samples:
            values = tuple(sample.labels.values())
            found.setdefault(sample.name, {})[values] = sample.value
    return found


def test_prometheus_reads_a_peer(running: Machine) -> None:
    port = free_port()
    path = tiny_run(running.folder, rounds=100_000)
    # Activations that are worth a direct connection.
    wider = {
        "hidden_size = 32": "hidden_size = 128",
        "embeddings = 16": "embeddings = 64",
    }
    text = path.read_text()
    for old, new in wider.items():
        text = text.replace(old, new)
    path.write_text(text)
    first = running.start_peer(
        "first", "--spec", str(path), "--stage", "0", "--metrics-port", str(port)
    )
    running.until_ready(first)
    second = running.start_peer("second", "--join", first.address, "--stage", "1")
    running.until_round(first, ROUNDS)
    seen = scrape(port)
    assert seen["swarmnet_peers"]["0", "active"] == 1
    assert seen["swarmnet_peers"]["1", "active"] == 1
    assert seen["swarmnet_round"][()] >= ROUNDS - 1
    assert 0 < seen["swarmnet_loss_nats"][()] < 10
    assert seen["swarmnet_shard_owners_min"] == {("0",): 1, ("1",): 1}
    assert seen["swarmnet_transport_bytes_total"]["sent", "step"] > 0
    sent = sum(v for k, v in seen["swarmnet_transport_bytes_total"].items() if k[0] == "sent")
    assert 0 < seen["swarmnet_direct_bytes_total"][()] < sent
    assert seen["swarmnet_direct_links"][()] == 1
    assert seen["swarmnet_spread_ratio"][()] == 0
    for name in ("call", "round", "exchange", "microbatch_device"):
        found = seen[f"swarmnet_{name}_seconds_count"]
        assert sum(found.values()) > 0, name
        buckets = seen[f"swarmnet_{name}_seconds_bucket"]
        assert sum(v for k, v in buckets.items() if "+Inf" in k) == sum(found.values())
    assert seen["swarmnet_call_seconds_count"]["step",] > 0
    later = scrape(port)
    absent = {"swarmnet_held_out_loss_nats"} | OF_ROUTERS.keys()
    assert METRICS.keys() - later.keys() <= absent, "told of, and not there"
    assert later["swarmnet_round"][()] >= seen["swarmnet_round"][()]
    named = set(re.findall(r"swarmnet_\w+", DASHBOARD.read_text()))
    assert named
    assert named - set(seen) <= absent, "a panel without a metric"
    assert OF_ROUTERS.keys() <= named
    assert json.loads(DASHBOARD.read_text())["panels"]

    at_once = "import swarmnet.runtime.net as net; net.PORT_WAIT_S = 0.0"
    again = running.start_peer(
        *("third", "--join", first.address, "--metrics-port", str(port)),
        command=(sys.executable, "-c", f"{at_once}; from peer.cli import main; main()"),
    )
    assert running.wait(again) == 2
    assert "--metrics-port" in again.errors()[-1]
    running.interrupt(second)
    running.interrupt(first)
    assert running.wait(first) == 0, "the server does not hold the peer up"
