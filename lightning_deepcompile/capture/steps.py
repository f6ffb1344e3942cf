"""The module's step methods, each compiled when it first runs."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_deepcompile import compat
from lightning_deepcompile.capture.backend import Capture
from lightning_deepcompile.capture.fallback import BROKEN_TEXT, READS_GRADIENTS, Fallbacks, why_not
from lightning_deepcompile.config import CompileConfig
from lightning_deepcompile.sharding.access import property_codes
from lightning_deepcompile.sharding.mentions import Mentions, mentions_of


class CompiledSteps:
    """Compiles ``training_step``, ``validation_step`` and so on; code that cannot be compiled runs as Python.

    Args:
        module: The module.
        config: Settings.
        capture: The compiler's backend; compiled code holds it weakly.
        fallbacks: Called with functions that stay uncompiled, and the reasons.
    """

    def __init__(self, module: nn.Module, config: CompileConfig, capture: Capture, fallbacks: Fallbacks) -> None:
        self._module, self._config, self._fallbacks = module, config, fallbacks
        self._backend = compat.held_weakly(capture.__call__)
        self._follows = not capture.model.replicated  # see `GradientSession.follow_requires_grad`
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._mentions: dict[str, Mentions] = {}
        self._settings: dict[str, contextlib.AbstractContextManager[None]] = {}
        self._frames = capture.frames
        self._may_break: set[types.CodeType] = set()  # functions with texts that end a graph, if they run
        self._looked_at = 0  # graphs

    def forget(self, name: str) -> None:
        """Makes the step `name` be compiled again when it runs next."""
        self._compiled.pop(name, None)

    def has_run(self, name: str) -> bool:
        """Returns whether the step `name` was called before."""
        return name in self._compiled

    def mentions(self, name: str) -> Mentions:
        """The names that the code of the step `name` mentions."""
        if name not in self._mentions:
            self._mentions[name] = mentions_of(self._module, getattr(self._module, name))
        return self._mentions[name]

    @contextlib.contextmanager
    def running(self, name: str, *, compiled: bool = True) -> Iterator[Callable[..., Any]]:
        """Yields the compiled step `name`, which runs under Dynamo's settings and reports uncompiled functions.

        Under PyTorch's anomaly mode, a training step runs as Python: that mode checks every operation's gradient, which
        a graph does not have.

        Args:
            name: The step's.
            compiled: Whether it runs compiled; otherwise it runs as Python, as does code that a user has compiled
                inside of it.
        """
        if torch.is_anomaly_enabled() and name == "training_step":
            yield getattr(self._module, name)
            return
        if not compiled:
            with torch.compiler.set_stance("force_eager"):
                yield getattr(self._module, name)
            return
        if name not in self._compiled:
            self._compiled[name] = self._compile(name)
        with self._settings[name], self._fallbacks.watching():
            yield self._compiled[name]
            if self._may_break and self._looked_at < self._frames.captured:
                self._look_for_breaks()

    def _look_for_breaks(self) -> None:
        self._looked_at = self._frames.captured
        ended = [frame.reasons for frame in self._frames.all]
        for code in {one for one in self._may_break if any(reasons.broken_in(one) for reasons in ended)}:
            self._may_break.remove(code)
            self._fallbacks.add(code.co_name, _place(code), BROKEN_TEXT)

    def _compile(self, name: str) -> Callable[..., Any]:
        step = getattr(self._module, name)
        falls_back = self._config.fallback == "warn"
        self._settings[name] = compat.step_settings(falls_back=falls_back, follows=self._follows)
        attributes = vars(self._module).items()
        bounded = {n for n, value in attributes if isinstance(value, deque) and value.maxlen is not None}
        found = self.mentions(name)
        code = getattr(inspect.unwrap(step), "__code__", None)
        if (reason := why_not(found, bounded, code)) is not None:
            self._fallbacks.add(name, _place(code), reason)
            return step
        own = compat.with_own_code(step)
        left = dict.fromkeys(found.broken_texts, BROKEN_TEXT) | dict.fromkeys(found.gradients, READS_GRADIENTS)
        for one, reason in left.items():
            compat.never_code(own.__code__ if one is code else one)
            if one is code:
                self._fallbacks.add(one.co_name, _place(one), reason)
            else:
                self._may_break.add(one)
        # With all attributes of a large model, guards on our own properties would take a quarter of the time.
        return torch.compile(
            own, backend=self._backend, options={"guard_filter_fn": compat.unguarded(property_codes())}
        )


def code_of(function: Callable[..., Any]) -> types.CodeType | None:
    """The code of a Python function or method, not that of a function it wraps; None for other callables."""
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _place(code: types.CodeType | None) -> str:
    return "?" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
