"""Whether a checkpoint is of a run that swarmnet 0.1 began under another id.

0.1 named a run before it chose what the spec leaves open (`RunSpec.open_keys`), and wrote the spec
as it was then into each checkpoint. A later version names a run by what was chosen. The two are one
run where the old spec, resolved, is the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmnet.errors import SpecError, SwarmnetError
from swarmnet.spec import RunSpec
from swarmnet.training.models.resolving import resolve


def may_continue(saved: Mapping[str, Any], saved_id: str, spec: RunSpec) -> bool:
    """Whether `saved`, the spec in a checkpoint of the run `saved_id`, is the resolved `spec` if
    the program chose what it leaves open. Takes no model."""
    try:
        old = RunSpec.from_checkpoint(saved, saved_id)
        filled = old.resolved(
            layers=spec.pipeline.layers, shard_parameters=spec.sync.shard_parameters
        )
    except SpecError:
        return False
    return filled.without_codecs().run_id == _of_0_1(spec).run_id


def continues(saved: Mapping[str, Any], saved_id: str, spec: RunSpec, builder: str) -> bool:
    """As `may_continue`, and the program does choose so. `builder`: where this machine has the
    code of a custom model."""
    if not may_continue(saved, saved_id, spec):
        return False
    try:
        old = RunSpec.from_checkpoint(saved, saved_id)
        return _of_0_1(resolve(old, builder)).run_id == _of_0_1(spec).run_id
    except SwarmnetError:
        return False


def _of_0_1(spec: RunSpec) -> RunSpec:
    """0.1 knew no fingerprint of the data, and coded nothing."""
    return spec.with_data(rounds=spec.optimizer.rounds, fingerprint="").without_codecs()
