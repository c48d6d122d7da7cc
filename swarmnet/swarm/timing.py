"""Pauses that all of a peer's waits share."""

from __future__ import annotations

LOOK_AGAIN_S = 0.2
"""Between two looks at what nothing announces: a peer falls silent, a turn passes, a call may
succeed that has just failed. It protects from loops that take all of the processor, and others from
calls made again and again."""
LEAST_WAIT_S = 0.005
"""The shortest wait for a point in time that is almost here: by rounding, less may end before it,
and begin again for ever."""
