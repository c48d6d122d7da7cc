"""Rounds without a coordinator: when an update is due, and which feeder launches the rest.

Each feeder publishes in its record how many samples of a round it has launched and committed, and
whether it has sealed the round (nothing of its own in flight and nothing more to launch). The
sums over a view are the progress of the round. As long as feeders live, the sums only grow and all
views end at the same sums. When a feeder dies, the samples that it had launched and not committed
are lost and count as never launched; a feeder that had sealed then unseals and launches them
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet.protocol.membership.assignment import feeders
from swarmnet.protocol.membership.records import ACTIVE, LEAVING, Record
from swarmnet.protocol.membership.view import ALL, View


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The progress of a round, as one view sees it."""

    round: int
    launched: int
    """Samples, without those that died with their feeder."""
    committed: int
    """Samples."""
    tokens: int
    """Of the committed samples."""
    loss_sum: float
    """Nats, over these tokens."""
    num_feeders: int
    """Live feeders now."""
    drained: bool
    """The global batch is committed and no sample is in flight: the update is due."""


def round_progress(view: View, round_index: int, now: float, global_batch: int) -> RoundProgress:
    """The sums of a round over a view. `global_batch` in samples.

    Samples that a peer committed before it restarted are gone from its record and from the sum;
    the round then becomes larger than the global batch, never smaller."""
    return view.remembered(
        ALL,
        ("progress", round_index, global_batch),
        now,
        lambda: _summed(view, round_index, now, global_batch),
    )


def is_drained(view: View, round_index: int, now: float, global_batch: int) -> bool:
    """`RoundProgress.drained`; quick in the usual case that far too little is committed."""
    if view.counters.committed(round_index) < global_batch:
        return False
    return round_progress(view, round_index, now, global_batch).drained


def is_launched(view: View, round_index: int, now: float, global_batch: int) -> bool:
    """True when the global batch has been launched; as quick as `is_drained`."""
    if view.counters.launched_at_most(round_index) < global_batch:
        return False
    return round_progress(view, round_index, now, global_batch).launched >= global_batch


def _summed(view: View, round_index: int, now: float, global_batch: int) -> RoundProgress:
    launched = committed = tokens = 0
    loss_sum = 0.0
    all_sealed = True
    for peer_id, count in view.counters.by_peer(round_index):
        committed += count.committed
        tokens += count.tokens
        loss_sum += count.loss_sum
        record = view.get(peer_id)
        if record is not None and view.is_live(peer_id, now):
            launched += count.launched
            sealed = count.sealed or record.round > round_index
            all_sealed = all_sealed and (sealed or count.launched == 0)
        else:
            launched += count.committed
    return RoundProgress(
        round=round_index,
        launched=launched,
        committed=committed,
        tokens=tokens,
        loss_sum=loss_sum,
        num_feeders=len(feeders(view, now)),
        drained=committed >= global_batch and all_sealed,
    )


def quota(rank: int, num_feeders: int, global_batch: int, samples_per_microbatch: int) -> int:
    """Samples of a round that the feeder of this rank (in the sorted list of feeders) launches
    without asking. A whole number of microbatches; over all ranks they cover the global batch with
    less than one microbatch to spare."""
    if not 0 <= rank < num_feeders:
        raise ValueError(f"rank {rank} of {num_feeders} feeders")
    if global_batch < 1 or samples_per_microbatch < 1:
        raise ValueError("a batch needs at least one sample")
    num_slots = -(-global_batch // samples_per_microbatch)
    own_slots = num_slots // num_feeders + (rank < num_slots % num_feeders)
    return own_slots * samples_per_microbatch


def may_launch(
    *,
    own_launched: int,
    quota: int,
    launched: int,
    global_batch: int,
    quiet_s: float,
    patience_s: float,
) -> bool:
    """Whether a feeder may launch one more microbatch.

    Within its quota it may at once. Beyond it only what is missing in the whole swarm (`launched`,
    as seen in the view, is below `global_batch`), and only when for `patience_s` seconds the other
    feeders' counters have not changed and nothing was launched beyond the quota. `quiet_s` is the
    time since the later of the two: the caller restarts it with every microbatch that it launches
    beyond its quota, so that one at a time is taken over from a slow or dead feeder."""
    if launched >= global_batch:
        return False
    return own_launched < quota or quiet_s >= patience_s


FEW_FEEDERS = 8
"""Up to this number of feeders the global batch is launched exactly; more feeders do not learn
of each other's launches at once."""


def may_help(
    *,
    own_launched: int,
    launched: int,
    global_batch: int,
    age_s: float,
    spread_s: float,
    quiet_s: float,
    rank: int,
    num_feeders: int,
    samples_per_microbatch: int,
) -> bool:
    """Whether one of many feeders, done with its quota, may launch more in place of slower ones.

    It knows what the others had launched `spread_s` seconds ago, so their number is extrapolated at
    the mean rate of the round, which has lasted `age_s` seconds. The batch may become larger by the
    samples that were launched meanwhile; none of them is lost, and no peer waits for the slowest
    feeder. Samples that it may not launch any more have been launched by others, or are about to
    be: a feeder that gets False may go on with the next round.

    Where no launch has become known for longer than news take to spread (`quiet_s`, since that or
    the own last launch), the feeders that have the rest in their quota do not launch it. Then as
    many feeders as microbatches are missing launch one each, and the next ones after another such
    time. `rank`: position in the sorted list of feeders."""
    others = launched - own_launched
    rate = others / age_s if age_s > 0 else 0.0
    if own_launched + others + rate * spread_s < global_batch:
        return True
    missing = global_batch - launched
    if missing <= 0 or spread_s <= 0 or quiet_s <= spread_s:
        return False
    num_missing = -(-missing // samples_per_microbatch)
    return (rank + int(quiet_s / spread_s)) % num_feeders < num_missing


def newest_round(view: View, now: float, stage: int | None = None) -> int:
    """The highest round of the live, serving peers (of `stage`, where given); 0 when there are
    none."""
    if stage is not None:
        return _newest(view.members(stage, now))
    return view.remembered(ALL, "newest round", now, lambda: _newest(view.live(now)))


def _newest(records: Sequence[Record]) -> int:
    return max((r.round for r in records if r.state in (ACTIVE, LEAVING)), default=0)
