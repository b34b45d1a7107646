"""A peer that holds the cluster's key and keeps no rule: it says what a test tells it to."""

import secrets
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Self, TypeVar

from baton.kvtransfer.links import KV_SCHEMA
from baton.kvtransfer.protocol.messages import (
    PROTOCOL,
    AnyMessage,
    EndpointHello,
    Extend,
    RankListenerAddresses,
    TransferMessage,
    decode,
    encode,
)
from baton.rpc.auth import Role
from baton.rpc.connection import Connection
from baton.rpc.liveness import is_ping
from tests.endpoint_host import layout
from tests.transfer_ends import PAGE_KEYS

ANSWER_S: Final = 5.0
MessageT = TypeVar("MessageT", bound=TransferMessage)


class RoguePeer:
    """Dials a host, as another endpoint would, and greets it."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        incarnation: bytes = b"",
        host: str = "elsewhere",
        addresses: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """host, addresses: what the peer says about its listeners."""
        sock = socket.create_connection(address)
        self.connection = Connection(sock, PAGE_KEYS, Role.CONNECTING, schema=KV_SCHEMA).handshake()
        self.incarnation = incarnation or secrets.token_bytes(16)
        rank = RankListenerAddresses(
            incarnation=self.incarnation, host=host, device="cpu", addresses=dict(addresses)
        )
        self.say(
            EndpointHello(
                protocol=PROTOCOL,
                incarnation=self.incarnation,
                fingerprint="model",
                layout=layout(),
                listeners=(rank,),
            )
        )
        self.hello = self.hear(EndpointHello)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def say(self, message: AnyMessage) -> None:
        self.connection.send(encode(message))

    def hear(self, kind: type[MessageT]) -> MessageT:
        """The next message, but for heartbeats and pings, which is of this kind."""
        while is_ping(body := self.connection.recv(ANSWER_S)) or isinstance(message := decode(body), Extend):
            continue
        assert isinstance(message, kind), message
        return message
