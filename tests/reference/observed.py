"""Events, and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from peer.observe.prometheus import OF_PEER, OF_ROUTERS, OF_RUN, Metric
from swarmnet.observe.charts import CHARTS
from swarmnet.observe.events import KINDS, MEANINGS, Counted, Event
from swarmnet.observe.view_model import GivenRow, PeerRow, RoundSplit, StageRow, ViewModel
from tests.reference.docstrings import of_class, of_fields
from tests.reference.tables import code, page, table

FIELDS = ("field", "type", "meaning")
TYPES = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}


def events() -> str:
    kinds = {name: kind for name, kind in KINDS.items() if kind is not Counted}
    return page(
        "Events",
        "Events tell what happens in a run. `--metrics FILE` of `swarmnet local` and `swarmnet "
        "peer` writes each of them as one JSON object a line, with the name of its kind in "
        "`event`; from Python, `run.events()` gives them as objects. Programs should pass over "
        "kinds and fields that they do not know: newer versions add some.",
        "All have this field:",
        table(FIELDS, _fields(Event)),
        *(_event(name, kind) for name, kind in kinds.items()),
        "## Counted",
        of_class(Counted) + " Its name in `event` says what:",
        table(("event", "meaning"), ((code(name), text) for name, text in MEANINGS.items())),
        table(FIELDS, _fields(Counted, but=("time_unix_s", "what"))),
        "## state",
        "The whole run as a screen shows it. `--metrics` writes such a line now and then, so "
        "that `swarmnet dashboard --replay FILE` can show the run again. From Python, "
        "`run.status()` gives the same as a `ViewModel`, and `swarmnet status ADDR --json` "
        "prints it, with `num_live` (live peers) and `uncovered` (stages that nobody serves) "
        "besides.",
        table(FIELDS, _fields(ViewModel)),
        "A row of `stages`:",
        table(FIELDS, _fields(StageRow)),
        "A row of `peers`:",
        table(FIELDS, _fields(PeerRow)),
        "A row of `given`:",
        table(FIELDS, _fields(GivenRow)),
        "`split`:",
        table(FIELDS, _fields(RoundSplit)),
    )


def _event(name: str, kind: type[Any]) -> str:
    text = f"{of_class(kind)} From Python it is a `{kind.__name__}`."
    return "\n\n".join((f"## {name}", text, table(FIELDS, _fields(kind, but=("time_unix_s",)))))


def _fields(cls: type[Any], but: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str]]:
    texts = of_fields(cls)
    for field in fields(cls):
        if field.name not in but:
            yield code(field.name), _type(str(field.type)), texts[field.name]


def _type(annotation: str) -> str:
    name, _, rest = annotation.partition(" | ")
    if name.startswith("tuple[tuple"):
        return "list of lists"
    if name.startswith("tuple"):
        return "list of objects"
    known = TYPES.get(name, "object")
    return f"{known} or null" if rest else known


def metrics() -> str:
    return page(
        "Metrics",
        "A run's numbers can be had in three ways: as [events](events.md) in a file, by "
        "Prometheus, and as charts of other tools.",
        "## Prometheus",
        "`swarmnet peer --metrics-port PORT` serves these at `/metrics`, on this machine only "
        "unless `--metrics-host` says more. A counter's name ends in `_total`; a histogram has "
        "`_bucket`, `_sum` and `_count`, in seconds. [A dashboard for "
        "Grafana](../grafana/swarmnet.json) shows them.",
        "What this peer itself did, since it was started:",
        table(("metric", "kind", "labels", "meaning"), _metrics(OF_PEER)),
        "### Where the stage's layers have experts",
        table(("metric", "kind", "labels", "meaning"), _metrics(OF_ROUTERS)),
        "What it believes of the run, which is the same at every peer but for what gossip has "
        "not brought yet:",
        table(("metric", "kind", "labels", "meaning"), _metrics(OF_RUN)),
        "## Charts",
        "`--log-to KIND:WHERE` of `swarmnet local` and `swarmnet peer` draws these charts, "
        "by round: in TensorBoard, wandb, MLflow or Trackio. Joined, lost, paused and moved peers "
        "stand beside them as text, under `events`.",
        table(("chart", "meaning"), ((code(name), text) for name, text in CHARTS.items())),
    )


def _metrics(metrics: dict[str, Metric]) -> Iterator[tuple[str, str, str, str]]:
    for name, about in metrics.items():
        is_counter = about.kind is CounterMetricFamily
        kind = "counter" if is_counter else "gauge"
        kind = "histogram" if about.kind is HistogramMetricFamily else kind
        labels = ", ".join(map(code, about.labels))
        yield code(name + "_total" * is_counter), kind, labels, about.text
