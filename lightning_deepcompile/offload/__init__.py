"""Optimizer states that live in host memory and visit the device while the optimizer steps."""
