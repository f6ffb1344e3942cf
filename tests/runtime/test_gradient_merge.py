"""The result of a reduction is merged into the gradient shard with the same bits as torch's own operators give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_deepcompile.runtime import load_extension

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3.3e38, 1.0078125]
LARGE = 1 << 20  # from so many elements on, a kernel of the runtime's own does it on GPUs


def assert_as_torch(device: torch.device, elements: int, skip: int, dtype: torch.dtype, add: bool, blocks: int) -> None:
    """Compares bits; the elements in front of and behind the shard must stay what they are."""
    generator = torch.Generator().manual_seed(elements)
    total = torch.randn(elements + skip, generator=generator).to(dtype)
    total[: len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)[: len(total)]
    total = total.to(device)[skip:]
    grad = torch.randn(elements + skip + 8, generator=generator).to(device)
    expected = grad.clone()
    inner = expected[skip : skip + elements]
    inner.add_(total) if add else inner.copy_(total)
    merge = load_extension().GradientMerge(device, blocks=blocks)
    merge.merge(grad[skip : skip + elements], total, add)
    assert torch.equal(grad.view(torch.int32), expected.view(torch.int32))


@given(
    elements=st.integers(0, 100), skip=st.integers(0, 9), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    add=st.booleans(),
)  # fmt: skip
def test_on_cpu(elements: int, skip: int, dtype: torch.dtype, add: bool) -> None:
    assert_as_torch(torch.device("cpu"), elements, skip, dtype, add, blocks=0)


@pytest.mark.gpu
@pytest.mark.parametrize("add", [False, True])
def test_on_gpus(add: bool) -> None:
    device = torch.device("cuda")
    for elements in (LARGE - 1, LARGE, LARGE + 1, LARGE + 4, 3 * LARGE + 123, 40 * LARGE):
        for skip in (0, 1, 4, 8):  # 8 keeps both aligned to 16 bytes; the others take torch's path
            assert_as_torch(device, elements, skip, torch.bfloat16, add, blocks=0)
        assert_as_torch(device, elements, 0, torch.float16, add, blocks=0)
    for blocks in (1, 7, 65_535):
        assert_as_torch(device, 5 * LARGE + 7, 0, torch.bfloat16, add, blocks)


def test_bad_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks.*between 0 and 65535, got -1"):
        load_extension().GradientMerge(torch.device("cpu"), blocks=-1)
