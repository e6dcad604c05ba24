"""A proxy before an S3 server that does what a bad network and a busy store do."""

import collections
import http.client
import http.server
import random
import threading
import time

# The share of requests that each fault hits. `lost` has its effect, and the answer says otherwise.
FAULTS = {"slow": 0.1, "error": 0.08, "lost": 0.05, "conflict": 0.1, "torn": 0.08}


class Proxy(http.server.ThreadingHTTPServer):
    """Listens at `self.url`. Passes everything on until `bad` is set or `corrupt` matches a path."""

    daemon_threads = True

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), Handler)
        self.port, self.url = port, f"http://127.0.0.1:{self.server_address[1]}"
        # `corrupt` is a regular expression: a byte of the objects that are read from such paths is wrong.
        self.bad, self.corrupt, self.counts = False, None, collections.Counter()
        self.draw = random.Random(1)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """Clients that are killed leave connections."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments):
        pass

    def is_hit(self, fault, applies=True):
        hit = self.server.bad and applies and self.server.draw.random() < FAULTS[fault]
        self.server.counts[fault] += hit
        return hit

    def refuse(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def forward(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.is_hit("slow"):
            time.sleep(self.server.draw.uniform(0.5, 4))
        if self.is_hit("error"):
            return self.refuse(500)
        conditional = "if-match" in self.headers or "if-none-match" in self.headers
        if self.is_hit("conflict", self.command == "PUT" and conditional):
            return self.refuse(409)
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            return self.refuse(502)
        finally:
            upstream.close()
        if self.is_hit("lost"):
            return self.refuse(500)
        read = self.command == "GET" and answer.status in (200, 206)
        if read and self.server.corrupt and self.server.corrupt.search(self.path) and content:
            self.server.counts["corrupted"] += 1
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        if answer.status not in (204, 304):
            length = answer.getheader("content-length") if self.command == "HEAD" else len(content)
            self.send_header("content-length", str(length))
        self.end_headers()
        if self.is_hit("torn", read and len(content) > 1):
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward
