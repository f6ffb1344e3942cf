"""Captures real modules without a process group, and runs their programs on a simulated runtime.

A module's parameters are sharded in name only: its accessors return ``dc.gather`` of empty shards, whose fake kernel
is all that tracing needs. The simulated runtime then executes a program with the full parameters at hand, and holds it
to the rules that a real one cannot check: nothing is waited for that was not launched, what is released is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_deepcompile import compat
from lightning_deepcompile.capture.inlining import computed_with
from lightning_deepcompile.capture.partition import partition
from lightning_deepcompile.program.codegen import generate
from lightning_deepcompile.program.lower import RegionCompiler, lower
from lightning_deepcompile.program.program import DerivedBlock, ParamInfo, Program
from lightning_deepcompile.program.saved import mark_saved, number_saved
from lightning_deepcompile.program.schedule import ProgramKind
from lightning_deepcompile.runtime import load_extension
from lightning_deepcompile.sharding.access import StepState, install_access
from lightning_deepcompile.sharding.layout import assign_blocks
from lightning_deepcompile.sharding.shards import collect_parameters

__all__ = ["Captured", "Simulator", "capture"]


class _TracedError(Exception):
    """Ends the first call of a compiled function: there is no runtime that could run it."""


@dataclass
class Captured:
    """A module's graphs as AOTAutograd hands them to the compilers, and its parameters.

    Args:
        params: What passes know of the parameters, by id.
        full: Full parameters by id.
        args: What the forward (or inference) graph was called with.
        forward: Partitioned forward graph, if gradients were needed.
        backward: Partitioned backward graph.
        inference: The graph, if none were.
        num_outputs: Outputs of `forward` that are not saved for backward.
    """

    params: dict[int, ParamInfo]
    full: dict[int, Tensor]
    args: list[Any] = field(default_factory=list)
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    inference: fx.GraphModule | None = None
    num_outputs: int = 0

    def ids(self, *names: str) -> list[int]:
        """Parameter ids by name."""
        by_name = {info.name: ds_id for ds_id, info in self.params.items()}
        return [by_name[name] for name in names]

    def lower(
        self,
        kind: ProgramKind,
        compiler: Callable[..., Any] | None = None,
        kept: Sequence[int] = (),
        derived: tuple[DerivedBlock, ...] = (),
    ) -> Program:
        """A program of one of the graphs, in functional form; the graph is rewritten."""
        gm = getattr(self, kind)
        assert gm is not None, f"no {kind} graph was captured"
        compile_region = compiler or RegionCompiler("eager")
        program = lower(gm, name=kind, kind=kind, graph_id=7, params=self.params, compile_region=compile_region)
        return replace(program.with_kept(kept), derived=derived)


def capture(
    module: nn.Module,
    *inputs: Any,
    step: Callable[..., Any] | None = None,
    world: int = 2,
    tag: bool = True,
    gather_dtype: torch.dtype | None = None,
    dynamic: bool | None = None,
    eager: bool = True,
) -> Captured:
    """Traces ``step(module, *inputs)`` with sharded parameters.

    Args:
        module: The module; changed in place (its classes are swapped).
        *inputs: Inputs of the step.
        step: What to trace; by default it calls the module.
        world: Number of ranks to pretend.
        tag: Whether gathers are marked for recomputation, as they always are outside of tests.
        gather_dtype: Compute dtype; None keeps the parameters'.
        dynamic: For `torch.compile`.
        eager: As in `compat.capture`.
    """
    load_extension()
    found = collect_parameters(module)
    blocks = assign_blocks(module, [owners[0].fqn for owners in found.values()])
    result = Captured({}, {})
    entries: dict[nn.Module, dict[str, Any]] = {}
    for ds_id, (parameter, owners) in enumerate(found.items()):
        name, dtype = owners[0].fqn, gather_dtype or parameter.dtype
        rows = -(-parameter.shape[0] // world)
        shard = torch.zeros(rows, *parameter.shape[1:], dtype=parameter.dtype, requires_grad=parameter.requires_grad)
        bytes_ = shard.numel() * world * dtype.itemsize
        result.params[ds_id] = ParamInfo(ds_id, name, blocks[name], bytes_, dtype)
        result.full[ds_id] = parameter.detach().to(dtype)
        for owner in owners:
            entries.setdefault(owner.module, {})[owner.name] = (shard, ds_id, tuple(parameter.shape), dtype)
    for owner_module, names in entries.items():
        install_access(owner_module, names, StepState())

    def record(kind: ProgramKind, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        setattr(result, kind, gm)

        def run(args: list[Any]) -> Any:
            result.args = list(args)
            raise _TracedError

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def cut(gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        result.num_outputs = kwargs["num_fwd_outputs"]
        split = partition if tag else (lambda *a, **k: compat.partition(*a, lambda gm: None, **k))
        result.forward, result.backward = split(gm, joint_inputs, **kwargs)
        computed = computed_with(result.backward, ())
        mark_saved(result.backward, number_saved(result.forward, result.num_outputs, computed))
        return result.forward, result.backward

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compat.capture(
            gm,
            example_inputs,
            forward=lambda gm, args: record("forward", gm, args),
            backward=lambda gm, args: record("backward", gm, args),
            inference=lambda gm, args: record("inference", gm, args),
            partitioner=cut,
            eager=eager,
        )

    torch._dynamo.reset()
    try:
        torch.compile(step or (lambda module, *args: module(*args)), backend=backend, fullgraph=True, dynamic=dynamic)(
            module, *inputs
        )
    except _TracedError:
        return result
    raise AssertionError("the step was not compiled")


@dataclass
class Simulator:
    """The runtime's rules, in Python, for one rank that has every full parameter.

    Args:
        full: Full parameters by id, in their compute dtype.
        boundary: Whether this is the last micro-batch before the optimizer steps.

    Attributes:
        gathered: Gathered parameters by id; released ones are gone, and their memory is NaN.
        waited: Ids that were waited for since their launch.
        grads: Sums of the gradients that were reduced.
        held: Sums of those that wait for the boundary.
        reductions: How often each parameter's gradient was reduced.
        log: What ran: ``(name, ids)``.
        copies: Saved tensors that are being copied: the host tensor, and its target if it is on its way back.
    """

    full: dict[int, Tensor]
    boundary: bool = True
    gathered: dict[int, Tensor] = field(default_factory=dict)
    waited: set[int] = field(default_factory=set)
    grads: dict[int, Tensor] = field(default_factory=dict)
    held: dict[int, Tensor] = field(default_factory=dict)
    reductions: dict[int, int] = field(default_factory=dict)
    log: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def generate(self, program: Program) -> Callable[[list[Any]], Sequence[Any]]:
        """The function of `program`, which calls this simulator."""
        run, _ = generate(program)
        for name, value in run.__globals__.items():
            if str(value).startswith("dc."):
                run.__globals__[name] = getattr(self, "_" + str(value).split(".")[1])
        return run

    def interpret(self, gm: fx.GraphModule, args: Sequence[Any]) -> Sequence[Any]:
        """Runs a graph node by node."""
        simulator = self

        class Interpreter(fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                name = str(target)
                if name.startswith("dc."):
                    return getattr(simulator, "_" + name.split(".")[1])(*args, **kwargs)
                return super().call_function(target, args, kwargs)

        return Interpreter(gm).run(*args)

    def _prefetch_params_fused(self, graph_id: int, _: list[Any], ids: list[int], dtypes: list[torch.dtype]) -> None:
        self.log.append(("launch", tuple(ids)))
        for ds_id, dtype in zip(ids, dtypes, strict=True):
            assert self.full[ds_id].dtype == dtype
            if ds_id not in self.gathered:
                self.gathered[ds_id] = self.full[ds_id].clone()

    def _wait_allgather_fused(self, graph_id: int, ids: list[int]) -> list[Tensor]:
        self.log.append(("wait", tuple(ids)))
        for ds_id in ids:
            assert ds_id in self.gathered, f"parameter {ds_id} is waited for but was not launched, or was released"
        self.waited.update(ids)
        return [self.gathered[ds_id].view_as(self.gathered[ds_id]) for ds_id in ids]

    def _release_params_fused(self, graph_id: int, ids: list[int]) -> None:
        self.log.append(("release", tuple(ids)))
        for ds_id in ids:
            buffer = self.gathered.pop(ds_id, None)
            self.waited.discard(ds_id)
            if buffer is not None and buffer.is_floating_point():
                buffer.fill_(float("nan"))

    def _release_params_at_boundary(self, graph_id: int, ids: list[int]) -> None:
        if self.boundary:
            self._release_params_fused(graph_id, ids)

    def _reduce_grads_fused(self, graph_id: int, grads: list[Tensor], ids: list[int]) -> None:
        self.log.append(("reduce", tuple(ids)))
        for ds_id, grad in zip(ids, grads, strict=True):
            assert grad.is_contiguous()
            if graph_id & 1 << 31:  # as `Program.boundary_id`
                grad = grad + self.held.pop(ds_id, torch.zeros_like(grad))
                if not self.boundary:
                    self.held[ds_id] = grad
                    continue
            self._accumulate(ds_id, grad)

    def _end_backward(self, graph_id: int) -> None:
        self.log.append(("end_backward", ()))

    def _offload_tensors_fused(self, graph_id: int, tensors: list[Tensor]) -> list[Tensor]:
        self.log.append(("offload", (len(tensors),)))
        hosts = [tensor.clone() for tensor in tensors]
        self.copies += [(host, None) for host in hosts]
        return hosts

    def _reload_tensors_fused(self, graph_id: int, hosts: list[Tensor]) -> list[Tensor]:
        self.log.append(("reload", (len(hosts),)))
        targets = [torch.full_like(h, float("nan") if h.is_floating_point() else 0) for h in hosts]
        self.copies += list(zip(hosts, targets, strict=True))
        return targets

    def _wait_copies_fused(self, graph_id: int, hosts: list[Tensor]) -> None:
        self.log.append(("wait_copy", (len(hosts),)))
        for host in hosts:
            (position,) = [k for k, (other, _) in enumerate(self.copies) if other is host]
            _, target = self.copies.pop(position)
            if target is not None:  # what is read before it is waited for is not there yet
                target.copy_(host)

    def _gather(self, shard: Tensor, ds_id: int, size: list[int], dtype: torch.dtype) -> Tensor:
        assert list(self.full[ds_id].shape) == list(size) and self.full[ds_id].dtype == dtype
        return self.full[ds_id].clone()

    def _reduce(self, grad: Tensor, ds_id: int, shard_size: list[int], dtype: torch.dtype) -> Tensor:
        self._accumulate(ds_id, grad)
        return grad.new_zeros(shard_size, dtype=dtype)

    def _accumulate(self, ds_id: int, grad: Tensor) -> None:
        assert grad.shape == self.full[ds_id].shape
        self.reductions[ds_id] = self.reductions.get(ds_id, 0) + 1
        self.grads[ds_id] = self.grads[ds_id] + grad if ds_id in self.grads else grad.clone()
