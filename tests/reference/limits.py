"""Limits: those of a machine's owner, and those of the program."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from peer.machine.limits import READERS
from peer.option_groups import parameters
from peer.options import LimitOptions
from tests.reference.tables import amount, code, page, table

OF_A_RUN = (
    ("A run.toml", "spec.MAX_SPEC_BYTES", "bytes"),
    ("A text in it", "spec.MAX_TEXT", "characters"),
    ("A list in it", "spec.MAX_LIST", "entries"),
    ("Stages", "spec.MAX_STAGES", ""),
    ("Microbatches of a round", "protocol.slots.MAX_SLOTS", ""),
    ("A sequence", "spec.MAX_SEQUENCE", "tokens"),
    ("A vocabulary", "spec.MAX_VOCABULARY", "tokens"),
    ("A tokenizer.json", "spec.MAX_FILE_BYTES", "bytes"),
    ("Any other file of a run", "spec.SMALL_FILE_BYTES", "bytes"),
    ("A record of a data file", "training.data.readers.MAX_RECORD_BYTES", "bytes"),
    ("Data that a peer fetches unasked", "training.data.coming.UNASKED_BYTES", "bytes"),
)
OF_A_SWARM = (
    ("Peers that a peer knows", "protocol.membership.view.MAX_PEERS", ""),
    ("Shards of a stage", "protocol.membership.records.MAX_SHARDS", ""),
    ("Stages on one machine", "protocol.membership.seats.MAX_SEATS", ""),
    ("Ranks of one peer (`--tp`, `--cp`, `--ep`)", "training.ranks.cut_plan.MAX_RANKS", ""),
    ("State folders of one user", "runtime.state_dir.MAX_PEERS_PER_USER", ""),
    ("Addresses of a peer", "protocol.membership.records.MAX_ADDRESSES", ""),
)
OF_THE_NETWORK = (
    ("Arrays of one message", "transport.frames.MAX_MESSAGE_BYTES", "bytes"),
    ("All else of a message", "wire.MAX_BODY_BYTES", "bytes"),
    ("What one member makes a peer hold", "transport.calls.holdings.MEMBER_BYTES", "bytes"),
    (
        "What all machines without standing make it hold",
        "transport.calls.holdings.STRANGERS_BYTES",
        "bytes",
    ),
    ("Requests of one peer that are being served", "transport.calls.served.MAX_OPEN_CALLS", ""),
    ("Circuits that a relay joins", "transport.relay.MAX_CIRCUITS", ""),
    ("Circuits of one caller or callee", "transport.relay.MAX_CIRCUITS_EACH", ""),
)
OF_TEXTS = (
    ("A text, the prompt included", "protocol.generation.MAX_TOKENS", "tokens"),
    ("A text of a run with longer sequences", "protocol.generation.LONGEST_TEXT", "tokens"),
    ("Texts at a replica, of all callers", "protocol.generation.MAX_SESSIONS", ""),
    (
        "Texts at a replica, of callers that nobody has seen at work",
        "protocol.generation.MAX_UNKNOWN_SESSIONS",
        "",
    ),
    ("Texts at a replica, of one machine", "protocol.generation.MAX_SESSIONS_EACH", ""),
    ("Texts that end an answer", "runtime.writing.writer.MAX_STOPS", ""),
    ("A prompt of messages", "runtime.writing.chat.MAX_PROMPT_CHARS", "characters"),
    ("A request to the OpenAI API", "peer.commands.openai_api.MAX_BODY_BYTES", "bytes"),
    ("Requests to it at a time", "peer.commands.openai_api.MAX_WAITING", ""),
)
OF_FILES = (
    ("The file of `--metrics`", "peer.observe.metrics.MAX_METRICS_BYTES", "bytes"),
    ("The log of a peer of `swarmnet local`", "runtime.local.processes.MAX_LOG_BYTES", "bytes"),
    ("The list of counted microbatches", "runtime.counted.MAX_COUNTED_BYTES", "bytes"),
    ("Visitors of a web page", "peer.observe.dashboard.hub.MAX_VISITORS", ""),
    ("Events that a run keeps, from Python", "api.history.MOST_EVENTS", ""),
)


def limits() -> str:
    return page(
        "Limits",
        "## Those of a machine's owner",
        "`swarmnet peer` and `swarmnet limits` take them as options, and keep them in "
        "`limits.toml` in the peer's state folder. The peer reads the file again when it "
        "changes. A line that is not there sets no limit.",
        table(("key of limits.toml", "option", "meaning"), map(_owners, READERS)),
        "## Those of the program",
        "What is beyond them is refused, with a line that says so; of what peers send, the call "
        "is.",
        _bounds("A run", OF_A_RUN),
        _bounds("A swarm", OF_A_SWARM),
        _bounds("The network", OF_THE_NETWORK),
        _bounds("Texts", OF_TEXTS),
        _bounds("Files and pages", OF_FILES),
        "A file that has reached its limit is set aside, and a new one is begun. One that was "
        "set aside before is removed, so that there are twice as many bytes at most.",
    )


def _owners(key: str) -> tuple[str, str, str]:
    for parameter in parameters(LimitOptions):
        if parameter.name == key:
            flag = parameter.flag.partition("/")[0]
            typed = " ".join(filter(None, (flag, parameter.option.metavar)))
            return code(key), code(typed), str(parameter.option.help)
    return code(key), code("--pause"), "The peer stands by (`swarmnet limits --pause`)."


def _bounds(title: str, rows: tuple[tuple[str, str, str], ...]) -> str:
    values = ((what, amount(_value(name), unit)) for what, name, unit in rows)
    return f"### {title}\n\n" + table(("what", "at most"), values)


def _value(name: str) -> Any:
    module, _, constant = name.rpartition(".")
    place = module if module.startswith("peer.") else f"swarmnet.{module}"
    return getattr(import_module(place), constant)
