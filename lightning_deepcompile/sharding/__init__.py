"""Parameters and gradients as shards, and the objects that code sees instead, compiled or not; makes no graph."""
