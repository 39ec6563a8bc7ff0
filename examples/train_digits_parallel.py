"""Learn to read handwritten digits, in parallel as a configuration file says.

    cd examples
    msrun --nproc-per-node 4 --parallel configs/digits_dp_tp.yaml train_digits_parallel.py

`configs/digits_*.yaml` has one file for each way to run this script on four workers.  Without
a file the script is data parallel; with plain `python` it is one process.  All of these runs
learn the same.
"""

from __future__ import annotations

import importlib.metadata
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import msrun

EPOCHS = 6
GLOBAL_BATCH = 96
LEARNING_RATE = 5e-3


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training images and the held-out fifth, each with its labels."""
    # Read the data file directly: `import sklearn.datasets` would cost every rank a second.
    package = importlib.metadata.distribution("scikit-learn")
    path = package.locate_file("sklearn/datasets/data/digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(str(path), delimiter=",", dtype=np.float32))
    images = table[:, :64].reshape(-1, 1, 8, 8) / 16  # pixels are 0 to 16
    labels = table[:, 64].long()
    held_out = torch.arange(len(labels)) % 5 == 0
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )


class Reader(nn.Module):
    """Two convolutions, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.shapes = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.digit = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (batch, 10) of images (batch, 1, 8, 8)."""
        x = functional.relu(self.shapes(functional.relu(self.edges(images))))
        return self.digit(functional.relu(self.hidden(self.pool(x).flatten(1))))


def main() -> None:
    """Train for `EPOCHS` epochs and print the accuracy on the held-out fifth."""
    start = time.perf_counter()
    runtime = msrun.init()
    training, held_out = load_digits()
    torch.manual_seed(1)
    model = runtime.shard(Reader().to(runtime.device))
    optimizer = runtime.optimizer(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    batch_size = GLOBAL_BATCH // runtime.layout.size("dp")
    loader = runtime.loader(training, batch_size, shuffle=True, seed=1)
    for epoch in range(EPOCHS):
        for images, labels in loader:
            loss = runtime.step(model, optimizer, functional.cross_entropy, images, labels)
        runtime.print(f"epoch {epoch + 1}/{EPOCHS}  last loss {loss.item():.4f}")
    images, labels = (part.to(runtime.device) for part in held_out.tensors)
    model.eval()
    with torch.no_grad():
        share = (model(images).argmax(dim=1) == labels).float().mean().item()
    seconds = time.perf_counter() - start
    runtime.print(f"accuracy {share:.3f} at {runtime.layout.axes} in {seconds:.1f} s")


if __name__ == "__main__":
    main()
