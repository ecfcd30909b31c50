"""A stand-in for a worker or a router in tests of the cluster: prints where it listens and serves /readyz.

The behaviour is chosen by a word of its command line: `dies-at-start`, `ignores-sigterm`, `never-ready`, `has-child`.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_there = self.path == "/readyz" and "never-ready" not in sys.argv
        body = json.dumps({"arguments": sys.argv[1:], "pid": os.getpid()}).encode()
        self.send_response(200 if is_there or self.path == "/arguments" else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        return


def main() -> None:
    if "dies-at-start" in sys.argv:
        sys.stderr.write("the disk is full\n")
        raise SystemExit(3)
    if "has-child" in sys.argv:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    if "ignores-sigterm" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    port = int(sys.argv[sys.argv.index("--port") + 1])
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), _Handler) as server:
        sys.stdout.write(f"listening http://127.0.0.1:{server.server_port}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
