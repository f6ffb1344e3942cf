"""What a LightningModule does inside of a step that a graph cannot hold; nothing here knows of parameters."""
