"""Whether a run's model can be cut over ranks, told before any of it is built."""

from __future__ import annotations

import functools

from swarmnet.errors import SpecError
from swarmnet.plurals import counted
from swarmnet.spec import RunSpec
from swarmnet.training.models.base import ModelPlan, described
from swarmnet.training.models.registry import model_plan
from swarmnet.training.ranks.cut_plan import MAX_RANKS, SUPPORTED, CutPlan, cut_plan, parts_of
from swarmnet.training.ranks.fsdp import check_split
from swarmnet.training.ranks.packed_parts import check_packed


def check_styles(plan: ModelPlan, cut: CutPlan, kind: str) -> None:
    """Raises `SpecError` where a part of the model has a style that is none of ours."""
    for layer, module in zip(plan.layers, described(plan.layers), strict=True):
        parts = [name for name, _ in parts_of(layer, module)]
        parts += [f"{layer.name}.{name}" for name, _ in module.named_parameters()]
        for name in parts:
            style = cut.style(name)
            if style and style not in SUPPORTED:
                raise SpecError(
                    f"{name} of model_type {kind} is cut as {style[:40]!r}, which is not known here"
                )


def check_cut(
    spec: RunSpec,
    num_ranks: int,
    *,
    sequence_parallel: bool = False,
    is_row: bool = False,
) -> None:
    """Raises `SpecError` unless the run's model can be cut into so many ranks. `is_row`: there are
    more of them, which share sequences with these, or experts and samples."""
    if num_ranks == 1:
        return
    if sequence_parallel and spec.model.kind != "llama":
        raise SpecError("--sequence-parallel is for the built-in Llama; leave it out")
    if sequence_parallel and spec.model.num_experts:
        raise SpecError("--sequence-parallel: routers look at whole microbatches; leave it out")
    model = model_plan(spec)
    try:
        plan = _checked_plan(spec, model)
        check_packed(model, functools.partial(_columns, plan, num_ranks))
    except SpecError as error:
        instead = "--tp 1" if is_row else _instead(spec, num_ranks)
        raise SpecError(f"--tp {num_ranks}: {error}; take {instead}") from None
    if not plan.fits(num_ranks):
        possible = [str(n) for n in range(1, MAX_RANKS + 1) if plan.fits(n)]
        raise SpecError(
            f"--tp {num_ranks}: {counted(plan.num_heads, 'head')} and "
            f"{counted(plan.num_kv_heads, 'key/value head')} cannot be cut so; possible: "
            f"{', '.join(possible)}"
        )


def _columns(plan: CutPlan, num_ranks: int, name: str, shape: tuple[int, int]) -> list[int]:
    """Where ranks begin to have some of a weight's columns."""
    cuts = (plan.cut(name, shape, rank, num_ranks) for rank in range(num_ranks))
    return [cut.start for cut in cuts if cut.dim == 1]


def _instead(spec: RunSpec, num_ranks: int) -> str:
    """What can be taken."""
    try:
        check_split(spec, num_ranks)
    except SpecError:
        return "--tp 1, or a peer for each device"
    return f"--tp {num_ranks} --local fsdp, or --tp 1"


def _checked_plan(spec: RunSpec, plan: ModelPlan) -> CutPlan:
    cut = cut_plan(spec.model)
    if spec.model.kind == "llama":
        return cut
    kind = str(spec.model.config["model_type"])
    check_styles(plan, cut, kind)
    from swarmnet.training.ranks.cut_trial import check_family

    check_family(spec.model.config)
    return cut
