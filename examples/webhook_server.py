"""A reward webhook: checks the signature, scores completions.

    SECRET=... webhook_server.py [PORT] [FILE.py:FUNCTION]

FUNCTION has TRL's signature, f(prompts, completions, **columns). Without one, `score` is used.
"""
import asyncio, hashlib, hmac, inspect, json, os, runpy, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = os.environ["SECRET"].encode()
PORT = (sys.argv + ["9000"])[1]
SCORER = sys.argv[2] if len(sys.argv) > 2 else None

def signed(header, body):
    parts = dict(p.split("=", 1) for p in header.split(",") if "=" in p)
    seconds = parts.get("t", "0")
    wanted = hmac.new(SECRET, seconds.encode() + b"." + body, hashlib.sha256).hexdigest()
    fresh = seconds.isdigit() and abs(time.time() - int(seconds)) < 300
    return fresh and hmac.compare_digest(wanted, parts.get("v1", ""))

def score(sample):  # 1 if the completion contains the answer; None (missing) without an answer
    answer = sample["metadata"].get("answer")
    return None if answer is None else float(answer in sample["completion"])

def typed(text):  # lists and objects are JSON; other entries of the metadata stay texts
    try:
        return json.loads(text) if text and text.lstrip()[:1] in ("[", "{") else text
    except ValueError:
        return text

def trl(function, samples):  # the values of a function that TRL could call
    columns = {key for sample in samples for key in sample["metadata"]}
    given = {key: [typed(sample["metadata"].get(key)) for sample in samples] for key in columns}
    given["prompts"] = [sample["messages"] for sample in samples]
    given["completions"] = [[{"role": "assistant", "content": s["completion"]}] for s in samples]
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters}
    values = function(**given)
    if inspect.iscoroutine(values):
        values = asyncio.run(values)
    return [None if value is None else float(value) for value in values]

def rewards(samples):
    return trl(FUNCTION, samples) if SCORER else [score(sample) for sample in samples]

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        ok = signed(self.headers.get("Hone-Signature", ""), body)
        answer = {"rewards": rewards(json.loads(body)["samples"])} if ok else {}
        self.send_response(200 if ok else 401)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

if SCORER:
    FILE, NAME = SCORER.rsplit(":", 1)
    FUNCTION = runpy.run_path(FILE)[NAME]
server = ThreadingHTTPServer(("127.0.0.1", int(PORT)), Handler)
print(f"listening on port {server.server_port}", flush=True)
server.serve_forever()
