"""bcp in the Trainer of Lightning: a callback that owns a :class:`bcp.Run`, and strategies that save with it.

- ``callback``: :class:`BcpCheckpoint`. It hears of steps and validations, and tells the run when to save and to stop.
- ``strategies``: the part in front of a strategy of Lightning. Lightning saves and loads by its strategy, and this part
  hands both to the callback.
"""

from bcp.integrations.lightning.callback import BcpCheckpoint

__all__ = ["BcpCheckpoint"]
