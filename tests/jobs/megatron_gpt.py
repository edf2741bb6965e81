"""Small real GPT models of Megatron-core, in any parallel layout of four processes, with the same values in all.

What a rank's parameters are of the logical ones is told here from Megatron's own parallel state and parameter
attributes, not from its ``sharded_state_dict`` nor by ``bcp``.
"""

# ruff: noqa: PLC0415 -- the parent of the ranks does not import Megatron, which takes seconds and warns

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

BATCH, LENGTH = 4, 8

NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms go by the names that they have in Transformer Engine's fused layers."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups; what is left of four ranks is data parallel."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1

    def __str__(self) -> str:
        return "-".join(f"{name}{size}" for name, size in vars(self).items() if size > 1) or "dp"


@dataclass(frozen=True)
class Net:
    """What is trained, and how."""

    llama: bool = True
    tied: bool = False
    experts: int = 0
    bf16: bool = False
    distopt: bool = True
    overlap: bool = False
    instances: int = 1
    vocab: int = 96
    layers: int = 4


@dataclass
class Trainer:
    """One rank of a training job."""

    net: Net
    layout: Layout
    chunks: list[Any]
    optimizer: Any
    steps: int = 0
    modules: list[Any] = field(default_factory=list)

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.chunks, "optimizer": self.optimizer}

    def step(self, number: int) -> float | None:
        """Train on the global batch of that number; return the loss of this rank's part, where it is computed."""
        from megatron.core import parallel_state as ps
        from megatron.core.distributed import finalize_model_grads

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        size = ps.get_data_parallel_world_size()
        mine = batch(self.net, number).chunk(size)[ps.get_data_parallel_rank()]
        loss = self._forward_backward(mine)
        finalize_model_grads(self.chunks)
        self.optimizer.step()
        for part in (part for module in self.modules for part in module.modules()):
            if hasattr(part, "token_dispatcher"):
                part.token_dispatcher.local_probs = None  # the graph in it would keep the groups, even from gc
        return loss

    def _forward_backward(self, ids: torch.Tensor) -> float | None:
        """Send one micro batch through all stages and back, over chunks and ranks in pipeline order."""
        from megatron.core import parallel_state as ps

        rank, last = ps.get_pipeline_model_parallel_rank(), self.layout.pp * self.layout.chunks - 1
        turns = [stage for stage in range(last + 1) if stage % self.layout.pp == rank]
        before, after = ps.get_pipeline_model_parallel_prev_rank, ps.get_pipeline_model_parallel_next_rank
        dtype = torch.bfloat16 if self.net.bf16 else torch.float32
        shape = (LENGTH // (self.layout.tp if self.chunks[0].config.sequence_parallel else 1), len(ids), 32)
        ins: dict[int, torch.Tensor] = {}
        outs: dict[int, torch.Tensor] = {}
        for stage in turns:
            chunk = self.chunks[stage // self.layout.pp]
            if stage:
                ins[stage] = torch.empty(shape, dtype=dtype)
                dist.recv(ins[stage], before())
                self.modules[stage // self.layout.pp].set_input_tensor(ins[stage].requires_grad_())
            outs[stage] = run(chunk, ids, labelled=stage == last)
            if stage < last:
                dist.send(outs[stage].detach().contiguous(), after())
        for stage in reversed(turns):
            if stage == last:
                outs[stage].backward()
            else:
                gradient = torch.empty(shape, dtype=outs[stage].dtype)
                dist.recv(gradient, after())
                outs[stage].backward(gradient)
            if stage:
                dist.send(ins[stage].grad.contiguous(), before())
        return float(outs[last].detach()) if last in outs else None


def batch(net: Net, number: int) -> torch.Tensor:
    """Return the token ids of one global batch; those of a small vocabulary, so that a padded one sees the same."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, min(net.vocab, 90), (BATCH, LENGTH), generator=generator)


def run(chunk: Any, ids: torch.Tensor, *, labelled: bool) -> torch.Tensor:
    """Return a chunk's output: hidden states, or the mean loss."""
    positions = torch.arange(LENGTH).repeat(len(ids), 1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    out: torch.Tensor = chunk(ids, positions, mask, labels=ids.roll(-1, 1) if labelled else None)
    return out.mean() if labelled else out


def build(net: Net, layout: Layout, seed: int) -> Trainer:
    """Make model, DDP and optimizer; equal seeds give equal logical values in every layout."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    modules = make_modules(net, layout, seed)
    of_ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=net.distopt,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=net.overlap,
        overlap_param_gather=net.overlap,
        num_distributed_optimizer_instances=net.instances,
        bucket_size=6000 if net.overlap else None,
    )
    chunks = [DistributedDataParallel(module.config, of_ddp, wrapped(net, module)) for module in modules]
    dtype = torch.bfloat16 if net.bf16 else torch.float32
    of_adam = {"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.1, "clip_grad": 0.0}
    config = OptimizerConfig(
        optimizer="adam",
        bf16=net.bf16,
        params_dtype=dtype,
        use_distributed_optimizer=net.distopt,
        overlap_param_gather=net.overlap,
        **of_adam,
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    return Trainer(net, layout, chunks, optimizer, modules=modules)


def wrapped(net: Net, module: Any) -> Any:
    """Return the module in the precision that is trained."""
    from megatron.core.transformer.module import Float16Module

    return Float16Module(module.config, module) if net.bf16 else module


def make_modules(net: Net, layout: Layout, seed: int) -> list[Any]:
    """Make this rank's chunks of the model, after setting up the process groups anew."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    set_up_groups(layout, net.instances)
    model_parallel_cuda_manual_seed(seed + 1)
    config = config_of(net, layout)
    stages = range(layout.chunks) if layout.chunks > 1 else [None]
    with mock.patch.object(WrappedTorchNorm, "__new__", norm):
        modules = [make_module(net, config, stage) for stage in stages]
    with torch.no_grad():
        for module in modules:
            for fqn, parameter in logical_names(net, module):
                parameter.copy_(mine_of(net, fqn, parameter, seed))
    return modules


def make_module(net: Net, config: Any, stage: int | None) -> Any:
    """Make one chunk of the model; ``stage`` says which of this rank's several."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=net.experts or None, normalization=config.normalization),
        vocab_size=net.vocab,
        max_sequence_length=LENGTH,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=net.tied,
        position_embedding_type="rope" if net.llama else "learned_absolute",
        vp_stage=stage,
    )


def norm(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> torch.nn.Module:
    """Make torch's norm under sequence parallelism, too, where Megatron asks for Transformer Engine's."""
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    made = kind(hidden_size, eps=eps)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron sums its gradient
    return made


def config_of(net: Net, layout: Layout) -> Any:
    """Return Megatron's configuration of the model."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # without Transformer Engine, the name is used unbound
        moe_utils.te_general_gemm = None
    dtype = torch.bfloat16 if net.bf16 else torch.float32
    moe = {
        "num_moe_experts": net.experts,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_ffn_hidden_size": 48,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    unfused = ("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion")
    return TransformerConfig(
        num_layers=net.layers,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=4 if net.llama else None,
        ffn_hidden_size=48,
        gated_linear_unit=net.llama,
        activation_func=torch.nn.functional.silu if net.llama else torch.nn.functional.gelu,
        normalization="RMSNorm" if net.llama else "LayerNorm",
        add_bias_linear=not net.llama,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=net.bf16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        sequence_parallel=layout.tp > 1 and (net.llama or net.experts > 0),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **(moe if net.experts else {}),
        **dict.fromkeys(unfused, False),
    )


def set_up_groups(layout: Layout, instances: int) -> None:
    """Make the process groups of a layout, in place of those of the last one."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.common.embeddings import RotaryEmbedding

    ps.destroy_model_parallel()
    RotaryEmbedding.forward.cache_clear()  # it knows the last jobs' models
    ps.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
        num_distributed_optimizer_instances=instances,
    )


def logical_names(net: Net, module: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of an unwrapped chunk by their names in the whole model."""
    from megatron.core import parallel_state as ps

    first = module.decoder.layers[0].layer_number - 1
    expert = ps.get_expert_model_parallel_rank() * net.experts // ps.get_expert_model_parallel_world_size()
    for local, parameter in module.named_parameters():
        name = re.sub(r"decoder\.layers\.(\d+)", lambda at: f"decoder.layers.{int(at[1]) + first}", local)
        name = re.sub(r"local_experts\.(\d+)", lambda at: f"experts.{int(at[1]) + expert}", name)
        for norm_of, fused in NORMS.items():
            name = name.replace(norm_of, fused)
        tied = net.tied and name == "output_layer.weight"
        yield "embedding.word_embeddings.weight" if tied else name, parameter


def mine_of(net: Net, fqn: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
    """Return this rank's part of a logical parameter's initial value."""
    from megatron.core import parallel_state as ps

    size, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    if ".experts." in fqn:
        size, rank = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
    elif not getattr(parameter, "tensor_model_parallel", False):
        size, rank = 1, 0
    dim = getattr(parameter, "partition_dim", 0) if size > 1 else 0
    shape = list(parameter.shape)
    shape[dim] *= size
    whole = initial(fqn, shape, seed)
    if net.llama and "linear_fc1" in fqn and size > 1:  # gate and up are cut each
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim)[rank]


def initial(fqn: str, shape: list[int], seed: int) -> torch.Tensor:
    """Return the initial value of a logical parameter; a longer one begins with the values of a shorter one."""
    generator = torch.Generator().manual_seed(zlib.crc32(fqn.encode()) + seed)
    values = (torch.rand(shape, generator=generator) - 0.5) * 0.3
    return values + 1 if "norm" in fqn and fqn.endswith("weight") else values
