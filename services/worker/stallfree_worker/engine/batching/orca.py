"""Iteration-level batching of whole prompts: Orca (Yu et al., OSDI 2022), §3. A baseline to measure against."""

from __future__ import annotations

from stallfree_worker.engine.batching.batch import Batch


class OrcaRule:
    """Every running decode, and the whole prompts of new requests beside them. There is no token budget, so a long
    prompt lengthens the step of every decode. Memory is reserved for the longest request that the model takes."""

    is_by_arrival = True
    takes_whole_prompts = True

    def compose(self, batch: Batch) -> None:
        for request in batch.decoding():
            batch.add_decode(request)
        while (admitted := batch.admit_first(num_reserved_tokens=batch.max_model_len)) is not None:
            batch.add_whole_prefill(admitted)
