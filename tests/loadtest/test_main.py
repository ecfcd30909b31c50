"""`stallfree-loadtest run` from its options to its report, against a scripted server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import pytest

from stallfree_loadtest.main import prompt_mix
from stallfree_loadtest.open_loop import PromptLength
from tests.loadtest.scripted_server import END, HEAD, Connection, serving, token_event, usage_event


async def answer(connection: Connection) -> None:
    prompt, max_tokens = connection.body["prompt"], connection.body["max_tokens"]
    assert isinstance(prompt, list)
    assert isinstance(max_tokens, int)
    await connection.send(HEAD)
    await connection.send_events(*(token_event("x", number) for number in range(max_tokens)))
    await connection.send_events(usage_event(len(prompt), max_tokens), "[DONE]")
    await connection.send(END)


async def loadtest(*arguments: str, seconds: float = 30) -> tuple[int, str, str]:
    """Status, standard output, standard error of `stallfree-loadtest`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stallfree_loadtest.main", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(seconds):
        out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def test_a_run_prints_a_report_and_writes_its_lines(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    async with serving(answer) as url:
        status, report, errors = await loadtest(
            "run", "--url", url, "--model", "m", "--rate", "200", "--requests", "10",
            "--prompt-mix", "3:0.5,5:0.5", "--output-tokens", "4", "--api-key", "secret", "--out", str(out),
        )  # fmt: skip
    assert (status, errors) == (0, "")
    assert "10 of 10 finished" in report
    *requests, summary = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(requests) == 10
    assert {request["prompt_tokens"] for request in requests} == {3, 5}
    assert {request["counted_tokens"] for request in requests} == {4}
    assert summary["num_miscounted"] == 0
    assert summary["asked"]["rate"] == 200
    assert summary["asked"]["prompt_mix"] == [{"num_tokens": 3, "weight": 0.5}, {"num_tokens": 5, "weight": 0.5}]
    assert summary["ttft_seconds"]["count"] == 10
    assert "secret" not in out.read_text()


async def test_failed_requests_are_told_and_counted_and_with_none_finished_the_status_is_1() -> None:
    async def refuse(connection: Connection) -> None:
        await connection.send(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")

    async with serving(refuse) as url:
        status, report, errors = await loadtest(
            "run", "--url", url, "--model", "m", "--arrivals", "fixed", "--rate", "100", "--duration", "0.025"
        )
    assert status == 1
    assert "0 of 3 finished" in report
    assert "none of 3 requests finished" in errors
    assert errors.count("HTTP 503") == 3


async def test_defect_9_a_trace_is_read_and_its_instants_are_kept_to(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace", tmp_path / "out.jsonl"
    trace.write_text("0\n0.2\n0.25\n")
    async with serving(answer) as url:
        status, _, errors = await loadtest(
            "run", "--url", url, "--model", "m", "--trace", str(trace), "--output-tokens", "2", "--out", str(out)
        )
    assert (status, errors) == (0, "")
    *requests, _ = [json.loads(line) for line in out.read_text().splitlines()]
    first, second, third = (request["due_seconds"] for request in requests)
    assert (second - first, third - first) == (pytest.approx(0.2), pytest.approx(0.25))
    assert all(request["sent_seconds"] >= request["due_seconds"] for request in requests)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rate", "0"), "--rate"),
        (("--prompt-mix", "3"), "LENGTH:WEIGHT"),
        (("--vocab-low", "9", "--vocab-high", "9"), "--vocab-high"),
        (("--url", "localhost:8000"), "--url: must be http://HOST:PORT"),
        (("--url", "http://"), "--url: must be http://HOST:PORT"),
        (("--url", "http://localhost:port"), "--url: invalid URL value"),
        (("--trace", "/does/not/exist"), "--trace: [Errno 2]"),
        (("--trace", __file__), "--trace: "),
        (("--out", "/does/not/exist"), "--out: [Errno 2]"),
    ],
)
async def test_a_wrong_option_is_status_2_and_is_named(arguments: tuple[str, ...], told: str) -> None:
    status, _, errors = await loadtest("run", "--url", "http://127.0.0.1:1", "--model", "m", *arguments)
    assert status == 2
    assert told in errors.splitlines()[-1]
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", ["run", "demo", "stalls", "ablation", "follow"])
async def test_help_explains_every_option(command: str) -> None:
    status, text, _ = await loadtest(command, "--help")
    assert status == 0
    assert "--tbt-target SECONDS" in text


def test_a_prompt_mix_is_lengths_with_weights() -> None:
    assert prompt_mix("256:0.8,4096:0.2") == (
        PromptLength(num_tokens=256, weight=0.8),
        PromptLength(num_tokens=4096, weight=0.2),
    )


@pytest.mark.parametrize("text", ["", "256", "256:", "0:1", "256:-1", "256:inf", "a:1", "256:1,,"])
def test_a_wrong_prompt_mix_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        prompt_mix(text)
