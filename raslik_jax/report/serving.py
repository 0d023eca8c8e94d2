"""A page that asks an index, served to the browsers of this machine alone.

One page and one question's answer, at addresses that a random token makes unknown to others; no
path is ever taken for a file. What a request must be is checked in this order: its Host (a name
that leads here from elsewhere is refused), its address, its kind and size, its JSON.
"""

import contextlib
import http.server
import json
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from raslik_jax.base.messages import bounded

# From the text of a question to what is shown of its answer; a ValueError is said to whoever asks.
Ask = Callable[[str], Mapping[str, Any]]

MAX_BYTES = 2**20  # of a question
_AT_ONCE = 2**16  # bytes that are read of what is not asked for
_LOOPBACK = "127.0.0.1"
_TIMEOUT = 10.0  # seconds that a connection may say nothing
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(http.server.ThreadingHTTPServer):
    """Serves a page and the answers to its questions until it is shut down.

    `url` is where, with the token. Questions are answered one after the other, in whatever thread.

    Example:
      with Server(html, ask) as server:
        print(server.url)
        server.serve_forever()
    """

    daemon_threads = False  # an answer under way is given before the server closes

    def __init__(self, page: str, ask: Ask, *, port: int = 0):
        """Listens on the loopback address; port 0 takes a free one."""
        self.page, self.ask, self.lock = page.encode(), ask, threading.Lock()
        self.base = f"/{secrets.token_urlsafe(24)}/"
        try:
            super().__init__((_LOOPBACK, port), _Handler)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ValueError(f"--port must be a free one, got {port} ({reason})") from None
        self.hosts = tuple(f"{name}:{self.server_port}" for name in (_LOOPBACK, "localhost"))
        self.url = f"http://{self.hosts[0]}{self.base}"

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name server for this machine's name.
        super(http.server.HTTPServer, self).server_bind()
        self.server_name, self.server_port = _LOOPBACK, self.socket.getsockname()[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Whoever hung up needs no answer.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Refused(Exception):
    """A request is refused; whoever sent it learns why in one sentence."""

    def __init__(self, status: HTTPStatus, text: str):
        super().__init__(text)
        self.status = status


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request and closes the connection."""

    server: Server
    server_version, sys_version = "raslik", ""
    timeout = _TIMEOUT

    def do_GET(self) -> None:
        self._reply_to(self._page)

    def do_POST(self) -> None:
        self._reply_to(self._answer)

    def _reply_to(self, make: Callable[[], tuple[str, bytes]]) -> None:
        status = HTTPStatus.OK
        try:
            self._check_host()
            kind, body = make()
        except _Refused as refusal:
            status = refusal.status
            kind, body = _as_json({"error": str(refusal)})
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": len(body), **_HEADERS}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)
        if status != HTTPStatus.OK:
            self._read_rest()

    def _read_rest(self) -> None:
        """Reads what is left of a refused question, within bounds.

        A connection that is closed with unread bytes is reset, and who still sends, or has not read
        yet, sees an error in place of the reply.
        """
        with contextlib.suppress(OSError):  # also of a time that is over
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1)
            for _ in range(2 * MAX_BYTES // _AT_ONCE):
                if not self.connection.recv(_AT_ONCE):
                    return

    def _check_host(self) -> None:
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        is_own = len(hosts) == 1 and hosts[0] in self.server.hosts
        if not is_own or set(origins) - {f"http://{host}" for host in self.server.hosts}:
            raise _Refused(HTTPStatus.FORBIDDEN, f"this server answers at {self.server.hosts[0]}")

    def _check_path(self, name: str) -> None:
        """Refuses every address but one; others learn nothing of how far they are from it."""
        if not secrets.compare_digest(self.path.encode(), (self.server.base + name).encode()):
            raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing at this address")

    def _page(self) -> tuple[str, bytes]:
        self._check_path("")
        return "text/html; charset=utf-8", self.server.page

    def _answer(self) -> tuple[str, bytes]:
        self._check_path("ask")
        if self.headers.get_content_type() != "application/json":
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a question must be application/json")
        sizes = self.headers.get_all("Content-Length", [])
        # Of ASCII digits alone; without a length, or in chunks, its end would not be known.
        if len(sizes) != 1 or not (sizes[0].isascii() and sizes[0].isdecimal()):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "a question must say its length")
        if len(sizes[0]) > 12 or int(sizes[0]) > MAX_BYTES:
            must = f"a question must have at most {MAX_BYTES:,} bytes"
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, must)
        raw = self.rfile.read(int(sizes[0]))
        try:
            text = raw.decode()
            with self.server.lock:
                return _as_json(self.server.ask(text))
        except UnicodeDecodeError:
            raise _Refused(HTTPStatus.BAD_REQUEST, "a question must be UTF-8") from None
        except (ValueError, OSError) as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, bounded(str(error))) from None
        except Exception:  # a defect is no reason to leave the others without answers
            traceback.print_exc()
            failed = "the question could not be answered: the server's terminal says why"
            raise _Refused(HTTPStatus.INTERNAL_SERVER_ERROR, failed) from None

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: addresses hold the token."""


def _as_json(value: Mapping[str, Any]) -> tuple[str, bytes]:
    return "application/json", json.dumps(value).encode()
