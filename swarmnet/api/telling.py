"""What tells of an open run beside its events: charts, and messages to a person."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from swarmnet.api.session import Session
from swarmnet.observe.chart_clients import client_of
from swarmnet.observe.charts import Charts
from swarmnet.observe.notify import check_url, open_notifier


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a program wants of it."""

    log_to: str = ""
    """`KIND:WHERE`, as `--log-to` takes it; empty for no charts."""
    notify: str = ""
    """An address; empty for no messages."""


@asynccontextmanager
async def telling_session(
    opening: Callable[[], AbstractAsyncContextManager[Session]], wishes: Wishes
) -> AsyncIterator[Session]:
    """A session that tells. Raises `UserError` before it is opened where it could not."""
    client_of(wishes.log_to)
    if wishes.notify:
        check_url(wishes.notify)
    async with opening() as session, AsyncExitStack() as stack:
        if wishes.log_to:
            charts = Charts(wishes.log_to, session.spec)
            stack.callback(charts.close)
            session.sinks.append(lambda events, model, now: charts.write(events, model))
        notifier = await open_notifier(stack, wishes.notify, session.spec)
        if notifier is not None:
            session.sinks.append(lambda events, model, now: notifier.look(model, now))
        yield session
