"""Turns a partitioned graph into a program: regions of compute between explicit communication."""
