"""trl_job.py MODE FOLDER [resume]: GRPO of a tiny Llama in 9 steps with a save every 3, over epochs of 4 prompts.

MODE: each (completions for each step), reuse (completions for four steps).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from host_side import report, save_options, tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from bcp.integrations.transformers import attach

torch.set_num_threads(1)
MODE, FOLDER, *ASKED = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WORDS = 62
NAMES = ("step", "epoch", "loss", "reward", "grad_norm", "entropy")
CONFIG = tiny_llama(vocab_size=64, attention_dropout=0.1)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {**{f"t{number}": number for number in range(WORDS)}, "<unk>": WORDS, "<eos>": WORDS + 1}
    whole = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ["input_ids", "attention_mask"]  # transformers 4 has one more by default, which a Llama does not take
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, eos_token="<eos>", pad_token="<eos>", model_input_names=names
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    """Like small numbers."""
    return [-sum(int(word[1:]) for word in each.split() if word[1:].isdigit()) / 100 for each in completions]


def main() -> None:
    torch.manual_seed(0)
    more: dict[str, Any] = {"steps_per_generation": 2, "num_iterations": 2} if MODE == "reuse" else {}
    if "use_adaptive_entropy" in GRPOConfig.__dataclass_fields__:  # not in old versions
        more |= {"use_adaptive_entropy": True, "entropy_target": 5.0}
    settings = GRPOConfig(
        output_dir=str(FOLDER),
        per_device_train_batch_size=4 // WORLD,
        ddp_backend="gloo" if WORLD > 1 else None,
        num_generations=4,
        max_completion_length=6,
        max_steps=9,
        save_steps=3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        learning_rate=1e-2,
        seed=0,
        disable_tqdm=True,
        **more,
    )
    prompts = Dataset.from_list([{"prompt": f"t{number} t{number + 1}"} for number in range(4)])
    seen: list[str] = []

    def rewarded(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
        seen.append(f"{prompts[0]}: {completions[0]}")
        return reward(completions, **more)

    trainer = GRPOTrainer(
        model=LlamaForCausalLM(CONFIG),
        reward_funcs=rewarded,
        args=settings,
        train_dataset=prompts,
        processing_class=tokenizer(),
    )
    attach(trainer, save_options=save_options())
    trainer.train(resume_from_checkpoint="resume" in ASKED)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    if trainer.args.process_index == 0:
        report(
            logs=[[entry.get(name) for name in NAMES] for entry in history],
            seen=seen,
            resumed=trainer.bcp.run.resumed.step,
            final=float(sum(each.detach().double().sum() for each in trainer.model.parameters())),
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


main()
