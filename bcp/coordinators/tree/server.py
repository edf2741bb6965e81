"""The parent's end: lets those in that show the job's token and belong here."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any

from bcp._log import log
from bcp.coordinators.hello import Hello
from bcp.coordinators.tree.edge import METHOD, SERVICE, CredentialsError, Receive, Tls, converse, hello_of, metadata_of
from bcp.coordinators.tree.edge import server_options as options_for
from bcp.coordinators.tree.grpc_import import grpc
from bcp.coordinators.tree.link import Link
from bcp.coordinators.tree.rendezvous import Invitation
from bcp.errors import InputError

__all__ = ["Server", "credentials_of"]

_STOP_SECONDS = 1.0  # how long streams have to end by themselves


def credentials_of(invitation: Invitation, node: str) -> list[tuple[str, str]]:
    """Return what a rank shows that wants to be let in; ``node`` tells it from others that claim its rank."""
    return [
        ("bcp-token", invitation.token),
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

    def __repr__(self) -> str:
        """Show how many children are here."""
        children = self._invitation.place.children
        here = sum(self._links[child].connection is not None for child in children)
        return f"<Server of {self._hello}: {here} of {len(children)} children are here>"

    async def start(self, address: str, tls: Tls | None) -> int:
        """Listen on this address, and return the port. Raises InputError where that is not possible."""
        self._server = grpc.aio.server(options=options_for(len(self._invitation.place.children)))
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, tls.of_server())
        except RuntimeError as error:
            raise InputError(f"{self._hello} cannot listen on {address}: {error}; give it another address") from error
        await self._server.start()
        return int(port)

    async def aclose(self) -> None:
        """End all connections, and stop to listen."""
        if self._server is not None:
            await self._server.stop(_STOP_SECONDS)  # all at once would make gRPC print a line on the other side

    async def _join(self, _requests: object, context: Any) -> None:
        """Serve one stream from beginning to end."""
        link = await self._admit(context)
        connection = object()
        child = hello_of(context.invocation_metadata())
        await context.send_initial_metadata(metadata_of(self._hello))
        link.up(connection, child)
        reason: str | None = "the connection broke"
        try:
            reason = await converse(link, connection, context.read, context.write, self._receive)
        finally:
            self._lost(link.rank, connection, reason)

    async def _admit(self, context: Any) -> Link:
        """Return the link of the child that wants to join; refuse whoever may not."""
        said = {key: str(value) for key, value in context.invocation_metadata()}
        if not hmac.compare_digest(said.get("bcp-token", "").encode(), self._invitation.token.encode()):
            what = "wrong" if "bcp-token" in said else "missing"
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, f"the job's token is {what}")
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
        return await self._renew(context, child, said.get("bcp-node", ""))

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
        log.warning(
            "refused a connection to the coordinator", peer=context.peer(), reason=reason, rank=self._hello.rank
        )
        await context.abort(code, reason)
