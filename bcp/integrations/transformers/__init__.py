"""bcp in the Trainer of Hugging Face transformers, and in each class that inherits it, as those of TRL.

- ``callback``: :class:`BcpCallback`. It owns the :class:`bcp.Run` and knows the states.
- ``trainer``: :class:`BcpTrainer`, whose methods stand in the place of a Trainer's own, and :func:`attach`.
"""

from bcp.integrations.transformers.callback import BcpCallback
from bcp.integrations.transformers.trainer import BcpTrainer, attach

__all__ = ["BcpCallback", "BcpTrainer", "attach"]
