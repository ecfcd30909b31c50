"""Chunked prefills that are never mixed with decodes: the ablation of Sarathi-Serve (arXiv 2403.02310), table 4."""

from __future__ import annotations

from stallfree_worker.engine.batching.batch import Batch


class ChunkedOnlyRule:
    """Steps of chunks and steps of decodes take turns while there is work for both."""

    is_by_arrival = True
    takes_whole_prompts = False

    def __init__(self) -> None:
        self._is_prefill_turn = True

    def compose(self, batch: Batch) -> None:
        turns = (self._add_prefills, self._add_decodes)
        for turn in turns if self._is_prefill_turn else reversed(turns):
            turn(batch)
            if batch.num_tokens > 0:
                self._is_prefill_turn = turn == self._add_decodes
                return

    def _add_prefills(self, batch: Batch) -> None:
        for request in batch.prefilling():
            batch.add_prefill(request)
        while batch.has_room_for_prefill and (admitted := batch.admit_first()) is not None:
            batch.add_prefill(admitted)

    def _add_decodes(self, batch: Batch) -> None:
        for request in batch.decoding():
            batch.add_decode(request)
