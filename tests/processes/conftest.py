"""Every test here starts real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.running import Machine, machine


@pytest.fixture
def running() -> Iterator[Machine]:
    """A machine on which a test may start processes; none outlives it."""
    with machine() as started:
        yield started
