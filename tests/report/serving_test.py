"""A served page: to whom it answers, what it refuses, and that no path leads to a file."""

import contextlib
import http.client
import json
import socket
import threading

import pytest

from raslik_jax.report import page, serving


@contextlib.contextmanager
def serve(ask, html="<p>page</p>"):
    """A server in a thread; what it says to a request comes as (status, headers, body)."""
    with serving.Server(html, ask) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def send(method, path, body=None, **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            with contextlib.closing(connection):
                connection.request(method, path, body, headers)
                reply = connection.getresponse()
                return reply.status, dict(reply.getheaders()), reply.read()

        try:
            yield server, send
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(name="asked")
def _asked():
    asked = []

    def ask(text):
        asked.append(text)
        question = json.loads(text)
        if "defect" in question:
            raise KeyError("defect")
        return {"echo": question}

    with serve(ask) as (server, send):
        yield server, send, asked


_JSON = {"Content-Type": "application/json"}


def test_the_page_and_an_answer(asked):
    server, send, _ = asked
    assert server.url == f"http://127.0.0.1:{server.server_port}{server.base}"
    assert len(server.base) > 30 and server.server_address[0] == "127.0.0.1"
    status, headers, body = send("GET", server.base)
    assert (status, body) == (200, b"<p>page</p>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    question = json.dumps({"instruction": "é\u202e</script>"})
    own = {"Host": f"localhost:{server.server_port}"}
    own["Origin"] = f"http://localhost:{server.server_port}"
    status, headers, body = send("POST", f"{server.base}ask", question, **_JSON, **own)
    assert status == 200 and headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"echo": {"instruction": "é\u202e</script>"}}


def test_who_does_not_know_the_token_or_comes_from_elsewhere_learns_nothing(asked):
    server, send, questions = asked
    own, port = server.base, server.server_port
    paths = ("/", "/ask", own[:-1], own[:-2] + "/", own.upper(), f"{own}?x=1", f"//127.0.0.1{own}")
    paths += (f"{own}../", f"{own}..%2f..%2fetc/passwd", f"{own}/etc/passwd", f"{own}config.json")
    paths += ("/../../../etc/passwd", f"{own}./", f"{own}%00")
    for path in paths:
        for method in ("GET", "POST"):
            status, _, body = send(method, path, b"{}" if method == "POST" else None, **_JSON)
            assert (status, json.loads(body)["error"]) == (404, "there is nothing at this address")
    for headers in (
        {"Host": f"evil.example:{port}"},
        {"Host": "127.0.0.1"},
        {"Host": f"127.0.0.1:{port}.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ):
        for method, path in (("GET", own), ("POST", f"{own}ask")):
            assert send(method, path, **_JSON, **headers)[0] == 403
    assert send("GET", f"{own}ask")[0] == 404
    assert send("POST", own, b"{}", **_JSON)[0] == 404
    assert send("PUT", own)[0] == 501
    assert questions == []


def test_a_question_is_bounded_json(asked):
    server, send, questions = asked
    path = f"{server.base}ask"
    large = {"Content-Length": str(serving.MAX_BYTES + 1)}
    for status, body, headers in (
        (415, b"{}", {"Content-Type": "text/plain"}),
        (415, b"{}", {"Content-Type": "application/x-www-form-urlencoded"}),
        (413, None, _JSON | large),
        (413, None, _JSON | {"Content-Length": "9" * 4000}),
        (411, None, _JSON | {"Content-Length": "-1"}),
        (411, None, _JSON | {"Content-Length": "٣"}),
        (411, iter([b"{}"]), _JSON),  # in chunks
        (400, b"{", _JSON),
        (400, b"\xff", _JSON),
        (500, b'{"defect": 1}', _JSON),
    ):
        headers = {name: value.encode() for name, value in headers.items()}
        found, _, reply = send("POST", path, body, **headers)
        assert found == status, (headers, reply)
        assert len(json.loads(reply)["error"]) < 300
    assert questions == ["{", '{"defect": 1}']
    assert send("POST", path, b"{}", **_JSON)[0] == 200  # it goes on


def test_who_is_refused_while_sending_reads_why(asked):
    server, _, _ = asked
    head = f"POST {server.base}ask HTTP/1.0\r\nHost: {server.hosts[0]}\r\nContent-Type: text/plain"
    size = 10 * 2**16
    with socket.create_connection(("127.0.0.1", server.server_port)) as sending:
        sending.sendall(f"{head}\r\nContent-Length: {size}\r\n\r\n".encode())
        reply = sending.recv(2**16)
        for _ in range(10):  # a connection that was closed would be reset by the second
            sending.sendall(b" " * 2**16)
        while part := sending.recv(2**16):
            reply += part
    assert b" 415 " in reply and b"must be application/json" in reply


def test_who_says_nothing_holds_up_nobody_else(asked):
    server, send, _ = asked
    with socket.create_connection(("127.0.0.1", server.server_port)) as silent:
        assert send("GET", server.base)[0] == 200
        silent.sendall(b"GET")
        assert send("GET", server.base)[0] == 200


def test_questions_are_answered_one_after_the_other():
    inside, most = [], []

    def ask(text):
        inside.append(text)
        most.append(len(inside))
        threading.Event().wait(0.02)
        inside.pop()
        return {}

    with serve(ask) as (server, send):
        path = f"{server.base}ask"
        threads = [
            threading.Thread(target=send, args=("POST", path, b"{}"), kwargs=_JSON)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1] * 4


def test_a_port_that_is_taken_is_a_sentence():
    with (
        serve(json.loads) as (server, _),
        pytest.raises(ValueError, match="--port must be a free one, got"),
    ):
        serving.Server("", json.loads, port=server.server_port)


def test_the_box_is_there_only_where_the_page_is_served():
    served, stored = page.render([], is_served=True), page.render([])
    assert 'id="ask-box"' in served and "connect-src 'self'" in served
    assert "fetch(" in served
    for part in ("ask-box", "connect-src", "fetch("):
        assert part not in stored
