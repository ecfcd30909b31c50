"""A stand-in for a router and a worker in tests of the demo: streams completions without end, at a steady pace.

Words of its command line: `breaks-streams` ends every stream after 20 tokens with an error event; `hurries` writes
thousands of tokens a second.
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
_MODELS = '{"data": [{"id": "double", "max_model_len": 1000000}]}'
_METRICS = "stallfree_worker_requests_running 4.0\nstallfree_worker_prompt_tokens_total 100.0\n"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        pages = {"/readyz": "ok", "/metrics": _METRICS, "/v1/models": _MODELS}
        self._answer(pages[self.path].encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if len(body["prompt"]) > 10_000:
            time.sleep(_PREFILL_SECONDS)
        for number in itertools.islice(itertools.count(), body["max_tokens"]):
            self._send({"choices": [{"text": f" word{number}", "token_ids": [number]}]})
            if number == 20 and "breaks-streams" in sys.argv:
                self._send({"error": {"code": "worker_lost", "message": "the worker is gone"}})
                return
            time.sleep(_STEP_SECONDS / 100 if "hurries" in sys.argv else _STEP_SECONDS)
        num_prompt_tokens = len(body["prompt"]) // _CHARS_PER_TOKEN
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


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        sys.stdout.write(f"listening http://127.0.0.1:{server.server_port}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
