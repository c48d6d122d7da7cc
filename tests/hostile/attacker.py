"""A hostile machine: frames, records and calls of its own making, under any number of names.

It signs what it says, with keys of its own: nobody can sign for another one. Beyond that it keeps
no rule: a record says what it likes, a call has whatever body, and it answers what is asked of it
as it likes, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from swarmnet.errors import SwarmnetError
from swarmnet.methods.method import Method
from swarmnet.methods.records import GOSSIP, RECORDS, GossipRequest, Records, SignedRecord
from swarmnet.methods.table import METHODS
from swarmnet.methods.update import NormRequest
from swarmnet.methods.update_proof import SIGNED_AS, Squares
from swarmnet.protocol.membership.records import ACTIVE, Record
from swarmnet.swarm.membership.record_checks import Signer
from swarmnet.transport.base import Request, Transport
from swarmnet.wire import Array, Message, pack

T = TypeVar("T")

ANSWER_S = 5.0


class NamedSigner:
    """Signs for one name: with a key that is made from it, in place of Ed25519, so that peers of
    one process can check each other and none signs for another by mistake."""

    def __init__(self, name: str) -> None:
        self._name = name

    def sign(self, data: bytes) -> bytes:
        return _signed(self._name, data)

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        return signature == _signed(peer_id, data)

    async def beside(self, work: Callable[[], T]) -> T:
        return work()


def _signed(name: str, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=hashlib.blake2b(name.encode()).digest()).digest()


class CanSign(Protocol):
    """Has a key."""

    def sign(self, data: bytes) -> bytes:
        """A signature over these bytes."""


def norm_said(
    signer: CanSign, run_id: str, peer_id: str, r: int, stage: int, sums: Mapping[int, float]
) -> NormRequest:
    """What a peer tells collectors of the squares of shards, as it has signed it."""
    shards, values = tuple(sums), tuple(sums.values())
    statement = pack(Squares(run_id, peer_id, 0, r, stage, shards, values))
    return NormRequest(r, stage, shards, values, signer.sign(SIGNED_AS + statement))


class AllowAll:
    """A gate that lets every call in, and decodes it as its method says."""

    def knows(self, method: str) -> bool:
        return method in METHODS

    def has_standing(self, machine: str) -> bool:
        return True

    def check(self, envelope: Any) -> None:
        pass

    def enter(self, envelope: Any, body: Any) -> Any:
        return METHODS[envelope.method].request_in(body)


class Hub(Protocol):
    """Where a machine gets its identities: a `MemoryHub`, or a real network."""

    def transport(self, peer_id: str) -> Transport:
        """A new endpoint, of that name; on a real network another one, with a key behind it."""

    def kill(self, peer_id: str) -> None:
        """It is gone at once."""


@dataclass
class Name:
    """One identity of the attacker."""

    hub: Hub
    peer_id: str
    run_id: str
    incarnation: int = 10**12
    version: int = 0
    signer_of: Callable[[str], Signer] = NamedSigner
    transport: Transport = field(init=False)

    def __post_init__(self) -> None:
        self.transport = self.hub.transport(self.peer_id)
        self.peer_id = self.transport.peer_id
        self.transport.set_run(self.run_id)
        self.transport.guard(AllowAll())
        self._signer = self.signer_of(self.peer_id)

    @property
    def where(self) -> tuple[str, ...]:
        """Its addresses."""
        return tuple(self.transport.addresses())

    def record(self, **says: Any) -> SignedRecord:
        """What it says of itself, signed; newer than what it has said before. Fields that no
        `Record` may have are sent all the same."""
        self.version += 1
        of_itself: dict[str, Any] = {
            "peer_id": self.peer_id,
            "run_id": self.run_id,
            "incarnation": self.incarnation,
            "version": self.version,
        }
        try:
            payload = pack(Record(**(of_itself | says)))
        except (ValueError, SwarmnetError):
            payload = pack(of_itself | says)
        return self.signed(payload)

    def signed(self, payload: bytes) -> SignedRecord:
        """Whatever it says, under its signature."""
        return SignedRecord(payload, self.sign(payload))

    def sign(self, data: bytes) -> bytes:
        """As this name."""
        return self._signer.sign(data)

    def tell(self, targets: Sequence[str], *records: SignedRecord) -> None:
        """Sends records, one way."""
        for target in targets:
            self.transport.notify(target, RECORDS.name, Message(Records(records=records)))

    async def call(
        self,
        target: str,
        method: Method[Any, Any],
        body: Any,
        arrays: tuple[Array, ...] = (),
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """The body of the answer, or the error that came in its place."""
        try:
            reply = await self.transport.call(
                target, method.name, Message(body, arrays), timeout_s=timeout_s
            )
            return method.reply_in(reply).body
        except SwarmnetError as e:
            return e

    def answer(
        self, method: Method[Any, Any], with_: Callable[[Any], Any], arrays: tuple[Array, ...] = ()
    ) -> None:
        """Answers calls of others: `with_(body)` is the reply's body, or raises."""

        async def handler(request: Request[Any]) -> Message[Any]:
            return Message(with_(request.message.body), arrays)

        self.transport.handle(method.name, handler)

    def is_silent_to(self, *methods: Method[Any, Any]) -> None:
        """Takes those calls and never answers."""

        async def handler(request: Request[Any]) -> Message[Any]:
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        for method in methods:
            self.transport.handle(method.name, handler)

    async def hear(self, target: str) -> dict[str, Record]:
        """The records that an honest peer gives to whoever asks."""
        reply = await self.call(target, GOSSIP, GossipRequest({}))
        found = {}
        for signed in getattr(reply, "records", ()):
            record = unpack_record(signed.payload)
            found[record.peer_id] = record
        return found


def unpack_record(payload: bytes) -> Record:
    """A record that an honest peer has sent."""
    from swarmnet.wire import unpack

    return unpack(payload, Record)


@dataclass
class Attacker:
    """One machine that attacks a swarm."""

    hub: Hub
    run_id: str
    victims: list[str]
    rng: random.Random
    signer_of: Callable[[str], Signer] = NamedSigner
    names: list[Name] = field(default_factory=list)

    def name(self, peer_id: str = "") -> Name:
        """A fresh identity, connected to nobody yet."""
        name = Name(
            self.hub,
            peer_id or f"liar-{len(self.names)}",
            self.run_id,
            signer_of=self.signer_of,
        )
        self.names.append(name)
        return name

    async def joined(self, stage: int = 0, **says: Any) -> Name:
        """An identity whose record says that it serves a stage as any replica, which answers what
        it is asked with errors."""
        name = self.name()
        told = {"state": ACTIVE, "stage": stage, "addresses": name.where} | says
        name.tell(self.victims, name.record(**told))
        await asyncio.sleep(0.1)
        return name

    def leave(self) -> None:
        """All names are gone at once, as by SIGKILL."""
        for name in self.names:
            self.hub.kill(name.peer_id)
