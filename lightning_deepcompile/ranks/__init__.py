"""Communication between processes: exchange, order of collectives, meshes, failures; it knows no model."""
