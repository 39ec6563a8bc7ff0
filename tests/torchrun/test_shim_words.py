"""What torchrun's function gets becomes the words of a command line that mean the same."""

import pytest
import torch.distributed.run as torchrun

from msrun.cli.torchrun_shim import words_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("train.py", 0),
        ("--nproc-per-node=2 --standalone=true train.py --lr 1", 2),
        ("--nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=a:29500 --module=true pkg.train -x", 4),
        ("--nnodes=2 --node-rank=1 --master-addr=a --master-port=29501 --no-python=true cmd", 5),
        ("--max-restarts=3 --tee=3 --redirects=0:1 --log-dir=logs --role=trainer train.py a", 5),
    ],
)
def test_the_words_come_back(line, count):
    parser = torchrun.get_args_parser()
    typed = [word.removesuffix("=true") for word in line.split()]

    words = words_of(parser, parser.parse_args(typed))

    options, program = line.split()[:count], line.split()[count:]
    assert sorted(words[:count]) == sorted(options)
    assert words[count:] == program
