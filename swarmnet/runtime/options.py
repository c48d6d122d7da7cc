"""What a person says about one machine's part in a run, as opposed to `swarmnet.spec`, which
is the same on every machine. Beside a field are its bounds and its text of `--help`: the commands
are made of these classes (`peer.option_groups`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from swarmnet.errors import UsageError
from swarmnet.spec import BYTES_TOKENIZER, PYTHON_STDLIB, RunSpec
from swarmnet.transport.libp2p.interfaces import ANY_INTERFACE

TransportName = Literal["auto", "p2pd", "py-libp2p"]
LocalName = Literal["tensor", "fsdp"]
DeviceName = Literal["auto", "cpu", "cuda", "mps", "xpu"]
PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
ActivationsName = Literal["auto", "keep", "blocks", "recompute", "offload"]
DtypeName = Literal["", "fp32", "bf16", "fp16"]
OptimizerMemoryName = Literal["auto", "device", "host", "disk"]
WeightsMemoryName = Literal["auto", "device", "host", "disk"]

AUTO_STAGES = "auto"
"""As `PeerOptions.stages`: by what this machine has and the swarm needs. Where it is empty nobody
has said: one, or several seats if cards do more so."""
MAX_PORT = 65_535
LOOPBACK = "127.0.0.1"
INVITE_VARIABLE = "SWARMNET_INVITE"
"""Of the environment: what `--invite` says, unseen by the machine's other users."""
NOTIFY_VARIABLE = "SWARMNET_NOTIFY"
"""Likewise, of `--notify`."""

RUN, MODEL, NETWORK, MACHINE = "This run", "Model and data", "Network", "This machine"


class Option:
    """How a command line has a field: what `typer.Option` takes, which a program that uses this
    library has no need of."""

    def __init__(self, *flags: str, **described: Any) -> None:
        self.flags = flags
        self.described = described


TransportOption = Annotated[
    TransportName,
    Option(
        help="What carries the bytes; peers with either train together. auto: p2pd where it runs."
    ),
]
RoundsOption = Annotated[
    int | None, Option(min=1, metavar="N", help="Length of the run, in place of the spec's.")
]
SeedOption = Annotated[
    int | None, Option(min=0, metavar="N", help="Seed of the run, in place of the spec's.")
]
InviteOption = Annotated[
    str,
    Option(
        metavar="INVITE",
        envvar=INVITE_VARIABLE,
        show_envvar=False,
        help="The invite to a closed run, or the file that holds it.",
    ),
]
DtypeOption = Annotated[
    DtypeName,
    Option(
        metavar="DTYPE",
        help="Number format of the weights that are written: fp32, bf16 or fp16. Default: "
        "that of the model which the run began from, else fp32.",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    DeviceName,
    Option(help="What computes. auto: the GPUs that torch can use, else the CPU."),
]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Which run, and this peer's part in it."""

    panel: ClassVar[str] = RUN

    spec: Annotated[
        Path | None,
        Option(metavar="FILE", help="Start a new run from this run.toml."),
    ] = None
    join: Annotated[
        tuple[str, ...],
        Option(
            metavar="ADDR",
            help="Join the run behind this address; repeat it to name several peers. "
            "@FILE: the addresses in a file.",
        ),
    ] = ()
    invite: InviteOption = ""
    household: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="The key of this household: machines behind one uplink that all have it sum "
            "their gradients before one of them sends the sum. Made there if there is none.",
        ),
    ] = None
    rounds: RoundsOption = None
    seed: SeedOption = None
    stage: Annotated[
        int | None,
        Option(min=0, metavar="K", help="Serve this stage. Default: the one that needs you most."),
    ] = None
    stages: Annotated[
        str,
        Option(
            metavar="N|auto",
            help="Serve so many stages. auto: as many as this machine has room for and the swarm "
            "needs. Default: 1, or with several GPUs one on each where that does more.",
            show_default=False,
        ),
    ] = ""
    exit_when_done: Annotated[
        bool,
        Option(help="End with the run; else stay and serve the model."),
    ] = False
    patience_s: Annotated[
        float | None,
        Option(
            "--patience",
            min=0.0,
            metavar="SECONDS",
            help="Give up when nobody has answered for so long. Default: keep trying.",
        ),
    ] = None
    begin_anew: Annotated[
        bool,
        Option(
            help="Begin from initial parameters where nobody is at work in the run, and not "
            "from the checkpoints that peers have. These stay on the disks.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Where this machine has what the run names."""

    panel: ClassVar[str] = MODEL

    data: Annotated[
        tuple[str, ...],
        Option(
            metavar="PATH",
            help="File or folder with the run's data on this machine; repeat it for several. A"
            " peer that joins reads only what you name here, and Python's standard "
            "library where the run is about that.",
        ),
    ] = ()
    serve_data: Annotated[
        bool,
        Option(
            help="Give the run's data, as tokens, to other peers of the run. They can feed "
            "when you are gone.",
        ),
    ] = False
    fetch_data: Annotated[
        bool | None,
        Option(
            "--fetch-data/--no-fetch-data",
            help="Get the run's data from peers that give them. Default: up to 2 GiB, while "
            "few peers have them.",
            show_default=False,
        ),
    ] = None
    tokenizer: Annotated[
        str,
        Option(
            metavar="FILE",
            help="The run's tokenizer.json on this machine, where the run has one.",
        ),
    ] = ""
    weights: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Folder on this machine of the model that the run began from. Its weights are"
            " given to other peers, and complete a whole model that is exported.",
        ),
    ] = None
    builder: Annotated[
        str,
        Option(
            metavar="FILE:FUNCTION",
            help="Code of a custom model on this machine: a file, and the function in it.",
        ),
    ] = ""
    feed: Annotated[bool, Option("--no-feed", help="Compute only; start no microbatches.")] = True


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Where a peer listens, and what it tells others of that."""

    panel: ClassVar[str] = NETWORK

    port: Annotated[
        int,
        Option(
            min=0, max=MAX_PORT, metavar="PORT", help="Listen on this port; 0 = any that is free."
        ),
    ] = 0
    announce: Annotated[
        tuple[str, ...],
        Option(
            metavar="ADDR",
            help="Tell others this address too (with port forwarding, for example).",
        ),
    ] = ()
    host: Annotated[
        str,
        Option(
            metavar="HOST",
            help="Listen on the interface with this address. any: on all interfaces, at IPv4 "
            "and IPv6 addresses. 0.0.0.0 or ::, on all, at addresses of one kind.",
        ),
    ] = ANY_INTERFACE
    direct_port: Annotated[
        int | None,
        Option(
            min=0,
            max=MAX_PORT,
            metavar="PORT",
            help="Listen for direct connections on this port (1024 or above); 0 = any that is "
            "free. Default: the port after --port, where that is given and the next one is free.",
        ),
    ] = None
    port_map: Annotated[
        bool,
        Option("--no-port-map", help="Do not ask the router to forward the ports (UPnP, NAT-PMP)."),
    ] = True
    relay: Annotated[
        bool,
        Option(
            "--no-relay", help="Carry no traffic between other peers that cannot dial each other."
        ),
    ] = True


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """What carries the bytes."""

    panel: ClassVar[str] = NETWORK

    transport: TransportOption = "auto"
    direct: Annotated[
        bool,
        Option("--no-direct", help="Move everything over libp2p; no direct TLS connections."),
    ] = True


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a machine computes."""

    panel: ClassVar[str] = MACHINE

    device: DeviceOption = "auto"
    precision: Annotated[
        PrecisionName,
        Option(
            help="Number format of this machine's passes. auto: as the run says. What peers "
            "exchange does not depend on it."
        ),
    ] = "auto"
    activations: Annotated[
        ActivationsName,
        Option(
            metavar="POLICY",
            help="What is kept between forward and backward: keep, blocks, recompute, offload,"
            " or auto (as the run says, else by free memory).",
        ),
    ] = "auto"
    optimizer_memory: Annotated[
        OptimizerMemoryName,
        Option(
            metavar="PLACE",
            help="Where this machine keeps optimizer state: device (in the GPU's memory, where"
            " updates are then made), host, disk, or auto (device where it has room, else"
            " as the run says).",
        ),
    ] = "auto"
    weights_memory: Annotated[
        WeightsMemoryName,
        Option(
            metavar="PLACE",
            help="Where a stage's weights lie here: device, host or disk (each layer's come to the "
            "device for its part of a pass: slower, for a stage larger than the device), or auto "
            "(host where the device has no room).",
        ),
    ] = "auto"
    max_device_memory: Annotated[
        str,
        Option(
            metavar="SIZE",
            help="Take no more of the memory of each GPU than this: 8GB. Default: what is free.",
            show_default=False,
        ),
    ] = ""
    tp: Annotated[
        int | None,
        Option(
            min=1,
            max=64,
            metavar="N",
            help="Cut every layer over N ranks of this machine. Default: all GPUs it sees (or a"
            " stage on each, where they copy slowly), else 1.",
        ),
    ] = None
    local: Annotated[
        LocalName,
        Option(
            help="What the ranks of --tp divide among them. tensor: the width of layers. fsdp:"
            " the samples, with parameters and gradients sharded.",
        ),
    ] = "tensor"
    sequence_parallel: Annotated[
        bool,
        Option(help="Divide norms and residuals by positions too, with --tp."),
    ] = False
    cp: Annotated[
        int | None,
        Option(
            min=1,
            max=64,
            metavar="N",
            help="Share each sequence among N ranks of this machine, or with --tp N rows of ranks: "
            "for long sequences.",
        ),
    ] = None
    ep: Annotated[
        int | None,
        Option(
            min=1,
            max=64,
            metavar="N",
            help="Divide each layer's experts, and the samples, among N ranks of this machine, or "
            "with --tp N rows of ranks.",
        ),
    ] = None
    compile: Annotated[
        bool,
        Option(help="Compile the layers (torch.compile). The start becomes slow."),
    ] = False

    @property
    def shares_sequences(self) -> bool:
        """Ranks have a part of each sequence."""
        return (self.cp or 1) > 1

    @property
    def shares_experts(self) -> bool:
        """Ranks have some of the experts, and of the samples."""
        return (self.ep or 1) > 1 and not self.shares_sequences

    @property
    def num_ranks(self) -> int | None:
        """Those that are asked for; None: it is for the machine to say."""
        return self.tp if self.num_rows == 1 else self.num_rows * (self.tp or 1)

    @property
    def num_rows(self) -> int:
        """Of ranks that share sequences, or experts and samples, each of as many ranks as cut
        matrices; 1 where nothing is shared so."""
        if self.shares_sequences:
            return self.cp or 1
        return (self.ep or 1) if self.shares_experts else 1

    @property
    def are_in_rows(self) -> bool:
        """Ranks share something, and cut matrices too."""
        return self.num_rows > 1 and (self.tp or 1) > 1

    @property
    def ranks_option(self) -> str:
        """What has asked for them, as on a command line."""
        if self.shares_sequences:
            return "--cp"
        return "--ep" if self.shares_experts else "--tp"

    @property
    def ranks_given(self) -> str:
        """All that has, with its numbers."""
        if self.are_in_rows:
            return f"{self.ranks_option} {self.num_rows} --tp {self.tp}"
        return f"{self.ranks_option} {self.num_ranks or 1}"


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """What a machine keeps, and how many of its cores work."""

    panel: ClassVar[str] = MACHINE

    threads: Annotated[
        int,
        Option(min=0, metavar="N", help="Threads to compute with; 0 = torch's choice."),
    ] = 0
    state_dir: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Keep this peer's identity and checkpoints here. Default: peer-N in "
            "~/.local/state/swarmnet.",
        ),
    ] = None
    checkpoint_every: Annotated[
        int,
        Option(min=0, metavar="N", help="Rounds between checkpoints of the stage; 0 = none."),
    ] = 10
    keep_checkpoints: Annotated[
        int,
        Option(
            min=2,
            metavar="N",
            help="Newest checkpoints to keep. Up to 3 older ones stay for peers with slower disks.",
        ),
    ] = 2


@dataclass(frozen=True, kw_only=True)
class PeerChoices(
    RunOptions, ModelOptions, NetworkOptions, LinkOptions, ComputeOptions, StateOptions
):
    """All that a person may choose of a peer."""


@dataclass(frozen=True, kw_only=True)
class LocalRunOptions:
    """A run whose peers are all on this machine."""

    panel: ClassVar[str] = RUN

    num_peers: Annotated[
        int, Option("--peers", min=1, max=256, metavar="N", help="Peer processes to start.")
    ] = 4
    spec: Annotated[
        Path | None,
        Option(metavar="FILE", help="The run's file. Default: a small language model."),
    ] = None
    rounds: RoundsOption = None
    seed: SeedOption = None
    invite: InviteOption = ""


@dataclass(frozen=True, kw_only=True)
class LocalPeerOptions(LinkOptions, ComputeOptions):
    """What each of several peers on one machine is told."""

    panel: ClassVar[str] = MACHINE

    threads: Annotated[
        int,
        Option(
            min=0, metavar="N", help="Threads of each peer; 0 = this machine's cores, shared out."
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class LocalChoices(LocalRunOptions, LocalPeerOptions):
    """All that a person may choose of a swarm on one machine."""

    def threads_each(self, seats: Sequence[int]) -> int:
        """Threads of each process that computes. `seats`: stages of each peer, which are in
        processes of their own where they have ranks."""
        num_ranks = self.num_ranks or 1
        num_processes = self.num_peers if num_ranks == 1 else sum(seats) * num_ranks
        return self.threads or max(1, (os.cpu_count() or 1) // num_processes)


@dataclass(frozen=True, kw_only=True)
class ExportModelOptions:
    """Which model is meant, and how it is written."""

    round: Annotated[
        int | None,
        Option(min=0, help="Write this round, of those that were saved. Default: the newest."),
    ] = None
    best: Annotated[bool, Option(help="Write the saved round with the lowest held-out loss.")] = (
        False
    )
    dtype: DtypeOption = ""
    merge: Annotated[
        bool,
        Option(
            help="Write the whole model where adapters are trained ([lora]): they are added to"
            " its weights. Without this option they are written alone, as a PEFT adapter.",
        ),
    ] = False
    weights: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Folder on this machine of the model that adapters are for. The adapter names"
            " it as its base, and --merge reads it. Without this option, --merge gets the"
            " model from the peers, or from what they have kept.",
        ),
    ] = None
    run_id: Annotated[
        str,
        Option(help="Id of the run, or its beginning, where the folders hold several runs."),
    ] = ""


@dataclass(frozen=True)
class PeerOptions(PeerChoices):
    """Options of one peer. Exactly one of `spec` and `join` is given."""

    state_dir: Path = field()  # without the default of the base
    """Where this peer keeps its identity and its checkpoints; nobody else uses it (see
    `swarmnet.runtime.state_dir`)."""
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
        """`path/file.py:function` of a custom model. Raises `UsageError` where the code would be
        chosen by the network: it runs with the rights of whoever started this peer."""
        if self.builder or self.starts_run or spec.model.kind != "custom":
            return self.builder or spec.model.builder
        raise UsageError(
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


def default_spec_path() -> Path:
    """The run of a swarm on one machine where no other is named."""
    return Path(__file__).with_name("default.toml")


def group_of(options: Any, group: type[Any]) -> dict[str, Any]:
    """What `options` have of a group, by name."""
    return {each.name: getattr(options, each.name) for each in fields(group)}


def arguments_for(options: Any, group: type[Any]) -> list[str]:
    """What says on a command line what `options` have of a group, but for defaults."""
    hints = get_type_hints(group, include_extras=True)
    words: list[str] = []
    for field_of in fields(group):
        value = getattr(options, field_of.name)
        option = next(o for o in hints[field_of.name].__metadata__ if isinstance(o, Option))
        if value == field_of.default or value is None:
            continue
        flag = option.flags[0] if option.flags else f"--{field_of.name.replace('_', '-')}"
        if isinstance(value, bool):  # a flag `--no-...` alone stands for a field that is true
            yes, _, no = flag.partition("/")
            words.append(yes if value or not no else no)
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words += [flag, str(one)]
    return words
