"""The `dc` functions and operators report misuse, on one rank and between ranks."""

from __future__ import annotations

import os
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multiprocess import run_ranks

CONFIG = {
    "symmetric_memory": False,
    "double_buffer": True,
    "free_activation_threshold": 64,
    "sync_before_reduce": False,
    "sync_after_reduce": False,
    "sync_before_allgather": False,
    "sync_after_allgather": False,
}


def _misuse() -> None:
    from lightning_deepcompile import dc
    from lightning_deepcompile.runtime import load_extension

    def refuses(error: type[Exception], message: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(error, match=message):
            call(*args, **kwargs)

    load_extension()  # what registers the operators; dc.init does it, too
    ops = torch.ops.dc
    empty = torch.empty(0)
    dc.reset()
    dc.cleanup()
    assert not dc.is_profiling()
    refuses(RuntimeError, "Call dc.init", dc.start_forward)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pg = dist.group.WORLD
    refuses(ValueError, "unknown config field 'double_bufer'.*double_buffer", dc.init, pg, {"double_bufer": True}, 8)
    refuses(ValueError, "unknown config field 'x'", dc.init, pg, types.SimpleNamespace(**CONFIG, x=1), 8)
    refuses(TypeError, "'free_activation_threshold' must be of type int", dc.init, pg,
            {"free_activation_threshold": "1"}, 8)  # fmt: skip
    refuses(ValueError, "initial_reduce_bucket_size.*positive", dc.init, pg, CONFIG, 0)
    refuses(RuntimeError, r"id 0 .*Call dc.init", ops.allgather_param, empty, 0, 0)
    dc.init(pg, types.SimpleNamespace(**CONFIG), 8)
    refuses(RuntimeError, "initialised already", dc.init, pg, CONFIG, 8)

    shard, grad = torch.randn(6), torch.zeros(6)
    for id_ in (-1, 2**32, "a"):
        refuses(ValueError, "ds_id", dc.register_param, id_, [2, 3], shard, grad)
    message = r"needs a `shard` of shape \[2, 3\] or \[6\], got \[5\]"
    refuses(ValueError, message, dc.register_param, 0, [2, 3], shard[:5], grad)
    refuses(ValueError, "`grad` must be a floating tensor", dc.register_param, 0, [2, 3], shard, torch.zeros(6).long())
    refuses(ValueError, "on meta", dc.register_param, 0, [2, 3], shard.to("meta"), grad)
    dc.register_param(0, [2, 3], shard, grad)
    dc.register_param(0, [2, 3], shard, grad)  # the same again
    refuses(ValueError, "id 0 of 'param0'.*already taken", dc.register_param, 0, [3, 2], shard, grad)
    refuses(ValueError, "parameter id 7 .*not registered.*Call register_param", dc.register_graph_z3, 0, [0, 7])
    refuses(ValueError, "graph 0 .*not registered.*Call register_graph", ops.allgather_param, empty, 0, 0)
    dc.register_graph_z3(0, [0])
    refuses(ValueError, "id 1 does not belong to graph 0", ops.allgather_param, empty, 0, 1)
    refuses(ValueError, "not negative, got -3", ops.allgather_param, empty, -3, 0)
    refuses(RuntimeError, "'param0' is not gathered", ops.wait_allgather, empty, 0, 0)
    refuses(ValueError, "id 0 is not gathered", ops.release_param, empty, 0, 0, 1)
    refuses(RuntimeError, "end_forward: no forward", dc.end_forward)
    refuses(RuntimeError, "reduce_grad: no backward.*Call start_backward", ops.reduce_grad, torch.zeros(2, 3), 0, 0)
    refuses(RuntimeError, "end_backward: no backward", dc.end_backward, 0)
    refuses(ValueError, "id 9 .*not registered", dc.set_persistent, 9)
    refuses(ValueError, "id 9 .*not registered", dc.invalidate_gathered_param, 9)

    dc.start_forward()
    full = ops.wait_allgather(ops.allgather_param(empty, 0, 0), 0, 0)
    value = shard.view(2, 3).clone()
    assert torch.equal(full, value)
    refuses(RuntimeError, "asked for as Half but is gathered as Float", ops.allgather_param, empty, 0, 0, torch.half)
    refuses(ValueError, "n_users` must be positive", ops.release_param, empty, 0, 0, 0)
    ops.release_param(empty, 0, 0, 3)
    refuses(ValueError, "`n_users` of parameter id 0 was 3", ops.release_param, empty, 0, 0, 2)
    held = torch.zeros(64)
    assert dc.free_tensors([torch.zeros(3), held]) is None and held.numel() == 0
    dc.end_forward()
    dc.start_backward(update=True)
    refuses(ValueError, r"needs a floating gradient of shape \[2, 3\]", ops.reduce_grad, torch.zeros(3, 2), 0, 0)
    refuses(ValueError, "needs a floating gradient", ops.reduce_grad, torch.zeros(2, 3).long(), 0, 0)
    refuses(ValueError, "graph 5 ", dc.end_backward, 5)
    ops.reduce_grad(torch.ones(2, 3), 0, 0)
    dc.reset()  # in the middle of a pass: the gradient is dropped
    assert not grad.any()
    dc.register_graph_z1(0, [0])
    dc.start_backward(update=False)
    ops.reduce_grad(torch.ones(2, 3), 0, 0)
    dc.end_backward(0)
    assert not grad.any()
    dc.start_backward(update=True)
    dc.end_backward(0)  # without a gradient in the last micro-batch
    assert torch.equal(grad, torch.ones(6))
    replaced = torch.zeros(6)
    dc.update_param_grad_buffer(0, replaced)
    refuses(ValueError, "needs a contiguous buffer like", dc.update_param_grad_buffer, 0, torch.zeros(5))

    # What is refused changes nothing: neither the gradient that is there nor the shard that is away is lost.
    fixed = torch.frombuffer(bytearray(24), dtype=torch.float32)
    dc.start_backward(update=True)
    ops.reduce_grad(torch.ones(2, 3), 0, 0)
    ops.offload_parameter(empty, 0, 0)
    dc.end_backward(0)
    for register in (
        lambda: dc.update_param_grad_buffer(0, fixed),
        lambda: dc.register_param(0, [2, 3], torch.zeros(6), fixed),
    ):
        refuses(ValueError, "'param0': the storage of `grad` cannot be resized", register)
    ops.reload_parameter(empty, 0, 0)
    dc.start_forward()
    full = ops.wait_allgather(ops.allgather_param(empty, 0, 0), 0, 0)
    assert torch.equal(full, value) and torch.equal(replaced, torch.ones(6))
    dc.start_backward(update=True)
    ops.reduce_grad(torch.full((2, 3), 2.0), 0, 0)
    dc.end_backward(0)
    assert torch.equal(replaced, torch.full((6,), 2.0)), "a new step's gradient goes to the buffer that stayed"
    dc.cleanup()
    refuses(RuntimeError, "Call dc.init", dc.start_backward, True)
    dc.init(pg, {}, 8)  # once more in the same process; and left open


def test_misuse_is_answered_with_the_remedy() -> None:
    run_ranks(_misuse, 1)


EXPECTED_DIFFERENCE = {
    "nothing": ["accepted"],
    "shape": ["rank 0 has parameter 1", "[9, 2]", "rank 2 has parameter 1", "[9, 3]"],
    "graph": ["rank 0 has graph 0", "parameters 0 1 2;", "rank 2 has graph 0", "parameters 0 1."],
}


def _different() -> dict[str, str]:
    from lightning_deepcompile import dc

    dist.init_process_group("gloo")
    messages = {}
    for what in EXPECTED_DIFFERENCE:
        dc.init(dist.group.WORLD, {}, 8)
        odd = os.environ["RANK"] == "2"
        for i in range(3):
            columns = 3 if what == "shape" and i == 1 and odd else 2
            dc.register_param(i, [9, columns], torch.zeros(3, columns), torch.zeros(3, columns))
        try:
            dc.register_graph_z3(0, [0, 1] if what == "graph" and odd else [0, 1, 2])
            messages[what] = "accepted"
        except ValueError as error:
            messages[what] = str(error)
        dc.cleanup()
    return messages


def test_ranks_that_register_differently_learn_what_differs() -> None:
    first, *others = run_ranks(_different, 3)
    assert all(messages == first for messages in others)
    for what, parts in EXPECTED_DIFFERENCE.items():
        assert all(part in first[what] for part in parts), first[what]


def _asked_while_another_thread_waits() -> None:
    from lightning_deepcompile.runtime import load_extension

    dist.init_process_group("gloo")
    group, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    runtime = load_extension().Runtime(group, group, torch.device("cpu"))
    if dist.get_rank() == 1:
        store.wait(["asked"])
        runtime.setup.validate()
    else:
        waiting = threading.Thread(target=runtime.setup.validate)
        waiting.start()
        time.sleep(0.5)  # by then it is inside the runtime
        assert not runtime.passes.profiling and waiting.is_alive()
        store.set("asked", "")
        waiting.join()
    runtime.close()


def test_what_python_reads_waits_for_no_peer() -> None:
    """A wait would hold Python's lock: then no thread of the process could go on, and here no rank."""
    run_ranks(_asked_while_another_thread_waits, 2, timeout=60)
