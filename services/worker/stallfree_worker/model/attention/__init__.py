"""Attention over the paged KV cache: one function with the arguments of a variable-length paged kernel, many backends.

A backend prepares what all layers of a step share (`prepare`), and then attends per layer. `BACKENDS` maps the
setting `attention_backend` to it; a faster one is one more row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stallfree_worker.model.attention.interface import AttentionBackend
from stallfree_worker.model.attention.reference import ReferenceAttention
from stallfree_worker.settings import AttentionBackend as BackendName

BACKENDS: Mapping[BackendName, Callable[[], AttentionBackend]] = {"reference": ReferenceAttention}
