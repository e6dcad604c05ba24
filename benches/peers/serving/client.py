"""Streamed chat requests over HTTP, many at once, with the time of every piece of text.

The client shares the processors with the server that it measures. So while requests run, it only
receives bytes and notes when; it reads HTTP, events and JSON after the last one has ended.
"""

import json
import selectors
import socket
import time
from dataclasses import dataclass, field


class Failure(Exception):
    """A request without a complete answer."""


@dataclass
class Stream:
    """The bytes of a response. `arrivals` has pairs of a time and the number of bytes received until then."""

    sent: float
    arrivals: list = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)


@dataclass
class Answer:
    """When a request was sent, when each piece of its text came, and the tokens that the server counted."""

    sent: float
    times: list
    prompt_tokens: int
    tokens: int
    text: str

    @property
    def first(self):
        return self.times[0]

    @property
    def last(self):
        return self.times[-1]


def request(host, path, body):
    """The bytes of a POST request, after whose response the server closes the connection."""
    content = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n")
    return head.encode() + content


def ask(address, bodies, timeout):
    """Sends all bodies at once to `address`, a host and a port; the answers in the same order.

    Raises `Failure` if a request fails or the last one does not end within `timeout` seconds.
    """
    host, port = address
    sockets = [socket.create_connection(address) for _ in bodies]
    try:
        with selectors.DefaultSelector() as selector:
            streams = []
            for connection, body in zip(sockets, bodies):
                sent = request(f"{host}:{port}", "/v1/chat/completions", body)
                streams.append(Stream(time.perf_counter()))
                connection.sendall(sent)
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, streams[-1])
            receive(selector, time.perf_counter() + timeout)
    finally:
        for connection in sockets:
            connection.close()
    return [answer(stream) for stream in streams]


def receive(selector, deadline):
    """Receives until every connection is closed."""
    while selector.get_map():
        ready = selector.select(max(0, deadline - time.perf_counter()))
        if not ready:
            raise Failure("a request took too long")
        for key, _ in ready:
            piece = key.fileobj.recv(1 << 16)
            now = time.perf_counter()
            if piece:
                key.data.data += piece
                key.data.arrivals.append((now, len(key.data.data)))
            else:
                selector.unregister(key.fileobj)


def pieces(stream):
    """The parts of the body, each with the time when it was complete, in a chunked response or a plain one."""
    head, separator, _ = bytes(stream.data).partition(b"\r\n\r\n")
    start = len(head) + len(separator)
    lines = head.decode("latin-1").split("\r\n")
    if not separator or lines[0].split(" ")[1:2] != ["200"]:
        raise Failure(bytes(stream.data).decode(errors="replace")[-500:] or "the connection was closed")
    arrivals = iter(stream.arrivals)
    moment, received = next(arrivals)

    def arrival(end):
        nonlocal moment, received
        while received < end:
            moment, received = next(arrivals)
        return moment

    if not any(line.lower().replace(" ", "") == "transfer-encoding:chunked" for line in lines):
        for moment, end in stream.arrivals:
            if end > start:
                yield bytes(stream.data[start:end]), moment
                start = end
        return
    while True:
        line = stream.data.find(b"\r\n", start)
        if line < 0:
            raise Failure("the response ends within a chunk")
        size = int(stream.data[start:line].split(b";")[0], 16)
        start = line + 2 + size
        if size == 0:
            return
        if len(stream.data) < start:
            raise Failure("the response ends within a chunk")
        yield bytes(stream.data[line + 2:start]), arrival(start)
        start += 2


def events(stream):
    """The JSON of every server-sent event, with the time when it was complete."""
    buffer = b""
    for piece, moment in pieces(stream):
        buffer += piece
        while b"\n\n" in buffer:
            event, _, buffer = buffer.partition(b"\n\n")
            for line in event.split(b"\n"):
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield json.loads(line[5:]), moment


def answer(stream):
    times, text, usage = [], "", None
    for event, moment in events(stream):
        if "error" in event:
            raise Failure(json.dumps(event["error"])[:500])
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            # The first event may have the role alone.
            piece = choice.get("delta", {}).get("content")
            if piece:
                times.append(moment)
                text += piece
    if not usage or not times:
        raise Failure(f"the answer has no {'text' if usage else 'usage'}: {text!r}")
    return Answer(stream.sent, times, usage["prompt_tokens"], usage["completion_tokens"], text)
