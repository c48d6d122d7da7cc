"""The times that waits all over the swarm code rest on. A wait ends with what it waits for; these
are for what nobody tells, and for news that is lost."""

from __future__ import annotations

from swarmnet.protocol.timing import BULK_S

LOOK_AGAIN_S = 0.2
"""How often a peer looks at what nothing tells it of: a deadline of others that has passed, a peer
that has fallen silent (which the view finds by time alone), or one that is not in the round yet.
Longer, and each such step of a recovery is that much later (tests/swarm/pipeline/test_settling.py).
"""
LOOK_LESS_S = 1.0
"""The same where nothing waits for it, and in a large swarm, whose peers would do little else
(tests/swarm/membership/test_relaying.py)."""
RETRY_S = 0.1
"""Rest before a peer that could not give something is asked again, or another one: the time in
which a replica makes one part of an update (tests/swarm/update/test_lost_samples.py)."""
MAX_TRIES = 20
"""Tries for one thing that several peers could give, before what it is for is begun anew: two
seconds of `RETRY_S`, in which a round may have changed it (tests/swarm/pipeline/test_bad_input.py).
"""
SHARD_TIMEOUT_S = MAX_TRIES * BULK_S
"""The slowest uplink that serves has time for a shard; a channel that is dead, or a callee that is
silent, ends the call before (tests/swarm/update/test_sync_modes.py)."""
TOGETHER_S = 0.005
"""Sums of shards that are ready within this time travel in one message. Without it each takes one
of its own (`tests/swarm/update/exchange/test_norms.py`)."""
