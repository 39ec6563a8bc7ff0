"""The smallest script that needs every rank: join, sum one number, leave."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
dist.destroy_process_group()  # without it gloo's threads may abort the interpreter at its end
if total.item() != int(sys.argv[1]):
    sys.exit(f"the sum over {sys.argv[1]} ranks was {total.item()}")
