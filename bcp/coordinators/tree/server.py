"""The parent's end: lets those in that show the job's token and belong here."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bcp.coordinators.hello import Hello
from bcp.coordinators.tls import Tls
from bcp.coordinators.tree.edge import (
    METHOD,
    SERVICE,
    CredentialsError,
    Receive,
    converse,
    hello_of,
    metadata_of,
    proof_of,
    server_credentials,
)
from bcp.coordinators.tree.edge import server_options as options_for
from bcp.coordinators.tree.gate import Gate
from bcp.coordinators.tree.grpc_import import grpc
from bcp.coordinators.tree.link import Link
from bcp.coordinators.tree.rendezvous import Invitation
from bcp.errors import InputError

__all__ = ["Server", "credentials_of"]

_STOP_SECONDS = 1.0  # how long streams have to end by themselves


def credentials_of(invitation: Invitation, node: str) -> list[tuple[str, str]]:
    """Return what a rank says that wants to be let in; ``node`` tells it from others that claim its rank.

    The job's token is not said. The nonce is for the parent's proof that it knows it, see :func:`~.edge.proof_of`.
    """
    return [
        ("bcp-nonce", secrets.token_hex(16)),
        ("bcp-session", invitation.session),
        ("bcp-world-size", str(invitation.place.world_size)),
        ("bcp-node", node),
    ]


class Server:
    """Listens on one address for this rank's children."""

    def __init__(
        self,
        hello: Hello,
        invitation: Invitation,
        links: Mapping[int, Link],
        *,
        receive: Receive,
        lost: Callable[[int, object, str | None], None],
    ) -> None:
        """Prepare; nothing listens before :meth:`start`.

        Args:
            hello: who this rank is.
            invitation: what the others have to show.
            links: this rank's ends of its edges.
            receive: takes a child's frame.
            lost: called with a child, its connection, and why that broke, or None if it was closed in peace.

        """
        self._hello = hello
        self._invitation = invitation
        self._links = links
        self._receive = receive
        self._lost = lost
        self._nodes: dict[int, str] = {}
        self._server: Any = None
        self._gate: Gate

    def __repr__(self) -> str:
        """Show how many children are here."""
        children = self._invitation.place.children
        here = sum(self._links[child].connection is not None for child in children)
        return f"<Server of {self._hello}: {here} of {len(children)} children are here>"

    async def start(self, address: str, tls: Tls | None) -> int:
        """Listen on this address, and return the port. Raises InputError where that is not possible."""
        self._gate = Gate(self._hello.rank, self._missing)
        self._server = grpc.aio.server(options=options_for(len(self._invitation.place.children)))
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            if tls is None:
                self._gate.place(self._server.add_insecure_port)
            else:
                self._gate.place(partial(self._server.add_secure_port, server_credentials=server_credentials(tls)))
            await self._server.start()
            return await self._gate.listen(address)
        except (OSError, RuntimeError, ValueError) as error:
            await self.aclose()
            raise InputError(f"{self._hello} cannot listen on {address}: {error}; give it another address") from error

    @property
    def door(self) -> str:
        """The way in for children on this host."""
        return self._gate.door

    async def aclose(self) -> None:
        """End all connections, and stop to listen."""
        if self._server is not None:
            await self._server.stop(_STOP_SECONDS)  # all at once would make gRPC print a line on the other side
            await self._gate.aclose()

    def _missing(self) -> int:
        """Count the children that are not here."""
        return sum(self._links[child].connection is None for child in self._invitation.place.children)

    async def _join(self, _requests: object, context: Any) -> None:
        """Serve one stream from beginning to end."""
        said = {key: str(value) for key, value in context.invocation_metadata()}
        answer = await self._proved(context, said)
        link, child = await self._admit(context, said)
        self._gate.admit(context.peer())
        connection = object()
        await context.write(answer)
        link.up(connection, child)
        reason: str | None = "the connection broke"
        try:
            reason = await converse(link, connection, context.read, context.write, self._receive)
        finally:
            self._lost(link.rank, connection, reason)

    async def _proved(self, context: Any, said: Mapping[str, str]) -> bytes:
        """Let a child prove that it knows the job's token; return this rank's proof, and who it is."""
        if "bcp-nonce" not in said:
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, "a proof of the job's token is missing")
        challenge = secrets.token_hex(16)
        await context.send_initial_metadata([("bcp-challenge", challenge)])
        shown = await context.read()
        token, rank = self._invitation.token, self._hello.rank
        expected = proof_of(token, "child", said, rank, challenge)
        if shown is grpc.aio.EOF or not hmac.compare_digest(shown, expected):
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, "the job's token is wrong")
        who = json.dumps(metadata_of(self._hello)).encode()
        return proof_of(token, "parent", said, rank, challenge) + who

    async def _admit(self, context: Any, said: Mapping[str, str]) -> tuple[Link, Hello]:
        """Return the link of the child that wants to join, and who that is; refuse whoever may not."""
        try:
            child = hello_of(said.items())
        except CredentialsError as error:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        expected = (self._invitation.session, str(self._invitation.place.world_size))
        if (said.get("bcp-session"), said.get("bcp-world-size")) != expected:
            whose = f"session {said.get('bcp-session')} of {said.get('bcp-world-size')} ranks"
            reason = f"{child} is of {whose}, this is session {expected[0]} of {expected[1]} ranks"
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason)
        if child.rank not in self._invitation.place.children:
            reason = f"{child} is no child of rank {self._hello.rank}"
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, reason)
        return await self._renew(context, child, said.get("bcp-node", "")), child

    async def _renew(self, context: Any, child: Hello, node: str) -> Link:
        """Let a child in whose earlier stream has ended, or which has given that up itself."""
        link = self._links[child.rank]
        if link.connection is not None:
            if self._nodes[child.rank] != node:
                reason = f"{child} has joined already, as {link}: two processes claim to be one rank"
                await self._refuse(context, grpc.StatusCode.ALREADY_EXISTS, reason)
            self._lost(child.rank, link.connection, "it has connected anew")
        self._nodes[child.rank] = node
        return link

    async def _refuse(self, context: Any, code: grpc.StatusCode, reason: str) -> None:
        """End a stream with an error; gRPC raises at this."""
        self._gate.strangers.count(self._gate.peer(context.peer()), reason)
        await context.abort(code, reason)
