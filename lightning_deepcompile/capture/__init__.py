"""From an ordinary module to graphs that read sharded parameters: sharding, access, capture, gradients."""
