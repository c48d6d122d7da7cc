"""The numbers of a run that its spec leaves to the program, chosen by whoever starts the run."""

from __future__ import annotations

from swarmnet.spec import RunSpec
from swarmnet.training.models.registry import model_plan, shard_parameters, split_stages


def resolve(spec: RunSpec, builder: str = "") -> RunSpec:
    """The spec with its open keys filled in (`RunSpec.open_keys`); one that has none comes back as
    it is. `builder`: where this machine has a custom model's code, in place of the spec's. Takes
    up to seconds for a large model.

    Raises:
        SpecError: the model cannot be built or cut so.
    """
    if not spec.open_keys:
        return spec.resolved(layers=(), shard_parameters=0)
    model = spec.with_builder(builder or spec.model.builder)
    plan = model_plan(model)
    stages = split_stages(plan, spec.pipeline.num_stages)
    return spec.resolved(
        layers=[len(stage) for stage in stages], shard_parameters=shard_parameters(model, plan)
    )
