"""Attention some of whose weights are left out (dropout). So they are made, as torch does on a CPU.

Shapes: B samples, L queries, M keys, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnet.training.attention.blocks import for_each_query_head


def attend_dropping(
    q_BLHE: Tensor,
    k_BMKE: Tensor,
    v_BMKE: Tensor,
    sees_BLM: Tensor,
    dropout: float,
    cap: float = 0.0,
) -> Tensor:
    """The output, (B, L, H, E), in the precision of the queries. Weights of all heads, (B, H, L,
    M), are given to torch's dropout at once, in fp32.

    Args:
        sees_BLM: true where a query sees a key; each sees one at least.
        dropout: probability of a weight to be left out.
        cap: as for `blocks.attend`.
    """
    q_BLHE, dtype = q_BLHE.float(), q_BLHE.dtype
    k_BMHE, v_BMHE = (x.float() for x in for_each_query_head(q_BLHE, k_BMKE, v_BMKE))
    scores_BHLM = torch.einsum("blhe,bmhe->bhlm", q_BLHE * q_BLHE.shape[-1] ** -0.5, k_BMHE)
    if cap:
        scores_BHLM = (scores_BHLM / cap).tanh() * cap
    scores_BHLM = scores_BHLM.masked_fill(~sees_BLM.unsqueeze(1), -torch.inf)
    weights_BHLM = F.dropout(scores_BHLM.softmax(dim=-1), dropout)
    return torch.einsum("bhlm,bmhe->blhe", weights_BHLM, v_BMHE).to(dtype)
