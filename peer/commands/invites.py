"""`swarmnet invite`: invites to closed runs, issued with the owner's key."""

from __future__ import annotations

import asyncio
import logging
import re
import time

from peer.options import InviteOptions
from swarmnet.admission import Invite
from swarmnet.errors import DataError, UserError
from swarmnet.identity import Identity, is_peer_id
from swarmnet.protocol.dialing.addresses import MAX_NAMED, best_to_join
from swarmnet.protocol.membership.peer_ids import machine_of
from swarmnet.runtime.joining.starting import start_run
from swarmnet.spec import RunSpec

log = logging.getLogger("swarmnet.peer")

SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
LONGEST_S = 3650 * SECONDS["d"]


def parse_duration_s(text: str) -> int:
    """`90m`, `12h`, `30d` or `4w` in seconds. Raises `UserError`."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text.strip())
    duration_s = int(match[1]) * SECONDS[match[2]] if match else 0
    if not 0 < duration_s <= LONGEST_S:
        raise UserError(f"--valid {text[:32]!r}: say 90m, 12h, 30d or 4w, at most ten years")
    return duration_s


async def issue_invite(options: InviteOptions) -> str:
    """What `swarmnet invite` prints: an invite, or, where no run is named, the line that makes a
    run closed. Raises `UserError`."""
    valid_s = parse_duration_s(options.valid)
    if options.peer_id and not is_peer_id(options.peer_id):
        raise UserError(f"--peer {options.peer_id[:64]!r} is no peer id (12D3Koo...)")
    if (options.spec is not None or options.join) and not options.key.exists():
        raise UserError(f"there is no key {options.key}; name the one that closed the run")
    owner = Identity.load_or_create(options.key)
    if options.spec is None and not options.join:
        return f'[security]\nadmission = "invite"\nowner = "{owner.peer_id}"'
    spec = await _run_spec(options)
    if spec.security.admission != "invite":
        raise UserError(
            f"the run {spec.name!r} is open: nobody needs an invite; `swarmnet invite --key "
            f"{options.key}` prints the lines that close a new run"
        )
    if spec.security.owner != owner.peer_id:
        raise UserError(f"{options.key} is not the key of the run's owner {spec.security.owner}")
    return str(Invite.issue(owner, spec.run_id, int(time.time()) + valid_s, options.peer_id))


async def _run_spec(options: InviteOptions) -> RunSpec:
    if options.spec is not None:
        try:
            found = await asyncio.to_thread(
                start_run, options.spec, rounds=options.rounds, seed=options.seed
            )
        except DataError as e:
            raise UserError(f"{e}; or give --join ADDR in place of --spec") from None
        return found.spec
    from swarmnet.runtime.observer import Observer

    async with await Observer.join(options.join, transport=options.transport) as observer:
        live = observer.view.live(asyncio.get_running_loop().time())
        machines = [r for r in live if r.peer_id == machine_of(r.peer_id)]
        where = best_to_join({r.peer_id: r.addresses for r in machines})
        join = " ".join(f"--join {address}" for address in where or options.join[:MAX_NAMED])
        log.warning("who gets this invite types: swarmnet peer %s --invite INVITE", join)
        return observer.spec
