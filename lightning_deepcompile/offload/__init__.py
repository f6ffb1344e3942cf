"""Optimizer states, activations and shards in host memory; which of them a plan moves is decided in `plan`."""
