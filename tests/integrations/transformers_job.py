"""transformers_job.py MODE FOLDER [resume]: a tiny Llama in 12 steps with a save every 4.

MODE: plain, still (no dropout), best, highest (this loss is best), only-best, peft, sft, fsdp2, zero2, zero3,
or several, joined by "+".
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from host_side import report, save_options, tiny_llama

torch.set_num_threads(1)
MODES, FOLDER, *ASKED = sys.argv[1].split("+"), Path(sys.argv[2]), *sys.argv[3:]
WORLD = int(os.environ.get("WORLD_SIZE", "1"))

if "fsdp2" in MODES:  # accelerate takes FSDP on accelerators only
    import accelerate.state
    from accelerate.utils import DistributedType

    original = accelerate.state.AcceleratorState.__init__

    def patched(self: Any, *values: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        original(self, *values, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    accelerate.state.AcceleratorState.__init__ = patched

from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from bcp.integrations.transformers import attach  # noqa: E402

CONFIG = tiny_llama(vocab_size=128, attention_dropout=0.0 if "still" in MODES else 0.1)


class Data(torch.utils.data.Dataset):
    """64 rows of 16 tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 126, (16,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": tokens, "labels": tokens}


class Signal(TrainerCallback):
    """Sends SIGTERM to this process in a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)


def arguments() -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "output_dir": str(FOLDER),
        "per_device_train_batch_size": 4 // WORLD,
        "max_steps": 12,
        "save_steps": 4,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "learning_rate": 1e-2,
        "seed": 0,
        "disable_tqdm": True,
        "optim": "adamw_torch",
        "ddp_backend": "gloo" if WORLD > 1 else None,
    }
    if "fsdp2" in MODES:
        chosen["fsdp"] = True
        chosen["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "reshard_after_forward": True,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        if transformers.__version__ < "5":  # the version is for accelerate; the rest is for accelerators, and a default
            os.environ |= {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
            chosen["fsdp"] = "full_shard auto_wrap"
            chosen["fsdp_config"] |= {"sync_module_states": "false", "cpu_ram_efficient_loading": "false"}
    for stage in (2, 3):
        if f"zero{stage}" in MODES:
            chosen["deepspeed"] = {
                "train_micro_batch_size_per_gpu": "auto",
                "zero_optimization": {"stage": stage},
                "gradient_accumulation_steps": 1,
                "zero_allow_untested_optimizer": True,
            }
    if "only-best" in MODES:  # the last of these is never the best one
        chosen |= {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1}
        chosen |= {"metric_for_best_model": "loss", "greater_is_better": True}
    if "best" in MODES:
        chosen |= {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "save_total_limit": 1}
        chosen |= {"metric_for_best_model": "loss", "greater_is_better": "highest" in MODES}
    return chosen


def trainer_of(model: Any) -> Trainer:
    if "sft" not in MODES:
        evaluation = Data() if {"best", "only-best"} & {*MODES} else None
        return Trainer(
            model=model, args=TrainingArguments(**arguments()), train_dataset=Data(), eval_dataset=evaluation
        )
    from datasets import Dataset  # noqa: PLC0415 -- of one mode
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    words = {**{f"t{number}": number for number in range(126)}, "<unk>": 126, "<eos>": 127}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), eos_token="<eos>", pad_token="<eos>"
    )
    rows = [{"input_ids": Data()[row]["input_ids"].tolist()} for row in range(64)]
    settings = SFTConfig(**arguments(), max_length=16, bf16=False, gradient_checkpointing=False)
    return SFTTrainer(model=model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def main() -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG)
    if "peft" in MODES:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    trainer = trainer_of(model)
    if "stop" in ASKED:
        trainer.add_callback(Signal())
    attach(trainer, os.environ.get("RUN_URL"), save_options=save_options())
    trainer.train(resume_from_checkpoint="resume" in ASKED)
    history = list(trainer.state.log_history)
    final = float(sum(each.double().sum() for each in bare(trainer.model).values()))
    evaluated = trainer.evaluate()["eval_loss"] if "best" in MODES else None  # of the model that was loaded
    if trainer.args.process_index == 0:
        report(
            losses=[[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
            evaluations=[[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
            resumed=trainer.bcp.run.resumed.step,
            passed_over=[choice.step for choice in trainer.bcp.run.resumed.passed_over],
            kind=type(trainer).__name__,
            parameter=type(next(trainer.model.parameters())).__name__,
            final=final,
            best=trainer.state.best_global_step,
            evaluated=evaluated,
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def bare(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return whole parameters, and of ZeRO-3 the rank's part; collective."""
    return {
        name: each.full_tensor() if hasattr(each, "full_tensor") else getattr(each, "ds_tensor", each).detach()
        for name, each in model.named_parameters()
        if each.requires_grad
    }


main()
