"""Numbers and names as people read them."""

from __future__ import annotations

from swarmnet.observe.events import (
    ContributionDropped,
    Counted,
    Event,
    HeldOut,
    Migrated,
    PeerJoined,
    PeerLost,
    PeerPaused,
    PeerResumed,
    RoundFinished,
    SyncMode,
)
from swarmnet.observe.view_model import ViewModel
from swarmnet.plurals import counted
from swarmnet.protocol.membership.peer_ids import SEPARATOR

ID_CHARACTERS = 8
"""The end of a peer id tells peers apart; its beginning is the same for all keys of a kind."""

COUNTED_SENTENCES: dict[str, tuple[str, str]] = {
    "rerouted": ("peer {peer} sent {count} another way", "microbatch"),
    "retracted": ("peer {peer} took {count} out again", "orphan"),
    "samples_lost": ("peer {peer} lost {count}", "sample"),
    "slots_doubled": ("two feeders counted {count} of a round", "slot"),
    "diverged": ("peer {peer} took over the result of the other side of a cut", ""),
    "shard_reset": ("optimizer state of {count} was lost with all its holders", "shard"),
    "shard_promoted": ("peer {peer} took over {count}", "shard"),
    "contributions_clipped": (
        "peer {peer} cut {count} to the median norm: far larger than the others'",
        "gradient",
    ),
    "checkpoints_failed": ("peer {peer} cannot save checkpoints; see its disk and its log", ""),
    "checkpoints_resumed": ("peer {peer} saves checkpoints again", ""),
    "checkpoint_saved": ("peer {peer} saved a checkpoint", ""),
}
"""With the noun of what is counted, where the sentence says how many."""


def short_id(peer_id: str) -> str:
    """The part of a peer id that people compare."""
    machine, separator, seat = peer_id.partition(SEPARATOR)
    return f"{machine[-ID_CHARACTERS:]}{separator}{seat}"


def number(value: float | None, digits: int = 0) -> str:
    """With thousands separated; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def size(num_bytes: float) -> str:
    """Bytes, with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} PB"


def stage_name(stage: int) -> str:
    return f"stage {stage}" if stage >= 0 else "no stage yet"


def sentence(event: Event, rounds: int) -> str:
    """An event in one line. `rounds`: length of the run; 0 where it has no end, or none is
    known."""
    match event:
        case RoundFinished():
            speed = f"  {number(event.tokens_per_s)} tokens/s" if event.tokens_per_s else ""
            spread = f"  spread {event.spread:.2%}" if event.spread else ""
            peers = counted(event.peers, "peer")
            return (
                f"round {event.round + 1}{f'/{rounds}' if rounds else ''}  loss {event.loss:.3f}"
                f"{speed}  {peers}{spread}"
            )
        case HeldOut():
            bits = f", {event.bits_per_byte:.3f} bits per byte" if event.bits_per_byte else ""
            return f"held-out loss after {counted(event.round, 'round')}: {event.loss:.3f}{bits}"
        case SyncMode():
            return (
                f"sync: {event.mode} from round {event.round + 1} on (an exchange takes "
                f"{event.exchange_s:.2f} s, a round {event.round_s:.2f} s)"
            )
        case PeerJoined():
            return f"peer {short_id(event.peer_id)} joined ({stage_name(event.stage)})"
        case PeerPaused():
            return f"peer {short_id(event.peer_id)} paused because {event.reason}"
        case PeerResumed():
            return f"peer {short_id(event.peer_id)} goes on after its pause"
        case PeerLost():
            how = "left" if event.clean else "was lost"
            return f"peer {short_id(event.peer_id)} {how} ({stage_name(event.stage)})"
        case Migrated():
            moved = f"from stage {event.from_stage} to stage {event.to_stage}"
            return f"peer {short_id(event.peer_id)} moved {moved}"
        case Counted():
            text, noun = COUNTED_SENTENCES[event.what]
            return text.format(peer=short_id(event.peer_id), count=counted(event.count, noun))
        case ContributionDropped():
            return (
                f"peer {short_id(event.peer_id)} sent gradients of {counted(event.count, 'shard')} "
                "that are not finite; they do not count"
            )
    return event.name


def coverage(model: ViewModel) -> str:
    """How many replicas each stage has, in one line."""
    rows = [f"{r.num_replicas}" + (f"+{r.num_joining}" * (r.num_joining > 0)) for r in model.stages]
    joining = " (+ joining)" if any(r.num_joining for r in model.stages) else ""
    return f"replicas by stage{joining}: " + " ".join(rows)
