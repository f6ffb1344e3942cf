"""Graphs as AOTAutograd writes them, for tests that need a particular one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from lightning_deepcompile.program.normalize import normalize
from lightning_deepcompile.program.regions import Region, cut_regions
from lightning_deepcompile.runtime import load_extension

aten = torch.ops.aten


class Graph:
    """Writes a graph as AOTAutograd would, with fake values."""

    def __init__(self) -> None:
        load_extension()
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def gather(self, ds_id: int, *size: int) -> fx.Node:
        shard = self.input(f"shard_{ds_id}_{len(self.graph.nodes)}", *size)
        return self.call(torch.ops.dc.gather.default, shard, ds_id, list(size), torch.float32)

    def reduce(self, grad: fx.Node, ds_id: int) -> fx.Node:
        shape = list(grad.meta["val"].shape)
        return self.call(torch.ops.dc.reduce.default, grad, ds_id, shape, torch.float32)

    def normalized(self, *outputs: Any) -> list[fx.Node]:
        self.graph.output(outputs)
        normalize(self.graph)
        return list(self.graph.nodes)

    def regions(self, *outputs: Any) -> list[Region]:
        self.normalized(*outputs)
        return cut_regions(self.graph, lambda ds_id: f"block{ds_id // 10}")


def of(nodes: list[fx.Node], target: Any) -> list[fx.Node]:
    return [n for n in nodes if n.target is target]
