"""Request-level batching, as NVIDIA's FasterTransformer does it. A baseline to measure against."""

from __future__ import annotations

from stallfree_worker.engine.batching.batch import Batch


class FasterTransformerRule:
    """A batch of requests runs to its end before the next one is admitted. Its whole prompts are computed in its first
    step. Memory is reserved for the longest request that the model takes."""

    is_by_arrival = True
    takes_whole_prompts = True

    def compose(self, batch: Batch) -> None:
        is_busy = bool(batch.running)
        for request in batch.decoding():
            batch.add_decode(request)
        while not is_busy and (admitted := batch.admit_first(num_reserved_tokens=batch.max_model_len)) is not None:
            batch.add_whole_prefill(admitted)
