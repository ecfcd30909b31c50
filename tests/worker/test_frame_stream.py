"""One router's stream of frames on the worker's side."""

from __future__ import annotations

from stallfree_shared.wire import ConnectionId, Frame, RequestId, TokenEvent, TokenLogprobs
from stallfree_worker.frame_stream import MAX_BYTES_BEHIND, FrameStream


def _frame(index: int) -> Frame:
    return Frame(events=(TokenEvent(request_id=RequestId("a"), attempt=1, index=index, token_ids=(5,)),))


async def test_frames_come_out_whole_and_in_order_until_the_end() -> None:
    stream = FrameStream(ConnectionId("c"), max_frames_behind=10)
    frames = [_frame(index) for index in range(5)]
    for frame in frames:
        assert stream.push(frame)
    stream.end()
    written = b"".join([chunk async for chunk in stream.chunks()])
    assert [Frame.model_validate_json(line) for line in written.splitlines()] == frames


async def test_stream_that_is_too_far_behind_is_cut_and_holds_nothing() -> None:
    stream = FrameStream(ConnectionId("c"), max_frames_behind=3)
    assert [stream.push(_frame(index)) for index in range(4)] == [True, True, True, False]
    assert stream.cut.is_set()
    stream.end()
    assert [chunk async for chunk in stream.chunks()] == []


async def test_few_large_frames_that_nobody_reads_are_too_far_behind_as_well() -> None:
    stream = FrameStream(ConnectionId("c"), max_frames_behind=1_000_000)
    told = TokenLogprobs(logprob=-1.0, top=tuple((token_id, -1.0) for token_id in range(100_000)))
    event = TokenEvent(request_id=RequestId("a"), attempt=1, index=0, token_ids=(5,), logprobs=(told,))
    frame = Frame(events=(event,))
    num_bytes = len(frame.model_dump_json(exclude_defaults=True)) + 1
    num_pushed = 0
    while stream.push(frame):
        num_pushed += 1
    assert MAX_BYTES_BEHIND <= num_pushed * num_bytes < MAX_BYTES_BEHIND + num_bytes
    assert stream.cut.is_set()


async def test_what_was_read_does_not_count() -> None:
    stream = FrameStream(ConnectionId("c"), max_frames_behind=2)
    chunks = stream.chunks()
    for index in range(10):
        assert stream.push(_frame(index))
        assert Frame.model_validate_json(await anext(chunks)) == _frame(index)
    stream.end()
    assert [chunk async for chunk in chunks] == []
