"""Runs of one process that make a swarm's updates, for what depends on the optimizer and the mode.

They are the loops of `tests/oracles`, whose numbers a swarm makes (`tests/numerics`): one stage,
and in `local` and `gossip` four replicas, each of which has a quarter of every round. Two things
are not the oracles': Muon's matrices are made orthogonal as the product does it (theirs takes
singular values, ten times as long), and what else was tried for late gradients (`Tried`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import tests.oracles.optimizers as oracle_optimizers
from benchmarks.learning.tasks import TASKS, spec_text
from swarmnet.protocol.update.pairing import partner
from swarmnet.spec import RunSpec, parse_spec
from swarmnet.training.models.registry import model_plan, muon_parts
from swarmnet.training.optimizer.muon import orthogonal
from swarmnet.training.optimizer.rates import learning_rate
from tests.oracles.reference import ReferenceTrainer
from tests.oracles.reference_modes import DelayedReference, GossipReference, LocalReference

REPLICAS = [f"replica-{i}" for i in range(4)]
EVALUATE_EVERY = 50
LATE, MATRICES_LATE, AGAIN_HALF, AGAIN = "late", "matrices-late", "again-0.5", "again-1"
MOMENTUM, TWO_STEPS = "momentum", "two-steps"
PARTS = {LATE: 0.0, MATRICES_LATE: 0.0, AGAIN_HALF: 0.5, AGAIN: 1.0}
"""By what is tried for late gradients, by how much of their last update parameters are ahead."""
ALONG = (MOMENTUM, TWO_STEPS)
"""Muon's matrices are ahead by a step of their own: along the momentum as it is, and as it would be
two steps on with the newest gradient in both."""


@dataclass(frozen=True)
class Way:
    """How replicas exchange, and what is done about late gradients (empty: what is built)."""

    mode: str
    local_steps: int = 1
    tried: str = ""


MUON, NO_PARTS = "muon", "muon-no-parts"
"""With the second one AdamW steps what is several matrices in one."""
KINDS = ("adamw", MUON, NO_PARTS)
SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 256,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "intermediate_size": 96}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"num_key_value_heads": 2, "intermediate_size": 128},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 12, "num_experts": 8, **EXPERTS},
    "deepseek_v3": {
        **LATENT,
        **EXPERTS,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
"""`[model] config` of families with parameters that are several matrices in one, beside `SMALL`.
The task of such a model is `python/phi3`."""
MODEL_ROUNDS = 100

WAYS = {
    "zero": Way("zero"),
    "delayed": Way("delayed"),
    "delayed-late": Way("delayed", tried=LATE),
    "delayed-matrices-late": Way("delayed", tried=MATRICES_LATE),
    "delayed-again-0.5": Way("delayed", tried=AGAIN_HALF),
    "delayed-again-1": Way("delayed", tried=AGAIN),
    "delayed-momentum": Way("delayed", tried=MOMENTUM),
    "delayed-two-steps": Way("delayed", tried=TWO_STEPS),
    "local-10": Way("local", 10),
    "local-30": Way("local", 30),
    "gossip-10": Way("gossip", 10),
}


class Tried(DelayedReference):
    """Parameters are ahead by a part of their last update. With all of it that is error feedback of
    the delay: each update has what the one before it lacked, 2 u - v with u the newest and v the
    one before it, and the sum of those is that of all u and the last one once more, as Muon's
    matrices are ahead in `DelayedReference`. Of Muon it is the matrices, and all else is ahead as
    there; but nothing is with `LATE`.
    """

    def __init__(self, spec: RunSpec, tried: str) -> None:
        super().__init__(spec)
        self._spec, self._tried, self._part = spec, tried, PARTS.get(tried, 0.0)
        self._before: dict[str, Tensor] = {}

    def finish(self) -> None:
        self._before = {n: p.clone() for n, p in self.trainer.state_dict().items()}
        super().finish()

    def foretold(self, late_round: int) -> dict[str, Tensor]:
        if self._tried == LATE:
            return {}
        if self._tried in ALONG:
            beta = self._spec.optimizer.momentum
            parts = (1.0, 0.0) if self._tried == MOMENTUM else (beta**2, 1 - beta**2)
            return super().foretold(late_round) | self.trainer.muon_step(late_round + 1, *parts)
        is_muon = self._spec.optimizer.kind == "muon"
        ahead = super().foretold(late_round) if is_muon else {}
        ahead = {n: a for n, a in ahead.items() if n not in self.trainer.last_muon_step()}
        rate = learning_rate(self._spec.optimizer, late_round)
        for name, p in self.trainer.state_dict().items():
            if name not in ahead:
                decay = self._spec.optimizer.weight_decay if p.ndim >= 2 else 0.0
                ahead[name] = self._part * (p - self._before[name] * (1 - rate * decay))
        return ahead


def spec_of(
    task: str, way: Way, kind: str, rate: float, seed: int, rounds: int, text: Path
) -> RunSpec:
    task, _, family = task.partition("/")
    sync = {"mode": way.mode, "local_steps": way.local_steps, "codec": "none"}
    if way.local_steps == 1:
        del sync["local_steps"]
    written = spec_text(task, seed=seed, rounds=rounds, text=text, codec="none", sync=sync)
    sizes = TASKS[task]
    microbatch = sizes.batch // len(REPLICAS)
    values = {
        "num_stages": 1,
        "microbatch": microbatch,
        "held_out_microbatches": sizes.held_out // microbatch,
        "learning_rate": f'{rate}\nkind = "{kind.removesuffix("-no-parts")}"',
    }
    if kind == NO_PARTS:
        values["learning_rate"] += "\nparts = {}"
    lines = written.splitlines()
    for name, value in values.items():
        (k,) = (k for k, line in enumerate(lines) if line.startswith(f"{name} = "))
        lines[k] = f"{name} = {value}"
    spec = parse_spec("\n".join(lines))
    if family:
        config = {"model_type": family, **SMALL, **MODELS[family]}
        given = spec.model_dump() | {"model": {"kind": "transformers", "config": config}}
        spec = RunSpec.model_validate(given)
    return spec.with_parts(muon_parts(spec, model_plan(spec).layers))


def run(
    task: str, name: str, kind: str, rate: float, seed: int, rounds: int, text: Path
) -> dict[str, Any]:
    """The loss on held-out data by round, nats a token. `text`: that of the task `letters`."""
    began, way = time.process_time(), WAYS[name]
    oracle_optimizers.nearly_orthogonal = orthogonal
    spec = spec_of(task, way, kind, rate, seed, rounds, text)
    slots = range(len(REPLICAS))
    paths = {k: (REPLICAS[k],) for k in slots}
    losses: dict[str, float] = {}
    whole = ReferenceTrainer(spec)
    delayed = DelayedReference(spec) if not way.tried else Tried(spec, way.tried)
    local = gossip = None
    if way.mode == "local":
        local = LocalReference(spec, dict.fromkeys(REPLICAS, 0))
    if way.mode == "gossip":
        gossip = GossipReference(spec, dict.fromkeys(REPLICAS, 0))
    for r in range(rounds):
        is_last = r == rounds - 1
        if local is not None:
            local.step(r, paths)
        elif gossip is not None:
            gossip.step(r, paths, {n: partner(n, REPLICAS, 0, r) for n in REPLICAS})
        elif way.mode == "delayed":
            delayed.step(r, slots)
            if is_last:
                delayed.finish()
        else:
            whole.step(r, slots)
        if not is_last and (r + 1) % EVALUATE_EVERY:
            continue
        if local is not None:
            whole.load_state_dict(local.state_dict())
            losses[str(r + 1)] = whole.held_out_loss()
        elif gossip is not None:
            found = []
            for replica in REPLICAS:
                whole.load_state_dict(gossip.state_dict(replica))
                found.append(whole.held_out_loss())
            losses[str(r + 1)] = sum(found) / len(found)
        else:
            losses[str(r + 1)] = (delayed if way.mode == "delayed" else whole).held_out_loss()
    return {
        "task": task,
        "way": name,
        "kind": kind,
        "rate": rate,
        "seed": seed,
        "rounds": rounds,
        "loss": losses[str(rounds)],
        "losses": losses,
        "cpu_seconds": round(time.process_time() - began, 1),
    }
