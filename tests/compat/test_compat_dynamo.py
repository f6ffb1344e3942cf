"""Tests `compat`'s use of Dynamo: which frames it compiles, how often, and what it keeps."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frames import compiled_frames
from interpreters import run_python
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounter

from lightning_deepcompile import compat

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
    with compat.step_settings(falls_back=True, follows=True):
        for expected in range(1, 8):
            assert float(step(torch.ones(()))) == expected
    assert len(compiles) <= 2


@pytest.mark.parametrize(("method", "graphs", "said"), [("warning_once", 1, 0), ("warning", 2, 3)])
def test_what_is_said_once_breaks_no_graph(method: str, graphs: int, said: int) -> None:
    from transformers.utils import logging as logging_of_transformers

    logger, records, counter = logging_of_transformers.get_logger(f"transformers.tests.{method}"), [], CompileCounter()
    logger.setLevel("WARNING")
    logger.addFilter(lambda record: records.append(record) or False)

    def inner(x: Tensor) -> Tensor:
        y = x + 1
        getattr(logger, method)("The default is used.")
        return y * 2

    step = torch.compile(inner, backend=counter)
    with compat.step_settings(falls_back=True, follows=True):
        assert [float(step(torch.ones(()))) for _ in range(3)] == [4.0] * 3
        own = torch._dynamo.config.ignore_logging_functions
        assert json.dumps(sorted(own) if isinstance(own, set) else own) == "[]"  # as PyTorch 2.11 writes its settings
    assert counter.frame_count == graphs and len(records) == said


def test_functions_that_are_left_uncompiled_are_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, str]] = []

    def tell(name: str, place: str, error: str | BaseException) -> None:
        cause = compat.root_cause(error) if isinstance(error, BaseException) else None
        told.append((f"{name} {place.rpartition('/')[2].partition(':')[0]}", str(cause or error)))

    def inner(x: Tensor, name: str) -> Tensor:
        return x + len(name)

    def fails(gm: fx.GraphModule, inputs: Any) -> Any:
        raise ValueError("no such backend")

    def outer(x: Tensor, name: str) -> Tensor:
        return inner(x, name) * 2

    step = torch.compile(outer, backend="eager")
    before = torch._dynamo.config.recompile_limit
    assert before == 8, "which is replaced"
    with compat.step_settings(falls_back=True, follows=True):
        assert torch._dynamo.config.recompile_limit == 16
    with (
        torch._dynamo.config.patch(recompile_limit=3),
        compat.step_settings(falls_back=True, follows=True),
        compat.compile_failures(tell),
    ):
        for name in ("a", "ab", "abc", "abcd", "abcde"):
            assert float(step(torch.ones(()), name)) == 2 * (1 + len(name))
        assert [name for name, _ in told] == ["outer test_compat_dynamo.py"]
        assert told[0][1].startswith("compiled more than 3 times: ") and "name" in told[0][1]
        del told[:]
        assert float(torch.compile(lambda x: outer(x, "a"), backend=fails)(torch.ones(()))) == 4
        assert told[0] == ("<lambda> test_compat_dynamo.py", "no such backend")
    assert torch._dynamo.config.recompile_limit == before
    assert not [record for record in caplog.records if "_dynamo" in record.name]
    with (
        compat.step_settings(falls_back=False, follows=True),
        compat.compile_failures(tell),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such backend"),
    ):
        torch.compile(lambda x: outer(x, "b"), backend=fails)(torch.ones(()))


def test_an_operator_that_cannot_be_traced_is_named() -> None:
    @torch.library.custom_op("compat_tests::untraceable", mutates_args=())
    def untraceable(x: Tensor) -> Tensor:
        return x + 1

    with pytest.raises(Exception, match="untraceable") as caught:
        torch.compile(lambda x: untraceable(x), backend="eager")(torch.ones(3))
    assert compat.describe_error(caught.value).startswith("RuntimeError: There was no fake impl registered")
    assert compat.describe_error(ValueError("one\ntwo")) == "ValueError: one"


def test_dimensions_that_are_marked_are_symbolic_at_once() -> None:
    counter = CompileCounter()
    step = torch.compile(lambda x: x * 2, backend=counter)
    for rows, marked in ((4, True), (5, False), (6, False)):
        x = torch.ones(rows, 3)
        if marked:
            compat.mark_dynamic(x, 0)
        step(x)
    assert counter.frame_count == 1


def test_tensors_have_aliases_and_storages() -> None:
    tensor = torch.ones(4, 3).T
    twin = compat.alias(tensor)
    twin.mul_(2)
    assert not twin._is_view() and tensor._version == 0 and float(tensor[2, 3]) == 2 and twin.stride() == (1, 3)
    assert compat.storage_of(twin) is compat.storage_of(tensor)
    assert compat.storage_of(torch.ones(2).to_sparse()) is None
    torch.func.vmap(lambda row: (compat.storage_of(row), row)[1])(tensor)
    assert not compat.hooks_saved_tensors() and not compat.is_tracing() and not compat.in_backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert compat.hooks_saved_tensors()


def _traced(x: Tensor) -> Tensor:
    return x.sin()


def _calls(call: Callable[[Any, Any, Tensor], Tensor], module: Any, one: Any, x: Tensor) -> Tensor:
    return _traced(call(module, one, x))


_FRAMELESS = """
import functools, torch

def traced_by(traced):
    def shared(x):
        return traced(x) + x.numpy().item()  # no graph holds this

    return shared

def inlined(x):
    return x.sin()

class Shared:
    def __init__(self, traced):
        self.traced = traced

    @torch.no_grad()
    def method(self, x):
        return self.traced(x) + x.numpy().item()

    @functools.cache
    def cached(self, x):
        return self.method(x)

    @property
    def value(self):
        return self.traced(torch.ones(1)) + torch.ones(1).numpy().item()

    @functools.cached_property
    def kept(self):
        return self.value

    @staticmethod
    def static(traced, x):
        return traced_by(traced)(x)
"""


def test_functions_of_a_package_are_no_frames_and_are_traced_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of compiled code, what they call is compiled; within, they are part of the graph."""

    for name, zero in (("framed", 0), ("frameless", 0.0)):  # for Dynamo, equal functions are one
        (tmp_path / f"{name}.py").write_text(_FRAMELESS.replace("item()", f"item() + {zero}"))
    monkeypatch.syspath_prepend(tmp_path)
    framed, frameless = (importlib.import_module(name) for name in ("framed", "frameless"))
    compat.never_frames("frameless")
    calls: list[Callable[[Any, Any, Tensor], Tensor]] = [
        lambda module, one, x: module.traced_by(_traced)(x),
        lambda module, one, x: one.method(x),
        lambda module, one, x: one.cached(x),
        lambda module, one, x: one.value + x,
        lambda module, one, x: one.kept + x,
        lambda module, one, x: module.Shared.static(_traced, x),
    ]
    for call in calls:
        for module in (framed, frameless):
            torch._dynamo.reset()
            one, x = module.Shared(_traced), torch.ones(1)
            result = torch.compile(functools.partial(_calls, call, module, one), backend="eager")(x)
            torch.testing.assert_close(result, _calls(call, module, module.Shared(_traced), x))
            frames = {(file.stem, name) for file, name in compiled_frames()}
            files = {file for file, _ in frames}
            assert ("framed" in files, "frameless" in files) == (module is framed, False), files
            assert module is framed or (Path(__file__).stem, "_traced") in frames, "what they call is compiled"

    counter = CompileCounter()
    torch.compile(lambda x: frameless.inlined(x).cos(), backend=counter, fullgraph=True)(torch.ones(2))
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
from lightning_deepcompile import compat
from torch._inductor.async_compile import AsyncCompile
from torch.utils._triton import has_triton_package
compat.start_compile_workers()
end = time.monotonic() + 60
while has_triton_package() and not AsyncCompile.use_process_pool():  # without Triton there are none
    assert time.monotonic() < end, "the workers did not come up"
    time.sleep(0.05)
"""


def test_compile_workers_come_up_without_a_compilation() -> None:
    """Runs in a process of its own, as tests compile without workers."""
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _WORKERS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_dynamo_does_not_look_at_what_a_call_runs() -> None:
    """Dynamo goes from a module's call straight to `forward`: otherwise a small module takes far longer to trace."""

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


def test_functions_that_nobody_changes_are_not_guarded() -> None:
    scale = 2.0

    class Own(torch.nn.Module):
        @property
        def ours(self) -> float:
            return scale

        @property
        def theirs(self) -> float:
            return scale + 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.ours * self.theirs

    dropped: list[str] = []
    kept: list[str] = []
    keep = compat.unguarded(frozenset([Own.ours.fget.__code__]))

    def spy(guards: Any) -> list[bool]:
        answers = keep(guards)
        for guard, answer in zip(guards, answers, strict=True):
            (kept if answer else dropped).append(guard.name)
        return answers

    compiled = torch.compile(Own(), backend="eager", options={"guard_filter_fn": spy})
    assert compiled(torch.ones(2)).tolist() == [6.0, 6.0]
    assert dropped and all("ours" in name for name in dropped) and not any("ours" in name for name in kept)
    assert any("theirs" in name for name in kept)


def test_exporting_is_known_to_code_that_dynamo_traces() -> None:
    """Dynamo of PyTorch 2.11 answers `torch.compiler.is_exporting()` with True in every frame."""

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (3 if compat.is_exporting() else 2)

    module, one = Module(), torch.ones(())
    assert float(torch.compile(module, backend="eager", fullgraph=True)(one)) == 2.0
    assert float(torch.export.export(module, (one,)).module()(one)) == 3.0
    assert float(torch.compile(module, backend="eager", fullgraph=True)(one)) == 2.0


def test_breaks_and_recompilations_are_told_with_their_lines() -> None:
    found: list[compat.GraphReasons] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        found.append(compat.reasons_of(gm))
        return gm.forward

    def function(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    compiled = torch.compile(function, backend=backend, dynamic=False)
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    first, rest, *others = found
    assert first.place.startswith(f"{Path(__file__)}:") and "in function: torch._dynamo.graph_break()" in first.place
    assert first.broken.startswith("Call to `torch._dynamo.graph_break()`. Explanation: User-inserted graph break")
    assert not first.recompiled and not rest.broken
    assert [one.recompiled.partition("'x' ")[2] for one in others[:1]] == [
        "size mismatch at index 0. expected 3, actual 4"
    ]


def test_inductor_is_imported_when_it_is_asked_for() -> None:
    code = """
import sys
from lightning_deepcompile import compat
before = "torch._inductor.compile_fx" in sys.modules
compat.import_inductor()
print(before, "torch._inductor.compile_fx" in sys.modules)
"""
    assert run_python("-c", code).splitlines()[-1] == "False True"


def test_kernels_find_the_header_that_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel asks for a header by name, command line and processor; with another one it would compile its own."""
    from torch._inductor import codecache

    asked, precompile = [], codecache._precompile_header

    def record(*args: Any, **command: Any) -> str:
        asked.append((args, command))
        return precompile(*args, **command)

    monkeypatch.setattr(codecache, "_precompile_header", record)
    codecache.CppPythonBindingsCodeCache.cache_clear()
    compat.prepare_cpp_compiler.__wrapped__().join()
    prepared = asked.copy()
    torch.testing.assert_close(
        torch.compile(lambda x: (x * 0.7071).sin())(torch.ones(9)), torch.ones(9).mul(0.7071).sin()
    )
    assert len(prepared) == 1
    assert asked[1:] == prepared


def test_a_call_of_the_host_may_go_back_to_compiled_code() -> None:
    """The host's code is not compiled, what it is told to compile is, and code behind the call is."""
    counter = CompileCounter()

    def unit(x: Tensor) -> Tensor:
        return x.cos()

    def closure(x: Tensor) -> Tensor:
        return x.sin() * 2

    @torch.compiler.disable(recursive=False)
    def host(x: Tensor, fails: bool) -> Tensor:
        with compat.without_dynamo() as traced:
            result = unit(traced(closure)(x))
            if fails:
                raise KeyError("of the host")
            return result

    compat.never_code(host.__wrapped__.__code__)  # as `never_frames` does

    def step(x: Tensor, fails: bool) -> Tensor:
        return host(x + 1, fails) + 3

    compiled, x = torch.compile(step, backend=counter), torch.ones(2)
    for _ in range(2):
        assert torch.equal(compiled(x, False), (x + 1).sin().mul(2).cos() + 3)
        names = [name for _, name in compiled_frames()]
        assert "closure" in names and not {"unit", "host", "run"} & set(names), names
        assert counter.frame_count == 3, "before the call, the closure, and behind the call"
    with pytest.raises(KeyError, match="of the host"):
        compiled(x, True)
    with compat.without_dynamo() as traced:  # outside of compiled code there is nothing to go back to
        assert traced(closure) is closure
    assert torch.equal(torch.compile(closure, backend=counter)(x), x.sin() * 2)
