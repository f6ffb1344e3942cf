"""Forward and backward of a whole optimizer step in one CUDA graph, as torchtitan's trainer records FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_WITHOUT_MASK = "sdpa_without_mask"
_WARM_UP = 3
"""Fewest steps before the capture: FSDP2 learns its order, libraries allocate their workspaces."""
_MOST = 12


def warm_up(step: Callable[[], object]) -> int:
    """Runs steps until one of them compiles nothing; returns how many there were.

    Raises:
        RuntimeError: If each of many steps compiled something.
    """
    before = -1
    for done in range(1, _MOST + 1):
        step()
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if compiled == before and done >= _WARM_UP:
            return done
        before = compiled
    raise RuntimeError(f"the model still compiles after {_MOST} steps, and cannot be captured")


def attend_without_mask(model: PreTrainedModel) -> None:
    """Has a causal model attend by PyTorch's SDPA, and never make a mask.

    Transformers makes none for causal attention, but while a graph is captured it does, for which blocks would compile
    anew. For attention functions that others registered it makes none at any time.
    """
    AttentionInterface.register(_WITHOUT_MASK, sdpa_attention_forward)
    model.set_attn_implementation(_WITHOUT_MASK)


class CapturedStep:
    """Replays the forward and backward passes of all micro-batches of a step.

    Gradients are kept: a replay writes them where the capture did, so they must not be set to None between steps.

    Args:
        model: The sharded model. Its parameters do not change here.
        compute: Computes the losses of all micro-batches, and their gradients.
        batches: The batches of a step; later ones have the same shapes.

    Raises:
        RuntimeError: If something compiles while the graph is captured, or cannot be captured.
    """

    def __init__(
        self, model: nn.Module, compute: Callable[[Sequence[Tensor]], list[Tensor]], batches: Sequence[Tensor]
    ) -> None:
        self._batches = [batch.clone() for batch in batches]
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            warm_up(lambda: (compute(self._batches), model.zero_grad(set_to_none=True)))
        torch.cuda.synchronize()
        # NCCL's watchdog asks for events in a thread of its own, which may not end the capture.
        capture = torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local")
        with torch.compiler.set_stance("fail_on_recompile"), capture:
            self._losses = compute(self._batches)

    def __call__(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Computes the gradients of a step; returns the losses of its micro-batches, valid until the next call."""
        for mine, batch in zip(self._batches, batches, strict=True):
            mine.copy_(batch)
        self._graph.replay()
        return self._losses
