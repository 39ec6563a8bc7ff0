"""Gradients of parameters that live on servers, from the backward pass to the optimizer's step."""
