"""Between two passes: optimizers on shards, clipping, gathers for the next step; nothing is traced or planned here."""
