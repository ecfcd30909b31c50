"""A stand-in for a router and a worker in tests of the demo and the experiments: streams completions without end, at a
steady pace, and tells steps of that pace.

Words of its command line: `breaks-streams` ends every stream after 20 tokens with an error event; `hurries` writes
thousands of tokens a second; `tells-it-is-idle` has metrics of a worker without requests; `knows-no-steps` answers 404
for them; `port=N` listens there; `ends-at-once` does so.
"""

from __future__ import annotations

import http.server
import itertools
import json
import os
import signal
import sys
import time

_STEP_SECONDS = 0.01
_PREFILL_SECONDS = 0.3
_CHARS_PER_TOKEN = 4
_LONG_TOKENS = 2500
_MODELS = '{"data": [{"id": "double", "max_model_len": 1000000}]}'
_NUM_RUNNING = 0.0 if "tells-it-is-idle" in sys.argv else 4.0
_METRICS = f"stallfree_worker_requests_running {_NUM_RUNNING}\nstallfree_worker_prompt_tokens_total 100.0\n"
_STARTED_AT = time.monotonic()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        pages = {"/readyz": "ok", "/metrics": _METRICS, "/v1/models": _MODELS}
        if "knows-no-steps" not in sys.argv:
            pages["/debug/steps"] = _steps()
        pages["/arguments"] = json.dumps({"arguments": sys.argv[1:], "pid": os.getpid()})
        if path not in pages:
            self.send_error(404)
            return
        self._answer(pages[path].encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        prompt = body["prompt"]
        num_prompt_tokens = len(prompt) if isinstance(prompt, list) else len(prompt) // _CHARS_PER_TOKEN
        if num_prompt_tokens > _LONG_TOKENS:
            time.sleep(_PREFILL_SECONDS)
        for number in itertools.islice(itertools.count(), body["max_tokens"]):
            self._send({"choices": [{"text": f" word{number}", "token_ids": [number]}]})
            if number == 20 and "breaks-streams" in sys.argv:
                self._send({"error": {"code": "worker_lost", "message": "the worker is gone"}})
                return
            time.sleep(_STEP_SECONDS / 100 if "hurries" in sys.argv else _STEP_SECONDS)
        self._send(
            {"choices": [], "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": body["max_tokens"]}}
        )
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict[str, object]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _answer(self, page: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        return


def _steps() -> str:
    """The last 300 of its steps, each predicted a tenth too long."""
    newest = int((time.monotonic() - _STARTED_AT) / _STEP_SECONDS)
    steps = [
        {
            "step_id": step_id,
            "seconds": _STEP_SECONDS,
            "predicted_seconds": _STEP_SECONDS * 1.1,
            "decode_tokens": 2,
            "prefill_tokens": 16 if step_id % 4 else 0,
        }
        for step_id in range(max(0, newest - 300), newest)
    ]
    return json.dumps({"steps": steps})


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if "ends-at-once" in sys.argv:
        sys.exit("there is no such model")
    port = next((int(word.removeprefix("port=")) for word in sys.argv if word.startswith("port=")), 0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), _Handler) as server:
        sys.stdout.write(f"listening http://127.0.0.1:{server.server_port}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
