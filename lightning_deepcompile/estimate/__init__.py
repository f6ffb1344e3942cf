"""Predicts memory and time of a training step without memory, ranks or a device."""
