"""Parameters and gradients as shards, and what code sees in their place, compiled or not; no graph is made here."""
