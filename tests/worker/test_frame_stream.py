"""One router's stream of frames on the worker's side."""

from __future__ import annotations

from stallfree_shared.wire import ConnectionId, Frame, RequestId, TokenEvent
from stallfree_worker.frame_stream import FrameStream


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
