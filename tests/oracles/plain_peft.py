"""A plain loop over a model of `transformers` with PEFT's adapters: none of the swarm's layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from swarmnet.ports import Data
from swarmnet.spec import RunSpec
from swarmnet.training.models.lora_folder import adapter_tensors
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
        theirs = (_short(name) for name in adapter_tensors(adapters))
        self._ours = dict(zip(theirs, adapters, strict=True))
        super().__init__(spec, weights, data)

    def prepared(self, model: nn.Module) -> nn.Module:
        lora = self._spec.lora
        assert lora is not None
        of_experts = [name for name in lora.target_modules if "experts" in name]
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.lora_dropout,
            target_modules=[name for name in lora.target_modules if name not in of_experts],
            target_parameters=of_experts or None,
            use_rslora=lora.use_rslora,
            task_type="CAUSAL_LM",
        )
        adapted = get_peft_model(model, config)
        own = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
        assert {_short(n) for n in own} == self._ours.keys()
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(self._adapters[self._ours[_short(name)]])
        return adapted

    def parameters(self) -> dict[str, Tensor]:
        """Of the adapters, by name."""
        trained = self.model.named_parameters()
        return {self._ours[_short(n)]: p.detach().clone() for n, p in trained if p.requires_grad}


def _short(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.", ".")
