"""Train with the Trainer of Hugging Face transformers, and resume: bcp takes two lines.

``python with_transformers.py FOLDER`` trains a small Llama for 12 steps with a checkpoint every 4. Stop it with Ctrl-C
or ``kill``, and start it again: it goes on. Under torchrun it does so on any number of ranks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from bcp.integrations.transformers import attach


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """64 rows of random tokens, the same at each start."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens = torch.randint(0, 128, (16,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": tokens, "labels": tokens}


def main(folder: str) -> None:
    """Train to step 12, from wherever an earlier start has come."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4 // ranks,
        max_steps=12,
        save_steps=4,
        save_total_limit=2,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Tokens())
    attach(trainer)
    trainer.train(resume_from_checkpoint=True)
    if args.process_index == 0:
        print(f"resumed from step {trainer.bcp.run.resumed.step}, ended at step {trainer.state.global_step}")
        for info in trainer.bcp.run.list():
            print(f"step {info.step}: {info.nbytes:,} bytes, loss {info.metrics['loss']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
