"""Weights of models in and out: files of pretrained models, and state dicts after `rt.shard`."""
