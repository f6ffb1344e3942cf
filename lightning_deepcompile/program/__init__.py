"""From a partitioned graph to a program: regions of compute between explicit communication."""
