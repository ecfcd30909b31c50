"""B34 in the engine: where memory is never given, it fails at once and says what is wanted; nobody waits for ever."""

from __future__ import annotations

import pytest

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.batching import RULES
from stallfree_worker.engine.batching.batch import BatchLimits
from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.integrity import IntegrityError
from stallfree_worker.engine.kv_layout import KVLayout
from stallfree_worker.engine.order import ArrivalOrder
from stallfree_worker.engine.scheduler import Scheduler
from stallfree_worker.engine.step import KVGroup, NewRequest
from stallfree_worker.settings import BatchingName
from tests.worker.engine.bench import MovingBudget

ALL_RULES: tuple[BatchingName, ...] = tuple(RULES)


class _Miser(BlockManager):
    """Gives nothing away, however much is free."""

    def can_allocate(self, *arguments: object, **more: object) -> bool:
        return False


@pytest.mark.parametrize("batching", ALL_RULES)
def test_b34_allocation_that_always_fails_is_an_error_at_once_that_tells_the_needs_of_the_first(
    batching: BatchingName,
) -> None:
    layout = KVLayout([KVGroup()], block_size=16, largest_chunk_tokens=64)
    scheduler = Scheduler(
        rule=RULES[batching](),
        order=ArrivalOrder(),
        budget=MovingBudget(64),
        blocks=_Miser(num_blocks=8, layout=layout),
        limits=BatchLimits(max_num_seqs=4, max_model_len=128),
        eos_token_ids=frozenset(),
        has_prefix_cache=False,
    )
    assert scheduler.schedule(0.0) is None, "nothing is wanted yet"
    for number in range(2):
        new = NewRequest(
            request_id=RequestId(f"r{number}"),
            prompt_token_ids=(1,) * 40,
            sampling=SamplingParams(max_tokens=3),
            tbt_target_seconds=1.0,
        )
        scheduler.submit(new, 1.0)
    with pytest.raises(IntegrityError, match="r0 has 40 tokens to compute; 0 run, 2 wait, 8 of 8 blocks are free"):
        scheduler.schedule(2.0)
