"""The part of a model that is trained, as a state of its own."""

from __future__ import annotations

import torch

from bcp.errors import StateError
from bcp.state.modules import is_fsdp1
from bcp.state.names import cleaner

__all__ = ["trainable"]


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that training changes, for ``states["model"]``: adapters without their base.

    Checkpoints of a fine-tuned model are then as small as its adapters. These tensors are the parameters that need a
    gradient, and the persistent buffers of the modules that have one. Names are those of the model itself, without
    wrappers such as DistributedDataParallel. Parameters may be DTensors, as those of FSDP2.

    The frozen rest has to come from elsewhere before the load, and has to be the same: a checkpoint does not know it.

    Args:
        model: with its final shape: the tensors are the model's own, and a load writes into them.

    Raises:
        StateError: no parameter needs a gradient; or FSDP1 or ZeRO-3 keeps them in a form of its own.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> _ = model[0].requires_grad_(False)
        >>> sorted(bcp.trainable(model))
        ['1.bias', '1.weight']

    """
    if any(map(is_fsdp1, model.modules())):
        raise StateError("FSDP1 has made flat parameters: pass the whole model, or shard it with FSDP2 (fully_shard)")
    clean, found = cleaner(model), dict[str, torch.Tensor]()
    for prefix, module in model.named_modules():
        own = {name: tensor for name, tensor in module.named_parameters(recurse=False) if tensor.requires_grad}
        if not own:
            continue
        if any(hasattr(tensor, "ds_id") for tensor in own.values()):
            raise StateError(
                f"{prefix or 'the model'} has parameters that ZeRO-3 keeps elsewhere: pass the engine of DeepSpeed"
            )
        stays = module._non_persistent_buffers_set  # noqa: SLF001 -- torch has no other list of them
        own |= {name: buffer for name, buffer in module.named_buffers(recurse=False) if name not in stays}
        found |= {clean(f"{prefix}.{name}" if prefix else name): tensor for name, tensor in own.items()}
    if not found:
        raise StateError("no parameter of the model needs a gradient; call bcp.trainable() once it is ready to train")
    return found
