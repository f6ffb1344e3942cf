"""Parameters and gradients in hooks: what is computed of them is of all ranks' rows, and rows are counted globally."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from multiprocess import run_ranks
from test_handover import trainer_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_deepcompile import CompileConfig, DeepCompileStrategy

ROWS, COLUMNS = 7, 3  # three ranks have 3, 3 and 1 rows
VALUES = torch.linspace(-1, 2, ROWS * COLUMNS).view(ROWS, COLUMNS)
PLAIN = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


def fill(place: Any, value: Any) -> Callable[[Tensor], Any]:
    return lambda t: t.__setitem__(place(t) if callable(place) else place, value)


READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda t: t.norm().item(),
    "1-norm": lambda t: float(t.norm(1)),
    "largest": lambda t: t.abs().max().item(),
    "sum": lambda t: t.sum().item(),
    "mean": lambda t: float(t.mean()),
    "deviation": lambda t: t.std().item(),
    "mean of rows": lambda t: t.mean(0),
    "sum of columns": lambda t: t.sum(1),
    "root of squares": lambda t: t.square().sum().sqrt().item(),
    "fraction of zeros": lambda t: ((t == 0).sum() / t.numel()).item(),
    "any": lambda t: bool((t > 1.9).any()),
    "a number": lambda t: t[5, 2].item(),
    "last row": lambda t: t[-1],
    "rows": lambda t: t[2:5],
    "norm of rows": lambda t: t[2:].norm().item(),
    "list": lambda t: t.detach().tolist(),
    "array": lambda t: torch.from_numpy(t.detach().cpu().numpy()),
    "text": lambda t: f"{t.norm():.3f}",
    "each row": lambda t: [row.sum().item() for row in t.detach()],
    "flattened": lambda t: t.flatten()[4:9],
    "a quantile": lambda t: t.abs().view(-1).kthvalue(5).values.item(),
    "where": lambda t: t.nonzero(),
    "values of a mask": lambda t: t[t > 1],
    "unique": lambda t: t.unique(),
    "norm of several": lambda t: nn.utils.get_total_norm([t, t * 2]).item(),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "rows are set": fill(slice(0, 4), 0.0),
    "last rows are set": fill(slice(-2, None), 5.0),
    "a row is set": fill(3, PLAIN[0]),
    "a number is set": fill((5, 1), 9.0),
    "a column is set": fill((slice(None), 1), 4.0),
    "all is set": fill(slice(None), 2.0),
    "rows of a list": fill([0, 6], 0.0),
    "where a mask is": fill(lambda t: t > 1, 0.0),
    "rows are zeroed": lambda t: t[:4].zero_(),
    "rows of data are zeroed": lambda t: t.data[:4].zero_(),
    "a row of rows": lambda t: t[2:6][1].mul_(3),
    "a number of a row": lambda t: t[6].__setitem__(1, 7.0),
    "halves": lambda t: t.chunk(2)[1].add_(1),
    "narrow": lambda t: t.narrow(0, 1, 5).clamp_(max=0.5),
    "transposed": lambda t: t.T[1].fill_(3),
    "twice": lambda t: (row := t[4], row.zero_(), row.add_(1)),
    "all is scaled": lambda t: t.mul_(0.5),
    "all is copied": lambda t: t.copy_(PLAIN),
    "data is copied": lambda t: t.data.copy_(PLAIN),
    "data is assigned": lambda t: setattr(t, "data", t.data * 0.5),
    "plain data is assigned": lambda t: setattr(t, "data", PLAIN.clone()),
    "a plain tensor is added": lambda t: t.add_(PLAIN, alpha=0.1),
    "columns are scaled": lambda t: t.mul_(PLAIN[0]),
    "centred": lambda t: t.sub_(t.mean(0)),
    "normed": lambda t: t.div_(t.norm()),
    "index_fill": lambda t: t.index_fill_(0, torch.tensor([0, 5]), 0.0),
    "index_add": lambda t: t.index_add_(0, torch.tensor([5]), torch.ones(1, COLUMNS)),
    "flat rows": lambda t: t.view(-1)[4:9].zero_(),
    "from a vector": lambda t: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([t]) * 0.5, [t]),
    "the largest stay": lambda t: t.mul_((t.abs() >= t.abs().flatten().topk(4).values[-1]).float()),
    "a plain mask of its indices": lambda t: t.mul_(_marked(t.numel(), t.flatten().topk(4).indices).view(t.shape)),
    "clipped": lambda t: nn.utils.clip_grads_with_norm_([_with_grad(t)], 1.0, t.norm()),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a plain factor": lambda t: PLAIN[:, :1].T @ t,
}


def _marked(count: int, indices: Tensor) -> Tensor:
    marked = torch.zeros(count)
    marked[indices] = 1
    return marked


def _with_grad(grad: Tensor) -> Any:
    return type("Owner", (), {"grad": grad})()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(COLUMNS, ROWS)
        self.found: dict[tuple[str, str], Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = grad_norm(self, 2)["grad_2.0_norm_total"]
        self.log("norm", norm)
        self.log("largest", self.net.weight.grad.abs().max())
        self.found["logged", "norm"] = float(norm)
        for what, tensor in (("weight", self.net.weight), ("gradient", self.net.weight.grad)):
            with torch.no_grad():
                self.look(what, tensor)

    def look(self, what: str, tensor: Tensor) -> None:
        for name, read in READS.items():
            tensor.copy_(VALUES)
            value = read(tensor)
            value = value.full_tensor() if isinstance(value, DTensor) else value
            self.found[what, name] = value.detach().clone() if isinstance(value, Tensor) else value
        for name, write in WRITES.items():
            tensor.copy_(VALUES)
            write(tensor)
            self.found[what, name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        if isinstance(tensor, DTensor):
            for name, compute in REFUSED.items():
                with pytest.raises((RuntimeError, NotImplementedError), match=r"full_tensor\(\)"):
                    compute(tensor)
                    raise AssertionError(name)
            tensor.copy_(VALUES)
            file = io.BytesIO()
            torch.save(tensor, file)
            file.seek(0)
            twins = copy.deepcopy(tensor), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(tensor))
            assert all(type(twin) is DTensor and torch.equal(twin.full_tensor(), VALUES) for twin in twins)


def found(strategy: Any) -> tuple[dict[tuple[str, str], Any], dict[str, float]]:
    torch.manual_seed(0)
    module, trainer = Net(), trainer_of(strategy)
    rows = torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    return module.found, {name: float(value) for name, value in trainer.callback_metrics.items()}


def _found_sharded() -> tuple[dict[tuple[str, str], Any], dict[str, float]]:
    return found(DeepCompileStrategy(compile=CompileConfig(region_backend="eager")))


def test_values_and_rows_are_those_of_one_process() -> None:
    expected, logged = found("auto")
    for ours, metrics in run_ranks(_found_sharded, 3):
        assert ours.keys() == expected.keys()
        for key, value in expected.items():
            if isinstance(value, str):
                assert ours[key] == value
                continue
            torch.testing.assert_close(
                ours[key], value, rtol=1e-5, atol=1e-6, msg=f"{key}: {ours[key]} against {value}"
            )
        assert metrics == pytest.approx(logged, rel=1e-5)
