"""A `Peer` of real parts. Nothing else in the project knows which transport, device or data a peer
has."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swarmnet.errors import UsageError
from swarmnet.household import household_of
from swarmnet.identity import Identity as Key
from swarmnet.printable import printable
from swarmnet.protocol.codecs import update_codec
from swarmnet.protocol.membership.records import Household
from swarmnet.protocol.planning.exchange import number_bytes
from swarmnet.protocol.sync_modes import GOSSIP, LOCAL
from swarmnet.runtime.admission import Admitted
from swarmnet.runtime.counted import COUNTED_FILE, CountedMicrobatches
from swarmnet.runtime.joining.stopped import keep_stop
from swarmnet.runtime.net import AGENT, KeySigner
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.speed import has_products
from swarmnet.runtime.state_dir import next_incarnation
from swarmnet.spec import MAX_VOCABULARY, RunSpec
from swarmnet.swarm.membership.reconnecting import Remembered
from swarmnet.swarm.peer import Identity, Machine, Peer
from swarmnet.swarm.resource_limits import ResourceLimits
from swarmnet.swarm.settings import RunSettings, WaitLimits
from swarmnet.transport.base import Transport

log = logging.getLogger("swarmnet.peer")


def run_settings(spec: RunSpec) -> RunSettings:
    """What the swarm code needs of a spec."""
    return RunSettings(
        run_id=spec.run_id,
        num_stages=spec.pipeline.num_stages,
        global_batch=spec.pipeline.global_batch,
        samples_per_microbatch=spec.pipeline.microbatch,
        rounds=spec.optimizer.end,
        batch_ramp=spec.pipeline.batch_ramp,
        seed=spec.seed,
        grad_clip_norm=spec.optimizer.grad_clip_norm,
        replication=spec.sync.replication,
        aggregation=spec.sync.aggregation,
        evaluate_every=spec.pipeline.evaluate_every,
        max_in_flight=spec.pipeline.max_in_flight,
        boundary_codec=spec.pipeline.codec,
        sync_mode=spec.sync.mode,
        local_steps=spec.sync.local_steps,
        fragments=spec.sync.fragments,
        sync_warmup_rounds=spec.sync_warmup_rounds,
        begins_with_moments=spec.model.moments,
        num_values=_num_values(spec),
    )


def _num_values(spec: RunSpec) -> int:
    """Of a token, at most."""
    return 0 if spec.model.kind == "custom" else spec.model.vocab_size or MAX_VOCABULARY


def compose(
    spec: RunSpec,
    options: PeerOptions,
    transport: Transport,
    key: Key,
    machine: Machine,
    admitted: Admitted = Admitted(),  # noqa: B008  it is immutable
    resource_limits: ResourceLimits | None = None,
    remembered: Remembered = dict[str, Sequence[str]],
) -> Peer:
    """A `Peer` of real parts. `resource_limits`: of the machine's first seat. `remembered`: as of
    `Peer`."""
    if options.stage is not None and not 0 <= options.stage < spec.pipeline.num_stages:
        raise UsageError(
            f"--stage {options.stage}: this run has stages 0 to {spec.pipeline.num_stages - 1}"
        )
    now_unix_s = time.time()
    return Peer(
        transport=transport,
        signer=KeySigner(key),
        identity=Identity(
            run_id=spec.run_id,
            spec=spec.canonical(),
            incarnation=next_incarnation(options.state_dir, now_unix_s),
            started_unix_s=now_unix_s,
            agent=AGENT,
            credential=admitted.credential,
            household=household_from(options.household, key),
        ),
        admission=admitted.admission,
        settings=replace(
            run_settings(spec),
            num_shards=_num_shards(spec, options),
            products=_products(spec, options),
        ),
        machine=machine,
        rng=random.Random(secrets.randbits(256)),  # audits are drawn by it: nobody may guess
        limits=WaitLimits(),
        wanted_stage=options.stage,
        feeds=options.feed,
        begin_anew=options.begin_anew,
        resource_limits=resource_limits or ResourceLimits(),
        remembered=remembered,
        owner=spec.security.owner if not admitted.admission.is_open else "",
        keep_stop=keep_stop(options.state_dir, spec.run_id),
        journal=CountedMicrobatches(
            options.state_dir / COUNTED_FILE,
            spec.run_id,
            spec.pipeline.microbatch,
            spec.pipeline.num_stages,
        ),
    )


def say_if_useless(household: Path | None, mode: str) -> None:
    """One line where the key of a household changes nothing in the run's mode."""
    if household is not None and mode in (LOCAL, GOSSIP):
        log.warning(
            "--household changes nothing in mode %s, in which each machine sends its own: it is "
            "for zero, delayed and auto",
            mode,
        )


def household_from(path: Path | None, key: Key) -> Household | None:
    """What this peer shows of the household whose key is in a file, made there if there is none.
    Raises `UserError`."""
    if path is None:
        return None
    is_there = path.exists()
    household = household_of(Key.load_or_create(path), key.peer_id)
    if not is_there:
        log.warning(
            "a new household: its key is in %s; give that file to the other machines behind this "
            "uplink, and --household there",
            printable(str(path)),
        )
    return household


def _num_shards(spec: RunSpec, options: PeerOptions) -> tuple[int, ...]:
    """Of each stage, as this machine builds it."""
    from swarmnet.training.models.registry import model_plan, stage_shards

    built = spec.with_builder(options.model_builder(spec))
    plan = model_plan(built)
    return tuple(len(stage_shards(built, plan, k)) for k in range(spec.pipeline.num_stages))


def _products(spec: RunSpec, options: PeerOptions) -> tuple[float, ...]:
    """`RunSettings.products`: of Muon's steps, where primaries make them."""
    if not has_products(spec):
        return ()
    from swarmnet.training.models.registry import stage_products

    built = spec.with_builder(options.model_builder(spec))
    each = number_bytes(update_codec(spec.sync.update_codec).results)
    return tuple(stage_products(built, k) / each for k in range(spec.pipeline.num_stages))
