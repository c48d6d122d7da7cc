"""The one table of methods: a row for each call of the wire, with its bodies beside it.

A method without a row cannot be served. The gate, its quotas, what is served with a stage, the
table in docs/protocol.md and the fuzzers go by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmnet.methods import audit, contact, microbatch, records, state, update, update_proof
from swarmnet.methods.method import Method

METHODS: Mapping[str, Method[Any, Any]] = {
    row.name: row
    for subject in (contact, records, microbatch, audit, update, update_proof, state)
    for row in vars(subject).values()
    if isinstance(row, Method)
}
"""By name, in the order of docs/protocol.md."""
