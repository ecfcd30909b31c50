"""Prefill first, never mixed: vLLM before chunked prefills (Kwon et al., SOSP 2023), §4.5. A baseline to measure
against: it is the rule that stalls decodes."""

from __future__ import annotations

from stallfree_worker.engine.batching.batch import Batch


class VllmRule:
    """A step of whole prompts for as long as any waiting request fits, up to the model's context in tokens; otherwise
    a step of decodes."""

    def compose(self, batch: Batch) -> None:
        while batch.num_tokens == 0 or batch.num_tokens + batch.num_tokens_of_first_waiting <= batch.max_model_len:
            admitted = batch.admit()
            if admitted is None:
                break
            batch.add_whole_prefill(admitted)
        if batch.num_tokens == 0:
            for request in batch.decoding():
                batch.add_decode(request)
