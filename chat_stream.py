# SPDX-License-Identifier: MIT
# SPDX-FileCopyrightText: 2026 The chat_stream authors
"""Stream chat completions from any OpenAI-compatible server: one file, standard library only.

    from chat_stream import chat_stream, typewriter

    payload = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hello!"}]}
    result = chat_stream(payload, "https://api.openai.com/v1", key, typewriter())
    payload["messages"].append(result["message"])

It promises: the whole answer, or an error that says what went wrong and holds what had arrived.
A stream that ends before its [DONE] is an error. Bytes become the same events however they are
cut. No redirect is followed, and the key stands in no message. Memory is bounded.

It does not reconnect (nothing on this wire can be resumed), pool connections, run under asyncio,
repair JSON, or validate a tool call's arguments.

To vendor it, copy this file and nothing else; it works under any name and states __version__.
To upgrade it, copy the newer file over it; change nothing in it, so that you can.
"""

from __future__ import annotations

import contextlib
import email.utils
import html
import http.client
import io
import ipaddress
import itertools
import json
import logging
import random
import re
import socket
import ssl
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, TextIO
from urllib.parse import quote, urljoin, urlsplit

__all__ = (
    "ChatStreamError",
    "ConnectError",
    "Delta",
    "Event",
    "HTTPStatusError",
    "ProtocolError",
    "ServerError",
    "StreamInterrupted",
    "StreamTimeout",
    "chat_deltas",
    "chat_stream",
    "sse_events",
    "typewriter",
)
__version__ = "1.0.0"

#: Bytes of one event, or of one JSON answer: room for a base64 image, an end to an endless line.
MAX_EVENT_BYTES = 64 * 1024 * 1024
#: Bytes kept of an error's body or of an unparsed tail: an error page is for people to read.
MAX_BODY_BYTES = 64 * 1024
#: Characters of an error's message: one line of a log.
MAX_MESSAGE_CHARS = 2000
#: Seconds that a Retry-After may make a retry wait: longer is the caller's decision.
MAX_RETRY_WAIT = 60.0
#: Seconds that one wait may be set to, infinity included: sockets refuse more than 24 days.
MAX_SECONDS = 86400.0
#: Bytes asked of one read1, and taken of one inflated piece: what a fast network fills.
READ_BYTES = 64 * 1024

_log = logging.getLogger("chat_stream")


class Delta(NamedTuple):
    """One piece of the answer, as it arrived."""

    kind: str  #: "content", "reasoning", "refusal", "tool_name" or "tool_arguments"
    text: str  #: never empty
    choice: int = 0  #: choices[].index
    call: int = 0  #: the tool call's key in result["tool_calls"]; 0 for the other kinds


class Event(NamedTuple):
    """One dispatched server-sent event."""

    event: str  #: "message" unless named
    data: str
    id: str  #: the last event id in force, "" if there was none
    retry: int | None  #: milliseconds, if this event carried it


class ChatStreamError(Exception):
    """Base of all that chat_stream and chat_deltas raise once the arguments are found good.

    ChatStreamError
    ├─ ConnectError       no response: refused, DNS, TLS, proxy, closed before headers, not HTTP
    ├─ HTTPStatusError    a status other than 2xx, redirects too
    ├─ ServerError        the server reported a failure inside a 200
    ├─ ProtocolError      what came is no answer: bad UTF-8, bad JSON, too large, a web page
    ├─ StreamInterrupted  the stream ended before its [DONE]
    └─ StreamTimeout      the server fell silent

    Any other exception that escapes is a bug. The original is the __cause__. Messages are one line
    for people, not API: test the class and the attributes. Errors pickle and copy.
    """

    #: A result, as chat_stream returns it, of what had arrived; None outside of a call.
    partial: dict[str, Any] | None = None
    #: The URL that was asked.
    url: str = ""
    #: The server's x-request-id (or request-id), for its support.
    request_id: str | None = None

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)


class ConnectError(ChatStreamError, ConnectionError):
    """There was no response: refused, DNS, TLS, proxy, closed before the headers, not HTTP."""


class HTTPStatusError(ChatStreamError):
    """The status was not 2xx."""

    status: int = 0
    #: The body as text, at most MAX_BODY_BYTES of it.
    body: str = ""
    #: Seconds that the server's Retry-After asks for, or None.
    retry_after: float | None = None


class ServerError(ChatStreamError):
    """The server reported a failure inside a 200, as JSON or in the stream."""

    #: The error as sent: mostly a dict or a text.
    error: Any = None


class ProtocolError(ChatStreamError, ValueError):
    """What came cannot be an answer: bad UTF-8, bad JSON, too large, neither events nor JSON."""


class StreamInterrupted(ChatStreamError, ConnectionError):
    """The answer ended before its [DONE]: EOF, reset, an incomplete chunk, cut JSON."""

    #: The bytes that could not be parsed any more, at most MAX_BODY_BYTES.
    tail: bytes = b""


class StreamTimeout(ChatStreamError, TimeoutError):
    """The server was silent for too long."""

    #: "first byte", "idle" or "stall": raise the timeout of that name.
    phase: str = ""


# ---- The public calls ---------------------------------------------------------------------------


def chat_stream(
    payload: Mapping[str, Any],
    base: str,
    key: str | None = None,
    on_delta: Callable[[Delta], object] | None = None,
    *,
    first_byte_timeout: float = 30.0,
    idle_timeout: float = 30.0,
    stall_timeout: float = 600.0,
    require_done: bool = True,
    retries: int = 0,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
    record: BinaryIO | None = None,
) -> dict[str, Any]:
    """Ask for a chat completion, stream it, and return the whole answer.

    payload: the request as the API defines it; "stream" and "stream_options" are added to a copy.
    base: "https://host/v1", as people paste it.
    key: sent as "Authorization: Bearer KEY"; None or "" sends none.
    on_delta: called with each Delta, in the read that completed it. What it raises passes through
        untouched, with the connection closed.
    first_byte_timeout: seconds that any wait may take until the response headers are in.
    idle_timeout: seconds without a byte after that.
    stall_timeout: seconds without a data event, while comments or fragments keep coming.
    require_done: False takes EOF or silence for the end once every choice has its finish_reason.
    retries: how often to try again before the stream has begun: no connection, 408, 409, 429, 5xx.
    headers: added to the request's own, or in place of them.
    context: for TLS; by default certificates are verified.
    record: a binary file that gets every byte of the body, as received.

    Returns a dict: content, reasoning, refusal, tool_calls, finish and message of choice 0, all
    choices by index in "choices", and usage, id, model, request_id, streamed, timing (seconds).

    Raises TypeError or ValueError before any I/O if an argument is wrong, else ChatStreamError.
    """
    deltas = chat_deltas(
        payload,
        base,
        key,
        first_byte_timeout=first_byte_timeout,
        idle_timeout=idle_timeout,
        stall_timeout=stall_timeout,
        require_done=require_done,
        retries=retries,
        headers=headers,
        context=context,
        record=record,
    )
    with contextlib.closing(deltas):
        while True:
            try:
                delta = next(deltas)
            except StopIteration as end:
                result: dict[str, Any] = end.value
                return result
            if on_delta is not None:
                on_delta(delta)


def chat_deltas(
    payload: Mapping[str, Any],
    base: str,
    key: str | None = None,
    *,
    first_byte_timeout: float = 30.0,
    idle_timeout: float = 30.0,
    stall_timeout: float = 600.0,
    require_done: bool = True,
    retries: int = 0,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
    record: BinaryIO | None = None,
) -> Generator[Delta, None, dict[str, Any]]:
    """Yield the Deltas of a chat completion; the generator's return value is the result.

    For callers who want a loop. close() closes the connection at once. Arguments, result and
    errors are those of chat_stream; the arguments are checked now, the rest starts at next().
    """
    data, data_without_options = _bodies(payload)
    call = _Call(
        url=_endpoint(base),
        headers=_headers(key, headers or {}),
        data=data,
        data_without_options=data_without_options,
        first_byte_timeout=_seconds("first_byte_timeout", first_byte_timeout),
        idle_timeout=_seconds("idle_timeout", idle_timeout),
        stall_timeout=_seconds("stall_timeout", stall_timeout),
        require_done=require_done,
        retries=retries,
        context=context,
        record=record,
    )
    return _deltas(call)


def sse_events(
    reads: Iterable[bytes], ignored: Callable[[bytes], None] | None = None
) -> Iterator[Event]:
    """Parse server-sent events from pieces of bytes of any size (WHATWG HTML 9.2.6).

    reads: the pieces, in order: read1 results, a file's blocks, single bytes.
    ignored: sees each line with an unknown field, and last the unterminated tail, as bytes.

    Yields each Event as soon as the piece that completes it is there, also after a lone CR.
    One departure from the standard: bad UTF-8 in a field is an error, not U+FFFD.

    Raises ProtocolError for bad UTF-8 and for an event of more than MAX_EVENT_BYTES; what was
    complete before it has been yielded.
    """
    data: list[str] = []
    size = 0  # bytes of the lines in data
    event, last_id, retry = "", "", None
    line_so_far = bytearray()
    at_start, after_cr = True, False
    for read in reads:
        if after_cr and read:
            read = read.removeprefix(b"\n")  # the other half of a CRLF
            after_cr = False
        if b"\r" in read:
            after_cr = read.endswith(b"\r")
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = read.rfind(b"\n")
        if end < 0:
            line_so_far += read
            _check_size(size + len(line_so_far))
            continue
        block, line_so_far = line_so_far + read[:end], bytearray(read[end + 1 :])
        if at_start:
            block, at_start = block.removeprefix(b"\xef\xbb\xbf"), False
        for line in _lines(block):
            if not line:
                if data:
                    yield Event(event or "message", "\n".join(data), last_id, retry)
                    data, size = [], 0
                event, retry = "", None
                continue
            if line.startswith("data: "):
                field, value = "data", line[6:]
            else:
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
            if field == "data":
                size += len(line) if line.isascii() else len(line.encode())
                _check_size(size)
                data.append(value)
            elif field == "event":
                event = value
            elif field == "id":
                last_id = last_id if "\0" in value else value
            elif field == "retry":
                retry = int(value) if _DIGITS.fullmatch(value) else retry
            elif field and ignored is not None:
                ignored(line.encode("utf-8", "surrogateescape"))
    if ignored is not None and (event or data or line_so_far):
        lines = [f"event: {event}\n"] if event else []
        lines += [f"data: {value}\n" for value in data]
        ignored("".join(lines).encode() + line_so_far)


def typewriter(out: TextIO | None = None, cps: float | None = None) -> Callable[[Delta], None]:
    """Make an on_delta that writes choice 0's content to out and flushes each time.

    out: a text file, standard output by default; what it cannot encode is replaced.
    cps: characters a second to play the text at, so that bursts on the network do not show.

    Raises ValueError if cps is not a positive number.
    """
    pause = 0.0 if cps is None else 1 / _seconds("cps", cps)
    due = 0.0

    def write(delta: Delta) -> None:
        nonlocal due
        if delta.kind != "content" or delta.choice != 0:
            return
        file = sys.stdout if out is None else out
        encoding = file.encoding or "utf-8"
        text = delta.text.encode(encoding, "replace").decode(encoding)
        for piece in text if pause else [text]:
            time.sleep(max(0.0, due - time.monotonic()))
            file.write(piece)
            file.flush()
            due = max(due, time.monotonic()) + pause

    return write


# ---- Arguments ----------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call whose arguments have been found good."""

    url: str
    headers: dict[str, str]
    data: bytes
    data_without_options: bytes | None
    first_byte_timeout: float
    idle_timeout: float
    stall_timeout: float
    require_done: bool
    retries: int
    context: ssl.SSLContext | None
    record: BinaryIO | None


def _bodies(payload: Mapping[str, Any]) -> tuple[bytes, bytes | None]:
    """The request's body, and one without stream_options if it is the module that added them."""
    if not isinstance(payload, Mapping):
        raise TypeError(f"payload must be a mapping, not {type(payload).__name__}")
    body = {**payload, "stream": True}
    if "stream_options" not in body:
        return _dumped({**body, "stream_options": {"include_usage": True}}), _dumped(body)
    if body["stream_options"] is None:
        del body["stream_options"]
    return _dumped(body), None


def _dumped(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("payload nests too deep for JSON") from error


def _endpoint(base: str) -> str:
    """The URL to post to, from a base as people paste it."""
    if not isinstance(base, str):
        raise TypeError(f"base must be a text, not {type(base).__name__}")
    try:
        parts = urlsplit(base.strip())
        netloc = parts.netloc.encode("idna").decode()
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or re.search(r"\s", netloc):
        raise ValueError(f"base must be like https://host/v1 or http://host:8080/v1, not {base!r}")
    if "@" in netloc:
        raise ValueError("base must not hold a user name or a password: use key or headers")
    path = parts.path.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
    path, query = (quote(part, safe="/?:@!$&'()*+,;=~%") for part in (path, parts.query))
    return f"{parts.scheme}://{netloc}{path}" + (f"?{query}" if query else "")


def _headers(key: str | None, extra: Mapping[str, str]) -> dict[str, str]:
    """The request's headers, named in the title case that urllib sends."""
    headers = {
        "Accept": "text/event-stream, application/json",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": f"chat_stream/{__version__}",  # some CDNs refuse Python-urllib: error 1010
    }
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key must be a text, not {type(key).__name__}")
    key = (key or "").strip()
    if not _HEADER_VALUE.fullmatch(key):
        raise ValueError("key cannot be a header value: it holds a line end or a non-ASCII letter")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"header {name!r} and its value must be texts")
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"header {name!r} cannot be sent: its name or its value is malformed")
        headers[name.title()] = value
    return headers


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name} must be more than 0, not {value}")
    return min(float(value), MAX_SECONDS)


# ---- One call: the steps from bytes to a result, and the one place where errors are completed -----


def _deltas(call: _Call) -> Generator[Delta, None, dict[str, Any]]:
    wire, answer = _Wire(call), _Answer()
    try:
        with _response(wire):
            done = False
            for chunk in _chunks(wire):
                if chunk is _DONE:
                    done = True
                    break
                for delta in answer.add(chunk):
                    wire.first_delta = wire.first_delta or time.monotonic()
                    yield delta
            _check_end(wire, answer, done)
        yield from answer.flush()
    except ChatStreamError as error:
        yield from answer.flush()
        _complete(error, wire, answer)
        raise
    _log.debug("complete after %d reads: %s", wire.reads, wire.shown_url)
    return _result(wire, answer)


def _check_end(wire: _Wire, answer: _Answer, done: bool) -> None:
    """Return if the answer is complete; else raise what cut it short, with all that explains it."""
    at_rest = wire.cut is None or isinstance(wire.cut, StreamTimeout)
    finished = answer.finished() and not wire.call.require_done and at_rest
    if answer.choices and (done or finished):
        return
    error = wire.cut or StreamInterrupted(f"the stream ended {'with' if done else 'before'} [DONE]")
    words = [str(error)]
    if answer.finished():
        words.append("every choice had its finish_reason, so if this server never sends [DONE],")
        words[-1] += " require_done=False will do"
    elif answer.choices:
        words.append("no finish_reason had come")
    elif answer.odd is not None:
        words.append(f"no choice came, the last payload was {_quoted(answer.odd)}")
    else:
        words.append("it was empty: no event came")
    if wire.tail:
        words.append(f"left unparsed: {_quoted(wire.tail)}")
    error.args = ("; ".join(words),)
    if isinstance(error, StreamInterrupted):
        error.tail = wire.tail[:MAX_BODY_BYTES]
    raise error


def _complete(error: ChatStreamError, wire: _Wire, answer: _Answer) -> None:
    """Give an error what the caller needs to know of the call; its message is one safe line."""
    text = _one_line(str(error))
    for name, value in wire.call.headers.items():
        secret = value.removeprefix("Bearer ")
        if _SECRET_HEADER.search(name) and secret:
            # A short key ("none", "ollama") is masked as a word, so that other words stay whole.
            pattern = re.escape(secret) if len(secret) >= 8 else rf"\b{re.escape(secret)}\b"
            text = re.sub(pattern, "***", text)
    where = f" [{wire.shown_url}]"
    if wire.request_id:
        where = f" [{wire.shown_url}, request id {wire.request_id[:100]}]"
    error.args = (text[: MAX_MESSAGE_CHARS - len(where)] + where,)
    error.url, error.request_id = wire.call.url, wire.request_id
    error.partial = _result(wire, answer)
    _log.debug("%s: %s", type(error).__name__, wire.shown_url)


def _result(wire: _Wire, answer: _Answer) -> dict[str, Any]:
    choices = {index: choice.result() for index, choice in sorted(answer.choices.items())}
    return {
        **(choices.get(0) or _Choice(0).result()),
        "usage": answer.usage,
        "choices": choices,
        "id": answer.id,
        "model": answer.model,
        "request_id": wire.request_id,
        "streamed": wire.streamed,
        "timing": wire.timing(),
    }


# ---- The wire: request, response, reads -----------------------------------------------------------


class _Wire:
    """What is known of one call's connection: its clocks, and what cut it short."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        parts = urlsplit(call.url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        # A query is not shown: some services take the key there.
        self.shown_url = f"{parts.scheme}://{parts.hostname}:{port}{parts.path}"
        self.response: _Response
        self.request_id: str | None = None
        self.streamed = True
        self.cut: ChatStreamError | None = None
        self.tail = b""
        self.start = time.monotonic()
        self.first_byte: float | None = None
        self.first_delta: float | None = None
        self.reads, self.max_gap = 0, 0.0
        self.silence = 0.0  # seconds spent in reads since the last data event

    def timing(self) -> dict[str, Any]:
        """Seconds since the call began; the longest gap is the longest wait for one read."""
        first = {
            name: None if moment is None else moment - self.start
            for name, moment in (("first_byte", self.first_byte), ("first_delta", self.first_delta))
        }
        total = time.monotonic() - self.start
        return {**first, "total": total, "reads": self.reads, "max_gap": self.max_gap}

    def body(self, idle_timeout: float, stall_timeout: float) -> Iterator[bytes]:
        """Yield what each read1 brings; at the end, .cut says if it was more than an EOF."""
        in_force = None
        while self.cut is None:
            start = time.monotonic()
            allowed = min(idle_timeout, stall_timeout - self.silence)
            try:
                if allowed != in_force:
                    in_force = allowed
                    self.response.sock.settimeout(max(allowed, 0.001))
                read = self.response.read1(READ_BYTES)
            except socket.timeout as error:
                self.cut = _timeout_in_body(allowed < idle_timeout, idle_timeout, stall_timeout)
                self.cut.__cause__ = error
                return
            except (OSError, http.client.HTTPException) as error:
                self.cut = StreamInterrupted(f"the connection broke: {_said(error)}")
                self.cut.__cause__ = error
                return
            gap = time.monotonic() - start
            self.reads += 1
            self.silence += gap
            self.max_gap = max(self.max_gap, gap)
            if not read:
                break
            if self.call.record is not None:
                self.call.record.write(read)
            yield read
        if self.cut is None and self.response.length:
            missing = f"{self.response.length} bytes short of its Content-Length"
            self.cut = StreamInterrupted(f"the body ended {missing}")

    def ignored(self, line: bytes) -> None:
        """See what sse_events ignores: it may be an error, and its last line is the tail."""
        text = line.decode("utf-8", "replace")
        name, _, value = text.partition(":")
        if name == "error" and _loaded(value):
            raise _server_error(_loaded(value))
        _raise_reported(_loaded(text))
        self.tail = line


def _timeout_in_body(stalled: bool, idle_timeout: float, stall_timeout: float) -> StreamTimeout:
    if stalled:
        words = f"no data event for {stall_timeout:g} s, only comments or fragments"
        return StreamTimeout(f"{words}: raise stall_timeout if it may take longer", phase="stall")
    words = f"the server was silent for {idle_timeout:g} s"
    return StreamTimeout(f"{words}: raise idle_timeout if it may take longer", phase="idle")


class _Response(http.client.HTTPResponse):
    """A response that keeps its socket, as its timeout changes once the headers are in."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.sock = sock


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Handler(urllib.request.HTTPHandler):
    """urllib's handler for both schemes, with these connections."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self.context = context

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request, context=self.context)

    https_request = urllib.request.HTTPHandler.http_request


def _response(wire: _Wire) -> _Response:
    """Send the request, again where that is allowed, and return a 2xx response."""
    data, without_options = wire.call.data, wire.call.data_without_options
    tries = 0
    while True:
        try:
            return _sent(wire, data)
        except (ConnectError, HTTPStatusError) as error:
            if without_options is not None and _refuses_options(error):
                data, without_options = without_options, None
                continue
            if tries == wire.call.retries or not _may_pass(error):
                raise
            wait = _retry_wait(error, tries)
        tries += 1
        _log.warning("retry %d of %d in %.1f s: %s", tries, wire.call.retries, wait, wire.shown_url)
        time.sleep(wait)


def _refuses_options(error: ConnectError | HTTPStatusError) -> bool:
    refused = isinstance(error, HTTPStatusError) and error.status in (400, 422)
    return refused and "stream_options" in error.body


def _may_pass(error: ConnectError | HTTPStatusError) -> bool:
    return isinstance(error, ConnectError) or error.status in (408, 409, 429) or error.status >= 500


def _retry_wait(error: ConnectError | HTTPStatusError, tries: int) -> float:
    """Seconds: what the server asks for, else 0.5 doubled at each try, with jitter."""
    asked = error.retry_after if isinstance(error, HTTPStatusError) else None
    wait = 0.5 * 2**tries * random.uniform(1.0, 1.5) if asked is None else asked
    return min(wait, MAX_RETRY_WAIT)


def _sent(wire: _Wire, data: bytes) -> _Response:
    """Send the request once; raise ConnectError, StreamTimeout or HTTPStatusError."""
    request = urllib.request.Request(wire.call.url, data, wire.call.headers, method="POST")
    host = request.host
    opener = urllib.request.OpenerDirector()
    opener.add_handler(_Handler(wire.call.context))
    opener.add_handler(urllib.request.UnknownHandler())
    if not _is_loopback(urlsplit(wire.call.url).hostname or ""):
        opener.add_handler(urllib.request.ProxyHandler())
    _log.debug("POST %s", wire.shown_url)
    try:
        response = opener.open(request, timeout=wire.call.first_byte_timeout)
    except (OSError, http.client.HTTPException, ValueError) as error:
        proxy = f" through the proxy {request.host}" if request.host != host else ""
        raise _connect_error(error, wire.call.first_byte_timeout, proxy) from error
    wire.response, wire.cut, wire.silence = response, None, 0.0
    wire.first_byte = time.monotonic()
    wire.request_id = response.headers.get("x-request-id") or response.headers.get("request-id")
    _log.debug("%d from %s", response.status, wire.shown_url)
    if 200 <= response.status < 300:
        return response
    with response:
        raise _status_error(wire)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _connect_error(error: Exception, timeout: float, proxy: str) -> ChatStreamError:
    reason = getattr(error, "reason", error)  # urllib wraps what happens before the headers
    if isinstance(reason, socket.timeout):
        words = f"no response{proxy} within {timeout:g} s"
        remedy = "raise first_byte_timeout if the server needs longer"
        return StreamTimeout(f"{words}: {remedy}", phase="first byte")
    remedy = "is this the server's address, and does it run?"
    if isinstance(reason, ssl.SSLCertVerificationError):
        remedy = "if you trust the certificate, pass a context that does"
    elif isinstance(reason, http.client.HTTPException):
        remedy = "does it speak HTTP, or only https?"
    return ConnectError(f"no response{proxy}: {_said(reason)}: {remedy}")


def _status_error(wire: _Wire) -> HTTPStatusError:
    """The error for a status other than 2xx; a body that stalls or is cut does not hide it."""
    response, body = wire.response, bytearray()
    # Nothing that comes after an error is worth more than idle_timeout in all.
    with contextlib.suppress(ProtocolError):
        for read in _decoded(wire, wire.call.idle_timeout):
            body += read
            if len(body) > MAX_BODY_BYTES:
                break
    text = body[:MAX_BODY_BYTES].decode("utf-8", "replace")
    words = f"HTTP {response.status} {response.reason}: {_page_words(text) or 'empty body'}"
    location = response.headers.get("Location")
    if location:
        target = urljoin(wire.call.url, location)
        words = (
            f"HTTP {response.status} redirects to {target}: not followed, use it as base if right"
        )
    elif response.status in _REMEDIES:
        words += f": {_REMEDIES[response.status]}"
    retry_after = _retry_after(response.headers.get("Retry-After", ""))
    return HTTPStatusError(words, status=response.status, body=text, retry_after=retry_after)


_REMEDIES = {
    401: "check the key",
    403: "check the key and what it may do",
    404: "check the model and the base, which mostly ends in /v1",
    405: "check the base, which mostly ends in /v1",
}


def _retry_after(text: str) -> float | None:
    """Seconds that a Retry-After asks for, as a number or a date (RFC 9110 10.2.3)."""
    if re.fullmatch(r"\s*[0-9]{1,9}(\.[0-9]{1,9})?\s*", text):
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return max(0.0, date.timestamp() - time.time())


# ---- Bytes to chunks ------------------------------------------------------------------------------


_DONE = object()
_GZIP = b"\x1f\x8b"
_decode = json.JSONDecoder().raw_decode  # json.loads scans the white space twice


def _chunks(wire: _Wire) -> Iterator[Any]:
    """Yield the JSON values of the body, and _DONE where it says so."""
    call = wire.call
    head, reads = _peeked(_decoded(wire, call.stall_timeout))
    if head.startswith((b"{", b"[", b"\xef\xbb\xbf{")):
        wire.streamed = False
        yield from _json_chunk(reads, wire)
        return
    kind = wire.response.headers.get("Content-Type") or "no Content-Type"
    if head and "event-stream" not in kind.lower() and not _SSE_START.match(head):
        hint = "does the base lack /v1?"
        raise ProtocolError(f"{kind}, and neither events nor JSON: {_quoted(head)}: {hint}")
    yield from _event_chunks(sse_events(reads, wire.ignored), wire)
    yield from _tail_chunks(wire)


def _decoded(wire: _Wire, stall_timeout: float) -> Iterator[bytes]:
    """The body's reads, inflated where they are gzip, labelled or not."""
    encoding = wire.response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise ProtocolError(f"the body comes in the encoding {encoding}, which was not asked for")
    head, reads = _peeked(wire.body(wire.call.idle_timeout, stall_timeout))
    return _inflated(reads, wire) if head.startswith(_GZIP) else reads


def _peeked(reads: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, enough to tell what they are, without white space; and the same again."""
    head = b""
    for read in reads:
        head = (head + read).lstrip()
        if len(head) >= 6 or b"\n" in head:
            break
    return head, itertools.chain([head], reads)


def _inflated(reads: Iterator[bytes], wire: _Wire) -> Iterator[bytes]:
    """Inflate gzip (RFC 1952), READ_BYTES at a time whatever it would grow to."""
    member = zlib.decompressobj(wbits=31)
    for read in reads:
        more = True
        while read or more:
            if member.eof:
                member = zlib.decompressobj(wbits=31)
            try:
                piece = member.decompress(read, READ_BYTES)
            except zlib.error as error:
                raise ProtocolError(f"the gzip body is damaged: {error}") from error
            read = member.unused_data if member.eof else member.unconsumed_tail
            more = len(piece) == READ_BYTES
            yield piece
    if not member.eof and wire.cut is None:
        wire.cut = StreamInterrupted("the gzip body is cut off")


def _json_chunk(reads: Iterable[bytes], wire: _Wire) -> Iterator[Any]:
    """The one value of a JSON body: a completion or an error; text behind it is ignored."""
    body = bytearray()
    for read in reads:
        body += read
        _check_size(len(body))
    try:
        text = body.decode("utf-8-sig").lstrip()
        value, _ = _decode(text)
    except (ValueError, RecursionError) as error:
        if wire.cut is not None:
            raise wire.cut from error
        if body.rstrip().endswith((b"}", b"]")):
            raise ProtocolError(f"bad JSON: {error}: {_quoted(bytes(body))}") from error
        tail = bytes(body[:MAX_BODY_BYTES])
        raise StreamInterrupted("the JSON answer is cut off", tail=tail) from error
    yield value
    _raise_reported(value)
    choices = _dicts(value.get("choices")) if isinstance(value, dict) else []
    if not any(choice.get("message") for choice in choices):
        raise ProtocolError(f"JSON, but neither a completion nor an error: {_quoted(value)}")
    yield _DONE


def _event_chunks(events: Iterable[Event], wire: _Wire) -> Iterator[Any]:
    """The JSON values of each event; an error is raised once its chunk has been taken."""
    for event in events:
        wire.silence = 0.0
        data = event.data
        if event.event == "error":
            yield _loaded(data)
            raise _server_error(_loaded(data))
        try:
            value, end = _decode(data)
        except (ValueError, RecursionError):
            end = -1
        for value in (value,) if end == len(data) else _values(data):
            yield value
            if '"error"' in data or type(value) is not dict or not value.get("choices"):
                _raise_reported(value)


def _values(data: str) -> Iterator[Any]:
    """The values in an event's data, one after another: JSON, _DONE, or comments to skip."""
    at = 0
    while True:
        at = _SPACE.match(data, at).end()
        if at == len(data):
            return
        if data[at] == ":":
            at = data.find("\n", at) % (len(data) + 1)
        elif _DONE_WORD.match(data, at):
            yield _DONE
            return
        else:
            try:
                value, at = _decode(data, at)
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"not JSON: {_quoted(data[at:])}") from error
            yield value


def _tail_chunks(wire: _Wire) -> Iterator[Any]:
    """What is left at the end, read as if its event had ended: [DONE] counts, so does an error."""
    tail, wire.tail = wire.tail, b""
    try:
        chunks = list(_event_chunks(sse_events([tail, b"\n\n"]), wire))
    except ProtocolError:
        chunks = []
    wire.tail = tail
    if _DONE in chunks:
        yield from chunks


def _raise_reported(value: Any) -> None:
    """Raise the error that a chunk reports, if it does: judged by value, as most say "error": null."""
    for chunk in _dicts(value):
        choices = _dicts(chunk.get("choices"))
        for holder in (chunk, *choices):
            error = holder.get("error")
            if any(error.values()) if isinstance(error, dict) else error:
                raise _server_error(holder, error)
        if not choices and any(chunk.get(name) for name in ("message", "detail", "error_message")):
            raise _server_error(chunk)


def _server_error(said: Any, error: Any = None) -> ServerError:
    words = _words(said) or _quoted(said)
    return ServerError(f"the server reported an error: {words}", error=error or said)


# ---- Chunks to deltas, and the growing answer -----------------------------------------------------


class _Answer:
    """What the chunks have said so far."""

    def __init__(self) -> None:
        self.choices: dict[int, _Choice] = {}
        self.id = self.model = ""
        self.usage: dict[str, Any] | None = None
        self.odd: Any = None  # the last payload without a choice

    def add(self, chunk: Any) -> list[Delta]:
        """Take a chunk in; return what it adds."""
        deltas: list[Delta] = []
        if not isinstance(chunk, dict) or not chunk.get("choices"):
            self.odd = chunk
        for part in _dicts(chunk):
            self.id = self.id or part.get("id") or ""
            self.model = self.model or part.get("model") or ""
            choices = _dicts(part.get("choices"))
            for holder in (*choices, part):
                self.usage = holder.get("usage") or self.usage
            for choice in choices:
                index = _number(choice.get("index")) or 0
                if index not in self.choices:
                    self.choices[index] = _Choice(index)
                deltas += self.choices[index].add(choice)
        return deltas

    def finished(self) -> bool:
        """Has every choice seen its finish_reason?"""
        return bool(self.choices) and all(choice.finish for choice in self.choices.values())

    def flush(self) -> list[Delta]:
        """Give out what waits for the second half of a surrogate pair that will not come."""
        return [delta for choice in self.choices.values() for delta in choice.flush()]


class _Choice:
    """One choice's texts and tool calls."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts = {kind: _Text() for kind in ("content", "reasoning", "refusal")}
        self.calls: dict[int, _ToolCall] = {}
        self.routes: dict[Any, _ToolCall] = {}
        self.finish: str | None = None
        self.had_delta = self.legacy = False

    def add(self, choice: dict[str, Any]) -> list[Delta]:
        self.finish = self.finish or choice.get("finish_reason") or None
        deltas = [delta for part in _dicts(choice.get("delta")) for delta in self._taken(part)]
        if deltas:
            self.had_delta = True
        elif not self.had_delta:
            for message in _dicts(choice.get("message")):
                deltas += self._taken(message)
        return deltas

    def _taken(self, delta: dict[str, Any]) -> list[Delta]:
        deltas = []
        for kind, text in _said_in(delta):
            shown = self.texts[kind].add(text)
            if shown:
                deltas.append(Delta(kind, shown, self.index))
        pieces = _dicts(delta.get("tool_calls"))
        if not pieces and delta.get("function_call"):
            pieces, self.legacy = [{"index": 0, "function": delta["function_call"]}], True
        for piece in pieces:
            deltas += self._call(piece).add(piece, self.index)
        return deltas

    def _call(self, piece: dict[str, Any]) -> _ToolCall:
        """The tool call that a piece belongs to: by index, id or order, as far as they are sent."""
        index, id_ = _number(piece.get("index")), piece.get("id") or ""
        named = any(part.get("name") for part in _dicts(piece.get("function")))
        known = self.routes.get((index, id_)) if id_ else None
        call = known or self.routes.get(index)
        if call is None or (named and known is None and call.is_closed_to(index, id_)):
            free = index is not None and index >= 0 and index not in self.calls
            key = index if free else max(self.calls, default=-1) + 1
            call = self.calls[key] = _ToolCall(key)
        self.routes[index] = self.routes[None] = call
        if id_:
            self.routes[index, id_] = self.routes[None, id_] = call
        return call

    def flush(self) -> list[Delta]:
        texts = [(kind, text, 0) for kind, text in self.texts.items()]
        for key, call in self.calls.items():
            texts += [("tool_name", call.name, key), ("tool_arguments", call.arguments, key)]
        ends = [(kind, text.flush(), key) for kind, text, key in texts]
        return [Delta(kind, end, self.index, key) for kind, end, key in ends if end]

    def result(self) -> dict[str, Any]:
        content, reasoning, refusal = (str(text) for text in self.texts.values())
        calls = {key: call.result() for key, call in sorted(self.calls.items())}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["content"] = content or None
            sent = [call.message() for _, call in sorted(self.calls.items())]
            if self.legacy:
                message["function_call"] = sent[0]["function"]
            else:
                message["tool_calls"] = sent
        if refusal:
            message["refusal"] = refusal
        return {
            "content": content,
            "reasoning": reasoning,
            "refusal": refusal,
            "tool_calls": calls,
            "finish": self.finish,
            "message": message,
        }


class _ToolCall:
    """One tool call, growing."""

    def __init__(self, key: int) -> None:
        self.key, self.id = key, ""
        self.name, self.arguments = _Text(), _Text()

    def is_closed_to(self, index: int | None, id_: str) -> bool:
        """Does a named piece with this index and this id start another call?"""
        if id_ and self.id:
            return id_ != self.id
        return index is None and bool(str(self.arguments))

    def add(self, piece: dict[str, Any], choice: int) -> list[Delta]:
        self.id = self.id or piece.get("id") or ""
        deltas = []
        for function in _dicts(piece.get("function")):
            name, arguments = function.get("name"), function.get("arguments")
            if isinstance(name, str) and name not in ("null", str(self.name)):
                deltas.append(Delta("tool_name", self.name.add(name), choice, self.key))
            if arguments is not None:
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                deltas.append(
                    Delta("tool_arguments", self.arguments.add(arguments), choice, self.key)
                )
        return [delta for delta in deltas if delta.text]

    def result(self) -> dict[str, Any]:
        text = str(self.arguments)
        try:
            arguments = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
        return {
            "id": self.id,
            "name": str(self.name),
            "arguments": arguments,
            "arguments_text": text,
        }

    def message(self) -> dict[str, Any]:
        function = {"name": str(self.name), "arguments": str(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class _Text:
    """A growing text, in which the two halves of a surrogate pair may come in two pieces."""

    def __init__(self) -> None:
        self.file, self.half = io.StringIO(), ""

    def add(self, piece: str) -> str:
        """Take a piece in; return what of it may be shown now."""
        if self.half or not piece.isascii():
            piece, self.half = self.half + piece, ""
            if "\ud800" <= piece[-1] <= "\udbff":
                piece, self.half = piece[:-1], piece[-1]
            piece = _encodable(piece)
        self.file.write(piece)
        return piece

    def flush(self) -> str:
        self.half, half = "", self.half
        return self.add("\ufffd") if half else ""

    def __str__(self) -> str:
        return self.file.getvalue()


# ---- Small readers of values and words ------------------------------------------------------------


_DIGITS = re.compile(r"[0-9]{1,18}")  # int() refuses thousands of them
_SPACE = re.compile(r"\s*")
_DONE_WORD = re.compile(r"(\[DONE\]|DONE)(\s|\Z)")
_SSE_START = re.compile(rb"(\xef\xbb\xbf)?(data|event|id|retry)?[:\r\n]")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_SECRET_HEADER = re.compile(r"Auth|Key|Token|Cookie")
_REASONING = ("reasoning_content", "reasoning", "reasoning_details")
_TEXT_MEMBERS = ("text", "thinking", "reasoning", "summary", "refusal", "content")
_WORD_MEMBERS = ("error", "message", "detail", "msg", "error_message", "errors", "reason")
_NOTE_MEMBERS = ("code", "type", "status")


def _check_size(size: int) -> None:
    if size > MAX_EVENT_BYTES:
        raise ProtocolError(f"an event of more than MAX_EVENT_BYTES ({MAX_EVENT_BYTES})")


def _lines(block: bytes | bytearray) -> Iterable[str]:
    """The lines of a block; one by one where it is not UTF-8, so that those before are not lost."""
    try:
        return block.decode().split("\n")
    except UnicodeDecodeError:
        return map(_line, block.split(b"\n"))


def _line(line: bytes | bytearray) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        if line.startswith((b"data", b"event", b"id", b"retry")):
            raise ProtocolError(f"bad UTF-8 in a field: {_quoted(bytes(line))}") from error
        return line.decode("utf-8", "surrogateescape")


def _said_in(delta: dict[str, Any]) -> list[tuple[str, str]]:
    """The texts of a delta, each with its kind, thoughts first."""
    thoughts = (_text(delta.get(name)) for name in _REASONING)
    said = [("reasoning", next(filter(None, thoughts), ""))]
    content = delta.get("content")
    if isinstance(content, list):
        said += [(_part_kind(part), _text(part)) for part in content]
    else:
        said.append(("content", _text(content)))
    said.append(("refusal", _text(delta.get("refusal"))))
    return [(kind, text) for kind, text in said if text]


def _part_kind(part: Any) -> str:
    kind = str(part.get("type")) if isinstance(part, dict) else ""
    return (
        "reasoning"
        if kind in ("thinking", "reasoning")
        else "refusal"
        if kind == "refusal"
        else "content"
    )


def _text(value: Any, depth: int = 4) -> str:
    """The text in a value: itself, or that of its parts; they nest two deep where seen."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and depth:
        return "".join(_text(part, depth - 1) for part in value)
    if isinstance(value, dict) and depth:
        texts = (_text(value.get(name), depth - 1) for name in _TEXT_MEMBERS)
        return next(filter(None, texts), "")
    return ""


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; one object may stand for a list of one."""
    if isinstance(value, dict):
        return [value]
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _loaded(text: str) -> Any:
    """The text as JSON, or the text itself where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()


def _page_words(page: str) -> str:
    """The words of an error's body: JSON, HTML or plain text."""
    value = _loaded(page)
    if not isinstance(value, str):
        return _words(value) or page
    if value.startswith("<"):
        value = re.sub(r"(?is)<(script|style)\b.*?(</\1\s*>|\Z)|<[^<>]*>", " ", value)
    return html.unescape(value)


def _words(value: Any, depth: int = 8) -> str:
    """What an error says for people, in whichever member it stands, with its code and type."""
    if isinstance(value, list) and depth:
        return "; ".join(filter(None, (_words(item, depth - 1) for item in value)))
    if not isinstance(value, dict) or not depth:
        return value if isinstance(value, str) else ""
    words = next(filter(None, (_words(value.get(name), depth - 1) for name in _WORD_MEMBERS)), "")
    place = value.get("loc")
    notes = [".".join(map(str, place))] if isinstance(place, list) else []
    notes += [str(value.get(name)) for name in _NOTE_MEMBERS if value.get(name)]
    return f"{words} ({', '.join(notes)})" if words and notes else words


def _quoted(value: Any) -> str:
    """The beginning of what was sent, in quotes, on one line."""
    if isinstance(value, bytes):
        value = value[:1000].decode("utf-8", "replace")
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = str(type(value))
    return repr(value[:300])


def _said(error: Any) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _one_line(text: str) -> str:
    return _encodable(re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text)).strip()


def _encodable(text: str) -> str:
    """Join the halves of surrogate pairs; a lone half becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
