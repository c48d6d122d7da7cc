"""swarmnet: decentralized pipeline, data, tensor and ZeRO parallel training.

A whole swarm on this machine, from a program or a notebook:

    import swarmnet

    with swarmnet.local("run.toml", peers=4) as run:
        for done in run.rounds():
            print(done.round, done.loss)
        run.export("model")

`docs/python.md` has the names that stay, which are those in `__all__`; all else is internal.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarmnet.version import __version__

if TYPE_CHECKING:
    from swarmnet.api.opening import Opening, join, local, start, watch
    from swarmnet.api.runs import AsyncRun, Run
    from swarmnet.errors import SwarmnetError, UserError
    from swarmnet.observe.events import (
        ContributionDropped,
        Counted,
        Event,
        HeldOut,
        Migrated,
        PeerJoined,
        PeerLost,
        PeerPaused,
        PeerResumed,
        RoundFinished,
        SyncMode,
    )
    from swarmnet.observe.view_model import GivenRow, PeerRow, RoundSplit, StageRow, ViewModel
    from swarmnet.runtime.observer import Observer
    from swarmnet.runtime.options import LocalPeerOptions, PeerChoices, PeerOptions
    from swarmnet.runtime.run import run_peer
    from swarmnet.spec import RunSpec, load_spec

_PLACES = {
    "api.opening": ("Opening", "join", "local", "start", "watch"),
    "api.runs": ("AsyncRun", "Run"),
    "errors": ("SwarmnetError", "UserError"),
    "observe.events": (
        "ContributionDropped",
        "Counted",
        "Event",
        "HeldOut",
        "Migrated",
        "PeerJoined",
        "PeerLost",
        "PeerPaused",
        "PeerResumed",
        "RoundFinished",
        "SyncMode",
    ),
    "observe.view_model": ("GivenRow", "PeerRow", "RoundSplit", "StageRow", "ViewModel"),
    "runtime.observer": ("Observer",),
    "runtime.options": ("LocalPeerOptions", "PeerChoices", "PeerOptions"),
    "runtime.run": ("run_peer",),
    "spec": ("RunSpec", "load_spec"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "AsyncRun",
    "ContributionDropped",
    "Counted",
    "Event",
    "GivenRow",
    "HeldOut",
    "LocalPeerOptions",
    "Migrated",
    "Observer",
    "Opening",
    "PeerChoices",
    "PeerJoined",
    "PeerLost",
    "PeerOptions",
    "PeerPaused",
    "PeerResumed",
    "PeerRow",
    "RoundFinished",
    "RoundSplit",
    "Run",
    "RunSpec",
    "StageRow",
    "SwarmnetError",
    "SyncMode",
    "UserError",
    "ViewModel",
    "__version__",
    "join",
    "load_spec",
    "local",
    "run_peer",
    "start",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Imported when they are used: a version or a spec is to be had without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"swarmnet.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
