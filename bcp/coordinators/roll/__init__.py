"""The roll call: finds the ranks of this job in a store that may hold keys of processes that have ended.

torchrun may keep its store while it restarts the workers, and no number that it gives them is the same on all hosts.
So no key is believed for its name. Rank 0 draws a nonce and shows it. The others show nonces of their own beside it.
Rank 0 answers each beside the nonce that it showed. A process that repeats a nonce has seen it, and so is alive.
"""

from bcp.coordinators.roll.keys import Answer
from bcp.coordinators.roll.roll import Roll

__all__ = ["Answer", "Roll"]
