"""No full parameter is saved from forward to backward, whatever stands between its gather and its use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tracing import Captured, capture

from lightning_deepcompile.capture.partition import count_saved_parameters
from lightning_deepcompile.program.graph import is_gather, output_node


class Net(nn.Module):
    """Weights that are read transposed (linear), split (packed projections), joined, normalised, copied, and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.left, self.right = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.mix = nn.Parameter(torch.randn(4, 2, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(self.embed(tokens))
        x = F.linear(x, torch.cat([self.left.weight, F.normalize(self.right.weight, dim=1)]))
        x = x @ self.mix.flatten(0, 1).t().contiguous().view(8, 8)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _plain(net: nn.Module, tokens: Tensor) -> Tensor:
    return net(tokens)


def _autocast(net: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(tokens)


def _checkpointed(net: nn.Module, tokens: Tensor) -> Tensor:
    return net.head(checkpoint(net.layer, net.embed(tokens), use_reentrant=False)).sum()


def _saved_of_parameters_alone(captured: Captured) -> int:
    """Saved tensors that depend on parameters and nothing else; the shards themselves (inputs) excluded."""
    assert captured.forward is not None
    from_parameters: set[fx.Node] = set()
    for node in captured.forward.graph.nodes:
        sources = [n for n in node.all_input_nodes if n.op != "get_attr"]
        if is_gather(node) or (sources and all(source in from_parameters for source in sources)):
            from_parameters.add(node)
    saved = output_node(captured.forward.graph).args[0][captured.num_outputs :]
    return sum(node in from_parameters for node in saved)


@pytest.mark.parametrize("step", [_plain, _autocast, _checkpointed])
def test_no_parameter_is_saved(step: Callable[..., Tensor]) -> None:
    captured = capture(Net(), torch.arange(10).view(2, 5), step=step)
    assert _saved_of_parameters_alone(captured) == 0
    assert count_saved_parameters(captured.forward, captured.num_outputs) == 0
    # Instead backward gathers again what it needs.
    assert captured.backward is not None
    again = {captured.params[n.args[1]].name for n in captured.backward.graph.nodes if is_gather(n)}
    weights = {"layer.linear1.weight", "layer.linear2.weight", "layer.self_attn.in_proj_weight", "embed.weight"}
    assert again >= weights | (set() if step is _checkpointed else {"left.weight", "right.weight", "mix"})

    # Both counts can tell: without the marks the partitioner saves parameters.
    untagged = capture(Net(), torch.arange(10).view(2, 5), step=step, tag=False)
    assert count_saved_parameters(untagged.forward, untagged.num_outputs) == _saved_of_parameters_alone(untagged) > 0


def test_the_marks_survive_a_compute_dtype() -> None:
    """Gathered as bfloat16, as with precision ``bf16-mixed``."""
    captured = capture(Net(), torch.arange(10).view(2, 5), step=_autocast, gather_dtype=torch.bfloat16)
    assert _saved_of_parameters_alone(captured) == 0


def test_activations_are_saved_as_before() -> None:
    """The marks cost no recomputation of anything but parameters: with them as many activations are saved."""

    def activations(tag: bool) -> int:
        captured = capture(Net(), torch.arange(10).view(2, 5), tag=tag)
        assert captured.forward is not None
        saved = output_node(captured.forward.graph).args[0][captured.num_outputs :]
        return sum(n.op == "call_function" for n in saved) - _saved_of_parameters_alone(captured)

    assert activations(tag=True) == activations(tag=False)


def test_products_of_parameters_are_not_computed_twice() -> None:
    """A low-rank update is a matrix product: the marks leave it to the partitioner."""

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.up, self.down = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight + self.up @ self.down).tanh()

    captured = capture(LowRank(), torch.randn(3, 8, requires_grad=True))
    products = [n.args for gm in (captured.forward, captured.backward) for n in gm.graph.nodes if "mm" in str(n.target)]
    both_parameters = [args for args in products if all(is_gather(n) for n in args)]
    assert len(both_parameters) == 1
