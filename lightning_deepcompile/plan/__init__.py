"""Deciding what moves when: passes over programs. Neither torch.distributed nor Lightning is imported here."""
