"""transformers' Trainer with a small model of random weights, on made data."""

import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Letters(torch.utils.data.Dataset):
    def __init__(self):
        numbers = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(64, (64, 16), generator=numbers)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=1,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Letters())
    trainer.train()
    losses = [round(entry["loss"], 3) for entry in trainer.state.log_history if "loss" in entry]
    total = sum(weight.double().sum().item() for weight in trainer.model.parameters())
    saved = sorted(path.name for path in Path("out").glob("checkpoint-*"))
    said = f"{arguments.world_size} {arguments.parallel_mode} {losses} {total:.3f} {saved}"
    Path(f"said-{os.environ['RANK']}").write_text(said)


if __name__ == "__main__":
    main()
