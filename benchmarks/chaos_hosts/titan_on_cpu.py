"""torchtitan's debug Llama on CPU and gloo: replaces what torchtitan asks of a GPU. bcp has no part in it.

Import it before any other module of torchtitan: the first part of the file has to come first.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
from torchtitan.tools import utils


class Anything(types.ModuleType):
    """Stands for kernels that import triton, and that no CPU runs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)


KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
sys.modules[KERNELS] = Anything(KERNELS)


ANSWERS = {
    "get_device_name": lambda *_: "cpu",
    "device_count": lambda: 2,
    "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 34, name="cpu"),
    "current_device": lambda: torch.device("cpu"),
    "set_device": lambda _: None,
}


class Device(types.ModuleType):
    """Answers for the module of an accelerator."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ANSWERS or hasattr(torch.cpu, name):
            return ANSWERS.get(name) or getattr(torch.cpu, name)
        return lambda *_, **__: {} if name.startswith("memory_stats") else 0


device = Device("cpu_device")
utils.device_type, utils.device_module = "cpu", device
utils.get_local_device = lambda *_, **__: torch.device("cpu")

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402 -- asks for the device
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as distributed_utils  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402

plain = dist.ReduceOp.SUM  # gloo has no PREMUL_SUM
collectives._get_gradient_divide_factors = lambda *_, **__: (None, None, plain, plain)  # noqa: SLF001 -- see above
distributed_utils.set_pg_timeouts = lambda *_, **__: None
FORWARD = attention.FlexAttention.forward


def attend(dropout: float) -> Callable[..., torch.Tensor]:
    """Stand for flex attention, which needs a GPU or a compiler. Dropout shows the random states in the losses."""

    def forward(_: Any, q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **__: Any) -> Any:
        query, key, value = (head.transpose(1, 2) for head in (q, k, v))
        settings = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa, "dropout_p": dropout}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **settings).transpose(1, 2)

    return update_wrapper(forward, FORWARD)  # its names of arguments


class Toy(torch.utils.data.IterableDataset[Any]):
    """Endless samples of one reader of torchtitan's own loader."""

    def __init__(self, rank: int) -> None:
        self.rank, self.number = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.number += 1
            yield sample(self.number * 97 + self.rank)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def sample(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tokens of a seed, and those behind them."""
    tokens = torch.randint(0, 2000, (33,), generator=torch.Generator().manual_seed(seed))
    return {"input": tokens[:-1]}, tokens[1:]


class HostLoader(ParallelAwareDataloader):
    """The loader of torchtitan: its state belongs to one reader."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **__: Any) -> None:
        super().__init__(Toy(dp_rank), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    """Stands for the tokenizer: all samples are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **__: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def on_cpu(config: Any, dropout: float = 0.0) -> Any:
    """Make a config small, and exact in float32; dropout is that of the attention in this process."""
    attention.FlexAttention.forward = attend(dropout)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.tokenizer, config.hf_assets_path = NoTokenizer.Config(), ""
    config.training.local_batch_size, config.training.seq_len = 2, 32
    config.training.mixed_precision_param, config.training.disable_cuda_graphs = "float32", True
    config.validator.enable, config.parallelism.spmd_backend = False, "partial_dtensor"
    config.debug.seed, config.comm.trace_buf_size, config.lr_scheduler.total_steps = 0, 0, 6
    return config
