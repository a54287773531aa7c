# SPDX-License-Identifier: MIT
# SPDX-FileCopyrightText: 2026 The chat_stream authors
"""Tests of chat_stream: bytes on a real loopback socket in, a result or an error out.

In reading order: a server that sends raw bytes from a script; builders of such bytes; ask(), which
calls chat_stream and checks what holds always; then the tests: the parser, the rules one by one,
the recordings in fixtures/, streams cut at every byte, fuzz, the command line, the README, and the
file as a file.
Nothing is mocked and nothing sleeps to be in time: where a test depends on an order of events,
its server waits for one. Everything random is seeded, and a failure shows the seed.

    python -m pytest -q            the tests
    python test_chat_stream.py     a small benchmark
    CHAT_STREAM_CUTS=all python -m pytest -q -k "two_way or cut_anywhere"    every cut, in 20 minutes
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import decimal
import email.utils
import functools
import gzip
import hashlib
import http.client
import inspect
import io
import itertools
import json
import logging
import os
import pathlib
import pickle
import random
import re
import shlex
import shutil
import signal
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import types
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

import chat_stream as cs

KEY = "sk-test-0123456789abcdef"
PAYLOAD = {"model": "made-1", "messages": [{"role": "user", "content": "你好"}]}
#: Seconds after which something that should have happened is taken to hang.
HANG = 20.0
#: Seconds within which a client must have closed its connection: fewer than its server waits.
CLOSES = 5.0

# ---- The server ---------------------------------------------------------------------------------


class Request(NamedTuple):
    """What a client sent."""

    method: str
    path: str
    fields: bytes
    body: bytes
    at: float

    @property
    def headers(self):
        return http.client.parse_headers(io.BytesIO(self.fields))

    def json(self):
        return json.loads(self.body)


#: In a script: keep the connection open until the client closes it.
HOLD = "hold"
#: In a script: reset the connection; what the client has not read may be lost with it.
RESET = "reset"


#: Runs the handlers: to start a thread for each of thousands of connections would take time.
POOL = ThreadPoolExecutor(200)


class Server(socketserver.ThreadingTCPServer):
    """Answers each request with the next script, the last one again and again.

    A script is a list: bytes are sent as they are; a threading.Event is waited for; a number is a
    pause in seconds; HOLD and RESET see above. At its end the connection is closed, so that an
    empty script closes it without an answer.
    """

    request_queue_size = 64

    def __init__(self, *scripts):
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.change = threading.Condition()
        self.stopping = threading.Event()
        self.connections, self.failures, self.stopped = [], [], False
        self.play(*scripts)
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()

    def accept(self):
        while not self.stopped:  # serve_forever would wake up again and again to look for this
            self.handle_request()

    def play(self, *scripts):
        """Forget what was; answer from now on with these scripts."""
        self.scripts, self.requests = scripts, []
        return self

    def take(self, request):
        with self.change:
            self.requests.append(request)
            self.change.notify_all()
            return self.scripts[min(len(self.requests), len(self.scripts)) - 1]

    def process_request(self, request, client_address):
        with self.change:
            self.connections.append(request)
        POOL.submit(self.process_request_thread, request, client_address)

    def shutdown_request(self, request):
        super().shutdown_request(request)
        with self.change:
            self.connections.remove(request)
            self.change.notify_all()

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):  # the client has gone: no fault of ours
            self.failures.append(sys.exc_info()[1])

    def asked(self, count=1, seconds=HANG):
        """Wait until so many requests have come; False if they do not."""
        with self.change:
            return self.change.wait_for(lambda: len(self.requests) >= count, seconds)

    def all_closed(self, seconds=CLOSES):
        """Wait until the clients have closed all their connections; False if they do not."""
        with self.change:
            return self.change.wait_for(lambda: not self.connections, seconds)

    def rest(self):
        """Let go of what a test has left waiting, and wait until all is closed."""
        self.stopping.set()
        for item in itertools.chain(*self.scripts):
            if isinstance(item, threading.Event):
                item.set()
        with self.change:
            for connection in self.connections:
                with contextlib.suppress(OSError):  # closed already
                    connection.shutdown(socket.SHUT_RDWR)
        assert self.all_closed()
        self.stopping.clear()
        assert not self.failures

    def stop(self):
        self.rest()
        self.stopped = True
        socket.create_connection(self.server_address[:2]).close()  # it waits for a connection
        self.thread.join()
        self.server_close()


class Handler(socketserver.StreamRequestHandler):
    """One connection of the Server: reads one request, sends one script."""

    disable_nagle_algorithm = True
    timeout = HANG

    def handle(self):
        first = self.rfile.readline()
        if b" HTTP/1." not in first:
            return
        method, path, _ = first.decode().split()
        lines = itertools.takewhile(bytes.strip, iter(self.rfile.readline, b""))
        fields = b"".join([*lines, b"\r\n"])
        if method == "CONNECT":
            self.tunnel(path, fields)
        else:
            size = re.search(rb"(?i)^content-length: *(\d+)", fields, re.MULTILINE)
            body = self.rfile.read(int(size[1]) if size else 0)
            self.answer(Request(method, path, fields, body, time.monotonic()))

    def tunnel(self, path, fields):
        self.connection.sendall(b"HTTP/1.1 501 Not Implemented\r\n\r\n")

    def answer(self, request):
        for item in self.server.take(request):
            if isinstance(item, bytes):
                self.connection.sendall(item)
            elif isinstance(item, threading.Event):
                item.wait(HANG)
            elif item == HOLD:
                return self.wait_for_close()
            elif item == RESET:
                return self.reset()
            else:
                self.server.stopping.wait(item)
        self.connection.shutdown(socket.SHUT_WR)
        self.wait_for_close()

    def wait_for_close(self):
        while self.connection.recv(4096):
            pass

    def reset(self):
        linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.rfile.close()  # which shares the socket: only the last one to close it closes it
        self.connection.close()


@pytest.fixture(scope="session")
def servers():
    """The servers that are at rest, to be used again: to stop one takes time."""
    idle = []
    yield idle
    for server in idle:
        server.stop()


@pytest.fixture
def serve(servers):
    """serve(*scripts) gives a Server; all of them are brought to rest at the end of the test."""
    used = []

    def start(*scripts):
        try:
            server = servers.pop()
        except IndexError:
            server = Server()
        used.append(server)
        return server.play(*scripts)

    yield start
    for server in used:
        server.rest()
    servers.extend(used)


# ---- Bytes for its scripts ----------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"


def head(status=200, content_type="text/event-stream", **headers):
    """A header block; retry_after="1" becomes the header "Retry-After: 1"."""
    lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
    if content_type is not None:
        lines.append(f"Content-Type: {content_type}")
    lines += [f"{name.replace('_', '-').title()}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunked(pieces):
    """The pieces in chunked framing, each a chunk of its own; the last chunk is the last item."""
    return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece] + [b"0\r\n\r\n"]


def sse(*payloads):
    """An event for each payload; what is no text is sent as JSON, with lone surrogates escaped."""
    texts = (p if isinstance(p, str) else json.dumps(p, ensure_ascii=False) for p in payloads)
    return b"".join(b"data: %b\n\n" % text.encode("utf-8", "backslashreplace") for text in texts)


def chunk(content=None, finish=None, index=0, **delta):
    """A chat.completion.chunk; what else its delta holds is given by name."""
    if content is not None:
        delta["content"] = content
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "model": "m",
        "choices": [choice],
    }


def ways(raw, seed=0):
    """The ways to cut bytes, each as (what it is, pieces): show the first on failure."""
    yield "whole", [raw]
    single = [raw[i : i + 1] for i in range(len(raw))]
    yield "byte by byte", single
    yield "with empty pieces", [b"", *itertools.chain(*zip(single, itertools.repeat(b"")))]
    if len(raw) <= 200:
        for at in range(1, len(raw)):
            yield f"cut at {at}", [raw[:at], raw[at:]]
    for number in range(seed, seed + 3):
        yield f"random pieces, seed {number}", random_pieces(raw, random.Random(number))


def random_pieces(raw, rng):
    cuts = sorted(rng.choices(range(len(raw) + 1), k=rng.randint(1, 2 + len(raw) // 40)))
    return [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])]


# ---- The call, and what holds always ------------------------------------------------------------

ERRORS = (
    cs.ConnectError,
    cs.HTTPStatusError,
    cs.ServerError,
    cs.ProtocolError,
    cs.StreamInterrupted,
    cs.StreamTimeout,
)
TEXTS = {"content": "content", "reasoning": "reasoning", "refusal": "refusal"}
CALL_TEXTS = {"tool_name": "name", "tool_arguments": "arguments_text"}
CHOICE_MEMBERS = {"content", "reasoning", "refusal", "tool_calls", "finish", "message"}
CALL_MEMBERS = {"usage", "choices", "id", "model", "request_id", "streamed", "timing"}


class Outcome(NamedTuple):
    """What came of a call: a result or an error, and the deltas before it."""

    result: dict | None
    error: cs.ChatStreamError | None
    deltas: list

    @property
    def answer(self):
        """The result, or the error's partial one."""
        return self.error.partial if self.result is None else self.result


def ask(server, payload=PAYLOAD, *, base=None, key=KEY, on_delta=None, **options):
    """Call chat_stream, and check what holds always; what is no ChatStreamError passes through."""
    sent, deltas = copy.deepcopy(payload), []

    def gather(delta):
        deltas.append(delta)
        if on_delta is not None:
            on_delta(delta)

    options = {"first_byte_timeout": HANG, "idle_timeout": HANG, **options}
    result = error = None
    try:
        result = cs.chat_stream(sent, base or server.url, key, gather, **options)
    except cs.ChatStreamError as caught:
        error = caught
    outcome = Outcome(result, error, deltas)
    assert sent == payload
    if error is not None:
        check_error(error, key, server.port)
    check_answer(outcome.answer, deltas)
    assert server.all_closed(), "the socket is still open"
    return outcome


def check_answer(answer, deltas):
    """A result, or a partial one, has its members and says what the deltas said."""
    assert set(answer) == CHOICE_MEMBERS | CALL_MEMBERS
    assert joined(deltas) == texts_of(answer)
    assert all(type(delta) is cs.Delta and delta.text for delta in deltas)
    json.dumps(answer)
    for text in texts_of(answer).values():
        text.encode()
    for choice in answer["choices"].values():
        assert set(choice) == CHOICE_MEMBERS
        check_message(choice)
    first = answer["choices"].get(0)
    if first is None:
        assert [answer[name] for name in TEXTS] == ["", "", ""]
    else:
        assert {name: answer[name] for name in CHOICE_MEMBERS} == first
    timing = answer["timing"]
    assert set(timing) == {"first_byte", "first_delta", "total", "reads", "max_gap"}
    assert (timing["first_delta"] is None) == (not deltas)


def check_message(choice):
    """The message says the same in the API's own form."""
    message, calls = choice["message"], choice["tool_calls"]
    assert message["role"] == "assistant"
    assert (message["content"] or "") == choice["content"]
    wire = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments_text"]},
        }
        for call in calls.values()
    ]
    if "function_call" in message:  # the legacy form, which has no id
        assert message["function_call"] == wire[0]["function"]
    else:
        assert message.get("tool_calls", []) == wire


def check_error(error, key, port):
    """An error is one of the six, says where in one line, and survives being sent elsewhere."""
    text = str(error)
    assert type(error) in ERRORS
    assert len(text.splitlines()) == 1 and len(text) <= 2000
    assert f"127.0.0.1:{port}" in text and f"127.0.0.1:{port}" in error.url
    assert not key or key not in text
    whole = repr(vars(error))  # which is compared, as a NaN may stand in them
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(twin), str(twin), repr(vars(twin))) == (type(error), text, whole)


def joined(deltas):
    """The texts of the deltas by (choice, kind, call)."""
    texts = {}
    for delta in deltas:
        place = (delta.choice, delta.kind, delta.call)
        texts[place] = texts.get(place, "") + delta.text
    return texts


def texts_of(answer):
    """The same from a result."""
    texts = {}
    for index, choice in answer["choices"].items():
        for kind, name in TEXTS.items():
            texts[index, kind, 0] = choice[name]
        for number, call in choice["tool_calls"].items():
            for kind, name in CALL_TEXTS.items():
                texts[index, kind, number] = call[name]
    return {place: text for place, text in texts.items() if text}


# ---- What the tests of the rules share ----------------------------------------------------------

Connect, Status, Reported, Protocol, Interrupted, Timeout = ERRORS

IN_CHUNKS = head(transfer_encoding="chunked")
#: A script: a whole answer, "ok".
OK = [head(), sse(chunk("ok", "stop")), DONE]


def cases(names, table):
    """Parametrize with the rows of a table, each under its own name."""
    rows = [
        pytest.param(*(row if type(row) is tuple else (row,)), id=k) for k, row in table.items()
    ]
    return pytest.mark.parametrize(names, rows)


def side_by_side(names, table):
    """Like cases(), for rows that mostly wait: the first one to be run runs them all, in threads.

    The fixtures are those of that row. Each row fails, and is named, as a test of its own. A table
    may be a list here.
    """
    table = table if isinstance(table, dict) else {str(row): row for row in table}

    def decorate(test):
        given = names.split(", ")
        fixtures = [name for name in inspect.signature(test).parameters if name not in given]
        ran = {}

        def run(request, row):
            if not ran:
                shared = [request.getfixturevalue(name) for name in fixtures]
                call = functools.partial(test, **dict(zip(fixtures, shared)))
                with ThreadPoolExecutor(len(table)) as pool:
                    for name, values in table.items():
                        values = values if type(values) is tuple else (values,)
                        ran[name] = pool.submit(call, **dict(zip(given, values)))
            ran[row].result()

        return pytest.mark.parametrize("row", table)(run)

    return decorate


def streamed(serve, *items, **options):
    """What comes of a 200 with an event stream of these bytes."""
    return ask(serve([head(), *items]), **options)


def at_once_and_by_bytes(body, **headers):
    """Two scripts for the same body: each chunk is a read, however fast the network is."""
    for pieces in ([body], [body[i : i + 1] for i in range(len(body))]):
        yield [head(transfer_encoding="chunked", **headers), *chunked(pieces)]


def picked(got, want):
    """Those members of got that want has, at any depth: == then shows what differs."""
    if isinstance(got, dict) and isinstance(want, dict) and want:
        return {name: picked(got.get(name), value) for name, value in want.items()}
    return got


def check_result(outcome, **want):
    """The call succeeded, and its result has these members."""
    if outcome.error is not None:
        raise outcome.error
    if want:
        assert picked(outcome.result, want) == want


def check_failed(outcome, error_class, *words, unsaid=(), **partial):
    """The call failed with this class, said these words, and had this much of an answer."""
    error = outcome.error
    assert type(error) is error_class, f"{outcome.result} {error}"
    text = str(error)
    assert [word for word in words if word.lower() not in text.lower()] == [], text
    assert [word for word in unsaid if word.lower() in text.lower()] == [], text
    if partial:
        assert picked(error.partial, partial) == partial


def failure(base, **options):
    """The error of a call that reaches no Server of these tests."""
    with pytest.raises(cs.ChatStreamError) as caught:
        cs.chat_stream(PAYLOAD, base, KEY, **{"first_byte_timeout": HANG, **options})
    assert KEY not in str(caught.value) and len(str(caught.value).splitlines()) == 1
    return caught.value


@pytest.fixture
def proxies(monkeypatch):
    """proxies(http_proxy=...) sets these variables; those of the environment are gone."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    return lambda **urls: [monkeypatch.setenv(name, url) for name, url in urls.items()]


@pytest.fixture
def dead_port():
    """A port that is taken, so that no one else can have it, and at which no one listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def mute_port():
    """A port where connections are made, by the system, and never served."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """The path of a self-signed certificate and its key, for 127.0.0.1 and chat.invalid."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:chat.invalid"]
    try:
        made = subprocess.run(
            [*command, *names, "-keyout", str(path)], capture_output=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no certificate without openssl: {error}")
    with path.open("ab") as file:
        file.write(made.stdout)
    return path


class SecureServer(Server):
    """A Server behind TLS. With tunnel, it speaks HTTP until a CONNECT, as a proxy does."""

    def __init__(self, certificate, *scripts, tunnel=False):
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate)
        self.tunnel, self.tunnelled = tunnel, []
        super().__init__(*scripts)
        self.RequestHandlerClass = TunnelHandler
        self.url = f"https://127.0.0.1:{self.port}/v1"

    def secured(self, connection):
        return self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def get_request(self):
        connection, address = super().get_request()
        return connection if self.tunnel else self.secured(connection), address


class TunnelHandler(Handler):
    """Serves what comes through its tunnel as any other request."""

    def tunnel(self, path, fields):
        self.server.tunnelled.append((path, fields))
        self.connection.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
        self.connection = self.server.secured(self.connection)
        with self.connection, self.connection.makefile("rb") as self.rfile:
            self.handle()


@pytest.fixture
def serve_tls(certificate):
    """serve_tls(*scripts) starts a SecureServer."""
    with contextlib.ExitStack() as stack:

        def start(*scripts, **options):
            server = SecureServer(certificate, *scripts, **options)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def trust(certificate):
    """A context that trusts the certificate."""
    return ssl.create_default_context(cafile=str(certificate))


# ---- sse_events ---------------------------------------------------------------------------------

BOM = b"\xef\xbb\xbf"
LONG = b"x" * 2048


def message(data, id="", event="message", retry=None):
    return cs.Event(event, data, id, retry)


#: name: (bytes, events, what is ignored; None where the contract leaves that open)
STREAMS = {
    # Line ends
    "lf": (b"data: a\n\ndata: b\n\n", [message("a"), message("b")], []),
    "cr": (b"data: a\r\rdata: b\r\r", [message("a"), message("b")], []),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [message("a"), message("b")], []),
    "lf-then-crlf": (b"data: a\n\r\ndata: b\n\r\n", [message("a"), message("b")], []),
    "crlf-then-cr": (b"data: a\r\n\rdata: b\r\n\r", [message("a"), message("b")], []),
    "cr-then-crlf": (b"data: a\r\r\ndata: b\r\r\n", [message("a"), message("b")], []),
    "cr-then-lf-is-one-end": (b"data: a\r\ndata: b\r\n\n", [message("a\nb")], []),
    "mixed-in-one-event": (b"data: a\rdata: b\ndata: c\r\n\r", [message("a\nb\nc")], []),
    "newlines": (b"data:test\r\ndata\ndata:test\r\n\r\n", [message("test\n\ntest")], []),
    "many-blank-lines": (b"\n\r\n\r\r\ndata: a\n\n\n\r\n\r\n\r\r\n\n", [message("a")], []),
    "other-line-ends-are-text": (
        "data: a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1eh\n\n".encode(),
        [message("a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1eh")],
        [],
    ),
    # Byte order mark
    "bom": (BOM + b"data: a\n\n", [message("a")], []),
    "bom-twice": (BOM * 2 + b"data: a\n\ndata: b\n\n", [message("b")], [BOM + b"data: a"]),
    "bom-later-is-part-of-the-name": (
        BOM + b"data: a\n\n" + BOM + b"data: b\n\ndata: c\n\n",
        [message("a"), message("c")],
        [BOM + b"data: b"],
    ),
    "bom-before-comment": (BOM + b": hi\ndata: a\n\n", [message("a")], []),
    "bom-before-blank-line": (BOM + b"\ndata: a\n\n", [message("a")], []),
    "bom-in-data": (b"data: " + BOM + b"a\n\n", [message("\ufeffa")], []),
    "bom-only": (BOM, [], None),
    "bom-cut": (BOM[:2], [], None),
    "nothing": (b"", [], []),
    # Comments
    "comments": (
        b"data:1\r:\0\n:\r\ndata:2\n:%b\rdata:3\n:data:fail\r:%b\ndata:4\n\n" % (LONG, LONG),
        [message("1\n2\n3\n4")],
        [],
    ),
    "comment-alone-makes-no-event": (b": ping\n\n:\n\n: data: x\n\n", [], []),
    # Fields
    "no-colon": (b"data\n\ndata\ndata\n\ndata:test\n\n", [*map(message, ["", "\n", "test"])], []),
    "empty-data": (b"data:\n\ndata: \n\n", [message(""), message("")], []),
    "one-space-is-optional": (b"data:a\n\ndata: a\n\n", [message("a"), message("a")], []),
    "only-one-space-goes": (b"data:  a \n\n", [message(" a ")], []),
    "a-tab-stays": (b"data:\ttest\rdata: \ndata:test\n\n", [message("\ttest\n\ntest")], []),
    "colons-in-value": (b"data:a:b: c\ndata::\n\n", [message("a:b: c\n:")], []),
    "many-data-lines": (b"data: 1\n" * 9 + b"\n", [message("\n".join("1" * 9))], []),
    "names-must-match": (
        b"data:\0\ndata:  2\rData:1\ndata\0:2\ndata:1\r\0data:4\nda-ta:3\rdata_5\n data:3\r\r",
        [message("\0\n 2\n1")],
        [b"Data:1", b"data\0:2", b"\0data:4", b"da-ta:3", b"data_5", b" data:3"],
    ),
    "unknown-fields": (
        b"data:test\n data\ndata\nfoobar:xxx\njustsometext\n:comment\ndata:test\n\n",
        [message("test\n\ntest")],
        [b" data", b"foobar:xxx", b"justsometext"],
    ),
    "unknown-field-between": (b"data: a\n\nx: y\n\ndata: b\n\n", [*map(message, "ab")], [b"x: y"]),
    "bare-json-line": (b'{"error": "x"}\n\n', [], [b'{"error": "x"}']),
    "null-character": (b"data:\0\n\n\n\n", [message("\0")], []),
    "utf-8": ("data: ok…é你😀\n\n".encode(), [message("ok…é你😀")], []),
    # event
    "event": (b"event: t\ndata: a\n\ndata: b\n\n", [message("a", event="t"), message("b")], []),
    "event-after-data": (b"data: a\nevent: t\n\n", [message("a", event="t")], []),
    "event-last-wins": (b"event: t\nevent: u\ndata: a\n\n", [message("a", event="u")], []),
    "event-empty": (b"event: t\nevent: \ndata: a\n\nevent\ndata: b\n\n", [*map(message, "ab")], []),
    "event-without-data": (b"event: t\n\ndata: a\n\n", [message("a")], []),
    "event-keeps-its-spaces": (b"event:  t \ndata: a\n\n", [message("a", event=" t ")], []),
    # id
    "id-is-kept": (b"id: 1\ndata: a\n\ndata: b\n\n", [message("a", "1"), message("b", "1")], []),
    "id-without-data-is-kept": (b"id: 1\n\ndata: a\n\n", [message("a", "1")], []),
    "id-after-data": (b"data: a\nid: 1\n\n", [message("a", "1")], []),
    "id-reset": (b"id: 1\ndata: a\n\nid\ndata: b\n\n", [message("a", "1"), message("b")], []),
    "id-reset-by-empty": (b"id: 1\nid:\ndata: a\n\n", [message("a")], []),
    "id-with-nul-is-ignored": (b"id: 1\nid: 2\0\nid: \0\ndata: a\n\n", [message("a", "1")], []),
    "id-and-heartbeats": (b"id: 1\ndata: a\n\n\n: hi\n\n\n", [message("a", "1")], []),
    # retry
    "retry": (b"retry: 30\ndata: a\n\ndata: b\n\n", [message("a", retry=30), message("b")], []),
    "retry-leading-zeros": (b"retry: 007\ndata: a\n\n", [message("a", retry=7)], []),
    "retry-bogus": (b"retry:3000\nretry:1000x\ndata:x\n\n", [message("x", retry=3000)], []),
    "retry-absurd": (b"retry: %b\ndata: a\n\n" % (b"9" * 5000), [message("a")], []),
    "retry-empty": (b"retry\nretry:\nretry: \ndata: a\n\n", [message("a")], []),
    **{
        f"retry-not-digits-{number}": (b"retry: %b\ndata: a\n\n" % text, [message("a")], [])
        for number, text in enumerate(
            [
                b"1_0",
                "٣".encode(),
                "²".encode(),
                "１".encode(),
                b"-1",
                b"+1",
                b"1.5",
                b"0x1",
                b"1 ",
                b"  1",
            ]
        )
    },
    # The end
    "tail-in-a-line": (b"data: a\n\ndata: b", [message("a")], [b"data: b"]),
    "tail-in-a-name": (b"data: a\n\nda", [message("a")], [b"da"]),
    "tail-in-a-character": (b"data: a\n\ndata: \xe4\xbd", [message("a")], [b"data: \xe4\xbd"]),
    "tail-of-data-lines": (b"data: a\n\ndata: b\ndata: c\n", [message("a")], [b"data: b\ndata: c"]),
    "tail-of-lines-and-a-part": (b"data: b\ndata: c\nda", [], [b"data: b\ndata: c\nda"]),
    "tail-with-a-name": (b"event: t\ndata: b\n", [], [b"event: t\ndata: b"]),
    "tail-of-a-name-alone": (b"data: a\n\nevent: t\n", [message("a")], [b"event: t"]),
    "tail-after-cr": (b"data: a\r\rdata: b\r", [message("a")], [b"data: b"]),
    "tail-after-retry-and-id": (
        b"retry:1000\ndata:test1\n\nid:test\ndata: test2",
        [message("test1", retry=1000)],
        None,
    ),
}


def parsed(pieces):
    """The events of the pieces, and what was ignored."""
    ignored = []
    events = list(cs.sse_events(iter(pieces), ignored.append))
    # Whether the tail keeps the line end behind it is nobody's business.
    return events, [line.rstrip(b"\r\n") for line in ignored]


@pytest.mark.parametrize("name", STREAMS)
def test_sse_events_follow_the_standard_however_cut(name):
    raw, events, ignored = STREAMS[name]
    for how, pieces in ways(raw):
        got, skipped = parsed(pieces)
        assert got == events, how
        assert all(type(event) is cs.Event for event in got), how
        if ignored is not None:
            assert skipped == ignored, how


def test_sse_events_without_a_listener_yield_the_same():
    for raw, events, _ in STREAMS.values():
        assert list(cs.sse_events([raw])) == events


@pytest.mark.parametrize(
    ("raw", "due"),
    [
        (b"data: x\n\n", 9),
        (b"data: x\r\r", 9),
        (b"data: x\r\n\r\n", 10),  # the CR ends the line: its LF is not waited for
        (b"data: x\n\r\n", 9),
        (BOM + b"data: x\r\r\n", 12),
    ],
    ids=["lf", "cr", "crlf", "lf-crlf", "bom-cr"],
)
def test_an_event_is_out_before_the_next_byte_is_asked_for(raw, due):
    out, seen = [], 0

    def reads():
        nonlocal seen
        for byte in raw + b"data":
            seen += 1
            yield bytes([byte])

    for _ in cs.sse_events(reads()):
        out.append(seen)
    assert out == [due]


def test_events_of_one_read_are_out_one_by_one():
    events = cs.sse_events(iter([b"data: a\n\ndata: b\n\n"]))
    assert next(events).data == "a"
    assert next(events).data == "b"


BAD_UTF8 = {
    "stray-byte": b"\xff",
    "continuation": b"a\x80b",
    "overlong": b"\xc0\xaf",
    "surrogate": b"\xed\xa0\x80",
    "beyond-unicode": b"\xf4\x90\x80\x80",
    "cut-character": b"\xe4\xbd",
}


@pytest.mark.parametrize("field", [b"data: ", b"data:", b"event: ", b"id: ", b"retry: "])
@pytest.mark.parametrize("bad", BAD_UTF8.values(), ids=BAD_UTF8)
def test_bad_utf8_in_a_field_is_a_protocol_error_after_what_was_complete(field, bad):
    raw = b"data: a\n\n\xff: b\ndata: c\n\n" + field + bad + b"\ndata: d\n\n"
    for how, pieces in ways(raw):
        got = []
        with pytest.raises(cs.ProtocolError):
            for event in cs.sse_events(pieces):
                got.append(event.data)
        assert got == ["a", "c"], how


@pytest.mark.parametrize(
    "line", [b": %b", b":%b", b"x%b: y", b"x: %b", b"%b", b"database: %b", b"idle:%b"]
)
@pytest.mark.parametrize("bad", BAD_UTF8.values(), ids=BAD_UTF8)
def test_bad_utf8_outside_of_the_fields_is_harmless(line, bad):
    line = line % bad
    for how, pieces in ways(b"data: a\n" + line + b"\ndata: b\n\n"):
        events, ignored = parsed(pieces)
        assert events == [message("a\nb")], how
        assert ignored == ([] if line.startswith(b":") else [line]), how


LIMIT = 120
#: name: (an event that LIMIT just allows, an event that it does not)
LIMITED = {
    "one-line": (b"data: %b\n\n" % (b"x" * (LIMIT - 8)), b"data: %b\n\n" % (b"x" * (LIMIT + 1))),
    "no-space": (b"data:%b\n\n" % (b"x" * (LIMIT - 7)), b"data:%b\n\n" % (b"x" * (LIMIT + 1))),
    "many-lines": (b"data: x\n" * (LIMIT // 8 - 1) + b"\n", b"data: x\n" * (LIMIT + 1) + b"\n"),
    "chinese": (
        b"data: %b\n\n" % ("你" * ((LIMIT - 8) // 3)).encode(),
        b"data: %b\n\n" % ("你" * (LIMIT // 3 + 1)).encode(),
    ),
    "chinese-lines": (
        "data: 你\n".encode() * (LIMIT // 10 - 1) + b"\n",
        "data: {}\n".format("你" * 10).encode() * 5 + b"\n",
    ),
    "long-then-short": (
        b"data: %b\ndata: y\n\n" % (b"x" * (LIMIT - 16)),
        b"data: %b\ndata: %b\n\n" % (b"x" * (LIMIT - 16), b"y" * 17),
    ),
}


@pytest.mark.parametrize("name", LIMITED)
def test_an_event_at_the_limit_passes_and_one_over_it_does_not(name, monkeypatch):
    monkeypatch.setattr(cs, "MAX_EVENT_BYTES", LIMIT)
    small, large = LIMITED[name]
    for how, pieces in ways(small * 3):
        assert len(parsed(pieces)[0]) == 3, how
    for how, pieces in ways(b"data: a\n\n" + large):
        got = []
        with pytest.raises(cs.ProtocolError, match=str(LIMIT)):
            for event in cs.sse_events(pieces):
                got.append(event.data)
        assert got == ["a"], how


@pytest.mark.parametrize(
    "line",
    [b": %b", b"event: %b", b"id: %b", b"x%b", b"data: 1\n: %b", b"data: 1\nevent: %b"],
    ids=["comment", "event", "id", "unknown", "comment-after-data", "event-after-data"],
)
@pytest.mark.parametrize("size", [LIMIT - 20, LIMIT, LIMIT * 2])
def test_what_the_limit_says_does_not_depend_on_the_cuts(line, size, monkeypatch):
    monkeypatch.setattr(cs, "MAX_EVENT_BYTES", LIMIT)
    ends = {}
    for how, pieces in ways(line % (b"y" * size) + b"\ndata: 2\n\n"):
        try:
            end = str(parsed(pieces)[0])
        except cs.ProtocolError:
            end = "ProtocolError"
        ends.setdefault(end, how)
    assert len(ends) == 1, ends


@pytest.mark.parametrize("piece", [b"x", b"data: y\n", b"data: ", b"data: \xe4\xbd\xa0"])
def test_an_endless_event_ends_at_the_limit(piece, monkeypatch):
    monkeypatch.setattr(cs, "MAX_EVENT_BYTES", LIMIT)
    asked = itertools.count()
    with pytest.raises(cs.ProtocolError):
        for _ in cs.sse_events(piece for _ in asked):
            pass
    assert next(asked) * len(piece) <= 2 * LIMIT + 16


def test_endless_comments_and_names_are_no_event_and_take_no_room(monkeypatch):
    monkeypatch.setattr(cs, "MAX_EVENT_BYTES", LIMIT)
    pieces = [b": ping\n", b"event: t\n", b"id: 1\n", b"\n"] * LIMIT
    pieces += [b"data: a\n", *[b": ping\n", b"note: x\n"] * LIMIT, b"\n"]
    assert parsed(pieces)[0] == [message("a", "1")]


@pytest.mark.parametrize(
    ("raw", "size", "count"),
    [
        (b"data: %b\n\n" % (b"x" * (1 << 20)), 1, 1),
        (b"data: %b\n\n" % (b"x" * (1 << 22)), 16, 1),
        (b"data: %b\n\n" % ("你".encode() * (1 << 21)), 1000, 1),
        (b"data: x\n" * (1 << 18) + b"\n", 1 << 30, 1),
        (b"data: x\r\r" * (1 << 18), 1 << 30, 1 << 18),
        (b"data: x\r\n" * (1 << 16) + b"\r\n", 7, 1),
    ],
    ids=["bytes", "small-pieces", "chinese", "many-lines", "many-events", "lines-in-pieces"],
)
def test_parsing_takes_linear_time(raw, size, count):
    start = time.monotonic()
    pieces = (raw[at : at + size] for at in range(0, len(raw), size))
    assert sum(1 for _ in cs.sse_events(pieces)) == count
    # A second or less where each byte is looked at once or twice; a minute and more where what is
    # pending is copied or searched again for each piece.
    assert time.monotonic() - start < HANG


@pytest.mark.parametrize("gap", ["", "\n: {}\n"], ids=["none", "comments"])
def test_many_values_in_one_event_take_linear_time(serve, gap):
    start = time.monotonic()
    values = gap.join([json.dumps(choices({"delta": {"content": "x"}}))] * 60_000)
    body = values.replace("\n", "\ndata: ").encode()
    outcome = streamed(serve, b"data: " + body + b"\n\n", sse(chunk("", "stop")), DONE)
    check_result(outcome, content="x" * 60_000)
    assert time.monotonic() - start < HANG


# ---- The request --------------------------------------------------------------------------------


@cases(
    "given, sent",
    {
        "not given": ({}, {"include_usage": True}),
        "given": ({"stream_options": {"include_usage": False}}, {"include_usage": False}),
        "given empty": ({"stream_options": {}}, {}),
        "given as None": ({"stream_options": None}, "absent"),
    },
)
def test_stream_options_are_added_unless_given(serve, given, sent):
    server = serve(OK)
    check_result(ask(server, {**PAYLOAD, **given}), content="ok")
    assert server.requests[0].json().get("stream_options", "absent") == sent


@cases(
    "payload",
    {
        "any member": {**PAYLOAD, "temperature": 0.1, "stop": None, "x": [{"deep": {"er": [1]}}]},
        "stream false": {**PAYLOAD, "stream": False},
        "a mapping that is no dict": collections.UserDict(PAYLOAD),
        "a lone surrogate, as an old answer may hold": {**PAYLOAD, "user": "\ud83d"},
    },
)
def test_payload_is_sent_whole_with_stream_true(serve, payload):
    server = serve(OK)
    check_result(ask(server, payload), content="ok")
    (request,) = server.requests
    want = {"stream_options": {"include_usage": True}, **payload, "stream": True}
    assert request.json() == want
    assert request.method == "POST"
    assert request.headers["Content-Type"].split(";")[0] == "application/json"
    assert int(request.headers["Content-Length"]) == len(request.body)


def refusal(status, body, **headers):
    return [head(status, "application/json", **headers), body]


UNKNOWN = refusal(400, b'{"error": {"message": "Unknown parameter: stream_options"}}')
EXTRA = refusal(422, b'{"detail": [{"loc": ["body", "stream_options"], "msg": "Extra inputs"}]}')
STILL = refusal(422, b'{"detail": "we like stream_options no better now"}')
OTHER = refusal(400, b'{"error": {"message": "the context is too long"}}')
BUSY = refusal(503, b'{"error": {"message": "warming up"}}', retry_after=0)
BROKEN = refusal(500, b'{"error": {"message": "stream_options broke us"}}')


@cases(
    "scripts, given, retries, sent, says",
    {
        "400": ([UNKNOWN, OK], {}, 0, [True, False], None),
        "422": ([EXTRA, OK], {}, 0, [True, False], None),
        "given by the caller": ([UNKNOWN, OK], {"stream_options": {}}, 0, [True], "Unknown"),
        "None by the caller": ([UNKNOWN, OK], {"stream_options": None}, 0, [False], "Unknown"),
        "another 400": ([OTHER, OK], {}, 0, [True], "too long"),
        "a 500 that names it": ([BROKEN, OK], {}, 0, [True], "broke us"),
        "refused twice": ([EXTRA, STILL, OK], {}, 0, [True, False], "no better now"),
        "then something else": ([UNKNOWN, OTHER, OK], {}, 0, [True, False], "too long"),
        "counts no retry": ([UNKNOWN, BUSY, OK], {}, 1, [True, False, False], None),
        "after a retry": ([BUSY, EXTRA, OK], {}, 1, [True, True, False], None),
    },
)
def test_stream_options_refused_are_left_out_once(serve, scripts, given, retries, sent, says):
    server = serve(*scripts)
    outcome = ask(server, {**PAYLOAD, **given}, retries=retries)
    assert ["stream_options" in request.json() for request in server.requests] == sent
    if says is None:
        check_result(outcome, content="ok")
    else:
        check_failed(outcome, Status, says)


CIRCULAR = {"messages": []}
CIRCULAR["messages"].append(CIRCULAR)
DEEP = []
for _ in range(100_000):
    DEEP = [DEEP]

#: Arguments, what the message shows, and what it must not.
WRONG_ARGUMENTS = {
    "payload a list": ({"payload": [1]}, [], []),
    "payload None": ({"payload": None}, [], []),
    "payload a text": ({"payload": "{}"}, [], []),
    "payload with NaN": ({"payload": {"top_p": float("nan")}}, [], []),
    "payload with infinity": ({"payload": {"top_p": float("-inf")}}, [], []),
    "payload with a set": ({"payload": {"stop": {"a"}}}, [], []),
    "payload with bytes": ({"payload": {"stop": b"a"}}, [], []),
    "payload with a tuple as key": ({"payload": {(1, 2): 3}}, [], []),
    "payload circular": ({"payload": CIRCULAR}, [], []),
    "payload too deep": ({"payload": {"messages": DEEP}}, [], []),
    "base None": ({"base": None}, [], []),
    "base bytes": ({"base": b"http://127.0.0.1:9/v1"}, [], []),
    "base empty": ({"base": ""}, ["https://"], []),
    "base without scheme": ({"base": "127.0.0.1:80/v1"}, ["127.0.0.1:80/v1", "http://"], []),
    "base a name and a port": ({"base": "localhost:80"}, ["localhost:80", "http://"], []),
    "base with another scheme": ({"base": "ftp://host/v1"}, ["ftp://host/v1", "http://"], []),
    "base a file": ({"base": "file:///etc/hosts"}, ["file:///etc/hosts", "http://"], []),
    "base without host": ({"base": "http:///v1"}, ["http:///v1"], []),
    "base with a port only": ({"base": "http://:8080/v1"}, ["http://:8080/v1"], []),
    "base with a password": ({"base": "http://me:pa55@127.0.0.1:9/v1"}, [], ["pa55"]),
    "base with a user": ({"base": "http://me@127.0.0.1:9/v1"}, [], []),
    "base with a port too high": ({"base": "http://127.0.0.1:65536/v1"}, ["65536"], []),
    "base with a port in letters": ({"base": "http://127.0.0.1:http/v1"}, [":http"], []),
    "base with port 0": ({"base": "http://127.0.0.1:0/v1"}, ["127.0.0.1:0"], []),
    "base with an empty label": ({"base": "http://a..b/v1"}, ["a..b", "https://"], []),
    "base with a space in its host": ({"base": "http://my host/v1"}, ["my host"], []),
    "base with half a bracket": ({"base": "http://[::1/v1"}, ["http://[::1/v1"], []),
    "key of two lines": ({"key": "sk-5f3a\nd41d"}, ["key"], ["sk-5f3a", "d41d"]),
    "key not ASCII": ({"key": "sk-5f3a密d41d"}, ["key"], ["sk-5f3a", "d41d"]),
    "key with NUL": ({"key": "sk-5f3a\0d41d"}, ["key"], ["sk-5f3a", "d41d"]),
    "key as bytes": ({"key": b"sk-5f3ad41d"}, [], ["5f3a"]),
    "key a number": ({"key": 5318008}, [], ["5318008"]),
    "header name with a space": ({"headers": {"X Y": "z"}}, ["X Y"], []),
    "header name with a colon": ({"headers": {"X:": "z"}}, ["X:"], []),
    "header name empty": ({"headers": {"": "z"}}, [], []),
    "header name a number": ({"headers": {1: "z"}}, [], []),
    "header value of two lines": ({"headers": {"Api-Key": "k5f3a\r\nX: y"}}, [], ["k5f3a"]),
    "header value not ASCII": ({"headers": {"X": "密"}}, [], []),
    "header value a number": ({"headers": {"X-Id": 7}}, [], []),
    "header value None": ({"headers": {"X-Id": None}}, [], []),
    "headers a list": ({"headers": ["X: y"]}, [], []),
    "headers a text": ({"headers": "X: y"}, [], []),
    "retries negative": ({"retries": -1}, ["retries"], []),
    "retries a fraction": ({"retries": 0.5}, [], []),
    "retries a text": ({"retries": "2"}, [], []),
    "retries None": ({"retries": None}, [], []),
    "on_delta no callable": ({"on_delta": "print"}, [], []),
    "on_delta empty": ({"on_delta": ""}, ["on_delta"], []),
    "record without write": ({"record": "answer.sse"}, [], []),
    "record empty": ({"record": ""}, ["record"], []),
    "record False": ({"record": False}, ["record"], []),
    "record a text file": ({"record": io.StringIO()}, ["record"], []),
    "context of another type": ({"context": True}, [], []),
}
for _name in ("first_byte_timeout", "idle_timeout", "stall_timeout"):
    for _value in (0, -1, float("nan"), "5", None):
        _shown = ["timeout"] if type(_value) in (int, float) else []
        WRONG_ARGUMENTS[f"{_name} {_value!r}"] = ({_name: _value}, _shown, [])


@pytest.fixture(scope="module")
def bystander():
    """A server that would answer, but is not to be asked."""
    server = Server(OK)
    yield server
    server.stop()


@cases("arguments, shown, hidden", WRONG_ARGUMENTS)
@pytest.mark.parametrize("call", [cs.chat_stream, cs.chat_deltas], ids=["stream", "deltas"])
def test_wrong_argument_raises_at_the_call(bystander, call, arguments, shown, hidden):
    if call is cs.chat_deltas and "on_delta" in arguments:
        pytest.skip("it has no on_delta")
    bystander.play(OK)
    arguments = {"payload": PAYLOAD, "base": bystander.url, "key": KEY, **arguments}
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**arguments)
    assert not isinstance(caught.value, cs.ChatStreamError)
    assert bystander.requests == []
    text = str(caught.value)
    assert [word for word in shown if word not in text] == []
    assert [word for word in hidden if word in text] == []


@cases(
    "base, path",
    {
        "plain": ("/v1", "/v1/chat/completions"),
        "trailing slash": ("/v1/", "/v1/chat/completions"),
        "trailing slashes": ("/v1//", "/v1/chat/completions"),
        "white space around": ("/v1 \n", "/v1/chat/completions"),
        "no path": ("", "/chat/completions"),
        "a slash": ("/", "/chat/completions"),
        "deep": ("/openai/deployments/x", "/openai/deployments/x/chat/completions"),
        "the endpoint": ("/v1/chat/completions", "/v1/chat/completions"),
        "the endpoint and a slash": ("/v1/chat/completions/", "/v1/chat/completions"),
        "query": ("/v1?api-version=2030-01-01", "/v1/chat/completions?api-version=2030-01-01"),
        "slash and query": ("/v1/?a=1&b=%20", "/v1/chat/completions?a=1&b=%20"),
        "endpoint and query": ("/v1/chat/completions?a=1", "/v1/chat/completions?a=1"),
        "not ASCII": ("/模型/v1", "/%E6%A8%A1%E5%9E%8B/v1/chat/completions"),
        "quoted already": ("/%E6%A8%A1/v1", "/%E6%A8%A1/v1/chat/completions"),
        "a space in the path": ("/my model/v1", "/my%20model/v1/chat/completions"),
    },
)
def test_base_as_pasted_gives_the_endpoint(serve, base, path):
    server = serve(OK)
    check_result(ask(server, base=f"http://127.0.0.1:{server.port}{base}"), content="ok")
    assert [request.path for request in server.requests] == [path]


@pytest.mark.parametrize("start", ["HTTP://127.0.0.1", "  http://127.0.0.1", "http://localhost"])
def test_base_scheme_and_host_as_pasted_are_understood(serve, start):
    server = serve(OK)
    check_result(ask(server, base=f"{start}:{server.port}/v1"), content="ok")
    assert server.requests[0].headers["Host"].endswith(f":{server.port}")


class ServerOfSix(Server):
    address_family = socket.AF_INET6

    def server_bind(self):
        self.server_address = ("::1", 0)
        super().server_bind()


def test_base_with_an_ipv6_address_is_understood():
    try:
        server = ServerOfSix(OK)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(server.stop)
        check_result(ask(server, base=f"http://[::1]:{server.port}/v1"), content="ok")
        assert server.requests[0].headers["Host"] == f"[::1]:{server.port}"


BEARER = f"Bearer {KEY}"


@cases(
    "key, headers, sent",
    {
        "key": (KEY, None, {"Authorization": [BEARER]}),
        "key stripped": (f" {KEY}\r\n", None, {"Authorization": [BEARER]}),
        "key None": (None, None, {"Authorization": None}),
        "key empty": ("", None, {"Authorization": None}),
        "key blank": (" \n", {}, {"Authorization": None}),
        "its own": (KEY, {"X-Request-Id": "r 1"}, {"X-Request-Id": ["r 1"], "api-key": None}),
        "azure": (None, {"api-key": "k"}, {"Api-Key": ["k"], "Authorization": None}),
        "authorization": (KEY, {"AUTHORIZATION": "Basic x"}, {"Authorization": ["Basic x"]}),
        "user agent": (KEY, {"user-agent": "mine/2"}, {"User-Agent": ["mine/2"]}),
        "content type": (KEY, {"content-TYPE": "text/x"}, {"Content-Type": ["text/x"]}),
        "encoding": (KEY, {"Accept-encoding": "gzip"}, {"Accept-Encoding": ["gzip"]}),
        "encoding by default": (KEY, None, {"Accept-Encoding": ["identity"]}),
        "type by default": (KEY, None, {"Accept": ["text/event-stream, application/json"]}),
        "user agent by default": (KEY, None, {"User-Agent": [f"chat_stream/{cs.__version__}"]}),
    },
)
def test_headers_are_sent_once_and_replaced_without_case(serve, key, headers, sent):
    server, before = serve(OK), dict(headers or {})
    check_result(ask(server, key=key, headers=headers), content="ok")
    got = server.requests[0].headers
    assert {name: got.get_all(name) for name in sent} == sent
    assert (headers or {}) == before


# ---- What the body is: rules 1 and 10 -----------------------------------------------------------

YOU = sse(chunk("你"))
EVENTS = sse(chunk("你"), chunk("好", "stop")) + DONE
JSON = "application/json"


def completion(*messages, finish="stop"):
    """A chat.completion, as sent to who asks for no stream."""
    choices = [
        {"index": i, "message": {"role": "assistant", **message}, "finish_reason": finish}
        for i, message in enumerate(messages)
    ]
    return {"id": "chatcmpl-2", "object": "chat.completion", "model": "m", "choices": choices}


WHOLE = json.dumps(completion({"content": "你好"}), ensure_ascii=False, indent=1).encode()


@cases(
    "content_type, body, was_streamed",
    {
        "events": ("text/event-stream", EVENTS, True),
        "events, type in capitals": ("TEXT/EVENT-STREAM; charset=UTF-8", EVENTS, True),
        "events as JSON": (JSON, EVENTS, True),
        "events as plain text": ("text/plain", EVENTS, True),
        "events as HTML": ("text/html; charset=utf-8", EVENTS, True),
        "events as bytes": ("application/octet-stream", EVENTS, True),
        "events without type": (None, EVENTS, True),
        "events with an empty type": ("", EVENTS, True),
        "a comment first": (None, b": hello\n\n" + EVENTS, True),
        "a bare colon first": (None, b":\n\n" + EVENTS, True),
        "an event name first": (JSON, b"event: chunk\n" + EVENTS, True),
        "an id first": (None, b"id: 1\n" + EVENTS, True),
        "an unknown field first": ("text/plain", b"event_id: 1\n" + EVENTS, True),
        "a retry first": (None, b"retry: 3000\r\n\r\n" + EVENTS, True),
        "no space behind the colon": (None, EVENTS.replace(b"data: ", b"data:"), True),
        "empty lines first": (None, b"\n\r\n\n" + EVENTS, True),
        "a BOM first": (None, BOM + EVENTS, True),
        "a BOM and a comment first": ("text/plain", BOM + b": hello\n\n" + EVENTS, True),
        "a BOM first, typed": ("text/event-stream", BOM + EVENTS, True),
        "JSON": (JSON, WHOLE, False),
        "JSON as events": ("text/event-stream", WHOLE, False),
        "JSON as HTML": ("text/html", WHOLE, False),
        "JSON without type": (None, WHOLE, False),
        "JSON behind white space": (JSON, b"\n \r\n\t " * 99 + WHOLE, False),
        "JSON behind white space, as events": ("text/event-stream", b"\n\n  " + WHOLE, False),
        "JSON behind a BOM": (JSON, BOM + WHOLE, False),
        "JSON behind a BOM and white space": (JSON, BOM + b"\r\n" + WHOLE, False),
        "text behind JSON": (JSON, WHOLE + b"\n\n<!-- served by x -->", False),
        "an end behind JSON": ("text/event-stream", WHOLE + b"\n\n" + DONE, False),
        "a second JSON behind JSON": (JSON, WHOLE + WHOLE, False),
    },
)
def test_body_is_told_by_its_first_bytes(serve, content_type, body, was_streamed):
    server = serve(*at_once_and_by_bytes(body, content_type=content_type))
    for _ in range(2):
        check_result(ask(server), content="你好", finish="stop", streamed=was_streamed)


@cases(
    "value, want",
    {
        "reasoning and content": (
            completion({"content": "4", "reasoning_content": "2+2"}),
            {"content": "4", "reasoning": "2+2", "finish": "stop"},
        ),
        "refusal": (
            completion({"content": None, "refusal": "no"}),
            {"content": "", "refusal": "no", "message": {"refusal": "no"}},
        ),
        "nothing said": (completion({"content": ""}), {"content": "", "finish": "stop"}),
        "two choices": (
            completion({"content": "A"}, {"content": "B"}),
            {"content": "A", "choices": {0: {"content": "A"}, 1: {"content": "B"}}},
        ),
        "tool calls, which have no index here": (
            completion(
                {
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "function": {"name": "now", "arguments": ""}},
                        {"id": "c2", "function": {"name": "add", "arguments": '{"x": 1}'}},
                    ],
                },
                finish="tool_calls",
            ),
            {
                "finish": "tool_calls",
                "tool_calls": {
                    0: {"id": "c1", "name": "now", "arguments": {}, "arguments_text": ""},
                    1: {"id": "c2", "name": "add", "arguments": {"x": 1}},
                },
                "message": {"content": None},
            },
        ),
        "usage, id and model": (
            {**completion({"content": "x"}), "usage": {"total_tokens": 3}},
            {"usage": {"total_tokens": 3}, "id": "chatcmpl-2", "model": "m"},
        ),
    },
)
def test_json_completion_is_an_answer(serve, value, want):
    outcome = ask(serve([head(200, JSON), json.dumps(value).encode()]))
    check_result(outcome, streamed=False, **want)


@side_by_side(
    "script",
    {
        "of a length": [head(200, JSON, content_length=len(WHOLE)), WHOLE, HOLD],
        "without end": [head(200, JSON), WHOLE, HOLD],
        "in chunks without end": [
            head(200, JSON, transfer_encoding="chunked"),
            *chunked([WHOLE])[:-1],
            HOLD,
        ],
    },
)
def test_json_held_open_after_its_end_is_an_answer(serve, script):
    check_result(ask(serve(script), idle_timeout=0.3), content="你好", streamed=False)


HTML = b"<!doctype html><html><head><title>Console</title></head><body>Log in</body></html>"
SAID = b'{"error": {"message": "out of credit", "code": 1113}}'
DEEP_JSON = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@cases(
    "content_type, body, error_class, words",
    {
        "error": (JSON, SAID, Reported, ["out of credit", "1113"]),
        "error as events": ("text/event-stream", SAID, Reported, ["out of credit", "1113"]),
        "error as HTML": ("text/html", b"\n" + SAID, Reported, ["out of credit"]),
        "error as text": (JSON, b'{"error": "come back later"}', Reported, ["come back"]),
        "message": (JSON, b'{"code": 50, "message": "no such plan"}', Reported, ["no such"]),
        "detail": (JSON, b'{"detail": "Not authenticated"}', Reported, ["Not authentic"]),
        "error in an array": (JSON, b"[" + SAID + b"]", Reported, ["out of credit"]),
        "neither": (JSON, b'{"object": "list", "data": []}', Protocol, ["json", "list"]),
        "no choice": (JSON, b'{"id": "x1", "choices": []}', Protocol, ["json", "x1"]),
        "empty object": (JSON, b"{}", Protocol, ["json"]),
        "empty array": (JSON, b"[]", Protocol, ["json"]),
        "array": (JSON, b"[1, 2, 3]", Protocol, ["json", "1, 2, 3"]),
        "text": (JSON, b'"busy"', Protocol, ["json", "busy"]),
        "null": (JSON, b"null", Protocol, ["json", "null"]),
        "bad JSON": (JSON, b'{"choices": oops}', Protocol, ["json", "oops"]),
        "bad UTF-8": (JSON, WHOLE.replace("好".encode(), b"\xff"), Protocol, ["UTF-8"]),
        "too deep": (JSON, DEEP_JSON, Protocol, ["json"]),
        "a page": ("text/html; charset=x", HTML, Protocol, ["text/html; charset=x"]),
        "a page as JSON": (JSON, HTML, Protocol, [JSON, "Console"]),
        "a page without type": (None, HTML, Protocol, ["type", "Console"]),
        "plain text": ("text/plain", b"It works!", Protocol, ["text/plain", "It works!"]),
        "an image": ("image/png", b"\x89PNG\r\n\x1a\n\0\0", Protocol, ["image/png"]),
        "nothing": ("text/event-stream", b"", Interrupted, ["empty"]),
        "nothing as JSON": (JSON, b"", Interrupted, ["empty"]),
        "nothing without type": (None, b"", Interrupted, ["empty"]),
        "white space": ("text/event-stream", b"\n \n", Interrupted, []),
    },
)
def test_body_that_is_no_answer_is_an_error(serve, content_type, body, error_class, words):
    outcome = ask(serve([head(200, content_type, content_length=len(body)), body]))
    check_failed(outcome, error_class, *words, content="", choices={})


LINES = b"".join(json.dumps(chunk(*said)).encode() + b"\n" for said in [("a",), ("b", "stop")])


@cases(
    "content_type, body",
    {
        "a whole answer": (JSON, json.dumps(chunk("a", "stop")).encode()),
        "lines": ("application/x-ndjson", LINES),
        "lines as events": ("text/event-stream", LINES),
    },
)
def test_chunk_that_is_no_event_is_no_answer(serve, content_type, body):
    check_failed(ask(serve([head(200, content_type), body])), Protocol, "neither", content="a")


def test_web_page_in_place_of_an_answer_hints_at_a_missing_v1(serve):
    server = serve([head(200, "text/html"), HTML])
    outcome = ask(server, base=f"http://127.0.0.1:{server.port}")  # without /v1
    check_failed(outcome, Protocol, "text/html", "/v1")


IN_CHARACTER = WHOLE.index("好".encode()) + 1


@cases(
    "script",
    {
        "short of its length": [head(200, JSON, content_length=999), WHOLE[:-20]],
        "cleanly": [head(200, JSON), WHOLE[:-20]],
        "in a character": [head(200, JSON), WHOLE[:IN_CHARACTER]],
        "after a brace": [head(200, JSON), WHOLE[: WHOLE.rindex(b"}")]],
        "after one byte": [head(200, JSON), b"{"],
        "as events": [head(), WHOLE[:-20]],
        "in a chunk": [head(200, JSON, transfer_encoding="chunked"), b"fff\r\n" + WHOLE[:-20]],
        "between chunks": [
            head(200, JSON, transfer_encoding="chunked"),
            *chunked([WHOLE[:-20]])[:-1],
        ],
    },
)
def test_json_cut_is_an_interruption(serve, script):
    outcome = ask(serve(script))
    check_failed(outcome, Interrupted, content="")
    assert outcome.error.tail and WHOLE.startswith(outcome.error.tail)


ZIPPED = gzip.compress(EVENTS)
HALVES = [gzip.compress(EVENTS[:50]), gzip.compress(EVENTS[50:])]


@cases(
    "headers, body",
    {
        "labelled": ({"content_encoding": "gzip"}, ZIPPED),
        "labelled x-gzip": ({"content_encoding": "x-gzip"}, ZIPPED),
        "labelled in capitals": ({"content_encoding": "GZIP"}, ZIPPED),
        "not labelled": ({}, ZIPPED),
        "labelled identity": ({"content_encoding": "identity"}, ZIPPED),
        "labelled but plain": ({"content_encoding": "gzip"}, EVENTS),
        "two members": ({"content_encoding": "gzip"}, b"".join(HALVES)),
        "two members, padded": ({"content_encoding": "gzip"}, bytes(512).join(HALVES)),
        "JSON": ({"content_type": JSON}, gzip.compress(WHOLE)),
    },
)
def test_gzip_is_decoded(serve, headers, body):
    server = serve(*at_once_and_by_bytes(body, **headers))
    for _ in range(2):
        check_result(ask(server), content="你好", finish="stop")


def flushed(*pieces):
    """A gzip body in which each piece is complete, as a server's flush makes it."""
    deflate = zlib.compressobj(wbits=31)
    return [deflate.compress(piece) + deflate.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]


def test_gzip_is_decoded_as_it_arrives(serve):
    seen = threading.Event()
    first, second = flushed(YOU, EVENTS)
    script = [head(content_encoding="gzip"), first, seen, second]
    check_result(ask(serve(script), on_delta=lambda _: seen.set()), content="你你好")


def test_gzip_damaged_in_the_middle_is_an_error(serve):
    seen = threading.Event()  # zlib gives nothing of a piece in which it finds the damage
    script = [head(content_encoding="gzip"), *flushed(YOU), seen, b"\xff" * 30]
    outcome = ask(serve(script), on_delta=lambda _: seen.set())
    check_failed(outcome, Protocol, "gzip", content="你")


@cases(
    "headers, body, error_class, words, content",
    {
        "cut": ({}, flushed(YOU)[0], Interrupted, ["gzip"], "你"),
        "cut in its header": ({}, ZIPPED[:5], Interrupted, [], ""),
        "cut behind its header": ({}, ZIPPED[:10], Interrupted, [], ""),
        "cut in its trailer": ({}, gzip.compress(YOU)[:-4], Interrupted, [], "你"),
        "short of its length": ({"content_length": 999}, flushed(YOU)[0], Interrupted, [], "你"),
        "damaged": ({}, ZIPPED[:10] + b"\xff" * 30, Protocol, ["gzip"], ""),
        "whole without an end": ({}, gzip.compress(YOU), Interrupted, ["[DONE]"], "你"),
        "br": ({"content_encoding": "br"}, b"\x0b\x02\x80\x03", Protocol, ["br"], ""),
        "zstd": ({"content_encoding": "zstd"}, b"(\xb5/\xfd", Protocol, ["zstd"], ""),
        "two encodings": (
            {"content_encoding": "deflate, gzip"},
            ZIPPED,
            Protocol,
            ["deflate, gzip"],
            "",
        ),
    },
)
def test_encoded_body_that_cannot_be_decoded_is_an_error(
    serve, headers, body, error_class, words, content
):
    headers = {"content_encoding": "gzip", **headers}
    check_failed(ask(serve([head(**headers), body])), error_class, *words, content=content)


# ---- The end: rules 3 and 4 ---------------------------------------------------------------------

FULL = sse(chunk("你"), chunk("好", "stop"))
LAST = json.dumps(chunk("好", "stop")).encode()
PART = b'data: {"choices": [{"index": 0, "delta": {"content": "lo'
USAGE = sse({"choices": [], "usage": {"total_tokens": 7}})
SILENT = {"idle_timeout": 0.3}
LAX = {"require_done": False}
LAX_SILENT = {**LAX, **SILENT}


@side_by_side(
    "items, options",
    {
        "[DONE]": ([FULL, DONE], {}),
        "no space": ([FULL, b"data:[DONE]\n\n"], {}),
        "spaces around": ([FULL, b"data:   [DONE] \t\n\n"], {}),
        "CRLF": ([FULL, b"data: [DONE]\r\n\r\n"], {}),
        "CR, and silence": ([FULL, b"data: [DONE]\r\r", HOLD], {}),
        "bare DONE": ([FULL, b"data: DONE\n\n"], {}),
        "under an event name": ([FULL, b"event: done\ndata: [DONE]\n\n"], {}),
        "with an id": ([FULL, b"data: [DONE]\nid: 9\n\n"], {}),
        "last line of an event": ([YOU, b"data: " + LAST + b"\ndata: [DONE]\n\n"], {}),
        "last line behind a comment": ([FULL, b"data: : bye\ndata: [DONE]\n\n"], {}),
        "behind a value on its line": ([YOU, b"data: " + LAST + b" [DONE]\n\n"], {}),
        "no blank line, EOF": ([FULL, b"data: [DONE]\n"], {}),
        "no blank line, silence": ([FULL, b"data: [DONE]\n", HOLD], SILENT),
        "no line end, EOF": ([FULL, b"data: [DONE]"], {}),
        "no line end, silence": ([FULL, b"data: [DONE]", HOLD], SILENT),
        "bare DONE, no line end": ([FULL, b"data: DONE"], {}),
        "an event that never ended, EOF": ([YOU, b"data: " + LAST + b"\ndata: [DONE]"], {}),
        "an event that never ended, silence": (
            [YOU, b"data: " + LAST + b"\ndata: [DONE]\n", HOLD],
            SILENT,
        ),
        "the connection held": ([FULL, DONE, HOLD], {}),
        "more events behind": ([FULL, DONE + sse(chunk("!", index=1), chunk("!")) + DONE], {}),
        "an error behind": ([FULL, DONE + SAID + b"\n\n" + sse({"error": "late"})], {}),
        "bad JSON behind": ([FULL, DONE + b"data: {oops\n\n"], {}),
        "bad JSON behind in its event": ([FULL, b"data: [DONE]\ndata: {oops\n\n"], {}),
        "a page behind": ([FULL, DONE + HTML], {}),
        "bad UTF-8 behind": ([FULL, DONE, b"data: \xff\xfe\n\n"], {}),
        "lax, EOF": ([FULL], LAX),
        "lax, silence": ([FULL, HOLD], LAX_SILENT),
        "lax, usage behind": ([FULL, 0.1, USAGE], LAX),
        "lax, [DONE] and held": ([FULL, DONE, HOLD], LAX),
    },
)
def test_end_is_understood(serve, items, options):
    start = time.monotonic()
    outcome = streamed(serve, *items, **options)
    check_result(outcome, content="你好", finish="stop")
    assert list(outcome.result["choices"]) == [0]
    if USAGE in items:
        assert outcome.result["usage"] == {"total_tokens": 7}
    assert time.monotonic() - start < HANG / 2  # nothing waited for the timeouts of ask()


@cases(
    "script",
    {
        "in chunks": [IN_CHUNKS, *chunked([EVENTS])[:-1], HOLD],
        "of a length": [head(content_length=len(EVENTS) + 99), EVENTS, HOLD],
        "cut then": [head(content_length=len(EVENTS) + 99), EVENTS],
        "in a cut chunk": [IN_CHUNKS, b"fff\r\n" + EVENTS],
    },
)
def test_end_before_that_of_the_body_counts(serve, script):
    start = time.monotonic()
    check_result(ask(serve(script)), content="你好", finish="stop")
    assert time.monotonic() - start < HANG / 2


def test_text_that_says_done_is_text(serve):
    items = [sse(chunk("[DONE]"), chunk("\ndata: [DONE]\n\n"), chunk("!", "stop")), DONE]
    check_result(streamed(serve, *items), content="[DONE]\ndata: [DONE]\n\n!")


def test_end_without_finish_reason_is_an_end(serve):
    check_result(streamed(serve, YOU, DONE), content="你", finish=None)


TWO = sse(chunk("A", "stop"), chunk("B", index=1))
REMEDY = "require_done=False"


@side_by_side(
    "items, options, error_class, words, content",
    {
        "EOF": ([YOU], {}, Interrupted, ["ended before [DONE]"], "你"),
        "EOF after finish": ([FULL], {}, Interrupted, ["[DONE]", REMEDY], "你好"),
        "EOF after usage": ([FULL, USAGE], {}, Interrupted, ["[DONE]", REMEDY], "你好"),
        "EOF, one of two": ([TWO], {}, Interrupted, ["[DONE]"], "A"),
        "silence": ([YOU, HOLD], SILENT, Timeout, ["idle_timeout"], "你"),
        "silence after finish": ([FULL, HOLD], SILENT, Timeout, [REMEDY], "你好"),
        "silence in an event": ([YOU, PART, HOLD], SILENT, Timeout, ["idle_timeout", "lo'"], "你"),
        "lax, EOF before finish": ([YOU], LAX, Interrupted, ["finish_reason"], "你"),
        "lax, EOF, one of two": ([TWO], LAX, Interrupted, [], "A"),
        "lax, silence before finish": ([YOU, HOLD], LAX_SILENT, Timeout, ["idle_timeout"], "你"),
        "lax, silence, one of two": ([TWO, HOLD], LAX_SILENT, Timeout, ["idle_timeout"], "A"),
        "lax, nothing": ([], LAX, Interrupted, ["empty"], ""),
        "lax, nothing, and silence": ([HOLD], LAX_SILENT, Timeout, [], ""),
        "nothing": ([], {}, Interrupted, ["empty"], ""),
        "comments": ([b": ping\n\n" * 3], {}, Interrupted, ["empty"], ""),
        "no data": ([b"id: 1\n\nevent: x\n\n"], {}, Interrupted, ["empty"], ""),
        "[DONE] alone": ([DONE], {}, Interrupted, ["empty", "before any choice"], ""),
        "[DONE] alone, held": ([DONE[:-2], HOLD], SILENT, Interrupted, ["before any choice"], ""),
        "[DONE] alone, lax": ([DONE], LAX, Interrupted, ["empty"], ""),
        "comments, [DONE]": ([b": ping\n\n" + DONE], {}, Interrupted, ["empty"], ""),
        "odd payloads": (
            [sse({"event": "not-the-last"}, {"event": "odd-payload"}), DONE],
            {},
            Interrupted,
            ["odd-payload"],
            "",
        ),
        "odd payloads, no [DONE]": (
            [sse({"type": "response.created"})],
            {},
            Interrupted,
            ["response.created"],
            "",
        ),
        "an odd text": ([sse('"pong-7"'), DONE], {}, Interrupted, ["pong-7"], ""),
        "an odd line": ([b"Internal trouble\n"], {}, Interrupted, ["Internal trouble"], ""),
        "usage alone": ([USAGE, DONE], {}, Interrupted, ["total_tokens"], ""),
        "a status of the vendor's own": (
            [sse({"choices": None, "base_resp": {"status_code": 1008, "status_msg": "pay first"}})],
            {},
            Interrupted,
            ["1008", "pay first"],
            "",
        ),
    },
)
def test_end_without_done_is_an_error(serve, items, options, error_class, words, content):
    unsaid = ["not-the-last"] + [REMEDY] * (REMEDY not in words)
    outcome = streamed(serve, *items, **options)
    check_failed(outcome, error_class, *words, unsaid=unsaid, content=content)


@cases(
    "script",
    {
        "in a chunk": [IN_CHUNKS, b"fff\r\n" + FULL],
        "between chunks": [IN_CHUNKS, *chunked([FULL])[:-1]],
        "a bad chunk size": [IN_CHUNKS, *chunked([FULL])[:-1], b"zz\r\n"],
        "short of its length": [head(content_length=9999), FULL],
        "by a reset": [head(), FULL, "seen", RESET],
    },
)
@pytest.mark.parametrize("require_done", [True, False], ids=["strict", "lax"])
def test_broken_connection_is_an_interruption(serve, script, require_done):
    seen = threading.Event()  # a reset may overtake what has not been read
    script = [seen if item == "seen" else item for item in script]

    def on_delta(delta):
        if delta.text == "好":
            seen.set()

    outcome = ask(serve(script), on_delta=on_delta, require_done=require_done)
    check_failed(outcome, Interrupted, content="你好", finish="stop")
    assert isinstance(outcome.error, ConnectionError)


@cases(
    "tail, words",
    {
        "half a [DONE]": (b"data: [DO", ["[DO"]),
        "half a chunk": (PART, ["content"]),
        "a whole chunk": (b"data: " + LAST, ["finish_reason"]),
        "a whole chunk and its line end": (b"data: " + LAST + b"\n", ["finish_reason"]),
        "half an error": (b'data: {"error": {"message": "gone', ["gone"]),
        "half a character": (b"data: \xe4\xbd", []),
        "bad UTF-8": (b"data: \xff\xfe", []),
        "a page": (b"<h1>504 Gateway", ["504 Gateway"]),
    },
)
def test_tail_is_quoted_and_adds_nothing(serve, tail, words):
    outcome = streamed(serve, YOU, tail)
    check_failed(outcome, Interrupted, *words, content="你", finish=None)
    assert outcome.error.tail == tail


def test_tail_is_bounded(serve):
    outcome = streamed(serve, YOU, PART, b"o" * 200_000)
    check_failed(outcome, Interrupted, "content", content="你")
    assert outcome.error.tail == (PART + b"o" * 200_000)[: cs.MAX_BODY_BYTES]


@cases(
    "tail",
    {
        "an event not ended": b'data: {"error": {"message": "out of memory"}}',
        "an event whose line ended": b'data: {"error": {"message": "out of memory"}}\n',
        "a named event": b'event: error\ndata: {"message": "out of memory"}',
        "a bare line": b'{"error": {"message": "out of memory"}}',
        "a text": b'data: {"error": "out of memory"}',
        "in a list": b'data: [{"error": {"message": "out of memory"}}]',
        "before a line that is cut": b'data: {"error": "out of memory"}\ndata: {"cho',
    },
)
@cases("finish, options", {"strict": (None, {}), "finished and lax": ("stop", LAX)})
def test_tail_that_is_an_error_explains_the_end(serve, tail, finish, options):
    outcome = streamed(serve, sse(chunk("你", finish)), tail, **options)
    check_failed(outcome, Reported, "out of memory", content="你", finish=finish)


# ---- Choices and deltas: rules 5 and 7 ----------------------------------------------------------


def choices(*entries, **members):
    """A chunk with these choices."""
    return {"choices": list(entries), **members}


def delta(**members):
    """A chunk whose one choice has this delta."""
    return choices({"index": 0, "delta": members})


NULL_CHOICE = {"index": None, "delta": None, "message": None, "finish_reason": None, "usage": None}
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details")
NULL_DELTA = dict.fromkeys(("role", "content", "refusal", "tool_calls", "function_call", *THOUGHTS))
THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "2+2"}]}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "2+2"}]}
FOUR = {"type": "text", "text": "4"}


@cases(
    "chunks, want",
    {
        "nulls in a chunk": (
            [
                {"id": None, "model": None, "choices": None, "usage": None, "error": None},
                "null",
                choices(NULL_CHOICE, None),
                choices({"index": 0, "delta": NULL_DELTA, "finish_reason": None}),
                chunk("x", "stop"),
                choices(NULL_CHOICE),
            ],
            {"content": "x", "finish": "stop", "id": "chatcmpl-1", "usage": None},
        ),
        "empty texts": (
            [chunk("", "", role=""), chunk("x"), chunk("", "stop"), chunk("")],
            {"content": "x", "finish": "stop"},
        ),
        "no choices before and after": (
            [choices(prompt_filter_results=[]), chunk("x", "stop"), choices(usage={})],
            {"content": "x"},
        ),
        "role in every delta": (
            [chunk("x", role="assistant"), chunk("y", role="assistant")],
            {"content": "xy", "message": {"role": "assistant"}},
        ),
        "another role": ([chunk("x", role="system")], {"message": {"role": "assistant"}}),
        "repeated text": ([chunk("na"), chunk("na"), chunk("na")], {"content": "nanana"}),
        "white space": ([chunk(" \n"), chunk("\t")], {"content": " \n\t"}),
        "separators, no line ends": ([chunk("a\u2028b\x85c")], {"content": "a\u2028b\x85c"}),
        "finish: first wins": ([chunk("x", "length"), chunk("y", "stop")], {"finish": "length"}),
        "finish: null behind": ([chunk("x", "stop"), chunk(""), chunk("y")], {"finish": "stop"}),
        "finish: empty alone": ([chunk("x", "")], {"finish": None}),
        "finish: empty first": ([chunk("x", ""), chunk("y", "stop")], {"finish": "stop"}),
        "finish: no end": ([chunk("x", "stop"), chunk("y", "stop")], {"content": "xy"}),
        "finish: of the server's own": ([chunk("x", "eos_token")], {"finish": "eos_token"}),
        "two choices interleaved": (
            [chunk("A"), chunk("B", index=1), chunk("a", "stop"), chunk("b", "length", index=1)],
            {
                "content": "Aa",
                "finish": "stop",
                "choices": {
                    0: {"content": "Aa", "finish": "stop"},
                    1: {"content": "Bb", "finish": "length"},
                },
            },
        ),
        "two choices in one chunk, the second first": (
            [
                choices(
                    {"index": 1, "delta": {"content": "B"}}, {"index": 0, "delta": {"content": "A"}}
                )
            ],
            {"content": "A", "choices": {0: {"content": "A"}, 1: {"content": "B"}}},
        ),
        "choice 1 alone": (
            [chunk("B", "stop", index=1)],
            {"content": "", "finish": None, "choices": {1: {"content": "B", "finish": "stop"}}},
        ),
        "index as text": (
            [chunk("A", index="0"), chunk("B", index="1"), chunk("b", index=1)],
            {"content": "A", "choices": {0: {"content": "A"}, 1: {"content": "Bb"}}},
        ),
        "index absent": (
            [choices({"delta": {"content": "x"}}), chunk("y", "stop")],
            {"content": "xy", "choices": {0: {"content": "xy"}}},
        ),
        "index that is no whole number": (
            [chunk("a", index=1), chunk("b", index=1.0), chunk("b", index=1.0)],
            {"choices": {0: {"content": "bb"}, 1: {"content": "a"}}},
        ),
        "choices as one object": ([{"choices": {"delta": {"content": "x"}}}], {"content": "x"}),
        "reasoning_content": (
            [chunk(reasoning_content="2+"), chunk(reasoning_content="2"), chunk("4")],
            {"reasoning": "2+2", "content": "4", "message": {"content": "4"}},
        ),
        "reasoning": ([chunk(reasoning="2+2"), chunk("4")], {"reasoning": "2+2", "content": "4"}),
        "reasoning in two fields": (
            [chunk(reasoning="2", reasoning_content="2")],
            {"reasoning": "2"},
        ),
        "reasoning in the second": (
            [chunk(reasoning="2", reasoning_content="")],
            {"reasoning": "2"},
        ),
        "reasoning: which field wins": (
            [
                chunk(reasoning_details=[{"text": "c"}], reasoning="b", reasoning_content="a"),
                chunk(reasoning_details=[{"text": "e"}], reasoning="d", reasoning_content=None),
            ],
            {"reasoning": "ad"},
        ),
        "reasoning_details": (
            [
                chunk(reasoning_details=[{"type": "reasoning.text", "text": "2", "index": 0}]),
                chunk(reasoning="", reasoning_details=[{"text": "+"}, {"text": "2"}]),
                chunk(reasoning_details=[{"type": "reasoning.encrypted", "data": "gA=="}]),
            ],
            {"reasoning": "2+2", "content": ""},
        ),
        "thinking parts": (
            [chunk([THINKING]), chunk([FOUR])],
            {"reasoning": "2+2", "content": "4", "message": {"content": "4"}},
        ),
        "a summary beside a text": ([chunk([SUMMARY, FOUR])], {"reasoning": "2+2", "content": "4"}),
        "a reasoning part": (
            [chunk([{"type": "reasoning", "reasoning": "2+2"}, FOUR])],
            {"reasoning": "2+2", "content": "4"},
        ),
        "text parts": ([chunk([FOUR, {"type": "text", "text": "2"}])], {"content": "42"}),
        "parts, then text": ([chunk([FOUR]), chunk("2")], {"content": "42"}),
        "no parts": ([chunk([]), chunk("4")], {"content": "4"}),
        "refusal": (
            [chunk(None, refusal="I "), chunk(refusal="won't", finish="stop")],
            {"content": "", "refusal": "I won't", "message": {"refusal": "I won't"}},
        ),
        "refusal as a part": (
            [chunk([{"type": "refusal", "refusal": "no"}, FOUR])],
            {"content": "4", "refusal": "no"},
        ),
        "all in one delta": (
            [
                chunk(
                    "c",
                    "tool_calls",
                    reasoning_content="r",
                    refusal="f",
                    tool_calls=[{"index": 0, "id": "t", "function": {"name": "n"}}],
                )
            ],
            {
                "content": "c",
                "reasoning": "r",
                "refusal": "f",
                "finish": "tool_calls",
                "tool_calls": {0: {"id": "t", "name": "n", "arguments": {}, "arguments_text": ""}},
            },
        ),
        "message, whole": (
            [choices({"index": 0, "message": {"content": "x"}, "finish_reason": "stop"})],
            {"content": "x", "finish": "stop", "streamed": True},
        ),
        "message, in pieces": (
            [choices({"message": {"content": "x"}}), choices({"message": {"content": "y"}})],
            {"content": "xy"},
        ),
        "message behind deltas": (
            [chunk("x"), chunk("y"), choices({"message": {"content": "xy"}}), chunk(None, "stop")],
            {"content": "xy", "finish": "stop"},
        ),
        "message beside its delta": (
            [choices({"index": 0, "delta": {"content": "x"}, "message": {"content": "x"}})],
            {"content": "x"},
        ),
        "message behind a delta that says nothing": (
            [chunk("", role="assistant"), choices({"index": 0, "message": {"content": "x"}})],
            {"content": "x"},
        ),
        "message beside an empty delta": (
            [choices({"index": 0, "delta": {}, "message": {"content": "x"}})],
            {"content": "x"},
        ),
        "message of one choice, deltas of another": (
            [chunk("A"), choices({"index": 1, "message": {"content": "B"}})],
            {"choices": {0: {"content": "A"}, 1: {"content": "B"}}},
        ),
        "usage in a chunk of its own": (
            [chunk("x", "stop"), choices(usage={"total_tokens": 3})],
            {"usage": {"total_tokens": 3}},
        ),
        "usage in the choice": (
            [choices({"index": 0, "delta": {"content": "x"}, "usage": {"total_tokens": 3}})],
            {"usage": {"total_tokens": 3}},
        ),
        "usage in the choice, later": (
            [
                chunk("x"),
                choices(
                    {
                        "index": 0,
                        "delta": {"content": "y"},
                        "finish_reason": None,
                        "usage": {"n": 3},
                    }
                ),
            ],
            {"content": "xy", "usage": {"n": 3}},
        ),
        "usage: the last counts": (
            [{**chunk("x"), "usage": {"n": 1}}, {**chunk("y"), "usage": {"n": 2}}],
            {"usage": {"n": 2}},
        ),
        "usage: empty behind": (
            [{**chunk("x"), "usage": {"n": 1}}, choices(usage={}), choices(usage=None)],
            {"usage": {"n": 1}},
        ),
        "usage that is a list": ([chunk("x"), choices(usage=[1])], {"content": "x", "usage": None}),
        "a message beside the choices": (
            [chunk("a"), {**chunk("b", "stop"), "message": "all is well", "error": None}],
            {"content": "ab"},
        ),
        "a detail beside the choices": (
            [chunk("a"), {**chunk("b", "stop"), "detail": "all is well"}],
            {"content": "ab"},
        ),
        "id and model: the first counts": (
            [
                choices(id="", model=""),
                {**chunk("x"), "id": "a", "model": "b"},
                {**chunk("y"), "id": "c", "model": "d"},
            ],
            {"id": "a", "model": "b"},
        ),
        "id and model: one after the other": (
            [
                choices({"index": 0, "delta": {"content": "x"}, "finish_reason": None}, model="m"),
                choices({"index": 0, "delta": {"content": "y"}, "finish_reason": None}, id="i"),
            ],
            {"content": "xy", "id": "i", "model": "m"},
        ),
        "id and model: the other way round": (
            [
                choices({"index": 0, "delta": {"content": "x"}, "finish_reason": None}, id="i"),
                choices({"index": 0, "delta": {"content": "y"}, "finish_reason": None}, model="m"),
            ],
            {"content": "xy", "id": "i", "model": "m"},
        ),
        "id and model: in a later chunk": (
            [choices({"index": 0, "delta": {"content": "x"}}), chunk("y"), chunk("z")],
            {"content": "xyz", "id": "chatcmpl-1", "model": "m"},
        ),
        "two values in one event": (
            [json.dumps(chunk("x")) + json.dumps(chunk("y")), chunk("z", "stop")],
            {"content": "xyz"},
        ),
        "a value on each line of an event": (
            [json.dumps(chunk("x")) + "\ndata: " + json.dumps(chunk("y", "stop"))],
            {"content": "xy", "finish": "stop"},
        ),
        "comments as payloads": ([": ping", chunk("x", "stop"), "", " ", ":"], {"content": "x"}),
        "NaN and infinity": (
            ['{"choices": [{"delta": {"content": "x"}, "logprobs": [-Infinity, NaN]}]}'],
            {"content": "x"},
        ),
    },
)
def test_chunks_make_this_answer(serve, chunks, want):
    check_result(streamed(serve, sse(*chunks), DONE), **want)


@cases(
    "payload",
    {
        "two chunks are not": "{oops",
        "a page": "<html>429 {oops</html>",
        "half a chunk": json.dumps(chunk("x"))[:-9] + "{oops",
        "text behind a chunk": json.dumps(chunk("x")) + " {oops",
        "a chunk behind a colon": json.dumps(chunk("x")) + ":" + json.dumps({"oops": 1}),
        "nesting too deep": '{"choices": ' + "[" * 100_000 + "]" * 100_000 + '}{"oops"',
    },
)
def test_payload_that_is_not_json_is_an_error(serve, payload):
    outcome = streamed(serve, sse(chunk("a"), payload, chunk("b", "stop")), DONE)
    check_failed(outcome, Protocol, "json", finish=None)
    assert outcome.answer["content"] in ("a", "ax")  # what came before it was taken
    assert len(payload) > 1000 or "oops" in str(outcome.error)


ODD_VALUES = {
    "a number": 7,
    "zero": 0,
    "true": True,
    "false": False,
    "a text": "odd",
    "an object": {"a": {"b": 1}},
    "a list": [1, None, "odd", [2], {"a": 1}],
    "a fraction": 1.5,
    "a negative number": -3,
    "a huge number": 10**30,
}
ODD_PLACES = {
    "chunk": json.dumps,
    "choices": lambda odd: {"choices": odd},
    "choice": lambda odd: choices(odd),
    "choice index": lambda odd: choices({"index": odd, "delta": {}}),
    "delta": lambda odd: choices({"index": 0, "delta": odd}),
    "message": lambda odd: choices({"index": 9, "message": odd}),
    "finish_reason": lambda odd: choices({"index": 9, "delta": {}, "finish_reason": odd}),
    "usage": lambda odd: choices(usage=odd),
    "id and model": lambda odd: choices(id=odd, model=odd),
    "role": lambda odd: delta(role=odd),
    "content": lambda odd: choices({"index": 9, "delta": {"content": odd}}),
    "content part": lambda odd: choices({"index": 9, "delta": {"content": [odd]}}),
    "content part's type": lambda odd: delta(content=[{"type": odd, "text": ""}]),
    "reasoning": lambda odd: delta(reasoning_content=odd, reasoning_details=odd),
    "refusal": lambda odd: choices({"index": 9, "delta": {"refusal": odd}}),
    "tool_calls": lambda odd: delta(tool_calls=odd),
    "tool call": lambda odd: delta(tool_calls=[odd]),
    "tool call's index": lambda odd: delta(tool_calls=[{"index": odd, "function": {}}]),
    "tool call's id": lambda odd: delta(tool_calls=[{"index": 0, "id": odd}]),
    "tool call's function": lambda odd: delta(tool_calls=[{"index": 0, "function": odd}]),
    "tool call's name": lambda odd: delta(tool_calls=[{"index": 0, "function": {"name": odd}}]),
    "tool call's arguments": lambda odd: delta(tool_calls=[{"function": {"arguments": odd}}]),
    "function_call": lambda odd: delta(function_call=odd),
}


@pytest.mark.parametrize("place", ODD_PLACES)
def test_values_of_wrong_types_are_harmless(serve, place):
    # All of them in one stream, each twice in a row: what one leaves behind meets the others.
    odd = [ODD_PLACES[place](value) for value in ODD_VALUES.values() for _ in range(2)]
    outcome = streamed(serve, sse(chunk("a"), *odd, chunk("b", "stop")), DONE)
    check_result(outcome, content="ab", finish="stop")


HIGH, LOW, LOST = "\ud83d", "\ude00", "\ufffd"


@cases(
    "chunks, want",
    {
        "in one delta": ([chunk("a" + HIGH + LOW)], [("content", "a😀")]),
        "in two": ([chunk("a" + HIGH), chunk(LOW + "b")], [("content", "a"), ("content", "😀b")]),
        "a delta each": ([chunk(HIGH), chunk(LOW)], [("content", "😀")]),
        "of the first pair": ([chunk("\ud800"), chunk("\udc00")], [("content", "\U00010000")]),
        "of the last pair": ([chunk("\udbff"), chunk("\udfff")], [("content", "\U0010ffff")]),
        "nothing between": ([chunk(HIGH), chunk(""), chunk(None), chunk(LOW)], [("content", "😀")]),
        "in two kinds": (
            [
                chunk("c" + HIGH),
                chunk(reasoning="r" + HIGH),
                chunk(refusal="f" + HIGH),
                chunk(LOW),
                chunk(reasoning=LOW),
                chunk(refusal=LOW),
            ],
            [
                ("content", "c"),
                ("reasoning", "r"),
                ("refusal", "f"),
                ("content", "😀"),
                ("reasoning", "😀"),
                ("refusal", "😀"),
            ],
        ),
        "a half in each kind": (
            [chunk("c" + HIGH), chunk(reasoning=LOW)],
            [("content", "c"), ("reasoning", LOST), ("content", LOST)],
        ),
        "in two choices": (
            [chunk(HIGH), chunk(HIGH, index=1), chunk(LOW, index=1), chunk(LOW)],
            [("content", "😀", 1), ("content", "😀")],
        ),
        "a half in each choice": (
            [chunk(HIGH), chunk(LOW + "b", index=1), chunk("a")],
            [("content", LOST + "b", 1), ("content", LOST + "a")],
        ),
        "a high half alone": (
            [chunk(HIGH), chunk("a"), chunk(LOW)],
            [("content", LOST + "a"), ("content", LOST)],
        ),
        "a low half alone": ([chunk("a" + LOW + "b")], [("content", "a" + LOST + "b")]),
        "the wrong way round": ([chunk(LOW), chunk(HIGH)], [("content", LOST), ("content", LOST)]),
        "two high ones": (
            [chunk(HIGH), chunk(HIGH), chunk(LOW)],
            [("content", LOST), ("content", "😀")],
        ),
        "at the end": ([chunk("a" + HIGH)], [("content", "a"), ("content", LOST)]),
        "at the end of two choices": (
            [chunk(HIGH), chunk(HIGH, index=1)],
            [("content", LOST), ("content", LOST, 1)],
        ),
    },
)
def test_surrogate_halves_are_joined(serve, chunks, want):
    outcome = streamed(serve, sse(*chunks), DONE)
    check_result(outcome)
    assert outcome.deltas == [cs.Delta(*row) for row in want]


@cases(
    "end, error_class",
    {
        "EOF": ([], Interrupted),
        "an error": ([sse({"error": "gone"})], Reported),
        "bad JSON": ([sse("{oops")], Protocol),
        "silence": ([HOLD], Timeout),
    },
)
def test_surrogate_half_before_an_error_is_replaced(serve, end, error_class):
    call = {"index": 0, "id": "t", "function": {"name": "n", "arguments": '"' + HIGH}}
    half = sse(chunk("a" + HIGH, tool_calls=[call]))
    outcome = streamed(serve, half, *end, idle_timeout=0.2)
    check_failed(outcome, error_class, content="a" + LOST)
    assert outcome.answer["tool_calls"][0]["arguments_text"] == '"' + LOST


# ---- Tool calls: rule 6 -------------------------------------------------------------------------


def call(**members):
    """A piece of a tool call: name and arguments go where they belong."""
    function = {name: members.pop(name) for name in ("name", "arguments") if name in members}
    return {**members, **({"function": function} if function else {})}


def begin(id_, name, arguments="", **members):
    return call(id=id_, name=name, arguments=arguments, **members)


def more(arguments, **members):
    return call(arguments=arguments, **members)


I0, I1 = {"index": 0}, {"index": 1}
A1, A2, A = '{"a"', ": 1}", '{"a": 1}'
B1, B2, B = '{"b"', ": 2}", '{"b": 2}'
C1, C2, C = '{"c"', ": 3}", '{"c": 3}'
ADD, SUB, MUL = ("c1", "add", A), ("c2", "sub", B), ("c3", "mul", C)

#: Pieces, each in a delta of its own if not in a list, and the calls that come of them.
CALLS = {
    "an id for the second call only": (
        [more("{}", name="add", **I0), begin("c2", "sub", "{}", **I0)],
        [("", "add", "{}"), ("c2", "sub", "{}")],
    ),
    "the name null after arguments": (
        [begin("c1", "add", "{"), more("}", name="null")],
        [("c1", "add", "{}")],
    ),
    "index 0 after a higher one": (
        [begin("c3", "sub", "{}", index=3), begin("c0", "add", "{}", **I0)],
        {3: ("c3", "sub", "{}"), 0: ("c0", "add", "{}")},
    ),
    "as specified": (
        [begin("c1", "add", type="function", **I0), more(A1, **I0), more(A2, **I0)]
        + [begin("c2", "sub", type="function", **I1), more(B, **I1)],
        [ADD, SUB],
    ),
    "two in one delta": (
        [[begin("c1", "add", A1, **I0), begin("c2", "sub", B1, **I1)]]
        + [[more(A2, **I0), more(B2, **I1)]],
        [ADD, SUB],
    ),
    "two interleaved": (
        [begin("c1", "add", A1, **I0), begin("c2", "sub", B1, **I1)]
        + [more(A2, **I0), more(B2, **I1)],
        [ADD, SUB],
    ),
    "no index": ([begin("c1", "add", A1), more(A2)], [ADD]),
    "no index, two": ([begin("c1", "add", A1), more(A2), begin("c2", "sub"), more(B)], [ADD, SUB]),
    "no index, two in one delta": ([[begin("c1", "add", A), begin("c2", "sub", B)]], [ADD, SUB]),
    "no index, by id": (
        [begin("c1", "add", A1), begin("c2", "sub", B1), more(A2, id="c1")]
        + [more(": ", id="c2"), more("2}")],
        [ADD, SUB],
    ),
    "no index, no id, two": (
        [call(name="add", arguments=A), call(name="sub", arguments=B)],
        [("", "add", A), ("", "sub", B)],
    ),
    "no index, the same id again": ([begin("c1", "add", A1), begin("c1", "add", A2)], [ADD]),
    "no index, the same tool twice": (
        [begin("c1", "add", A), begin("c2", "add", B)],
        [ADD, ("c2", "add", B)],
    ),
    "no index, a name in pieces": (
        [call(name="ad"), call(name="d", arguments=A)],
        [("", "add", A)],
    ),
    "no index, no arguments": ([begin("c1", "ls"), begin("c2", "sub", B)], [("c1", "ls", ""), SUB]),
    "index null": (
        [begin("c1", "add", A, index=None), begin("c2", "sub", B, index=None)],
        [ADD, SUB],
    ),
    "index from one": ([begin("c1", "add", A, **I1)], {1: ADD}),
    "index with gaps, the last first": (
        [begin("c3", "mul", C1, index=7), begin("c1", "add", A1, index=2)]
        + [more(C2, index=7), more(A2, index=2)],
        {2: ADD, 7: MUL},
    ),
    "index as text": (
        [[begin("c1", "add", A1, index="0"), begin("c2", "sub", B1, index="1")]]
        + [[more(B2, index="1"), more(A2, **I0)]],
        [ADD, SUB],
    ),
    "index -1": ([begin("c1", "add", A1, index=-1), more(A2, index=-1)], [ADD]),
    "index -1, two": (
        [begin("c1", "add", A, index=-1), begin("c2", "sub", B, index=-1)],
        [ADD, SUB],
    ),
    "index used: a new id and a name": (
        [begin("c1", "add", A, **I0), begin("c2", "sub", B1, **I0), more(B2, **I0)]
        + [begin("c3", "mul", C, **I0)],
        [ADD, SUB, MUL],
    ),
    "index used: the old id again": (
        [begin("c1", "add", A1, **I0), begin("c2", "sub", B1, **I0)]
        + [more(A2, id="c1", **I0), more(B2, id="c2", **I0)],
        [ADD, SUB],
    ),
    "index used: a new id without a name": (
        [begin("c1", "add", A1, **I0), more(A2, id="x9", **I0)],
        [ADD],
    ),
    "index used: a new id and an empty name": (
        [begin("c1", "add", A1, **I0), begin("x9", "", A2, **I0)],
        [ADD],
    ),
    "index used: a name without an id": (
        [begin("c1", "a", **I0), call(name="dd", arguments=A, **I0)],
        [ADD],
    ),
    "key taken": (
        [begin("c1", "add", A, **I0), begin("c2", "sub", B, **I0)]
        + [begin("c3", "mul", C1, **I1), more(C2, **I1)],
        [ADD, SUB, MUL],
    ),
    "id late": (
        [call(**I0), call(name="add", **I0), more(A1, id="c1", **I0), more(A2, **I0)],
        [ADD],
    ),
    "id and name late": ([more(A1, **I0), begin("c1", "add", A2, **I0)], [ADD]),
    "id empty later": ([begin("c1", "add", **I0), more(A, id="", **I0)], [ADD]),
    "id null later, type in capitals": (
        [begin("c1", "add", **I0), more(A, id=None, type="FUNCTION", **I0)],
        [ADD],
    ),
    "id in every piece": ([begin("c1", "add", A1, **I0), more(A2, id="c1", **I0)], [ADD]),
    "name in every piece": ([begin("c1", "add", A1, **I0), begin("c1", "add", A2, **I0)], [ADD]),
    "name in pieces": (
        [begin("c1", "a", **I0), [call(name="d", **I0), call(name="d", **I0)], more(A, **I0)],
        [ADD],
    ),
    "name in pieces with the id": ([begin("c1", "ad", **I0), begin("c1", "d", A, **I0)], [ADD]),
    'name "null"': ([begin("c1", "add", **I0), call(name="null", arguments=A, **I0)], [ADD]),
    "name null and empty": (
        [begin("c1", None, **I0), call(name="add", **I0), call(name="", arguments=A, **I0)]
        + [call(name=None, **I0)],
        [ADD],
    ),
    "no function": ([call(id="c1", **I0)], [("c1", "", "")]),
    "arguments null": ([begin("c1", "ls", None, **I0)], [("c1", "ls", "")]),
    "arguments missing": ([call(id="c1", name="add", **I0), more(A, **I0)], [ADD]),
    "arguments an object": ([begin("c1", "add", {"a": 1}, **I0)], [ADD]),
    "arguments an empty object": ([begin("c1", "ls", {}, **I0)], [("c1", "ls", "{}")]),
    "arguments a list": ([begin("c1", "ls", [1, "b"], **I0)], [("c1", "ls", '[1, "b"]')]),
    "arguments cut": ([begin("c1", "add", A1, **I0)], [("c1", "add", A1)]),
    "arguments cumulative": ([begin("c1", "ls", A1, **I0), more(A, **I0)], [("c1", "ls", A1 + A)]),
    "arguments sent again": ([begin("c1", "ls", A, **I0), more(A, **I0)], [("c1", "ls", A + A)]),
    "arguments no JSON": ([begin("c1", "sh", "ls -l", **I0)], [("c1", "sh", "ls -l")]),
    "arguments too deep": ([begin("c1", "sh", "[" * 99_999, **I0)], [("c1", "sh", "[" * 99_999)]),
    "arguments not ASCII": ([begin("c1", "say", '["茶"]', **I0)], [("c1", "say", '["茶"]')]),
    "arguments a text": ([begin("c1", "say", '"x"', **I0)], [("c1", "say", '"x"')]),
    "arguments behind a hard space": ([begin("c1", "ls", "\xa0" + A)], [("c1", "ls", "\xa0" + A)]),
    "nothing at all": ([{}, call(), call(name="", arguments=""), {"index": 3, "id": None}], []),
    "nothing, then a call": ([{"index": 1}, begin("c1", "add", A)], [ADD]),
    "nothing between": ([begin("c1", "add", A1, **I0), [], None, [None], more(A2, **I0)], [ADD]),
}


def loaded(text):
    """What arguments must be for a text: {} for an empty one, None for one that is not JSON."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None


@pytest.mark.parametrize("listed", [True, False], ids=["in a list", "one object"])
@cases("pieces, want", CALLS)
def test_tool_call_pieces_make_these_calls(serve, pieces, want, listed):
    lists = [[piece] if listed and isinstance(piece, dict) else piece for piece in pieces]
    chunks = [chunk(tool_calls=calls) for calls in lists]
    outcome = streamed(serve, sse(*chunks, chunk(None, "tool_calls")), DONE)
    check_result(outcome, finish="tool_calls", content="")
    calls = outcome.result["tool_calls"]
    got = {key: (one["id"], one["name"], one["arguments_text"]) for key, one in calls.items()}
    assert got == (dict(enumerate(want)) if isinstance(want, list) else want)
    assert list(calls) == sorted(calls)
    for one in calls.values():
        assert one["arguments"] == loaded(one["arguments_text"])


def test_tool_call_deltas_name_their_call(serve):
    chunks = [chunk(tool_calls=[piece]) for piece in CALLS["key taken"][0]]
    assert streamed(serve, sse(*chunks), DONE).deltas == [
        cs.Delta("tool_name", "add", 0, 0),
        cs.Delta("tool_arguments", A, 0, 0),
        cs.Delta("tool_name", "sub", 0, 1),
        cs.Delta("tool_arguments", B, 0, 1),
        cs.Delta("tool_name", "mul", 0, 2),
        cs.Delta("tool_arguments", '{"c"', 0, 2),
        cs.Delta("tool_arguments", ": 3}", 0, 2),
    ]


def test_tool_calls_of_two_choices_are_kept_apart(serve):
    chunks = [
        chunk(index=0, tool_calls=[begin("c1", "add", '{"a"', index=0)]),
        chunk(index=1, tool_calls=[begin("c2", "sub", '{"b"', index=0)]),
        chunk(index=0, tool_calls=[more(": 1}", index=0)]),
        chunk(index=1, tool_calls=[more(": 2}", index=0)]),
    ]
    outcome = streamed(serve, sse(*chunks), DONE)
    first = {"id": "c1", "name": "add", "arguments": {"a": 1}, "arguments_text": A}
    second = {"id": "c2", "name": "sub", "arguments": {"b": 2}, "arguments_text": B}
    want = {0: {"tool_calls": {0: first}}, 1: {"tool_calls": {0: second}}}
    check_result(outcome, tool_calls={0: first}, choices=want)


SAID_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": A}}


@cases(
    "chunks, calls, message",
    {
        "tool calls": (
            [chunk(tool_calls=[begin("c1", "add", A, index=0)])],
            {0: "c1"},
            {"role": "assistant", "content": None, "tool_calls": [SAID_CALL]},
        ),
        "tool calls beside a text": (
            [chunk("Let me see.", tool_calls=[begin("c1", "add", A, index=0)])],
            {0: "c1"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [SAID_CALL]},
        ),
        "function_call": (
            [
                chunk(function_call={"name": "add"}),
                chunk(function_call={"arguments": '{"a"'}),
                chunk(function_call={"name": "", "arguments": ": 1}"}),
            ],
            {0: ""},
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "add", "arguments": A},
            },
        ),
        "function_call beside tool_calls": (
            [
                chunk(
                    tool_calls=[begin("c1", "add", arguments, index=0)],
                    function_call={"name": "add", "arguments": arguments},
                )
                for arguments in ('{"a"', ": 1}")
            ],
            {0: "c1"},
            {"role": "assistant", "content": None, "tool_calls": [SAID_CALL]},
        ),
    },
)
def test_message_is_ready_to_send_back(serve, chunks, calls, message):
    server = serve([head(), sse(*chunks), DONE])
    outcome = ask(server)
    check_result(outcome, message=message)
    got = outcome.result["tool_calls"]
    assert {key: one["id"] for key, one in got.items()} == calls
    assert [(one["name"], one["arguments"]) for one in got.values()] == [("add", {"a": 1})]
    history = {"model": "m", "messages": [*PAYLOAD["messages"], outcome.result["message"]]}
    check_result(ask(server, history))
    assert server.requests[1].json()["messages"][-1] == message


# ---- Errors: rule 8, and what an error says -----------------------------------------------------


def reported(**members):
    """An event with these members."""
    return sse(members)


def failed(error):
    """An event whose choice has this error."""
    return sse(choices({"index": 0, "delta": {"content": ""}, "error": error}))


EVENT_ERROR = b"event: error\n"


@cases(
    "report, words",
    {
        "object": (reported(error={"message": "queue full", "code": 503}), ["queue full", "503"]),
        "object with a type": (reported(error={"message": "no", "type": "busy"}), ["no", "busy"]),
        "object without a message": (reported(error={"code": 1301}), ["1301"]),
        "object with an empty message": (reported(error={"message": "", "type": "busy"}), ["busy"]),
        "object in an object": (reported(error={"error": {"message": "busy"}}), ["busy"]),
        "text": (reported(error="worker gone"), ["worker gone"]),
        "beside empty choices": (reported(choices=[], error={"message": "busy"}), ["busy"]),
        "beside null choices": (reported(choices=None, error={"message": "lost"}), ["lost"]),
        "error_message": (reported(choices=None, error_type="x", error_message="lost"), ["lost"]),
        "message": (reported(object="error", message="busy", code=50505), ["busy", "50505"]),
        "detail": (reported(detail="worker died"), ["worker died"]),
        "detail, a list": (reported(detail=[{"loc": ["body"], "msg": "too big"}]), ["too big"]),
        "an array": (sse([{"error": {"message": "busy", "code": 429}}]), ["busy", "429"]),
        "event: error, JSON": (EVENT_ERROR + sse({"message": "odd", "code": "x7"}), ["odd", "x7"]),
        "event: error, an object": (EVENT_ERROR + reported(error={"message": "lost"}), ["lost"]),
        "event: error, text": (EVENT_ERROR + sse("upstream lost"), ["upstream lost"]),
        "event: error, lines": (EVENT_ERROR + sse("upstream\ndata: lost"), ["upstream lost"]),
        "event: error, null": (EVENT_ERROR + sse("null"), []),
        "event: error, empty": (EVENT_ERROR + b"data:\n\n", []),
        "error: text": (b"error: upstream lost\n\n", ["upstream lost"]),
        "error: JSON": (b'error: {"message": "upstream lost"}\n\n', ["upstream lost"]),
        "error: JSON with an error": (b'error:{"error": {"message": "lost"}}\n\n', ["lost"]),
        "a bare line": (b'{"error": {"message": "upstream lost"}}\n\n', ["upstream lost"]),
        "a bare line, flat": (b'{"code": 429, "message": "no quota"}\n', ["no quota", "429"]),
        "in a choice": (failed({"message": "down", "code": 502}), ["down", "502"]),
        "in a choice, text": (failed("provider down"), ["provider down"]),
        "behind a chunk in its event": (sse('{"choices": []}\ndata: {"error": "late"}'), ["late"]),
    },
)
def test_error_in_the_stream_is_raised(serve, report, words):
    start, finish = [head(), sse(chunk("par")), report], sse(chunk("", "stop"))
    # Whatever comes behind it: the end, as if all were well; silence; nonsense.
    ends = [[DONE], [finish, DONE], [HOLD], [b"data: {oops\n\n"]]
    server = serve(*[[*start, *end] for end in ends])
    for _ in ends:
        check_failed(ask(server), Reported, *words, content="par", streamed=True)


@cases(
    "report, want",
    {
        "text": (
            sse({**chunk("tial"), "error": {"message": "gone"}}),
            {"content": "partial", "finish": None},
        ),
        "text, finish and usage": (
            sse({**chunk("tial", "error"), "usage": {"n": 1}, "error": "gone"}),
            {"content": "partial", "finish": "error", "usage": {"n": 1}},
        ),
        "text beside the choice's error": (
            sse(choices({"index": 0, "delta": {"content": "tial"}, "error": "gone"})),
            {"content": "partial"},
        ),
        "usage": (sse({"error": "gone", "usage": {"n": 1}}), {"content": "par", "usage": {"n": 1}}),
        "a chunk in its event": (
            b"data: %b\ndata: " % json.dumps(chunk("tial")).encode() + sse({"error": "gone"})[6:],
            {"content": "partial"},
        ),
        "a chunk under event: error": (
            b"event: error\n" + sse({**chunk("tial"), "error": "gone"}),
            {"content": "partial"},
        ),
    },
)
def test_error_leaves_what_its_chunk_brought(serve, report, want):
    check_failed(streamed(serve, sse(chunk("par")), report, DONE), Reported, "gone", **want)


@cases(
    "error",
    {
        "object": {"message": "gone", "code": 7, "param": None},
        "text": "gone",
        "long": {"message": "gone " * 2000},
        "deep": {"message": {"message": {"message": "gone"}}},
    },
)
def test_error_is_kept_as_sent(serve, error):
    outcome = streamed(serve, sse({"error": error}))
    check_failed(outcome, Reported, "gone")
    sent = outcome.error.error
    assert error == (sent["error"] if "error" in sent and sent != error else sent)


@cases(
    "members",
    {
        "null": {"error": None},
        "empty object": {"error": {}},
        "empty text": {"error": ""},
        "empty list": {"error": []},
        "false": {"error": False},
        "object of nulls": {"error": {"message": None, "code": None}},
        "message and detail": {"message": "fine", "detail": "all well", "error_message": "none"},
        "other members": {"error_code": 0, "errors": [], "base_resp": {"status_code": 0}},
    },
)
def test_chunk_with_an_error_that_says_nothing_is_a_chunk(serve, members):
    both = {**chunk("x", "stop"), **members}
    both["choices"][0].update({k: v for k, v in members.items() if k == "error"})
    check_result(streamed(serve, sse(both), DONE), content="x", finish="stop")


@cases(
    "piece",
    {
        "null": sse({"error": None}),
        "empty": sse({"error": {}, "choices": []}),
        "nulls": sse({"message": None, "detail": "", "error_message": None}),
        "another event name": b"event: errors\n" + sse({"choices": []}),
        "error as an id": b"id: error\n" + sse({"choices": []}),
        "event: error without data": b"event: error\n\n",
        "a comment on errors": b": error: none\n\n",
        "an unknown field": b"warning: low credit\n\n",
    },
)
def test_event_that_says_no_error_is_harmless(serve, piece):
    check_result(streamed(serve, piece, sse(chunk("x", "stop")), piece, DONE), content="x")


PAGE = b"""<!DOCTYPE html><html><head><style>p {color: red}</style><script>alert("x < y")</script>
<title>502 Bad Gateway</title></head><body><p class="big">Try &amp; wait</p></body></html>"""
FIELD = b'{"detail": [{"type": "missing", "loc": ["body", "messages"], "msg": "Field required"}]}'


@cases(
    "status, content_type, body, words",
    {
        "error.message": (
            400,
            JSON,
            b'{"error": {"message": "bad temperature", "type": "invalid", "code": "t1"}}',
            ["bad temperature", "t1"],
        ),
        "error a text": (402, JSON, b'{"error": "Insufficient balance"}', ["Insufficient balance"]),
        "error beside others": (402, JSON, b'{"error": "No balance", "x": 1}', ["No balance"]),
        "message": (403, JSON, b'{"code": 5, "message": "not enough"}', ["not enough", "key"]),
        "reason and message": (403, JSON, b'{"reason": "QUOTA", "message": "no"}', ["no"]),
        "detail a text": (401, JSON, b'{"detail": "Not authenticated"}', ["Not authenticated"]),
        "detail a list": (422, JSON, FIELD, ["messages", "Field required"]),
        "an array": (
            429,
            JSON,
            b'[{"error": {"message": "Exhausted", "status": "QUOTA"}}]',
            ["Exhausted"],
        ),
        "nested": (500, JSON, b'{"error": {"error": {"message": "inner"}}}', ["inner"]),
        "other JSON": (500, JSON, b'{"oh": "dear"}', ["dear"]),
        "JSON cut": (500, JSON, b'{"error": {"message": "half a wo', ["half a wo"]),
        "JSON as HTML": (500, "text/html", b'{"error": "mislabelled"}', ["mislabelled"]),
        "JSON as events": (400, "text/event-stream", b'{"error": "mislabelled"}', ["mislabelled"]),
        "not ASCII": (400, JSON, '{"error": "额度不足"}'.encode(), ["额度不足"]),
        "plain text": (403, "text/plain", b"error code: 1010\n", ["error code: 1010"]),
        "not HTML": (400, "text/plain", b"n > 0 and < 9, or > 20", ["> 0 and < 9, or > 20"]),
        "no type": (403, None, b"error code: 1010", ["error code: 1010"]),
        "HTML": (502, "text/html", PAGE, ["502 Bad Gateway", "Try & wait"]),
        "bad UTF-8": (500, "text/plain", b"caf\xe9 closed", ["closed"]),
        "empty": (500, "text/plain", b"", []),
        "empty JSON": (500, JSON, b"{}", []),
        "null": (500, JSON, b"null", []),
        "too deep": (500, JSON, b"[" * 50_000, []),
        "no reason phrase known": (529, JSON, b'{"error": "overloaded"}', ["overloaded"]),
    },
)
def test_status_error_is_in_the_servers_words(serve, status, content_type, body, words):
    server = serve([head(status, content_type, content_length=len(body)), body])
    outcome = ask(server)
    unsaid = ["<p", "color: red", "alert", "&amp;"]
    check_failed(outcome, Status, str(status), *words, unsaid=unsaid, content="")
    error = outcome.error
    assert (error.status, error.retry_after) == (status, None)
    assert error.body == body.decode("utf-8", "replace")
    assert len(server.requests) == 1


@side_by_side(
    "items, options, words",
    {
        "stalled": ([head(500, content_length=99), b"the disk", HOLD], SILENT, ["the disk"]),
        "stalled at once": ([head(500, content_length=99), HOLD], SILENT, ["500"]),
        "short of its length": ([head(500, content_length=99), b"the disk"], {}, ["the disk"]),
        "cut in a chunk": (
            [head(500, transfer_encoding="chunked"), b"99\r\nthe disk"],
            {},
            ["500"],
        ),
        "cut behind a chunk": (
            [head(500, transfer_encoding="chunked"), *chunked([b"the disk"])[:-1]],
            {},
            ["the disk"],
        ),
        "gzip": (
            [head(500, content_encoding="gzip"), gzip.compress(b'{"error": "the disk"}')],
            {},
            ["the disk"],
        ),
        "gzip, not labelled": ([head(500), gzip.compress(b"the disk")], {}, ["the disk"]),
        "gzip, cut": ([head(500), flushed(b"the disk")[0]], {}, ["the disk"]),
        "gzip, damaged": ([head(500), ZIPPED[:10] + b"\xff" * 30], {}, ["500"]),
        "an encoding unknown": ([head(500, content_encoding="br"), b"\x0b\x02\x80"], {}, ["500"]),
        "long": ([head(500, "text/html"), b"<p>the disk</p>" + b"<br>x" * 200_000], {}, ["disk"]),
        "long, of one word": ([head(500), b"the disk " + b"x" * 1_000_000], {}, ["the disk"]),
    },
)
def test_status_error_with_an_odd_body_is_a_status_error(serve, items, options, words):
    outcome = ask(serve(items), **options)
    check_failed(outcome, Status, "500", *words)
    assert len(outcome.error.body.encode()) <= cs.MAX_BODY_BYTES


@pytest.mark.parametrize("status", [404, 405])
def test_status_of_a_wrong_path_hints_at_a_missing_v1(serve, status):
    server = serve([head(status, JSON), b'{"error": "Unexpected endpoint or method"}'])
    outcome = ask(server, base=f"http://127.0.0.1:{server.port}")  # without /v1
    words = [str(status), "Unexpected endpoint", "/chat/completions", "/v1"]
    check_failed(outcome, Status, *words)


def http_date(seconds):
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


@cases(
    "text, low, high",
    {
        "seconds": ("7", 7, 7),
        "zero": ("0", 0, 0),
        "many seconds": ("86400", 86400, 86400),
        "a date": (lambda: http_date(3600), 3500, 3600),
        "a date that is past": (lambda: http_date(-3600), 0, 0),
        **{
            f"unreadable: {text}": (text, None, None)
            for text in ("soon", "", "-5", "nan", "inf", "1e999", "Wed, 99 Foo 2030", "0x9")
        },
    },
)
def test_retry_after_is_told_in_seconds_or_is_none(serve, text, low, high):
    text = text if isinstance(text, str) else text()
    outcome = ask(serve([head(429, retry_after=text), b"slow down"]))
    check_failed(outcome, Status, "429", "slow down")
    after = outcome.error.retry_after
    assert after is None if low is None else low <= after <= high


@cases(
    "headers, request_id",
    {
        "x-request-id": ({"x_request_id": "req-77"}, "req-77"),
        "request-id": ({"request_id": "req-78"}, "req-78"),
        "both": ({"request_id": "req-78", "x_request_id": "req-77"}, "req-77"),
        "none": ({}, None),
    },
)
def test_request_id_is_that_of_the_header(serve, headers, request_id):
    server = serve([head(**headers), *OK[1:]], [head(500, **headers)], [head(**headers)])
    assert ask(server).result["request_id"] == request_id
    for error_class in (Status, Interrupted):
        outcome = ask(server)
        check_failed(outcome, error_class)
        assert outcome.error.request_id == outcome.error.partial["request_id"] == request_id


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("absolute", [True, False], ids=["another server", "another path"])
def test_redirect_is_not_followed(serve, status, absolute):
    other = serve(OK)
    target = f"{other.url}/chat/completions" if absolute else "/v2/chat/completions"
    server = serve([head(status, None, location=target, content_length=0)], OK)
    outcome = ask(server, headers={"Api-Key": "k5f3a"}, retries=2)
    check_failed(outcome, Status, str(status), target, unsaid=["k5f3a"])
    assert outcome.error.status == status
    assert [request.method for request in server.requests] == ["POST"]
    assert other.requests == []


@pytest.mark.parametrize("status", [300, 304, 307])
def test_redirect_without_a_target_is_a_status_error(serve, status):
    check_failed(ask(serve([head(status, None, content_length=0)])), Status, str(status))


@cases(
    "script",
    {
        "100 first": [b"HTTP/1.1 100 Continue\r\n\r\n", *OK],
        "201": [head(201), *OK[1:]],
        "206": [head(206), *OK[1:]],
        "HTTP/1.0": [OK[0].replace(b"HTTP/1.1", b"HTTP/1.0"), *OK[1:]],
        "headers by bytes": [*(OK[0][i : i + 1] for i in range(len(OK[0]))), *OK[1:]],
    },
)
def test_status_of_success_is_success(serve, script):
    check_result(ask(serve(script)), content="ok")


def test_status_204_is_an_empty_answer(serve):
    check_failed(ask(serve([head(204, None)])), Interrupted, "empty")


DIRTY = "bad\x1b[31m \r\nred\x00\x07\x7f\x9b2J\u2028line\u2029end \ud83d"


@cases(
    "script",
    {
        "status": [head(500, JSON), json.dumps({"error": {"message": DIRTY}}).encode()],
        "status, plain": [head(500, "text/plain"), DIRTY.encode("utf-8", "replace")],
        "stream": [head(), sse({"error": {"message": DIRTY}})],
        "stream, by name": [head(), b"event: error\ndata: bad\x1b[31m \x00\x07red\x7f\n\n"],
        "payload": [head(), sse("bad\x1b[31m \x00\x07red\x7f\x9b")],
        "tail": [head(), sse("bad\x1b[31m \x00\x07red\x7f\x9b")[:-2]],
        "page": [head(200, "text/x\x1bbad"), b"bad\x1b[31m\x00\x07red\x7f\x9b"],
        "request id": [head(500, x_request_id="bad\x1b[31mred"), b"bad\x1b[31mred"],
        "location": [head(307, location="/bad\x1b[31m"), b""],
    },
)
def test_message_is_one_clean_line(serve, script):
    outcome = ask(serve(script))
    assert type(outcome.error) in (Status, Reported, Protocol, Interrupted)
    text = str(outcome.error)
    assert "bad" in text and text.encode()
    assert [c for c in text if c < " " or "\x7f" <= c <= "\x9f" or c in "\u2028\u2029"] == []


ECHO = "Incorrect API key provided: {}. See xx{}yy"


@cases(
    "script",
    {
        "status": lambda echo: [head(401, JSON), json.dumps({"error": {"message": echo}}).encode()],
        "status, plain": lambda echo: [head(401, "text/plain"), echo.encode()],
        "status, reason": lambda echo: [head(401).replace(b"Unauthorized", echo.encode())],
        "stream": lambda echo: [head(), sse({"error": {"message": echo}})],
        "stream, a chunk": lambda echo: [head(), sse(json.dumps(chunk("x"))[:-1] + echo)],
        "odd payload": lambda echo: [head(), sse({"note": echo}), DONE],
        "tail": lambda echo: [head(), b"data: " + echo.encode()],
        "page": lambda echo: [head(200, "text/html"), echo.encode()],
        "location": lambda echo: [head(307, location=echo)],
        "request id": lambda echo: [head(401, x_request_id=echo)],
    },
)
def test_key_is_not_in_the_message(serve, script):
    for key, headers, secret in [
        (KEY, {}, KEY),
        (None, {"api-key": "a5f3a-b5f3a-c5f3a"}, "a5f3a-b5f3a-c5f3a"),
        (None, {"Authorization": "Bearer t5f3a-u5f3a"}, "t5f3a-u5f3a"),
        ("sk+te*st.(0123)|[x]", {}, "sk+te*st.(0123)|[x]"),
        (None, {"apikey": "d5f3a-e5f3a"}, "d5f3a-e5f3a"),
        (None, {"Authorization": "Bearer f5f3a-g5f3a== "}, "f5f3a-g5f3a"),
        (None, {"Cookie": "sid=h5f3a-i5f3a; theme=dark"}, "h5f3a-i5f3a"),
    ]:
        server = serve(script(ECHO.format(secret, secret)))
        outcome = ask(server, key=key, headers=headers)
        assert outcome.error is not None
        assert secret not in str(outcome.error)
        assert secret not in str(outcome.error.__cause__)


def test_key_sent_back_by_what_is_no_http_server_is_in_no_cause(serve):
    outcome = ask(serve([f"X-Echo: Bearer {KEY}\r\n".encode()]))
    assert type(outcome.error) is Connect
    assert KEY not in str(outcome.error) and KEY not in str(outcome.error.__cause__)


def test_what_is_null_is_not_in_the_words_of_an_error(serve):
    with pytest.raises(Reported) as caught:
        cs.chat_stream(PAYLOAD, serve([head(), sse({"error": {"message": "m", "code": None}})]).url)
    assert "None" not in str(caught.value)


def test_answer_is_not_in_the_words_of_an_error(serve):
    with pytest.raises(Reported) as caught:
        cs.chat_stream(PAYLOAD, serve([head(), sse({**chunk("secret"), "error": "boom"})]).url)
    assert "boom" in str(caught.value) and "secret" not in str(caught.value)


def test_key_of_a_few_letters_is_masked_as_a_word_only(serve):
    server = serve([head(404, JSON), b'{"error": "ollama: no model in ollamas registry"}'])
    with pytest.raises(Status) as caught:
        cs.chat_stream(PAYLOAD, server.url, "ollama")
    assert "ollama:" not in str(caught.value)
    assert "no model in ollamas registry" in str(caught.value)


@cases("script", {"status": [head(500), b"oh dear"], "stream": [head(), sse({"error": "oh dear"})]})
def test_query_of_the_base_is_not_in_the_message(serve, script):
    server = serve(script)
    outcome = ask(server, base=f"{server.url}?code=q5f3a")
    assert server.requests[0].path.endswith("?code=q5f3a")
    assert "oh dear" in str(outcome.error) and "q5f3a" not in str(outcome.error)


@cases(
    "error_class, bases",
    {
        "ConnectError": (cs.ConnectError, [ConnectionError]),
        "HTTPStatusError": (cs.HTTPStatusError, []),
        "ServerError": (cs.ServerError, []),
        "ProtocolError": (cs.ProtocolError, [ValueError]),
        "StreamInterrupted": (cs.StreamInterrupted, [ConnectionError]),
        "StreamTimeout": (cs.StreamTimeout, [TimeoutError]),
    },
)
def test_error_class_stands_in_the_tree(error_class, bases):
    assert issubclass(error_class, cs.ChatStreamError)
    assert issubclass(cs.ChatStreamError, Exception)
    for base in (ConnectionError, ValueError, TimeoutError):
        assert issubclass(error_class, base) == (base in bases)
    assert isinstance(error_class("made by hand"), Exception)


# ---- Timeouts -----------------------------------------------------------------------------------

PING = b": ping\n\n"
SOON = HANG / 2
LIMITS = ("first_byte_timeout", "idle_timeout", "stall_timeout")


BEGUN = [head(), sse(chunk("a"))]


def trickle(piece):
    """The piece again and again, sooner than any timeout, for longer than any."""
    return [piece, 0.05] * 200


@side_by_side(
    "phase, script, content",
    {
        "no headers": ("first byte", [HOLD], ""),
        "half of the headers": ("first byte", [b"HTTP/1.1 200 OK\r\nContent-T", HOLD], ""),
        "headers alone": ("idle", [head(), HOLD], ""),
        "silence": ("idle", [*BEGUN, HOLD], "a"),
        "silence in an event": ("idle", [*BEGUN, PART, HOLD], "a"),
        "silence in a chunk": ("idle", [IN_CHUNKS, b"fff\r\n" + sse(chunk("a")), HOLD], "a"),
        "silence in a length": ("idle", [head(content_length=999), *BEGUN[1:], HOLD], "a"),
        "silence in gzip": (
            "idle",
            [head(content_encoding="gzip"), *flushed(sse(chunk("a"))), HOLD],
            "a",
        ),
        "silence in JSON": ("idle", [head(200, JSON), WHOLE[:-20], HOLD], ""),
        "comments": ("stall", [*BEGUN, *trickle(PING)], "a"),
        "comments from the start": ("stall", [head(), *trickle(PING)], ""),
        "events without data": ("stall", [*BEGUN, *trickle(b"event: ping\n\n")], "a"),
        "fragments of an event": ("stall", [*BEGUN, PART, *trickle(b"o")], "a"),
        "comments in a length": ("stall", [head(content_length=9999), *trickle(PING)], ""),
        "lines of an event": ("stall", [*BEGUN, *trickle(b"data: \n")], "a"),
        "a stall shorter than idle": ("stall", [*BEGUN, HOLD], "a"),
    },
)
def test_silence_is_a_timeout(serve, phase, script, content):
    start, name = time.monotonic(), phase.replace(" ", "_") + "_timeout"
    server = serve(script, OK)
    outcome = ask(server, retries=2, **{name: 0.3})
    assert 0.25 <= time.monotonic() - start < SOON
    check_failed(outcome, Timeout, name, content=content)
    assert outcome.error.phase == phase
    assert isinstance(outcome.error, TimeoutError)
    assert isinstance(outcome.error.__cause__, OSError)
    assert len(server.requests) == 1  # a timeout is not retried


def test_stall_is_told_from_idle_where_both_are_near(serve):
    server = serve([*BEGUN, *trickle(PING)])
    outcome = ask(server, idle_timeout=0.4, stall_timeout=0.5)
    check_failed(outcome, Timeout, "stall_timeout", content="a")
    assert outcome.error.phase == "stall"


# Nobody accepts: over http the headers do not come, over https the handshake does not.
@side_by_side("scheme", {"http": "http", "https": "https"})
def test_timeout_before_the_connection_is_served_is_one_of_the_first_byte(mute_port, scheme):
    error = failure(f"{scheme}://127.0.0.1:{mute_port}/v1", first_byte_timeout=0.3)
    assert type(error) is Timeout and error.phase == "first byte"
    assert "first_byte_timeout" in str(error) and str(mute_port) in str(error)


@side_by_side(
    "script, options",
    {
        "slow headers, short idle": ([0.6, *OK], {"idle_timeout": 0.3, "stall_timeout": 0.3}),
        "slow body, short first byte": ([head(), 0.6, *OK[1:]], {"first_byte_timeout": 0.3}),
        "longer in all than any timeout": (
            [head(), *[sse(chunk("o")), 0.1] * 6, sse(chunk("ok", "stop")), DONE],
            dict.fromkeys(LIMITS, 0.4),
        ),
        "comments longer than idle": ([head(), *[PING, 0.1] * 6, *OK[1:]], {"idle_timeout": 0.4}),
        "silence within the stall": ([head(), PING, 0.4, *OK[1:]], {"stall_timeout": 5.0}),
        "time in the caller's code": (
            [*BEGUN, 0.1, PING, 0.5, *OK[1:]],  # what is read first after that time is no event
            {
                **dict.fromkeys(LIMITS, 0.4),
                "on_delta": lambda delta: time.sleep(0.5 * (delta.text == "a")),
            },
        ),
        "infinity": (OK, dict.fromkeys(LIMITS, float("inf"))),
        "decimals": (OK, dict.fromkeys(LIMITS, decimal.Decimal(5))),
        "a thousand years": (OK, dict.fromkeys(LIMITS, 3e10)),
        "whole numbers": (OK, dict.fromkeys(LIMITS, 5)),
    },
)
def test_healthy_answer_is_not_cut(serve, script, options):
    outcome = ask(serve(script), **options)
    check_result(outcome, finish="stop")
    assert outcome.result["content"].endswith("ok")


def test_tls_answers_with_a_context_that_trusts(serve_tls, trust):
    outcome = ask(serve_tls(OK), context=trust)
    check_result(outcome, content="ok")


def test_tls_without_trust_is_an_error_that_names_the_remedy(serve_tls):
    server = serve_tls(OK)
    outcome = ask(server)
    check_failed(outcome, Connect, "certificate", "context")
    assert isinstance(outcome.error.__cause__, Exception)
    assert server.requests == []


def test_tls_for_another_name_is_an_error(serve_tls, trust):
    server = serve_tls(OK)
    error = failure(f"https://localhost:{server.port}/v1", context=trust)
    assert type(error) is Connect and "certificate" in str(error)
    assert server.requests == []


@side_by_side(
    "phase, script",
    {
        "first byte": ("first byte", [HOLD]),
        "idle": ("idle", [*BEGUN, HOLD]),
        "stall": ("stall", [head(), *trickle(PING)]),
    },
)
def test_tls_silence_is_a_timeout(serve_tls, trust, phase, script):
    name = phase.replace(" ", "_") + "_timeout"
    outcome = ask(serve_tls(script), context=trust, **{name: 0.3})
    check_failed(outcome, Timeout, name)
    assert outcome.error.phase == phase


def test_tls_cut_is_an_interruption(serve_tls, trust):
    outcome = ask(serve_tls([head(), sse(chunk("a"))]), context=trust)
    check_failed(outcome, Interrupted, "[DONE]", content="a")


def test_tls_to_a_server_without_it_is_a_connect_error(serve):
    server = serve(OK)
    outcome = ask(server, base=server.url.replace("http://", "https://"))
    check_failed(outcome, Connect)


def test_http_to_a_server_with_tls_is_an_error(serve_tls):
    server = serve_tls(OK)
    outcome = ask(server, base=server.url.replace("https://", "http://"))
    check_failed(outcome, Connect)


# ---- The connection -----------------------------------------------------------------------------


def test_connection_refused_is_a_connect_error(dead_port):
    error = failure(f"http://127.0.0.1:{dead_port}/v1")
    assert type(error) is Connect and isinstance(error, ConnectionError)
    assert f"127.0.0.1:{dead_port}" in str(error) and error.url.startswith("http://127.0.0.1:")
    assert isinstance(error.__cause__, OSError)
    assert error.partial["choices"] == {} and error.request_id is None
    assert [error.partial["timing"][name] for name in ("first_byte", "reads")] == [None, 0]


def test_host_that_does_not_exist_is_a_connect_error(proxies):
    proxies()
    error = failure("http://chat.invalid/v1")
    assert type(error) is Connect
    assert "chat.invalid:80" in str(error)  # the port too, where none was given


@cases(
    "script",
    {
        "closed": [],
        "reset": [RESET],
        "another protocol": [b"SSH-2.0-OpenSSH_9.9\r\n"],
        "bytes": [b"\x15\x03\x01\x00\x02\x02\x46", b"\0" * 99],
        "a status in letters": [b"HTTP/1.1 abc OK\r\n\r\n"],
        "an endless status line": [b"HTTP/1.1 200 " + b"x" * 100_000],
        "an endless header": [b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000],
        "endless headers": [b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000],
    },
)
def test_connection_without_a_response_is_a_connect_error(serve, script):
    outcome = ask(serve(script))
    check_failed(outcome, Connect, content="")
    assert isinstance(outcome.error, ConnectionError)
    assert outcome.error.__cause__ is not None


def test_connection_closed_in_the_headers_is_an_error(serve):
    outcome = ask(serve([b"HTTP/1.1 200 OK\r\nContent-Type: text/event-s"]))
    assert type(outcome.error) in (Connect, Interrupted)


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
def test_proxy_is_asked_for_the_whole_url(serve, proxies, name):
    proxy = serve(OK)
    proxies(**{name: f"http://127.0.0.1:{proxy.port}"})
    outcome = ask(proxy, base="http://chat.invalid/v1?a=1")
    check_result(outcome, content="ok")
    (request,) = proxy.requests
    assert request.path == "http://chat.invalid/v1/chat/completions?a=1"
    assert request.headers["Host"] == "chat.invalid"
    assert request.headers["Authorization"] == BEARER


def test_host_that_is_not_ascii_is_asked_for_by_its_ascii_name(serve, proxies):
    proxy = serve(OK)
    proxies(http_proxy=f"http://127.0.0.1:{proxy.port}")
    check_result(ask(proxy, base="http://例子.测试:8080/v1"), content="ok")
    (request,) = proxy.requests
    assert request.path == "http://xn--fsqu00a.xn--0zwm56d:8080/v1/chat/completions"


def test_proxy_that_is_no_url_is_a_connect_error(proxies):
    proxies(http_proxy="http:/nowhere")
    assert type(failure("http://chat.invalid/v1")) is Connect


def test_proxy_is_read_at_each_call(serve, proxies):
    first, second = serve(OK), serve(OK)
    for proxy in (first, second):
        proxies(http_proxy=f"http://127.0.0.1:{proxy.port}")
        check_result(ask(proxy, base="http://chat.invalid/v1"), content="ok")
    assert len(first.requests) == len(second.requests) == 1


def test_proxy_gets_its_own_password_which_is_not_shown(serve, proxies):
    proxy = serve([head(407), b"who are you?"])
    proxies(http_proxy=f"http://me:hunter2@127.0.0.1:{proxy.port}")
    error = failure("http://chat.invalid/v1")
    assert type(error) is Status and error.status == 407
    assert proxy.requests[0].headers["Proxy-Authorization"].startswith("Basic ")
    assert "hunter2" not in str(error) and "who are you?" in str(error)


@pytest.mark.parametrize("excepted", ["chat.invalid", "*", ".invalid"])
def test_proxy_is_not_asked_for_what_no_proxy_names(serve, proxies, excepted):
    proxy = serve(OK)
    proxies(http_proxy=f"http://127.0.0.1:{proxy.port}", no_proxy=excepted)
    assert type(failure("http://chat.invalid/v1")) is Connect
    assert proxy.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LocalHost"])
def test_proxy_is_never_asked_for_loopback(serve, proxies, dead_port, host):
    dead = f"http://127.0.0.1:{dead_port}"
    proxies(http_proxy=dead, https_proxy=dead, all_proxy=dead)
    server = serve(OK)
    check_result(ask(server, base=f"http://{host}:{server.port}/v1"), content="ok")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxy_that_is_dead_is_named(proxies, dead_port, scheme):
    dead = f"http://me:hunter2@127.0.0.1:{dead_port}"
    proxies(http_proxy=dead, https_proxy=dead)
    error = failure(f"{scheme}://chat.invalid/v1")
    assert type(error) is Connect
    text = str(error)
    assert "proxy" in text and f"127.0.0.1:{dead_port}" in text and "chat.invalid" in text
    assert "hunter2" not in text


def test_proxy_of_https_is_a_tunnel(serve_tls, proxies, trust):
    proxy = serve_tls(OK, tunnel=True)
    proxies(https_proxy=f"http://127.0.0.1:{proxy.port}")
    result = cs.chat_stream(PAYLOAD, "https://chat.invalid/v1", KEY, context=trust)
    assert result["content"] == "ok"
    ((target, fields),) = proxy.tunnelled
    assert target == "chat.invalid:443" and b"Authorization" not in fields
    assert proxy.requests[0].path == "/v1/chat/completions"


def test_proxy_that_refuses_the_tunnel_is_named(serve, proxies):
    proxy = serve(OK)  # which knows no CONNECT: 501
    proxies(https_proxy=f"http://127.0.0.1:{proxy.port}")
    error = failure("https://chat.invalid/v1")
    assert type(error) is Connect
    assert "proxy" in str(error) and "501" in str(error)


# ---- Retries ------------------------------------------------------------------------------------


def busy(status=503, retry_after=0, body=b'{"error": "warming up"}'):
    return [head(status, JSON, retry_after=retry_after), body]


@cases(
    "first",
    {
        **{str(status): busy(status) for status in (408, 409, 429, 500, 502, 503, 504, 529)},
        "closed": [],
        "reset": [RESET],
    },
)
def test_retry_follows_what_may_pass(serve, monkeypatch, first):
    monkeypatch.setattr(cs, "MAX_RETRY_WAIT", 0.05)  # where there is no Retry-After
    server = serve(first, [head(x_request_id="second"), *OK[1:]])
    check_result(ask(server, retries=1), content="ok", request_id="second")
    one, two = server.requests
    assert one.body == two.body and dict(one.headers) == dict(two.headers)


ONCE = [head(), sse(chunk("once"))]


@cases(
    "first, error_class",
    {
        **{str(status): (busy(status), Status) for status in (400, 401, 403, 404, 422)},
        "a redirect": ([head(307, location="/v2", retry_after=0)], Status),
        "a timeout": ([HOLD], Timeout),
        "a stream that broke": (ONCE, Interrupted),
        "a stream that broke before its first event": ([head()], Interrupted),
        "a stream that reports an error": ([head(), sse({"error": "busy"})], Reported),
        "JSON that reports an error": ([head(200, JSON), b'{"error": "busy"}'], Reported),
        "a page": ([head(200, "text/html"), HTML], Protocol),
    },
)
def test_retry_does_not_follow_what_would_not(serve, first, error_class):
    server = serve(first, OK)
    check_failed(ask(server, retries=3, first_byte_timeout=0.3), error_class)
    assert len(server.requests) == 1


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retry_is_made_so_many_times(serve, retries):
    server = serve(busy())
    check_failed(ask(server, retries=retries), Status, "503", "warming up")
    assert len(server.requests) == retries + 1


def test_retry_is_not_made_by_default(serve):
    server = serve(busy(), OK)
    with pytest.raises(Status):
        cs.chat_stream(PAYLOAD, server.url, KEY)
    assert len(server.requests) == 1


def test_retry_of_a_refused_connection_ends_in_the_same_error(dead_port, monkeypatch):
    monkeypatch.setattr(cs, "MAX_RETRY_WAIT", 0.01)
    assert type(failure(f"http://127.0.0.1:{dead_port}/v1", retries=3)) is Connect


def check_wait(serve, first, low, high):
    server = serve(first, OK)
    check_result(ask(server, retries=1), content="ok")
    one, two = server.requests
    assert low * 0.9 <= two.at - one.at < high


@side_by_side(
    "first, low, high",
    {
        "Retry-After": (busy(429, 1), 1.0, SOON),
        "Retry-After, past": (busy(429, http_date(-3600)), 0, SOON),
        "none": ([head(503)], 0.37, 2.0),
    },
)
def test_retry_waits(serve, first, low, high):
    check_wait(serve, first, low, high)


@side_by_side("first", {"a date": busy(429, http_date(3600)), "too long": busy(429, 100_000)})
def test_retry_waits_no_longer_than_the_limit(serve, monkeypatch, first):
    monkeypatch.setattr(cs, "MAX_RETRY_WAIT", 0.3)
    check_wait(serve, first, 0.3, SOON)


def test_limits_are_those_of_the_contract():
    assert cs.MAX_EVENT_BYTES == 64 * 1024 * 1024 and cs.MAX_BODY_BYTES == 64 * 1024
    assert cs.MAX_MESSAGE_CHARS == 2000 and cs.MAX_RETRY_WAIT == 60


def test_retry_is_logged_as_a_warning(serve, caplog):
    caplog.set_level(logging.WARNING, "chat_stream")
    server = serve(busy(), busy(), OK)
    ask(server, retries=2, base=f"{server.url}?code=q5f3a")
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("chat_stream", "WARNING")
    ] * 2
    for secret in (KEY, "q5f3a", "warming up", "你好"):
        assert secret not in caplog.text


# ---- Record, log, callbacks, threads, memory ----------------------------------------------------


@cases(
    "headers, body",
    {
        "an answer": ({}, EVENTS),
        "a cut": ({}, EVENTS[:60]),
        "a cut in a character": ({}, sse(chunk("你"))[:-30]),
        "short of its length": ({"content_length": 999}, FULL),
        "an error": ({}, sse(chunk("a"), {"error": "gone"})),
        "bad UTF-8": ({}, sse(chunk("a")) + b"data: \xff\xfe\n\n"),
        "bad JSON": ({}, sse(chunk("a"), "{oops")),
        "JSON": ({"content_type": JSON}, WHOLE),
        "gzip": ({"content_encoding": "gzip"}, ZIPPED),
        "gzip, cut": ({"content_encoding": "gzip"}, ZIPPED[:-20]),
    },
)
@pytest.mark.parametrize("framing", ["close", "chunked"])
def test_record_gets_every_byte_of_the_body(serve, headers, body, framing):
    script = [head(**headers), body]
    if framing == "chunked" and "content_length" not in headers:
        script = [head(transfer_encoding="chunked", **headers), *chunked([body[:9], body[9:]])]
    record = io.BytesIO()
    ask(serve(script), record=record)
    assert record.getvalue() == body


def test_record_is_written_before_the_delta_is_given(serve):
    record, seen, first = io.BytesIO(), threading.Event(), sse(chunk("a"))
    recorded = []

    def on_delta(_):
        recorded.append(record.getvalue())
        seen.set()

    ask(serve([head(), first, seen, *OK[1:]]), record=record, on_delta=on_delta)
    assert recorded[0] == first
    assert record.getvalue() == first + b"".join(OK[1:])


class Trouble(Exception):
    """What the caller's own code raises."""


RAISED = [
    Trouble("mine"),
    ValueError("mine"),
    OSError(28, "No space left on device"),
    ConnectionResetError("mine"),
    TimeoutError("mine"),
    KeyboardInterrupt("mine"),
]
#: Errors that mean something in the module, where a record is called.
RAISED_TOO = [
    StopIteration("mine"),
    GeneratorExit("mine"),
    SystemExit(3),
    Reported("mine"),
    Timeout("mine"),
]


@pytest.mark.parametrize(
    ("error", "where"),
    [*itertools.product(RAISED, ["on_delta", "record"]), *((e, "on_delta") for e in RAISED_TOO)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_the_callers_code_raises_ends_the_call_untouched(serve, error, where):
    server, args = serve([*BEGUN, HOLD]), error.args

    def fail(_):
        raise error

    record = io.BytesIO()
    record.write = fail
    with pytest.raises(type(error)) as caught:
        cs.chat_stream(PAYLOAD, server.url, KEY, **{where: fail if where == "on_delta" else record})
    assert caught.value is error and error.args == args
    assert server.all_closed()


FIRST = BEGUN[1]


@cases(
    "headers, before, after",
    {
        "closed framing": ({}, [FIRST], OK[1:]),
        "chunked": ({"transfer_encoding": "chunked"}, chunked([FIRST])[:-1], chunked(OK[1:])),
        "CR": ({}, [FIRST.replace(b"\n", b"\r")], OK[1:]),
        "of a length": ({"content_length": len(b"".join([FIRST, *OK[1:]]))}, [FIRST], OK[1:]),
        "with the next begun": ({}, [FIRST + PART[:9]], [PART[9:] + b'"}}]}\n\n', *OK[1:]]),
    },
)
def test_delta_is_given_before_the_next_bytes_come(serve, headers, before, after):
    seen, start = threading.Event(), time.monotonic()
    script = [head(**headers), *before, seen, *after]
    outcome = ask(serve(script), on_delta=lambda _: seen.set())
    check_result(outcome)
    assert outcome.deltas[0] == cs.Delta("content", "a")
    assert time.monotonic() - start < SOON  # the server did not give up waiting


def test_log_has_debug_lines_and_no_secret(serve, caplog):
    caplog.set_level(logging.DEBUG)
    server = serve([head(), sse(chunk("xyzzy", "stop")), DONE], [head(), sse({"error": "plugh"})])
    base = f"{server.url}?code=q5f3a"
    check_result(ask(server, base=base, headers={"api-key": "k5f3a"}), content="xyzzy")
    lines = len(caplog.records)
    check_failed(ask(server, base=base), Reported, "plugh")
    assert lines >= 3  # request, response, end
    assert len(caplog.records) >= lines + 3
    for record in caplog.records:
        assert (record.name, record.levelname) == ("chat_stream", "DEBUG")
    assert f"127.0.0.1:{server.port}" in caplog.text
    for secret in (KEY, "k5f3a", "q5f3a", "xyzzy", "你好"):
        assert secret not in caplog.text


def begun(server, **options):
    return cs.chat_deltas(PAYLOAD, server.url, KEY, **options)


def test_deltas_asks_nothing_before_the_first_next(serve):
    server = serve(OK)
    begun(server).close()
    assert server.requests == [] and server.connections == []


def test_deltas_gives_the_deltas_and_returns_the_result(serve):
    deltas, results = begun(serve([head(), sse(chunk("a"), chunk("b", "stop")), DONE])), []

    def relay():
        results.append((yield from deltas))

    assert list(relay()) == [cs.Delta("content", "a"), cs.Delta("content", "b")]
    assert results[0]["content"] == "ab" and results[0]["finish"] == "stop"
    assert list(deltas) == []


def test_deltas_raises_what_chat_stream_raises(serve):
    deltas = begun(serve([head(), sse(chunk("a"))]))
    assert next(deltas) == cs.Delta("content", "a")
    with pytest.raises(Interrupted) as caught:
        next(deltas)
    assert caught.value.partial["content"] == "a"


@cases(
    "leave",
    {
        "close": lambda deltas: deltas.close(),
        "throw": lambda deltas: pytest.raises(Trouble, deltas.throw, Trouble("mine")),
    },
)
def test_deltas_left_in_mid_stream_closes_the_connection(serve, leave):
    server = serve([head(), sse(chunk("a")), HOLD])
    deltas = begun(server)
    assert next(deltas).text == "a"
    leave(deltas)
    assert server.all_closed()  # while deltas is still there


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="others collect it later")
def test_deltas_in_a_loop_that_breaks_closes_the_connection(serve):
    server = serve([head(), sse(chunk("a")), HOLD])
    for delta in begun(server):
        assert delta.text == "a"
        break
    assert server.all_closed()


CHILD = """
import signal, sys
sys.path.insert(0, sys.argv[1])
import chat_stream as cs
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
try:
    cs.chat_stream({}, sys.argv[2], None, lambda delta: print(delta.text, flush=True))
except BaseException as error:
    print(type(error).__name__, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT for one process")
@cases(
    "script, first",
    {
        "in the stream": ([head(), sse(chunk("begun")), HOLD], "begun\n"),
        "before the headers": ([HOLD], ""),
    },
)
def test_ctrl_c_closes_the_connection_and_passes(serve, script, first):
    server = serve(script)
    folder = str(pathlib.Path(cs.__file__).parent)
    command = [sys.executable, "-c", CHILD, folder, server.url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as child:
        assert server.asked()
        assert first == "" or child.stdout.readline() == first
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "KeyboardInterrupt\n"
        assert server.all_closed()  # while the process still lives
        child.stdin.close()


def test_a_hundred_threads_share_nothing(serve):
    count = 100
    everyone = threading.Event()
    scripts = []
    for number in range(count):
        opened = begin(f"c{number}", "add", f"[{number}", index=0)
        first = chunk(f"{number}:" + HIGH, tool_calls=[opened])
        second = chunk(LOW, "stop", tool_calls=[more(f", {number}]", index=0)])
        halves = sse({**first, "id": f"n{number}"}), sse({**second, "usage": {"n": number}})
        cut = len(halves[1]) // 2
        pieces = [halves[0] + halves[1][:cut], everyone, halves[1][cut:], DONE]
        scripts.append([head(), *pieces])
    server = serve(*scripts)
    results = []

    def run():
        results.append(cs.chat_stream(PAYLOAD, server.url, KEY))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    assert server.asked(count)
    everyone.set()
    for thread in threads:
        thread.join(HANG)
    got = {
        (r["id"], r["content"], r["usage"]["n"], *r["tool_calls"][0]["arguments"]) for r in results
    }
    assert got == {(f"n{i}", f"{i}:😀", i, i, i) for i in range(count)}


class Paper(io.TextIOWrapper):
    """A text file that keeps what it held at each flush."""

    def __init__(self, encoding="utf-8", errors="strict"):
        super().__init__(io.BytesIO(), encoding=encoding, errors=errors, newline="")
        self.flushed = []

    def flush(self):
        super().flush()
        written = self.buffer.getvalue()
        if written and [written] != self.flushed[-1:]:
            self.flushed.append(written)


SPOKEN = [
    chunk("né", reasoning="hm", refusal="no", tool_calls=[begin("c1", "add", "{}", index=0)]),
    chunk("other", index=1),
    chunk("✅\r\n", "stop"),
]


@pytest.mark.parametrize(
    "encoding, want",
    [
        ("utf-8", "né✅\r\n"),
        ("latin-1", "né?\r\n"),
        ("cp1252", "né?\r\n"),
        ("ascii", "n??\r\n"),
        ("utf-16-le", "né✅\r\n"),
    ],
)
def test_typewriter_replaces_what_cannot_be_written(serve, encoding, want):
    paper = Paper(encoding)
    outcome = ask(serve([head(), sse(*SPOKEN), DONE]), on_delta=cs.typewriter(paper))
    check_result(outcome, content="né✅\r\n")
    assert paper.flushed[-1].decode(encoding) == want


def test_typewriter_writes_choice_0s_content_and_flushes(serve):
    paper = Paper()
    ask(serve([head(), sse(*SPOKEN), DONE]), on_delta=cs.typewriter(paper))
    assert paper.flushed == ["né".encode(), "né✅\r\n".encode()]


def test_typewriter_writes_to_the_standard_output_of_the_moment(serve, capsys):
    write = cs.typewriter()
    ask(serve([head(), sse(*SPOKEN), DONE]), on_delta=write)
    assert capsys.readouterr().out == "né✅\r\n"


def test_typewriter_writes_to_a_file_without_encoding(serve):
    out = io.StringIO(newline="")
    ask(serve([head(), sse(*SPOKEN), DONE]), on_delta=cs.typewriter(out))
    assert out.getvalue() == "né✅\r\n"


def test_typewriter_plays_at_a_pace(serve):
    text, start, out = "Come, let us play it slowly.", time.monotonic(), Paper()
    outcome = ask(serve([head(), sse(chunk(text, "stop")), DONE]), on_delta=cs.typewriter(out, 100))
    took = time.monotonic() - start
    check_result(outcome, content=text)
    assert out.flushed[-1] == text.encode()
    assert len(out.flushed) > len(text) / 2  # in small pieces
    assert len(text) / 100 * 0.8 <= took < SOON


@pytest.mark.parametrize("cps", [0, -1, float("nan"), "80"])
def test_typewriter_refuses_a_pace_that_is_none(cps):
    cs.typewriter(cps=0.5)  # a slow one is none of them
    with pytest.raises((TypeError, ValueError)):
        cs.typewriter(cps=cps)


def test_typewriter_passes_on_what_its_file_raises(serve):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    server = serve([head(), sse(chunk("a")), HOLD])
    with pytest.raises(BrokenPipeError):
        cs.chat_stream(PAYLOAD, server.url, KEY, cs.typewriter(Closed()))
    assert server.all_closed()


def test_timing_is_of_the_try_that_was_answered(serve):
    server = serve([head(503), *[b"busy", 0.01] * 30], OK)
    assert ask(server, retries=1).result["timing"]["reads"] < 15


def test_reads_are_counted_one_by_one(serve):
    writes = []
    record = types.SimpleNamespace(write=writes.append)
    timing = ask(serve([head(), FULL, 0.05, DONE]), record=record).result["timing"]
    assert timing["reads"] == len(writes) > 0
    ask(serve([head(), FULL]), record=record)
    assert b"" not in writes


def test_timing_is_in_seconds_since_the_call(serve):
    script = [0.1, head(), PING, 0.1, sse(chunk("a")), 0.3, *OK[1:]]
    timing = ask(serve(script)).result["timing"]
    assert 0.09 < timing["first_byte"] < timing["first_delta"] < timing["total"] < SOON
    assert timing["first_delta"] > 0.18 and timing["total"] > 0.45
    assert 0.15 < timing["max_gap"] <= timing["total"] and timing["reads"] >= 3


EVENT_LIMIT = 1 << 18
BLOCK = 1 << 16
MUCH = 48 * EVENT_LIMIT
LINE = b"x" * 1000


def endless(piece):
    """Writes of about BLOCK bytes, MUCH in all: the same object again and again."""
    return [piece * (BLOCK // len(piece))] * (MUCH // BLOCK)


def bomb(start):
    """A small gzip body that grows to MUCH."""
    deflate = zlib.compressobj(wbits=31)
    return b"".join(map(deflate.compress, [start, *endless(b"x")])) + deflate.flush()


@cases(
    "script, error_class",
    {
        "a line": ([head(), b"data: ", *endless(b"x")], Protocol),
        "a comment": ([head(), b": ", *endless(b"x")], Protocol),
        "lines ended by CR": ([head(), *endless(b"data: " + LINE + b"\r")], Protocol),
        "lines": ([head(), *endless(b"data: " + LINE + b"\n")], Protocol),
        "short lines": ([head(), *endless(b"data: x\n")], Protocol),
        "JSON": ([head(200, JSON), b'{"choices": "', *endless(b"x")], Protocol),
        "white space": ([head(200, JSON), *endless(b" ")], cs.ChatStreamError),
        "gzip": ([head(), bomb(b"data: ")], Protocol),
        "gzip of JSON": ([head(200, JSON), bomb(b'{"choices": "')], Protocol),
        "an error's body": ([head(500), b"oh dear", *endless(b"x")], Status),
        "an error's JSON": ([head(500, JSON), b'{"error": "', *endless(b"x")], Status),
        "an error's gzip": ([head(500), bomb(b"oh dear")], Status),
        "comments, then an answer": ([head(), *endless(b": " + LINE + b"\n\n"), *OK[1:]], None),
        "fields, then an answer": ([head(), *endless(b"x: " + LINE + b"\n\n"), *OK[1:]], None),
        "events, then an answer": (
            [head(), *endless(sse({"choices": [], "pad": LINE.decode()})), *OK[1:]],
            None,
        ),
    },
)
def test_memory_is_bounded_whatever_comes(serve, monkeypatch, script, error_class):
    monkeypatch.setattr(cs, "MAX_EVENT_BYTES", EVENT_LIMIT)
    server = serve(script)
    tracemalloc.start()
    try:
        outcome = ask(server)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if error_class is None:
        check_result(outcome, content="ok")
    else:
        assert isinstance(outcome.error, error_class)
    if error_class is Protocol:
        assert "MAX_EVENT_BYTES" in str(outcome.error)
    assert peak < 16 * EVENT_LIMIT


# ---- What reading the module found ---------------------------------------------------------------

LONG_KEY = "sk-0123456789abcdefghijklmnopqrstuvwxyz"
FINISHED = sse(chunk("ok", "stop"))


def padded(body, size):
    """A stream of this size, filled up with a comment."""
    return b": " + b"x" * (size - len(body) - 4) + b"\n\n" + body


@cases(
    "script, options",
    {
        "gzip that fills its last piece": (
            [head(content_encoding="gzip"), gzip.compress(padded(FINISHED, cs.READ_BYTES))],
            LAX,
        ),
        "gzip with padding behind": (
            [head(content_encoding="gzip"), gzip.compress(FINISHED) + bytes(9)],
            LAX,
        ),
        "gzip with much padding behind, in pieces": (
            [
                head(content_encoding="gzip", transfer_encoding="chunked"),
                *chunked([gzip.compress(FINISHED), bytes(1), bytes(500)]),
            ],
            LAX,
        ),
        "a length that is used up, with a short stall": (
            [head(content_length=len(FINISHED)), FINISHED],
            {**LAX, "stall_timeout": 5.0},
        ),
    },
)
def test_end_of_the_body_is_no_cut(serve, script, options):
    check_result(ask(serve(script), **options), content="ok", finish="stop")


def test_cut_of_one_response_is_not_one_of_the_next(serve):
    busy = [head(503, "text/plain", content_length=99, retry_after="0", x_request_id="first"), b"?"]
    outcome = ask(serve(busy, [head(), FINISHED]), retries=1, **LAX)
    check_result(outcome, content="ok", request_id=None)


def test_request_id_is_not_that_of_another_try(serve):
    busy = [head(503, retry_after="0", x_request_id="first")]
    outcome = ask(serve(busy, []), retries=1)
    check_failed(outcome, Connect)
    assert outcome.error.request_id is None


def test_json_cut_in_a_long_text_takes_linear_time(serve):
    body = b'{"choices": [{"message": {"content": "' + b'\\"a' * 200_000
    start = time.monotonic()
    check_failed(ask(serve([head(content_type="application/json"), body])), Interrupted)
    assert time.monotonic() - start < SOON


def test_json_error_is_raised_once_its_answer_is_taken(serve):
    choice = {"message": {"content": "part"}, "finish_reason": "error"}
    body = json.dumps({"choices": [choice], "error": {"message": "boom"}}).encode()
    outcome = ask(serve([head(content_type="application/json"), body]))
    check_failed(outcome, Reported, "boom", content="part", finish="error", streamed=False)


def test_flood_of_comments_does_not_hold_off_the_stall(serve):
    outcome = streamed(serve, sse(chunk("a")), *[PING * 9, 0.0005] * 20_000, stall_timeout=0.1)
    check_failed(outcome, Timeout, "stall_timeout", content="a")


@cases(
    "options, body",
    {
        "with another scheme": ({"headers": {"Authorization": f"Token {LONG_KEY}"}}, LONG_KEY),
        "in a secret of another name": ({"headers": {"X-Secret": LONG_KEY}}, LONG_KEY),
        "cut in the middle": ({"key": LONG_KEY}, "x" * 280 + " " + LONG_KEY),
    },
)
def test_key_is_hidden(serve, options, body):
    outcome = streamed(serve, b"data: " + body.encode() + b"\n\n", **options)
    check_failed(outcome, Protocol, "***", unsaid=[LONG_KEY[:12]])


def test_ignored_line_is_no_tail(serve):
    outcome = streamed(serve, b"x-meta: 1\n", sse(chunk("a")))
    check_failed(outcome, Interrupted, content="a", unsaid=["x-meta"])
    assert outcome.error.tail == b""


def test_event_of_exactly_the_limit_is_no_larger(monkeypatch):
    monkeypatch.setattr(cs, "MAX_EVENT_BYTES", 12)
    assert [event.data for event in cs.sse_events([b"data: 123456\n\n"])] == ["123456"]
    assert [event.data for event in cs.sse_events([b"data: 12345", b"6\n\n"])] == ["123456"]
    for reads in ([b"data: 1234567\n\n"], [b"data: 1234", b"567"]):
        with pytest.raises(Protocol, match="MAX_EVENT_BYTES"):
            list(cs.sse_events(reads))


@pytest.mark.parametrize("name", ["error", "message", "detail", "msg"])
def test_words_for_people_come_first(serve, name):
    body = json.dumps({"code": 7, name: "too busy", "zone": "x"}).encode()
    check_failed(ask(serve([head(503, "application/json"), body])), Status, "too busy, 7, x")


# ---- The recordings -----------------------------------------------------------------------------

FIXTURES = pathlib.Path(__file__).with_name("fixtures")
RECORDINGS = {path.stem: path.read_bytes() for path in sorted(FIXTURES.glob("*.http"))}
TWINS = {path.stem: json.loads(path.read_bytes()) for path in sorted(FIXTURES.glob("*.json"))}
ASKED = [name for name, twin in TWINS.items() if "call" in twin]
PARSED = [name for name, twin in TWINS.items() if "events" in twin]
GZIPPED = "nginx-gzip-cn"
#: Whether to cut every stream at every byte in every framing, which takes some 20 minutes.
ALL_CUTS = os.environ.get("CHAT_STREAM_CUTS") == "all"


def unframed(raw):
    """A recording's status, headers and body, the latter out of its chunks but not of its gzip."""
    block, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = block.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = unchunked(body)
    return int(first.split()[1]), headers, body


def unchunked(raw):
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body, raw = body + raw[: int(size, 16)], raw[int(size, 16) + 2 :]
    return body


class Record(io.BytesIO):
    """A record that tells when it holds so many bytes: only then may a reset follow them."""

    def __init__(self, size):
        super().__init__()
        self.size, self.full = size, threading.Event()

    def write(self, data):
        written = super().write(data)
        if self.tell() >= self.size:
            self.full.set()
        return written


def check_recording(server, name, pieces):
    """Serve a recording in these pieces, and compare what comes of it with its twin."""
    twin = TWINS[name]
    record = Record(len(unframed(RECORDINGS[name])[2]))
    ends = {"hold": [HOLD], "reset": [record.full, RESET]}
    server.play([*pieces, *ends.get(twin.get("ends"), [])])
    outcome = ask(server, record=record, **twin["call"])
    if twin["raises"] is None:
        assert outcome.error is None
    else:
        check_raised(outcome.error, **twin["raises"])
    answer = json.loads(json.dumps(outcome.answer))  # as JSON has it, with texts as keys
    assert compared(answer, twin["result"]) == twin["result"]


def check_raised(error, says=(), **attributes):
    assert type(error).__name__ == attributes.pop("class")
    assert [word for word in says if word.lower() not in str(error).lower()] == []
    assert {name: getattr(error, name) for name in attributes} == attributes


def compared(got, want):
    """What of a result its twin speaks of: it may leave out members, but no choice and no call."""
    kept = {}
    for name in got.keys() & want.keys():
        kept[name] = got[name]
        if name in ("choices", "tool_calls"):
            some = want[name]
            kept[name] = {i: compared(each, some.get(i, each)) for i, each in got[name].items()}
    return kept


def timed(raw, timing):
    """The pieces in which a recording came, with the pauses between them."""
    at, before = 0, 0.0
    for moment, size in timing:
        yield max(0.0, moment - before)
        yield raw[at : at + size]
        at, before = at + size, moment
    yield raw[at:]


def test_recordings_are_found():
    assert len(RECORDINGS) > 40 and len(ASKED) > 40 and PARSED
    assert set(RECORDINGS) == set(TWINS)


def test_recordings_are_those_that_their_readme_names():
    table = re.findall(r"^\| (\S+)\.http \|.*\| ([0-9a-f]{64}) \|$", readme(), re.MULTILINE)
    sums = {name: hashlib.sha256(raw).hexdigest() for name, raw in RECORDINGS.items()}
    assert sorted(table) == sorted(sums.items())


def readme():
    return FIXTURES.joinpath("README.md").read_text("utf-8")


@pytest.mark.parametrize("name", ASKED)
def test_recording_gives_what_its_twin_says_however_cut(name, serve):
    server, raw = serve([]), RECORDINGS[name]
    check_recording(server, name, [raw])
    check_recording(server, name, [raw[at : at + 1] for at in range(len(raw))])
    check_recording(server, name, random_pieces(raw, random.Random(name)))


def test_recordings_give_the_same_at_the_pace_at_which_they_came(serve):
    paced = [name for name in ASKED if TWINS[name].get("timing")]
    assert len(paced) > 20

    def play(name):
        pieces = [*timed(RECORDINGS[name], TWINS[name]["timing"])]
        assert b"".join(x for x in pieces if isinstance(x, bytes)) == RECORDINGS[name]
        check_recording(serve([]), name, pieces)

    with ThreadPoolExecutor(len(paced)) as pool:
        failed = {name: pool.submit(play, name) for name in paced}
        failed = {name: end.exception() for name, end in failed.items() if end.exception()}
    assert not failed


def parsed_so_far(pieces):
    """The events of the pieces, and the error that ended them."""
    got = []
    try:
        got.extend(cs.sse_events(pieces))  # what came before an error stays
    except Protocol as error:
        got.append(str(error))
    return got


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_events_are_the_same_in_every_two_way_split_and_however_cut(name):
    body = unframed(RECORDINGS[name])[2]
    body = gzip.decompress(body) if name == GZIPPED else body
    want = parsed_so_far([body])
    assert name not in PARSED or want == [cs.Event(**event) for event in TWINS[name]["events"]]
    for how, pieces in ways(body):
        assert parsed_so_far(pieces) == want, how
    # A long one a few events at a time, as the time that this takes grows with the square.
    for part in [body] if ALL_CUTS else re.findall(rb"(?s).{600,}?(?:\r?\n){2}|.+", body):
        want = parsed_so_far([part])
        for at in range(1, len(part)):
            assert parsed_so_far([part[:at], part[at:]]) == want, at


# ---- Streams cut at every byte ------------------------------------------------------------------

#: Streams whose texts take the module's own rules to gather: the same events with [DONE] tell.
ODD = {
    "llama-cpp-python-tool-forced",
    "made-arguments-object",
    "made-content-parts",
    "made-function-call",
    "made-message-after-deltas",
    "made-nulls",
    "made-reasoning-details",
    "made-tool-names",
    "made-tools-no-index",
    "made-tools-odd-index",
    "made-tools-same-index",
    "made-two-values",
}
TO_CUT = {
    name: body
    for name, (_, _, body) in ((name, unframed(RECORDINGS[name])) for name in ASKED)
    if TWINS[name]["result"].get("streamed") and name != GZIPPED and body
}
FRAMINGS = ["close", "chunk", "reset", "length", "chunks"]
#: Streams of more bytes are cut at a sample of places, unless ALL_CUTS is set.
FEW_BYTES = 550
FEW = [body for body in TO_CUT.values() if len(body) <= FEW_BYTES]


def ask_cut(server, header, body, cut):
    """Ask for a body that ends too early, in one framing or in each: yield what it was, and came."""
    part = body[:cut]
    for framing in FRAMINGS if ALL_CUTS else [FRAMINGS[cut % len(FRAMINGS)]]:
        read = Record(cut)
        server.play(
            {
                "close": [header() + part],
                "chunk": [header(transfer_encoding="chunked"), b"%x\r\n" % (len(body) + 1), part],
                "chunks": [header(transfer_encoding="chunked"), *chunked([part])],
                "length": [header(content_length=len(body) + 1) + part],
                "reset": [header() + part, read.full, RESET],
            }[framing]
        )
        yield f"{framing}, cut at {cut}", ask(server, record=read)


def cuts(body, rng):
    """Where to cut: anywhere, or else around [DONE], at some line ends, and at some other bytes."""
    if ALL_CUTS:
        return range(1, len(body) + 1)
    if body in FEW:  # of those that begin alike, one is cut there
        before = FEW[: FEW.index(body)]
        alike = max((len(os.path.commonprefix([body, each])) for each in before), default=0)
        return range(alike + 1, len(body) + 1)
    ends = [m.start() + shift for m in re.finditer(rb"[\r\n]+", body) for shift in range(-1, 4)]
    done = body.rfind(b"[DONE]")
    near = range(done - 3, done + 8) if done > 0 else ()
    some = [*rng.choices(ends, k=6), *rng.choices(range(len(body)), k=4), *near, len(body)]
    return sorted({cut for cut in some if 0 < cut <= len(body)})


def blocks(text):
    """The data lines of each event."""
    for block in text.split("\n\n"):
        yield [line[5:].removeprefix(" ") for line in block.split("\n") if line[:5] == "data:"]


def is_done(text):
    return any(lines and lines[-1] == "[DONE]" for lines in blocks(text))


def complete(body):
    """An independent reading of a stream cut here: its complete events, and whether [DONE] was in.

    It is as naive as can be, with the whole body in hand.
    """
    text = body.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    events, _, rest = text.rpartition("\n\n")
    return (text, True) if is_done(rest) else (events, is_done(events))


def spoken(events):
    """The texts that these events give, as joined() has them."""
    texts = {}
    for lines in itertools.takewhile(
        lambda lines: lines != ["[DONE]"], filter(None, blocks(events))
    ):
        for choice in json.loads("\n".join(lines))["choices"] or []:
            for kind, call, text in said(choice.get("delta") or {}):
                place = (choice["index"], kind, call)
                texts[place] = texts.get(place, "") + (text or "")
    pairs = {place: text.encode("utf-16-le", "surrogatepass") for place, text in texts.items()}
    return {place: text.decode("utf-16-le", "replace") for place, text in pairs.items() if text}


def said(delta):
    yield "reasoning", 0, delta.get("reasoning_content")
    yield "content", 0, delta.get("content")
    yield "refusal", 0, delta.get("refusal")
    for call in delta.get("tool_calls") or []:
        yield "tool_name", call["index"], call["function"].get("name")
        yield "tool_arguments", call["index"], call["function"].get("arguments")


def told(server, events):
    """What spoken() says, for an odd stream: what its complete events say with [DONE] behind."""
    server.play([head(), events.encode("utf-8", "surrogateescape") + b"\n\n", DONE])
    return joined(ask(server).deltas)


def test_streams_to_cut_are_found():
    whole = [name for name, body in TO_CUT.items() if complete(body)[1]]
    assert len(whole) > 40 and len(TO_CUT) > 55 and set(whole) >= ODD
    assert len(FEW) > 12


@pytest.mark.parametrize("name", TO_CUT)
def test_stream_cut_anywhere_is_a_prefix_and_an_interruption(name, serve):
    """The complete prefix and StreamInterrupted; or the whole answer, where [DONE] was in.

    A stream that ends in an error of its own ends in it from the byte on that tells of it.
    """
    server, texts, raises = serve([]), {}, TWINS[name]["raises"]
    body, over = TO_CUT[name], False
    own = getattr(cs, raises["class"]) if raises else type(None)
    odd = name in ODD or own not in (Interrupted, type(None))
    for cut in cuts(body, random.Random(name)):
        events, done = complete(body[:cut])
        if events not in texts:
            texts[events] = told(server, events) if odd else spoken(events)
        for where, outcome in ask_cut(server, head, body, cut):
            assert joined(outcome.deltas) == texts[events], where
            end = type(outcome.error)
            over = over or done or (raises is not None and end is own)
            assert end is (own if over else Interrupted), where
    assert over or raises is None


def test_gzip_stream_cut_anywhere_is_a_prefix_and_an_interruption(serve):
    server = serve([])
    body = unframed(RECORDINGS[GZIPPED])[2]
    for cut in range(1, len(body) + 1):
        server.play([head(content_encoding="gzip"), body[:cut]])
        outcome = ask(server)
        events, done = complete(zlib.decompressobj(wbits=31).decompress(body[:cut]))
        assert joined(outcome.deltas) == spoken(events), cut
        assert type(outcome.error) is (type(None) if done else Interrupted), cut


def test_json_completion_cut_anywhere_is_an_interruption(serve):
    server = serve([])
    body = unframed(RECORDINGS["transformers-whole"])[2].rstrip()
    json_head = functools.partial(head, content_type="application/json")
    for cut in range(1, len(body)):
        for where, outcome in ask_cut(server, json_head, body, cut):
            assert outcome.deltas == [] and type(outcome.error) is Interrupted, where


# ---- Fuzz ---------------------------------------------------------------------------------------

#: How many recordings to damage, and half as many as streams to make up.
ROUNDS = 250
#: A failure shows the seed of its stream: this and a number.
SEED = "1"
TOKENS = [
    *rb"""data: event: id: retry: : [DONE] DONE null [] {} "" " { } [ ] , -1 1e999 NaN ffff
        "\ud83d" "\ude00" \ "error":"x", "choices":[], 401 gzip chunked http://[""".split(),
    *(b"\n", b"\r", b"\n\n", b"\r\n\r\n", b"\0", b"\xff", b"\xed\xa0\x80", BOM, b"\x1f\x8b", DONE),
    *(b"event: error\n", b": hi\n", b"0\r\n\r\n", b"9" * 5000, b"[" * 100000),
]
WRONG = json.loads(
    r"""[null, true, false, 0, 1, -1, 7, 1180591620717411303424, -0.5, 1e308, NaN, Infinity, "",
    " ", "1", "x", "null", "stop", "[DONE]", "\ud83d", "\ude00", "\udc00\ud800", "\u0000",
    "好\u2028", "99999999999999999999", [], {}, [[]], [null], [{}], ["x"], [1, "\ud83d"], {"": ""},
    {"x": [1]}, {"text": "x"}, {"error": {}}, {"message": "x"}, {"name": {}, "arguments": []},
    [{"type": "text", "text": 1}], [{"index": 0}], {"0": {"0": {"0": {"0": {}}}}},
    [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]"""
)
WRONG.append("9" * 5000)


def mutated(rng, raw):
    """A recording, damaged in a few places, header block included."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw) + 1)
        end = min(len(raw), at + rng.choice([0, 1, 1, 2, 5, 30, 300]))
        put = rng.choice([b"", rng.choice(TOKENS), raw[at:end] * 2, bytes([rng.randrange(256)])])
        raw = raw[:at] + put + raw[end:]
    return raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.2 else raw


def made_stream(rng):
    """A response that is valid, nearly valid or hostile, in each of its layers."""
    body = b"".join(made_block(rng) for _ in range(rng.randint(0, 9)))
    body += rng.choice([DONE, DONE, DONE, b"data: [DONE]", b"", b"data: [DO"])
    body = body.replace(b"\n", rng.choice([b"\n", b"\n", b"\r", b"\r\n"]))
    kind = rng.choice(["text/event-stream"] * 6 + ["application/json", "text/html", "", None])
    pieces = random_pieces(body, rng)
    if rng.random() < 0.5:
        return [head(content_type=kind), *pieces]
    framed = chunked(pieces)
    return [head(content_type=kind, transfer_encoding="chunked"), *framed[: rng.choice([None, -1])]]


def made_block(rng):
    """Mostly one event, sometimes what else may stand in a stream."""
    chunks = [spoiled(rng, made_chunk(rng)) for _ in range(rng.choice([1, 1, 1, 1, 2]))]
    event = sse("".join(map(as_json, chunks)))
    lines = as_json(rng.choice(chunks)).replace(",", ",\ndata: ")
    return rng.choice(
        [
            *[event] * 8,
            b"data: " + lines.encode("utf-8", "backslashreplace") + b"\n\n",
            b"event: %b\n" % rng.choice([b"error", b"x", b"done"]) + event,
            rng.choice([b": hi\n", b"x: y\n", b"error: x\n", b"id: 1\n", b"\n\n", event[6:]]),
            sse(rng.choice(["", ":", "x", "{", "[DONE] x", "DONE", "NaN", "1 2", "{}{"])),
            b"data: " + rng.choice(TOKENS) + b"\n\n",
        ]
    )


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def made_chunk(rng):
    index, text = rng.choice([0, 0, 0, 1]), rng.choice(["a", "你", "\ud83d", "\ude00", "😀", ""])
    call = {
        "index": rng.choice([0, 1, "2", None]),
        "id": rng.choice(["call_1", "call_2", None, ""]),
    }
    function = {
        "name": rng.choice(["f", "g", None, ""]),
        "arguments": rng.choice(['{"x"', ":1}", ""]),
    }
    calls = [{**call, "type": "function", "function": function}]
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    made = rng.choice(
        [
            chunk(text, index=index),
            chunk(index=index, reasoning_content=text),
            chunk(index=index, tool_calls=calls),
            chunk(index=index, function_call=function),
            chunk([{"type": rng.choice(["text", "thinking"]), "text": text}], index=index),
            chunk(finish=rng.choice(["stop", "tool_calls", ""]), index=index, refusal=text),
        ]
    )
    if rng.random() < 0.2:
        made["choices"][0]["message"] = made["choices"][0].pop("delta")
    return {**made, **rng.choice([{}, {}, {"usage": usage}, {"usage": usage, "choices": []}])}


def spoiled(rng, value):
    """The value, one in two times with something of a wrong type somewhere in it."""
    places = [*places_in(value)] if rng.random() < 0.5 else []
    for holder, name in rng.sample(places, min(len(places), rng.choice([1, 1, 2]))):
        holder[name] = rng.choice(WRONG)
    if rng.random() < 0.05:
        value[rng.choice(["error", "message", "detail", "choices", "usage", "x"])] = rng.choice(
            WRONG
        )
    return value


def places_in(value):
    for name, member in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
        yield value, name
        if isinstance(member, (dict, list)):
            yield from places_in(member)


def check_fuzzed(server, seed, script):
    """A result, or one of the six errors, with all that ask() checks; a result only with [DONE]."""
    record = io.BytesIO()
    server.play(script)
    try:
        outcome = ask(server, record=record)
        if outcome.result is not None and outcome.result["streamed"]:
            assert b"DONE" in record.getvalue() or record.getvalue()[:2] == b"\x1f\x8b"
    except Exception as error:
        raise AssertionError(f"seed {seed}, sent {record.getvalue()[:3000]!r}") from error


def test_damaged_recordings_give_a_result_or_one_of_the_errors(serve):
    server, names = serve([]), sorted(ASKED)
    for number in range(ROUNDS):
        rng = random.Random(f"{SEED}-{number}")
        raw = mutated(rng, RECORDINGS[rng.choice(names)])
        check_fuzzed(server, f"{SEED}-{number}", rng.choice([[raw], random_pieces(raw, rng)]))


def test_made_up_streams_give_a_result_or_one_of_the_errors(serve):
    server = serve([])
    for number in range(2 * ROUNDS):
        script = made_stream(random.Random(f"{SEED}-{number}"))
        check_fuzzed(server, f"{SEED}-{number}", script)


def test_deep_nesting_is_a_result_or_one_of_the_errors(serve):
    # What the decoder just takes, an encoder or a reader of it may no longer take.
    server = serve([])
    for depth in [10, 100, *range(900, 1000, 3), 2000, 5000, 20000, 100000]:
        deep = "[" * depth + "]" * depth
        for form in (
            '{"choices": [{"delta": {"content": %s}}]}',
            '{"choices": [{"delta": {"tool_calls": [{"function": {"arguments": %s}}]}}]}',
            '{"error": %s}',
            '{"detail": %s}',
            '{"usage": %s, "choices": [{"delta": {"content": "x"}}]}',
            "%s",
        ):
            server.play([head(), sse(form % deep), DONE])
            try:
                cs.chat_stream(PAYLOAD, server.url)
            except ERRORS:
                pass


# ---- The command line: how it is run ------------------------------------------------------------

#: Started in front of the command where it is to get a signal or a terminal: restores SIGINT, which
#: shells have ignored in what they start in the background, and closes the streams it is told to.
LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.argv[1].startswith("terminal "):
    import fcntl, termios
    fcntl.ioctl(int(sys.argv[1][-1]), termios.TIOCSCTTY, 0)
else:
    [os.close(int(number)) for number in sys.argv[1]]
os.execv(sys.argv[2], sys.argv[2:])
"""
ALL = ("stdin", "stdout", "stderr")
posix = pytest.mark.skipif(os.name != "posix", reason="needs the signals and streams of POSIX")


class Ran(NamedTuple):
    """What came of a command."""

    status: int
    out: str
    err: str

    @property
    def last(self):
        """The last line on stderr."""
        return self.err.splitlines()[-1]


class Command:
    """A copy of the module in an empty folder, run without the tester's own settings."""

    def __init__(self, folder, name="chat_stream.py"):
        self.folder, self.started = folder, []
        self.file = pathlib.Path(shutil.copy(cs.__file__, folder / name))

    def line(self, arguments, env):
        # -I ignores PYTHON* variables: where a test sets one, the weaker -s has to do.
        flag = "-s" if any(name.startswith("PYTHON") for name in env) else "-I"
        return [sys.executable, flag, "-X", "utf8", str(self.file), *map(str, arguments)]

    def env(self, env):
        own = r"(?i)openai_.*|.*_proxy|python.*|no_color|force_color|term|columns|lines"
        bare = {name: text for name, text in os.environ.items() if not re.fullmatch(own, name)}
        home = str(self.folder)
        return {**bare, "HOME": home, "TMPDIR": home, "TERM": "xterm", **env}

    def __call__(self, *arguments, stdin=b"", **env):
        """Run it to its end."""
        run = subprocess.run(
            self.line(arguments, env),
            cwd=self.folder,
            env=self.env(env),
            input=stdin,
            capture_output=True,
            timeout=HANG,
            check=False,
        )
        encoding = env.get("PYTHONIOENCODING", "utf-8")
        both = run.stdout, run.stderr
        texts = (stream.decode(encoding).replace("\r\n", "\n") for stream in both)
        return quiet(Ran(run.returncode, *texts))

    def start(self, *arguments, terminal=(), closed="", merged=False, **env):
        """Start it, with the streams named on a pseudo-terminal and the others in pipes."""
        line = self.line(arguments, env)
        if os.name == "posix":
            before = f"terminal {ALL.index(terminal[0])}" if terminal else closed
            line = [sys.executable, "-I", "-c", LAUNCHER, before, *line]
        options = {"cwd": self.folder, "env": self.env(env)}
        live = Live(line, terminal, merged, **options)
        self.started.append(live)
        return live


def quiet(ran):
    """Whatever happens, no one sees a traceback, nor what Python says of a failed last flush."""
    assert "Traceback" not in ran.err and "Exception ignored" not in ran.err, ran.err
    return ran


class Live:
    """A command that runs; .seen is what has come out, on its terminal, or else on its stdout."""

    def __init__(self, line, terminal, merged, **options):
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        streams = {"stdin": none, "stdout": pipe, "stderr": subprocess.STDOUT if merged else pipe}
        if terminal:
            self.fd, slave = pytest.importorskip("pty").openpty()
            streams.update(dict.fromkeys(terminal, slave))
        self.process = subprocess.Popen(line, start_new_session=True, **streams, **options)
        self.pipes = [self.process.stdout, self.process.stderr]
        if terminal:
            os.close(slave)
        else:
            self.fd = os.dup(self.process.stdout.fileno())
            self.pipes.pop(0).close()
            self.pipes.insert(0, None)
        self.terminal, self.seen, self.pressed, self.again = terminal, b"", 0.0, None
        # What hangs is killed, and its output then ends: so that no read has to be watched.
        self.watchdog = threading.Timer(HANG, self.process.kill)
        self.watchdog.start()

    def read(self):
        """Read what there is; b"" at the end."""
        piece = b""
        if self.fd is not None:
            try:
                piece = os.read(self.fd, 65536)
            except OSError:  # so Linux tells that the other side of a pseudo-terminal is closed
                pass
        self.seen += piece
        return piece

    def until(self, text):
        while text.encode() not in self.seen:
            assert self.read(), f"{text!r} has not come, only {self.seen!r}"
        return self

    def close(self):
        """Stop to read what comes out, as head does."""
        os.close(self.fd)
        self.fd = None
        return self

    def interrupt(self, key=True):
        """Press Ctrl-C on its terminal, or without a key send the signal; if need be, once more.

        A signal that comes between Python's last look for one and its wait in the kernel is seen
        when the wait is over, or when the next signal comes.
        """
        self.pressed = time.monotonic()
        self.press(key)
        self.again = threading.Timer(2.0, self.press, [key])
        self.again.start()
        return self

    def press(self, key):
        with contextlib.suppress(OSError, TypeError):  # it has ended
            if key:
                os.write(self.fd, b"\x03")
            else:
                self.process.send_signal(signal.SIGINT)

    def end(self):
        """Wait for its end; on a terminal, out and err are only what went past it."""
        while self.read():
            pass
        out, err = (stream.read() if stream else b"" for stream in self.pipes)
        status = self.process.wait()
        self.pressed = time.monotonic() - self.pressed
        texts = ((out if self.terminal else self.seen), err)
        return quiet(Ran(status, *(text.decode().replace("\r\n", "\n") for text in texts)))

    def stop(self):
        for timer in filter(None, (self.watchdog, self.again)):
            timer.cancel()
        self.process.kill()
        self.process.wait()
        for stream in filter(None, self.pipes):
            stream.close()
        if self.fd is not None:
            self.close()


@pytest.fixture
def command(tmp_path):
    command = Command(tmp_path)
    yield command
    for live in command.started:
        live.stop()


def ran_all(command, commands, **env):
    """Run several at once; yield what came of each with its name."""
    with ThreadPoolExecutor(4) as pool:
        yield from zip(commands, pool.map(lambda name: command(*commands[name], **env), commands))


def screen(raw):
    """The lines that a terminal shows after these bytes, white space at their ends left out."""
    rows, column = [""], 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", raw.decode()):
        if part == "\r":
            column = 0
        elif part == "\n":
            rows.append(" " * column)
        elif part == "\x1b[K":
            rows[-1] = rows[-1][:column]
        elif not part.startswith("\x1b"):
            rows[-1] = rows[-1][:column] + part + rows[-1][column + len(part) :]
            column += len(part)
    return [row.rstrip() for row in rows]


def base(server):
    return {"OPENAI_BASE_URL": server.url}


def words_of(*texts, finish="stop"):
    """A script that says these texts, each in an event of its own."""
    return [head(), *(sse(chunk(text)) for text in texts), sse(chunk(finish=finish)), DONE]


def held(first, *rest):
    """A script that says first, waits for the Event that is returned with it, and says the rest."""
    event = threading.Event()
    return event, [head(), sse(chunk(first)), event, *words_of(*rest)[1:]]


# ---- The demo -----------------------------------------------------------------------------------

NOWHERE = "http://127.0.0.1:9"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
#: name: (environment, arguments)
DEMOS = {
    "plain": ({}, []),
    "renamed": ({}, []),
    "proxies": (dict.fromkeys(PROXIES, NOWHERE), []),
    "empty variables": (
        dict.fromkeys(["OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL"], ""),
        [],
    ),
    "with a prompt": ({}, ["Why?"]),
    "typewriter": ({}, ["--typewriter", "1000"]),
    "ascii": ({"PYTHONIOENCODING": "ascii"}, []),
    "cp1252": ({"PYTHONIOENCODING": "cp1252"}, []),
    "gbk": ({"PYTHONIOENCODING": "gbk"}, []),
    "json": ({}, ["--json"]),
    "files": ({}, ["--record", "body.sse", "--tee", "text.txt"]),
}


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Every demo, run once: all at the same time, as they mostly wait."""

    folders = {name: tmp_path_factory.mktemp("demo") for name in DEMOS}

    def run(name):
        env, arguments = DEMOS[name]
        command = Command(folders[name], "其他.py" if name == "renamed" else "chat_stream.py")
        return command(*arguments, **env), folders[name]

    with ThreadPoolExecutor(len(DEMOS)) as pool:
        return dict(zip(DEMOS, pool.map(run, DEMOS)))


@pytest.mark.parametrize("name", [name for name in DEMOS if name != "json"])
def test_demo_streams_and_says_what_it_proved(demos, name):
    ran, _ = demos[name]
    encoding = DEMOS[name][0].get("PYTHONIOENCODING", "utf-8")
    assert ran.status == 0
    for text in ("流式传输", "🚀", 'get_weather {"city": "北京"}'):
        assert text.encode(encoding, "replace").decode(encoding) in ran.out
    assert "finish: tool_calls" in ran.err
    proof = ran.err[ran.err.index("finish: ") :].partition("\n")[2]
    assert "tool call" in proof
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", ran.out + ran.err)


def test_demo_leaves_nothing_behind(demos):
    left = {
        name: sorted(path.name for path in folder.iterdir()) for name, (_, folder) in demos.items()
    }
    own = {"renamed": ["其他.py"], "files": ["body.sse", "chat_stream.py", "text.txt"]}
    assert left == {name: own.get(name, ["chat_stream.py"]) for name in DEMOS}


def test_demo_gives_its_result_as_json(demos):
    ran, _ = demos["json"]
    result = json.loads(ran.out)
    assert ran.status == 0 and result["content"] in demos["plain"][0].out
    assert result["tool_calls"]["0"]["arguments"] == {"city": "北京"}


def test_demo_recorded_can_be_replayed(demos, command):
    ran, folder = demos["files"]
    replayed = command("--replay", folder / "body.sse", "--chunk-size", 1)
    events = [json.loads(line) for line in replayed.out.splitlines()]
    assert replayed[::2] == (0, "")
    assert events[-1] == {"event": "message", "data": "[DONE]"} and len(events) > 4
    assert (folder / "text.txt").read_text("utf-8") == ran.out.partition("\n")[0]


# ---- A live call --------------------------------------------------------------------------------


def test_text_is_printed_and_teed_as_it_comes(serve, command):
    event, script = held("Hello, ", "世界")
    live = command.start("Hi", "--tee", "text.txt", **base(serve(script)))
    live.until("Hello, ")
    text = command.folder / "text.txt"
    deadline = time.monotonic() + HANG
    while text.read_text("utf-8") != "Hello, " and time.monotonic() < deadline:
        time.sleep(0.01)
    assert text.read_text("utf-8") == "Hello, "
    event.set()
    assert live.end()[:2] == (0, "Hello, 世界\n")
    assert text.read_text("utf-8") == "Hello, 世界"


def test_tool_call_is_named_at_once_and_its_arguments_grow(serve, command):
    def piece(index, name="", arguments=""):
        call = {"index": index, "function": {"name": name, "arguments": arguments}}
        call.update({"id": f"call_{index}"} if name else {})
        return sse(chunk(tool_calls=[call]))

    events = [threading.Event() for _ in range(3)]
    script = [head(), piece(0, "get_weather"), events[0], piece(0, "", '{"city": "北')]
    script += [events[1], piece(0, "", '京"}'), events[2], piece(1, "get_time", "{}")]
    live = command.start("Hi", **base(serve([*script, *words_of(finish="tool_calls")[1:]])))
    shown = ["get_weather", ' {"city": "北', '京"}', "\nget_time {}\n"]
    for number, event in enumerate(events):
        live.until("".join(shown[: number + 1]))
        assert live.seen.decode() == "".join(shown[: number + 1])
        event.set()
    ran = live.end()
    assert ran.status == 0 and ran.out == "".join(shown)
    assert "finish: tool_calls" in ran.last


def test_reasoning_goes_to_stderr_apart_from_the_text(serve, command):
    thoughts = [sse(chunk(reasoning_content=text)) for text in ("Let me ", "think.")]
    ran = command("Hi", **base(serve([head(), *thoughts, *words_of("4", "2")[1:]])))
    assert ran.status == 0 and ran.out == "42\n"
    assert ran.err.splitlines()[0] == "Let me think." and len(ran.err.splitlines()) == 2


def test_last_line_on_stderr_has_the_numbers(serve, command):
    script = words_of("He", "llo", "你")
    script[-1:] = [sse({"choices": [], "usage": {"completion_tokens": 77}}), DONE]
    ran = command("Hi", **base(serve(script)))
    number = r"\d+(\.\d+)?"
    for text in (
        "finish: stop",
        "6 characters",
        "77 tokens",
        f"first byte {number} s",
        f"{number} reads",
        f"median {number} s",
        f"longest {number} s",
    ):
        assert re.search(rf"(^|\W){text}(\W|$)", ran.last), ran.last
    assert ran.err.count("\n") == 1


def test_longest_gap_is_one_between_pieces(serve, command):
    begun, first, *script = words_of("a", "b", "c")
    ran = command("Hi", **base(serve([0.5, begun, first, 0.1, *script])))
    first, longest = (
        float(re.search(rf"{name} ([\d.]+) s", ran.last)[1]) for name in ("byte", "longest")
    )
    assert first > 0.45 > longest > 0.05


NO_SERVER = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}


@side_by_side(
    "arguments, stdin, env, sent",
    {
        "prompt": (["你好"], b"", {}, {"prompt": "你好", "key": None}),
        "standard input": ([], "你\n好".encode(), {}, {"prompt": "你\n好"}),
        "prompt before standard input": (["a"], b"b", {}, {"prompt": "a"}),
        "key": (["a"], b"", {"OPENAI_API_KEY": KEY}, {"key": f"Bearer {KEY}"}),
        "key with spaces": (["a"], b"", {"OPENAI_API_KEY": f" {KEY}\n"}, {"key": f"Bearer {KEY}"}),
        "empty key": (["a"], b"", {"OPENAI_API_KEY": ""}, {"key": None}),
        "model": (["a"], b"", {"OPENAI_MODEL": "m1"}, {"model": "m1"}),
        "--model": (["a", "--model", "m2"], b"", {"OPENAI_MODEL": "m1"}, {"model": "m2"}),
        "--base": (["a", "--base", "{}"], b"", NO_SERVER, {"prompt": "a"}),
        "--base as pasted": (["a", "--base", "{}/chat/completions"], b"", {}, {"prompt": "a"}),
    },
)
def test_request_is_what_was_asked_for(serve, command, arguments, stdin, env, sent):
    server = serve(words_of("ok"))
    env = {**base(server), **dict.fromkeys(PROXIES, NOWHERE), **env}
    ran = command(*(each.format(server.url) for each in arguments), stdin=stdin, **env)
    assert ran[:2] == (0, "ok\n")
    (request,) = server.requests
    asked = request.json()
    (message,) = asked["messages"]
    got = {
        "prompt": message["content"],
        "key": request.headers["Authorization"],
        "model": asked["model"],
    }
    assert request.path == "/v1/chat/completions" and message["role"] == "user"
    assert {name: got[name] for name in sent} == sent and got["model"]


def test_empty_standard_input_still_asks_something(serve, command):
    server = serve(words_of("ok"))
    assert command(**base(server))[:2] == (0, "ok\n")
    assert server.requests[0].json()["messages"][0]["content"]


@side_by_side(
    "finish, status", [("stop", 0), ("tool_calls", 0), ("length", 3), ("content_filter", 3)]
)
def test_exit_status_tells_how_the_answer_finished(serve, command, finish, status):
    ran = command("Hi", **base(serve(words_of("text", finish=finish))))
    assert ran[:2] == (status, "text\n") and f"finish: {finish}" in ran.last


def test_answer_without_done_is_complete_only_with_no_done(serve, command):
    server = serve(words_of("text")[:-1])
    lax, strict = command("Hi", "--no-done", **base(server)), command("Hi", **base(server))
    assert lax[:2] == (0, "text\n") and strict[:2] == (1, "text\n")


def test_retries_try_again_as_often_as_they_say(serve, command):
    server = serve([head(503, retry_after=0)], [head(503, retry_after=0)], words_of("ok"))
    assert command("Hi", "--retries", 2, **base(server))[:2] == (0, "ok\n")
    assert len(server.requests) == 3
    server.play([head(503, retry_after=0)], words_of("ok"))
    assert command("Hi", **base(server))[:2] == (1, "")


def test_typewriter_option_plays_the_same_text_slowly(serve, command):
    text = "流水不争先，争的是滔滔不绝。" * 2
    start = time.monotonic()
    ran = command("Hi", "--typewriter", 100, "--tee", "text.txt", **base(serve(words_of(text))))
    assert ran[:2] == (0, text + "\n")
    assert time.monotonic() - start > 0.0095 * len(text)
    assert (command.folder / "text.txt").read_text("utf-8") == text


def test_json_prints_the_result_and_nothing_else_on_stdout(serve, command):
    script = [head(), sse(chunk(reasoning_content="hm")), *words_of("你", "好")[1:]]
    ran = command("Hi", "--json", **base(serve(script)))
    result = json.loads(ran.out)
    assert ran.status == 0 and "你好" in ran.out
    assert (result["content"], result["reasoning"], result["finish"]) == ("你好", "hm", "stop")
    assert ran.err.count("\n") == 1


def test_json_with_an_error_prints_what_had_arrived(serve, command):
    ran = command("Hi", "--json", **base(serve(words_of("你", "好")[:-2])))
    result = json.loads(ran.out)
    assert ran.status == 1 and (result["content"], result["finish"]) == ("你好", None)
    assert ran.err.startswith("chat_stream: ") and ran.err.count("\n") == 1


def test_files_hold_the_text_and_the_body_as_received(serve, command):
    call = chunk(tool_calls=[{"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}])
    pieces = [b": hi\r\n\r\n", sse(chunk("é你😀")), sse(call), *words_of(finish="tool_calls")[1:]]
    server = serve([IN_CHUNKS, *chunked(pieces)])
    files = "--tee", "text.txt", "--record", "body.sse"
    ran = command("Hi", *files, **base(server), PYTHONIOENCODING="ascii")
    assert ran[:2] == (0, "???\nf {}\n")
    assert (command.folder / "text.txt").read_text("utf-8") == "é你😀"
    assert (command.folder / "body.sse").read_bytes() == b"".join(pieces)


# ---- What goes wrong ----------------------------------------------------------------------------


def answer(status, error, content_type="application/json"):
    return [
        head(status, content_type),
        (error if type(error) is str else json.dumps(error)).encode(),
    ]


WEB_PAGE = "<!DOCTYPE html><html><head><title>Welcome</title></head><body>Hello</body></html>"
TEXT = [head(), sse(chunk("partial"))]
#: name: (script, what is printed before, what the line says, arguments)
FAILURES = {
    "wrong key": (answer(401, {"error": {"message": f"Incorrect API key: {KEY}"}}), "", ["401", "Incorrect API key", "check the key"], []),
    "unknown model": (answer(404, {"error": {"message": "The model `m` does not exist"}}), "", ["404", "`m` does not exist", "check the model"], []),
    "wrong base": (answer(404, WEB_PAGE, "text/html"), "", ["404", "/v1"], []),
    "web page": (answer(200, WEB_PAGE, "text/html"), "", ["text/html", "check the base", "/v1"], []),
    "redirect": ([head(308, location="http://127.0.0.1:9/v2/chat/completions"), b""], "", ["308", "http://127.0.0.1:9/v2", "base"], []),
    "too many requests": (answer(429, {"error": {"message": "slow\ndown"}}), "", ["429", "slow down"], []),
    "closed at once": ([], "", ["no response"], []),
    "no first byte": ([HOLD], "", ["0.6 s", "timeout"], ["--timeout", "0.6"]),
    "silence": ([*TEXT, HOLD], "partial\n", ["0.6 s", "timeout"], ["--timeout", "0.6"]),
    "cut": (TEXT, "partial\n", ["[DONE]"], []),
    "error in the stream": ([*TEXT, sse({"error": {"message": "错误: out of memory"}})], "partial\n", ["错误: out of memory"], []),
    "error after a line end": ([head(), sse(chunk("partial\n")), sse({"error": "bad"})], "partial\n\n", ["bad"], []),
    "bad UTF-8": ([*TEXT, b"data: \xff\n\n"], "partial\n", ["UTF-8"], []),
}  # fmt: skip


@side_by_side("script, out, words, arguments", FAILURES)
def test_error_is_one_line_after_what_had_arrived(serve, command, script, out, words, arguments):
    server = serve(script)
    ran = command("Hi", *arguments, **base(server), OPENAI_API_KEY=KEY)
    assert ran[:2] == (1, out)
    assert ran.err.startswith("chat_stream: ") and ran.err.count("\n") == 1
    assert [word for word in words if word not in ran.err] == [], ran.err
    assert f"127.0.0.1:{server.port}" in ran.err and KEY not in ran.err


def test_error_where_no_server_listens_is_one_line(command, dead_port):
    url = f"http://127.0.0.1:{dead_port}/v1"
    ran = command("Hi", "--base", url)
    assert ran[:2] == (1, "") and ran.err.count("\n") == 1
    assert "refused" in ran.err and "does the server run" in ran.err and url in ran.err


@side_by_side("encoding", ["ascii", "cp1252", "gbk"])
def test_console_shows_replacements_for_what_it_cannot_encode(serve, command, encoding):
    thoughts = sse(chunk(reasoning_content="é想😀"))
    script = [head(), thoughts, sse(chunk("é文😀")), sse({"error": "é错😀"})]
    ran = command("Hi", **base(serve(script)), PYTHONIOENCODING=encoding)
    thought, text, error = (
        each.encode(encoding, "replace").decode(encoding) for each in ("é想😀", "é文😀", "é错😀")
    )
    assert ran[:2] == (1, text + "\n")
    assert ran.err.startswith(thought + "\nchat_stream: ") and error in ran.err


#: What is given wrong, and what the last line names.
MISUSED = [
    ("--base host", "'host'"),
    ("--base host:80/v1", "'host:80/v1'"),
    ("--base ftp://host/v1", "'ftp://host/v1'"),
    ("--base http://", "'http://'"),
    ("--base http://a..b/v1", "'http://a..b/v1'"),
    *((f"--timeout {number}", "timeout") for number in ("0", "-1", "nan", "x")),
    *((f"--retries {number}", "retries") for number in ("-1", "0.5")),
    *((f"--typewriter {number}", "cps|typewriter") for number in ("0", "nan", "x")),
    *((f"--replay a.sse --chunk-size {number}", "chunk.size") for number in ("0", "-1", "x")),
    ("--key k", "--key"),
    ("second", "second"),
    ("--tee", "--tee"),
]


def test_wrong_usage_is_status_2_and_the_last_line_says_what_is_wrong(command):
    (command.folder / "a.sse").write_bytes(b"data: a\n\n")
    wrong, words = zip(*MISUSED)
    runs = ran_all(command, {given: ["Hi", *given.split()] for given in wrong})
    for word, (given, ran) in zip(words, runs):
        assert (given, *ran[:2]) == (given, 2, "") and re.search(word, ran.last), ran
        # argparse says how it is used before that.
        assert ran.err.count("\n") == 1 or ran.err.startswith("usage: ")
        assert ran.err.count("\n") == 1 or not given.startswith("--base")
    assert {path.name for path in command.folder.iterdir()} == {"a.sse", "chat_stream.py"}


@pytest.mark.parametrize("key", ["sk-中文中文", "sk-te\nst-key"])
def test_key_that_cannot_be_sent_is_wrong_usage_and_not_shown(command, key):
    ran = command("Hi", "--base", "http://127.0.0.1:9/v1", OPENAI_API_KEY=key)
    assert ran[:2] == (2, "") and ran.err.count("\n") == 1
    assert "key" in ran.err and "中文" not in ran.err and "st-key" not in ran.err


@pytest.mark.parametrize("option", ["--tee", "--record"])
def test_file_that_cannot_be_written_is_an_error_before_anything_is_asked(serve, command, option):
    server = serve(words_of("ok"))
    ran = command("Hi", option, "missing/file", **base(server))
    assert ran[:2] == (1, "") and "missing" in ran.err and ran.err.count("\n") == 1
    assert server.requests == []


# ---- Replay -------------------------------------------------------------------------------------


def replayed(ran):
    lines = ran.out.splitlines()
    assert lines == [json.dumps(json.loads(line), ensure_ascii=False) for line in lines]
    return [tuple(json.loads(line).items()) for line in lines]


def of(*events):
    return [(("event", event), ("data", data)) for event, data in events]


#: A stream with named events, as the Responses API sends, and others with ids and odd line ends.
REPLAYED = ("made-responses-api", "made-fields", "made-crlf")


def test_replay_prints_a_line_for_each_event_without_network(serve, command):
    server, commands = serve(words_of("not this")), {}
    for name in REPLAYED:
        (command.folder / name).write_bytes(unframed(RECORDINGS[name])[2])
        for size in (1, 7, 65536):
            commands[name, size] = ["--replay", name, "--chunk-size", size]
    for (name, _), ran in ran_all(command, commands, **base(server), OPENAI_API_KEY=KEY):
        want = [(each["event"], each["data"]) for each in TWINS[name]["events"]]
        assert ran[::2] == (0, "") and want and replayed(ran) == of(*want)
    assert server.requests == []


def test_replay_reads_what_record_kept_of_a_gzip_stream(serve, command):
    body = b"".join(words_of("你", "好")[1:])
    server = serve([head(content_encoding="gzip"), gzip.compress(body)])
    assert command("Hi", "--record", "body.sse", **base(server))[:2] == (0, "你好\n")
    assert gzip.decompress((command.folder / "body.sse").read_bytes()) == body
    ran = command("--replay", "body.sse", "--chunk-size", 1)
    assert ran[::2] == (0, "")
    assert replayed(ran) == of(*(("message", event.data) for event in cs.sse_events([body])))


TAILS = [b"", b"\n\n", b"da", b"data: b", b"data: b\n", b"data:b\n", b"data: b\r\n"]
TAILS += [b"event: x\ndata: {", b"id: 1\r\nevent:x\r\ndata: {", "data: 北".encode()[:-1]]


def test_replay_says_how_many_bytes_were_left_over(command):
    commands = {}
    for number, tail in enumerate(TAILS):
        (command.folder / f"{number}.sse").write_bytes(b"data: a\n\n" + tail)
        for sized in (["--chunk-size", "1"], []):
            commands[tail, len(sized)] = ["--replay", f"{number}.sse", *sized]
    words_of = {}
    for place, ran in ran_all(command, commands):
        assert ran.status == 0 and replayed(ran) == of(("message", "a"))
        words_of[place] = [int(number) for number in re.findall(r"(\d+) bytes", ran.err)]
    assert words_of == {(tail, size): [len(tail)] * bool(tail.strip()) for tail, size in commands}


@side_by_side(
    "name, content, word",
    [
        ("missing.sse", None, "missing.sse"),
        ("", None, ""),
        (".", None, "."),
        ("damaged.sse", b"\x1f\x8bdamaged", ""),
        ("whole.http", RECORDINGS["made-responses-api"], "HTTP response"),
    ],
)
def test_replay_of_what_is_no_body_is_one_line(command, name, content, word):
    if content:
        (command.folder / name).write_bytes(content)
    ran = command("--replay", name)
    assert ran[:2] == (1, "") and ran.err.count("\n") == 1 and word in ran.err


def test_replay_with_bad_bytes_prints_what_came_before_them(command):
    (command.folder / "body.sse").write_bytes(b"data: a\n\ndata: \xff\n\n")
    ran = command("--replay", "body.sse")
    assert ran.status == 1 and replayed(ran) == of(("message", "a"))
    assert "UTF-8" in ran.err and ran.err.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/stdin"), reason="needs /dev/stdin")
def test_replay_reads_a_pipe(command):
    ran = command("--replay", "/dev/stdin", stdin=b"data: a\n\n")
    assert ran[::2] == (0, "") and replayed(ran) == of(("message", "a"))


# ---- --help -------------------------------------------------------------------------------------


def test_help_fits_one_screen_and_shows_three_examples(command):
    ran = command("--help")
    lines = ran.out.splitlines()
    assert ran[::2] == (0, "") and ran.out.isascii()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert len(re.findall(r"(?m)^  .*python3? chat_stream\.py", ran.out)) == 3
    flat = " ".join(ran.out.split())
    options = "--typewriter --tee --record --replay --chunk-size --json --base --model --timeout"
    options += " --retries --no-done PROMPT OPENAI_API_KEY OPENAI_BASE_URL OPENAI_MODEL"
    words = [*options.split(), ".sse", "whole HTTP response", "bare body", "Exit status: 0", "130"]
    assert [word for word in words if word not in flat] == []


# ---- Pipes that close ---------------------------------------------------------------------------


@posix
@side_by_side("arguments", [[], ["--json"], ["--tee", "text.txt"], ["--typewriter", "1000"]])
def test_pipe_closed_at_once_is_quiet(serve, command, arguments):
    event = threading.Event()
    server = serve([event, *words_of(*"abc")])
    live = command.start("Hi", *arguments, **base(server))
    assert server.asked()
    live.close()
    event.set()
    ran = live.end()
    assert ran.status == 1 and (ran.err == "" or arguments == ["--json"])
    assert server.all_closed()


@posix
def test_pipe_closed_before_an_error_leaves_no_traceback(serve, command):
    event = threading.Event()
    server = serve([event, head(401, JSON), b"{}"])
    live = command.start("Hi", "--json", **base(server))
    assert server.asked()
    live.close()
    event.set()
    ran = live.end()
    assert ran.status == 1 and "Traceback" not in ran.err


@posix
def test_pipe_closed_after_the_first_line_is_quiet(serve, command):
    event, script = held("first\n", "second\n", *["more\n"] * 99)
    server = serve([*script[:-1], HOLD])
    live = command.start("Hi", **base(server)).until("first\n").close()
    event.set()
    assert live.end()[::2] == (1, "")
    assert server.all_closed()


@posix
def test_pipe_for_both_streams_closed_is_a_status_of_ours(serve, command):
    event = threading.Event()
    server = serve([event, head(), sse(chunk(reasoning_content="hm")), *words_of("a")[1:]])
    live = command.start("Hi", merged=True, **base(server))
    assert server.asked()
    live.close()
    event.set()
    assert live.end().status == 1


@posix
def test_pipe_closed_during_a_replay_is_quiet(command):
    (command.folder / "body.sse").write_bytes(b"data: a\n\n" * 100_000)
    live = command.start("--replay", "body.sse").until('{"event": "message", "data": "a"}\n')
    assert live.close().end()[::2] == (1, "")


@posix
def test_pipe_closed_during_the_demo_is_quiet(command):
    live = command.start().until("Hello").close()
    ran = live.end()
    assert ran.status == 1 and len(ran.err.splitlines()) <= 1


@posix
@side_by_side("closed", ["0", "1", "2", "012"])
def test_streams_that_do_not_exist_do_no_harm(serve, command, closed):
    server = serve(words_of("ok"))
    live = command.start(closed=closed, **base(server))
    ran = live.end()
    assert ran.status == 0 and ran.out == "ok\n" * ("1" not in closed)
    assert server.all_closed()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_line(serve, command):
    file = command.folder / "text.txt"
    file.symlink_to("/dev/full")
    ran = command("Hi", "--tee", "text.txt", **base(serve(words_of("ok"))))
    assert ran.status == 1 and ran.err.count("\n") == 1 and "space" in ran.err


# ---- On a terminal ------------------------------------------------------------------------------


@side_by_side(
    "scripts, arguments, until, status, rows",
    {
        "text": ([words_of("text")], [], " 1 s", 0, ["text", "finish: stop.*", ""]),
        "an error": ([answer(401, {"error": "no"})], [], " s", 1, ["chat_stream: HTTP 401.*", ""]),
        "a retry": (
            [[head(503, retry_after=0)], words_of("ok")],
            ["--retries", 1],
            " s",
            0,
            ["retry 1 of 1.*", "ok", "finish: stop.*", ""],
        ),
    },
)
def test_waiting_is_shown_on_a_terminal_and_wiped(
    serve, command, scripts, arguments, until, status, rows
):
    event, (first, *others) = threading.Event(), scripts
    server = serve([event, *first], *others)
    live = command.start("Hi", *arguments, terminal=ALL, **base(server)).until(until)
    (line,) = screen(live.seen)
    assert re.search("waiting.*" + until, line) and len(line) < 80
    event.set()
    assert live.end().status == status
    shown = screen(live.seen)
    assert len(shown) == len(rows) and all(map(re.fullmatch, rows, shown)), shown
    assert b"%" not in live.seen


def test_waiting_is_not_shown_where_stderr_is_no_terminal(serve, command):
    server = serve([0.4, *words_of("text")])
    live = command.start("Hi", terminal=("stdin", "stdout"), **base(server))
    ran = live.end()
    assert live.seen == b"text\r\n" and ran.err.startswith("finish: ")


DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@side_by_side(
    "terminal, env, dimmed",
    [
        (ALL, {}, True),
        (ALL, {"NO_COLOR": ""}, True),
        (ALL, {"NO_COLOR": "1"}, False),
        (("stderr",), {}, True),
        (("stdin", "stdout"), {}, False),
    ],
)
def test_reasoning_is_dimmed_only_on_a_terminal_and_in_colour(
    serve, command, terminal, env, dimmed
):
    thoughts = sse(chunk(reasoning_content="Let me think."))
    call = chunk(tool_calls=[{"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}])
    server = serve([head(), thoughts, sse(chunk("text")), sse(call), *words_of()[1:]])
    live = command.start("Hi", terminal=terminal, **base(server), **env)
    ran = live.end()
    shown = live.seen.decode()
    assert ran.status == 0 and not re.search(r"[\x00-\x09\x0b-\x1f]", ran.out + ran.err)
    assert (f"{DIM}Let me think.{PLAIN}" in shown) == dimmed
    assert shown.count("\x1b") == 2 * dimmed
    for text in ("text", "f {}"):
        assert text in (shown if "stdout" in terminal else ran.out)
    for text in ("Let me think.", "finish: stop"):
        assert text in (shown if "stderr" in terminal else ran.err)
    if terminal == ALL:
        assert screen(live.seen)[:3] == ["Let me think.", "text", "f {}"]


HELLO = [head(), sse(chunk("Hello"))]


@side_by_side(
    "script, arguments, until, shown",
    {
        "waiting": ([HOLD], [], "waiting", ""),
        "waiting, with options": ([HOLD], ["--json", "--retries", "3"], "waiting", ""),
        "streaming": ([*HELLO, HOLD], [], "Hello", "Hello"),
        "streaming, played": ([*HELLO, HOLD], ["--typewriter", "1000"], "Hello", "Hello"),
        "streaming, teed": ([*HELLO, HOLD], ["--tee", "text.txt"], "Hello", "Hello"),
        "playing a burst": (
            words_of("Hello" + " world" * 99),
            ["--typewriter", 10],
            "Hel",
            "Hel.*",
        ),
        "before a retry": (
            [head(503, retry_after=50)],
            ["--retries", 1],
            "retry",
            "retry 1 of 1.*",
        ),
    },
)
def test_ctrl_c_ends_at_once_and_leaves_what_had_arrived(
    serve, command, script, arguments, until, shown
):
    server = serve(script)
    live = command.start("Hi", *arguments, terminal=ALL, **base(server)).until(until)
    assert live.interrupt().end().status == 130
    assert live.pressed < CLOSES and server.all_closed()
    assert re.fullmatch(shown, "".join(screen(live.seen)).replace("^C", ""))
    assert "--tee" not in arguments or (command.folder / "text.txt").read_bytes() == b"Hello"


def test_ctrl_c_in_the_demo_ends_at_once(command):
    live = command.start("--typewriter", 10, terminal=ALL).until("Hello!")
    assert live.interrupt().end().status == 130
    assert live.pressed < CLOSES and "finish" not in live.seen.decode()


@posix
def test_interrupt_in_pipes_leaves_what_had_arrived(serve, command):
    server = serve([head(), sse(chunk("Hello")), HOLD])
    live = command.start("Hi", **base(server)).until("Hello")
    status, out, err = live.interrupt(key=False).end()
    assert (status, out.rstrip("\n"), err) == (130, "Hello", "")
    assert live.pressed < CLOSES and server.all_closed()


# ---- The README ---------------------------------------------------------------------------------

MANUAL = FIXTURES.with_name("README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", MANUAL, re.MULTILINE | re.DOTALL)
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", MANUAL, re.MULTILINE))
EXAMPLE = BLOCKS[0][1]
RECIPES = dict(
    re.findall(r"^### ([^\n]+)\n```python\n(.*?)^```$", MANUAL, re.MULTILINE | re.DOTALL)
)
API = re.search(r"^```python\n(.*?)^```$", SECTIONS["API"], re.MULTILINE | re.DOTALL)[1]
ROWS = re.findall(r"^\| (.+) \| `(\w+)` \| (.*?) ?\| (.+) \|$", SECTIONS["API"], re.MULTILINE)


def test_readme_is_short_and_has_its_parts_in_order():
    assert len(MANUAL.splitlines()) <= 200
    parts = ["Copy it", "What it promises", "What it does not do", "API", "Recipes", "Command line"]
    parts += ["Tested with", "Compared with", "Vendoring, upgrading, tests, licence"]
    assert list(SECTIONS) == parts
    assert not re.search(r"/(work|tmp|root|home)\b|shared/", MANUAL)  # as on one machine only


def test_tests_that_the_readme_names_exist():
    sources = pathlib.Path(__file__).read_text("utf-8")
    named = re.findall(r"`(test_\w+)`", MANUAL)
    assert {*named} - {*re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE)} == set()
    promises = SECTIONS["What it promises"].strip().splitlines()
    assert promises and all(re.search(r"`test_\w+`", line) for line in promises)


def test_each_limit_has_its_reason_and_what_to_use_instead():
    limits = SECTIONS["What it does not do"].strip().splitlines()
    assert limits
    form = r"- It does not [^.]+, because [^.]+\. Use .+\."
    assert [line for line in limits if not re.fullmatch(form, line)] == []


def test_api_of_the_readme_is_that_of_the_module():
    signatures = re.findall(r"^(\w+)(\(.*?\))(?:  #[^\n]*)?$", API, re.MULTILINE | re.DOTALL)
    told = {name: re.sub(r"\s+", " ", text) for name, text in signatures}
    assert told["chat_deltas"] == "(payload, base, key=None, *, ...)"
    options = SIGNATURES["chat_stream"].partition("*, ")[2]
    told["chat_deltas"] = told["chat_deltas"].replace("...)", options)
    assert told == SIGNATURES
    errors = [name for _, name, _, _ in ROWS]
    assert sorted([*told, *errors]) == sorted(cs.__all__)


def test_result_of_the_readme_has_the_members_of_a_result(serve):
    shown = ast.literal_eval(API[API.index("\n{") + 1 :])
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    server = serve([head(), sse(chunk("x", "stop", tool_calls=calls)), DONE])
    result = cs.chat_stream(PAYLOAD, server.url)
    assert set(shown) == set(result)
    (choice,) = result["choices"].values()
    assert set(list(shown)[: len(choice)]) == set(choice) and list(shown)[len(choice)] == "choices"
    assert set(shown["tool_calls"][0]) == set(result["tool_calls"][0])
    assert set(shown["timing"]) == set(result["timing"])


def test_limits_of_the_readme_are_the_constants_of_the_module():
    told = re.findall(r"`([A-Z]{3,}_[A-Z_]+)`", SECTIONS["API"])
    assert sorted(told) == sorted(re.findall(r"^([A-Z][A-Z_]+) = ", SOURCE, re.MULTILINE))


@pytest.mark.parametrize(("error", "carried"), [(row[1], row[2]) for row in ROWS])
def test_error_of_the_readme_carries_what_it_says(error, carried):
    own = {name for name in vars(getattr(cs, error)) if not name.startswith("_")}
    assert own == set(re.findall(r"`\.(\w+)`", carried))


def test_status_is_sent_again_where_the_readme_says(serve):
    again = next(row[3] for row in ROWS if row[1] == "HTTPStatusError").partition(" yes")[0]
    told = {int(text) for text in re.findall(r"\b\d{3}\b", again)}
    assert "5xx" in again
    server = serve([])
    for status in sorted(told.union(status for status in http.client.responses if status >= 300)):
        server.play([head(status, retry_after="0")])
        with pytest.raises(cs.HTTPStatusError):
            cs.chat_stream(PAYLOAD, server.url, retries=1)
        assert len(server.requests) == 1 + (status in told or status >= 500), status


def test_oldest_python_of_the_readme_can_read_the_file():
    major, minor = re.search(r"Python (\d+)\.(\d+) to ", MANUAL).groups()
    ast.parse(SOURCE, feature_version=(int(major), int(minor)))


def test_servers_of_the_readme_are_those_of_the_fixtures():
    rows = re.findall(r"^\| (\S+)\.http \| (\w+) \| ([^|]+) \|", readme(), re.MULTILINE)
    text = SECTIONS["Tested with"]
    shown = dict(re.findall(r"(?:^|\. )([^:`]+ [^:`]+): `([\w-]+-)\*`", text, re.MULTILINE))
    (made,) = [server for server, prefix in shown.items() if prefix == "made-"]
    prefixes = [shown[server] for server in shown if server != made]
    assert [name for name in RECORDINGS if not name.startswith((*prefixes, "made-"))] == []
    for server in shown.keys() - {made}:
        versions = [version for name, _, version in rows if name.startswith(shown[server])]
        assert versions and all(version.startswith(server) for version in versions), server
    assert {kind for name, kind, _ in rows if name.startswith(tuple(prefixes))} == {"recorded"}
    assert {kind for name, kind, _ in rows if name.startswith("made-")} == {"made"}


def test_commands_of_the_readme_are_there_to_be_run_as_they_stand(demos):
    first, second = next(text for kind, text in BLOCKS if kind == "sh").splitlines()
    assert first == "python3 chat_stream.py"
    assert [line for line in MANUAL.splitlines() if "pytest -q" in line] == [second]
    assert second.startswith("python3 -m venv .venv && ")
    demo = demos["plain"][0]
    assert demo.status == 0 and "Hello!" in demo.out
    text = FIXTURES.with_name(".ci").joinpath("run").read_text("utf-8")
    assert second in text or re.search("grep .*'pytest -q' README.md", text)


# ---- What the README shows of the command line --------------------------------------------------

#: What differs from run to run and from system to system.
MASKS = [(r"\d+\.\d+ s\b", "# s"), (r"\d+ reads", "# reads"), (r":\d{4,5}/", ":#/")]
MASKS += [(r"\w+Error\(.*?\)", "Error(#)")]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def manual_env(**more):
    """The tester's environment, but for what would make a difference."""
    kept = {n: v for n, v in os.environ.items() if not re.match("OPENAI_|PYTHON|(?i:.*_proxy)", n)}
    return {**kept, "PYTHONUTF8": "1", **more}


def run_python(folder, *arguments, **env):
    """Run Python beside a copy of the module; return the process, stderr being in its stdout."""
    shutil.copy(cs.__file__, folder / "chat_stream.py")
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env=manual_env(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=HANG,
        check=False,
    )


def masked(text):
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text


def test_command_line_prints_what_the_readme_shows(tmp_path):
    session = next(text for kind, text in BLOCKS if kind == "console")
    runs = re.findall(r"^\$ python3 (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE)
    statuses = []
    for command, shown in runs:
        command = command.replace(":8080/", f":{free_port()}/")  # where nobody listens
        done = run_python(tmp_path, *shlex.split(command))
        pattern = re.escape(masked(shown)).replace(re.escape("...\n"), "(?:.*\n)+")
        assert re.fullmatch(pattern, masked(done.stdout)), done.stdout
        statuses.append(done.returncode)
    assert statuses == [0, 0, 1]


@posix
def test_a_prompt_is_not_waited_for_on_a_terminal(serve, command):
    server = serve(OK)
    live = command.start(terminal=("stdin",), **base(server))
    ran = live.end()
    assert ran.status == 0 and ran.out == "ok\n"
    assert server.requests[0].json()["messages"][0]["content"]


def test_demo_does_not_wait_for_a_prompt(command):
    line = command.line([], {})
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(line, cwd=command.folder, env=command.env({}), **options) as child:
        assert child.wait(HANG) == 0  # with its standard input open


def test_key_alone_asks_openai(serve, command):
    proxy = serve().url.removesuffix("/v1")
    ran = command("Hi", OPENAI_API_KEY=KEY, HTTPS_PROXY=proxy)
    assert ran.status == 1 and "[https://api.openai.com:443/v1/chat/completions]" in ran.err


def test_what_the_demo_proves_is_said_of_the_demo_alone(serve, command):
    weather = [call(name="get_weather", arguments='{"city": "北京"}')]
    server = serve([head(), sse(chunk("🚀", tool_calls=weather), chunk(finish="stop")), DONE])
    ran = command("Hi", **base(server))
    assert ran.status == 0 and ran.err.splitlines()[-1].startswith("finish: ")


def test_exit_statuses_of_the_readme_are_those_of_the_help(serve, tmp_path):
    told = SECTIONS["Command line"].partition("Exit status: ")[2]
    shown = run_python(tmp_path, "chat_stream.py", "--help").stdout.partition("Exit status: ")[2]
    assert re.findall(r"\d+", told) == re.findall(r"\d+", shown) == ["0", "1", "2", "3", "130"]
    server = serve([head(), sse(chunk("x", "length")), DONE])
    assert run_python(tmp_path, "chat_stream.py", OPENAI_BASE_URL=server.url).returncode == 3
    assert run_python(tmp_path, "chat_stream.py", "--nonsense").returncode == 2


# ---- What the README has people paste -----------------------------------------------------------


def script(name):
    """A recipe behind the first lines of the example, as its text says."""
    if name == "the example":
        return EXAMPLE
    assert "go on from its first lines, down to `payload`." in SECTIONS["Recipes"]
    lines = re.match(r".*?^payload = .*?$", EXAMPLE, re.MULTILINE | re.DOTALL)[0]
    return f"{lines}\n{RECIPES[name]}"


def run_recipe(name, server, folder, **env):
    folder.joinpath("recipe.py").write_text(script(name), "utf-8")
    env = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": KEY, **env}
    done = run_python(folder, "recipe.py", **env)
    assert all(request.headers["Authorization"] == f"Bearer {KEY}" for request in server.requests)
    return done


def whole_answer(*texts):
    """A script: a whole answer in these pieces."""
    return [head(x_request_id="req-1"), *words_of(*texts)[1:]]


def asked_for(server):
    """The messages of each request."""
    return [request.json()["messages"] for request in server.requests]


def test_recipes_are_all_run():
    tests = pathlib.Path(__file__).read_text("utf-8")
    assert len(RECIPES) == 6
    assert [name for name in RECIPES if f'"{name}"' not in tests] == []
    assert len([kind for kind, _ in BLOCKS if kind == "python"]) == len(RECIPES) + 2


def test_example_prints_the_answer_as_it_comes(serve, tmp_path):
    server = serve(whole_answer("Be", "cause, 你好"))
    done = run_recipe("the example", server, tmp_path)
    assert (done.stdout, done.returncode) == ("Because, 你好", 0)
    assert asked_for(server) == [[{"role": "user", "content": "Why is the sky blue?"}]]


def test_example_says_what_went_wrong_in_one_line(serve, tmp_path):
    done = run_recipe("the example", serve([head(), sse(chunk("Be"))]), tmp_path)
    text, error = done.stdout.splitlines()
    assert text == "Be" and "[DONE]" in error and done.returncode == 1


def tool_call(arguments):
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"index": 0, "id": "call_1", "type": "function", "function": function}]
    return [head(), sse(chunk(tool_calls=calls), chunk(finish="tool_calls")), DONE]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"city": "北京"}', "It rains in 北京."),
        ('{"city": "北', "error: "),
        ('{"town": "北京"}', "error: "),
    ],
)
def test_recipe_of_the_tool_loop_calls_and_goes_on(serve, tmp_path, arguments, words):
    server = serve(tool_call(arguments), whole_answer("Yes."))
    done = run_recipe("A tool loop", server, tmp_path)
    assert (done.stdout, done.returncode) == ("Yes.", 0)
    before, after = asked_for(server)
    assert len(before) == 1 and after[:1] == before
    assert after[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert after[2]["role"] == "tool" and after[2]["tool_call_id"] == "call_1"
    assert after[2]["content"].startswith(words)
    assert server.requests[0].json()["tools"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("sample", ["0", "1"])
def test_recipe_of_the_log_keeps_ids_and_a_sample_of_the_texts(serve, tmp_path, sample):
    name, server = "Tee to a log, with a request id, sampled", serve(whole_answer("Be", "cause"))
    assert run_recipe(name, server, tmp_path, LOG_SAMPLE=sample).stdout == "Because"
    lines = tmp_path.joinpath("chat.log").read_text("utf-8").splitlines()
    ids = {line.split(":", 2)[2].split()[0] for line in lines}
    assert ids == {server.requests[0].headers["X-Request-Id"]}
    texts = [line.split()[-1] for line in lines if " content " in line]
    assert texts == ["'Be'", "'cause'"] * int(sample)
    assert lines[-1].endswith("stop, at the server req-1")


def test_recipe_of_the_log_keeps_the_error(serve, tmp_path):
    name, server = "Tee to a log, with a request id, sampled", serve([head(401)])
    run_recipe(name, server, tmp_path)
    (line,) = tmp_path.joinpath("chat.log").read_text("utf-8").splitlines()
    assert server.requests[0].headers["X-Request-Id"] in line and "HTTP 401" in line


def test_recipe_that_asks_again_keeps_what_had_arrived(serve, tmp_path):
    cut = [head(), sse(chunk(" lived"))]
    server = serve([head()], [head(), sse(chunk("Once"))], cut, whole_answer("a king"))
    done = run_recipe("Keep the partial and ask again", server, tmp_path)
    assert (done.stdout, done.returncode) == ("Once lived", 0)  # after three it is enough
    nothing, first, second = asked_for(server)
    assert first == nothing
    assert second[1] == {"role": "assistant", "content": "Once"}
    assert second[2]["role"] == "user"
    server.play(cut, whole_answer(" a king"))
    assert run_recipe("Keep the partial and ask again", server, tmp_path).stdout == " lived a king"
    assert len(server.requests) == 2


def test_recipe_of_threads_streams_at_the_same_time(serve, tmp_path):
    together = threading.Event()
    wait = [together, *whole_answer("blue"[:2], "ue")]
    server = serve(wait, wait, [together, head(404)])
    met = []

    def open_the_gate():
        met.append(server.asked(3, HANG / 2))
        together.set()

    threading.Thread(target=open_the_gate).start()
    done = run_recipe("Many streams in threads", server, tmp_path)
    assert met == [True]
    lines = sorted(line.partition(" - ") for line in done.stdout.splitlines())
    assert [line[0] for line in lines] == ["grass green", "snow white", "the sky blue"]
    answers = sorted(line[2] for line in lines)
    assert answers[0].startswith("HTTP 404") and answers[1:] == ["blue", "blue"]


RESPONSES = RECORDINGS["made-responses-api"]


def test_recipe_of_the_responses_api_prints_the_text(serve, tmp_path):
    server = serve([RESPONSES, HOLD])
    done = run_recipe("The Responses API", server, tmp_path)
    assert (done.stdout, done.returncode) == ("你好, world", 0)
    assert server.requests[0].path == "/v1/responses" and server.requests[0].json()["stream"]


@pytest.mark.parametrize("end", [b"event: response.completed", b"event: response.created"])
def test_recipe_of_the_responses_api_tells_a_cut(serve, tmp_path, end):
    body = RESPONSES.partition(b"\r\n\r\n")[2]
    done = run_recipe("The Responses API", serve([head(), body.partition(end)[0]]), tmp_path)
    assert done.stdout.endswith("not complete\n") and done.returncode == 1


@pytest.fixture
def relay(tmp_path):
    """relay(server) starts that recipe before a server, and returns its port."""
    started = []

    def start(server):
        shutil.copy(cs.__file__, tmp_path / "chat_stream.py")
        tmp_path.joinpath("recipe.py").write_text(
            script("Relay to a browser, at http://127.0.0.1:8000/"), "utf-8"
        )
        port = free_port()
        env = manual_env(OPENAI_BASE_URL=server.url, OPENAI_API_KEY=KEY, PORT=str(port))
        command = [sys.executable, "recipe.py"]
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE)
        started.append(process)
        end = time.monotonic() + HANG
        while process.poll() is None and time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return port
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise AssertionError(f"it does not listen: {process.poll()}")

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ask_relay(port, question="问?"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.request("POST", "/", question.encode())
    return connection.getresponse()


def test_recipe_of_the_relay_shows_text_before_the_stream_has_ended(serve, relay):
    seen = threading.Event()
    thought = chunk(reasoning_content="hm")
    server = serve([head(), sse(thought, chunk("你")), seen, sse(chunk("好", "stop")), DONE])
    port = relay(server)
    response = ask_relay(port)
    assert response.getheader("Content-Type") == "text/plain; charset=utf-8"
    assert response.read1(100).decode() == "你"  # now, as the server waits for this
    seen.set()
    assert response.read().decode() == "好"
    assert asked_for(server) == [[{"role": "user", "content": "问?"}]]


def test_recipe_of_the_relay_serves_a_page_that_asks_it(serve, relay):
    connection = http.client.HTTPConnection("127.0.0.1", relay(serve([])), timeout=HANG)
    connection.request("GET", "/")
    response = connection.getresponse()
    page = response.read().decode()
    assert response.getheader("Content-Type") == "text/html; charset=utf-8"
    assert 'fetch("/", {method: "POST"' in page and "getReader()" in page and KEY not in page


def test_recipe_of_the_relay_tells_of_an_error_and_goes_on(serve, relay):
    server = serve([head(), sse(chunk("half"))], whole_answer("whole"))
    port = relay(server)
    assert ask_relay(port).read() == b"half\n[StreamInterrupted]"
    assert ask_relay(port).read() == b"whole"


def test_recipe_of_the_relay_hangs_up_when_its_reader_has_gone(serve, relay):
    many = [item for _ in range(400) for item in (sse(chunk("x" * 4096)), 0.01)]
    server = serve([head(), *many, HOLD])
    response = ask_relay(relay(server))
    assert response.read1(1) == b"x"
    response.close()
    assert server.all_closed(HANG)


# ---- The file as a file -------------------------------------------------------------------------

SOURCE = pathlib.Path(cs.__file__).read_text("utf-8")
TREE = ast.parse(SOURCE)
OPTIONS = (
    "first_byte_timeout=30.0, idle_timeout=30.0, stall_timeout=600.0, require_done=True,"
    " retries=0, headers=None, context=None, record=None"
)
SIGNATURES = {
    "chat_stream": f"(payload, base, key=None, on_delta=None, *, {OPTIONS})",
    "chat_deltas": f"(payload, base, key=None, *, {OPTIONS})",
    "sse_events": "(reads, ignored=None)",
    "typewriter": "(out=None, cps=None)",
    "Delta": "(kind, text, choice=0, call=0)",
    "Event": "(event, data, id, retry)",
}
#: Run with -I -S: no environment, no current folder, no installed package.
ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import {imports}
noted = []
sys.addaudithook(lambda name, args: noted.append(name))
import threading, vendored_copy as module
bad = {{"socket.__new__", "socket.connect", "subprocess.Popen", "urllib.Request", "os.putenv"}}
print(sorted(bad & set(noted)), threading.active_count())
print(sorted(name for name in module.__all__ if not hasattr(module, name)), module.__version__)
events = module.sse_events([b"data: {{}}", b"\\n\\n"])
print([event.data for event in events])
"""


def test_copied_alone_under_another_name_it_imports_and_does_nothing(tmp_path):
    shutil.copy(cs.__file__, tmp_path / "vendored_copy.py")
    imports = ", ".join(sorted({name for name, _ in imported()} - {"__future__"}))
    command = [sys.executable, "-I", "-S", "-B", "-W", "error", "-c", ALONE.format(imports=imports)]
    run = subprocess.run(
        [*command, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert run.stderr == ""
    assert run.stdout.splitlines() == ["[] 1", f"[] {cs.__version__}", "['{}']"]
    assert [path.name for path in tmp_path.iterdir()] == ["vendored_copy.py"]


def imported():
    """Each module that the file imports, wherever, with the name it is used by."""
    for node in ast.walk(TREE):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from ((node.module, alias.asname or alias.name) for alias in node.names)


def test_version_and_public_names_are_literal():
    literal = {}
    for node in TREE.body:
        if isinstance(node, ast.Assign) and node.targets[0].id in ("__all__", "__version__"):
            literal[node.targets[0].id] = ast.literal_eval(node.value)
    assert re.fullmatch(r"\d+\.\d+\.\d+", literal["__version__"])
    assert set(literal["__all__"]) == set(SIGNATURES) | {
        "ChatStreamError",
        *(error.__name__ for error in ERRORS),
    }


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_as_promised(name):
    signature = inspect.signature(getattr(cs, name))
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_no_private_attribute_of_the_standard_library_is_used():
    foreign = (http.client, socket, socketserver, json.decoder, ssl, urllib.request)
    private = set()
    for module in foreign:
        private |= set(re.findall(r"\.(_[a-z]\w*)", inspect.getsource(module)))
    used = {node.attr for node in ast.walk(TREE) if isinstance(node, ast.Attribute)}
    used |= {node.value for node in ast.walk(TREE) if type(node) is ast.Constant}
    assert len(private) > 50 and used & private == set()


# ---- A small benchmark --------------------------------------------------------------------------


def clocked(work):
    """The best of three, in seconds."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def ask_quietly(script):
    server = Server(script)
    try:
        return clocked(lambda: cs.chat_stream(PAYLOAD, server.url, KEY))
    finally:
        server.stop()


def main():
    """Print how long the steps take, next to json.loads of the same payloads alone."""
    count = 20000
    texts = [json.dumps(chunk(f" word{number}")) for number in range(count)]
    body = sse(*texts)
    reads = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    single = [body[at : at + 1] for at in range(len(body) // 10)]
    events = [sse(text) for text in texts]
    huge = sse(chunk("x" * (8 << 20)))
    floor = clocked(lambda: [json.loads(text) for text in texts])
    huge_floor = clocked(lambda: json.loads(huge[6:]))
    rows = [
        (f"json.loads alone, {count} events", floor, count, floor),
        ("sse_events, 64 KiB reads", clocked(lambda: [*cs.sse_events(reads)]), count, floor),
        ("sse_events, an event a read", clocked(lambda: [*cs.sse_events(events)]), count, floor),
        (
            "sse_events, a byte a read",
            clocked(lambda: [*cs.sse_events(single)]),
            count / 10,
            floor / 10,
        ),
        ("chat_stream, 64 KiB writes", ask_quietly([head(), *reads, DONE]), count, floor),
        ("json.loads alone, one event of 8 MiB", huge_floor, 1, huge_floor),
        ("chat_stream, one event of 8 MiB", ask_quietly([head(), huge, DONE]), 1, huge_floor),
    ]
    print(f"{'':40} {'seconds':>8} {'events/s':>10} {'ratio':>6}")
    for name, seconds, number, base in rows:
        print(f"{name:40} {seconds:8.3f} {number / seconds:10.0f} {seconds / base:6.2f}")


if __name__ == "__main__":
    main()
