"""Attention of some queries to some keys, with what it takes to put such blocks together: the
logarithm of the sum of a query's exponentials ("lse").

On CPUs by torch's fused kernel, which makes no scores that outlive it. Elsewhere scores are made
for a few queries at a time.

Shapes: B samples, L queries, M keys, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS_AT_ONCE = 256
"""Queries whose scores lie in memory at a time, where no kernel is fused."""
FUSED = ("cpu",)
"""Kinds of device with the kernel."""

# Torch has no public way to the lse.
_aten = torch.ops.aten
_forward = _aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  see above
_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001  see above


def attend(
    q_BLHE: Tensor,
    k_BMKE: Tensor,
    v_BMKE: Tensor,
    *,
    sees_BLM: Tensor | None,
    is_causal: bool,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The output (B, L, H, E), in the precision of the queries, and the lse (B, H, L), in fp32. A
    query that sees nothing has the output 0 and the lse minus infinity.

    Args:
        sees_BLM: true where a query sees a key; None: each sees all that `is_causal` lets it see.
        is_causal: query i sees no key after key i. Not beside `sees_BLM`, which says it itself.
        cap: that no score is beyond: of a score it is made by the hyperbolic tangent of its part
            of the cap; 0 for none. No kernel is fused that does it.
    """
    if sees_BLM is None and not is_causal and k_BMKE.shape[2] < q_BLHE.shape[2]:
        return _attend_by_key_heads(q_BLHE, k_BMKE, v_BMKE, cap)
    k_BMHE, v_BMHE = for_each_query_head(q_BLHE, k_BMKE, v_BMKE)
    if q_BLHE.device.type in FUSED and not cap:
        q_BHLE, k_BHME, v_BHME = (x.transpose(1, 2) for x in (q_BLHE, k_BMHE, v_BMHE))
        mask = _added(sees_BLM, q_BLHE.dtype)
        out_BHLE, lse_BHL = _forward(q_BHLE, k_BHME, v_BHME, 0.0, is_causal, attn_mask=mask)
        out_BLHE = out_BHLE.transpose(1, 2)
        if sees_BLM is not None:
            blind_BL = ~sees_BLM.any(dim=-1)
            out_BLHE.masked_fill_(blind_BL[..., None, None], 0.0)
            lse_BHL = lse_BHL.masked_fill(blind_BL.unsqueeze(1), -torch.inf)
        return out_BLHE, lse_BHL
    out_BLHE = torch.empty_like(q_BLHE)
    lse_BHL = q_BLHE.new_empty(q_BLHE.transpose(1, 2).shape[:-1], dtype=torch.float32)
    for rows, scores_BHRM, _ in _scores(q_BLHE, k_BMHE, sees_BLM, is_causal, cap):
        lse_BHR = scores_BHRM.logsumexp(dim=-1)
        weights_BHRM = _weights(scores_BHRM, lse_BHR)
        out_BLHE[:, rows] = torch.einsum("bhrm,bmhe->brhe", weights_BHRM.to(v_BMHE), v_BMHE)
        lse_BHL[:, :, rows] = lse_BHR
    return out_BLHE, lse_BHL


def _attend_by_key_heads(
    q_BLHE: Tensor, k_BMKE: Tensor, v_BMKE: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """Every query sees every key: the heads that share keys are as many more queries. So keys, of
    which a text may have many for one query, are not copied."""
    batch, length, heads, size = q_BLHE.shape
    shared = k_BMKE.shape[2]
    # (B, L, K, heads that share, E)
    q = q_BLHE.unflatten(2, (shared, -1)).transpose(2, 3).reshape(batch, -1, shared, size)
    out, lse = attend(q, k_BMKE, v_BMKE, sees_BLM=None, is_causal=False, cap=cap)
    out_BLHE = out.unflatten(1, (length, -1)).transpose(2, 3).reshape(q_BLHE.shape)
    lse_BHL = lse.unflatten(2, (length, -1)).transpose(2, 3).reshape(batch, heads, length)
    return out_BLHE, lse_BHL


def attend_back(
    grad_BLHE: Tensor,
    q_BLHE: Tensor,
    k_BMKE: Tensor,
    v_BMKE: Tensor,
    out_BLHE: Tensor,
    lse_BHL: Tensor,
    *,
    sees_BLM: Tensor | None,
    is_causal: bool,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys have of the gradients of queries, keys and values, in their shapes.

    Args:
        grad_BLHE: of the whole output.
        out_BLHE: the whole output, of all keys that the queries see.
        lse_BHL: likewise; finite.
        sees_BLM: as for `attend`, as the next ones.
    """
    k_BMHE, v_BMHE = for_each_query_head(q_BLHE, k_BMKE, v_BMKE)
    if q_BLHE.device.type in FUSED and not cap:
        tensors = (x.transpose(1, 2) for x in (grad_BLHE, q_BLHE, k_BMHE, v_BMHE, out_BLHE))
        mask = _added(sees_BLM, q_BLHE.dtype)
        found = _backward(*tensors, lse_BHL, 0.0, is_causal, attn_mask=mask)
        dq_BLHE, dk_BMHE, dv_BMHE = (x.transpose(1, 2) for x in found)
    else:
        dq_BLHE = torch.empty_like(q_BLHE)
        dk_BMHE, dv_BMHE = (torch.zeros_like(x, dtype=torch.float32) for x in (k_BMHE, v_BMHE))
        scale = q_BLHE.shape[-1] ** -0.5
        delta_BHL = (grad_BLHE.float() * out_BLHE.float()).sum(dim=-1).transpose(1, 2)
        for rows, scores_BHRM, slope in _scores(q_BLHE, k_BMHE, sees_BLM, is_causal, cap):
            weights = _weights(scores_BHRM, lse_BHL[:, :, rows])
            grad = grad_BLHE[:, rows]
            dv_BMHE += torch.einsum("bhrm,brhe->bmhe", weights.to(grad), grad)
            of_weights = torch.einsum("brhe,bmhe->bhrm", grad, v_BMHE).float()
            of_scores = weights * (of_weights - delta_BHL[:, :, rows].unsqueeze(-1)) * scale
            if slope is not None:
                of_scores = of_scores * slope
            of_scores = of_scores.to(q_BLHE.dtype)
            dq_BLHE[:, rows] = torch.einsum("bhrm,bmhe->brhe", of_scores, k_BMHE)
            dk_BMHE += torch.einsum("bhrm,brhe->bmhe", of_scores, q_BLHE[:, rows])
    shape = (*k_BMKE.shape[:3], -1, k_BMKE.shape[-1])
    dk_BMKE, dv_BMKE = (
        x if x.shape == k_BMKE.shape else x.reshape(shape).sum(dim=3) for x in (dk_BMHE, dv_BMHE)
    )
    return dq_BLHE, dk_BMKE.to(k_BMKE.dtype), dv_BMKE.to(v_BMKE.dtype)


def for_each_query_head(q_BLHE: Tensor, k_BMKE: Tensor, v_BMKE: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, a head for each of the queries'."""
    times = q_BLHE.shape[2] // k_BMKE.shape[2]
    if times == 1:
        return k_BMKE, v_BMKE
    return k_BMKE.repeat_interleave(times, dim=2), v_BMKE.repeat_interleave(times, dim=2)


def _added(sees_BLM: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """To scores, (B, 1, L, M)."""
    if sees_BLM is None:
        return None
    mask = torch.zeros(sees_BLM.shape, dtype=dtype, device=sees_BLM.device)
    return mask.masked_fill_(~sees_BLM, -torch.inf).unsqueeze(1)


def _scores(
    q_BLHE: Tensor, k_BMHE: Tensor, sees_BLM: Tensor | None, is_causal: bool, cap: float
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Scores in fp32, (B, H, R, M), of some queries after the other; and where there is a cap, the
    slope of that, in the same shape."""
    scale = q_BLHE.shape[-1] ** -0.5
    num_keys = k_BMHE.shape[1]
    for start in range(0, q_BLHE.shape[1], ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, q_BLHE.shape[1]))
        scores = torch.einsum("brhe,bmhe->bhrm", q_BLHE[:, rows], k_BMHE).float() * scale
        slope = None
        if cap:
            part = (scores / cap).tanh()
            scores, slope = part * cap, 1.0 - part * part
        if sees_BLM is not None:
            scores.masked_fill_(~sees_BLM[:, rows].unsqueeze(1), -torch.inf)
        elif is_causal:
            everything = scores.new_ones(rows.stop - start, num_keys, dtype=torch.bool)
            scores.masked_fill_(everything.triu(diagonal=start + 1), -torch.inf)
        yield rows, scores, slope


def _weights(scores_BHRM: Tensor, lse_BHR: Tensor) -> Tensor:
    """Of a query that sees nothing all are 0."""
    return (scores_BHRM - lse_BHR.masked_fill(lse_BHR == -torch.inf, 0.0).unsqueeze(-1)).exp()
