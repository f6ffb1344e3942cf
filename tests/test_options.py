"""Values that make no sense are refused when they are set: the error names the argument, the value and the choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_deepcompile import CompileConfig, DeepCompileStrategy
from lightning_deepcompile.plan.budget import parse_budget
from lightning_deepcompile.plan.known_passes import BUILTIN_PASSES
from lightning_deepcompile.plan.step_pass import PassError, step_pass

_FIRST = {"step": 0, "passes": ["zero3"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_budget": 70}, r"memory_budget=70\): that is 70 bytes. Did you mean '70GiB', or '70%'"),
        ({"host_memory_budget": 512}, r"host_memory_budget=512\): that is 512 bytes. Did you mean '512GiB'\?"),
        ({"memory_budget": "110%"}, "expected bytes, a text like '24GiB' or '90%', a fraction up to 1.0"),
        ({"symmetric_memory": "10%"}, "expected .*a text like '64MiB'"),
        ({"plan": 3}, r"plan=3\): expected a text, a Path or None"),
        ({"cuda_graphs": "yes"}, r"cuda_graphs='yes'\): expected 'auto', True or False"),
        ({"region_backend": "inducter"}, r"use 'inductor' or 'eager'. Did you mean 'inductor'\?"),
        ({"schedule": "fast"}, r"schedule='fast'\): expected a list like .*, 'auto' or None"),
        ({"schedule": [_FIRST, {"step": 3, "passes": ["zero"]}]}, r"no pass 'zero'. Did you mean 'zero3'\? Use one of"),
        ({"schedule": [_FIRST, {"step": 3, "passes": ["a.b:"]}]}, "no pass 'a.b:'"),
        ({"schedule": [_FIRST, {"step": True, "passes": ["zero3"]}]}, "should be like"),
    ],
)
def test_a_setting_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompileConfig(**settings)
    with pytest.raises(ValueError, match=message):
        DeepCompileStrategy(compile=settings)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"stge": 3},
            TypeError,
            r"DeepCompileStrategy has no argument 'stge'. Did you mean 'stage'\? There are: stage",
        ),
        (
            {"compile": {"memory_budge": 0.9}},
            TypeError,
            "CompileConfig has .*'memory_budge'. Did you .*'memory_bud",
        ),
        ({"compile": 3}, ValueError, r"compile=3\): expected a CompileConfig, a dict or None"),
        ({"stage": "3"}, ValueError, r"stage='3'\): use 1, 2, 3 or None. Did you mean 3\?$"),
        ({"memory_budget": "8GiB"}, TypeError, r"DeepCompileStrategy\(compile=CompileConfig\(memory_budget='8GiB'\)\)"),
        ({"schedule": None}, TypeError, r"'schedule'. It belongs to CompileConfig: .*\(schedule=None\)\). There are"),
        ({"timeout": 30}, ValueError, r"timeout=30\): expected a timedelta"),
        ({"sharding_strategy": "FULL_SHRAD"}, ValueError, r"expected 'FULL_SHARD', .*Did you mean 'FULL_SHARD'\?"),
        ({"compile": {"schedule": [_FIRST | {"passes": ["prefetch"]}]}}, PassError, "put 'zero3' before it"),
        ({"compile": {"schedule": [_FIRST | {"passes": ["no.such:name"]}]}}, PassError, "'no.such:name' cannot be imp"),
    ],
)
def test_an_argument_that_cannot_be_meant(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        DeepCompileStrategy(**arguments)
    assert "'_" not in str(caught.value)  # no private name is offered


def test_what_can_be_meant_is_taken() -> None:
    config = CompileConfig(memory_budget="90%", host_memory_budget=1 << 20, plan=Path("a", "b"))
    assert (config.memory_budget, config.host_memory_budget) == (0.9, 1 << 20)
    assert config.plan == str(Path("a", "b")) and parse_budget("1TB", total=1) == 10**12
    own = step_pass("own")(lambda schedules, context: schedules)
    assert CompileConfig(schedule=[_FIRST | {"passes": [*BUILTIN_PASSES, own, "mine.of:me"]}]).planned
    strategy = DeepCompileStrategy(sharding_strategy="shard_grad_op", device_mesh=[2, 2], compile={"reduce": "every"})
    assert strategy.stage == 2 and strategy.compile == CompileConfig(reduce="every")
