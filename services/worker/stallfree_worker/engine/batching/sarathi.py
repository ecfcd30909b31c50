"""Stall-free batching: Sarathi-Serve (arXiv 2403.02310), §4.2, algorithm 3."""

from __future__ import annotations

from stallfree_worker.engine.batching.batch import Batch


class SarathiRule:
    """Every running decode, then the prefills that have begun, then new requests, within one token budget.

    Decodes that outnumber the budget all go, and no prefill joins that step. New requests are admitted in order of
    arrival: one that does not fit waits, and those behind it wait too. It fits at the latest when nothing else runs.
    """

    def compose(self, batch: Batch) -> None:
        for request in batch.decoding():
            batch.add_decode(request)
        for request in batch.prefilling():
            batch.add_prefill(request)
        while batch.has_room_for_prefill and (admitted := batch.admit()) is not None:
            batch.add_prefill(admitted)
