"""Decides when data moves: passes over programs. Neither torch.distributed nor Lightning is imported here."""
