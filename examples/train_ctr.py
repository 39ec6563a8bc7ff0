"""A click-through model, wide and deep, whose tables are on parameter servers.

    cd examples
    msrun --server-num 2 --worker-num 4 --parallel configs/ctr_servers.yaml train_ctr.py
    python train_ctr.py                                  # one process
    python train_ctr.py --draw ../docs/images/train_ctr.svg     # both, and the chart

Both runs learn the same.  A sample has sparse features alone: numbers are cut into buckets, and
each bucket, as each pair of buckets, is a row of a table, found by hashing.  The wide part adds up
one number for each pair; the deep part is a network over vectors of the buckets.

The data are the breast cancer records that scikit-learn ships (569 records of 30 numbers, and a
yes or no): no click log comes with a package, and the model does not know the difference.

`CURVE=curve.json` writes the losses.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import msrun

EPOCHS = 6
GLOBAL_BATCH = 64
LEARNING_RATE = 5e-3
BUCKETS = 12
WIDE_ROWS, DEEP_ROWS, WIDTH = 1 << 18, 1 << 12, 16
_PRIME, _MASK = 2_654_435_761, (1 << 32) - 1


def load_records() -> tuple[Tensor, Tensor]:
    """Return numbers (records, features) and labels (records,)."""
    try:  # `import sklearn.datasets` would cost every rank a second
        package = importlib.metadata.distribution("scikit-learn")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("train_ctr.py reads a data set of scikit-learn: pip install scikit-learn")
    path = package.locate_file("sklearn/datasets/data/breast_cancer.csv")
    table = torch.from_numpy(np.loadtxt(str(path), delimiter=",", skiprows=1, dtype=np.float32))
    return table[:, :-1], table[:, -1]


def hashed(features: Tensor, buckets: Tensor, rows: int) -> Tensor:
    """Return the row of a table for each pair of a feature and its bucket."""
    mixed = (features * _PRIME + buckets * 40_503 + 1) & _MASK
    return ((mixed * _PRIME) & _MASK) % rows


def sparse_features(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of all pairs of buckets (records, pairs), and of all buckets."""
    edges = torch.quantile(numbers, torch.linspace(0, 1, BUCKETS + 1)[1:-1], dim=0)
    buckets = (numbers[:, None] > edges).sum(1)  # (records, features)
    first, second = torch.triu_indices(buckets.shape[1], buckets.shape[1], offset=1)
    pairs = buckets[:, first] * BUCKETS + buckets[:, second]
    crossed = hashed(1000 + torch.arange(len(first)), pairs, WIDE_ROWS)
    return crossed, hashed(torch.arange(buckets.shape[1]), buckets, DEEP_ROWS)


class WideAndDeep(nn.Module):
    """A number for each pair of buckets, and a network over vectors of the buckets.

    Args:
        features: Numbers of a record.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(WIDE_ROWS, 1, mode="sum")
        self.deep = nn.Embedding(DEEP_ROWS, WIDTH)
        self.network = nn.Sequential(nn.Linear(features * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
        nn.init.zeros_(self.wide.weight)

    def forward(self, pairs: Tensor, buckets: Tensor) -> Tensor:
        """Return the logits (batch,)."""
        deep = self.network(self.deep(buckets).flatten(1))
        return (self.wide(pairs) + deep).squeeze(1)


def draw(picture: Path) -> None:
    """Train in one process, and with four workers and two servers; draw both curves."""
    from train_lm import svg

    config = Path(__file__).parent / "configs" / "ctr_servers.yaml"
    sizes = ["--server-num", "2", "--worker-num", "4", "--parallel", str(config)]
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "losses.json")
        env = {**os.environ, "CURVE": str(path), "OMP_NUM_THREADS": "1"}
        together = ["-m", "msrun", *sizes, "--log-dir", folder]
        for name, words in {"one process": [], "2 servers, 4 workers": together}.items():
            subprocess.run([sys.executable, *words, __file__], env=env, check=True)
            curves[name] = json.loads(path.read_text())
    picture.write_text(svg(curves))
    alone, servers = curves.values()
    worst = max(abs(one - other) for one, other in zip(alone, servers, strict=True))
    print(f"last loss {servers[-1]:.4f}, farthest from one process {worst:.1e}")


def main() -> list[float]:
    """Train for `EPOCHS` epochs, print what was learned, and return the losses."""
    rt = msrun.init()
    numbers, labels = load_records()
    pairs, buckets = sparse_features(numbers)
    held_out = torch.arange(len(labels)) % 5 == 0
    torch.manual_seed(1)
    model = rt.shard(WideAndDeep(numbers.shape[1]))
    optimizer = rt.optimizer(torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE))
    training = TensorDataset(pairs[~held_out], buckets[~held_out], labels[~held_out])
    batch_size = GLOBAL_BATCH // rt.layout.size("dp")
    loader = rt.loader(training, batch_size, shuffle=True, seed=1)
    loss_fn = functional.binary_cross_entropy_with_logits
    losses: list[float] = []
    for epoch in range(EPOCHS):
        losses += [rt.step(model, optimizer, loss_fn, *batch).item() for batch in loader]
        rt.print(f"epoch {epoch + 1}/{EPOCHS}  log loss {losses[-1]:.4f}")
    model.eval()
    with torch.no_grad():
        found = model(pairs[held_out], buckets[held_out]) > 0
    share = (found == (labels[held_out] > 0)).float().mean().item()
    rt.print(f"accuracy {share:.3f} on {rt.world_size} ranks")
    if rt.is_main and "CURVE" in os.environ:
        Path(os.environ["CURVE"]).write_text(json.dumps(losses))
    return losses


if __name__ == "__main__":
    if sys.argv[1:2] == ["--draw"]:
        draw(Path(sys.argv[2]))
    else:
        main()
