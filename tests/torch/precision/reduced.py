"""How far what ranks learn in reduced precision is from one process, and from float32."""

import torch
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

# No gradient of the models here is too large under it, whatever the layout.
SCALE = 1024.0
# Where batch norms of few samples make of other roundings other models in two steps, it is small.
RATE = 0.001
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def learned(config, model, batches, loss_fn):
    """Return losses of a step for each batch, and the gradients of the first, whole.

    A rank gives its part of the samples.  Gradients of parameters that other ranks have are absent.
    """
    losses, gradients = [], {}
    with msrun.init(config) as rt:
        if rt.loss_scale:
            rt.loss_scale.value = SCALE
        model = rt.shard(model)
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=RATE))
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        for batch in batches:
            part = [tensor.tensor_split(ranks)[rank] for tensor in batch]
            losses.append(rt.step(model, optimizer, loss_fn, *part).item())
            gradients = gradients or {
                name: full_tensor(p.grad.detach()).clone()
                for name, p in model.named_parameters()
                if p.grad is not None and p.numel()
            }
    return losses, gradients


def plain(precision, model, batches, loss_fn):
    """Return the same of plain torch, in float32 without a `precision`."""
    losses, gradients = [], {}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scale = SCALE if precision == "fp16" else 1.0
    for *inputs, target in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", TYPES.get(precision), enabled=precision is not None):
            loss = loss_fn(model(*inputs), target)
        (loss * scale).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= scale
        optimizer.step()
        losses.append(loss.item())
        gradients = gradients or {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
    return losses, gradients


def gap(found, exact):
    """Return how far gradients are from others of the same names, in parts of these."""
    pairs = [(value.flatten(), exact[name].flatten()) for name, value in found.items()]
    first, second = (torch.cat(values) for values in zip(*pairs, strict=True))
    return (functional.mse_loss(first, second) / second.square().mean()).sqrt().item()


def assert_as_near(found, exact, *others):
    """Check that ranks round as others do: as near to float32, and not as if it was that.

    Args:
        found: Losses and gradients of a rank.
        exact: Of one process in float32.
        others: Of one process in the same precision; of ranks with whole samples, too.
    """
    losses, gradients = found
    near = [gap({name: of[name] for name in gradients}, exact[1]) for _, of in others]
    curves = [exact[0], *(of for of, _ in others)]  # a curve may round to that of float32
    for loss, *near_to in zip(losses, *curves, strict=True):
        assert min(abs(loss - other) for other in near_to) < 0.02
    # Roundings differ by chance; an exchange that is wrong makes it about 1.
    assert 1e-5 < gap(gradients, exact[1]) < 3 * max(near)
