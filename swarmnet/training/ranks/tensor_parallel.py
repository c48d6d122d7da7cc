"""Tensor parallelism, applied to a Llama's layers from outside.

The cut is Megatron's (Shoeybi et al., 2019): query, key, value, gate and up matrices by rows (of
output features), output and down matrices by columns, embedding and output matrix by vocabulary.
A decoder layer then needs two all-reduces forward and two backward. With sequence parallelism
(Korthikanti et al., 2022) norms and residuals hold a slice of the sequence on each rank, and each
all-reduce becomes a reduce-scatter and an all-gather: the same bytes, less memory.

The model code knows nothing of it. `cut_parameter` says which part of a parameter a rank holds;
`parallelize` hangs the collectives on the layers as hooks. They are written by hand, so that
every rank runs the same ones in the same order: a call that all ranks are given with the same
arguments needs no other agreement.

Shapes: B samples, S positions, D width, V tokens, N = B x S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swarmnet.batch import IGNORED
from swarmnet.errors import SpecError
from swarmnet.spec import ModelSpec, RunSpec
from swarmnet.training.models.base import LayerBuilder

MAX_RANKS = 64
SEQUENCE_DIM = 1

ROW_CUT = ("gate_proj", "up_proj", "q_proj")
COLUMN_CUT = ("o_proj", "down_proj")
KEY_VALUE = ("k_proj", "v_proj")
VOCABULARY_CUT = ("model.embed_tokens.weight", "lm_head.weight")

Sharing = Literal["own", "same", "partial"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a parameter that a rank holds: [start, stop) of dimension `dim`."""

    dim: int
    start: int
    stop: int
    sharing: Sharing
    """Of its gradient. "own": no other rank holds this part. "same": all ranks compute the whole
    gradient, so that one of them may keep it. "partial": the gradient is the sum over ranks."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part, a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def num_elements(self, shape: Sequence[int]) -> int:
        rest = 1
        for dim, size in enumerate(shape):
            rest *= self.stop - self.start if dim == self.dim else size
        return rest


def check_cut(spec: RunSpec, num_ranks: int) -> None:
    """Raises `SpecError` unless the run's model can be cut into so many ranks."""
    if num_ranks == 1:
        return
    model = spec.model
    if spec.lora is not None:
        raise SpecError(
            f"--tp {num_ranks} does not go with [lora]; take --tp 1, or a peer for each device"
        )
    if model.kind != "llama":
        raise SpecError(
            f"--tp {num_ranks}: tensor parallelism cuts the built-in Llama only; this run's model "
            f"takes --tp {num_ranks} --local fsdp, or --tp 1"
        )
    if model.num_experts:
        raise SpecError(
            f"--tp {num_ranks}: experts are not cut over ranks; take --tp 1, or a peer for each "
            "device"
        )
    if not fits(model, num_ranks):
        possible = [str(n) for n in range(1, MAX_RANKS + 1) if fits(model, n)]
        raise SpecError(
            f"--tp {num_ranks}: {model.num_attention_heads} heads and "
            f"{model.num_key_value_heads} key/value heads cannot be cut so; "
            f"possible: {', '.join(possible)}"
        )


def fits(model: ModelSpec, num_ranks: int) -> bool:
    """Heads are not cut: each rank has as many query heads, of whole groups or of one group."""
    kv_heads = model.num_key_value_heads
    return (
        model.num_attention_heads % num_ranks == 0
        and (kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0)
        and min(model.vocab_size, model.intermediate_size) >= num_ranks
    )


def part_of(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """[start, stop) of a rank; sizes differ by one at most."""
    return size * rank // num_ranks, size * (rank + 1) // num_ranks


def cut_parameter(
    name: str,
    shape: Sequence[int],
    model: ModelSpec,
    rank: int,
    num_ranks: int,
    *,
    sequence_parallel: bool = False,
) -> Cut:
    """What rank `rank` holds of the parameter with this (Hugging Face) name and shape."""
    kind = name.split(".")[-2]
    if name in VOCABULARY_CUT or kind in ROW_CUT:
        return Cut(0, *part_of(shape[0], rank, num_ranks), "own")
    if kind in COLUMN_CUT:
        return Cut(1, *part_of(shape[1], rank, num_ranks), "own")
    if kind in KEY_VALUE:
        return _cut_key_value(shape, model.num_key_value_heads, rank, num_ranks)
    return Cut(0, 0, shape[0], "partial" if sequence_parallel else "same")


def _cut_key_value(shape: Sequence[int], num_heads: int, rank: int, num_ranks: int) -> Cut:
    """With fewer heads than ranks, some ranks hold the same head, each for its own queries."""
    if num_heads >= num_ranks:
        return Cut(0, *part_of(shape[0], rank, num_ranks), "own")
    head = rank * num_heads // num_ranks
    size = shape[0] // num_heads
    return Cut(0, head * size, (head + 1) * size, "partial")


# ---- collectives ----------------------------------------------------------------------------


class Region:
    """The ranks that hold one stage together, as one of them sees them.

    `group` is a bare process group: nothing of it is global to the process.
    """

    def __init__(
        self, group: Any, rank: int, num_ranks: int, *, sequence_parallel: bool = False
    ) -> None:
        self.group = group
        self.rank = rank
        self.num_ranks = num_ranks
        self.sequence_parallel = sequence_parallel
        self.is_split = False
        """In the pass that runs, tensors between the cut matrices are split by positions."""

    def begin(self, length: int) -> None:
        """Before a pass over sequences of `length`; one that cannot be split evenly is not."""
        self.is_split = self.sequence_parallel and length % self.num_ranks == 0

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """A new tensor. Never in place: autograd may hand the same gradient to two functions."""
        total = x.clone(memory_format=torch.contiguous_format)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.group.allreduce([total], options).wait()
        return total

    def gather(self, x: Tensor) -> Tensor:
        """The slices of all ranks, one behind the other along the sequence."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        self.group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=SEQUENCE_DIM)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's slice of the sum."""
        parts = [p.contiguous() for p in x.chunk(self.num_ranks, dim=SEQUENCE_DIM)]
        mine = torch.empty_like(parts[0])
        self.group.reduce_scatter([mine], [parts], dist.ReduceScatterOptions()).wait()
        return mine

    def slice(self, x: Tensor) -> Tensor:
        """This rank's slice."""
        return x.chunk(self.num_ranks, dim=SEQUENCE_DIM)[self.rank].contiguous()


class _BothWays(torch.autograd.Function):
    """One function of the tensor forward, another one of its gradient backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, way: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return way(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None


def both_ways(
    x: Tensor, way: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """`way(x)`, whose gradient with respect to `x` is `back` of its own. Neither works in place,
    and what `way` returns is not `x` itself."""
    return cast(Tensor, _BothWays.apply(x, way, back))


def unchanged(x: Tensor) -> Tensor:
    """A view."""
    return x.view_as(x)


class _VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits that are cut by vocabulary, summed over tokens; no rank ever has
    a whole row of them. Two all-reduces of N values forward, none backward."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, start: int, region: Region
    ) -> Tensor:
        highest_N = region.all_reduce(logits_NV.amax(dim=-1), dist.ReduceOp.MAX)
        shifted_NV = logits_NV - highest_N.unsqueeze(-1)
        local_N = targets_N - start
        is_here_N = (local_N >= 0) & (local_N < logits_NV.shape[-1])
        has_loss_N = targets_N != IGNORED
        index_N1 = torch.where(is_here_N, local_N, 0).unsqueeze(-1)
        wanted_N = shifted_NV.gather(-1, index_N1).squeeze(-1) * is_here_N
        exp_NV = shifted_NV.exp_()
        sums_N, wanted_N = region.all_reduce(torch.stack((exp_NV.sum(dim=-1), wanted_N)))
        softmax_NV = exp_NV.div_(sums_N.unsqueeze(-1))
        ctx.save_for_backward(softmax_NV, index_N1, is_here_N, has_loss_N)
        return (sums_N.log() - wanted_N).masked_fill(~has_loss_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax_NV, index_N1, is_here_N, has_loss_N = ctx.saved_tensors
        grad_NV = softmax_NV * has_loss_N.unsqueeze(-1)
        grad_NV.scatter_add_(-1, index_N1, -is_here_N.to(grad_NV.dtype).unsqueeze(-1))
        return grad_NV.mul_(grads[0]), None, None, None


def vocabulary_parallel_loss(
    region: Region, vocab_size: int, logits_BSV: Tensor, targets_BS: Tensor
) -> Tensor:
    """As `models.llama.next_token_loss`, of this rank's logits."""
    start, _ = part_of(vocab_size, region.rank, region.num_ranks)
    logits_NV = logits_BSV.flatten(0, 1)
    loss = _VocabularyLoss.apply(logits_NV, targets_BS.flatten().long(), start, region)
    return cast(Tensor, loss)


def gather_logits(region: Region, vocab_size: int, logits_BSV: Tensor) -> Tensor:
    """Whole rows, for whoever samples from them. A sum with zeros is exact."""
    start, stop = part_of(vocab_size, region.rank, region.num_ranks)
    whole = logits_BSV.new_zeros((*logits_BSV.shape[:-1], vocab_size))
    whole[..., start:stop] = logits_BSV
    return region.all_reduce(whole)


# ---- layers ---------------------------------------------------------------------------------


def enter(region: Region, x: Tensor) -> Tensor:
    """Before matrices that are cut by rows. What the ranks have gathered they use unlike, so that
    its gradient is their sum."""
    if region.is_split:
        return both_ways(x, region.gather, region.reduce_scatter)
    return both_ways(x, unchanged, region.all_reduce)


def leave(region: Region, x: Tensor) -> Tensor:
    """After matrices that are cut by columns."""
    if region.is_split:
        return both_ways(x, region.reduce_scatter, region.gather)
    return both_ways(x, region.all_reduce, unchanged)


def split(region: Region, x: Tensor) -> Tensor:
    """At the beginning of a stage that is not the first."""
    return both_ways(x, region.slice, region.gather) if region.is_split else x


def join(region: Region, x: Tensor) -> Tensor:
    """At the end of a stage whose last layer is not the output matrix."""
    return both_ways(x, region.gather, region.slice) if region.is_split else x


def parallelize(
    layers: Sequence[LayerBuilder], modules: Sequence[nn.Module], region: Region
) -> None:
    """Hangs the collectives on the layers of a Llama. Their parameters are cut elsewhere."""
    for layer, module in zip(layers, modules, strict=True):
        if layer.name == "model.embed_tokens":
            _parallelize_embedding(module, region)
        elif layer.name == "lm_head":
            _before(module, region)
        elif layer.name.startswith("model.layers."):
            attention: Any = module.self_attn
            feed_forward: Any = module.mlp
            for block in (attention, feed_forward):
                _before(block, region)
            for matrix in (attention.o_proj, feed_forward.down_proj):
                _after(matrix, region)


def _before(module: nn.Module, region: Region) -> None:
    module.register_forward_pre_hook(lambda _, args: (enter(region, args[0]), *args[1:]))


def _after(module: nn.Module, region: Region) -> None:
    module.register_forward_hook(lambda _, __, output: leave(region, output))


def _parallelize_embedding(module: nn.Module, region: Region) -> None:
    """Tokens of other ranks are looked up as token 0 and give zeros."""
    vocab_size = int(module.num_embeddings)  # type: ignore[arg-type]
    start, stop = part_of(vocab_size, region.rank, region.num_ranks)

    elsewhere: list[Tensor] = []

    def look_up(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        local = args[0] - start
        mask = (local < 0) | (local >= stop - start)
        elsewhere[:] = [mask]
        return (local.masked_fill(mask, 0),)

    def add_up(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return leave(region, output.masked_fill(elsewhere.pop().unsqueeze(-1), 0.0))

    module.register_forward_pre_hook(look_up)
    module.register_forward_hook(add_up)
