"""The Trainer of transformers, with gradient accumulation: an iteration is a real step of its optimizer.

torchrun --nproc-per-node 2 examples/with_trainer.py
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import crossrank

crossrank.enable()
set_seed(0)


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(16) + index) % 50
        return {"input_ids": words, "labels": words}


model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir="trainer-output",
    use_cpu=True,
    ddp_backend="gloo",
    max_steps=4,  # of 2 batches on each of 2 ranks
    gradient_accumulation_steps=2,
    per_device_train_batch_size=4,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Words())
loss = trainer.train().training_loss
if trainer.is_world_process_zero():
    print("loss", float(loss).hex(), flush=True)
crossrank.disable()
torch.distributed.destroy_process_group()
