"""Handles what a LightningModule does inside of a step and a graph cannot contain; it knows no parameters."""
