"""Which peers are of one household: those that its key has signed for.

Machines behind one uplink are neighbours to each other, and far from all others. Addresses and
round trips are no evidence of that: who claims to be a neighbour may drop the gradients of others,
or have its own taken for a whole house's. So the owner of the machines makes a key, and gives it to
each of them. A peer shows the key's signature over its id in its record. It is public, and worth
nothing to any other peer id."""

from __future__ import annotations

from functools import lru_cache

from swarmnet.identity import Identity, verify
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.protocol.membership.records import Household

HOUSEHOLD_DOMAIN = b"swarmnet/1/household\0"
"""What is signed begins with its purpose: no signature is ever good for another one."""
CHECKED_HOUSEHOLDS = 8192


def household_of(key: Identity, peer_id: str) -> Household:
    """What a peer shows of the household with this key; all seats of its machine show the same."""
    return Household(key.peer_id, key.sign(HOUSEHOLD_DOMAIN + machine_of(peer_id).encode()))


@lru_cache(maxsize=CHECKED_HOUSEHOLDS)
def is_of(household: Household, peer_id: str) -> bool:
    """Whether the household has signed for a peer.

    The same signature comes with every version of a record: it is checked once."""
    signed = HOUSEHOLD_DOMAIN + machine_of(peer_id).encode()
    return verify(household.key, signed, household.signature)
