"""Finds out how an optimizer class steps, by letting copies of it step on small tensors.

The same steps are taken

* with all tensors in one copy, as one process does it;
* with rows of each tensor in one copy for each of several ranks, as groups that step on shards do it;
* with each tensor in a copy of its own, as owner ranks do it.

The results that agree show which way is correct. The inputs make differences visible:

* tensors and their rows differ in scale, and so do the gradients of successive steps: reveals norms and thresholds;
* gradients depend on the tensors' values: reveals perturbed evaluations, as SAM's;
* numbers that grow equally in each step are counters and are advanced, to each whole number among the settings and to
  one that 1 to 16, 100, 1000 and 1024 divide: reveals warm-up, and actions once in several steps;
* a learning rate of zero, with which warm-up begins, is replaced;
* one element of a gradient is not a number in the last step: reveals classes that skip such steps;
* random numbers are replaced by constants, and counted.

Dependence on sizes is found in the operations that the class applies to tensors without memory, of the parameters' and
of the shards' shapes: a class that applies others than to small tensors is not known to be element-wise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_deepcompile.step.specimens import Communicates, Copy, OperationRecord, Specimen, named, watched

_SMALL = {1: 24, 2: 24, 3: 12}  # most elements of a dimension, by the number of dimensions
_SMALLER = 8  # with more dimensions
_SCALES_OF_SIZES = (1, 4, 16)
_ALIKE = 3  # tensors with as many dimensions and one dtype, of one group
_NATURAL = 4  # steps before counters are advanced
_TARGETS = (11, 101, 1001, 1_153_152_000)
_INTEGERS = 8
_SCALES = (1.0, 0.03, 20.0, 1.0)
_TOLERANCE = 1e-4
_VISIBLE = 1000  # the largest change of an element must exceed rounding by this factor

Cut = Callable[[Tensor], Tensor]
"""Takes rows of a tensor."""


@dataclass
class Findings:
    """The findings about one parameter group.

    Args:
        why_not: The reasons why steps on rows do not come to the same as those on tensors.
        coupling: Those of them why steps on a tensor alone do not come to the same as those on all.
        draws: Its steps draw random numbers, or may do so.
    """

    why_not: list[str] = field(default_factory=list)
    coupling: list[str] = field(default_factory=list)
    draws: bool = True

    @property
    def elementwise(self) -> bool:
        """Returns whether steps on rows come to the same as those on tensors."""
        return not self.why_not

    @property
    def by_tensor(self) -> bool:
        """Returns whether steps on a tensor alone come to the same as those on all."""
        return not self.coupling

    def refuse(self, reason: str, *, by_tensor: bool = False) -> None:
        """Records that the group is not element-wise, or does not even step tensor by tensor."""
        for reasons in (self.why_not, self.coupling) if by_tensor else (self.why_not,):
            if reason not in reasons:
                reasons.append(reason)


@dataclass(eq=False)
class TrialRun:
    """The steps of a copy.

    Args:
        start: Of each tensor, before the steps.
        values: Of each tensor, after each step; the last, whose gradients are no numbers, may be missing.
        watch: The record of its operations.
        closure_calls: The most in one step.
        finished: Whether it took the last step, too.
    """

    start: dict[Specimen, Tensor]
    values: dict[Specimen, list[Tensor]]
    watch: OperationRecord
    closure_calls: int
    finished: bool


def probe(optimizer: Optimizer, shards: int) -> list[Findings]:
    """Finds out how an optimizer steps on its parameter groups; the optimizer does not change.

    Args:
        optimizer: Holds the module's parameters.
        shards: Number of ranks that share them.

    Returns:
        One for each of its groups.

    Raises:
        ValueError: If its steps communicate.
    """
    likenesses = [_likeness(group) for group in optimizer.param_groups]
    findings = [Findings() for _ in likenesses]
    scale, unknown = _telling_scale(optimizer, shards)
    specimens = choose_specimens(optimizer, shards, scale or _SCALES_OF_SIZES[-1])
    try:
        whole, keep = _first_run(optimizer, specimens)
    except Communicates as error:
        raise ValueError(
            f"{type(optimizer).__name__} communicates by itself ({error}), as for parameters that every rank holds "
            "unsharded. Here parameters are sharded, and the work on tensors is divided among ranks anyway: use the "
            "version of the class that is written for one process."
        ) from error
    except Exception as error:
        for finding in findings:
            finding.refuse(f"a copy of it fails on small tensors ({named(error)})", by_tensor=True)
        return findings
    for finding in findings:
        finding.draws = bool(whole.watch.draws)
        if scale is None:
            finding.refuse("what it does to large tensors does not show on small ones", by_tensor=True)
        elif unknown:
            finding.refuse(unknown)
    _judge_whole(findings, whole)
    _judge_rows(findings, optimizer, specimens, keep, whole, shards)
    for index, finding in enumerate(findings):
        if finding.elementwise and likenesses.index(likenesses[index]) == index:
            if _shards_step_differently(optimizer, index, shards):
                finding.refuse("what it does depends on the sizes of tensors")
    _judge_tensors(findings, optimizer, specimens, keep, whole)
    # Groups that differ only in numbers share their findings.
    together: dict[Any, Findings] = {}
    for likeness, finding in zip(likenesses, findings, strict=True):
        first = together.setdefault(likeness, finding)
        for reason in finding.why_not:
            first.refuse(reason, by_tensor=reason in finding.coupling)
    return [together[likeness] for likeness in likenesses]


def may_draw(optimizer: Optimizer) -> bool:
    """Returns whether steps of an optimizer draw random numbers, or may do so."""
    try:
        return bool(_first_run(optimizer, choose_specimens(optimizer, 1))[0].watch.draws)
    except Exception:
        return True


def choose_specimens(optimizer: Optimizer, shards: int, scale: int = 1) -> list[Specimen]:
    """Chooses small tensors that stand for an optimizer's parameters, of each kind in each kind of group.

    Args:
        optimizer: Holds the parameters.
        shards: Number of ranks that share them.
        scale: How many times as large as the smallest ones they may be.
    """
    specimens: list[Specimen] = []
    groups: dict[Any, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        likeness = _likeness(group)
        groups[likeness] = groups.get(likeness, 0) + 1
        most = {1: _ALIKE, 2: 1}.get(groups[likeness], 0)
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.numel():
                kinds.setdefault((parameter.dim(), parameter.dtype), []).append(parameter)
        for alike in kinds.values():
            chosen = alike[: most - 1] if len(alike) > most else alike[:most]
            if most and len(alike) > most:
                chosen = [*chosen, max(alike[most - 1 :], key=lambda p: p.numel())]
            for parameter in chosen:
                specimens.append(Specimen(parameter, index, small_shape(parameter, shards, scale), len(specimens)))
    return specimens


def run(
    optimizer: Optimizer,
    specimens: Sequence[Specimen],
    cuts: Mapping[Specimen, Cut] | None = None,
    *,
    keep: bool = False,
    loss: float = 1.0,
    distribute: Callable[[Specimen, Tensor], Tensor] | None = None,
    steps: Sequence[int] | None = None,
) -> TrialRun:
    """Lets a copy step.

    Args:
        optimizer: The original.
        specimens: The tensors that the copy holds.
        cuts: Takes the part of each that this rank has; None: all of it.
        keep: Keep the optimizer's states.
        loss: The result of closures.
        distribute: Makes DTensors of the specimens' values.
        steps: The values that counters are advanced to; None: as the module says.
    """
    device = _device_of(optimizer)

    def part(specimen: Specimen, whole: Tensor) -> Tensor:
        own = whole if cuts is None else cuts[specimen](whole)
        own = own.to(specimen.parameter.dtype).to(device, copy=True)
        own = own * (1 + 0.5j) if own.is_complex() else own
        return own if distribute is None else distribute(specimen, own)

    tensors = {s.parameter: part(s, _initial(s)).requires_grad_(_has_gradients(s.parameter)) for s in specimens}
    start = {s: tensors[s.parameter].detach().clone() for s in specimens}
    values: dict[Specimen, list[Tensor]] = {s: [] for s in specimens}
    given = torch.tensor(loss, device=device)
    clock = 0
    own = Copy(optimizer, tensors, keep_states=keep)
    watch = OperationRecord()

    def step(spoiled: bool = False) -> None:
        nonlocal clock
        base = {s: part(s, _gradient(s, clock, spoiled)) for s in specimens}

        def set_gradients() -> None:
            for s in specimens:
                tensor = tensors[s.parameter]
                tensor.grad = base[s] + 0.5 * tensor.detach()

        with watched(device, watch if distribute is None else None):
            own.step(set_gradients, given)
        clock += 1
        for s in specimens:
            values[s].append(tensors[s.parameter].detach().clone())

    def go_to(number: int) -> None:
        nonlocal clock
        clock = number

    _take_steps(own, step, go_to, steps)
    finished = steps is None
    if finished:
        try:
            step(spoiled=True)
        except Communicates:
            raise
        except Exception:
            finished = False  # factorisations refuse NaN
    return TrialRun(start, values, watch, own.closure_calls, finished)


def _take_steps(
    own: Copy, step: Callable[[], None], go_to: Callable[[int], None], targets: Sequence[int] | None
) -> None:
    """Takes steps, also with advanced counters.

    Args:
        own: The copy.
        step: Takes one.
        go_to: Called with the number of steps that counters show.
        targets: The values that counters are advanced to; None: where something may happen.
    """
    if targets is None:
        targets = _targets(own)  # before the first steps: afterwards numbers may depend on the copy's tensors
    counts = []
    for _ in range(_NATURAL):
        step()
        counts.append(own.counters())
    clock, growing = _NATURAL, _equal_growth(counts)
    for target in targets:
        own.advance({path: growth * (target - 1 - clock) for path, growth in growing.items()})
        go_to(target - 1)
        step()
        step()
        clock = target + 1


def first_rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a rank's rows of `whole`: as many on each rank, except for the last."""
    if whole.dim() == 0:
        return whole
    rows = -(-whole.shape[0] // ranks)
    return whole[min(rank * rows, whole.shape[0]) : min((rank + 1) * rows, whole.shape[0])]


def agree(
    run: TrialRun, specimen: Specimen, others: Sequence[Sequence[Tensor]], *, last: bool, tolerance: float
) -> bool:
    """Returns whether a tensor takes the same steps elsewhere.

    Args:
        run: Of the whole.
        specimen: The tensor.
        others: For each step its parts, in order.
        last: Whether the last step counts, whose gradients are no numbers.
        tolerance: Largest difference, as part of the largest change of an element in the step.
    """
    before = _parts(run.start[specimen])
    steps = run.values[specimen]
    for index, (value, parts) in enumerate(zip(steps, others, strict=False)):
        if index == len(steps) - 1 and not last and run.finished:
            break
        one, other = _parts(value), _parts(torch.cat(list(parts)) if value.dim() else parts[0])
        finite = one.isfinite()
        if one.shape != other.shape or not torch.equal(finite, other.isfinite()):
            return False
        change, size = (one - before)[finite].abs(), one[finite].abs()
        if change.numel():
            if (one - other)[finite].abs().max() > tolerance * change.max() + _rounding(value, size):
                return False
        before = one
    return True


def _rounding(value: Tensor, size: Tensor) -> float:
    """Returns the rounding error of numbers of such a size; narrow dtypes are compared bit by bit."""
    return 4 * torch.finfo(value.dtype).eps * float(size.abs().max()) if value.dtype.itemsize >= 4 else 0.0


def _first_run(optimizer: Optimizer, specimens: Sequence[Specimen]) -> tuple[TrialRun, bool]:
    """Lets one copy step with all tensors; returns whether it needs the optimizer's states, too."""
    try:
        return run(optimizer, specimens), False
    except Communicates:
        raise
    except Exception:
        if not optimizer.state:
            raise
    return run(optimizer, specimens, keep=True), True  # some make states when they are made


def _judge_whole(findings: Sequence[Findings], whole: TrialRun) -> None:
    for specimen, values in whole.values.items():
        steps = [_parts(value) for value in (whole.start[specimen], *(values[:-1] if whole.finished else values))]
        if not all(value.isfinite().all() for value in steps):
            findings[specimen.group].refuse("it diverges on small tensors", by_tensor=True)
            continue
        changes = [(after - before).abs().max() for before, after in itertools.pairwise(steps)]
        rounding = _rounding(values[0], steps[-1])
        # D-Adaptation begins with rates that change nothing visibly.
        if max(changes) <= max(_VISIBLE * rounding, 0.0):
            findings[specimen.group].refuse("it hardly changes small tensors", by_tensor=True)


def _judge_rows(
    findings: Sequence[Findings],
    optimizer: Optimizer,
    specimens: Sequence[Specimen],
    keep: bool,
    whole: TrialRun,
    shards: int,
) -> None:
    sizes = {p.shape[0] for group in optimizer.param_groups for p in group["params"] if p.dim() and p.numel()}
    some_are_empty = any(-(-rows // shards) * (shards - 1) >= rows for rows in sizes)
    parts: list[TrialRun] = []
    for rank in range(3 if some_are_empty else 2):
        cut = _empty if rank == 2 else _half(rank)
        try:
            parts.append(run(optimizer, specimens, dict.fromkeys(specimens, cut), keep=keep, loss=1.5 + rank))
        except Exception as error:
            for finding in findings:
                finding.refuse(f"it fails on {'no rows' if rank == 2 else 'rows'} of tensors ({named(error)})")
            return
    elements = [{part.start[s].numel() for s in specimens} for part in parts]
    if any(set(part.watch.draws) - sizes for part, sizes in zip(parts, elements, strict=True)):
        for finding in findings:
            finding.refuse("elements share random numbers")
    for s in specimens:
        pieces = zip(*(part.values[s] for part in parts), strict=False)
        finished = all(one.finished for one in (whole, *parts))
        if not finished or not agree(whole, s, list(pieces), last=True, tolerance=_TOLERANCE):
            findings[s.group].refuse("rows alone step differently from tensors")


def _judge_tensors(
    findings: Sequence[Findings], optimizer: Optimizer, specimens: Sequence[Specimen], keep: bool, whole: TrialRun
) -> None:
    if all(finding.elementwise for finding in findings):
        return
    others = [finding for finding in findings if not finding.elementwise]
    if whole.closure_calls > 1:
        for finding in others:
            finding.refuse("it evaluates its closure more than once in a step", by_tensor=True)
    if not all(finding.by_tensor for finding in others):
        return
    try:
        alone = [
            run(optimizer, [s], keep=keep, loss=1.5 + index)
            for index, s in enumerate(specimens)
            if whole.watch.draws or not findings[s.group].elementwise
        ]
        # As ranks step: rows of the tensors of some groups, every other tensor of the rest.
        ranks = [
            run(
                optimizer,
                mine := [s for s in specimens if findings[s.group].elementwise or s.number % 2 == rank],
                {s: _half(rank) if findings[s.group].elementwise else _all for s in mine},
                keep=keep,
                loss=1.5 + rank,
            )
            for rank in range(2)
        ]
    except Exception as error:
        for finding in others:
            finding.refuse(f"it fails on some of the tensors alone ({named(error)})", by_tensor=True)
        return
    if whole.watch.draws and sum(len(one.watch.draws) for one in alone) != len(whole.watch.draws):
        for finding in others:
            finding.refuse("tensors share random numbers", by_tensor=True)
    for one in [*alone, *ranks]:
        for s, values in one.values.items():
            if one in ranks and findings[s.group].elementwise:
                continue
            if not agree(whole, s, [[value] for value in values], last=one.finished, tolerance=_TOLERANCE):
                findings[s.group].refuse("tensors affect each other", by_tensor=True)
    for s in specimens:
        if findings[s.group].elementwise:
            pieces = zip(*(one.values[s] for one in ranks), strict=False)
            if not agree(whole, s, list(pieces), last=False, tolerance=_TOLERANCE):
                findings[s.group].refuse("groups affect each other", by_tensor=True)


def _telling_scale(optimizer: Optimizer, shards: int) -> tuple[int | None, str]:
    """Finds the scale of small tensors on which the class does the same as on the parameters.

    Returns:
        The scale, None if there is none; and why operations are not known, "" if they are.
    """
    shapes = {
        parameter: tuple(parameter.shape)
        for index in range(len(optimizer.param_groups))
        for parameter in _distinct(optimizer, index)
    }
    found: list[list[str]] = []
    try:
        whole = _operations(optimizer, shapes)
        for scale in _SCALES_OF_SIZES:
            found.append(_operations(optimizer, {p: small_shape(p, shards, scale) for p in shapes}))
            if found[-1] == whole:
                return scale, ""
        whole = _operations(optimizer, shapes)  # again: a first step may make tables that all of a class share
        return next((scale for scale, one in zip(_SCALES_OF_SIZES, found, strict=True) if one == whole), None), ""
    except Exception as error:
        return _SCALES_OF_SIZES[1], f"its operations on large tensors are not known ({named(error)})"


def _shards_step_differently(optimizer: Optimizer, index: int, shards: int) -> bool:
    """Returns whether a group's operations on shards are not those on tensors."""
    shapes = {parameter: tuple(parameter.shape) for parameter in _distinct(optimizer, index)}
    try:
        whole = _operations(optimizer, shapes)
        return any(
            _operations(optimizer, {p: _rows_of(shape, shards, last=last) for p, shape in shapes.items()}) != whole
            for last in (False, True)
        )
    except Exception:  # on tensors it did not fail
        return True


def _distinct(optimizer: Optimizer, index: int) -> list[Tensor]:
    """Returns parameters of a group, one of each shape and dtype."""
    kinds: dict[Any, Tensor] = {}
    for parameter in optimizer.param_groups[index]["params"]:
        if parameter.numel():
            kinds.setdefault((parameter.shape, parameter.dtype), parameter)
    return [*kinds.values()]


def _operations(optimizer: Optimizer, shapes: Mapping[Tensor, tuple[int, ...]]) -> list[str]:
    """Returns the operations of steps on tensors of such shapes, which have no memory."""
    tensors = {p: torch.empty(shape, dtype=p.dtype, device="meta") for p, shape in shapes.items()}
    for tensor in tensors.values():
        tensor.requires_grad_(_has_gradients(tensor))

    def set_gradients() -> None:
        for tensor in tensors.values():
            tensor.grad = torch.empty_like(tensor)

    watch = OperationRecord()
    own = Copy(optimizer, tensors, keep_states=bool(optimizer.state))
    for group in own.optimizer.param_groups if _steps_by_pytorch(optimizer) else ():
        # They choose kernels of the same arithmetic, and are refused for tensors without memory.
        group.update({name: False for name in ("fused", "capturable") if group.get(name)})
    with watched(torch.device("cpu"), watch):
        _take_steps(own, lambda: own.step(set_gradients, torch.tensor(1.0)), lambda number: None, None)
    return watch.operations


def _steps_by_pytorch(optimizer: Optimizer) -> bool:
    """Returns whether a class is derived from one of PyTorch's, or wraps one."""
    held = [optimizer, *(one for one in vars(optimizer).values() if isinstance(one, Optimizer))]
    kinds = {kind for one in held for kind in type(one).__mro__} - {Optimizer}
    return any(kind.__module__.startswith("torch.optim.") for kind in kinds)


def _rows_of(shape: tuple[int, ...], shards: int, *, last: bool) -> tuple[int, ...]:
    """Returns the shape of a shard, of the first rank or of the last that has rows."""
    if not shape:
        return shape
    rows = -(-shape[0] // shards)
    return ((shape[0] - 1) % rows + 1 if last else rows, *shape[1:])


def small_shape(parameter: Tensor, shards: int, scale: int = 1) -> tuple[int, ...]:
    """Returns the shape of a small tensor for a parameter; arguments as of `choose_specimens`."""
    shape = tuple(parameter.shape)
    if not shape:
        return shape
    limit = _SMALL.get(len(shape), _SMALLER) * scale
    factor = min(1.0, limit / max(shape))
    small = []
    for size in shape:
        common = math.gcd(size, 12)  # heads, or queries, keys and values in one, stay divisible
        small.append(max(int(size * factor) // common * common, min(size, 4), common if size > 4 else 1))
    rows, least = shape[0], min(2 * shards, 64)
    small[0] = min(rows, max(small[0], least))
    if rows > small[0]:  # even or uneven like the parameter's
        small[0] += -small[0] % math.lcm(shards, math.gcd(rows, 12)) if rows % shards == 0 else small[0] % shards == 0
        small[0] = min(rows, small[0])
    return tuple(small)


def _likeness(group: Mapping[str, Any]) -> Any:
    """Returns what groups that step alike have in common: everything but names, rates and positive numbers."""
    settings = []
    for key, value in sorted(group.items(), key=lambda item: str(item[0])):
        if key not in ("params", "lr", "initial_lr", "name", "group_name", "param_names"):
            settings.append((key, _manner(value)))
    return tuple(settings), frozenset((p.dim(), p.dtype) for p in group["params"] if p.numel())


def _manner(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_manner, value))
    if isinstance(value, float):
        return value > 0
    return repr(value) if value is None or isinstance(value, bool | int | str) else type(value).__qualname__


def _initial(specimen: Specimen) -> Tensor:
    return _random(specimen, 0) * 0.3 * _row_scales(specimen.shape, 3.0) * 2.0 ** (specimen.number % 3)


def _gradient(specimen: Specimen, step: int, spoiled: bool) -> Tensor:
    scale = _SCALES[step % len(_SCALES)] * 3.0 ** (specimen.number % 4)
    # Their common part lets D-Adaptation find its rate.
    gradient = (_random(specimen, 1) + _random(specimen, 2 + step % 997)) * scale * _row_scales(specimen.shape, 0.2)
    if spoiled and specimen.number == 0 and gradient.numel():
        gradient.view(-1)[-1] = math.nan
    return gradient


def _random(specimen: Specimen, salt: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + 1000 * specimen.number + salt)
    return torch.randn(specimen.shape, generator=generator)


def _row_scales(shape: tuple[int, ...], last: float) -> Tensor:
    """Returns factors of rows: 1 in the first half, `last` in the second."""
    if not shape:
        return torch.ones(())
    factors = torch.ones(shape[0])
    factors[-(-shape[0] // 2) :] = last
    return factors.view(-1, *(1 for _ in shape[1:]))


def _equal_growth(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    *_, first, second, third = counts
    growth = {
        p: n - second[p]
        for p, n in third.items()
        if p in second and p in first and second[p] - first[p] == n - second[p]
    }
    return {path: size for path, size in growth.items() if size and size.is_integer()}


def _targets(own: Copy) -> list[int]:
    integers = sorted(n for n in own.integers() if _NATURAL + 1 < n <= 1_000_000)
    targets: list[int] = []
    for target in sorted({*integers[:_INTEGERS], *_TARGETS}):
        if target > (targets[-1] if targets else _NATURAL) + 2:
            targets.append(target)
    return targets


def _has_gradients(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _parts(tensor: Tensor) -> Tensor:
    """Returns a tensor's numbers as doubles; a complex number is two."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _half(rank: int) -> Cut:
    return lambda whole: first_rows(whole, rank, 2)


def _empty(whole: Tensor) -> Tensor:
    return whole[:0] if whole.dim() else whole


def _all(whole: Tensor) -> Tensor:
    return whole


def _device_of(optimizer: Optimizer) -> torch.device:
    return next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
