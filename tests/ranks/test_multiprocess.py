"""The helper of all tests on several ranks says what happened on each of them."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
from multiprocess import RankError, run_ranks


def _fails_or_waits() -> None:
    if os.environ["RANK"] == "0":
        raise ArithmeticError("of this rank")
    time.sleep(60)


def _waits() -> None:
    time.sleep(120)


def _imported() -> set[str]:
    assert not torch._dynamo.utils.counters, "tests count their own compilations"
    return {"cases", "warmed", "torch._inductor.codegen.cpp"} & set(sys.modules)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Ranks with GPUs are interpreters of their own")
def test_forked_ranks_begin_with_what_a_first_compilation_imports() -> None:
    path = os.environ.get("PYTHONPATH")
    assert run_ranks(_imported, 2) == [{"cases", "warmed", "torch._inductor.codegen.cpp"}] * 2
    assert run_ranks(os.getenv, 1, "PYTHONPATH") == [path] and os.environ.get("PYTHONPATH") == path


def test_a_ranks_exception_ends_the_others_soon() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="(?s)--- rank 0.*ArithmeticError: of this rank.*--- rank 1 was still running"):
        run_ranks(_fails_or_waits, 2)
    assert time.monotonic() - start < 45


def test_ranks_that_hang_say_where() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_waits, 2, timeout=6)
    assert str(caught.value).count("was still running") == str(caught.value).count("in _waits") == 2
