"""gRPC, imported in the one way that suits a process that forks; import it from here."""

from __future__ import annotations

import os

# Before the import, which reads it. gRPC's own handlers cannot work while a loop is polling: with them, every fork, as
# of a dataloader's workers, prints "skipping fork() handlers" and nothing else happens (grpcio 1.85).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import grpc.aio

__all__ = ["grpc"]
