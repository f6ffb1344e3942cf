"""What processes ask and tell each other: exchange, order of collectives, meshes, failures; it knows no model."""
