"""Stands in for ``megatron.training``, which megatron-core's wheel lacks.

The loop has the three names that bcp replaces, and calls them as the loop of Megatron-LM does: at the same moments,
with the same positional and keyword arguments. Model, optimizer, scheduler, groups and random states are those of
megatron-core, with CUDA's names on the CPU. Import this module before ``bcp.integrations.megatron.install``.
"""

# ruff: noqa: ARG001, FBT001, FBT002 -- signatures of Megatron

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import ModuleType
from typing import Any

import torch
from frameworks.cuda_as_cpu import cuda_as_cpu
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator, update_num_microbatches
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_gpt import BATCH, Layout, Net, Trainer, build
from torch import distributed

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it does not go with CUDA's names on the CPU
LOSSES: list[list[Any]] = []
"""Iteration and loss of each step of this process, the same on all ranks."""
DRAWN: list[list[Any]] = []
"""Iteration and a number from torch's generator, drawn in each step of this rank."""
_args: Any = None
_signals: list[int] = []
_trainer: Any = None


def get_args() -> Any:
    return _args


def save_checkpoint(
    iteration: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: Any,
    checkpointing_context: Any = None,
    pipeline_rank: Any = None,
    expert_rank: Any = None,
    tensor_rank: Any = None,
    pipeline_parallel: Any = None,
    expert_parallel: Any = None,
    non_persistent_ckpt: Any = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Any = None,
    release: Any = False,
    tp_group: Any = None,
    pp_group: Any = None,
    dp_cp_group: Any = None,
) -> None:
    raise AssertionError("Megatron's own save was called")


def load_checkpoint(
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: Any = "load",
    strict: Any = True,
    checkpointing_context: Any = None,
    skip_load_to_model_and_opt: Any = False,
    tp_group: Any = None,
    pp_group: Any = None,
    dp_cp_group: Any = None,
) -> Any:
    raise AssertionError("Megatron's own load was called")


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    raise AssertionError("Megatron's own end of a save was called")


def parse_args(given: list[str]) -> Any:
    """Return arguments by the names and with the defaults of Megatron."""
    parser = argparse.ArgumentParser()
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in ("save-interval", "train-iters", "ckpt-step", "exit-interval", "save-retain-interval"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("save", "load", "pretrained-checkpoint", "dataloader-save"):
        parser.add_argument(f"--{name}")
    for name in ("finetune", "no-load-optim", "no-load-rng", "no-save-optim", "exit-signal-handler", "async-save"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("exit-on-missing-checkpoint", "override-opt-param-scheduler", "fp16", "bf16", "skip-train"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--ckpt-format", default="torch_dist")
    parser.add_argument("--dist-ckpt-strictness", default="assume_ok_unexpected")
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args(given)
    args.num_layers, args.hidden_size, args.num_attention_heads, args.num_query_groups = 2, 32, 8, 4
    args.add_position_embedding, args.global_batch_size, args.iteration = False, BATCH, 0
    args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0
    return args


def initialize_megatron(given: list[str]) -> Any:
    """Start the process group, the handler of signals, and Megatron's global settings."""
    global _args  # noqa: PLW0603 -- as there
    _args = args = parse_args(given)
    if "WORLD_SIZE" in os.environ:
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    if args.exit_signal_handler:
        signal.signal(signal.SIGTERM, lambda number, _: _signals.append(number))
    args.data_parallel_size = distributed.get_world_size() // (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    )
    micro = BATCH // args.data_parallel_size
    init_num_microbatches_calculator(distributed.get_rank(), None, BATCH, micro, args.data_parallel_size)
    return args


def setup_model_and_optimizer(checkpointing_context: Any) -> Any:
    """Make model, optimizer and scheduler, and load if there is something to load."""
    global _trainer  # noqa: PLW0603 -- what the steps are taken with
    args = get_args()
    layout = Layout(tp=args.tensor_model_parallel_size, pp=args.pipeline_model_parallel_size)
    with cuda_as_cpu():
        _trainer = build(Net(layers=args.num_layers), layout, seed=5)
    torch.manual_seed(5)
    for layer in (layer for module in _trainer.modules for layer in module.decoder.layers):
        layer.hidden_dropout = layer.self_attention.core_attention.attention_dropout.p = args.dropout
    model, optimizer = _trainer.chunks, _trainer.optimizer
    samples = BATCH * args.train_iters
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = 1e-2, 1e-3
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 1e-2, 1e-3, BATCH * 2, samples, "cosine", 0.1, 0.1, samples, "constant"
    )
    if args.load is not None or args.pretrained_checkpoint is not None:
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(
            model,
            optimizer,
            scheduler,
            checkpointing_context=checkpointing_context,
            skip_load_to_model_and_opt=False,
        )
    else:
        args.iteration = 0
        args.num_floating_point_operations_so_far = 0
    return model, optimizer, scheduler


def save_checkpoint_and_time(
    iteration: int, model: Any, optimizer: Any, scheduler: Any, operations: Any, context: Any, iterator: Any
) -> None:
    save_checkpoint(
        iteration,
        model,
        optimizer,
        scheduler,
        operations,
        context,
        non_persistent_ckpt=False,
        train_data_iterator=iterator,
        preprocess_common_state_dict_fn=None,
        tp_group=None,
        pp_group=None,
        dp_cp_group=None,
    )


def train_step(iteration: int, trainer: Trainer) -> None:
    """Train on the batch at which the consumed samples stand; note the mean loss."""
    with cuda_as_cpu():
        loss = trainer.step(get_args().consumed_train_samples // BATCH)
    losses: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(losses, loss)
    known = [each for each in losses if each is not None]
    LOSSES.append([iteration, sum(known) / len(known)])
    DRAWN.append([iteration, torch.rand(()).item()])


def checkpoint_and_decide_exit(
    model: Any, optimizer: Any, scheduler: Any, iteration: int, operations: Any, context: Any, iterator: Any
) -> bool:
    """Save if it is time to, and say whether training ends, on all ranks alike."""
    args, given = get_args(), (model, optimizer, scheduler, operations, context, iterator)
    if args.exit_signal_handler:
        heard: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(heard, bool(_signals))
        if any(heard):
            if args.save:
                save_checkpoint_and_time(iteration, *given)
            return True
    saved = bool(args.save and args.save_interval and iteration % args.save_interval == 0)
    if saved:
        save_checkpoint_and_time(iteration, *given)
    if args.exit_interval and iteration % args.exit_interval == 0:
        if args.save and not saved:
            save_checkpoint_and_time(iteration, *given)
        return True
    return False


def train(model: Any, optimizer: Any, scheduler: Any, iterator: Any, context: Any) -> tuple[int, Any]:
    args = get_args()
    iteration, operations, should_exit = args.iteration, args.num_floating_point_operations_so_far, False
    while iteration < args.train_iters:
        maybe_finalize_async_save(blocking=False)
        update_num_microbatches(args.consumed_train_samples, consistency_check=False, verbose=True)
        next(iterator)
        train_step(iteration + 1, _trainer)
        scheduler.step(increment=BATCH)
        iteration += 1
        args.consumed_train_samples += BATCH
        operations += 1e6
        should_exit = checkpoint_and_decide_exit(model, optimizer, scheduler, iteration, operations, context, iterator)
        if should_exit:
            break
    maybe_finalize_async_save(blocking=True, terminate=True)
    if should_exit:
        sys.exit(0)
    return iteration, operations


def pretrain(given: list[str]) -> None:
    """Run the job; the real one takes providers of model and data, and reads ``sys.argv``."""
    args = initialize_megatron(given)
    context: dict[str, Any] = {}
    model, optimizer, scheduler = setup_model_and_optimizer(context)
    data = torch.utils.data.DataLoader(range(BATCH * 1000))
    iterator = iter(data)  # draws a seed from torch's generator
    if not args.skip_train:
        iteration, operations = train(model, optimizer, scheduler, iterator, context)
        if args.save and iteration != 0 and iteration % args.save_interval != 0:
            save_checkpoint_and_time(iteration, model, optimizer, scheduler, operations, context, iterator)
    maybe_finalize_async_save(blocking=True, terminate=True)


def final() -> float:
    """Return the sum of all parameters; collective."""
    total = torch.tensor(0.0, dtype=torch.float64)
    for parameter in (parameter for module in _trainer.modules for parameter in module.parameters()):
        alone = parallel_state.get_tensor_model_parallel_world_size() > 1 and not getattr(
            parameter, "tensor_model_parallel", False
        )
        if not (alone and parallel_state.get_tensor_model_parallel_rank()):
            total += parameter.detach().double().sum()
    distributed.all_reduce(total)
    return float(total) / parallel_state.get_data_parallel_world_size()


def tracked() -> float:
    """Return a number from the tracker of the tensor-parallel random states."""
    with cuda_as_cpu(), tensor_parallel.get_cuda_rng_tracker().fork():
        return float(torch.rand(()))


_loop = sys.modules[__name__]
_package = ModuleType("megatron.training")
_package.training, _package.pretrain, _package.get_args = _loop, pretrain, get_args  # type: ignore[attr-defined]
sys.modules["megatron.training"], sys.modules["megatron.training.training"] = _package, _loop
