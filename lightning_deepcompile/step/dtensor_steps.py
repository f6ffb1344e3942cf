"""Steps on DTensors: the tensors that an optimizer holds in place of parameters, and a test of its class."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_deepcompile import compat
from lightning_deepcompile.compat.fake import pretended
from lightning_deepcompile.ranks.exchange import exchange
from lightning_deepcompile.ranks.ranks import Ranks
from lightning_deepcompile.sharding.parameter import distribute_rows
from lightning_deepcompile.step.probe import agree, choose_specimens, first_rows, run
from lightning_deepcompile.step.specimens import CannotCopy, Specimen, named

_TOLERANCE = 1e-3  # norms are summed in another order


def replicated(tensor: Tensor, ranks: Ranks) -> DTensor:
    """Returns a tensor that is equal on all ranks as a DTensor of the same memory."""
    placements = [Replicate()] * ranks.mesh.ndim
    return DTensor.from_local(tensor.detach(), ranks.mesh, placements, run_check=False)


def dtensor_problem(optimizer: Optimizer, ranks: Ranks) -> str:
    """Compares a copy of an optimizer that steps on small DTensors with plain steps; a collective.

    Args:
        optimizer: Holds the module's parameters; it does not change.
        ranks: The ranks among which they are sharded.

    Returns:
        The problem with DTensors, the same on all ranks; "" if there is none.

    Raises:
        ValueError: On all ranks, if there is a problem and the class cannot step on one rank either.
    """
    # First each rank by itself: if the class fails on one alone, on rows that others lack, these do not wait for it.
    with pretended(ranks.shard_group, ranks.mesh.device_type) as mesh:
        told = exchange(_problem(optimizer, Ranks(mesh), compares=False), ranks.group)
    if not any(problem for problem, _ in told):
        told = exchange(_problem(optimizer, ranks, compares=True), ranks.group)
    problem, may_step_alone = next((one for one in told if one[0]), ("", True))
    if problem and not may_step_alone:
        raise ValueError(
            f"{type(optimizer).__name__} is not element-wise and does not step tensor by tensor. So it must step "
            f"on DTensors, which are PyTorch's sharded tensors, and there {problem}. Write its `step` with operations "
            "that DTensors support, with states made by `torch.zeros_like(parameter)`, or use an optimizer that "
            "updates each tensor by itself."
        )
    return problem


def _problem(optimizer: Optimizer, ranks: Ranks, *, compares: bool) -> tuple[str, bool]:
    """Returns the problem with DTensors, and whether the class can step on one rank instead.

    Args:
        optimizer: Holds the module's parameters.
        ranks: The ranks among which they are sharded.
        compares: Whether results count, or only whether it fails.
    """
    specimens = choose_specimens(optimizer, ranks.shards)

    def distribute(specimen: Specimen, whole: Tensor) -> Tensor:
        if not specimen.shape:
            return compat.AssignableDTensor.like(replicated(whole, ranks))
        rows = first_rows(whole, ranks.shard_rank, ranks.shards).clone()
        return compat.AssignableDTensor.like(distribute_rows(rows, specimen.shape, ranks))

    try:
        whole = run(optimizer, specimens, steps=())
    except Exception:  # which is known; on DTensors it may fail differently
        whole = None
    try:
        sharded = run(optimizer, specimens, steps=(), distribute=distribute)
        if not compares:
            return "", True
        values = {s: [compat.full_tensor(v) for v in sharded.values[s] if isinstance(v, DTensor)] for s in specimens}
    except CannotCopy:
        return "", True  # the first step shows it
    except Exception as error:
        # Ranks that own nothing would wait for a second evaluation.
        return f"it fails ({named(error)})", whole is not None and whole.closure_calls <= 1
    if whole is None or whole.watch.draws:
        return "", True
    same = all(agree(whole, s, [[v] for v in values[s]], last=False, tolerance=_TOLERANCE) for s in specimens)
    return ("", True) if same else ("it does not compute what it does in one process", whole.closure_calls <= 1)
