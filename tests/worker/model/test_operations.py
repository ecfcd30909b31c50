"""What torch's compiler makes of the operations between matrix products, against the plain ones."""

from __future__ import annotations

import pytest
import torch

from stallfree_worker.model.operations import PLAIN, fused_operations


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler against torch itself
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_operations_have_the_results_of_plain_ones(dtype: torch.dtype) -> None:
    """For several numbers of tokens, as a compiled operation serves them all."""
    torch.manual_seed(5)
    fused = fused_operations()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2

    def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.dtype == theirs.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

    for num_tokens in (1, 7, 40):
        x, update = (torch.randn(num_tokens, 64).to(dtype) for _ in range(2))
        weight = torch.rand(64)
        check(fused.norm(x, weight, 1e-6), PLAIN.norm(x, weight, 1e-6))
        for post_weight in (None, weight):
            check(fused.add_norm(x, update, post_weight, 1e-6), PLAIN.add_norm(x, update, post_weight, 1e-6))
        heads, angles = torch.randn(num_tokens, 3, 16).to(dtype), torch.randn(2, num_tokens, 1, 16)
        for head_weight in (None, torch.rand(3, 16)):
            arguments = (heads, head_weight, 1e-6, *angles)
            check(fused.norm_and_rotate(*arguments), PLAIN.norm_and_rotate(*arguments))
        for activation in ("silu", "gelu_tanh"):
            check(fused.gated(x, activation), PLAIN.gated(x, activation))
