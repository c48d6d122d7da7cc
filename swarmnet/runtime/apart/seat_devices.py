"""Which devices each seat of a machine computes on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from swarmnet.errors import UserError
from swarmnet.runtime.options import PeerOptions
from swarmnet.runtime.ranks import check_ranks, check_wanted
from swarmnet.spec import RunSpec

Devices = tuple[str, ...]
"""One for each rank of a seat."""


def seat_devices(spec: RunSpec, options: PeerOptions) -> list[Devices] | None:
    """By seat; None where all seats share what the peer's own process computes with: one device,
    or the cores of the machine. Raises as `choose_devices`."""
    import swarmnet.training.accelerators as accelerators

    num_seats = int(options.stages) if options.stages.isdecimal() else 1
    if num_seats < 2:
        return None
    num_ranks = options.num_ranks or 1
    here = accelerators.kind()
    num_cards = 0 if options.device == accelerators.CPU else accelerators.num_devices()
    if here != accelerators.CUDA:
        num_cards = min(num_cards, 1)
    check_wanted(options.device, num_ranks)
    check_ranks(spec, options, num_ranks)
    if num_ranks == 1 and num_cards < 2:
        return None
    if num_cards == 0:
        return [(accelerators.CPU,) * num_ranks] * num_seats
    return share_out(num_cards, num_seats, num_ranks, options.ranks_given, here)


def share_out(
    num_cards: int, num_seats: int, num_ranks: int, given: str = "", kind: str = "cuda"
) -> list[Devices]:
    """Cards for the ranks of each seat, in their order: ranks of a seat are beside each other.
    Where seats of one rank are more than cards, they share some. Raises `UserError` where ranks are
    more. `given`: what has asked for ranks, as on a command line."""
    if num_ranks > 1 and num_seats * num_ranks > num_cards:
        raise UserError(
            f"--stages {num_seats} with {given} takes {num_seats * num_ranks} "
            f"cards, and this machine has {num_cards}: take fewer stages or ranks, or --device cpu"
        )
    cards = [f"{kind}:{i % num_cards}" for i in range(num_seats * num_ranks)]
    return [tuple(cards[i * num_ranks : (i + 1) * num_ranks]) for i in range(num_seats)]


def num_sharing(seats: Sequence[Devices], seat: int) -> int:
    """Seats that compute with the memory that this one does, itself included."""
    return sum(not set(other).isdisjoint(seats[seat]) for other in seats)


def threads_each(options: PeerOptions, seats: Sequence[Devices]) -> int:
    """Threads that each process computes with; 0 for torch's choice."""
    if options.threads or seats[0][0] != "cpu":
        return options.threads
    return max(1, (os.cpu_count() or 1) // sum(map(len, seats)))
