"""F-strings in steps: the same texts as without compilation."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from test_step_containers import Fills, ours, run
from torch import Tensor

from lightning_deepcompile.compat_bytecode import spelled_out


def varied(number: Any, value: Any) -> str:
    """All that an f-string can have."""
    try:
        text = f"{number}: {value.item():.3f} {number!r:>5} {'a' if number else 'b'} {number:{'0'}3d}"
        text += f"{number!s:>9}"
    except AttributeError as error:
        text = f"{error} {str(error)!r}"
    return text + "".join(f"{i}{len('ab')}" for i in range(2))


def plain(number: Any, value: Any) -> str:
    return f"{number}/{value}"


@pytest.mark.parametrize("value", [torch.ones(()), 0.5])
def test_they_are_the_same_texts_spelled_out(value: Any) -> None:
    copy = spelled_out(varied)
    assert copy is not varied and spelled_out(plain) is plain
    assert (copy.__name__, copy.__module__) == (varied.__name__, varied.__module__)
    compiled = torch.compile(copy, backend="eager")
    for number in range(5):
        assert copy(number, value) == compiled(number, value) == varied(number, value)


class Prints(Fills):
    """Says in every step where it is, in its own code and in a method's."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            text = f"batch {batch_idx}, step {self.global_step}: {loss.item():.3f}, {100 * loss.item():.1f} %"
            self.list.append(text)
        self.say(loss, batch_idx)
        return loss

    def say(self, loss: Tensor, index: int) -> None:
        self.list.append(f"{index:03d}: {loss.item():.3f}")


def test_steps_that_print() -> None:
    expected, module = run("auto", lambda *_: None, Prints), run(ours(), lambda *_: None, Prints)
    assert module.list == expected.list and len(module.list) == 30
    assert isinstance(module.say, types.MethodType) and not {"say", "training_step"} & vars(module).keys()
