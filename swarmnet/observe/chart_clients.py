"""Where `--log-to` draws: the libraries that keep charts, each by its own client.

A run has one chart, whoever writes it and how often it is started: each client is told the run's
own name, made of its name and id. Those that may wait for a network work on a thread of their own;
what waits for them is bounded, and nobody else waits."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from swarmnet.errors import UsageError, UserError, one_line
from swarmnet.needs import install_command

MAX_WAITING = 100_000
"""Values that wait for the disk, or calls for a network: what hangs holds up nobody before."""
FLUSH_S = 10
CLOSE_S = 10.0
"""How long the end of a peer waits for what has not been sent."""
MAX_EVENTS = 200
"""Lines that a run has in MLflow, which keeps them as tags: the newest."""
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""Where MLflow keeps runs too, with all that it asks for."""
FOLDERS = ("", "file")


class Client(Protocol):
    """One chart. Any of these may raise anything that the library does."""

    @property
    def has_worked(self) -> bool:
        """Something that was given is kept."""

    def scalars(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Values by name, of a round."""

    def line(self, step: int, unix_s: float, text: str) -> None:
        """What happened, for people."""

    def close(self) -> None:
        """When all that was given is kept."""


Opens = Callable[[str, int | None], Client]
"""(the chart's name, the first round that is written, where that is known) -> a client."""


def client_of(log_to: str) -> Opens | None:
    """What opens the chart of `KIND:WHERE`; None where nobody asked for it. Raises `UsageError`, or
    `UserError` where the library is not there."""
    if not log_to:
        return None
    kind, _, where = log_to.partition(":")
    if kind not in CLIENTS or not where:
        forms = ", ".join(f"{name}:{place}" for name, (place, _) in CLIENTS.items())
        raise UsageError(f"--log-to {log_to[:64]}: write it as one of {forms}")
    return CLIENTS[kind][1](where)


def _missing(kind: str, command: str) -> UserError:
    return UserError(f"--log-to {kind} needs its library: {command}")


# ---- TensorBoard --------------------------------------------------------------------------------


def _tensorboard(where: str) -> Opens:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise _missing("tensorboard", install_command("tensorboard")) from None
    folder = Path(where).expanduser()
    return lambda name, first: TensorBoard(SummaryWriter, folder / name, first)


class TensorBoard:
    """A folder; rounds that are made again take the place of those that were there. Its writer has
    a thread of its own."""

    has_worked = True

    def __init__(self, writer: Any, folder: Path, first: int | None) -> None:
        self._writer = writer(
            str(folder), purge_step=first, max_queue=MAX_WAITING, flush_secs=FLUSH_S
        )

    def scalars(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=unix_s)

    def line(self, step: int, unix_s: float, text: str) -> None:
        self._writer.add_text("events", text, step, walltime=unix_s)

    def close(self) -> None:
        self._writer.close()


# ---- Weights & Biases ---------------------------------------------------------------------------


def _wandb(where: str) -> Opens:
    try:
        import wandb
    except ImportError:
        raise _missing("wandb", install_command("wandb")) from None
    return lambda name, _: OnThread(lambda: Wandb(wandb, where, name))


class Wandb:
    """A run of a project, by an id of its own: one that is there goes on. WANDB_MODE=offline keeps
    it on the disk. Rounds that are made again stand beside those that were there."""

    has_worked = True

    def __init__(self, wandb: Any, project: str, name: str) -> None:
        self._run = wandb.init(
            project=project,
            id=re.sub(r"[^A-Za-z0-9_.-]+", "-", name),
            name=name,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def scalars(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._run.log({"round": step, "unix s": unix_s, **values})

    def line(self, step: int, unix_s: float, text: str) -> None:
        self._run.log({"round": step, "unix s": unix_s, "event": text})

    def close(self) -> None:
        self._run.finish()


# ---- MLflow -------------------------------------------------------------------------------------


def _mlflow(where: str) -> Opens:
    try:
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise _missing("mlflow", install_command("mlflow-skinny")) from None
    _check_store(where, MlflowClient)
    return lambda name, _: OnThread(lambda: Mlflow(MlflowClient(tracking_uri=where), name))


def _check_store(where: str, client: Any) -> None:
    """Raises `UserError` where the library that is installed keeps nothing in such a store, which
    it says when it is first asked, and of something else."""
    scheme = where.partition("://")[0].partition("+")[0] if "://" in where else ""
    if scheme in DATABASES and find_spec("sqlalchemy") is None:
        raise _missing(f"mlflow:{scheme}://...", "pip install mlflow")
    if scheme in FOLDERS or where.startswith("file:"):
        try:
            client(tracking_uri=where)
        except Exception as e:  # of whatever library
            said = one_line(e).partition(". ")[0]
            raise UserError(
                f"--log-to mlflow:{where[:64]}: MLflow keeps no run in this folder; write "
                f"mlflow:sqlite:///FILE or the address of a server (it says: {said})"
            ) from None


class Mlflow:
    """A run of the experiment `swarmnet` at a tracking server, or in a store on the disk: the one
    that has this name, if there is one."""

    EXPERIMENT = "swarmnet"
    NUM_LINES = "events"
    """The tag that has their number, those included that others have taken the place of."""
    has_worked = True

    def __init__(self, client: Any, name: str) -> None:
        from mlflow.entities import Metric, RunTag

        self._metric, self._tag = Metric, RunTag
        self._client = client
        found = client.get_experiment_by_name(self.EXPERIMENT)
        experiment = (
            client.create_experiment(self.EXPERIMENT) if found is None else found.experiment_id
        )
        wanted = f"attributes.run_name = '{name}'"
        runs = client.search_runs([experiment], filter_string=wanted, max_results=1)
        run = runs[0] if runs else client.create_run(experiment, run_name=name)
        self._id = run.info.run_id
        client.update_run(self._id, status="RUNNING")
        before = run.data.tags.get(self.NUM_LINES, "")
        self._num_lines = int(before) if before.isdecimal() else 0

    def scalars(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        unix_ms = int(1000 * unix_s)
        found = [self._metric(name, value, unix_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=found)

    def line(self, step: int, unix_s: float, text: str) -> None:
        key = f"event {self._num_lines % MAX_EVENTS:03d}"
        self._num_lines += 1
        tags = {key: f"round {step}: {text}", self.NUM_LINES: str(self._num_lines)}
        self._client.log_batch(self._id, tags=[self._tag(k, v) for k, v in tags.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


# ---- Trackio ------------------------------------------------------------------------------------


def _trackio(where: str) -> Opens:
    try:
        import trackio
    except ImportError:
        raise _missing("trackio", install_command("trackio")) from None
    return lambda name, _: OnThread(lambda: Trackio(trackio, where, name))


class Trackio:
    """A run of a project of Trackio, which keeps it on this disk."""

    has_worked = True

    def __init__(self, trackio: Any, project: str, name: str) -> None:
        self._trackio = trackio
        trackio.init(project=project, name=name, resume="allow")

    def scalars(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def line(self, step: int, unix_s: float, text: str) -> None:
        self._trackio.log({"event": text}, step=step)

    def close(self) -> None:
        self._trackio.finish()


CLIENTS: dict[str, tuple[str, Callable[[str], Opens]]] = {
    "tensorboard": ("DIR", _tensorboard),
    "wandb": ("PROJECT", _wandb),
    "mlflow": ("URI", _mlflow),
    "trackio": ("PROJECT", _trackio),
}
"""By kind: what stands behind the colon, and what opens it."""


# ---- beside all else ----------------------------------------------------------------------------


class OnThread:
    """A client that may wait for a network, on a thread of its own."""

    def __init__(self, opens: Callable[[], Client]) -> None:
        self._opens = opens
        self._work: queue.Queue[Callable[[Client], None] | None] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        self._num_done = 0
        self._thread = threading.Thread(target=self._run, name="charts", daemon=True)
        self._thread.start()

    @property
    def has_worked(self) -> bool:
        return self._num_done > 0

    def scalars(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._put(lambda client: client.scalars(step, unix_s, values))

    def line(self, step: int, unix_s: float, text: str) -> None:
        self._put(lambda client: client.line(step, unix_s, text))

    def close(self) -> None:
        """Waits a while for what has not been sent. Raises what went wrong since the last time, and
        `TimeoutError` where the while was too short."""
        with suppress(queue.Full):
            self._work.put_nowait(None)
        self._thread.join(CLOSE_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(f"not all was sent within {CLOSE_S:.0f} s")

    def _put(self, work: Callable[[Client], None]) -> None:
        """Raises what went wrong since the last time, and `queue.Full`."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._work.put_nowait(work)

    def _run(self) -> None:
        """Until closed, or until the client fails: it is opened anew for what comes then."""
        client: Client | None = None
        while (work := self._work.get()) is not None:
            try:
                client = client or self._opens()
                work(client)
                self._num_done += 1
            except Exception as e:  # of whatever library
                self._error = e
                return
        if client is not None:
            try:
                client.close()
            except Exception as e:  # of whatever library
                self._error = e
