"""Checkpoints of bcp in torchtitan, by its extension point for checkpoint managers.

- ``manager``: :class:`BcpCheckpointManager`, whose hooks torchtitan calls.
- ``settings``: the hooks and fields that it knows, and what it refuses.
- ``weights``: the model alone, as it begins a run and as it is exported.
"""

from bcp.integrations.torchtitan.manager import BcpCheckpointManager

__all__ = ["BcpCheckpointManager"]
