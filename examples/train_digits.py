"""Train a small convolutional network to read handwritten digits, on any number of workers.

    msrun --nproc-per-node 4 examples/train_digits.py        # or: torchrun, or plain python

An ordinary `torch.distributed` script that depends on no particular launcher.  The data are
the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded.  The global
batch is the same at every world size, so the model learns the same at every world size.
"""

from __future__ import annotations

import importlib.metadata
import os
import time

import numpy as np
import torch
import torch.distributed as dist

# DDP imports this too, but after `init_process_group`.  Default arguments of the module would
# then hold the group, so `destroy_process_group` could not end gloo's threads, which may abort
# the exit.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 8
GLOBAL_BATCH = 96
LEARNING_RATE = 8e-3


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


def pick_device() -> torch.device:
    """Return this rank's own accelerator, or the CPU when there is not one for each rank."""
    if torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    torch.accelerator.set_device_index(dist.get_node_local_rank(fallback_rank=0))
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def build_model() -> nn.Module:
    """Return a network with two convolutions, the same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the share of `data` that the model reads correctly; each rank reads its part."""
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in data.tensors)
    correct: Tensor = (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    return correct.item() / len(data)


def train(device: torch.device) -> float:
    """Train for `EPOCHS` epochs and return the accuracy on the held-out fifth."""
    training, held_out = load_digits()
    sampler = DistributedSampler(training, seed=1)
    loader = DataLoader(training, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        share = accuracy(model.module, held_out, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/{EPOCHS}  accuracy {share:.3f}", flush=True)
    return share


def main() -> None:
    """Join the process group, train, and let rank 0 report."""
    start = time.perf_counter()
    if "RANK" in os.environ:
        dist.init_process_group()
    else:  # Without a launcher: a job of one worker.
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    share = train(pick_device())
    if dist.get_rank() == 0:
        seconds = time.perf_counter() - start
        print(f"accuracy {share:.3f} at {dist.get_world_size()} workers in {seconds:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
