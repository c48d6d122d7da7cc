"""`swarmnet peer`: a peer of the library, with what its person sees and its owner allows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peer.machine.limit_keeper import Keeper
from peer.machine.limits import LIMITS_FILE, change_limits
from peer.machine.memory_cap import MemoryCap, stage_needs, tree_bytes
from peer.options import LimitOptions, OutputOptions
from swarmnet.errors import UsageError
from swarmnet.protocol.membership.peer_ids import MAX_SEATS
from swarmnet.protocol.resource_limits import TOLD
from swarmnet.runtime.joining.ready import ready_target
from swarmnet.runtime.options import AUTO_STAGES, PeerChoices, PeerOptions
from swarmnet.runtime.run import Extra, RunningPeer
from swarmnet.runtime.state_dir import claimed_state_dir

FIRST_DIRECT_PORT = 1024
"""Others dial none below (`swarmnet.transport.direct.FIRST_PORT`)."""


def serve(choices: PeerChoices, limits: LimitOptions, output: OutputOptions) -> None:
    """Runs a peer until it has left. Raises `UsageError` where options do not go together, and what
    `run_peer` raises."""
    from peer.loop import Stopped
    from peer.loop import run as run_in_loop
    from peer.observe.metrics import open_metrics
    from swarmnet.observe.chart_clients import client_of
    from swarmnet.observe.notify import check_url
    from swarmnet.runtime.run import run_peer

    check(choices)
    if output.notify:
        check_url(output.notify)
    client_of(output.log_to)
    with claimed_state_dir(choices.state_dir) as folder:
        options = PeerOptions(
            **asdict(choices) | {"state_dir": folder},
            ready_file=None if output.ready_file is None else ready_target(output.ready_file),
            is_quiet=output.quiet,
        )
        change_limits(folder, limits)
        try:
            page = None
            if output.dashboard is not None:
                listener = run_in_loop(_listener(output), output.parent_pid)
                page = (output.dashboard_host, listener, output.allowed_host)
            with open_metrics(output.metrics, append=True) as metrics:
                life = run_peer(options, extras(output, metrics, page))
                run_in_loop(life, output.parent_pid)
        except Stopped:
            pass  # how a peer ends


async def _listener(output: OutputOptions) -> socket.socket:
    """Of the web page, when its port is free."""
    from peer.observe.dashboard.server import listen
    from swarmnet.runtime.net import once_free

    async def one() -> socket.socket:
        assert output.dashboard is not None
        return listen(output.dashboard_host, output.dashboard)

    return await once_free(one)


def check(choices: PeerChoices) -> None:
    """Raises `UsageError` where options do not go together."""
    if (choices.spec is None) == (not choices.join):
        raise UsageError("give --spec FILE to start a run, or --join ADDR to join one")
    if choices.join and (choices.rounds is not None or choices.seed is not None):
        raise UsageError("--rounds and --seed go with --spec; who joins takes the run's")
    stages = choices.stages
    is_number = stages.isascii() and stages.isdigit() and 1 <= int(stages) <= MAX_SEATS
    if stages not in ("", AUTO_STAGES) and not is_number:
        raise UsageError(f"--stages {stages}: a number from 1 to {MAX_SEATS}, or auto")
    if stages == AUTO_STAGES and (choices.num_ranks or 1) > 1:
        raise UsageError(
            f"--stages auto goes with one rank; name a number of stages, or leave "
            f"{choices.ranks_option} out"
        )
    if 0 < (choices.direct_port or 0) < FIRST_DIRECT_PORT:
        raise UsageError(f"--direct-port: 0, or {FIRST_DIRECT_PORT} and above")


def extras(output: OutputOptions, metrics: Any, page: Any) -> list[Extra]:
    """What runs beside a peer, in the order in which it begins. `metrics`: an open file of events,
    or None; `page`: host and socket of the web page, or None."""
    keepers: list[Keeper] = []

    async def keep_limits(running: RunningPeer) -> Coroutine[Any, Any, None]:
        keeper = await asyncio.to_thread(keeper_of, running)
        keeper.start()
        if running.room is not None:
            running.room.limit_free(keeper.memory.room_bytes)
        keepers.append(keeper)
        return keeper.run()

    async def report(running: RunningPeer) -> Coroutine[Any, Any, None]:
        from peer.disk.state import removable_line
        from peer.observe.report import report_peer
        from swarmnet.observe.charts import Charts

        def removable() -> str:
            return removable_line(running.options.state_dir, running.spec.run_id)

        notify = output.notify
        charts = Charts(output.log_to, running.spec) if output.log_to else None
        return report_peer(
            running,
            output.screen,
            metrics,
            page,
            keepers[0],
            removable,
            notify,
            charts,
            shows_join=output.dashboard_join,
        )

    async def serve_prometheus(running: RunningPeer) -> Coroutine[Any, Any, None]:
        from peer.observe.prometheus import serve_metrics, shut_down_when_cancelled
        from swarmnet.runtime.net import once_free

        port = output.metrics_port
        assert port is not None

        async def listen() -> Any:
            return serve_metrics(running.peer, running.spec, output.metrics_host, port)

        return shut_down_when_cancelled(await once_free(listen))

    async def health(running: RunningPeer) -> Coroutine[Any, Any, None]:
        from peer.observe.health import tell_health

        assert output.health_file is not None
        return tell_health(output.health_file, running.peer)

    found: list[Extra] = [keep_limits, report]
    if output.metrics_port is not None:
        found.append(serve_prometheus)
    if output.health_file is not None:
        found.append(health)
    return found


def keeper_of(running: RunningPeer) -> Keeper:
    """Who keeps this machine's peers to the limits in the state folder."""
    import psutil

    seats, options, spec = running.seats, running.options, running.spec

    def stages() -> list[int]:
        return [peer.replica.index for peer in seats.peers if peer.replica is not None]

    built = spec.with_builder(options.model_builder(spec))
    base_bytes = tree_bytes(psutil.Process())
    memory = MemoryCap(stage_needs(built), base_bytes)
    path: Path = options.state_dir / LIMITS_FILE
    limited, traffic = running.peer.resource_limits, running.peer.transport.traffic

    def moved() -> tuple[int, int]:
        return sum(traffic.sent_bytes.values()), sum(traffic.received_bytes.values())

    def tell(totals: Mapping[str, int]) -> None:
        gossip = running.peer.gossip
        others = {k: n for k, n in gossip.own.totals.items() if not k.startswith(TOLD)}
        gossip.amend(totals={**others, **totals})

    return Keeper(
        path, limited, running.transport, running, memory, stages, traffic=moved, tell=tell
    )
