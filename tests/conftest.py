"""For every test: one torch thread, since the tests share two cores with the peers that they
start, no limit on an example's time, which says more about the machine than about the code, the log
as it was before, for a command that runs in this process takes it over, and few collections of
garbage: swarms in virtual time make so many objects that they took a seventh of the time."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if "SWARMNET_CACHE" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    # One's own: another worker may make the same tokens at the same time.
    os.environ["SWARMNET_CACHE"] = tempfile.mkdtemp(prefix="swarmnet-cache-")

import pytest
from hypothesis import settings

if "tests.protocol.without_torch" not in sys.modules:
    import torch

    torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what is in its background. Tests send themselves a Ctrl-C, and what they
    # start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(100_000, 20, 50)
settings.register_profile("swarmnet", deadline=None, print_blob=True)
settings.load_profile("swarmnet")

MEASURED_ONCE = ("test_attackers.py", "test_replication.py", "test_site.py")
"""With fixtures of the module."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m processes`, with or without the long ones, reads only files with that mark in them:
    importing the others costs each worker more than its first tests do."""
    is_of_processes = config.option.markexpr in ("processes", "processes and not long")
    if not is_of_processes or not collection_path.name.startswith("test_"):
        return None
    return True if b"mark.processes" not in collection_path.read_bytes() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers (`-n`, pytest-xdist) and `--dist loadgroup`: tests that start peers take
    turns, for a peer without a core to run on is a slow peer to the others (`make test` runs them
    by themselves), and a module that measures once for all of its tests stays with one worker."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("processes"))
        elif item.path.name in MEASURED_ONCE:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """What a command line in this process has done to the project's logger is undone."""
    logger = logging.getLogger("swarmnet")
    before = (logger.handlers, logger.propagate, logger.level)
    yield
    logger.handlers, logger.propagate = before[0], before[1]
    logger.setLevel(before[2])
