"""What is signed of microbatches: by feeders that they launched them, and by replicas, in receipts,
what they got and gave, by hashes that are made and compared beside the device's work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from blake3 import blake3

from swarmnet.batch import Documents
from swarmnet.errors import ProtocolViolation
from swarmnet.methods.microbatch import StepReply, StepRequest
from swarmnet.methods.receipt import Launch, Receipt, Statement
from swarmnet.ports import Passage
from swarmnet.swarm.membership.record_checks import Signer
from swarmnet.wire import Array, pack

T = TypeVar("T")
BeforeT = TypeVar("BeforeT")
AfterT = TypeVar("AfterT")


def hash_of(array: Array | None) -> bytes:
    """Of dtype, shape and data; empty for none. See docs/protocol.md."""
    if array is None:
        return b""
    return _hashed([array.dtype, list(array.shape)], array)


def hash_of_targets(targets: Array, documents: Documents | None) -> bytes:
    """Of targets, with the documents of each sample."""
    return _hashed([targets.dtype, list(targets.shape), documents], targets)


def _hashed(about: object, array: Array) -> bytes:
    """By BLAKE3: all that is sent is hashed, and it takes a quarter of the time of SHA-256 where a
    processor has instructions for that, else a tenth."""
    found = blake3(pack(about))
    found.update(memoryview(array.data).cast("B"))
    return found.digest()


def hash_of_statement(receipt: Receipt | None) -> bytes:
    """Empty for none."""
    return b"" if receipt is None else hashlib.sha256(receipt.statement).digest()


def launch_of(step: StepRequest, run_id: str, targets: bytes) -> Launch:
    """What the feeder of a microbatch signs. `targets`: their hash."""
    return Launch(run_id, step.feeder, step.round, step.microbatch_id, targets)


async def check_launch(step: StepRequest, run_id: str, targets: Array, signer: Signer) -> None:
    """Raises `ProtocolViolation` unless the feeder of a microbatch has signed it."""

    def is_signed() -> bool:
        said = launch_of(step, run_id, hash_of_targets(targets, step.documents))
        return signer.verify(step.feeder, said.signed, step.launch)

    if not await signer.beside(is_signed):
        raise ProtocolViolation("a microbatch that its feeder has not signed")


def beside(
    passage: Passage[T], before: Callable[[], BeforeT], after: Callable[[T], AfterT]
) -> Passage[tuple[BeforeT, T, AfterT]]:
    """A passage, with work that the host does for it before its turn at the device, and on what
    goes. What they raise ends it."""

    def arrive() -> tuple[BeforeT, object]:
        return before(), passage.arrive()

    def depart(done: tuple[BeforeT, object]) -> tuple[BeforeT, T, AfterT]:
        result = passage.depart(done[1])
        return done[0], result, after(result)

    def compute(came: tuple[BeforeT, object]) -> tuple[BeforeT, object]:
        return came[0], passage.compute(came[1])

    return Passage(arrive, compute, depart, passage.is_apart, passage.rest)


def check_reply(
    reply: StepReply, about: tuple[int, int, int], inputs: bytes, targets: bytes, *, is_hinted: bool
) -> Receipt:
    """The receipt of a reply, if it is one for what was sent. Its signature is not checked here:
    who audits does that.

    Args:
        about: round, microbatch id and stage.
        inputs: hash of what was sent; so `targets`.
        is_hinted: the callee may have had the microbatch from another caller, of another machine,
            whose arithmetic gave other bits.

    Raises:
        ProtocolViolation: it is not.
    """
    receipt = reply.receipt
    if receipt is None:
        raise ProtocolViolation("a step's reply without a receipt")
    said = receipt.read()
    is_of_it = (said.round, said.microbatch_id, said.stage) == about
    if not is_of_it or said.peer_id != reply.path[0] or said.targets != targets:
        raise ProtocolViolation("a step's reply with the receipt of something else")
    if said.inputs != inputs and not is_hinted:
        raise ProtocolViolation("a receipt for other inputs than were sent")
    if (said.loss_sum, said.num_tokens) != (reply.loss_sum, reply.num_tokens):
        raise ProtocolViolation("a receipt for another loss than that of the reply")
    if bool(said.beyond) == (len(reply.path) == 1):
        raise ProtocolViolation("a receipt that leaves out the stages beyond")
    return receipt


def check_gradient(receipt: Receipt, gradient: Array) -> None:
    """Raises `ProtocolViolation` unless a receipt is for this gradient too."""
    if receipt.read().gradient != hash_of(gradient):
        raise ProtocolViolation("a receipt for another gradient than came back")


def statement_of(receipt: Receipt, run_id: str) -> Statement:
    """Raises `ProtocolViolation` where it is of another run."""
    said = receipt.read()
    if said.run_id != run_id:
        raise ProtocolViolation("a receipt of another run")
    return said
