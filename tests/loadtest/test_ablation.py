"""The ablation with stand-ins for the services, and its report from made-up traces."""

from __future__ import annotations

import itertools

from stallfree_loadtest.ablation import AblationLoad, AblationRun, ablation_picture, ablation_report, run_ablation
from stallfree_loadtest.fleet import configuration
from stallfree_loadtest.measures import RequestTrace, Targets, TokenStamp, summarize
from stallfree_loadtest.prompts import LongTail, Vocabulary
from tests.loadtest.test_fleet import fleet
from tests.loadtest.test_picture import texts_of

LOAD = AblationLoad(
    num_requests=12,
    rate_per_second=40.0,
    prompts=LongTail(median=50, p90=120, most=300),
    outputs=LongTail(median=5, p90=9, most=20),
    vocabulary=Vocabulary(),
    seed=3,
)


def test_lengths_and_instants_are_the_same_in_every_round_and_tokens_are_not() -> None:
    one, two = ([*itertools.islice(LOAD.requests(round_number=number), 30)] for number in (1, 2))
    assert [(len(request.prompt), request.max_tokens) for request in one] == [
        (len(request.prompt), request.max_tokens) for request in two
    ]
    assert not {request.prompt for request in one} & {request.prompt for request in two}
    assert list(LOAD.instants()) == list(LOAD.instants())
    assert len(list(LOAD.instants())) == LOAD.num_requests
    assert max(len(request.prompt) + request.max_tokens for request in one) <= LOAD.max_model_len


async def test_every_configuration_serves_the_whole_load_once_a_round() -> None:
    told: list[AblationRun] = []
    names = ["orca", "sarathi:64"]
    async with fleet() as made:
        runs = await run_ablation(
            made,
            [configuration(name) for name in names],
            LOAD,
            rounds=2,
            targets=Targets(tbt_seconds=0.2),
            on_run=told.append,
        )
    assert runs == told
    assert [(run.round_number, run.configuration.name) for run in runs] == [
        (number, name) for number in (1, 2) for name in names
    ]
    expected = sum(request.max_tokens for request in itertools.islice(LOAD.requests(round_number=1), 12))
    for run in runs:
        assert (run.summary.num_finished, run.summary.num_failed, run.summary.num_miscounted) == (12, 0, 0)
        assert run.summary.gaps.tbt_seconds.count == expected - 12


def run_of(name: str, *, ttft: float, gap: float) -> AblationRun:
    stamps = tuple(TokenStamp(at=ttft + number * gap, num_tokens=1) for number in range(5))
    trace = RequestTrace(request_id="r", due_at=0.0, sent_at=0.0, ended_at=stamps[-1].at, stamps=stamps)
    summary = summarize([trace], Targets(tbt_seconds=0.2))
    return AblationRun(configuration=configuration(name), round_number=1, summary=summary)


def test_the_report_and_the_picture_say_what_each_configuration_does() -> None:
    runs = [
        run_of("orca", ttft=0.5, gap=1.5),
        run_of("chunked_only:64", ttft=2.0, gap=0.15),
        run_of("sarathi:64", ttft=0.7, gap=0.1),
    ]
    lines = ablation_report(runs, LOAD, tbt_target_seconds=0.2).splitlines()
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:6]] for line in lines if (cells := line.split("|"))[1:]}
    assert rows["mixed: orca"] == ["0.50", "0.50", "1,500", "1,500"]
    assert rows["chunks: chunked_only:64"] == ["2.00", "2.00", "150", "150"]
    assert rows["both: sarathi:64"] == ["0.70", "0.70", "100", "100"]
    assert {"mixed: orca", "chunks: chunked_only:64", "both: sarathi:64"} <= set(
        texts_of(ablation_picture(runs, title=""))
    )
