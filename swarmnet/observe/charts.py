"""`--log-to`: a run's numbers by round, and what happened to its peers, in a chart that some other
library keeps (`chart_clients`).

A run has one chart, under its name and the beginning of its id, whoever writes it and how often it
is started: so it goes on in the same one."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence

from swarmnet.errors import one_line
from swarmnet.observe.chart_clients import Client, client_of
from swarmnet.observe.events import (
    Event,
    HeldOut,
    Migrated,
    PeerJoined,
    PeerLost,
    PeerPaused,
    RoundFinished,
)
from swarmnet.observe.text import sentence
from swarmnet.observe.view_model import ViewModel
from swarmnet.printable import printable
from swarmnet.protocol.trouble import Trouble
from swarmnet.spec import RunSpec

log = logging.getLogger("swarmnet.peer")

ID_CHARACTERS = 8
MAX_BEFORE = 1024
"""Events that wait for the first round."""
CHARTS = {
    "loss/training": "Training loss of the round, nats per token.",
    "loss/held out": "Held-out loss, nats per token.",
    "loss/bits per byte": "Held-out loss, in bits for each byte of the text.",
    "run/peers": "Live peers that serve a stage, or are about to.",
    "run/peers lost": "Peers that went away since this one started.",
    "run/tokens per s": "Speed of the round.",
    "run/seconds a round": "Time since the round before.",
    "run/spread": "Largest distance of two replicas, over the norm of their parameters, where they "
    "may differ.",
    "stages/replicas of {stage}": "Peers that serve the stage.",
    "stages/samples per s of {stage}": "What the stage's replicas together could do.",
}
"""What is drawn, and what it means."""
TOLD = (PeerJoined, PeerLost, PeerPaused, Migrated)
"""Events that stand beside the charts as text."""


class Charts:
    """What is written of one run. Nothing that goes wrong with it stops who looks."""

    def __init__(self, log_to: str, spec: RunSpec) -> None:
        """`log_to`: `KIND:WHERE`. Raises as `client_of`."""
        name = re.sub(r"[^\w.-]+", "-", spec.name).strip("-.")[:64] or "run"
        self.name = f"{name}-{spec.run_id[:ID_CHARACTERS]}"
        opens = client_of(log_to)
        assert opens is not None
        self._opens = opens
        self._log_to = log_to
        self._rounds = spec.optimizer.rounds
        self._client: Client | None = None
        self._round = 0
        self._before: list[Event] = []
        """What happened before the first round ended, which says where in the chart that was, and
        which rounds are made again."""
        self._has_begun = False
        self._num_lost = 0
        """Since this peer started."""
        self._trouble = Trouble()

    def write(self, events: Sequence[Event], model: ViewModel) -> None:
        """Takes in what happened since the last look."""
        if not events:
            return
        try:
            for event in events:
                self._write(event, model)
        except Exception as e:  # of whatever library
            self._client = None
            self._failed(e)
            return
        if self._client is not None and self._client.has_worked and self._trouble.is_over():
            log.warning("--log-to %s is written again", self._log_to)

    def close(self) -> None:
        """Writes what waits. Idempotent."""
        try:
            if self._before:
                self._begin(None)
            client, self._client = self._client, None
            if client is not None:
                client.close()
        except Exception as e:  # of whatever library
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        more = self._trouble.failed(time.monotonic())
        if more is not None:
            log.warning(
                "--log-to %s: %s; what happens now is not there%s",
                self._log_to,
                one_line(error) or type(error).__name__,
                more,
            )

    def _write(self, event: Event, model: ViewModel) -> None:
        if isinstance(event, RoundFinished):
            self._round = event.round
        elif not isinstance(event, (HeldOut, *TOLD)):
            return
        elif not self._has_begun:
            self._before = [*self._before, event][-MAX_BEFORE:]
            return
        if self._client is None:
            self._begin(event.round if isinstance(event, RoundFinished) else None)
        self._draw(event, model)

    def _begin(self, first: int | None) -> None:
        """`first`: the first round that is written, where that is known."""
        self._client = self._opens(self.name, first)
        self._has_begun = True
        before, self._before = self._before, []
        for event in before:
            self._draw(event, None)

    def _draw(self, event: Event, model: ViewModel | None) -> None:
        """`model`: of rounds."""
        assert self._client is not None
        if isinstance(event, RoundFinished):
            assert model is not None
            self._client.scalars(event.round, event.time_unix_s, _of_round(event, model))
        elif isinstance(event, HeldOut):
            values = {"loss/held out": event.loss, "loss/bits per byte": event.bits_per_byte}
            self._client.scalars(event.round, event.time_unix_s, values)
        else:
            line = printable(sentence(event, self._rounds))
            self._client.line(self._round, event.time_unix_s, line)
            if isinstance(event, PeerLost):
                self._num_lost += 1
                self._client.scalars(
                    self._round, event.time_unix_s, {"run/peers lost": float(self._num_lost)}
                )


def _of_round(event: RoundFinished, model: ViewModel) -> dict[str, float]:
    values = {"loss/training": event.loss, "run/peers": float(event.peers)}
    if event.tokens_per_s:
        values |= {"run/tokens per s": event.tokens_per_s, "run/seconds a round": event.seconds}
    if event.spread:
        values["run/spread"] = event.spread
    for row in model.stages:
        values[f"stages/replicas of {row.stage}"] = float(row.num_replicas)
        if row.samples_per_s:
            values[f"stages/samples per s of {row.stage}"] = row.samples_per_s
    return values
