"""What `compat` has to do with Dynamo itself: what it compiles, how often, and what it keeps."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounter

from lightning_deepcompile import compat, compat_frames

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def test_integers_of_a_module_are_inputs() -> None:
    counter, compiles = Counter(), []
    step = torch.compile(counter, backend=lambda gm, inputs: compiles.append(gm) or gm)
    with compat.step_settings(3):
        for expected in range(1, 8):
            assert float(step(torch.ones(()))) == expected
    assert len(compiles) <= 2


def test_functions_that_were_compiled_too_often_are_found_where_they_run() -> None:
    found = []

    @torch.compiler.disable
    def look() -> None:
        found.append(compat.given_up())

    def inner(x: Tensor, name: str) -> Tensor:
        x = x + len(name)
        look()
        return x

    def outer(x: Tensor, name: str) -> Tensor:
        return inner(x, name) * 2

    step = torch.compile(outer, backend="eager")
    before = torch._dynamo.config.recompile_limit
    with compat.step_settings(3):
        for name in "abcdef":
            step(torch.ones(()), name)
        step(torch.ones(()), "a")
    assert torch._dynamo.config.recompile_limit == before
    names = [code and code.co_name for code in found]
    assert names[:3] == [None] * 3 and set(names[3:-1]) == {"inner"}
    assert names[-1] is None, "what was compiled goes on being used"


def test_a_function_that_is_never_a_frame_is_traced_through() -> None:
    """Called in code that is not compiled, what it calls is compiled; called in code that is, it is part of that."""

    def traced(x: Tensor) -> Tensor:
        return x.sin()

    @compat.never_a_frame
    def shared(x: Tensor) -> Tensor:
        return traced(x) + x.numpy().item()  # no graph holds this

    counter = CompileCounter()
    compiled = torch.compile(lambda x: traced(shared(x)), backend=counter)
    for size in (1, 1):
        torch.testing.assert_close(compiled(torch.ones(size)), (torch.ones(size).sin() + 1).sin())
    assert counter.frame_count == 2, "one for each call of `traced`, none for `shared`"

    @compat.never_frames
    class Shared:
        @torch.no_grad()
        def method(self, x: Tensor) -> Tensor:
            return traced(x) + x.numpy().item()

    counter = CompileCounter()
    torch.compile(lambda x: traced(Shared().method(x)), backend=counter)(torch.ones(1))
    assert counter.frame_count == 2

    @compat.never_a_frame
    def inlined(x: Tensor) -> Tensor:
        return x.sin()

    counter = CompileCounter()
    torch.compile(lambda x: inlined(x).cos(), backend=counter, fullgraph=True)(torch.ones(2))
    assert (counter.frame_count, counter.op_count) == (1, 2)


def test_a_backend_that_is_held_weakly_is_freed() -> None:
    """Dynamo alone keeps nothing of it; if this fails with a plain backend as well, Dynamo forgets them by now."""

    class Backend:
        def __call__(self, gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            return gm.forward

    backend = Backend()
    freed = weakref.ref(backend)
    compiled = torch.compile(lambda x: x + 1, backend=compat.held_weakly(backend.__call__))
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
    del backend
    gc.collect()
    assert freed() is None
    with pytest.raises(Exception, match="its strategy is gone"):
        torch.compile(lambda x: x + 2, backend=compat.held_weakly(Backend().__call__))(torch.ones(2))


_WORKERS = """
import time
from lightning_deepcompile import compat, compat_frames
from torch._inductor.async_compile import AsyncCompile
from torch.utils._triton import has_triton_package
compat.start_compile_workers()
end = time.monotonic() + 60
while has_triton_package() and not AsyncCompile.use_process_pool():  # without Triton there are none
    assert time.monotonic() < end, "the workers did not come up"
    time.sleep(0.05)
"""


def test_compile_workers_come_up_without_a_compilation() -> None:
    """In a process of its own: tests compile without workers."""
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _WORKERS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_dynamo_does_not_look_at_what_a_call_runs() -> None:
    """It goes from a module's call straight to `forward`, which is most of what tracing a small module costs."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    looked: list[bool] = []

    def inner_call(module: nn.Module) -> Callable[..., Tensor]:
        looked.append(torch.compiler.is_compiling())
        return lambda x: module.forward(2 * x)

    layer = type("Doubling", (Layer,), {compat.INNER_CALL: property(inner_call)})()
    assert float(layer(torch.ones(()))) == 3
    assert float(torch.compile(lambda x: layer(x), backend="eager", fullgraph=True)(torch.ones(()))) == 2
    assert looked and True not in looked


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.linear = nn.Linear(3, 3)

    def step(self, x: Tensor) -> Tensor:
        if hasattr(self, "absent"):
            return x
        return torch.dropout(self.linear(x), 0.5, True) * self.factor


def test_a_call_is_traced_without_running_and_its_guards_are_built_again() -> None:
    module = Scaled()
    step, x = compat.with_own_code(module.step), torch.ones(2, 3)
    frame_of = compat_frames.apart(compat_frames.trace_frame)
    before = torch.random.get_rng_state()
    frame = frame_of(step, (x,), {})
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [node.op for node in frame.graph.graph.nodes][-1] == "output"
    assert Scaled.step.__code__ in frame.traced

    state = compat_frames.FrameState.load(frame.state.dump())
    assert state.as_traced(" ".join(guard.name for guard in state.guards)) == " ".join(
        guard.name for guard in frame.state.guards
    )
    variables, seen = {"self": module, "x": x}, []

    @compat_frames.apart
    def build() -> Callable[[dict[str, Any]], bool]:
        with compat_frames.compiling():
            return compat_frames.build_guards(
                step.__func__.__code__, state, step.__func__.__globals__, variables, seen.extend
            )

    with compat_frames.installed_globals(state, step.__func__.__globals__):
        fits = build()
    assert {"TENSOR_MATCH", "CONSTANT_MATCH", "TYPE_MATCH"} <= {entry.guard_type for entry in seen}
    assert [entry.value for entry in seen if entry.name.endswith("factor")] == [2.0]
    (looked,) = [compat_frames.attribute_found(entry) for entry in seen if entry.guard_type == "HASATTR"]
    assert looked.endswith("False")
    assert fits(variables)
    assert not fits({"self": module, "x": torch.ones(3, 3)})
    module.factor = 3.0
    assert not fits(variables)
    with torch.no_grad():
        module.factor = 2.0
        assert not fits(variables)
        with pytest.raises(compat_frames.UntraceableError, match="its guards do not fit"):
            build()


def test_a_call_that_is_not_one_graph_is_not_traced() -> None:
    def step(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(compat_frames.UntraceableError, match="graph_break"):
        compat_frames.apart(compat_frames.trace_frame)(step, (torch.ones(2),), {})


def test_settings_of_dynamo_are_words() -> None:
    before = compat_frames.dynamo_settings()
    assert " at 0x" not in before
    with torch._dynamo.config.patch(specialize_float=not torch._dynamo.config.specialize_float):
        assert compat_frames.dynamo_settings() != before
    assert compat_frames.dynamo_settings() == before


def test_modes_that_guards_do_not_know_are_told() -> None:
    assert compat_frames.global_modes() == []
    with torch.device("cpu"):
        assert compat_frames.global_modes() == ["a torch function mode"]
    with compat_frames.fake_mode():
        assert compat_frames.global_modes() == ["a dispatch mode"]
    with torch.autograd.graph.save_on_cpu():
        assert compat_frames.global_modes() == ["hooks for saved tensors"]
    found = []
    torch.func.grad(lambda x: (found.extend(compat_frames.global_modes()), x.sum())[1])(torch.ones(2))
    assert found == ["a function transform"]
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert compat_frames.global_modes() == ["a hook of all modules"]
    handle.remove()
    assert compat_frames.global_modes() == []


def test_fake_values_are_like_those_that_dynamo_makes() -> None:
    mode, parameter = compat_frames.fake_mode(), nn.Parameter(torch.ones(4, 6)[:, ::2])
    fake = compat_frames.fake_value(mode, parameter.detach().to("meta"), torch.device("cpu"), True, True)
    expected = mode.from_tensor(parameter)
    for value in (fake, expected):
        assert isinstance(value, nn.Parameter) and value.fake_mode is mode and value.is_leaf and value.requires_grad
        assert value.device == torch.device("cpu") and not value._is_view()
