"""A reward webhook: checks the signature, scores completions. SECRET=... webhook_server.py [PORT]"""
import hashlib, hmac, json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = os.environ["SECRET"].encode()

def signed(header, body):
    parts = dict(p.split("=", 1) for p in header.split(",") if "=" in p)
    seconds = parts.get("t", "0")
    wanted = hmac.new(SECRET, seconds.encode() + b"." + body, hashlib.sha256).hexdigest()
    fresh = seconds.isdigit() and abs(time.time() - int(seconds)) < 300
    return fresh and hmac.compare_digest(wanted, parts.get("v1", ""))

def score(sample):  # 1 if the completion contains the answer; None (missing) without an answer
    answer = sample["metadata"].get("answer")
    return None if answer is None else float(answer in sample["completion"])

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        ok = signed(self.headers.get("Hone-Signature", ""), body)
        answer = {"rewards": [score(s) for s in json.loads(body)["samples"]]} if ok else {}
        self.send_response(200 if ok else 401)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

server = ThreadingHTTPServer(("127.0.0.1", int((sys.argv + ["9000"])[1])), Handler)
print(f"listening on port {server.server_port}", flush=True)
server.serve_forever()
