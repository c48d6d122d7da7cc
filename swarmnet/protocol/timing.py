"""The times that decisions, calls and waits share: each is one quantity, named once.

Waits end with what they wait for, or with the lease of whom they wait for. What is here bounds what
a peer that is alive does not do, and spaces what is done again and again."""

from __future__ import annotations

ANSWER_S = 10.0
"""For an answer that takes the other side no work: a hello, a dial, its records. It has to leave
room for a connection over several hops on a slow link, and protects from a peer that takes
everything and answers nothing (tests/transport/test_channel.py)."""
CONNECT_S = 3.0
"""For opening a connection while somebody waits for an answer, and between two notices that one
cannot be opened. It protects from addresses that swallow what is sent there
(tests/swarm/membership/test_unreached.py)."""
PATIENCE_S = 30.0
"""Longest wait for what others that are alive ought to do: to take a microbatch, to open a round
that is coming, to answer the first call, to hold what else is lost. It protects from waiting for
ever (tests/swarm/pipeline/test_room.py, tests/swarm/lifecycle/test_meeting.py)."""
UPKEEP_S = 60.0
"""Period of upkeep: what is told, renewed or looked at again, and how long a word that is not
renewed counts. It protects from a load that grows with the number of peers
(tests/protocol/test_bandwidth.py, tests/protocol/pipeline/test_reservations.py)."""
BULK_S = 60.0
"""For what takes the other side long: a shard, a whole pass, a checkpoint. It protects from one
that is alive and never has it (tests/swarm/update/test_exchange_pace.py)."""
DAY_S = 86_400.0
"""Longer than anything takes: it ends what no other rule has ended
(tests/swarm/update/test_live_calls.py)."""
LAPSES = 3.0
"""What is renewed in each period ends after so many without a renewal: it protects from one
renewal that is lost (tests/transport/test_protocol_doc.py)."""
LEAST_WAIT_S = 0.001
"""The shortest wait for a point in time that is almost here, which is what timers resolve. It
protects from a wait that ends before that, and begins again for ever
(tests/transport/test_pacing.py)."""
LEAST_S = 1e-6
"""The shortest duration: it protects from dividing by one of 0
(tests/protocol/pipeline/test_service_estimates.py)."""
SMOOTHING = 0.1
"""Weight of a new measurement in the moving average of a duration. It protects from one
measurement that is far off (tests/protocol/pipeline/test_service_time.py)."""
