"""Work between two passes: optimizers on shards, clipping, gathers for the next step. No tracing or planning here."""
