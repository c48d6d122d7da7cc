"""`--log-to tensorboard:DIR`: a run's numbers by round, through TensorBoard's own writer.

A run has one folder in DIR, under its name and the beginning of its id, whoever writes it and how
often it is started: so it goes on in the same chart. Rounds that are made again take the place of
those that were there."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarmnet.errors import UsageError, UserError
from swarmnet.needs import install_command
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
from swarmnet.protocol.trouble import Trouble
from swarmnet.spec import RunSpec

log = logging.getLogger("swarmnet.peer")

TENSORBOARD = "tensorboard"
ID_CHARACTERS = 8
MAX_WAITING = 100_000
"""Values that wait for the disk: one that hangs holds up nobody before."""
FLUSH_S = 10
CHARTS = {
    "loss/training": "Training loss of the round, nats per token.",
    "loss/held out": "Held-out loss, nats per token.",
    "loss/bits per byte": "Held-out loss, in bits for each byte of the text.",
    "run/peers": "Live peers that serve a stage, or are about to.",
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


def charts_folder(log_to: str) -> Path | None:
    """Of `tensorboard:DIR`; None where nobody asked for it. Raises `UsageError`, or `UserError`
    where the library is not there."""
    if not log_to:
        return None
    kind, _, where = log_to.partition(":")
    if kind != TENSORBOARD or not where:
        raise UsageError(f"--log-to {log_to[:64]}: write it as {TENSORBOARD}:DIR")
    _writer_class()
    return Path(where).expanduser()


class Charts:
    """What is written of one run. Nothing that goes wrong with it stops who looks."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        name = re.sub(r"[^\w.-]+", "-", spec.name).strip("-.")[:64] or "run"
        self.folder = folder / f"{name}-{spec.run_id[:ID_CHARACTERS]}"
        self._rounds = spec.optimizer.rounds
        self._writer: Any = None
        self._round = 0
        self._trouble = Trouble()

    def write(self, events: Sequence[Event], model: ViewModel) -> None:
        """Takes in what happened since the last look."""
        if not events:
            return
        try:
            for event in events:
                self._write(event, model)
        except Exception as e:  # of TensorBoard's writer, whatever its thread met
            self._writer = None
            more = self._trouble.failed(time.monotonic())
            if more is not None:
                log.warning(
                    "--log-to %s: %s; what happens now is not there%s", self.folder, e, more
                )
            return
        if self._trouble.is_over():
            log.warning("--log-to %s is written again", self.folder)

    def close(self) -> None:
        """Writes what waits. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(Exception):  # of TensorBoard's writer; it was told before
                writer.close()

    def _write(self, event: Event, model: ViewModel) -> None:
        if isinstance(event, RoundFinished):
            self._round = event.round
        elif not isinstance(event, (HeldOut, *TOLD)):
            return
        if self._writer is None:
            step = event.round if isinstance(event, (RoundFinished, HeldOut)) else None
            self._writer = _writer_class()(
                str(self.folder), purge_step=step, max_queue=MAX_WAITING, flush_secs=FLUSH_S
            )
        if isinstance(event, RoundFinished):
            self._scalars(event.round, event.time_unix_s, _of_round(event, model))
        elif isinstance(event, HeldOut):
            values = {"loss/held out": event.loss, "loss/bits per byte": event.bits_per_byte}
            self._scalars(event.round, event.time_unix_s, values)
        else:
            line = sentence(event, self._rounds)
            self._writer.add_text("events", line, self._round, walltime=event.time_unix_s)

    def _scalars(self, step: int, unix_s: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=unix_s)


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


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        command = install_command(TENSORBOARD)
        raise UserError(f"--log-to {TENSORBOARD} needs its library: {command}") from None
    return SummaryWriter
