"""Drives a headless Chromium by the DevTools protocol."""

import base64
import contextlib
import json
import mimetypes
import pathlib
import re
import subprocess
import tempfile
import time

import websocket

# As crates/http/src/console/mod.rs sends it, for files that `Page` takes from a folder.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Failure(Exception):
    """A check that did not pass."""


@contextlib.contextmanager
def chromium(binary):
    """Yields the address of a new page."""
    with tempfile.TemporaryDirectory(prefix="hone-chromium-") as profile:
        command = [binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--remote-debugging-port=0", "--remote-allow-origins=*", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", "about:blank"]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            port = None
            for line in child.stderr:
                if found := re.search(r"ws://127\.0\.0\.1:(\d+)/", line):
                    port = found[1]
                    break
            if port is None:
                raise Failure("Chromium did not start")
            yield port
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=10)
            if child.poll() is None:
                child.kill()
                child.wait()
            time.sleep(0.2)


class Page:
    """A page, with the errors that it reported."""

    def __init__(self, address, assets=None):
        self.socket = websocket.create_connection(address, timeout=60)
        self.assets = assets and pathlib.Path(assets)
        self.number = 0
        self.errors = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        if self.assets:
            self.call("Fetch.enable", patterns=[{"urlPattern": "*/console*"}])

    def call(self, method, **params):
        self.number += 1
        own = self.number
        self.socket.send(json.dumps({"id": own, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == own:
                if "error" in message:
                    raise Failure(f"{method}: {message['error']}")
                return message["result"]
            self.note(message.get("method"), message.get("params", {}))

    def note(self, method, params):
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Fetch.requestPaused":
            self.fulfill(params)

    def fulfill(self, paused):
        """Answers a request for a file of the console from the folder."""
        name = re.sub(r"^\w+://[^/]+/console/?|[?#].*$", "", paused["request"]["url"]) or "index.html"
        file = self.assets / name
        kind = {".js": "text/javascript", ".svg": "image/svg+xml"}.get(file.suffix) or mimetypes.guess_type(name)[0]
        headers = [{"name": "content-type", "value": kind}, {"name": "content-security-policy", "value": POLICY}]
        self.number += 1
        message = {"requestId": paused["requestId"], "responseCode": 200, "responseHeaders": headers}
        message["body"] = base64.b64encode(file.read_bytes()).decode()
        self.socket.send(json.dumps({"id": self.number, "method": "Fetch.fulfillRequest", "params": message}))

    def js(self, expression):
        """The value of an expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise Failure(f"{expression[:200]}: {details.get('exception', {}).get('description', details['text'])}")
        return answer["result"].get("value")

    def wait(self, expression, what, seconds=20):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.js(f"Boolean({expression})"):
                return
            time.sleep(0.1)
        shown = self.js("document.body.innerText")
        raise Failure(f"not within {seconds} s: {what}\n{shown[:1500]}")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" and len(key) == 1 else "")

    def look(self, width, height, dark=False, phone=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))
