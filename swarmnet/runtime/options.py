"""What a person says about one machine's part in a run, as opposed to `swarmnet.spec`, which
is the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swarmnet.errors import UserError
from swarmnet.spec import BYTES_TOKENIZER, PYTHON_STDLIB, RunSpec

TransportName = Literal["p2pd", "py-libp2p"]
LocalName = Literal["tensor", "fsdp"]
DeviceName = Literal["auto", "cpu", "cuda"]
PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
ActivationsName = Literal["auto", "keep", "blocks", "recompute", "offload"]

ANY_INTERFACE = "0.0.0.0"
AUTO_STAGES = "auto"
"""As `PeerOptions.stages`: by what this machine has and the swarm needs."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Options of one peer. Exactly one of `spec` and `join` is given."""

    state_dir: Path
    """Where this peer keeps its identity and its checkpoints; nobody else uses it (see
    `swarmnet.runtime.state_dir`)."""
    spec: Path | None = None
    """Start a new run from this file."""
    join: tuple[str, ...] = ()
    """Join the run that these addresses belong to; the first that answers is enough. `@FILE`: the
    addresses in a file."""
    patience_s: float | None = None
    """With `join`: give up when nobody has answered for so long; None = never."""
    rounds: int | None = None
    """With `spec`: another length of the run."""
    seed: int | None = None
    """With `spec`: another seed."""
    stage: int | None = None
    """Serve this stage; None = the one that needs this peer most."""
    stages: str = "1"
    """How many stages to serve: a number, or `AUTO_STAGES`."""
    host: str = ANY_INTERFACE
    """Address of the interface to listen on."""
    port: int = 0
    """0 = any that is free."""
    announce: tuple[str, ...] = ()
    """Addresses to tell others besides those of the interfaces (behind NAT, for example)."""
    transport: TransportName = "p2pd"
    direct: bool = True
    """Bulk transfers over direct TLS connections, where peers can reach each other."""
    relay: bool = True
    """Carries data between others that cannot dial each other, where it can be dialled itself."""
    direct_port: int = 0
    """Where to listen for them; 0 = any that is free."""
    data: tuple[str, ...] = ()
    """Where this machine has the data, in place of the spec's `paths`."""
    serve_data: bool = False
    """Give the data, as tokens, to members of the run that ask."""
    fetch_data: bool | None = None
    """Get them from others; None: where they are not large and few peers have them."""
    tokenizer: str = ""
    """Where this machine has the run's tokenizer.json, in place of the spec's `tokenizer`."""
    weights: Path | None = None
    """The folder of the model that the run began from: this peer gives its weights to others."""
    builder: str = ""
    """Where this machine has a custom model's code, in place of the spec's `builder`."""
    feed: bool = True
    """Read data and start microbatches, where there is data."""
    threads: int = 0
    """Threads of torch; 0 = torch's choice."""
    tp: int | None = None
    """Ranks of this peer, each with a part of every layer; None = one for each GPU."""
    sequence_parallel: bool = False
    """With several ranks: norms and residuals are split over them too."""
    local: LocalName = "tensor"
    """What ranks are for: a part of every layer, or a part of every microbatch with parameters and
    gradients sharded ("fsdp")."""
    device: DeviceName = "auto"
    """What computes; `auto`: GPUs, where there are any."""
    precision: PrecisionName = "auto"
    """Of this machine's passes, in place of the run's."""
    activations: ActivationsName = "auto"
    """What this machine keeps between the passes, in place of what the run says."""
    compile: bool = False
    """`torch.compile` the layers."""
    checkpoint_every: int = 10
    """Rounds between two checkpoints of this peer's stage; 0 = none."""
    begin_anew: bool = False
    """Where nobody is at work in the run: from its initial parameters, whatever anybody has."""
    keep_checkpoints: int = 2
    """The newest so many stay."""
    invite: str = ""
    """The invite to a closed run, or the file that it is in; kept in the state folder."""
    exit_when_done: bool = False
    """End when the run has done its rounds, instead of staying to serve the model."""
    ready_file: Path | None = None
    """Written when this peer listens, or a folder for a file of its own; see
    `swarmnet.runtime.joining.ready`."""
    is_quiet: bool = False
    """Says nothing of what is normal."""

    @property
    def starts_run(self) -> bool:
        return self.spec is not None

    def data_paths(self, spec: RunSpec) -> tuple[str, ...]:
        """The data that this peer may read; empty = it does not feed.

        A spec that came over the network never chooses files of this machine: whatever is fed
        is seen by the swarm. Only the standard library is taken from it unasked."""
        if self.data or not self.feed:
            return self.data if self.feed else ()
        paths = tuple(path for source in spec.data.sources for path in source.paths)
        if self.starts_run or all(path == PYTHON_STDLIB for path in paths):
            return paths
        return ()

    def data_tokenizer(self, spec: RunSpec) -> str:
        """`bytes`, or the tokenizer.json that this peer may read; empty = it does not feed text.
        As with the data, a file is never chosen by the network."""
        if self.starts_run or spec.data.tokenizer == BYTES_TOKENIZER:
            return self.tokenizer or spec.data.tokenizer
        return self.tokenizer

    def model_builder(self, spec: RunSpec) -> str:
        """`path/file.py:function` of a custom model. Raises `UserError` where the code would be
        chosen by the network: it runs with the rights of whoever started this peer."""
        if self.builder or self.starts_run or spec.model.kind != "custom":
            return self.builder or spec.model.builder
        raise UserError(
            f"this run's model is code on your machine ({spec.model.builder}); read it, then "
            f"add --builder {spec.model.builder}"
        )


def with_overrides(spec: RunSpec, *, rounds: int | None, seed: int | None) -> RunSpec:
    """The spec of a new run after `--rounds` and `--seed`. Raises `SpecError`."""
    if rounds is not None:
        spec = spec.with_rounds(rounds)
    if seed is not None:
        spec = spec.with_seed(seed)
    return spec


class UsageError(UserError):
    """Options that do not go together: exit code 2."""
