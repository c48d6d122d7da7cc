"""The order that ended a run, in the state folder: a peer that is started again does not begin it
anew, and tells those that go on with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from swarmnet.errors import FinalError, ProtocolViolation, SwarmnetError
from swarmnet.files import write_whole
from swarmnet.methods.contact import STOP, StopRequest
from swarmnet.protocol.timing import ANSWER_S
from swarmnet.runtime.text import SHOWN_CHARACTERS, shown_run
from swarmnet.spec import RunSpec
from swarmnet.stop_order import StopCheck, StopOrder, kept, to_keep
from swarmnet.swarm.calls import call
from swarmnet.transport.base import Transport
from swarmnet.wire import Message

log = logging.getLogger("swarmnet.peer")

STOP_FILE = "stopped"
"""In the state folder, with the beginning of the run's id behind it."""


def stop_file(state_dir: Path, run_id: str) -> Path:
    """Where the order to a run is kept."""
    return state_dir / f"{STOP_FILE}-{run_id[:SHOWN_CHARACTERS]}"


def keep_stop(state_dir: Path, run_id: str) -> Callable[[StopRequest], None]:
    """What keeps an order for the time after a restart; says so where it cannot."""
    path = stop_file(state_dir, run_id)

    def keep(given: StopRequest) -> None:
        try:
            write_whole(path, to_keep(given))
        except OSError as e:
            log.warning("cannot write %s: %s; a restart would go on", path, e.strerror or e)

    return keep


def known_stop(spec: RunSpec, state_dir: Path) -> tuple[StopRequest, StopOrder] | None:
    """The order that was kept; None where there is none that is the owner's."""
    path = stop_file(state_dir, spec.run_id)
    try:
        given = kept(path.read_bytes())
        return given, StopCheck(spec.run_id, spec.security.owner).check(given)
    except FileNotFoundError:
        return None
    except (OSError, SwarmnetError, ProtocolViolation) as e:
        log.warning("%s is no order of the run's owner, and does not count: %s", path, e)
        return None


async def refuse_stopped(
    spec: RunSpec, state_dir: Path, transport: Transport, neighbours: Sequence[str]
) -> None:
    """Raises `FinalError` where the run's owner has ended it, when those who are alive have been
    told: one of them may have slept through it."""
    known = known_stop(spec, state_dir)
    if known is None:
        return
    given, order = known
    for peer_id in neighbours:
        try:
            await call(transport, peer_id, STOP, Message(given), timeout_s=ANSWER_S)
        except SwarmnetError as e:
            log.debug("%s is not told that the run is over: %s", peer_id[-8:], e)
    raise FinalError(
        f"the owner of the run {shown_run(spec.name, spec.run_id)} has ended it with round "
        f"{order.round}: write its model with `swarmnet export --state-dir {state_dir}`, or begin "
        "another run that goes on from it ([model] continues)"
    )
