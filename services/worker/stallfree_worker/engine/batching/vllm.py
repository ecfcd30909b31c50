"""Prefill first, never mixed: vLLM before chunked prefills (Kwon et al., SOSP 2023), §4.5. A baseline to measure
against: it is the rule that stalls decodes."""

from __future__ import annotations

from stallfree_worker.engine.batching.batch import Batch


class VllmRule:
    """A step of whole prompts for as long as any waiting request fits, up to the model's context in tokens; otherwise
    a step of decodes."""

    is_by_arrival = True
    takes_whole_prompts = True

    def compose(self, batch: Batch) -> None:
        while (request := batch.first_waiting) is not None:
            is_too_much = batch.num_tokens + request.num_tokens > batch.max_model_len
            if (is_too_much and batch.num_tokens > 0) or batch.admit_first() is None:
                break
            batch.add_whole_prefill(request)
        if batch.num_tokens == 0:
            for request in batch.decoding():
                batch.add_decode(request)
