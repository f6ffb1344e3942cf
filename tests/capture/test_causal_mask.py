"""Attention masks: the causal one is recognised, with equal results; everything else is left alone."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_deepcompile.capture import mask_values
from lightning_deepcompile.capture.causal_mask import recognize_causal_masks

LENGTH = 8
_attention = F.scaled_dot_product_attention


def rewrite(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> tuple[int, Any, list[Any]]:
    """Compiles `function`; returns how many calls were changed, the result, and the attention calls' keywords."""
    changed, calls = [], []

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        changed.append(recognize_causal_masks(gm))
        gm.graph.lint()
        bodies = [gm, *(m for name, m in gm.named_modules() if name and isinstance(m, fx.GraphModule))]
        calls.extend((n.args, dict(n.kwargs)) for m in bodies for n in m.graph.nodes if n.target is _attention)
        return gm

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return sum(changed), result, calls


def qkv(length: int = LENGTH, keys: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 4) for n in (length, keys or length, keys or length)]


# Transformers ---------------------------------------------------------------------------------------------------------


def hugging_face(name: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) % 31


def is_flag(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("is_causal") is True and kwargs.get("attn_mask") is None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_mask_of_llama_becomes_a_flag(checkpointing: bool) -> None:
    model = hugging_face("Llama", use_cache=False, num_hidden_layers=2).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    _, result, calls = rewrite(lambda t: model(input_ids=t).logits, TOKENS)
    assert len(calls) == 2 and all(is_flag(kwargs) for _, kwargs in calls)
    torch.testing.assert_close(result, model(input_ids=TOKENS).logits)


def test_a_fresh_key_value_cache_changes_nothing() -> None:
    """`use_cache` is on by default; some releases of Transformers leave the mask out by themselves then."""
    model = hugging_face("Llama")
    _, result, calls = rewrite(lambda t: model(input_ids=t).logits, TOKENS)
    assert len(calls) == 1 and all(is_flag(kwargs) for _, kwargs in calls)
    torch.testing.assert_close(result, model(input_ids=TOKENS).logits)


def test_a_sliding_window_is_not_causal_unless_it_is_as_long_as_the_text() -> None:
    for window, expected in ((3, 0), (LENGTH, 1)):
        model = hugging_face("Mistral", sliding_window=window, use_cache=False)
        changed, result, _ = rewrite(lambda t, m=model: m(input_ids=t).logits, TOKENS)
        assert changed == expected
        torch.testing.assert_close(result, model(input_ids=TOKENS).logits)


def test_a_padding_mask_is_data() -> None:
    model = hugging_face("Llama", use_cache=False)
    padding = torch.ones_like(TOKENS)
    padding[:, :3] = 0
    for mask in (padding, torch.ones_like(TOKENS)):
        changed, result, _ = rewrite(lambda t, m: model(input_ids=t, attention_mask=m).logits, TOKENS, mask)
        assert changed == 0
        torch.testing.assert_close(result[:, 3:], model(input_ids=TOKENS, attention_mask=mask).logits[:, 3:])


# Of symbolic sizes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes proofs for lengths up to 16, and then up to the next power of two."""
    monkeypatch.setattr(mask_values, "_SHORTEST", 16)


SIZES = (2, 8), (3, 5), (4, 16), (2, 3), (5, 40), (2, 17)


def at_all_lengths(
    function: Callable[..., Any],
    make: Callable[[int, int], Any],
    sizes: tuple[tuple[int, int], ...] = SIZES,
    dynamic: bool | None = True,
) -> list[int]:
    """Compiles `function` with symbolic sizes, and compares it on several batches; returns each graph's changes."""
    changed: list[int] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        changed.append(recognize_causal_masks(gm))
        gm.graph.lint()
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    for rows, length in sizes:
        inputs = make(rows, length)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    return changed


def tokens(rows: int, length: int) -> list[Tensor]:
    return [torch.arange(rows * length).view(rows, length) % 31]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_masks_of_symbolic_lengths_become_flags_up_to_the_length_that_was_computed(
    short: None, checkpointing: bool
) -> None:
    model = hugging_face("Llama", use_cache=False).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    assert at_all_lengths(lambda t: model(input_ids=t).logits, tokens) == [1, 1]  # the second one for 40 tokens


def test_sizes_that_become_symbolic_one_after_another() -> None:
    model = hugging_face("Llama", use_cache=False)
    sizes = (2, 8), (2, 11), (3, 9), (1, 12), (1, 13), (1, 1), (8, 8)
    found = at_all_lengths(lambda t: model(input_ids=t).logits, tokens, sizes, dynamic=None)
    assert len(found) > 3 and set(found) == {1}


def test_a_sliding_window_of_symbolic_length_is_not_causal(short: None) -> None:
    for window, expected in ((3, [0]), (16, [1, 0])):
        model = hugging_face("Mistral", sliding_window=window, use_cache=False)
        assert at_all_lengths(lambda t, m=model: m(input_ids=t).logits, tokens) == expected, window


def test_a_fixed_length_beside_a_symbolic_number_of_rows_is_proved_for_that_length() -> None:
    model = hugging_face("Llama", use_cache=False)
    marked = TOKENS.repeat(2, 1)
    torch._dynamo.mark_dynamic(marked, 0)
    changed, result, calls = rewrite(lambda t: model(input_ids=t).logits, marked)
    assert changed == 1 and all(is_flag(kwargs) for _, kwargs in calls)
    torch.testing.assert_close(result, model(input_ids=marked).logits)


def _of(mask: Callable[[Tensor, Tensor, int, int], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, _, length, _ = q.shape
        positions = torch.arange(length)
        return _attention(q, k, v, attn_mask=mask(positions[:, None], positions[None, :], length, rows))

    return attend


def qkv_of(rows: int, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 3, length, 4) for _ in range(3)]


SYMBOLIC = {
    "comparison": (lambda q, k, n, b: k <= q, [1, 1]),
    "wrong at position 30": (lambda q, k, n, b: (k <= q) & ~((q == 30) & (k == 2)), [1, 0]),
    "rows of a batch": (lambda q, k, n, b: (k <= q) & (torch.arange(b) >= 0)[:, None, None, None], [0]),
    "another for one row": (lambda q, k, n, b: (k <= q) & (torch.arange(b)[:, None, None, None] != 1), [0]),
    "indexed": (lambda q, k, n, b: k[0][k] <= k[0][q], [1, 1]),
    "from the end": (lambda q, k, n, b: k[0][k - 1] < k[0][q] + 1, [0]),
    "the size itself": (lambda q, k, n, b: (k <= q) & (q < n - 1) | (k == 0), [0]),
    "up to a size": (lambda q, k, n, b: torch.clamp(k, max=n - 2) <= q, [0]),
    "flipped": (lambda q, k, n, b: (k <= q).flip(0, 1).mT, [0]),
    "sums of rows": (lambda q, k, n, b: torch.ones(n, n).cumsum(0).cumsum(1)[q, k] >= 1, [0]),
    "a part": (lambda q, k, n, b: (k <= q) | (k == k[:, -1:]), [0]),
    "sums": (lambda q, k, n, b: (k >= 0).cumsum(-1) <= q + 1, [1, 1]),
    "sums of repeated": (lambda q, k, n, b: (q >= 0).expand(-1, n).cumsum(-1) <= q + 1, [0]),
    "differences": (
        lambda q, k, n, b: torch.diff(k, dim=-1, prepend=k[:, :1] - 1).cumsum(-1) <= q + 1,
        [1, 1],
    ),
    "where": (lambda q, k, n, b: torch.where(k > q, False, True), [1, 1]),
    "transposed": (lambda q, k, n, b: q <= k, [0]),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_masks_by_hand_of_symbolic_sizes(short: None, name: str) -> None:
    mask, expected = SYMBOLIC[name]
    found = at_all_lengths(_of(mask), qkv_of)
    assert found == expected or (expected == [0] and not any(found)), found


def test_a_part_that_a_length_cuts_is_not_taken_for_repeated_elements(short: None) -> None:
    mask = _of(lambda q, k, n, b: (k <= q) & (torch.arange(n)[:12][q] != 5))
    assert not any(at_all_lengths(mask, qkv_of, ((2, 8), (3, 7), (2, 11))))


# Of long sequences ----------------------------------------------------------------------------------------------------


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a mask of a few positions count as too large for a device: three rows of it are computed at a time."""
    for name, elements in (("_SMALL", 2 * LENGTH), ("_ROWS", 3 * LENGTH), ("_LARGEST", 1)):
        monkeypatch.setattr(mask_values, name, elements)


@pytest.mark.parametrize(
    ("window", "expected", "checkpointing"),
    [(None, 1, False), (3, 0, False), (LENGTH - 1, 0, False), (LENGTH, 1, True)],
)
def test_masks_of_transformers_are_computed_in_rows(
    by_rows: None, window: int | None, expected: int, checkpointing: bool
) -> None:
    options = {} if window is None else {"sliding_window": window}
    model = hugging_face("Mistral" if options else "Llama", use_cache=False, **options).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    changed, result, _ = rewrite(lambda t: model(input_ids=t).logits, TOKENS)
    assert changed == expected
    torch.testing.assert_close(result, model(input_ids=TOKENS).logits)


def all_but_one() -> Tensor:
    rows = torch.arange(LENGTH)
    wrong = (rows[:, None] == LENGTH - 1) & (rows[None, :] == 2)
    return (rows[None, :] <= rows[:, None]) & ~wrong


def turned() -> Tensor:
    rows = torch.arange(LENGTH)
    return (rows[:, None] <= rows[None, :])[:, None].expand(-1, 3, -1)[:, 0]


@pytest.mark.parametrize(("mask", "expected"), [("comparison", 1), ("all_but_one", 0), ("turned", 0)])
def test_masks_by_hand_are_computed_in_rows(by_rows: None, mask: str, expected: int) -> None:
    made = globals()[mask]
    changed, result, _ = rewrite(lambda q, k, v: _attention(q, k, v, attn_mask=made()), *qkv())
    assert changed == expected
    torch.testing.assert_close(result, _attention(*qkv(), attn_mask=made()))


def test_what_cannot_be_computed_in_rows_is_computed_whole_if_it_is_not_too_large(
    by_rows: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for largest, expected in ((LENGTH * LENGTH - 1, 0), (LENGTH * LENGTH, 1)):
        monkeypatch.setattr(mask_values, "_LARGEST", largest)
        with caplog.at_level(logging.INFO, "lightning_deepcompile"):
            changed, _, _ = rewrite(lambda q, k, v: _attention(q, k, v, attn_mask=inverted()), *qkv())
        assert changed == expected
    (said,) = [text for text in caplog.messages if "was not analysed" in text]
    assert "of 8 positions" in said and "`triu`" in said


# Masks made by hand ---------------------------------------------------------------------------------------------------


def tril() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def comparison() -> Tensor:
    rows = torch.arange(LENGTH)
    return (rows[None, :] <= rows[:, None])[None, None].expand(2, 3, -1, -1)


def inverted() -> Tensor:
    return ~torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1).bool()


@pytest.mark.parametrize("mask", [tril, comparison, inverted])
def test_causal_masks(mask: Callable[[], Tensor]) -> None:
    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls_so_far.add_(1)  # nothing reads what it returns
        return _attention(q, k, v, attn_mask=mask())

    calls_so_far = torch.zeros(())
    changed, result, calls = rewrite(counted, *qkv())
    assert calls_so_far == 1
    assert changed == 1 and calls[0][1] == {"is_causal": True}
    torch.testing.assert_close(result, _attention(*qkv(), attn_mask=mask()))


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: _attention(q, k, v, tril()),
        lambda q, k, v: _attention(q, k, v, tril(), 0.0),
        lambda q, k, v: _attention(q, k, v, tril(), 0.0, False),
        lambda q, k, v: _attention(q, k, v, tril(), is_causal=False, scale=0.3),
        lambda q, k, v: _attention(value=v, attn_mask=tril(), key=k, query=q),
    ],
)
def test_however_the_arguments_are_passed(call: Callable[..., Tensor]) -> None:
    changed, result, _ = rewrite(call, *qkv())
    assert changed == 1
    torch.testing.assert_close(result, call(*qkv()))


def almost(row: int, column: int) -> Callable[[], Tensor]:
    def mask() -> Tensor:
        wrong = torch.arange(LENGTH * LENGTH).view(LENGTH, LENGTH) == row * LENGTH + column
        return tril() ^ wrong

    return mask


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(almost(0, 1), id="one element more"),
        pytest.param(almost(7, 0), id="one element less"),
        pytest.param(lambda: tril().t(), id="transposed"),
        pytest.param(lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool), id="everything"),
        pytest.param(lambda: torch.stack([tril(), tril() & (torch.arange(LENGTH) > 0) | torch.eye(LENGTH).bool()])[:,
        None],
                     id="one sequence of the batch differs"),
        pytest.param(lambda: torch.zeros(LENGTH, LENGTH).masked_fill(~tril(), float("-inf")), id="float"),
    ],
)  # fmt: skip
def test_other_masks_are_left_alone(mask: Callable[[], Tensor]) -> None:
    changed, result, calls = rewrite(lambda q, k, v: _attention(q, k, v, attn_mask=mask()), *qkv())
    assert changed == 0 and "is_causal" not in calls[0][1]
    torch.testing.assert_close(result, _attention(*qkv(), attn_mask=mask()))


def test_other_lengths_of_queries_and_keys_are_left_alone() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, attn_mask=torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril())

    def broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, attn_mask=torch.ones(1, 1, dtype=torch.bool).tril())

    for function, queries, keys in ((attend, 3, LENGTH), (attend, LENGTH, 3), (broadcast, LENGTH, LENGTH)):
        changed, result, _ = rewrite(function, *qkv(queries, keys))
        assert changed == 0
        torch.testing.assert_close(result, function(*qkv(queries, keys)))


class Buffers(nn.Module):
    """The mask is a buffer, as in many models: it may be loaded, or changed, after compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", tril())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, attn_mask=self.mask)


def test_masks_from_outside_are_data() -> None:
    assert rewrite(Buffers(), *qkv())[0] == 0
    assert rewrite(lambda q, k, v, m: _attention(q, k, v, attn_mask=m), *qkv(), tril())[0] == 0
    assert rewrite(lambda q, k, v: _attention(q, k, v, attn_mask=tril() & (q[0, 0, 0, 0] < 1e9)), *qkv())[0] == 0
    assert rewrite(lambda q, k, v: _attention(q, k, v, attn_mask=tril() & (torch.rand(LENGTH) < 2)), *qkv())[0] == 0


# A mask is what it is when attention reads it, not what it was when it was made.


def set_element(mask: Tensor) -> Tensor:
    mask[3, 1] = False
    return mask


def through_a_view(mask: Tensor) -> Tensor:
    mask[4].fill_(True)
    return mask


def through_a_cast_that_does_nothing(mask: Tensor) -> Tensor:
    mask.to(torch.bool).logical_not_()
    return mask


def augmented(mask: Tensor) -> Tensor:
    mask &= torch.eye(LENGTH, dtype=torch.bool)
    return mask


def out_argument(mask: Tensor) -> Tensor:
    torch.logical_not(mask, out=mask)
    return mask


def inside_a_checkpoint(mask: Tensor) -> Tensor:
    checkpoint(lambda m: m.view(-1)[:2].zero_().sum(), mask, use_reentrant=False)
    return mask


@pytest.mark.parametrize(
    "write",
    [set_element, through_a_view, through_a_cast_that_does_nothing, augmented, out_argument, inside_a_checkpoint],
)
def test_masks_that_are_written_to_are_left_alone(write: Callable[[Tensor], Tensor]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v, attn_mask=write(tril()))

    changed, result, _ = rewrite(attend, *qkv())
    assert changed == 0
    torch.testing.assert_close(result, attend(*qkv()))


def test_functions_that_are_not_known_are_not_run() -> None:
    calls = itertools.count()

    @torch.compiler.allow_in_graph
    def arange(length: int) -> Tensor:
        next(calls)
        return torch.arange(length)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = arange(LENGTH)
        return _attention(q, k, v, attn_mask=rows[None, :] <= rows[:, None])

    assert rewrite(attend, *qkv())[0] == 0
