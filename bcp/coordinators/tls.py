"""Certificates of a job: one setting for the tree's streams and for the sockets of bulk data."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from typing import NamedTuple

from bcp.errors import InputError

__all__ = ["Tls", "TlsContexts"]


class TlsContexts(NamedTuple):
    """Settings of both ends of a TLS connection of bulk data.

    Attributes:
        dialer: of the rank that connects.
        listener: of the rank that is connected to.
        target_name: the name in the listener's certificate; None: the address that is dialled.
    """

    dialer: ssl.SSLContext
    listener: ssl.SSLContext
    target_name: str | None


@dataclass(frozen=True, slots=True)
class Tls:
    """Mutual TLS: every rank shows a certificate, and takes only those of the one authority.

    It covers the streams of the tree and the bulk data of ``all_to_all``. A rank dials and is dialled, so its
    certificate has to be good for clients and for servers.

    Attributes:
        ca: the certificate of the authority that signed the ranks' certificates, PEM.
        certificate: this rank's, PEM, with intermediate ones behind it.
        key: this rank's private key, PEM, not encrypted.
        target_name: the name that the others' certificates are for, where it is not the address that is dialled.

    Raises:
        InputError: one of them is not PEM, or certificate and key do not belong together.

    Example::

        tls = Tls(ca=Path("ca.pem").read_bytes(), certificate=..., key=..., target_name="ranks.example")
        coordinator = GrpcCoordinator.over(tls=tls)
    """

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    target_name: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no connection could use."""
        self.contexts()

    def contexts(self) -> TlsContexts:
        """Return the settings for bulk data: TLS 1.3, both sides show certificates. Raises InputError."""
        dialer, listener = (ssl.SSLContext(side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
        for context in (dialer, listener):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: ``ca`` may be an intermediate authority
            try:
                context.load_verify_locations(cadata=self.ca.decode("ascii"))
                _load_own(context, self.certificate, self.key)
            except (ssl.SSLError, ValueError) as error:
                raise InputError(
                    f"the certificates of Tls(...) cannot be used: {error}; give the authority's certificate, this "
                    "rank's certificate, and the key that belongs to it, each as PEM"
                ) from error
        listener.num_tickets = 0  # a dialer never reads, and closing a socket with unread bytes resets it
        return TlsContexts(dialer, listener, self.target_name)

    def check(self) -> None:
        """Let this rank shake hands with itself, in memory: gRPC closes a bad certificate's connection without a word.

        Raises:
            InputError: no rank would accept this rank's certificate: it has expired, or ``ca`` has not signed it.

        """
        dialer, listener, _ = self.contexts()
        dialer.check_hostname = False
        to_dialer, to_listener = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = (
            dialer.wrap_bio(to_dialer, to_listener),
            listener.wrap_bio(to_listener, to_dialer, server_side=True),
        )
        for side in (*sides, *sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", "") or error.reason or str(error)
                raise InputError(f"no rank would accept this rank's own certificate: {reason}; renew it") from error


def _load_own(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a certificate and its key by way of anonymous memory: OpenSSL reads files, and no key goes to a disk."""
    memory = os.memfd_create("bcp-tls", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(key + b"\n" + certificate)
        context.load_cert_chain(f"/proc/self/fd/{memory}", password=_refuse_to_ask)
    finally:
        os.close(memory)


def _refuse_to_ask() -> str:
    """Keep OpenSSL from asking for a password on the terminal."""
    raise ValueError("the private key is encrypted")
