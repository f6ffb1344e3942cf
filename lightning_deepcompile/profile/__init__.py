"""Measures ordinary training steps: sets marks between instructions, and derives costs of regions, links and memory."""
