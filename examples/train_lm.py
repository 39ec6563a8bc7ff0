"""Train a small GPT on Python's own documentation, in parallel as a configuration file says.

    msrun --nproc-per-node 4 --parallel examples/configs/lm_tp.yaml examples/train_lm.py
    python examples/train_lm.py                                     # one process
    python examples/train_lm.py --draw docs/images/train_lm.svg     # all of them, and the chart

The model contains no parallel code.  `--draw` trains under every `lm_*.yaml` and draws the
losses, which coincide.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import msrun

CONFIGS = Path(__file__).parent / "configs"
LENGTH = 64
WIDTH = 64
HEADS = 4
LAYERS = 4
GLOBAL_BATCH = 16
STEPS = 60
LEARNING_RATE = 3e-3


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `LENGTH` characters, each with the characters that follow.

    Args:
        samples: Windows, as far apart as the text allows.
    """

    def __init__(self, samples: int) -> None:
        text = "\n".join(pydoc_data.topics.topics.values())
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self._codes = torch.tensor([index[character] for character in text])
        self._samples = samples
        self._stride = (len(text) - LENGTH - 1) // samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        window = self._codes[number * self._stride :][: LENGTH + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention, then an MLP, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        """Return the causal self-attention of every position."""
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (
            part(x).view(heads).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(found.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, (batch, sequence, width) as the input."""
        x = x + self.attend(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A causal language model over characters; head and embedding share their weight."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits (batch, sequence, characters) of the next characters."""
        x = self.embed(codes) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of all positions."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(path: str | None) -> None:
    """Train, and write the losses to the file `path`."""
    runtime = msrun.init()
    torch.manual_seed(1)
    text = Text(GLOBAL_BATCH * STEPS)
    # A multiple of 8, so that a plan can shard the vocabulary.
    model = runtime.shard(GPT(len(text.alphabet) + -len(text.alphabet) % 8))
    optimizer = runtime.optimizer(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    batch_size = GLOBAL_BATCH // runtime.layout.size("dp")
    losses = []
    start = time.perf_counter()
    for inputs, target in runtime.loader(text, batch_size, shuffle=True, seed=1):
        losses.append(runtime.step(model, optimizer, loss_of, inputs, target).item())
        if len(losses) % 10 == 0:
            runtime.print(f"step {len(losses)}/{STEPS}  loss {losses[-1]:.4f}")
    seconds = time.perf_counter() - start
    tokens = round(GLOBAL_BATCH * LENGTH * STEPS / seconds)
    runtime.print(f"{tokens:,} tokens/s on {runtime.world_size} ranks {runtime.layout.axes}")
    if path and runtime.is_main:
        Path(path).write_text(json.dumps(losses))


def draw(picture: Path) -> None:
    """Train in one process and under each configuration, and draw the curves."""
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, ranks in {"one process": 1, **_workers()}.items():
            path = Path(folder, "losses.json")
            config = [] if ranks == 1 else ["--parallel", str(CONFIGS / f"{name}.yaml")]
            launch = ["-m", "msrun", "--nproc-per-node", str(ranks), "--log-dir", folder]
            script = [__file__, "--losses", str(path)]
            subprocess.run([sys.executable, *launch, *config, *script], check=True)
            curves[name] = json.loads(path.read_text())
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(svg(curves))
    expected = curves["one process"]
    for name, losses in curves.items():
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(f"{name:14} last loss {losses[-1]:.4f}  farthest from one process {worst:.1e}")


def _workers() -> dict[str, int]:
    """Return each configuration and the ranks to show it on."""
    found = {path.stem: 4 for path in sorted(CONFIGS.glob("lm_*.yaml"))}
    return found | {"lm_pp_dp_tp": 8}


def svg(curves: dict[str, list[float]]) -> str:
    """Return a chart of `curves`: wide lines below narrow ones, so that equal curves all show."""
    width, height, margin = 640, 360, 48
    colors = ("#cccccc", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7")
    top = max(max(losses) for losses in curves.values())
    bottom = min(min(losses) for losses in curves.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text {font: 12px sans-serif}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">step</text>',
        f'<text x="8" y="{margin - 16}">loss</text>',
    ]
    for loss in (top, (top + bottom) / 2, bottom):
        y = margin + (top - loss) / (top - bottom) * (height - 2 * margin)
        parts.append(f'<text x="{margin - 6}" y="{y + 4:.0f}" text-anchor="end">{loss:.1f}</text>')
    for number, (name, losses) in enumerate(curves.items()):
        points = " ".join(
            f"{margin + step / (len(losses) - 1) * (width - 2 * margin):.1f},"
            f"{margin + (top - loss) / (top - bottom) * (height - 2 * margin):.1f}"
            for step, loss in enumerate(losses)
        )
        stroke = f'stroke="{colors[number % len(colors)]}" stroke-width="{14 - 2 * number}"'
        parts.append(f'<polyline fill="none" {stroke} points="{points}"/>')
        y = margin + 16 * number
        line = f'<line x1="{width - 190}" x2="{width - 160}" y1="{y}" y2="{y}" {stroke}/>'
        parts.append(f'{line}<text x="{width - 150}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Train, or train under every configuration and draw the losses."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--draw", type=Path, metavar="FILE.svg")
    parser.add_argument("--losses", metavar="FILE.json")
    options = parser.parse_args()
    if options.draw:
        draw(options.draw)
    else:
        train(options.losses)


if __name__ == "__main__":
    main()
