"""Starts `hone serve` for the clients' tests."""

import contextlib
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request


class Failure(Exception):
    """A check that did not pass."""


def expect(holds, otherwise):
    if not holds:
        raise Failure(otherwise)


@contextlib.contextmanager
def daemon(binary, config, timeout, *options):
    """Starts `hone serve` on a free port with fresh data; yields its URL; stops it with SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="hone-client-") as folder:
        log_path = pathlib.Path(folder) / "log"
        command = [binary, "serve", "--bind", "127.0.0.1:0", "--config", config, *options]
        command += ["--data", pathlib.Path(folder) / "data"]
        with open(log_path, "wb") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        # Ends a daemon that hangs.
        watchdog = threading.Timer(timeout, child.kill)
        watchdog.start()
        try:
            line = child.stdout.readline()
            match = re.match(r"listening on (http://\S+)", line)
            expect(match, f"the first line of `hone serve` is {line!r}")
            threading.Thread(target=child.stdout.read, daemon=True).start()
            yield match[1]
            child.send_signal(signal.SIGTERM)
            expect(child.wait(timeout=20) == 0, f"exit code {child.returncode} after SIGTERM")
        except BaseException:
            print(log_path.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            watchdog.cancel()
            if child.poll() is None:
                child.kill()
            child.wait()


def wait_until_ready(url, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=5):
            return
        time.sleep(0.1)
    raise Failure(f"{url}/readyz is not ready after {seconds} s")
