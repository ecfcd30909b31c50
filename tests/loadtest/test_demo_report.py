"""The demo's texts and report."""

from __future__ import annotations

from stallfree_loadtest.cluster import ClusterSettings
from stallfree_loadtest.demo import DemoResult, DemoSettings, WorkerShare
from stallfree_loadtest.demo_report import demo_report
from stallfree_loadtest.demo_texts import OPENINGS, long_text
from stallfree_loadtest.measures import RequestTrace, TokenStamp, gaps, split_around

SETTINGS = DemoSettings(
    cluster=ClusterSettings(model="m"),
    num_streams=2,
    long_tokens=4000,
    tbt_target_seconds=0.2,
    seconds_before=1.0,
    seconds_after=1.0,
    timeout_seconds=60.0,
)


def build_stream(number: int) -> RequestTrace:
    return RequestTrace(
        request_id=f"stream-{number}",
        due_at=0.0,
        sent_at=0.0,
        ended_at=9.0,
        stamps=tuple(TokenStamp(at=at, num_tokens=1) for at in (0.5, 1.0, 1.1, 3.0, 3.25, 3.5, 8.0, 8.1)),
        outcome="dropped",
        text=" and so it\nwent on " * 50,
    )


def test_the_report_tells_a_newcomer_what_was_shown() -> None:
    streams = (build_stream(1), build_stream(2))
    long = RequestTrace(
        request_id="long",
        role="long",
        due_at=2.0,
        sent_at=2.0,
        ended_at=5.0,
        stamps=(TokenStamp(at=4.0, num_tokens=1),),
        prompt_tokens=4012,
    )
    found = [gap for stream in streams for gap in gaps(stream)]
    result = DemoResult(
        streams=streams,
        long=long,
        windows=split_around(found, began_at=2.0, ended_at=4.0),
        workers=(
            WorkerShare(name="worker-1", num_streams=1, long_prompt_tokens=4012),
            WorkerShare(name="worker-2", num_streams=1, long_prompt_tokens=0),
        ),
        phase_seconds={"start of the cluster": 3.0, "prefill of the long prompt": 2.0},
    )
    report = demo_report(result, SETTINGS)
    for text in ("4,012 tokens", "before the long prompt", "during its prefill", "after its first token", "in total"):
        assert text in report
    assert "4,500.0 ms" in report  # the longest gap
    assert OPENINGS[0] in " ".join(report.split())
    assert max(len(line) for line in report.splitlines()) <= 120


def test_the_long_text_is_as_long_as_asked_and_varied() -> None:
    text = long_text(16_000)
    assert 16_000 <= len(text) < 16_300
    sentences = text.split(". ")
    assert len(set(sentences)) > 0.95 * len(sentences)


def test_every_opening_is_another_text() -> None:
    assert len(set(OPENINGS)) == len(OPENINGS) == 8
