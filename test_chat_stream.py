# SPDX-License-Identifier: MIT
# SPDX-FileCopyrightText: 2026 The chat_stream authors
"""Tests of chat_stream: bytes on a real loopback socket in, a result or an error out.

In reading order: a server that sends raw bytes from a script; builders of such bytes; ask(), which
calls chat_stream and checks what holds always; then the tests, in the order of the module: the
parser, the recordings in fixtures/, streams cut at every byte, fuzz, and the file as a file.
Nothing is mocked and nothing sleeps to be in time: where a test depends on an order of events,
its server waits for one. Everything random is seeded, and a failure shows the seed.

    python -m pytest -q            the tests
    python test_chat_stream.py     a small benchmark
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import http.client
import http.server
import inspect
import io
import itertools
import json
import pathlib
import pickle
import random
import re
import shutil
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import threading
import time
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
    headers: http.client.HTTPMessage
    body: bytes
    at: float

    def json(self):
        return json.loads(self.body)


#: In a script: keep the connection open until the client closes it.
HOLD = "hold"
#: In a script: reset the connection; what the client has not read may be lost with it.
RESET = "reset"


class Server(http.server.ThreadingHTTPServer):
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
        self.connections, self.failures = [], []
        self.play(*scripts)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)  # HTTPServer would ask the DNS for its name

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
        super().process_request(request, client_address)

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

    def stop(self):
        self.stopping.set()
        self.shutdown()
        for item in itertools.chain(*self.scripts):
            if isinstance(item, threading.Event):
                item.set()
        with self.change:
            for connection in self.connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # closed already
        self.server_close()
        assert not self.failures


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection of the Server: reads one request, sends one script."""

    disable_nagle_algorithm = True
    timeout = HANG

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, self.headers, body, time.monotonic())
        self.close_connection = True
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

    do_GET = do_POST  # a redirect that is followed would come as GET

    def wait_for_close(self):
        while self.connection.recv(4096):
            pass

    def reset(self):
        linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.rfile.close()  # which shares the socket: only the last one to close it closes it
        self.connection.close()

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """serve(*scripts) starts a Server; all of them are stopped at the end of the test."""
    servers = []

    def start(*scripts):
        servers.append(Server(*scripts))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


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
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error) and str(twin) == text
        assert repr(vars(twin)) == repr(vars(error))  # not ==, as a NaN may stand in them


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
    "bom-only-the-first-of-two": (
        BOM * 2 + b"data: a\n\ndata: b\n\n",
        [message("b")],
        [BOM + b"data: a"],
    ),
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
    "unknown-field-between-events": (
        b"data: a\n\nx: y\n\ndata: b\n\n",
        [*map(message, "ab")],
        [b"x: y"],
    ),
    "bare-json-line": (b'{"error": "x"}\n\n', [], [b'{"error": "x"}']),
    "null-character": (b"data:\0\n\n\n\n", [message("\0")], []),
    "utf-8": ("data: ok…é你😀\n\n".encode(), [message("ok…é你😀")], []),
    # event
    "event-name": (
        b"event: t\ndata: a\n\ndata: b\n\n",
        [message("a", event="t"), message("b")],
        [],
    ),
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
    pieces = [b": ping\n", b"event: t\n", b"id: 1\n", b"\n"] * LIMIT + [b"data: a\n\n"]
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


# ---- The recordings -----------------------------------------------------------------------------

FIXTURES = pathlib.Path(__file__).with_name("fixtures")
RECORDINGS = {path.stem: path.read_bytes() for path in sorted(FIXTURES.glob("*.http"))}
TWINS = {path.stem: json.loads(path.read_bytes()) for path in sorted(FIXTURES.glob("*.json"))}
ASKED = [name for name, twin in TWINS.items() if "call" in twin]
PARSED = [name for name, twin in TWINS.items() if "events" in twin]


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


@pytest.mark.parametrize("name", PARSED)
def test_recorded_events_are_those_of_the_twin_however_cut(name):
    want = [cs.Event(**event) for event in TWINS[name]["events"]]
    for how, pieces in ways(unframed(RECORDINGS[name])[2]):
        assert parsed(pieces)[0] == want, how


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
GZIPPED = "nginx-gzip-cn"
ANSWERED = [
    name
    for name in ASKED
    if TWINS[name]["raises"] is None and TWINS[name]["result"]["streamed"] and name != GZIPPED
]
FRAMINGS = ["close", "chunk", "reset", "length", "chunks"]
#: All the bytes of these, the first in three framings; of the others a sample.
EVERY_BYTE = ["made-no-space", "made-cr", "made-surrogates"]


def ask_cut(server, header, body, cut, framing):
    """Ask for a body that ends too early, in one of the FRAMINGS."""
    part, read = body[:cut], Record(cut)
    server.play(
        {
            "close": [header(), part],
            "chunk": [header(transfer_encoding="chunked"), b"%x\r\n" % (len(body) + 1), part],
            "chunks": [header(transfer_encoding="chunked"), *chunked([part])],
            "length": [header(content_length=len(body) + 1), part],
            "reset": [header(), part, read.full, RESET],
        }[framing]
    )
    return ask(server, record=read)


def cuts(body, rng):
    """Where to cut: at each byte around [DONE], at some around line ends, and at some others."""
    ends = [m.start() + shift for m in re.finditer(rb"[\r\n]+", body) for shift in range(-1, 4)]
    done = body.rfind(b"[DONE]")
    near = range(done - 8, done + 10) if done > 0 else ()
    some = [*rng.choices(ends, k=12), *rng.choices(range(len(body)), k=6), *near, len(body)]
    return sorted({cut for cut in some if 0 < cut <= len(body)})


def blocks(body):
    """An independent reading of a stream: the data lines of each event, the last one unfinished.

    It is as naive as can be, with the whole body in hand.
    """
    text = body.decode("utf-8", "ignore").removeprefix("\ufeff")
    for block in re.sub("\r\n?", "\n", text).split("\n\n"):
        yield [line[5:].removeprefix(" ") for line in block.split("\n") if line[:5] == "data:"]


def is_done(body):
    return any(lines and lines[-1] == "[DONE]" for lines in blocks(body))


def spoken(body):
    """The texts that a stream cut here has given, as joined() has them."""
    texts = {}
    *events, _ = blocks(body)
    for lines in itertools.takewhile(lambda lines: lines != ["[DONE]"], filter(None, events)):
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


def told(server, known, body):
    """What spoken() says, for an odd stream: what its complete events say with [DONE] behind."""
    events = body + b"\n\n" if is_done(body) else b"".join(body.rpartition(b"\n\n")[:2])
    if events not in known:
        server.play([head(), events, DONE])
        known[events] = joined(ask(server).deltas)
    return known[events]


def check_cut(outcome, texts, done, where):
    """A complete prefix and StreamInterrupted, or the whole answer where [DONE] was in."""
    assert joined(outcome.deltas) == texts, where
    if done:
        assert outcome.error is None, where
    else:
        assert type(outcome.error) is cs.StreamInterrupted, where


def test_streams_to_cut_are_found():
    assert len(ANSWERED) > 30 and set(ANSWERED) >= ODD | set(EVERY_BYTE)
    whole = [name for name in ANSWERED if is_done(unframed(RECORDINGS[name])[2])]
    assert len(whole) > 30


@pytest.mark.parametrize("name", ANSWERED)
def test_stream_cut_anywhere_is_a_prefix_and_an_interruption(name, serve):
    server, known = serve([]), {}
    body = unframed(RECORDINGS[name])[2]
    every = name in EVERY_BYTE
    for cut in range(1, len(body) + 1) if every else cuts(body, random.Random(name)):
        part = body[:cut]
        texts = told(server, known, part) if name in ODD else spoken(part)
        for framing in FRAMINGS[:3] if name == EVERY_BYTE[0] else [FRAMINGS[cut % len(FRAMINGS)]]:
            outcome = ask_cut(server, head, body, cut, framing)
            check_cut(outcome, texts, is_done(part), f"{framing}, cut at {cut}")


def test_gzip_stream_cut_anywhere_is_a_prefix_and_an_interruption(serve):
    server = serve([])
    body = unframed(RECORDINGS[GZIPPED])[2]
    for cut in range(1, len(body) + 1):
        part = zlib.decompressobj(wbits=31).decompress(body[:cut])
        server.play([head(content_encoding="gzip"), body[:cut]])
        check_cut(ask(server), spoken(part), is_done(part), f"cut at {cut}")


def test_json_completion_cut_anywhere_is_an_interruption(serve):
    server = serve([])
    body = unframed(RECORDINGS["transformers-whole"])[2].rstrip()
    json_head = functools.partial(head, content_type="application/json")
    for cut in range(1, len(body)):
        for framing in {"close", FRAMINGS[cut % len(FRAMINGS)]}:
            outcome = ask_cut(server, json_head, body, cut, framing)
            check_cut(outcome, {}, False, f"{framing}, cut at {cut}")


# ---- Fuzz ---------------------------------------------------------------------------------------

#: How many recordings to damage, and half as many as streams to make up.
ROUNDS = 400
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


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (cs.ConnectError, ConnectionError),
        (cs.HTTPStatusError, cs.ChatStreamError),
        (cs.ServerError, cs.ChatStreamError),
        (cs.ProtocolError, ValueError),
        (cs.StreamInterrupted, ConnectionError),
        (cs.StreamTimeout, TimeoutError),
    ],
)
def test_errors_are_also_what_the_standard_library_would_raise(error, also):
    assert issubclass(error, cs.ChatStreamError) and issubclass(error, also)


def test_no_private_attribute_of_the_standard_library_is_used():
    foreign = (http.client, http.server, socket, socketserver, json.decoder, ssl, urllib.request)
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
