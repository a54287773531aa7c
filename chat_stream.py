# SPDX-License-Identifier: MIT
# SPDX-FileCopyrightText: 2026 The chat_stream authors
"""Stream chat completions from any OpenAI-compatible server: one file, standard library only.

    result = chat_stream(payload, "https://api.openai.com/v1", key, typewriter())
    payload["messages"].append(result["message"])

It gives the whole answer, or an error that says what went wrong and holds what had arrived: a
stream that ends before its [DONE] is an error. However the bytes are cut, the events are the same.
No redirect is followed, no message shows the key, memory holds the result and one event. It does
not reconnect (nothing on this wire can be resumed), pool connections, do asyncio or repair JSON.
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
import urllib.request as web
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, TextIO
from urllib.parse import quote, urlsplit, urlunsplit

__all__ = ("ChatStreamError", "ConnectError", "Delta", "Event", "HTTPStatusError", "ProtocolError",
           "ServerError", "StreamInterrupted", "StreamTimeout", "chat_deltas", "chat_stream",
           "sse_events", "typewriter")  # fmt: skip
__version__ = "1.0.0"

MAX_EVENT_BYTES = 64 << 20  # for one event or JSON answer: fits an image, stops an endless line
MAX_BODY_BYTES = 64 << 10  # kept of an error body or an unparsed tail, for people to read
MAX_MESSAGE_CHARS = 2000  # of an error: a line in a log
MAX_RETRY_WAIT = 60.0  # seconds; caps what a server's Retry-After asks for
MAX_TIMEOUT = 86400.0  # seconds, in place of infinity: sockets overflow at 24 days
READ_BYTES = 64 << 10  # asked of each read1: what a fast network holds ready

_log = logging.getLogger("chat_stream")
_new_tuple = tuple.__new__  # takes half the time of a named tuple's own constructor
_raw_decode = json.JSONDecoder().raw_decode  # says too where a value ends: more may follow
# What an event's data holds besides JSON: [DONE], with all that follows it; white space; comments
# that a proxy wrapped in data again.
_NOT_JSON = re.compile(r"((?:\[DONE\]|DONE)(?!\S)(?s:.*))|\s+|(?<!\S):.*")


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
    """The base of everything that a call raises once its arguments have been checked.

    ConnectError       no response: refused, DNS, TLS, proxy, closed before headers, not HTTP
    HTTPStatusError    a status other than 2xx, redirects too
    ServerError        the server reported a failure inside a 2xx
    ProtocolError      neither events nor JSON, bad UTF-8, bad JSON, an event too large
    StreamInterrupted  the end before [DONE]: EOF, reset, an incomplete chunk, cut JSON
    StreamTimeout      nothing new came for too long

    Anything else comes from your callback or file, or is a bug. The original is the __cause__.
    Messages are one line, for people: go by class and attributes. Errors pickle and copy.
    """

    partial: dict[str, Any] | None = None  # the result of what had arrived
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
    error: Any = None  # as sent: usually a dict or a string


class ProtocolError(ChatStreamError, ValueError): ...


class StreamInterrupted(ChatStreamError, ConnectionError):
    tail: bytes = b""  # what was left unparsed, at most MAX_BODY_BYTES of it


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

    payload: the request as the API has it; "stream" is added to a copy, and "stream_options" unless
        it is there (None: not sent).
    base: https://host/v1, as people paste it.
    key: sent as Authorization: Bearer; None or "" sends none.
    on_delta: called with each Delta as soon as it is complete; what it raises passes through.
    first_byte_timeout: seconds that any single wait may take before the response headers are in.
    idle_timeout: seconds without a byte after that.
    stall_timeout: seconds without a data event, while comments or fragments keep coming.
    require_done: False takes EOF or silence for the end once each choice has its finish_reason.
    retries: how often to try again while there is no stream: no connection, 408, 409, 429, 5xx.
    headers: added to the request's own, or in place of them.
    context: for TLS; by default certificates are verified.
    record: a binary file that gets every byte of a body as received; what it raises passes through.

    Returns a dict: choice 0's content, reasoning, refusal, tool_calls, finish, message; "choices"
    by index; usage, id, model, request_id, streamed; timing in seconds.
    Raises TypeError or ValueError before any I/O for a bad argument, ChatStreamError after that.
    """
    call = _Call(locals())  # must come first: the arguments, by name
    with contextlib.closing(call.deltas()) as deltas:
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

    Arguments, result and errors are those of chat_stream. The arguments are checked at the call,
    the request is sent at the first next(), and close() closes the connection at once.
    """
    return _Call(locals()).deltas()


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
            known = field in (b"data", b"event", b"id", b"retry")
            if not known and _limited(len(line)) and field and ignored is not None:
                ignored(line)
            if not known:
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
    tail = [f"event: {event}\n"] if event else []
    tail += [f"data: {value}\n" for value in data]
    if ignored is not None and (tail or held):
        ignored("".join(tail).encode() + held)


def typewriter(out: TextIO | None = None, cps: float | None = None) -> Callable[[Delta], None]:
    """Make an on_delta that writes choice 0's content to out, flushing each time.

    out: a text file, by default standard output; what it cannot encode is replaced.
    cps: characters a second, so that bursts on the network do not show; None writes at once.
        Raises ValueError if it is not more than 0.
    """
    if cps is not None and not cps > 0:
        raise ValueError(f"cps must be more than 0, not {cps}")
    due = 0.0

    def write(delta: Delta) -> None:
        nonlocal due
        if (delta.kind, delta.choice) == ("content", 0):
            encoding = (out or sys.stdout).encoding or "utf-8"
            text = delta.text.encode(encoding, "replace").decode(encoding)
            for piece in text if cps else [text]:
                time.sleep(max(0.0, due - time.monotonic()))
                print(piece, end="", file=out, flush=True)
                due = max(due, time.monotonic()) + (1 / cps if cps else 0)

    return write


class _Call(web.HTTPHandler):
    """One call, from what was asked to its chunks. It is urllib's handler, so as to keep the
    socket, whose timeout changes (beware: urllib calls methods named *_open and *_request)."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        self.asked, on_delta, record = asked, asked.get("on_delta"), asked["record"]
        timeouts = ("first_byte_timeout", "idle_timeout", "stall_timeout")
        good = {name: asked[name] > 0 for name in timeouts}
        good["retries"] = isinstance(asked["retries"], int) and asked["retries"] >= 0
        good["context"] = isinstance(asked["context"], (ssl.SSLContext, type(None)))
        good["on_delta"] = on_delta is None or callable(on_delta)
        is_binary = hasattr(record, "write") and not hasattr(record, "encoding")
        good["record"] = record is None or is_binary
        for name, is_good in good.items():
            if not is_good:
                raise ValueError(f"{name} cannot be {asked[name]!r}")
        asked.update({name: float(min(asked[name], MAX_TIMEOUT)) for name in timeouts})
        self.body = _body(asked["payload"])
        self.url, self.where = _endpoint(asked["base"])
        key, extra = str.strip(asked["key"] or ""), dict(asked["headers"] or {})
        self.headers, self.secret = _headers(key, extra)
        self.timing: dict[str, Any] = {"first_byte": None, "reads": 0, "max_gap": 0.0}
        self.streamed = True  # until one JSON value comes in place of events
        self.done = False  # [DONE] came, or a whole JSON completion
        self.end: Any = None  # set after the last read: the error to raise if no [DONE] came
        self.last, self.tail = "", b""  # the last payload or odd line; what is left unparsed
        self.result: dict[str, Any] = {}

    def deltas(self) -> Generator[Delta, None, dict[str, Any]]:
        """Bytes to events to chunks to deltas to result; and errors are completed here."""
        self.start, answer, error = time.monotonic(), _Answer(), None
        try:
            with self.connect():
                yield from answer.deltas(self.chunks())
            self.check_end(answer.finish)
        except ChatStreamError as caught:
            error = caught
        for where in list(answer.halves):
            yield from answer.put(where, "", last=True)
        self.result = answer.result(self)
        _log.debug("%s%s", type(error).__name__ if error else "complete", self.where)
        if error is None:
            return self.result
        hide = self.secret.sub
        cause: Any = error.__cause__ or error  # http.client's may quote what was sent back
        cause.args = [hide("***", each) if type(each) is str else each for each in cause.args]
        # One line, and encodable.
        text = re.sub(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]+", " ", hide("***", str(error)))
        error.args = (text[: MAX_MESSAGE_CHARS - len(self.where)] + self.where,)
        error.partial, error.url, error.request_id = self.result, self.url, self.request_id
        raise error

    def connect(self) -> Any:
        """Send the request, again where that is allowed; return a 2xx response."""
        tries, body, retries = 0, self.body, self.asked["retries"]
        while True:
            try:
                return self._send(body)
            except (ConnectError, HTTPStatusError) as error:
                # No connection counts as a 503.
                said = error if isinstance(error, HTTPStatusError) else HTTPStatusError(status=503)
                refused = said.status in (400, 422) and "stream_options" in said.body
                if refused and body is self.body and "stream_options" not in self.asked["payload"]:
                    body = _body({**json.loads(body), "stream_options": None})
                    continue
                if tries == retries or not (said.status >= 500 or said.status in (408, 409, 429)):
                    raise
                backoff = 0.5 * 2 ** min(tries, 9) * random.uniform(0.75, 1.25)
                wait = backoff if said.retry_after is None else said.retry_after
                tries += 1
                _log.warning("retry %d of %d%s", tries, retries, self.where)
                time.sleep(min(wait, MAX_RETRY_WAIT))

    def _send(self, body: bytes) -> Any:
        request = web.Request(self.url, body, self.headers, method="POST")
        # The host becomes that of the proxy, if there is one.
        host, limit, self.request_id = request.host, self.asked["first_byte_timeout"], None
        # No handler for redirects, which would take the key along, and none for error statuses.
        opener = web.OpenerDirector()
        near = re.match(r"(?i)(.+\.)?localhost(:|$)|127(\.\d+){3}(:|$)|\[::1\]", host)
        for handler in (self, web.UnknownHandler(), web.ProxyHandler({} if near else None)):
            opener.add_handler(handler)
        _log.debug("POST%s", self.where)
        try:
            self.reply = reply = opener.open(request, timeout=limit)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)  # urllib wraps what fails in sending
            proxy = "" if request.host == host else f" from the proxy {request.host}"
            if isinstance(reason, socket.timeout) and not reason.errno:  # TCP's own has one
                text = f"no response{proxy} in {limit:g} s; raise first_byte_timeout?"
                raise StreamTimeout(text, phase="first byte") from error
            remedy = "does the server run there? is its certificate trusted (see context)?"
            raise ConnectError(f"no response{proxy}: {reason!r}; {remedy}") from error
        self.timing.update(first_byte=time.monotonic() - self.start, reads=0, max_gap=0.0)
        header = reply.headers.get
        self.request_id = header("x-request-id") or header("request-id") or None
        _log.debug("HTTP %d%s", reply.status, self.where)
        if reply.status // 100 == 2:
            return reply
        with reply:
            raise self._status_error()

    def http_open(self, request: web.Request) -> Any:
        def response(connection: Any, sock: socket.socket, *args: Any, **options: Any) -> Any:
            self.sock = sock
            return http.client.HTTPResponse(sock, *args, **options)

        kind = getattr(http.client, f"{request.type.upper()}Connection")
        connection: Any = type("_Connection", (kind,), {"response_class": response})
        options = {"context": self.asked["context"]} if request.type == "https" else {}
        return self.do_open(connection, request, **options)

    https_open, https_request = http_open, web.HTTPHandler.http_request  # adds Host

    def _status_error(self) -> HTTPStatusError:
        """The error for a bad status, also where its body stalls or is cut."""
        status, header, body = self.reply.status, self.reply.headers.get, bytearray()
        with contextlib.suppress(ProtocolError):
            for read in self.received(self.asked["idle_timeout"]):  # the whole may take no longer
                body += read
                if len(body) > MAX_BODY_BYTES:
                    break
        page = body[:MAX_BODY_BYTES].decode("utf-8-sig", "replace")
        text = f"HTTP {status} {self.reply.reason}: {_words(_loaded(page, page)) or 'no words'}"
        if status // 100 == 3:
            target = header("Location", "another")
            text += f"; no redirect is followed: should {target} be the base?"
        elif status in (401, 403):
            text += "; check the key"
        elif status in (404, 405):
            text += "; check the model, and the base: most end in /v1"
        after = header("Retry-After", "").strip()
        seconds = float(after) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", after) else None
        with contextlib.suppress(IndexError, OverflowError, TypeError, ValueError):
            seconds = max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
        return HTTPStatusError(text, status=status, body=page, retry_after=seconds)

    def chunks(self) -> Iterator[Any]:
        """Yield the JSON values of the body; at last, .done says whether its own end was seen."""
        head, received = b"", self.received(self.asked["stall_timeout"])
        for read in received:
            head = (head + read).lstrip(b"\xef\xbb\xbf \t\r\n")  # a BOM, blank lines
            if re.search(rb"\A[{[<]|[:\r\n]|.{64}", head):
                break
        reads = itertools.chain([head], received)
        kind = self.reply.headers.get("Content-Type", "no Content-Type")
        if head.startswith((b"{", b"[")):
            yield from self._completion(reads)
        elif "event-stream" in kind.lower() or re.match(rb"[a-z_]*:|\Z", head):
            yield from self._event_chunks(sse_events(reads, self.see_ignored))
            yield from self._tail_chunks()
        else:
            remedy = "neither events nor JSON; check the base: most end in /v1"
            raise ProtocolError(f"{kind}, beginning {_quoted(head)}: {remedy}")

    def _event_chunks(self, events: Iterable[Event]) -> Iterator[Any]:
        for name, data, _, _ in events:
            self.silence, at = 0.0, 0
            if name == "error":  # whatever it holds; where it has a known form, that is told first
                yield (reported := _loaded(data, data))
                raise ServerError(f"an error event: {_words(reported)}", error=reported)
            while at < len(data):
                if data[at] != "{" and (other := _NOT_JSON.match(data, at)):
                    self.done, at = bool(other[1]), other.end()
                    continue
                try:
                    chunk, at = _raw_decode(data, at)
                except (ValueError, RecursionError) as error:
                    raise ProtocolError(f"not JSON: {_quoted(data[at:])}") from error
                self.last = data
                yield chunk
            if self.done:
                return

    def _tail_chunks(self) -> list[Any]:
        """The unterminated tail, read as if whole: an error explains the end, [DONE] is it."""
        chunks = []
        with contextlib.suppress(ProtocolError):
            for chunk in self._event_chunks(sse_events([self.tail + b"\n\n"])):
                _check_reported(chunk)
                chunks.append(chunk)
        return chunks if self.done else []

    def _completion(self, reads: Iterable[bytes]) -> Iterator[Any]:
        """The JSON value that came in place of events: a completion, or else an error."""
        self.streamed, body = False, bytearray()
        for read in reads:
            body += read
            _limited(len(body))
        self.tail = bytes(body)
        try:
            chunk, _ = _raw_decode(self.tail.decode())
        except (ValueError, RecursionError) as error:
            bare = re.sub(rb'"[^"]*"?', b"", re.sub(rb"(?s)\\.", b"", self.tail))
            if len(re.findall(rb"[{[]", bare)) > len(re.findall(rb"[]}]", bare)):
                return  # it is cut, not malformed
            raise ProtocolError(f"not JSON, {error}: {_quoted(self.tail)}") from error
        yield chunk
        choices = [each for part in _dicts(chunk) for each in _dicts(part.get("choices"))]
        self.done = any(choice.get("message") for choice in choices)
        if not self.done:  # a chunk alone is no answer either
            raise ProtocolError(f"JSON, neither a completion nor an error: {_quoted(self.tail)}")

    def see_ignored(self, line: bytes) -> None:
        """A line that is in no event may be an error or, after the last read, the tail."""
        text = line.decode("utf-8", "replace")
        field, _, value = text.partition(":")
        _check_reported({"error": _loaded(value, value)} if field == "error" else _loaded(text))
        self.last, self.tail = (self.last, line) if self.end else (text, b"")

    def received(self, stall_timeout: float) -> Iterator[bytes]:
        """Yield the body as it comes; gzip, labelled or not, is inflated."""
        encoding = self.reply.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            raise ProtocolError(f"the body has an encoding that was not asked for: {encoding}")
        reads, member = self._raw_reads(stall_timeout), zlib.decompressobj(31)
        head = next(reads, b"")
        reads = itertools.chain([head], reads)
        if not head.startswith(b"\x1f"):  # the first byte of gzip, and of no text
            yield from reads
            return
        # One byte may inflate to a thousand: feed it a few at a time.
        for piece in (read[at : at + 64] for read in reads for at in range(0, len(read), 64)):
            while piece := piece.lstrip(b"\0") if member.eof else piece:  # zeros may pad a member
                member = zlib.decompressobj(31) if member.eof else member
                try:
                    yield member.decompress(piece)
                except zlib.error as error:
                    raise ProtocolError(f"the gzip body is damaged: {error}") from error
                piece = member.unused_data
        if not (member.eof or self.end.__cause__):
            self.end = StreamInterrupted("the gzip body is cut off")
            self.end.__cause__ = EOFError()

    def _raw_reads(self, stall_timeout: float) -> Iterator[bytes]:
        """Yield what each read1 brings; then set .end to the error that this is without [DONE]."""
        read1, monotonic, timing = self.reply.read1, time.monotonic, self.timing
        record, idle_timeout = self.asked["record"], self.asked["idle_timeout"]
        self.sock.settimeout(min(idle_timeout, stall_timeout))
        self.end, self.silence = None, 0.0  # seconds in reads since the last data event
        read, cause = b"not the end", None
        while read and self.silence <= stall_timeout:
            start = monotonic()
            try:
                read = read1(READ_BYTES)
            except (OSError, http.client.HTTPException) as error:
                read, cause = b"", error
            gap = monotonic() - start
            self.silence += gap
            timing["reads"] += 1
            if gap > timing["max_gap"]:
                timing.update(max_gap=gap)
            if read and record is not None:
                record.write(read)
            yield read
        if not (read or cause) and self.reply.length:  # it is short; read1 does not tell
            cause = http.client.IncompleteRead(b"", self.reply.length)
        if read or (isinstance(cause, socket.timeout) and not cause.errno):
            phase = "stall" if read or stall_timeout < idle_timeout else "idle"
            text = f"nothing new in {self.asked[phase + '_timeout']:g} s (raise {phase}_timeout?)"
            self.end, cause = StreamTimeout(text, phase=phase), cause or TimeoutError()
        else:
            what = f"the connection broke: {cause!r}" if cause else "the stream ended before [DONE]"
            self.end = StreamInterrupted(what)
        self.end.__cause__ = cause

    def check_end(self, finish: dict[int, Any]) -> None:
        """Decide whether an answer is whole; raise what cut it short."""
        end = StreamInterrupted("[DONE] came before any choice") if self.done else self.end
        finished = bool(finish) and all(finish.values())
        quiet = isinstance(end, StreamTimeout) or not end.__cause__
        if finish and (self.done or (finished and quiet and not self.asked["require_done"])):
            return
        text = f"no choice had come, only {_quoted(self.last)}" if self.last else "it was empty"
        if finished:
            text = "each finish_reason had come" + ("; pass require_done=False?" if quiet else "")
        elif finish:
            text = "a finish_reason is missing"
        if self.tail:
            text += f"; it broke off in {_quoted(self.tail)}"
        end.args = (f"{end}; {text}",)
        if isinstance(end, StreamInterrupted):
            end.tail = self.tail[:MAX_BODY_BYTES]
        raise end


def _body(payload: Mapping[str, Any]) -> bytes:
    body = {"stream_options": {"include_usage": True}, **payload, "stream": True}
    if body["stream_options"] is None:
        del body["stream_options"]
    try:
        return json.dumps(body, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("payload is nested too deeply for JSON") from error


def _endpoint(base: str) -> tuple[str, str]:
    """The URL to post to, from a base as people paste it, and what messages show of it."""
    parts, netloc, port = urlsplit(""), "", 0
    with contextlib.suppress(KeyError, ValueError):  # another scheme, a port in letters, no IDNA
        parts = urlsplit(str.strip(base))
        netloc = ":".join(part.encode("idna").decode() for part in parts.netloc.split(":"))
        usual = {"http": 80, "https": 443}[parts.scheme]
        port = usual if parts.port is None else parts.port
    if "@" in parts.netloc:
        raise ValueError("base must not hold a user name or a password: use key or headers")
    if not (port and parts.hostname) or re.search(r"\s", netloc):
        raise ValueError(f"base must be like https://host/v1 or http://host:8080/v1, not {base!r}")
    path = parts.path.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
    path, query = (quote(part, safe="/?:@!$&'()*+,;=~%") for part in (path, parts.query))
    where = f" [{parts.scheme}://{parts.hostname[:255]}:{port}{path[:300]}]"
    return urlunsplit((parts.scheme, netloc, path, query, "")), where


def _headers(key: str, extra: Mapping[str, str]) -> tuple[dict[str, str], re.Pattern[str]]:
    """The request's headers, title-cased as urllib sends them, and a pattern for their secrets."""
    headers = {"Accept": "text/event-stream, application/json", "Accept-Encoding": "identity"}
    headers["Content-Type"] = "application/json"
    headers["User-Agent"] = f"chat_stream/{__version__}"  # CDNs refuse Python-urllib: "1010"
    headers.update({"Authorization": f"Bearer {key}"} if key else {})
    headers.update({str.title(name): value for name, value in extra.items()})
    for item in headers.items():
        if not re.fullmatch(r"(?a)[\w!#$%&'*+.^`|~-]+\n[\x20-\x7e\xa0-\xff]*", "\n".join(item)):
            raise ValueError(f"key or header {item[0]!r} cannot be sent: a line end? not latin-1?")
    named = filter(re.compile("(?i)auth|cookie|cred|key|secret|token").search, headers)
    last = r"[^\s;=]+(?==*\s*(?:;|$))"  # word of a header, or of each cookie in it
    words = [key, *(word for name in named for word in re.findall(last, headers[name]))]
    # A short one ("none") may be a part of other words; of a long one a message may hold a part.
    short, long = r"(?<!\w)%s(?!\w)", r"%s[^\s'\",;]*"
    forms = [(short if len(word) < 8 else long) % re.escape(word[:8]) for word in words if word]
    return headers, re.compile("|".join(forms) or "(?!)")  # which matches nothing


def _check_reported(value: Any) -> None:
    """Raise the error that a chunk reports, judged by value: "error": null is common."""
    for chunk in _dicts(value):
        choices = _dicts(chunk.get("choices"))
        bare = not choices and any(map(chunk.get, ("message", "detail", "error_message")))
        for holder in (chunk, *choices):
            error = holder.get("error")
            if bare or (any(error.values()) if isinstance(error, dict) else error):
                text = _words(error if choices else holder)
                raise ServerError(f"the server reports: {text}", error=error or holder)


class _Answer:
    """What the chunks have said so far; texts go by kind, choice and tool call."""

    def __init__(self) -> None:
        self.texts: dict[tuple[str, int, int], io.StringIO] = defaultdict(io.StringIO)
        self.halves: dict[tuple[str, int, int], str] = {}  # high surrogates, kept back
        self.finish: dict[int, Any] = {}  # by choice
        self.ids: dict[int, dict[int, str]] = defaultdict(dict)  # of tool calls, by choice and key
        self.keys: dict[int, dict[Any, Any]] = defaultdict(dict)  # by choice, and (index, id)
        self.had_delta, self.legacy = set[int](), set[int]()  # choices with deltas, function_call
        self.seen: dict[str, Any] = {"usage": None, "id": "", "model": ""}
        self.first_delta: float | None = None  # when it came

    def deltas(self, chunks: Iterable[Any]) -> Iterator[Delta]:
        had, seen, halves, texts = self.had_delta, self.seen, self.halves, self.texts
        for chunk in chunks:
            try:  # the common chunk, one piece of content and no more, on the shortest path
                (choice,) = chunk["choices"]
                ((name, text),) = choice["delta"].items()
                index, more, extra = choice["index"], chunk.get, choice.get
                known = type(index) is int and index in had and not choice["finish_reason"]
                other = more("usage") or more("error") or extra("usage") or extra("error")
                new = (not seen["id"] and more("id")) or (not seen["model"] and more("model"))
                # A lone half of a surrogate pair cannot be encoded, and goes the longer way.
                common = name == "content" and known and not (other or new) and text.encode()
            except (AttributeError, KeyError, TypeError, ValueError):
                common = False
            if common and not halves:
                texts["content", index, 0].write(text)
                yield _new_tuple(Delta, ("content", text, index, 0))
            else:
                for part in _dicts(chunk):
                    yield from self._part(part)
                _check_reported(chunk)

    def _part(self, chunk: dict[str, Any]) -> Iterator[Delta]:
        for name in ("id", "model"):
            self.seen[name] = self.seen[name] or str(chunk.get(name) or "")
        choices = _dicts(chunk.get("choices"))
        for usage in _dicts([holder.get("usage") for holder in (*choices, chunk)]):
            self.seen["usage"] = usage or self.seen["usage"]
        for choice in choices:
            index = _number(choice.get("index")) or 0
            self.finish[index] = self.finish.get(index) or choice.get("finish_reason") or None
            pieces = [*self._delta(index, choice.get("delta"))]
            if pieces:
                self.had_delta.add(index)
            elif index not in self.had_delta:
                pieces = [*self._delta(index, choice.get("message"))]
            yield from pieces

    def _delta(self, choice: int, delta: Any) -> Iterator[Delta]:
        get = (delta if isinstance(delta, dict) else {}).get
        reasoning = get("reasoning_content") or get("reasoning") or get("reasoning_details")
        said = {"reasoning": reasoning, "content": get("content"), "refusal": get("refusal")}
        for kind, text in [each for item in said.items() for each in _texts(*item)]:
            yield from self.put((kind, choice, 0), text)
        calls = _dicts(get("tool_calls"))
        if not calls and get("function_call"):
            calls = [{"index": 0, "function": get("function_call")}]
            self.legacy.add(choice)
        for call in calls:
            function = next(iter(_dicts(call.get("function"))), {})
            name, id_, arguments = function.get("name"), call.get("id"), function.get("arguments")
            name, id_ = "" if name == "null" else str(name or ""), str(id_ or "")
            if not isinstance(arguments, str):
                arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
            if name or id_ or arguments:
                key = self._key(choice, _number(call.get("index")), id_, name)
                again = name == self.texts["tool_name", choice, key].getvalue()
                yield from self.put(("tool_name", choice, key), "" if again else name)
                yield from self.put(("tool_arguments", choice, key), arguments)

    def _key(self, choice: int, index: int | None, id_: str, name: str) -> int:
        """The key of the call that a piece belongs to: the one with its id, else the latest of its
        index, else the latest. A name starts a new call if its id is new or, without an index, once
        arguments began."""
        ids, keys = self.ids[choice], self.keys[choice]
        key = keys.get((index, id_), keys.get((index, "")))
        if name and key is not None and not (id_ and (index, id_) in keys):
            begun = self.texts["tool_arguments", choice, key].tell()
            taken = ids[key] or (begun and self.texts["tool_name", choice, key].tell())
            key = None if (id_ and taken) or (begun and index is None) else key
        if key is None:
            key = max(ids, default=-1) + 1 if index is None or index < 0 or index in ids else index
        ids[key] = ids.get(key) or id_
        keys.update(dict.fromkeys([(index, ""), (None, ""), (index, id_), (None, id_)], key))
        return key

    def put(self, where: tuple[str, int, int], piece: str, last: bool = False) -> Iterator[Delta]:
        """Add a piece to a text; the high half of a surrogate pair waits for the low one."""
        piece = self.halves.pop(where, "") + piece
        if "\ud800" <= piece[-1:] <= "\udbff" and not last:
            self.halves[where], piece = piece[-1], piece[:-1]
        if piece:
            piece = piece.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
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
        def text(kind: str, call: int = 0) -> str:
            return self.texts[kind, index, call].getvalue()

        said: dict[str, Any] = {kind: text(kind) for kind in ("content", "reasoning", "refusal")}
        calls, sent = {}, []
        for key, id_ in sorted(self.ids[index].items()):
            name, arguments = text("tool_name", key), text("tool_arguments", key)
            value = _loaded(arguments if arguments.strip() else "{}")
            calls[key] = {"id": id_, "name": name, "arguments": value, "arguments_text": arguments}
            function = {"name": name, "arguments": arguments}
            sent.append({"id": id_, "type": "function", "function": function})
        message = {"role": "assistant", "content": said["content"] or (None if sent else "")}
        if said["refusal"]:
            message["refusal"] = said["refusal"]
        if sent and index in self.legacy:
            message["function_call"] = sent[0]["function"]
        elif sent:
            message["tool_calls"] = sent
        return {**said, "tool_calls": calls, "finish": self.finish.get(index), "message": message}


def _limited(size: int) -> int:
    if size > MAX_EVENT_BYTES:
        raise ProtocolError(f"an event is larger than MAX_EVENT_BYTES, {MAX_EVENT_BYTES}")
    return size


def _texts(kind: str, value: Any, depth: int = 4) -> Iterator[tuple[str, str]]:
    """The texts in a value, each with its kind: itself, or those of its parts."""
    if isinstance(value, dict):
        kinds = {"thinking": "reasoning", "reasoning": "reasoning", "refusal": "refusal"}
        kind = kinds.get(str(value.get("type")), kind)
        names = ("text", "thinking", "summary", "reasoning", "refusal", "content")
        value = [next(filter(None, map(value.get, names)), None)]
    if isinstance(value, list) and depth:
        for part in value:
            yield from _texts(kind, part, depth - 1)
    elif isinstance(value, str) and value:
        yield kind, value


def _dicts(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; a single object is taken for a list of one."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, dict)]


def _number(value: Any) -> int | None:
    return int(value) if re.fullmatch("-?[0-9]{1,18}", str(value)) else None


def _loaded(text: str, other: Any = None) -> Any:
    """The value of a JSON text; other where it is none."""
    with contextlib.suppress(RecursionError, ValueError):
        return json.loads(text)
    return other


def _words(value: Any, depth: int = 8) -> str:
    """All that an error says, in whatever shape, the part for people first."""
    if isinstance(value, dict):
        first = ("error", "message", "detail", "msg")
        value = [value[name] for name in sorted(value, key=lambda name: name not in first)]
    if isinstance(value, list):
        return ", ".join(filter(None, (_words(each, depth - 1) for each in value if depth)))
    if isinstance(value, str) and value.lstrip().startswith("<"):
        value = re.sub(r"(?is)<(script|style)\b.*?(</\1>|\Z)|<[^<>]*>", " ", value)
    return "" if value is None or isinstance(value, bool) else html.unescape(str(value)).strip()


def _quoted(value: str | bytes) -> str:
    text = value if isinstance(value, str) else value[:1200].decode("utf-8", "replace")
    return repr(text[:300])


# ---- The command line: a smoke test, made of the public calls alone ------------------------------

_USAGE = """
  python chat_stream.py                       a demo, streamed from this machine
  OPENAI_BASE_URL=http://127.0.0.1:8080/v1 python chat_stream.py "Why is it dark?"
  python chat_stream.py --replay body.sse --chunk-size 1

Exit status: 0 complete, 1 error, 2 usage, 3 cut by a limit or filtered, 130 Ctrl-C."""
_DEMO = r""": a server may send comments while the model thinks
data: {"choices": [{"delta": {"reasoning_content": "They want to see a stream."}}]}
data: {"choices": [{"delta": {"content": "Hello! 流式传输 comes in pieces \ud83d"}}]}
data: {"choices": [{"delta": {"content": "\ude80"}}]}
data: {"choices": [{"delta": {"tool_calls": [{"function": {"name": "get_weather"}}]}}]}
data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{\"city\": \"北"}}]}}]}
data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "京\"}"}}]}}]}
data: {"choices": [{"finish_reason": "tool_calls"}], "usage": {"completion_tokens": 18}}
data: [DONE]
""".replace("\n", "\n\n").encode()


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    import argparse  # not at the top: those who import this file do not need it

    parser = argparse.ArgumentParser(usage=_USAGE)
    add, env = parser.add_argument, os.environ.get
    add("prompt", nargs="?", metavar="PROMPT", help="the question, else standard input")
    add("--base", default=env("OPENAI_BASE_URL"), help="else OPENAI_BASE_URL; key: OPENAI_API_KEY")
    add("--model", default=env("OPENAI_MODEL") or "gpt-4o-mini", help="else OPENAI_MODEL")
    add("--typewriter", type=float, metavar="CPS", help="play CPS characters a second")
    add("--tee", default=os.devnull, metavar="FILE", help="write the text to FILE too")
    add("--record", default=os.devnull, metavar="FILE", help="keep the bare body in FILE (.sse)")
    add("--replay", metavar="FILE", help="print a bare body's events, not a whole HTTP response")
    add("--chunk-size", type=int, default=READ_BYTES, metavar="N", help="replay N bytes at a time")
    add("--json", action="store_true", help="print the result as JSON")
    add("--timeout", type=float, default=30.0, metavar="S", help="seconds of silence to allow")
    add("--retries", type=int, default=0, metavar="N", help="how often to try again")
    add("--no-done", action="store_true", help="for a server that sends no [DONE]")
    options = parser.parse_args(argv)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, getattr(sys, name) or io.StringIO())  # None where it was closed
        with contextlib.suppress(AttributeError):
            getattr(sys, name).reconfigure(errors="replace")
    try:
        return _ask(options) if options.replay is None else _replay(options)
    except KeyboardInterrupt:
        return 130
    except (ChatStreamError, OSError, ValueError, zlib.error) as error:
        if isinstance(error, BrokenPipeError):
            sys.stdout = sys.stderr = None  # nobody reads: print nothing, nor flush at the exit
        print(f"chat_stream: {error}", file=sys.stderr)
        return 2 if type(error) is ValueError else 1


def _replay(options: Any) -> int:
    with open(options.replay, "rb") as file:
        body = file.read()
    if body.startswith(b"HTTP/"):
        raise OSError(f"{options.replay} is a whole HTTP response, not a bare body")
    if body.startswith(b"\x1f\x8b"):
        body = zlib.decompressobj(31).decompress(body)
    if (size := options.chunk_size) < 1:
        raise ValueError(f"--chunk-size must be 1 or more, not {size}")
    for name, data, *_ in sse_events(body[at : at + size] for at in range(0, len(body), size)):
        print(json.dumps({"event": name, "data": data}, ensure_ascii=False), flush=True)
    left = re.split(rb"(?:\r\n|\n|\r(?!\n)){2}", body)[-1].lstrip(b"\r\n")
    if left:
        print(f"chat_stream: {len(left)} bytes were left over at the end", file=sys.stderr)
    return 0


def _ask(options: Any) -> int:
    key, prompt = os.environ.get("OPENAI_API_KEY"), options.prompt
    base, demo = options.base or "https://api.openai.com/v1", not (key or options.base)
    if demo:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_serve_demo, args=(listener,), daemon=True).start()
        base = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    elif not (prompt or sys.stdin.isatty()):
        prompt = sys.stdin.read()
    asked = {"model": options.model, "messages": [{"role": "user", "content": prompt or "Hello!"}]}
    limits = dict.fromkeys(("first_byte_timeout", "idle_timeout"), options.timeout)
    limits.update(retries=options.retries, require_done=not options.no_done)
    times: list[float] = []
    with open(options.tee, "w", encoding="utf-8") as tee, open(options.record, "wb") as record:
        show, result = _screen(options, tee, times), None
        try:
            result = chat_stream(asked, base, key, show, record=record, **limits)
        except ChatStreamError as error:
            result = error.partial
            raise
        finally:
            show(Delta("", ""))  # the end, also of the waiting
            if options.json and result:
                print(json.dumps(result, ensure_ascii=False, indent=1), flush=True)
    gaps = sorted(b - a for b, a in zip(times[1:], times)) or [0.0]
    say, tokens = sys.stderr.write, (result["usage"] or {}).get("completion_tokens", "?")
    say(f"finish: {result['finish']}, {len(result['content'])} characters, {tokens} tokens, ")
    say(f"first byte {result['timing']['first_byte']:.2f} s, {result['timing']['reads']} reads, ")
    say(f"gaps: median {gaps[len(gaps) // 2]:.3f} s, longest {gaps[-1]:.3f} s\n")
    tools = [call["arguments"] for call in result["tool_calls"].values()]
    if demo and result["content"].endswith("🚀") and tools == [{"city": "北京"}]:
        say("It came seven bytes at a time, cut through characters and a tool call, yet whole.\n")
    return 3 if result["finish"] in ("length", "content_filter") else 0


def _serve_demo(listener: socket.socket) -> None:
    with listener, listener.accept()[0] as connection:
        answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + _DEMO
        for at in range(0, len(answer), 7):
            connection.sendall(answer[at : at + 7])
            time.sleep(0.005 if at % 350 else 0.3)  # a model pauses, above all before it speaks
        connection.recv(READ_BYTES)  # the request: left unread, it would reset the connection


def _screen(options: Any, tee: TextIO, times: list[float]) -> Callable[[Delta], None]:
    """Make an on_delta for people: thoughts, and the waiting on a terminal, go to stderr."""
    terminal, quiet = sys.stderr.isatty(), io.StringIO() if options.json else None
    save, out = typewriter(tee), typewriter(quiet, None if quiet else options.typewriter)
    last, write, err = Delta("", ""), out, typewriter(quiet or sys.stderr)

    def wait() -> None:
        start = time.monotonic()
        while terminal and not begun.wait(0.2):
            sys.stderr.write(f"waiting for the first byte: {time.monotonic() - start:.0f} s\r")
        sys.stderr.write(f"{'':40}\r" if terminal else "")

    def show(delta: Delta) -> None:
        nonlocal last, write
        begun.set()
        waiter.join()
        times.extend([time.monotonic()] if delta.text else [])
        save(delta)
        if last.text and (last.kind, last.call) != (delta.kind, delta.call):
            write(Delta("content", " " if delta.kind == "tool_arguments" else "\n"))
        last, write = delta, err if delta.kind == "reasoning" else out
        dim = write is err and terminal and not os.environ.get("NO_COLOR")
        write(Delta("content", f"\x1b[2m{delta.text}\x1b[0m" if dim else delta.text))

    begun, waiter = threading.Event(), threading.Thread(target=wait, daemon=True)
    waiter.start()
    return show


if __name__ == "__main__":
    sys.exit(main())
