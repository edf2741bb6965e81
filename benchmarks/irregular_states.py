"""The states that ``benchmarks.irregular`` measures, and the two ways to get at each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from bcp.planners import planner

__all__ = ["Ways", "fsdp1_ways", "megatron_ways", "megatron_without_cuda"]

WIDTH = 512


@dataclass(frozen=True, slots=True)
class Ways:
    """Two ways to make a state reshardable.

    Attributes:
        elements: parameters of the whole model.
        states: what is saved.
        official: the framework's own, which gathers.
        bcp: the planner's.
    """

    elements: int
    states: Mapping[str, object]
    official: Callable[[], object]
    bcp: Callable[[], object]


class Block(nn.Module):
    """A feed-forward block with odd sizes, as shards of real models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH + 3), nn.Linear(4 * WIDTH + 3, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus something."""
        return self.mix(x + self.down(torch.relu(self.up(self.norm(x)))))  # type: ignore[no-any-return]  # nn.Module


def fsdp1_ways(layers: int, *, use_orig_params: bool) -> Ways:
    """Train one step under FSDP1, every block a flat parameter of its own."""
    plain = nn.Sequential(*(Block() for _ in range(layers)))
    elements = sum(parameter.numel() for parameter in plain.parameters())
    model = FullyShardedDataParallel(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    states = {"model": model, "optimizer": optimizer}
    fsdp1 = planner("fsdp1", states)

    def official() -> object:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)

    return Ways(elements, states, official, lambda: fsdp1.local_shards(states))


def megatron_without_cuda() -> AbstractContextManager[None]:
    """Return the context in which Megatron, which asks for CUDA by name, runs on the CPU."""
    from tests.frameworks.cuda_as_cpu import cuda_as_cpu  # noqa: PLC0415 -- imports Megatron

    return cuda_as_cpu()


def megatron_ways(layers: int) -> Ways:
    """Make a GPT of Megatron-core under its distributed optimizer, data parallel, and step it once.

    Gradients are made up: nothing is run forward, so that what is measured does not depend on Megatron's kernels.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: PLC0415 -- extra
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415 -- extra

    module = _gpt(layers)
    of_ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(module.config, of_ddp, module)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [chunk])
    for parameter in module.parameters():
        parameter.main_grad.fill_(1e-3)  # type: ignore[attr-defined]  # of Megatron
    optimizer.step()
    states = {"model": chunk, "optimizer": optimizer}
    megatron = planner("megatron", states)

    def official() -> object:
        reshardable = {"distrib_optim_sharding_type": "fully_reshardable"}
        model = chunk.sharded_state_dict()
        return model, optimizer.sharded_state_dict(model, is_loading=False, metadata=reshardable)

    elements = sum(parameter.numel() for parameter in module.parameters())
    return Ways(elements, states, official, lambda: megatron.local_shards(states))


def _gpt(layers: int) -> nn.Module:
    """Make a Llama-like model, all of it on every rank."""
    from megatron.core import parallel_state  # noqa: PLC0415 -- extra
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415 -- extra
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: PLC0415 -- extra
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: PLC0415 -- extra
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415 -- extra

    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=WIDTH,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=3 * WIDTH,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    model: nn.Module = GPTModel(config, spec, vocab_size=4096, max_sequence_length=128, position_embedding_type="rope")
    return model
