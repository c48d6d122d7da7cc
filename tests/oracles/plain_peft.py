"""A plain loop over a model of `transformers` with PEFT's adapters: none of the swarm's layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from swarmnet.ports import Data
from swarmnet.spec import RunSpec
from tests.oracles.plain_transformers import PlainTrainer


class PlainPeftTrainer(PlainTrainer):
    """Trains PEFT's adapters over the given weights, beginning with the given adapters."""

    def __init__(
        self,
        spec: RunSpec,
        weights: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
        data: Data,
    ) -> None:
        """`adapters`: by name, as `MODULE.lora_A.weight`."""
        self._adapters = adapters
        super().__init__(spec, weights, data)

    def prepared(self, model: nn.Module) -> nn.Module:
        lora = self._spec.lora
        assert lora is not None
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.lora_dropout,
            target_modules=list(lora.target_modules),
            use_rslora=lora.use_rslora,
            task_type="CAUSAL_LM",
        )
        adapted = get_peft_model(model, config)
        own = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
        assert {_short(n) for n in own} == self._adapters.keys()
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(self._adapters[_short(name)])
        return adapted

    def parameters(self) -> dict[str, Tensor]:
        """Of the adapters, by name."""
        trained = self.model.named_parameters()
        return {_short(n): p.detach().clone() for n, p in trained if p.requires_grad}


def _short(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.", ".")
