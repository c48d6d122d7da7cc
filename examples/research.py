"""Two sync modes on one model and the same data, each a swarm of four peers on this machine:

python examples/research.py
"""

import swarmnet

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
MODEL = {"kind": "llama", "vocab_size": 256, "max_position_embeddings": 64, **SIZES}
SPEC = {
    "model": {**MODEL, "num_attention_heads": 4, "num_key_value_heads": 4},
    "data": {"paths": ["python-stdlib"], "include": ["*.py"]},
    "optimizer": {"learning_rate": 2e-3, "rounds": 60},
    "pipeline": {"num_stages": 2, "global_batch": 32, "microbatch": 4, "evaluate_every": 20},
}


def try_mode(mode: str) -> list[swarmnet.HeldOut]:
    """The losses on held-out data, every 20 rounds."""
    with swarmnet.local({**SPEC, "sync": {"mode": mode, "local_steps": 5}}) as run:
        return [event for event in run.events() if isinstance(event, swarmnet.HeldOut)]


if __name__ == "__main__":
    for mode in ("zero", "local"):
        for measured in try_mode(mode):
            print(f"{mode}: {measured.loss:.3f} after {measured.round} rounds")
