# SPDX-License-Identifier: MIT
# SPDX-FileCopyrightText: 2026 The chat_stream authors
"""Stream chat completions from any OpenAI-compatible server: one file, standard library only.

    result = chat_stream(payload, "https://api.openai.com/v1", key, typewriter())
    payload["messages"].append(result["message"])

It gives the whole answer, or an error that says what went wrong and holds what had arrived: a
stream that ends before its [DONE] is an error. However the bytes are cut, the events are the same.
No redirect is followed, the key stands in no message, memory is bounded. It does not reconnect
(nothing on this wire can be resumed), pool connections, run under asyncio or repair JSON.

To vendor it, copy this file under any name, unchanged; __version__ says which one it is. To
upgrade it, copy the newer one over it.
"""

from __future__ import annotations

import contextlib
import email.utils
import html
import http.client
import io
import itertools
import json
import logging
import os
import random
import re
import socket
import ssl
import sys
import threading
import time
import urllib.request
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, TextIO, cast
from urllib.parse import quote, urlsplit

__all__ = (
    "ChatStreamError", "ConnectError", "Delta", "Event", "HTTPStatusError", "ProtocolError",
    "ServerError", "StreamInterrupted", "StreamTimeout", "chat_deltas", "chat_stream",
    "sse_events", "typewriter",
)  # fmt: skip
__version__ = "1.0.0"

MAX_EVENT_BYTES = 64 << 20  # of an event or a JSON answer: an image fits, an endless line ends
MAX_BODY_BYTES = 64 << 10  # kept of an error's body, or of an unparsed tail: for people to read
MAX_MESSAGE_CHARS = 2000  # of an error: a line in a log
MAX_RETRY_WAIT = 60.0  # seconds; a server that asks for more is left to the caller
MAX_TIMEOUT = 86400.0  # seconds, in place of infinity: a socket takes no more than 24 days
READ_BYTES = 64 << 10  # asked of one read1, and of gzip at a time: what a fast network holds ready

_log = logging.getLogger("chat_stream")
_new = tuple.__new__  # takes half the time of a named tuple's own constructor


class Delta(NamedTuple):
    """One piece of the answer."""

    kind: str  # "content", "reasoning", "refusal", "tool_name" or "tool_arguments"
    text: str  # never empty
    choice: int = 0  # choices[].index
    call: int = 0  # the tool call's key in result["tool_calls"]; 0 for the other kinds


class Event(NamedTuple):
    """One dispatched server-sent event."""

    event: str  # "message" unless named
    data: str
    id: str  # the last event id in force, "" if none
    retry: int | None  # milliseconds, if this event carried it


class ChatStreamError(Exception):
    """The base of all that a call raises, once its arguments were found good.

    ConnectError       no response: refused, DNS, TLS, proxy, closed before headers, not HTTP
    HTTPStatusError    a status other than 2xx, redirects too
    ServerError        the server reported a failure inside a 200
    ProtocolError      neither events nor JSON, bad UTF-8, bad JSON, an event too large
    StreamInterrupted  the end before [DONE]: EOF, reset, an incomplete chunk, cut JSON
    StreamTimeout      the server was silent for too long

    Anything else is a bug. The original is the __cause__. Messages are one line, for people: go by
    class and attributes. Errors pickle and copy.
    """

    partial: dict[str, Any] | None = None  # a result, of what had arrived
    url: str = ""  # what was asked
    request_id: str | None = None  # x-request-id or request-id, which the server's support asks for

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)


class ConnectError(ChatStreamError, ConnectionError):
    pass


class HTTPStatusError(ChatStreamError):
    status: int = 0
    body: str = ""  # at most MAX_BODY_BYTES of it
    retry_after: float | None = None  # seconds, if the server's Retry-After asks for them


class ServerError(ChatStreamError):
    error: Any = None  # as sent: mostly a dict or a text


class ProtocolError(ChatStreamError, ValueError):
    pass


class StreamInterrupted(ChatStreamError, ConnectionError):
    tail: bytes = b""  # what could not be parsed any more, at most MAX_BODY_BYTES of it


class StreamTimeout(ChatStreamError, TimeoutError):
    phase: str = ""  # "first byte", "idle" or "stall": the timeout of that name ran out


def chat_stream(
    payload: Mapping[str, Any], base: str, key: str | None = None,
    on_delta: Callable[[Delta], object] | None = None, *,
    first_byte_timeout: float = 30.0, idle_timeout: float = 30.0, stall_timeout: float = 600.0,
    require_done: bool = True, retries: int = 0, headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None, record: BinaryIO | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Stream a chat completion and return the whole answer.

    payload: the request as the API has it; "stream" and "stream_options" are added to a copy.
    base: https://host/v1, as people paste it.
    key: sent as Authorization: Bearer; None or "" sends none.
    on_delta: called with each Delta in the read that completed it; what it raises passes through.
    first_byte_timeout: seconds that any wait may take until the response headers are in.
    idle_timeout: seconds without a byte after that.
    stall_timeout: seconds without a data event, while comments or fragments keep coming.
    require_done: False takes EOF or silence as the end once each choice has its finish_reason.
    retries: how often to try again while there is no stream: no connection, 408, 409, 429, 5xx.
    headers: added to the request's own, or in place of them.
    context: for TLS; by default certificates are verified.
    record: a binary file, to which each byte of the body is written as received.

    Returns a dict: choice 0's content, reasoning, refusal, tool_calls, finish, message; "choices"
    by index; usage, id, model, request_id, streamed; timing in seconds.
    Raises TypeError or ValueError before any I/O if an argument is wrong, else ChatStreamError.
    """
    timeouts = first_byte_timeout, idle_timeout, stall_timeout
    call = _Call(payload, base, key, timeouts, require_done, retries, headers, context, record)
    if on_delta is not None and not callable(on_delta):
        raise TypeError(f"on_delta must be callable, not {on_delta!r}")
    with contextlib.closing(_deltas(call)) as deltas:
        while True:
            try:
                delta = next(deltas)
            except StopIteration as end:
                result: dict[str, Any] = end.value
                return result
            if on_delta is not None:
                on_delta(delta)


def chat_deltas(
    payload: Mapping[str, Any], base: str, key: str | None = None, *,
    first_byte_timeout: float = 30.0, idle_timeout: float = 30.0, stall_timeout: float = 600.0,
    require_done: bool = True, retries: int = 0, headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None, record: BinaryIO | None = None,
) -> Generator[Delta, None, dict[str, Any]]:  # fmt: skip
    """Yield the Deltas of a chat completion and return, as generators do, its result.

    Arguments, result and errors are those of chat_stream. The arguments are checked now, the
    request is sent at the first next(), and close() closes the connection at once.
    """
    timeouts = first_byte_timeout, idle_timeout, stall_timeout
    call = _Call(payload, base, key, timeouts, require_done, retries, headers, context, record)
    return _deltas(call)


def sse_events(
    reads: Iterable[bytes], ignored: Callable[[bytes], None] | None = None
) -> Iterator[Event]:
    """Parse server-sent events (WHATWG HTML 9.2.6) from bytes in pieces of any size.

    ignored: called with each line whose field is unknown, and last with the unterminated tail.

    Yields an Event as soon as the piece that completes it is there, after a lone CR too.
    Raises ProtocolError for bad UTF-8 in a field, where the standard has U+FFFD, and for an event
    of more than MAX_EVENT_BYTES; what was complete before has been yielded.
    """
    data: list[str] = []
    event, last_id, retry, size = "", "", None, 0
    held, after_cr, bom = bytearray(), False, b"\xef\xbb\xbf"
    for read in reads:
        if after_cr and read:
            read, after_cr = read.removeprefix(b"\n"), False  # a CRLF that was cut in two
        if b"\r" in read:
            after_cr = read.endswith(b"\r")
            read = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        block, line_end, rest = read.rpartition(b"\n")
        if not line_end:
            held += rest
            _grown(len(held), "")
            continue
        if held or bom:
            block, bom = b"".join((held, block)).removeprefix(bom), b""
            held.clear()
        held += rest
        # Bad bytes are kept as they are until it is known whether their field matters.
        for line in block.decode("utf-8", "surrogateescape").split("\n"):
            if not line:
                if data:
                    yield _new(Event, (event or "message", "\n".join(data), last_id, retry))
                data, event, retry, size = [], "", None, 0
                continue
            if line.startswith("data: "):
                field, value = "data", line[6:]
            else:
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
            if field in ("data", "event", "id", "retry"):
                size = _grown(size, line, strict=True)
            else:
                _grown(0, line)
            if field == "data":
                data.append(value)
            elif field == "event":
                event = value
            elif field == "id":
                last_id = last_id if "\0" in value else value
            elif field == "retry":
                retry = int(value) if re.fullmatch("[0-9]{1,18}", value) else retry
            elif field and ignored is not None:
                ignored(line.encode("utf-8", "surrogateescape"))
    if ignored is not None and (event or data or held):
        fields = [f"event: {event}\n"] * bool(event) + [f"data: {value}\n" for value in data]
        ignored("".join(fields).encode() + held)


def typewriter(out: TextIO | None = None, cps: float | None = None) -> Callable[[Delta], None]:
    """Make an on_delta that writes choice 0's content to out, flushing each time.

    out: a text file, by default standard output; what it cannot encode is replaced.
    cps: characters a second, so that bursts on the network do not show; None writes at once.
    """
    if cps is not None and not cps > 0:
        raise ValueError(f"cps must be more than 0, not {cps}")
    pause, due = 1 / cps if cps else 0.0, 0.0

    def write(delta: Delta) -> None:
        nonlocal due
        if delta.kind != "content" or delta.choice != 0:
            return
        file = out or sys.stdout
        encoding = file.encoding or "utf-8"
        text = delta.text.encode(encoding, "replace").decode(encoding)
        for piece in text if pause else [text]:
            time.sleep(max(0.0, due - time.monotonic()))
            file.write(piece)
            file.flush()
            due = max(due, time.monotonic()) + pause

    return write


# ---- One call: arguments -> bytes -> events -> chunks -> deltas -> result ------------------------


def _deltas(call: _Call) -> Generator[Delta, None, dict[str, Any]]:
    """Run a call: the steps in their order, and the one place where errors get what they lack."""
    call.start, answer, error = time.monotonic(), _Answer(), None
    try:
        with call.open():
            yield from answer.deltas(_chunks(call))
        _check_end(call, answer)
    except ChatStreamError as caught:
        error = caught
    for where in list(answer.halves):
        yield from answer.put(where, "", last=True)
    result = answer.result(call)
    _log.debug("%s%s", type(error).__name__ if error else "complete", call.where)
    if error is None:
        return result
    text = _encodable(re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", call.secret.sub("***", str(error))))
    error.args = (text[: MAX_MESSAGE_CHARS - len(call.where)] + call.where,)
    error.partial, error.url, error.request_id = result, call.url, call.request_id
    raise error


def _check_end(call: _Call, answer: _Answer) -> None:
    """The one place that decides whether an answer is whole; raises what cut it short."""
    finished = bool(answer.finish) and all(answer.finish.values())
    lax = not call.require_done and not isinstance(call.cut, StreamInterrupted)
    if (call.done and answer.finish) or (finished and lax):
        return
    error = call.cut or StreamInterrupted("the end, or [DONE], came too early")
    text = "no finish_reason had come" if answer.finish else "the stream was empty"
    if finished:
        text = "each finish_reason had come: for a server without [DONE], pass require_done=False"
    elif call.stray and not answer.finish:
        text = f"no choice had come, only {_quoted(call.stray)}"
    tail = f"; it broke off in {_quoted(call.tail)}" if call.tail else ""
    error.args = (f"{error}; {text}{tail}",)
    if isinstance(error, StreamInterrupted):
        error.tail = bytes(call.tail[:MAX_BODY_BYTES])
    raise error


class _Call:
    """One call: what was asked, checked; its connection; and what is known of its end."""

    def __init__(
        self, payload: Mapping[str, Any], base: str, key: str | None, timeouts: tuple[float, ...],
        require_done: bool, retries: int, headers: Mapping[str, str] | None,
        context: ssl.SSLContext | None, record: BinaryIO | None,
    ) -> None:  # fmt: skip
        names = "first_byte_timeout", "idle_timeout", "stall_timeout"
        for name, seconds in zip(names, timeouts):
            if not seconds > 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {seconds}")
        limits = [min(float(seconds), MAX_TIMEOUT) for seconds in timeouts]
        self.first_byte_timeout, self.idle_timeout, self.stall_timeout = limits
        if not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries must be a whole number from 0, not {retries!r}")
        if not isinstance(context, (ssl.SSLContext, type(None))):
            raise TypeError(f"context must be an ssl.SSLContext, not {context!r}")
        if not (record is None or hasattr(record, "write")):
            raise TypeError(f"record must be a binary file, not {record!r}")
        self.require_done, self.retries = require_done, retries
        self.context, self.record = context, record
        self.bodies, self.url = _bodies(payload), _endpoint(base)
        self.headers = _headers(str.strip(key or ""), dict(headers or {}))
        # A short key ("none", "ollama") is no secret, and may be part of other words.
        named = [self.headers[name] for name in self.headers if re.search("Auth|Key|Token", name)]
        secrets = [re.escape(value.removeprefix("Bearer ")) for value in named if value]
        words = [value if len(value) > 7 else rf"\b{value}\b" for value in secrets]
        self.secret = re.compile("|".join(words) or "(?!)")
        parts = urlsplit(self.url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        # What messages show: not the query, where some services take the key.
        self.where = f" [{parts.scheme}://{parts.hostname}:{port}{parts.path[:300]}]"
        self.timing: dict[str, Any] = {"first_byte": None, "reads": 0, "max_gap": 0.0}
        self.response = self.sock = cast(Any, None)
        self.request_id: str | None = None
        self.start = self.silence = 0.0  # silence: seconds in reads since the last data event
        self.streamed, self.done = True, False
        self.cut: ChatStreamError | None = None  # what ended the reads, where it was no EOF
        self.stray, self.tail = (
            "",
            bytearray(),
        )  # the last payload without a choice; what is left unparsed

    def open(self) -> Any:
        """Send the request, and again where that is allowed; return a 2xx response."""
        (body, plain_body), tries = self.bodies, 0
        while True:
            try:
                return self._send(body)
            except (ConnectError, HTTPStatusError) as error:
                status, wait = getattr(error, "status", 503), getattr(error, "retry_after", None)
                refused = status in (400, 422) and "stream_options" in getattr(error, "body", "")
                if refused and plain_body:
                    body, plain_body = plain_body, None
                elif tries < self.retries and (status >= 500 or status in (408, 409, 429)):
                    tries += 1
                    wait = 0.5 * 2**tries * random.uniform(0.5, 1) if wait is None else wait
                    _log.warning("retry %d of %d%s", tries, self.retries, self.where)
                    time.sleep(min(wait, MAX_RETRY_WAIT))
                else:
                    raise

    def _send(self, body: bytes) -> Any:
        request = urllib.request.Request(self.url, body, self.headers, method="POST")
        host = request.host
        # No handler for redirects, which would take the key along, and none for error statuses.
        opener = urllib.request.OpenerDirector()
        opener.add_handler(_Handler(self))
        opener.add_handler(urllib.request.UnknownHandler())
        if not re.match(r"(?i)(.+\.)?localhost(:|$)|127(\.\d+){3}(:|$)|\[::1\]", host):
            opener.add_handler(urllib.request.ProxyHandler())
        _log.debug("POST%s", self.where)
        try:
            response = opener.open(request, timeout=self.first_byte_timeout)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)  # urllib wraps what fails in sending
            via = f" from the proxy {request.host}" * (request.host != host)
            if isinstance(reason, socket.timeout):
                limit = f"{self.first_byte_timeout:g} s; raise first_byte_timeout?"
                raise StreamTimeout(f"no response{via} in {limit}", phase="first byte") from error
            remedy = "does the server run there? is its certificate one to trust (see context)?"
            raise ConnectError(f"no response{via}: {reason!r}; {remedy}") from error
        self.response, self.cut, self.silence = response, None, 0.0
        self.timing["first_byte"] = time.monotonic() - self.start
        ids = map(response.headers.get, ("x-request-id", "request-id"))
        self.request_id = next(filter(None, ids), None)
        _log.debug("HTTP %d%s", response.status, self.where)
        if response.status // 100 == 2:
            return self.response
        with self.response:
            raise self._status_error()

    def _status_error(self) -> HTTPStatusError:
        """The error for a status; it stands also where its body stalls or is cut."""
        status, headers, body = self.response.status, self.response.headers, bytearray()
        with contextlib.suppress(ProtocolError):
            for read in self.body(self.idle_timeout)[1]:
                body += read
                if len(body) > MAX_BODY_BYTES:
                    break
        page = body[:MAX_BODY_BYTES].decode("utf-8", "replace")
        text = f"HTTP {status} {self.response.reason}: {_words(_loaded(page)) or 'no words'}"
        if status // 100 == 3:
            target = headers.get("Location", "nowhere")
            text += f"; redirects are not followed: if {target} is right, make it the base"
        text += "; check the key" * (status in (401, 403))
        text += "; check the model, and the base: most end in /v1" * (status in (404, 405))
        after = headers.get("Retry-After", "").strip()
        seconds = float(after) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", after) else None
        with contextlib.suppress(IndexError, OverflowError, TypeError, ValueError):
            date = email.utils.parsedate_to_datetime(after)
            seconds = max(0.0, date.timestamp() - time.time())
        return HTTPStatusError(text, status=status, body=page, retry_after=seconds)

    def reads(self, stall_timeout: float) -> Iterator[bytes]:
        """Yield what each read1 brings; at the end, .cut tells why, unless it is an EOF."""
        read1, monotonic = self.response.read1, time.monotonic
        idle_timeout, timeout = self.idle_timeout, 0.0
        while True:
            start, left = monotonic(), stall_timeout - self.silence
            try:
                if left < idle_timeout or timeout < idle_timeout:
                    timeout = min(left, idle_timeout)
                    self.sock.settimeout(max(timeout, 0.001))
                read = read1(READ_BYTES)
            except (OSError, http.client.HTTPException) as error:
                self.cut = StreamInterrupted(f"the connection broke: {error!r}")
                if isinstance(error, socket.timeout):
                    idle = timeout == idle_timeout
                    phase, limit = ("idle", timeout) if idle else ("stall", stall_timeout)
                    text = f"no {'byte' if idle else 'data event'} in {limit:g} s"
                    self.cut = StreamTimeout(f"{text}; raise {phase}_timeout?", phase=phase)
                self.cut.__cause__ = error
                return
            gap = monotonic() - start
            self.silence += gap
            self.timing["reads"] += 1
            if gap > self.timing["max_gap"]:
                self.timing.update(max_gap=gap)
            if not read:
                break
            if self.record is not None:
                self.record.write(read)
            yield read
        if self.response.length:  # read1 ends a short body as it ends a whole one
            self.cut = StreamInterrupted(f"{self.response.length} bytes of the body are missing")

    def body(self, stall_timeout: float) -> tuple[bytes, Iterator[bytes]]:
        """The first bytes and all reads; gzip, labelled or not, is inflated."""
        encoding = self.response.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            raise ProtocolError(f"the body has an encoding that was not asked for: {encoding}")
        head, reads = _peeked(self.reads(stall_timeout))
        return _peeked(self._inflated(reads)) if head.startswith(b"\x1f\x8b") else (head, reads)

    def _inflated(self, reads: Iterator[bytes]) -> Iterator[bytes]:
        member = zlib.decompressobj(31)
        for read in reads:
            piece = b""
            while read or len(piece) == READ_BYTES:
                member = zlib.decompressobj(31) if member.eof else member
                try:
                    piece = member.decompress(read, READ_BYTES)
                except zlib.error as error:
                    raise ProtocolError(f"the gzip body is damaged: {error}") from error
                yield piece
                read = member.unused_data or member.unconsumed_tail
        if not member.eof:
            self.cut = self.cut or StreamInterrupted("the gzip body is cut off")

    def see_ignored(self, line: bytes) -> None:
        """A line that is no event may be an error; the last one is the tail."""
        text = line.decode("utf-8", "replace")
        field, _, value = text.partition(":")
        _check_reported({"error": _loaded(value)} if field == "error" else _loaded(text))
        self.tail = bytearray(line)


def _bodies(payload: Mapping[str, Any]) -> tuple[bytes, bytes | None]:
    """The body to send, and one without stream_options where the caller has not given them."""
    if not isinstance(payload, Mapping):
        raise TypeError(f"payload must be a mapping, not {payload!r}")
    body = {"stream_options": {"include_usage": True}, **payload, "stream": True}
    plain = {name: value for name, value in body.items() if name != "stream_options"}
    both = (plain if body["stream_options"] is None else body), plain
    try:
        sent, plain_sent = (json.dumps(each, allow_nan=False).encode() for each in both)
    except RecursionError as error:
        raise ValueError("payload nests too deep for JSON") from error
    return sent, None if "stream_options" in payload else plain_sent


def _endpoint(base: str) -> str:
    """The URL to post to, from a base as people paste it."""
    try:
        parts = urlsplit(str.strip(base))
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
    return f"{parts.scheme}://{netloc}{path}" + f"?{query}" * bool(query)


def _headers(key: str, extra: Mapping[str, str]) -> dict[str, str]:
    """The request's headers, named in title case, as urllib sends them."""
    headers = {"Accept": "text/event-stream, application/json", "Accept-Encoding": "identity"}
    headers["Content-Type"] = "application/json"
    headers["User-Agent"] = f"chat_stream/{__version__}"  # CDNs refuse Python-urllib: "1010"
    headers.update({"Authorization": f"Bearer {key}"} if key else {})
    headers.update({str.title(name): value for name, value in extra.items()})
    for name, value in headers.items():
        good = re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII)
        if not (good and re.fullmatch(r"[\x20-\x7e\xa0-\xff]*", value)):
            raise ValueError(f"key or header {name!r} cannot be sent: a line end, or no latin-1?")
    return headers


class _Handler(urllib.request.HTTPHandler):
    """urllib's handler, for http and https, that keeps the socket: its timeout changes later."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call

    def http_open(self, request: urllib.request.Request) -> Any:
        def response(connection: Any, sock: socket.socket, *args: Any, **options: Any) -> Any:
            self.call.sock = sock
            return http.client.HTTPResponse(sock, *args, **options)

        https = request.type == "https"
        kind: Any = http.client.HTTPSConnection if https else http.client.HTTPConnection
        connection: Any = type("_Connection", (kind,), {"response_class": response})
        return self.do_open(connection, request, **{"context": self.call.context} if https else {})

    https_open, https_request = http_open, urllib.request.HTTPHandler.http_request


_DONE = object()
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
_GAP = re.compile(r"(?:\s+|:.*)*")  # between values: white space, comments that were wrapped again
_DONE_WORD = re.compile(r"(\[DONE\]|DONE)(\s|\Z)")
_decode = json.JSONDecoder().raw_decode  # json.loads scans the white space once more


def _chunks(call: _Call) -> Iterator[Any]:
    """Yield the JSON values of the body; at the end, call.done says whether [DONE] was there."""
    head, reads = call.body(call.stall_timeout)
    kind = call.response.headers.get("Content-Type", "no Content-Type")
    if head.startswith((b"{", b"[")):
        call.streamed = False
        for read in reads:
            call.tail += read
            _grown(len(call.tail), "")
    elif "event-stream" in kind.lower() or re.match(rb"\w*[:\r\n]|\Z", head):
        yield from _event_chunks(call, sse_events(reads, call.see_ignored))
    else:
        remedy = "neither events nor JSON; check the base: most end in /v1"
        raise ProtocolError(f"{kind}, beginning {_quoted(head)}: {remedy}")
    if not call.done:
        yield from _tail_chunks(call)


def _peeked(reads: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes, enough to tell what they are, and all reads, less white space and a BOM."""
    head = b""
    for read in reads:
        head = (head + read).lstrip().removeprefix(b"\xef\xbb\xbf").lstrip()
        if len(head) >= 6 or b"\n" in head:
            break
    return head, itertools.chain([head], reads)


def _event_chunks(call: _Call, events: Iterable[Event]) -> Iterator[Any]:
    """The JSON values of events; what a chunk brings is taken before its error is raised."""
    for event in events:
        call.silence, data = 0.0, event.data
        if event.event == "error":
            yield _loaded(data)
            raise ServerError(f"an error event: {_words(_loaded(data))}", error=_loaded(data))
        try:
            value, end = _decode(data)
        except (ValueError, RecursionError):
            end = -1
        for chunk in (value,) if end == len(data) else _values(data):
            if chunk is _DONE:
                call.done = True
                return
            yield chunk
            if '"error"' in data or type(chunk) is not dict or not chunk.get("choices"):
                call.stray = data
                _check_reported(chunk)


def _values(data: str) -> Iterator[Any]:
    """What stands in an event's data, one after another: JSON values, [DONE]."""
    at = 0
    while (gap := _GAP.match(data, at)) and gap.end() < len(data):
        if _DONE_WORD.match(data, gap.end()):
            yield _DONE
            return
        try:
            value, at = _decode(data, gap.end())
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not JSON: {_quoted(data[gap.end() :])}") from error
        yield value


def _tail_chunks(call: _Call) -> Iterator[Any]:
    """What is left at the end, read as if it were whole: a [DONE] counts, or JSON all alone."""
    tail, chunks = bytes(call.tail), []
    try:
        # JSON that came without an event becomes one.
        head, line = (b"", tail) if call.streamed else (b"data: ", tail.translate(_ONE_LINE))
        for chunk in _event_chunks(call, sse_events([head, line, b"\n\n"])):
            chunks += [chunk]
    except ProtocolError:
        unquoted = re.sub(rb'(?s)"([^"\\]|\\.)*"', b"", tail)
        opened, closed = (sum(map(unquoted.count, each)) for each in ((b"{", b"["), (b"}", b"]")))
        if not (call.streamed or call.cut or chunks or b'"' in unquoted or opened > closed):
            raise  # it is malformed, not cut
    if chunks and not call.streamed:
        choices = [each for chunk in _dicts(chunks[0]) for each in _dicts(chunk.get("choices"))]
        if not any(choice.get("message") for choice in choices):
            raise ProtocolError(f"JSON, but neither a completion nor an error: {_quoted(tail)}")
        call.done = True
    yield from (chunks if call.streamed else chunks[:1]) if call.done else ()


def _check_reported(value: Any) -> None:
    """Raise the error that a chunk reports, judged by value: "error": null is everyday."""
    for chunk in _dicts(value):
        choices = _dicts(chunk.get("choices"))
        bare = not choices and any(map(chunk.get, ("message", "detail", "error_message")))
        for holder in (chunk, *choices):
            error = holder.get("error")
            if bare or (any(error.values()) if isinstance(error, dict) else error):
                raise ServerError(f"the server reports: {_words(holder)}", error=error or holder)


class _Answer:
    """What the chunks have said so far; texts go by kind, choice and tool call."""

    def __init__(self) -> None:
        self.texts: dict[tuple[str, int, int], io.StringIO] = defaultdict(io.StringIO)
        self.halves: dict[tuple[str, int, int], str] = {}  # that wait for their other half
        self.finish: dict[int, Any] = {}  # by choice
        self.ids: dict[int, dict[int, str]] = defaultdict(dict)  # of tool calls, by choice and key
        self.keys: dict[tuple[Any, ...], int] = {}  # of tool calls, by choice, index and id
        self.had_delta: set[int] = set()
        self.legacy: set[int] = set()
        self.id = self.model = ""
        self.usage: Any = None
        self.first_delta: float | None = None  # when it came

    def deltas(self, chunks: Iterable[Any]) -> Iterator[Delta]:
        for chunk in chunks:
            delta = self._common(chunk)
            if delta is not None:
                yield delta
                continue
            for part in _dicts(chunk):
                yield from self._part(part)

    def _common(self, chunk: Any) -> Delta | None:
        """The common chunk, one piece of content and no more, on the shortest path."""
        try:
            (choice,) = chunk["choices"]
            ((name, text),) = choice["delta"].items()
            index = choice["index"]
            plain = name == "content" and text and text.isascii() and len(choice) < 5
            more = choice["finish_reason"] or chunk.get("usage") or self.halves
            if plain and not more and index in self.had_delta:
                self.texts["content", index, 0].write(text)
                return _new(Delta, ("content", text, index, 0))
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        return None

    def _part(self, chunk: dict[str, Any]) -> Iterator[Delta]:
        self.id = self.id or str(chunk.get("id") or "")
        self.model = self.model or str(chunk.get("model") or "")
        choices = _dicts(chunk.get("choices"))
        for holder in (*choices, chunk):
            self.usage = holder.get("usage") or self.usage
        for choice in choices:
            index = _number(choice.get("index")) or 0
            self.finish[index] = self.finish.get(index) or choice.get("finish_reason") or None
            for delta in _dicts(choice.get("delta")):
                for piece in self._delta(index, delta):
                    self.had_delta.add(index)
                    yield piece
            for message in _dicts(choice.get("message")):
                if index not in self.had_delta:
                    yield from self._delta(index, message)

    def _delta(self, choice: int, delta: dict[str, Any]) -> Iterator[Delta]:
        names = ("reasoning_content", "reasoning", "reasoning_details")
        said = {"reasoning": next(filter(None, map(delta.get, names)), None)}
        said.update(content=delta.get("content"), refusal=delta.get("refusal"))
        for kind, value in said.items():
            for part_kind, text in _texts(kind, value):
                yield from self.put((part_kind, choice, 0), text)
        calls = _dicts(delta.get("tool_calls"))
        if not calls and delta.get("function_call"):
            calls = [{"index": 0, "function": delta["function_call"]}]
            self.legacy.add(choice)
        for call in calls:
            function = next(iter(_dicts(call.get("function"))), {})
            name, arguments = str(function.get("name") or ""), function.get("arguments")
            key = self._key(choice, _number(call.get("index")), str(call.get("id") or ""), name)
            if name not in ("null", self.texts["tool_name", choice, key].getvalue()):
                yield from self.put(("tool_name", choice, key), name)
            if not isinstance(arguments, (str, type(None))):
                arguments = json.dumps(arguments, ensure_ascii=False)
            yield from self.put(("tool_arguments", choice, key), arguments or "")

    def _key(self, choice: int, index: int | None, id_: str, name: str) -> int:
        """The key of the call that a piece belongs to, by what is sent: index, id, order."""
        ids = self.ids[choice]
        known = self.keys.get((choice, index, id_)) if id_ else None
        key = self.keys.get((choice, index, "")) if known is None else known
        if key is not None and known is None and name:
            begun = self.texts["tool_arguments", choice, key].tell()
            key = None if (id_ and ids[key]) or (index is None and begun) else key
        if key is None:
            free = index is not None and index >= 0 and index not in ids
            key = cast(int, index) if free else max(ids, default=-1) + 1
        ids[key] = ids.get(key) or id_
        for route in ((index, ""), (None, ""), (index, id_), (None, id_)):
            self.keys[(choice, *route)] = key
        return key

    def put(self, where: tuple[str, int, int], piece: str, last: bool = False) -> Iterator[Delta]:
        """Add a piece to a text; the first half of a surrogate pair waits for the other one."""
        if where in self.halves or not piece.isascii():
            piece = self.halves.pop(where, "") + piece
            if not last and "\ud800" <= piece[-1] <= "\udbff":
                piece, self.halves[where] = piece[:-1], piece[-1]
            piece = _encodable(piece)
        if piece:
            self.first_delta = self.first_delta or time.monotonic()
            self.texts[where].write(piece)
            yield Delta(where[0], piece, *where[1:])

    def result(self, call: _Call) -> dict[str, Any]:
        choices = {index: self._choice(index) for index in sorted(self.finish)}
        first = self.first_delta and self.first_delta - call.start
        timing = {**call.timing, "first_delta": first, "total": time.monotonic() - call.start}
        seen = {"usage": self.usage, "choices": choices, "id": self.id, "model": self.model}
        seen.update(request_id=call.request_id, streamed=call.streamed, timing=timing)
        return {**(choices.get(0) or self._choice(0)), **seen}

    def _choice(self, index: int) -> dict[str, Any]:
        kinds, calls, sent = ("content", "reasoning", "refusal"), {}, []
        said = {kind: self.texts[kind, index, 0].getvalue() for kind in kinds}
        for key, id_ in sorted(self.ids[index].items()):
            name = self.texts["tool_name", index, key].getvalue()
            text = self.texts["tool_arguments", index, key].getvalue()
            value = _loaded(text) if text.strip() else {}
            calls[key] = {"id": id_, "name": name, "arguments": None if value is text else value}
            calls[key]["arguments_text"] = text
            function = {"name": name, "arguments": text}
            sent.append({"id": id_, "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "content": said["content"]}
        if said["refusal"]:
            message["refusal"] = said["refusal"]
        if sent:
            legacy = {"function_call": sent[0]["function"]}
            message.update(legacy if index in self.legacy else {"tool_calls": sent})
            message["content"] = said["content"] or None
        finish = self.finish.get(index)
        return {**said, "tool_calls": calls, "finish": finish, "message": message}


def _grown(size: int, line: str, strict: bool = False) -> int:
    """The size of an event, in bytes, with one more line of it."""
    try:
        errors = "strict" if strict else "surrogateescape"
        size += len(line) if line.isascii() else len(line.encode("utf-8", errors))
    except UnicodeEncodeError as error:
        raise ProtocolError(f"bad UTF-8 in {_quoted(line)}") from error
    if size > MAX_EVENT_BYTES:
        raise ProtocolError(f"an event is larger than MAX_EVENT_BYTES, {MAX_EVENT_BYTES}")
    return size


def _texts(kind: str, value: Any, depth: int = 4) -> Iterator[tuple[str, str]]:
    """The texts in a value, each with its kind: itself, or those of its parts."""
    if isinstance(value, str) and value:
        yield kind, value
    elif isinstance(value, list) and depth:
        for part in value:
            yield from _texts(kind, part, depth - 1)
    elif isinstance(value, dict) and depth:
        kinds = {"thinking": "reasoning", "reasoning": "reasoning", "refusal": "refusal"}
        names = ("text", "thinking", "summary", "reasoning", "refusal", "content")
        part = next(filter(None, map(value.get, names)), None)
        yield from _texts(kinds.get(str(value.get("type")), kind), part, depth - 1)


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; a single object is taken for a list of one."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, dict)]


def _number(value: Any) -> int | None:
    return int(value) if re.fullmatch("-?[0-9]{1,18}", str(value)) else None


def _loaded(text: str) -> Any:
    """The text as JSON, or the text itself where it is none."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return text


def _words(value: Any, depth: int = 8) -> str:
    """All that an error says, in whatever shape, what is meant for people first."""
    if isinstance(value, dict):
        first = ("error", "message", "detail", "msg")
        value = [value[name] for name in sorted(value, key=lambda name: name not in first)]
    if isinstance(value, list):
        return ", ".join(filter(None, (_words(each, depth - 1) for each in value if depth)))
    if isinstance(value, str) and value.lstrip().startswith("<"):
        value = re.sub(r"(?is)<(script|style)\b.*?(</\1>|\Z)|<[^<>]*>", " ", value)
    return "" if value is None or isinstance(value, bool) else html.unescape(str(value)).strip()


def _quoted(value: str | bytes | bytearray) -> str:
    """The beginning of what was sent, quoted."""
    text = value if isinstance(value, str) else value[:1200].decode("utf-8", "replace")
    return repr(text[:300])


def _encodable(text: str) -> str:
    """Join the halves of surrogate pairs; a lone one becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# ---- The command line: a smoke test, made of the public calls alone ------------------------------

_EPILOG = """\
examples:
  python chat_stream.py                       a demo, streamed from this machine
  OPENAI_BASE_URL=http://127.0.0.1:8080/v1 python chat_stream.py "Why is it dark?"
  python chat_stream.py --replay body.sse --chunk-size 1

The environment names the key (OPENAI_API_KEY), the server (OPENAI_BASE_URL) and the
model (OPENAI_MODEL). --replay reads a bare body (.sse), as --record keeps it, not a
whole HTTP response, which begins with a status line and headers. Exit status: 0
complete, 1 error, 2 usage, 3 cut by a limit or filtered, 130 Ctrl-C."""
_PROOF = """\
It came seven bytes at a time, cut through characters, lines and JSON, with comments and a pause
in between, an emoji in two halves, a tool call in splinters; and nothing was lost."""
_DEMO = """\
: a server may send comments while the model thinks

data: {"choices": [{"delta": {"reasoning_content": "They want to see a stream."}}]}

data: {"choices": [{"delta": {"content": "Hello! 流式传输 comes in pieces \\ud83d"}}]}

data: {"choices": [{"delta": {"content": "\\ude80"}}]}

data: {"choices": [{"delta": {"tool_calls": [{"id": "call_1", "function": {"name":
data: "get_weather", "arguments": "{\\"city\\": \\"北"}}]}}]}

data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "京\\"}"}}]},
data: "finish_reason": "tool_calls"}], "usage": {"completion_tokens": 18}}

data: [DONE]

""".encode()


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    import argparse  # not at the top: those who import this file do not need it

    env, raw = os.environ.get, argparse.RawDescriptionHelpFormatter
    usage = "%(prog)s [options] [PROMPT]"
    parser = argparse.ArgumentParser(usage=usage, epilog=_EPILOG, formatter_class=raw)
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the question; else standard input")
    add("--base", default=env("OPENAI_BASE_URL"), metavar="URL", help="the server")
    add("--model", default=env("OPENAI_MODEL") or "gpt-4o-mini", metavar="NAME", help="the model")
    add("--typewriter", type=float, metavar="CPS", help="play CPS characters a second")
    add("--tee", metavar="FILE", help="write the text to FILE too")
    add("--record", metavar="FILE", help="keep the raw body in FILE")
    add("--replay", metavar="FILE", help="print the events of a raw body, without network")
    add("--chunk-size", type=int, default=READ_BYTES, metavar="N", help="replay N bytes at a time")
    add("--json", action="store_true", help="print the result as JSON")
    add("--timeout", type=float, default=30.0, metavar="S", help="seconds of silence to allow")
    add("--retries", type=int, default=0, metavar="N", help="how often to try again")
    add("--no-done", action="store_true", help="for a server that sends no [DONE]")
    options = parser.parse_args(argv)
    for file in (sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")
    try:
        status = _replay(options) if options.replay else _ask(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's last flush would complain
        return 1
    except (OSError, TypeError, ValueError) as error:
        print(f"chat_stream: {error}", file=sys.stderr)
        return 1 if isinstance(error, (OSError, ChatStreamError)) else 2


def _replay(options: Any) -> int:
    size, left = options.chunk_size, list[bytes]()
    if size < 1:
        raise ValueError(f"--chunk-size must be 1 or more, not {size}")
    with open(options.replay, "rb") as file:
        body = file.read()
    if body.startswith(b"HTTP/"):
        raise OSError(f"{options.replay} is a whole HTTP response, not a bare body")
    if body.startswith(b"\x1f\x8b"):
        body = zlib.decompressobj(31).decompress(body)

    def reads() -> Iterator[bytes]:
        yield from (body[at : at + size] for at in range(0, len(body), size))
        left.clear()  # what is ignored from here on is the tail

    for event in sse_events(reads(), left.append):
        print(json.dumps({"event": event.event, "data": event.data}, ensure_ascii=False))
    if left:
        print(f"chat_stream: {len(left[0])} bytes were left over at the end", file=sys.stderr)
    return 0


def _ask(options: Any) -> int:
    key, base, error = os.environ.get("OPENAI_API_KEY"), options.base, None
    demo = not (key or base)
    if demo:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_serve_demo, args=(listener,), daemon=True).start()
        base = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    prompt = options.prompt or (not (demo or sys.stdin.isatty()) and sys.stdin.read()) or "Hello!"
    with contextlib.ExitStack() as files:
        tee = files.enter_context(open(options.tee, "w", encoding="utf-8")) if options.tee else None
        record = files.enter_context(open(options.record, "wb")) if options.record else None
        screen = _Screen(options, tee)
        files.callback(screen.turn, "")
        try:
            result = chat_stream(
                {"model": options.model, "messages": [{"role": "user", "content": prompt}]},
                base or "https://api.openai.com/v1", key, screen.show, retries=options.retries,
                first_byte_timeout=options.timeout, idle_timeout=options.timeout,
                require_done=not options.no_done, record=record,
            )  # fmt: skip
        except ChatStreamError as caught:
            error, result = caught, caught.partial or {}
    if options.json:
        print(json.dumps(result, ensure_ascii=False, indent=1))
    print(f"chat_stream: {error}" if error else screen.summary(result), file=sys.stderr)
    if demo and not error:
        print(_PROOF, file=sys.stderr)
    return 1 if error else 3 if result["finish"] in ("length", "content_filter") else 0


def _serve_demo(listener: socket.socket) -> None:
    with listener, listener.accept()[0] as connection:
        connection.recv(READ_BYTES)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for at in range(0, len(_DEMO), 7):
            connection.sendall(_DEMO[at : at + 7])
            time.sleep(0.5 if at == 245 else 0.002)


class _Screen:
    """What a person sees: the answer on standard output, thoughts and the waiting on stderr."""

    def __init__(self, options: Any, tee: TextIO | None) -> None:
        self.terminal, self.begun = sys.stderr.isatty(), threading.Event()
        self.dim = "\x1b[2m%s\x1b[0m" if self.terminal and not os.environ.get("NO_COLOR") else "%s"
        self.part, self.last, self.times = "", "", [time.monotonic()]
        self.json = options.json
        self.tee = typewriter(tee) if tee else None
        self.write = typewriter(cps=options.typewriter)
        self.waiter = threading.Thread(target=self.wait, daemon=True)
        self.waiter.start()

    def wait(self) -> None:
        while self.terminal and not self.begun.wait(0.2):
            text = f"\rwaiting for the first byte: {time.monotonic() - self.times[0]:.0f} s "
            print(text, end="", file=sys.stderr, flush=True)

    def turn(self, part: str) -> None:
        """Wipe the waiting away, or end the line of the part of the answer that was before."""
        if not self.begun.is_set():
            self.begun.set()
            self.waiter.join()
            print(
                "\r" + " " * 40 if self.terminal else "", end="\r" * self.terminal, file=sys.stderr
            )
        if self.part not in ("", part):
            print(file=sys.stderr if self.part == "reasoning 0" else sys.stdout, flush=True)
        self.part = part

    def show(self, delta: Delta) -> None:
        self.times.append(time.monotonic())
        if self.tee:
            self.tee(delta)
        if self.json:
            return
        part = f"{delta.kind.partition('_')[0]} {delta.call}"
        self.turn(part)
        if part == "content 0":
            self.write(delta)
        elif part == "reasoning 0":
            print(self.dim % delta.text, end="", file=sys.stderr, flush=True)
        else:
            gap = " " * (self.last == "tool_name" != delta.kind)
            print(gap + delta.text, end="", flush=True)
        self.last = delta.kind

    def summary(self, result: dict[str, Any]) -> str:
        gaps = sorted(b - a for a, b in zip(self.times, self.times[1:])) or [0.0]
        tokens, timing = (result["usage"] or {}).get("completion_tokens", "?"), result["timing"]
        return (
            f"finish: {result['finish']}, {len(result['content'])} characters, {tokens} tokens, "
            f"first byte {timing['first_byte']:.2f} s, {timing['reads']} reads, "
            f"gaps: median {gaps[len(gaps) // 2]:.3f} s, longest {gaps[-1]:.3f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
