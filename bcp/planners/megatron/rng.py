"""Megatron's random number states, of which every pipeline and tensor parallel rank has its own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bcp.runtime.imports import imported
from bcp.state.random_states import set_tracked, tracked

__all__ = ["MegatronRng"]

_KEY = "rng_state"


class MegatronRng:
    """The random states of Python, numpy, torch, CUDA and Megatron's tracker, to be saved along with the model.

    ::

        bcp.save(path, {"model": [*chunks, MegatronRng()], "optimizer": optimizer})

    They are stored once for every (pipeline, tensor) rank, by the first of its data-parallel ranks, and come back on
    all of these. With expert parallelism they are stored once for every rank, as in Megatron's own checkpoints. A load
    into other sizes of these groups finds some of them missing, which a strict load says; without ``strict`` the states
    stay as they are.
    """

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the states as one of Megatron's ``ShardedObject``."""
        mapping = imported("megatron.core.dist_checkpointing.mapping")
        groups = imported("megatron.core.parallel_state")
        sizes = [groups.get_pipeline_model_parallel_world_size(), groups.get_tensor_model_parallel_world_size()]
        ranks = [groups.get_pipeline_model_parallel_rank(), groups.get_tensor_model_parallel_rank()]
        replica = groups.get_data_parallel_rank(with_context_parallel=True)
        if groups.get_expert_model_parallel_world_size() > 1:
            sizes.append(groups.get_data_parallel_world_size(with_context_parallel=True))
            ranks.append(replica)
            replica = 0
        return {_KEY: mapping.ShardedObject(_KEY, _states(), tuple(sizes), tuple(ranks), replica_id=replica)}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = False) -> None:  # noqa: ARG002 -- as a module
        """Put the states back."""
        saved = state[_KEY]
        random.setstate(saved["python"])
        kind, keys, *rest = saved["numpy"]
        np.random.set_state((kind, keys.numpy(), *rest))  # noqa: NPY002 -- the global state is what Megatron draws from
        torch.set_rng_state(saved["torch"])
        if "cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
        set_tracked(_tracker(), saved["tracker"])


def _states() -> dict[str, Any]:
    """Return all states, as values that need no trust to be read."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 -- see above
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys)), *rest),
        "torch": torch.get_rng_state(),
        "tracker": tracked(_tracker()),
    }
    return {**states, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def _tracker() -> Any:
    return imported("megatron.core.tensor_parallel").get_cuda_rng_tracker()
