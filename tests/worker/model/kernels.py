"""Whether the compiled kernels can be used here; tests that need them say plainly that they did not run."""

from __future__ import annotations

import pytest
import torch

from stallfree_worker.model.cpu import library

_REASON = library.reason_against(torch.bfloat16)
needs_kernels = pytest.mark.skipif(_REASON is not None, reason=f"the compiled kernels cannot be used: {_REASON}")
