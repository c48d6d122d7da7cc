"""The asyncio code of a peer, without torch: membership, microbatches, updates, recovery.

What happens when a peer dies: `membership.liveness` notices it, `pipeline.dispatcher` sends
its microbatches to another replica, `update.rounds` retracts those of a dead feeder,
`update.exchanges` goes on with the backup of a dead primary, `update.ownership` copies the
optimizer state that has lost an owner, `recovery.lost_samples` tells what was lost, and
`recovery.restart` goes on from a checkpoint where a whole stage is gone."""
