"""A proxy before an etcd server, which loses the answers to writes when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def deaf_proxy(endpoint: str) -> Iterator[tuple[str, threading.Event]]:
    """Forward requests to a server inside the block; yields the proxy's HOST:PORT, and an event.

    Once the event is set, the connection of a write ends without an answer when the server has
    executed it. A write is a transaction with a comparison.
    """
    loses = threading.Event()

    class Forward(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server = HTTPConnection(endpoint, timeout=10)
            server.request("POST", self.path, body)
            answer = server.getresponse()
            data = answer.read()
            server.close()
            if loses.is_set() and b'"compare"' in body:
                self.close_connection = True
                return
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Forward) as proxy:
        proxy.daemon_threads, proxy.block_on_close = True, False
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"127.0.0.1:{proxy.server_port}", loses
        finally:
            proxy.shutdown()
            thread.join()
