"""A LightningModule trained by `Trainer(strategy="ddp")` on made data."""

import os
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(round(loss.item(), 4))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    lightning.seed_everything(0)
    x = torch.randn(64, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = Line()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=8))
    weights = [round(number, 4) for number in model.layer.weight.flatten().tolist()]
    said = f"{trainer.world_size} {model.losses} {weights}"
    Path(f"said-{trainer.global_rank}").write_text(said)


if __name__ == "__main__":
    main()
