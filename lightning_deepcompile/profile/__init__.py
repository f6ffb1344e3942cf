"""Measuring ordinary training steps: marks between instructions, and what they say of regions, links and memory."""
