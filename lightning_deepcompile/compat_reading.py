"""What private parts of PyTorch tell of the place of a parameter, while the code that reads it is traced."""

from __future__ import annotations

from torch._dynamo.comptime import ComptimeContext, comptime

__all__ = ["comptime", "put_in_place"]


def put_in_place(ctx: ComptimeContext) -> None:
    """For `comptime`, in a function that reads `self`'s parameter `key`: sets its `other` to what has taken that place.

    ``torch.func.functional_call`` does so. Nothing is looked at, or guarded on, that traced code has not touched.
    """
    tx = ctx._ComptimeContext__tx  # type: ignore[attr-defined]
    module, key = tx.symbolic_locals["self"].realize().value, tx.symbolic_locals["key"].as_python_constant()
    if module._parameters not in tx.output.side_effects:
        return
    seen = tx.output.side_effects[module._parameters].realize()
    before, now = (
        {getattr(name, "vt", name).as_python_constant(): value for name, value in items.items()}
        for items in (seen.original_items, seen.items)
    )
    if seen.is_new_item(before.get(key), now[key]):
        tx.symbolic_locals["other"] = now[key]
