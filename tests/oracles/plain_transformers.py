"""A plain loop over a model of `transformers`, whole and unchanged: none of the swarm's layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from swarmnet.batch import IGNORED
from swarmnet.ports import Data
from swarmnet.runtime.compose import run_settings
from swarmnet.spec import RunSpec
from swarmnet.training.arrays import to_tensor
from swarmnet.training.models.model_config import load_config
from swarmnet.training.optimizer.rates import learning_rate


class PlainTrainer:
    """Trains the model of a spec's config from the given weights, on the slots that it is told."""

    def __init__(self, spec: RunSpec, weights: Mapping[str, Tensor], data: Data) -> None:
        self._spec, self._settings, self._data = spec, run_settings(spec), data
        config = copy.deepcopy(load_config(spec.model.config))
        model = AutoModelForCausalLM.from_config(config)
        missing, unexpected = model.load_state_dict(dict(weights), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        self.model = self.prepared(model)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = spec.optimizer
        self._optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in parameters if p.ndim >= 2],
                    "weight_decay": optimizer.weight_decay,
                },
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )

    def prepared(self, model: nn.Module) -> nn.Module:
        """What is trained."""
        return model

    def step(self, round_index: int, slots: Sequence[int]) -> float:
        """One update from these slots of the round; the mean loss before it, nats per token."""
        self._optimizer.zero_grad()
        loss_sum, num_tokens = 0.0, 0
        for slot in slots:
            indices = self._settings.samples_of(round_index, slot, self._data.num_samples)
            inputs, targets = (to_tensor(a).long() for a in self._data.microbatch(indices).arrays)
            logits = self.model(inputs).logits
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            loss.backward()
            loss_sum += loss.item()
            num_tokens += int((targets != IGNORED).sum())
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad /= num_tokens
        if self._spec.optimizer.grad_clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._spec.optimizer.grad_clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._spec.optimizer, round_index)
        self._optimizer.step()
        return loss_sum / num_tokens

    def parameters(self) -> dict[str, Tensor]:
        """By name; a tied head too."""
        return {n: p.detach().clone() for n, p in self.model.state_dict().items()}
