"""Traced steps that are kept between runs: what Dynamo made of a step, and what it must be compared with first."""
