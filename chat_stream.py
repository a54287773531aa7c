# SPDX-License-Identifier: MIT
# SPDX-FileCopyrightText: 2026 The chat_stream authors
"""Stream chat completions from any OpenAI-compatible server: one file, standard library only.

    result = chat_stream(payload, "https://api.openai.com/v1", key, typewriter())
    payload["messages"].append(result["message"])

It gives the whole answer, or an error that says what went wrong and holds what had arrived: a
stream that ends before its [DONE] is an error. However the bytes are cut, the events are the same.
No redirect is followed, the key stands in no message, memory is bounded. It does not reconnect
(nothing on this wire can be resumed), pool connections, run under asyncio or repair JSON.

To vendor or upgrade it, copy this file, under any name, unchanged: __version__ says which it is.
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
from types import SimpleNamespace
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
MAX_RETRY_WAIT = 60.0  # seconds; where a server asks for more, only this is waited
MAX_TIMEOUT = 86400.0  # seconds, in place of infinity: a socket takes no more than 24 days
READ_BYTES = 64 << 10  # asked of one read1, and of gzip at a time: what a fast network holds ready

_log = logging.getLogger("chat_stream")
_new_tuple = tuple.__new__  # takes half the time of a named tuple's own constructor
_raw_decode = json.JSONDecoder().raw_decode  # json.loads scans the white space once more
_DONE = object()
_DONE_WORD = re.compile(r"(\[DONE\]|DONE)(\s|\Z)")
_GAP = re.compile(r"\s+|:.*")  # between values: white space, comments that were wrapped again


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


class ConnectError(ChatStreamError, ConnectionError): ...


class HTTPStatusError(ChatStreamError):
    status: int = 0
    body: str = ""  # at most MAX_BODY_BYTES of it
    retry_after: float | None = None  # seconds, if the server's Retry-After asks for them


class ServerError(ChatStreamError):
    error: Any = None  # as sent: mostly a dict or a text


class ProtocolError(ChatStreamError, ValueError): ...


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
    record: a binary file that gets every byte of a body as received; what it raises passes through.

    Returns a dict: choice 0's content, reasoning, refusal, tool_calls, finish, message; "choices"
    by index; usage, id, model, request_id, streamed; timing in seconds.
    Raises TypeError or ValueError before any I/O if an argument is wrong, else ChatStreamError.
    """
    call = _Call(locals())  # must come first: the arguments, by name
    if on_delta is not None and not callable(on_delta):
        raise TypeError(f"on_delta must be callable, not {type(on_delta).__name__}")
    with contextlib.closing(_deltas(call)) as deltas:
        for delta in deltas:
            if on_delta is not None:
                on_delta(delta)
    return call.result


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
    return _deltas(_Call(locals()))


def sse_events(
    reads: Iterable[bytes], ignored: Callable[[bytes], None] | None = None
) -> Iterator[Event]:
    """Parse server-sent events (WHATWG HTML 9.2.6) from bytes in pieces of any size.

    reads: what read1 brings, the blocks of a file, single bytes.
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
        if line_end and (held or bom):
            block, bom = b"".join((held, block)).removeprefix(bom), b""
            held.clear()
        held += rest
        for line in block.split(b"\n") if line_end else ():
            if data and not line:
                yield _new_tuple(Event, (event or "message", "\n".join(data), last_id, retry))
            if not line:
                data, event, retry, size = [], "", None, 0
                continue
            field, _, value = line.partition(b":")
            if field not in (b"data", b"event", b"id", b"retry"):
                if _limited(len(line)) and field and ignored is not None:
                    ignored(line)
                continue
            size = _limited(size + len(line))
            try:
                text = value.decode().removeprefix(" ")
            except UnicodeDecodeError as error:
                raise ProtocolError(f"bad UTF-8 in {_quoted(line)}") from error
            if field == b"data":
                data.append(text)
            elif field == b"event":
                event = text
            elif field == b"id":
                last_id = last_id if "\0" in text else text
            elif re.fullmatch("[0-9]{1,18}", text):
                retry = int(text)
        if held:
            _limited(len(held))
    fields = [f"event: {event}\n"] * bool(event) + [f"data: {value}\n" for value in data]
    if ignored is not None and (fields or held):
        ignored("".join(fields).encode() + held)


def typewriter(out: TextIO | None = None, cps: float | None = None) -> Callable[[Delta], None]:
    """Make an on_delta that writes choice 0's content to out, flushing each time.

    out: a text file, by default standard output; what it cannot encode is replaced.
    cps: characters a second, so that bursts on the network do not show; None writes at once.

    Raises ValueError if cps is not more than 0.
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


def _deltas(call: _Call) -> Generator[Delta, None, dict[str, Any]]:
    """Run a call: bytes, events, chunks, deltas, result; and here errors get what they lack."""
    call.start, answer, error = time.monotonic(), _Answer(), None
    try:
        with call.connect():
            yield from answer.deltas(_chunks(call))
        _check_end(call, answer)
    except ChatStreamError as caught:
        error = caught
    for where in list(answer.halves):
        yield from answer.put(where, "", last=True)
    call.result = answer.result(call)
    _log.debug("%s%s", type(error).__name__ if error else "complete", call.where)
    if error is None:
        return call.result
    text = _encodable(re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", call.secret.sub("***", str(error))))
    error.args = (text[: MAX_MESSAGE_CHARS - len(call.where)] + call.where,)
    error.partial, error.url, error.request_id = call.result, call.url, call.request_id
    raise error


def _check_end(call: _Call, answer: _Answer) -> None:
    """Decide whether an answer is whole; raise what cut it short."""
    finished = bool(answer.finish) and all(answer.finish.values())
    lax = not call.asked.require_done and not isinstance(call.cut, StreamInterrupted)
    if (call.done and answer.finish) or (finished and lax):
        return
    error = call.cut or StreamInterrupted("the end, or [DONE], came too early")
    text = "a finish_reason is missing" if answer.finish else "the stream was empty"
    if finished:
        text = "each finish_reason had come: for a server without [DONE], pass require_done=False"
    elif call.stray and not answer.finish:
        text = f"no choice had come, only {_quoted(call.stray)}"
    text += f"; it broke off in {_quoted(call.tail)}" * bool(call.tail)
    error.args = (f"{error}; {text}",)
    if isinstance(error, StreamInterrupted):
        error.tail = bytes(call.tail[:MAX_BODY_BYTES])
    raise error


class _Call(urllib.request.HTTPHandler):
    """One call: what was asked, checked; its connection, as urllib's handler (which takes methods
    named *_open, *_request and *_response for hooks); and what is known of its end."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.asked = asked = SimpleNamespace(**arguments)
        for name in ("first_byte_timeout", "idle_timeout", "stall_timeout"):
            seconds = arguments[name]
            if isinstance(seconds, bool) or not seconds > 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {seconds}")
            setattr(asked, name, min(float(seconds), MAX_TIMEOUT))
        if not isinstance(asked.retries, int) or asked.retries < 0:
            raise ValueError(f"retries must be a whole number from 0, not {asked.retries!r}")
        if not isinstance(asked.context, (ssl.SSLContext, type(None))):
            raise TypeError(f"context must be an ssl.SSLContext, not {asked.context!r}")
        text_file = isinstance(asked.record, io.TextIOBase)
        if text_file or not (asked.record is None or hasattr(asked.record, "write")):
            raise TypeError(f"record must be a binary file, not {asked.record!r}")
        self.body, self.url = _body(asked.payload), _endpoint(asked.base)
        self.headers = headers = _headers(str.strip(asked.key or ""), dict(asked.headers or {}))
        named = [name for name in headers if re.search("Auth|Key|Token|Secret|Cookie", name)]
        keys = {headers[name].rpartition(" ")[2] for name in named} - {""}
        # A short key ("none", "ollama") is no secret, and may be part of other words; a long one is
        # hidden from its first letters on, as a message may be cut in the middle of it.
        short, long = r"\b%s\b", r"%s[^\s'\"]*"
        words = [(short if len(key) < 8 else long) % re.escape(key[:8]) for key in keys]
        self.secret = re.compile("|".join(words) or "(?!)")
        parts = urlsplit(self.url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        # What messages show: not the query, where some services take the key.
        self.where = f" [{parts.scheme}://{parts.hostname}:{port}{parts.path[:300]}]"
        self.timing: dict[str, Any] = {"first_byte": None, "reads": 0, "max_gap": 0.0}
        self.reply = self.sock = self.request_id = cast(Any, None)
        self.start = self.silence = 0.0  # silence: seconds in reads since the last data event
        self.streamed, self.done, self.ended = True, False, False
        self.cut: ChatStreamError | None = None  # what ended the reads, where it was no EOF
        self.stray, self.tail = "", bytearray()  # the last odd payload; what is left unparsed
        self.result: dict[str, Any] = {}

    def connect(self) -> Any:
        """Send the request, and again where that is allowed; return a 2xx response."""
        body, added, tries = self.body, "stream_options" not in self.asked.payload, 0
        while True:
            try:
                return self._send(body)
            except (ConnectError, HTTPStatusError) as error:
                status = getattr(error, "status", 503)  # no connection is as good as a 503
                wait = getattr(error, "retry_after", None)
                refused = status in (400, 422) and "stream_options" in getattr(error, "body", "")
                if refused and added:
                    body, added = _body({**json.loads(body), "stream_options": None}), False
                elif tries < self.asked.retries and (status >= 500 or status in (408, 409, 429)):
                    tries += 1
                    backoff = 0.5 * 2 ** min(tries, 9) * random.uniform(0.5, 1)
                    wait = backoff if wait is None else wait
                    _log.warning("retry %d of %d%s", tries, self.asked.retries, self.where)
                    time.sleep(min(wait, MAX_RETRY_WAIT))
                else:
                    raise

    def _send(self, body: bytes) -> Any:
        request = urllib.request.Request(self.url, body, self.headers, method="POST")
        host, limit = request.host, self.asked.first_byte_timeout
        self.cut, self.silence, self.request_id = None, 0.0, None
        # No handler for redirects, which would take the key along, and none for error statuses.
        opener = urllib.request.OpenerDirector()
        near = re.match(r"(?i)(.+\.)?localhost(:|$)|127(\.\d+){3}(:|$)|\[::1\]", host)
        proxies = urllib.request.ProxyHandler({} if near else None)
        for handler in (self, urllib.request.UnknownHandler(), proxies):
            opener.add_handler(handler)
        _log.debug("POST%s", self.where)
        try:
            self.reply = response = opener.open(request, timeout=limit)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)  # urllib wraps what fails in sending
            text = "no response" + f" from the proxy {request.host}" * (request.host != host)
            if isinstance(reason, socket.timeout) and not reason.errno:
                text += f" in {limit:g} s; raise first_byte_timeout?"
                raise StreamTimeout(text, phase="first byte") from error
            remedy = "does the server run there? is its certificate one to trust (see context)?"
            raise ConnectError(f"{text}: {reason!r}; {remedy}") from error
        self.timing["first_byte"] = time.monotonic() - self.start
        header = response.headers.get
        self.request_id = header("x-request-id") or header("request-id") or None
        _log.debug("HTTP %d%s", response.status, self.where)
        if response.status // 100 == 2:
            return response
        with response:
            raise self._status_error()

    def http_open(self, request: urllib.request.Request) -> Any:
        """What urllib calls to connect; it keeps the socket, whose timeout changes later."""

        def response(connection: Any, sock: socket.socket, *args: Any, **options: Any) -> Any:
            self.sock = sock
            return http.client.HTTPResponse(sock, *args, **options)

        https = request.type == "https"
        kind: Any = http.client.HTTPSConnection if https else http.client.HTTPConnection
        connection: Any = type("_Connection", (kind,), {"response_class": response})
        return self.do_open(connection, request, **{"context": self.asked.context} if https else {})

    https_open, https_request = http_open, urllib.request.HTTPHandler.http_request  # adds Host

    def _status_error(self) -> HTTPStatusError:
        """The error for a status; it stands also where its body stalls or is cut."""
        status, header, body = self.reply.status, self.reply.headers.get, bytearray()
        with contextlib.suppress(ProtocolError):
            for read in self.received(self.asked.idle_timeout):
                body += read
                if len(body) > MAX_BODY_BYTES:
                    break
        page = body[:MAX_BODY_BYTES].decode("utf-8-sig", "replace")
        text = f"HTTP {status} {self.reply.reason}: {_words(_loaded(page)) or 'no words'}"
        text += "; check the key" * (status in (401, 403))
        text += "; check the model, and the base: most end in /v1" * (status in (404, 405))
        if status // 100 == 3:
            target = header("Location", "nowhere")
            text += f"; redirects are not followed: if {target} is right, make it the base"
        after = header("Retry-After", "").strip()
        seconds = float(after) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", after) else None
        with contextlib.suppress(IndexError, OverflowError, TypeError, ValueError):
            seconds = max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
        return HTTPStatusError(text, status=status, body=page, retry_after=seconds)

    def received(self, stall_timeout: float) -> Iterator[bytes]:
        """Yield the body as it comes; gzip, labelled or not, is inflated, a bounded piece each."""
        encoding = self.reply.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            raise ProtocolError(f"the body has an encoding that was not asked for: {encoding}")
        reads, member = self._reads(stall_timeout), zlib.decompressobj(31)
        head = next(reads, b"")
        head += next(reads, b"") if len(head) == 1 else b""
        if not head.startswith(b"\x1f\x8b"):
            yield from itertools.chain([head], reads)
            return
        for read in itertools.chain([head], reads):
            piece = b""
            while read or (len(piece) == READ_BYTES and not member.eof):
                member = zlib.decompressobj(31) if member.eof else member
                try:
                    piece = member.decompress(read, READ_BYTES)
                except zlib.error as error:
                    raise ProtocolError(f"the gzip body is damaged: {error}") from error
                yield piece
                read = member.unused_data.lstrip(b"\0") or member.unconsumed_tail
        if not member.eof:
            self.cut = self.cut or StreamInterrupted("the gzip body is cut off")

    def _reads(self, stall_timeout: float) -> Iterator[bytes]:
        """Yield what each read1 brings; at the end, .cut tells why, unless it is an EOF."""
        read1, monotonic, timing = self.reply.read1, time.monotonic, self.timing
        record, idle_timeout, timeout = self.asked.record, self.asked.idle_timeout, 0.0
        while True:
            start, left = monotonic(), stall_timeout - self.silence
            try:
                if left < idle_timeout or timeout < idle_timeout:
                    timeout = min(left, idle_timeout)
                    if left <= 0:
                        raise OSError("no time is left")
                    if not self.reply.isclosed():  # as newer http.clients do with the last byte
                        self.sock.settimeout(timeout)
                read = read1(READ_BYTES)
            except (OSError, http.client.HTTPException) as error:
                self.cut = StreamInterrupted(f"the connection broke: {error!r}")
                if left <= 0 or (isinstance(error, socket.timeout) and not error.errno):
                    phase, what, limit = "stall", "data event", stall_timeout
                    if timeout == idle_timeout:
                        phase, what, limit = "idle", "byte", idle_timeout
                    text = f"no {what} in {limit:g} s; raise {phase}_timeout?"
                    self.cut = StreamTimeout(text, phase=phase)
                self.cut.__cause__ = error
                break
            gap = monotonic() - start
            self.silence += gap
            timing["reads"] += 1
            if gap > timing["max_gap"]:
                timing.update(max_gap=gap)
            if not read:
                break
            if record is not None:
                record.write(read)
            yield read
        self.ended = True
        if self.cut is None and self.reply.length:  # read1 ends a short body like a whole one
            self.cut = StreamInterrupted(f"{self.reply.length} bytes of the body are missing")

    def see_ignored(self, line: bytes) -> None:
        """A line that is no event may be an error, or, behind the last read, the tail."""
        text = line.decode("utf-8", "replace")
        field, _, value = text.partition(":")
        _check_reported({"error": _loaded(value)} if field == "error" else _loaded(text))
        if self.ended:
            self.tail = bytearray(line)
        else:
            self.stray = text


def _body(payload: Mapping[str, Any]) -> bytes:
    if not isinstance(payload, Mapping):
        raise TypeError(f"payload must be a mapping, not {type(payload).__name__}")
    body = {"stream_options": {"include_usage": True}, **payload, "stream": True}
    if body["stream_options"] is None:
        del body["stream_options"]
    try:
        return json.dumps(body, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("payload nests too deep for JSON") from error


def _endpoint(base: str) -> str:
    """The URL to post to, from a base as people paste it."""
    netloc = ""
    try:
        parts = urlsplit(str.strip(base))
        netloc = parts.netloc.encode("idna").decode()
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if "@" in netloc:
        raise ValueError("base must not hold a user name or a password: use key or headers")
    if not good or re.search(r"\s", netloc):
        raise ValueError(f"base must be like https://host/v1 or http://host:8080/v1, not {base!r}")
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


def _chunks(call: _Call) -> Iterator[Any]:
    """Yield the JSON values of the body; at the end, call.done says whether [DONE] was there."""
    head, received = b"", call.received(call.asked.stall_timeout)
    for read in received:
        # Servers send blank lines, and a BOM, before what they have to say.
        head = (head + read).lstrip().removeprefix(b"\xef\xbb\xbf").lstrip()
        if re.search(rb"\A[{[<]|[:\r\n]|.{64}", head):
            break
    reads = itertools.chain([head], received)
    kind = call.reply.headers.get("Content-Type", "no Content-Type")
    if head.startswith((b"{", b"[")):
        call.streamed = False
        for read in reads:
            call.tail += read
            _limited(len(call.tail))
        yield from _completion(call)
    elif "event-stream" in kind.lower() or re.match(rb"\w*[:\r\n]|\Z", head):
        yield from _event_chunks(call, sse_events(reads, call.see_ignored))
        if not call.done:  # what is left may hold [DONE], or an error, if it is read as if whole
            with contextlib.suppress(ProtocolError):
                left = list(_event_chunks(call, sse_events([bytes(call.tail), b"\n\n"])))
                yield from left if call.done else ()
    else:
        remedy = "neither events nor JSON; check the base: most end in /v1"
        raise ProtocolError(f"{kind}, beginning {_quoted(head)}: {remedy}")


def _event_chunks(call: _Call, events: Iterable[Event]) -> Iterator[Any]:
    """The JSON values of events; what a chunk brings is taken before its error is raised."""
    for event in events:
        call.silence, data, at = 0.0, event.data, 0
        if event.event == "error":
            yield _loaded(data)
            raise ServerError(f"an error event: {_words(_loaded(data))}", error=_loaded(data))
        suspect = '"error"' in data
        while at < len(data):
            chunk, at = _value(data, at)
            if chunk is _DONE:
                call.done = True
                return
            yield chunk
            if suspect or type(chunk) is not dict or not chunk.get("choices"):
                call.stray = data
                _check_reported(chunk)


def _value(data: str, at: int) -> tuple[Any, int]:
    """The next value in an event's data, and its end: JSON, _DONE, or None for what is no value."""
    while not data.startswith("{", at) and (gap := _GAP.match(data, at)):
        at = gap.end()
    try:
        return _raw_decode(data, at)
    except (ValueError, RecursionError) as error:
        if at < len(data) and not _DONE_WORD.match(data, at):
            raise ProtocolError(f"not JSON: {_quoted(data[at:])}") from error
    return (_DONE if at < len(data) else None), at


def _completion(call: _Call) -> Iterator[Any]:
    """The JSON value that came in place of events: a completion, or else an error."""
    try:
        chunk, _ = _value(call.tail.decode(), 0)
    except ValueError as error:
        unquoted = re.sub(rb'"[^"]*"', b"", re.sub(rb"(?s)\\.", b"", call.tail))
        opened, closed = (len(re.findall(each, unquoted)) for each in (rb"[{[]", rb"[]}]"))
        if call.cut or b'"' in unquoted or opened > closed:
            return  # it is cut, not malformed
        what = "bad UTF-8 in" if isinstance(error, UnicodeDecodeError) else "not JSON:"
        raise ProtocolError(f"{what} {_quoted(call.tail)}") from error.__cause__ or error
    yield chunk
    _check_reported(chunk)
    choices = [each for part in _dicts(chunk) for each in _dicts(part.get("choices"))]
    if chunk is not _DONE and not any(choice.get("message") for choice in choices):
        raise ProtocolError(f"JSON, but neither a completion nor an error: {_quoted(call.tail)}")
    call.done = True


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
        self.had_delta, self.legacy = set[int](), set[int]()  # choices with deltas, function_call
        self.seen: dict[str, Any] = {"usage": None, "choices": {}, "id": "", "model": ""}
        self.first_delta: float | None = None  # when it came

    def deltas(self, chunks: Iterable[Any]) -> Iterator[Delta]:
        had, seen = self.had_delta, self.seen
        for chunk in chunks:
            try:  # the common chunk, one piece of content and no more, on the shortest path
                (choice,) = chunk["choices"]
                ((name, text),) = choice["delta"].items()
                index, get = choice["index"], chunk.get
                new = (not seen["id"] and get("id")) or (not seen["model"] and get("model"))
                more = new or choice["finish_reason"] or get("usage") or choice.get("usage")
                # A lone half of a surrogate pair cannot be encoded, and goes the longer way.
                plain = name == "content" and text and (text.isascii() or text.encode())
                common = plain and not (more or self.halves) and type(index) is int and index in had
            except (AttributeError, KeyError, TypeError, ValueError):
                common = False
            if common:
                self.texts["content", index, 0].write(text)
                yield _new_tuple(Delta, ("content", text, index, 0))
            else:
                for part in _dicts(chunk):
                    yield from self._part(part)

    def _part(self, chunk: dict[str, Any]) -> Iterator[Delta]:
        for name in ("id", "model"):
            self.seen[name] = self.seen[name] or str(chunk.get(name) or "")
        choices = _dicts(chunk.get("choices"))
        for holder in (*choices, chunk):
            for usage in filter(None, _dicts(holder.get("usage"))):
                self.seen["usage"] = usage
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
        get = delta.get
        reasoning = get("reasoning_content") or get("reasoning") or get("reasoning_details")
        said = {"reasoning": reasoning, "content": get("content"), "refusal": get("refusal")}
        for kind, value in said.items():
            for part_kind, text in _texts(kind, value):
                yield from self.put((part_kind, choice, 0), text)
        calls = _dicts(get("tool_calls"))
        if not calls and get("function_call"):
            calls = [{"index": 0, "function": get("function_call")}]
            self.legacy.add(choice)
        for call in calls:
            function = next(iter(_dicts(call.get("function"))), {})
            name, arguments = str(function.get("name") or ""), function.get("arguments")
            name = "" if name == "null" else name
            key = self._key(choice, _number(call.get("index")), str(call.get("id") or ""), name)
            if name != self.texts["tool_name", choice, key].getvalue():
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
            whole = ids[key] or (begun and self.texts["tool_name", choice, key].tell())
            key = None if (id_ and whole) or (begun and index is None) else key
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
        known = {"request_id": call.request_id, "streamed": call.streamed, "timing": timing}
        return {**(choices.get(0) or self._choice(0)), **self.seen, "choices": choices, **known}

    def _choice(self, index: int) -> dict[str, Any]:
        def text(kind: str, key: int = 0) -> str:
            return self.texts[kind, index, key].getvalue()

        said: dict[str, Any] = {kind: text(kind) for kind in ("content", "reasoning", "refusal")}
        calls, sent = {}, []
        for key, id_ in sorted(self.ids[index].items()):
            function = {"name": text("tool_name", key), "arguments": text("tool_arguments", key)}
            sent.append({"id": id_, "type": "function", "function": function})
            asked = function["arguments"]
            value = _loaded(asked) if asked.strip() else {}
            value = None if value is asked else value
            calls[key] = {"id": id_, **function, "arguments": value, "arguments_text": asked}
        message = {"role": "assistant", "content": said["content"] or (None if sent else "")}
        if said["refusal"]:
            message["refusal"] = said["refusal"]
        if sent:
            legacy = {"function_call": sent[0]["function"]}
            message.update(legacy if index in self.legacy else {"tool_calls": sent})
        said.update(tool_calls=calls, finish=self.finish.get(index), message=message)
        return said


def _limited(size: int) -> int:
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
data: {"choices": [{"delta": {"tool_calls": [{"function": {"name": "get_weather"}}]}}]}
data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{\\"city\\": \\"北"}}]}}]}
data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "京\\"}"}}]}}]}
data: {"choices": [{"finish_reason": "tool_calls"}], "usage": {"completion_tokens": 18}}
data: [DONE]
""".replace("\n", "\n\n").encode()


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
    for name in ("stdin", "stdout", "stderr"):
        file = getattr(sys, name) or io.StringIO()  # None where it was closed
        setattr(sys, name, file)
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")
    try:
        status = _ask(options) if options.replay is None else _replay(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        for number in (1, 2):  # or Python's last flush would complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return 1
    except (OSError, TypeError, ValueError, zlib.error) as error:
        print(f"chat_stream: {error}", file=sys.stderr)
        return 2 if type(error) in (TypeError, ValueError) else 1


def _replay(options: Any) -> int:
    size = options.chunk_size
    if size < 1:
        raise ValueError(f"--chunk-size must be 1 or more, not {size}")
    with open(options.replay, "rb") as file:
        body = file.read()
    if body.startswith(b"HTTP/"):
        raise OSError(f"{options.replay} is a whole HTTP response, not a bare body")
    if body.startswith(b"\x1f\x8b"):
        body = zlib.decompressobj(31).decompress(body)
    for event in sse_events(body[at : at + size] for at in range(0, len(body), size)):
        print(json.dumps({"event": event.event, "data": event.data}, ensure_ascii=False))
    left = re.split(rb"(?:\r\n|\n|\r(?!\n)){2}", body)[-1].lstrip(b"\r\n")
    if left:
        print(f"chat_stream: {len(left)} bytes were left over at the end", file=sys.stderr)
    return 0


def _ask(options: Any) -> int:
    key, base = os.environ.get("OPENAI_API_KEY"), options.base
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
        files.callback(screen.turn)
        try:
            result = chat_stream(
                {"model": options.model, "messages": [{"role": "user", "content": prompt}]},
                base or "https://api.openai.com/v1", key, screen.show, retries=options.retries,
                first_byte_timeout=options.timeout, idle_timeout=options.timeout,
                require_done=not options.no_done, record=record,
            )  # fmt: skip
            gaps = sorted(b - a for a, b in zip(screen.times[1:], screen.times[2:])) or [0.0]
            tokens, timing = (result["usage"] or {}).get("completion_tokens", "?"), result["timing"]
            whole = result["tool_calls"].get(0, {}).get("arguments") == {"city": "北京"}
            text = (
                f"finish: {result['finish']}, {len(result['content'])} characters, {tokens} "
                f"tokens, first byte {timing['first_byte']:.2f} s, {timing['reads']} reads, "
                f"gaps: median {gaps[len(gaps) // 2]:.3f} s, longest {gaps[-1]:.3f} s"
            ) + f"\n{_PROOF}" * (demo and whole and result["content"].endswith("🚀"))
            status = 3 if result["finish"] in ("length", "content_filter") else 0
        except ChatStreamError as error:
            result, text, status = error.partial or {}, f"chat_stream: {error}", 1
    if options.json:
        print(json.dumps(result, ensure_ascii=False, indent=1))
    print(text, file=sys.stderr)
    return status


def _serve_demo(listener: socket.socket) -> None:
    with listener, listener.accept()[0] as connection:
        connection.recv(READ_BYTES)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for at in range(0, len(_DEMO), 7):
            connection.sendall(_DEMO[at : at + 7])
            time.sleep(0.5 if at == 245 else 0.002)
        connection.recv(READ_BYTES)  # what is left unread would reset the connection


class _Screen:
    """What a person sees: the answer on standard output, thoughts and the waiting on stderr."""

    def __init__(self, options: Any, tee: TextIO | None) -> None:
        self.json, self.last, self.part, self.times = options.json, "", "", [time.monotonic()]
        self.write, self.tee = typewriter(cps=options.typewriter), typewriter(tee) if tee else None
        self.terminal, self.begun = sys.stderr.isatty(), threading.Event()
        self.waiter = threading.Thread(target=self.wait, daemon=True)
        self.waiter.start()

    def wait(self) -> None:
        while self.terminal and not self.begun.wait(0.2):
            text = f"waiting for the first byte: {time.monotonic() - self.times[0]:.0f} s"
            print(text, end="\r", file=sys.stderr, flush=True)

    def turn(self, part: str = "") -> None:
        """Wipe the waiting away, or end the line of the part of the answer that was before."""
        if not self.begun.is_set():
            self.begun.set()
            self.waiter.join()
            print(f"\r{'':40}\r" * self.terminal, end="", file=sys.stderr)
        if self.part not in ("", part):
            print(file=sys.stderr if self.part == "reasoning 0" else sys.stdout, flush=True)
        self.part = part

    def show(self, delta: Delta) -> None:
        self.times.append(time.monotonic())
        if self.tee:
            self.tee(delta)
        if self.json:
            return
        self.turn(f"{delta.kind.partition('_')[0]} {delta.call}")
        if delta.kind == "content":
            self.write(delta)
        elif delta.kind == "reasoning":
            dim = self.terminal and not os.environ.get("NO_COLOR")
            text = f"\x1b[2m{delta.text}\x1b[0m" if dim else delta.text
            print(text, end="", file=sys.stderr, flush=True)
        else:
            gap = " " * (self.last == "tool_name" != delta.kind)
            print(gap + delta.text, end="", flush=True)
        self.last = delta.kind


if __name__ == "__main__":
    sys.exit(main())
