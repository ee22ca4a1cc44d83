"""Quantized checkpoints in the ModelSlim format: their description, and how to write them."""
