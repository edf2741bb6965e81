"""The unsharded twin: the whole model in every process, trained by plain torch on whole batches."""

from __future__ import annotations

import torch
from frameworks.cuda_as_cpu import cuda_as_cpu
from megatron_gpt import Layout, Net, batch, logical_names, make_modules, run, wrapped

Values = dict[tuple[str, str], torch.Tensor]


def train(net: Net, seed: int, steps: int) -> tuple[list[float], Values]:
    """Take steps; return the loss before each, and all tensors by the names that a checkpoint has for them."""
    with cuda_as_cpu():
        (module,) = make_modules(net, Layout(), seed)
        model = wrapped(net, module)
        named = dict(logical_names(net, module))
        masters = {fqn: p.detach().float().clone() if net.bf16 else p for fqn, p in named.items()}
        optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, eps=1e-4, weight_decay=0.1)
        losses = []
        for number in range(steps):
            model.zero_grad()
            loss = run(model, batch(net, number), labelled=True)
            loss.backward()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                for fqn, parameter in named.items():
                    masters[fqn].grad = parameter.grad.float()
                optimizer.step()
                for fqn, parameter in named.items():
                    parameter.copy_(masters[fqn])
    return losses, values_of(net, named, masters, optimizer)


def values_of(
    net: Net,
    named: dict[str, torch.nn.Parameter],
    masters: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> Values:
    """Return parameters, masters and moments."""
    found: Values = {}
    for fqn, parameter in named.items():
        found["model", fqn] = parameter.detach().clone()
        if net.bf16:
            found["optimizer", f"state.{fqn}.master_param"] = masters[fqn].clone()
        for key, value in optimizer.state[masters[fqn]].items():
            found["optimizer", f"state.{fqn}.{key}"] = value.clone()
    return found
