"""Proof that somebody knows a secret, which does not show it."""

from __future__ import annotations

import hmac
import json
import secrets

__all__ = ["new_token", "proof"]


def new_token() -> str:
    """Return a secret that nobody can guess."""
    return secrets.token_hex(16)


def proof(secret: bytes, side: str, *facts: object) -> bytes:
    """Return the HMAC-SHA256 of a side's name and of facts that both sides know, 32 bytes.

    Both sides' nonces are among the facts, so no proof is good for a second connection. The name of the side keeps one
    side from sending the other's proof back to it.

    Example::

        proof(token, "dials", 1, 0, nonce, challenge)  # rank 1 dials rank 0
    """
    return hmac.digest(secret, json.dumps([side, *facts]).encode(), "sha256")
