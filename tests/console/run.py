"""Drives every view and every action of the console in a headless Chromium.

    python tests/console/run.py --binary target/release/hone --axe PATH/axe.min.js
    python tests/console/run.py --binary target/release/hone --axe PATH/axe.min.js --screenshots docs/console

Starts a daemon with the embedded model, asks and rates until versions were promoted and a canary runs, and then opens
each view. Fails if a view lacks its content, an action has no effect, the page reports an error, or axe-core finds a
serious fault. `--assets crates/http/src/console` tests files of the page without a new build.

Exits with 0 and a last line `ok: ...` if every check passes, else with 1 and `failed: ...`.
"""

import argparse
import json
import pathlib
import random
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))
from browser import Failure, Page, chromium  # noqa: E402
from daemon import daemon, wait_until_ready  # noqa: E402

# Endpoints that a build may lack, of which the page says so.
OPTIONAL = ("admin/data", "admin/keys", "admin/audit", "admin/erase", "admin/backup")
# Views, each with a text that it must contain.
VIEWS = {
    "health": "Time to first token",
    "learning": "Groups with a signal",
    "changes": "Served now",
    "canary": "Decision",
    "users": "Raters",
    "answers": "What is",
    "refused": "Groups dropped last",
    "rewards": "exact_match",
    "data": "Backup",
    "keys": "What operators did",
}


def call(url, path, body=None, key="operator-key", method=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise Failure(f"{path}: {error.code} {error.read()[:500]}") from error


def ask(url, number):
    """One question: the sum, the key and the answer."""
    draw = random.Random(number)
    a, b = draw.randrange(8), draw.randrange(4)
    key = "other-app-key" if number % 4 == 0 else "app-key"
    asked = {
        "model": "default",
        "messages": [{"role": "user", "content": f"What is {a} + {b}?"}],
        "user": f"user-{number % 9}",
        # A canary counts one rating of a session.
        "metadata": {"answer": str(a + b), "session_id": f"visit-{number}"},
        "seed": number,
    }
    return a + b, key, call(url, "/v1/chat/completions", asked, key)


def use(url, number):
    """One question with its rating, sometimes with a comment or a correction."""
    wanted, key, answer = ask(url, number)
    text = answer["choices"][0]["message"]["content"]
    right = f"<answer>{wanted}</answer>" in text.replace(" ", "")
    rating = {"completion_id": answer["id"], "name": "thumbs", "value": 1 if right else 0, "end_user": f"user-{number % 9}"}
    if number % 7 == 0:
        rating["comment"] = "Right, thank you." if right else f"Wrong: it is {wanted}."
    call(url, "/v1/feedback", rating, key)
    if number % 23 == 0 and not right:
        call(url, "/v1/feedback", {"completion_id": answer["id"], "correction": f"The sum is {wanted}."}, key)


def teach(url, promoted, seconds):
    """Asks and rates until versions were promoted, and a canary has some ratings."""
    deadline, number = time.monotonic() + seconds, 0
    with ThreadPoolExecutor(4) as pool:
        while time.monotonic() < deadline:
            policies = call(url, "/admin/policies")
            running = call(url, "/admin/canary")["running"]
            ratings = running and running["canary"]["ratings"] + running["active"]["ratings"]
            served = [row for row in policies["data"] if row["state"] in ("active", "retired") and row["version"]]
            if len(served) >= promoted and running and ratings >= 6:
                return
            size = 2 if len(served) >= promoted and running else 8
            list(pool.map(lambda n: use(url, n), range(number, number + size)))
            number += size
    raise Failure(f"{promoted} versions were not promoted within {seconds} s: {policies['data'][-1]}, {call(url, '/admin/train')}")


def ask_until(url, stop):
    """Asks without rating, so that the plots have traffic."""
    number = 100_000
    while not stop.wait(0.1 + 0.4 * random.random()):
        ask(url, number)
        number += 1


class Console:
    def __init__(self, page, url, axe, screenshots):
        self.page, self.url, self.axe, self.screenshots = page, url, axe, screenshots
        self.checks = self.absent = 0

    def expect(self, holds, otherwise):
        if not holds:
            raise Failure(otherwise)
        self.checks += 1

    def check_errors(self, where):
        absent = [error for error in self.page.errors if "404" in error and any(path in error for path in OPTIONAL)]
        self.absent += len(absent)
        errors = [error for error in self.page.errors if error not in absent]
        self.page.errors.clear()
        self.expect(not errors, f"{where}: {errors}")

    def open(self, view, text):
        self.page.js(f"location.hash = '#{view}'")
        self.wait_text(text)

    def wait_text(self, text):
        found = f"document.getElementById('view').innerText.includes({json.dumps(text)})"
        self.page.wait(found, f"the view shows {text!r}")
        self.checks += 1

    def click(self, text, scope="#view"):
        """Clicks the first button or link with a text."""
        script = f"""(() => {{
            const all = [...document.querySelectorAll('{scope} button, {scope} a')];
            const found = all.find((one) => one.textContent.trim() === {json.dumps(text)} || one.textContent.trim().startsWith({json.dumps(text)} + ' '));
            if (found) {{ found.scrollIntoView({{block: 'center'}}); found.focus(); found.click(); }}
            return Boolean(found);
        }})()"""
        self.page.wait(script, f"a button {text!r} in {scope}")

    def confirm(self, note, type_=None):
        """Confirms the open dialog, which must say what will happen, and waits for a note."""
        self.page.wait("document.querySelector('dialog.confirm[open] li')", "a dialog with effects")
        effects = self.page.js("[...document.querySelectorAll('dialog.confirm li')].map((one) => one.textContent)")
        self.expect(effects and all(len(effect) > 20 for effect in effects), f"the effects are {effects}")
        if type_:
            self.page.js(f"document.querySelector('dialog.confirm input').value = {json.dumps(type_)}")
        self.check_axe("dialog")
        self.page.js("document.querySelector('dialog.confirm [value=yes]').click()")
        self.page.wait(f"document.getElementById('notes').innerText.includes({json.dumps(note)})", f"a note {note!r}", 60)
        self.page.js("document.getElementById('notes').replaceChildren()")
        self.checks += 1

    def check_axe(self, where):
        if not self.axe:
            return
        if not self.page.js("Boolean(window.axe)"):
            self.page.js(self.axe + ";0")
        found = self.page.js("""axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations
            .filter(({impact}) => impact === 'serious' || impact === 'critical')
            .map(({id, nodes}) => `${id}: ${nodes.slice(0, 4).map((node) => node.target.join(' ') + ' ' + node.failureSummary).join('; ')}`))""")
        self.expect(not found, f"axe-core, {where}: {found}")

    def picture(self, name):
        if self.screenshots:
            self.page.js("document.getElementById('notes').replaceChildren()")
            time.sleep(0.3)
            self.page.screenshot(self.screenshots / f"{name}.png")

    def sign_in(self, key):
        self.page.js("document.getElementById('key-dialog').open || document.getElementById('key-button').click()")
        self.page.js(f"document.getElementById('key-input').value = '{key}'")
        self.page.js("document.querySelector('#key-form [type=submit]').click()")
        self.page.wait("/healthy|warning/.test(document.getElementById('status').textContent)", f"a status with {key}")
        self.page.errors.clear()

    # The parts of the test.

    def start(self):
        self.page.look(1360, 900)
        self.page.call("Page.navigate", url=f"{self.url}/console")
        self.page.wait("document.getElementById('key-dialog')?.open", "the dialog for the key")
        self.check_axe("key dialog")
        self.sign_in("viewer-key")
        # A key that may only read sees everything, and its actions are refused.
        self.open("learning", "Pause")
        self.click("Pause")
        self.confirm("lacks the scope admin")
        self.page.errors.clear()
        self.sign_in("operator-key")

    def views(self):
        time.sleep(5)
        for scheme, dark, size, phone in [("light", False, (1360, 900), False), ("dark", True, (1360, 900), False), ("phone", False, (390, 844), True)]:
            self.page.look(*size, dark=dark, phone=phone)
            for view, text in VIEWS.items():
                self.open(view, text)
                self.check_axe(f"{view}, {scheme}")
                self.check_errors(f"{view}, {scheme}")
                wide = self.page.js("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                self.expect(wide <= 0, f"{view}, {scheme}: {wide} pixels too wide")
                self.picture(f"{view}-{scheme}")
            self.open("answers", "What is")
            self.page.js("(document.querySelector('#view tr:has(.badge.good) a') ?? document.querySelector('#view td a')).click()")
            self.wait_text("Probability of a token")
            self.expect(self.page.js("document.querySelectorAll('.tokens span').length") > 3, "no tokens")
            self.check_axe(f"answer, {scheme}")
            self.check_errors(f"answer, {scheme}")
            self.picture(f"answer-{scheme}")
        self.page.look(1360, 900)

    def plots(self):
        for view, least in (("health", 3), ("learning", 5), ("canary", 1)):
            self.open(view, VIEWS[view])
            self.page.wait(f"document.querySelectorAll('.canvas canvas').length >= {least}", f"{least} plots in {view}", 40)
            self.checks += 1

    def keyboard(self):
        self.page.js("document.activeElement.blur()")
        self.page.press("5")
        self.page.wait("location.hash === '#users'", "the view of the key 5")
        self.page.press("Tab")
        self.checks += 1

    def actions(self):
        self.open("learning", "Pause")
        self.click("Pause")
        self.page.wait("document.querySelector('dialog.confirm[open]')", "a dialog")
        self.page.js("document.querySelector('dialog.confirm [value=no]').click()")
        self.expect(call(self.url, "/admin/train")["state"] != "paused", "a cancelled pause has an effect")
        self.click("Pause")
        self.confirm("Training:")
        self.click("Resume")
        self.confirm("Training:")

        self.open("users", "Raters")
        self.click("Quarantine")
        self.confirm("is in quarantine", "test")
        self.expect(len(call(self.url, "/admin/feedback/quarantine")["data"]) == 1, "nothing is in quarantine")
        self.open("refused", "test")
        self.click("Release")
        self.confirm("is released")
        self.expect(not call(self.url, "/admin/feedback/quarantine")["data"], "a key is in quarantine")

        self.open("rewards", "Try a reward")
        self.page.js("""(() => { const [prompt, text, metadata] = document.querySelectorAll('#view textarea');
            for (const [area, value] of [[prompt, 'What is 3 + 4?'], [text, '<reasoning>3 + 4</reasoning><answer>7</answer>'], [metadata, 'answer = 7']])
                { area.value = value; area.dispatchEvent(new Event('input')); } })()""")
        self.click("Score")
        self.wait_text("Reward: 1.5")

        self.open("answers", "What is")
        before = call(self.url, "/admin/answers?limit=1&source=live")["data"][0]["id"]
        self.page.js(f"location.hash = '#answers/{before}'")
        self.click("Erase")
        self.confirm("The answer is erased.")
        after = call(self.url, "/admin/answers?limit=1&source=live")["data"][0]["id"]
        self.expect(after != before, "the answer is still there")

        self.open("canary", "Decision")
        self.click("End the canary")
        self.confirm("The canary has ended.")
        self.page.wait("!document.querySelector('#view').innerText.includes('End the canary')", "no canary")

        self.open("changes", "Served now")
        for verb, done in (("Pin", True), ("Unpin", False)):
            self.click(verb)
            self.confirm(f"{verb.lower()}ned.")
            pinned = [row for row in call(self.url, "/admin/policies")["data"] if row["pinned"]]
            self.expect(bool(pinned) == done, f"after {verb}: {pinned}")
        self.click("Compare")
        self.page.wait("document.querySelector('#view .pair')", "compared prompts", 40)
        self.check_axe("comparison")
        self.picture("compare-light")
        active = call(self.url, "/admin/policies")["active"]
        self.click("Roll back to")
        self.confirm("is served.")
        back = call(self.url, "/admin/policies")["active"]
        self.expect(back < active, f"version {back} is served after {active}")
        self.click("Promote")
        self.confirm("is served.")
        self.expect(call(self.url, "/admin/policies")["active"] != back, "no other version is served")
        self.open("learning", "Trainer")
        if self.page.js("[...document.querySelectorAll('#view button')].some((one) => one.textContent === 'Resume')"):
            self.click("Resume")
            self.confirm("Training:")
        self.click("Step now")
        self.page.wait("document.querySelector('dialog.confirm[open]')", "a dialog")
        self.page.js("document.querySelector('dialog.confirm [value=yes]').click()")
        self.page.wait("/Training:|failed/.test(document.getElementById('notes').innerText)", "the step's note", 60)
        # Without a ready group a step is refused, which the browser reports.
        self.page.errors = [error for error in self.page.errors if "409" not in error]
        self.data()
        self.check_errors("actions")

    def data(self):
        """Erasure by filter and a backup, if the build has them."""
        if not self.page.js("fetch('admin/data', {headers: {authorization: 'Bearer operator-key'}}).then(({ok}) => ok)"):
            return
        self.open("data", "Retention")
        self.page.js("document.querySelector('#view form select').value = 'end_user'; document.querySelector('#view form input').value = 'user-3'")
        self.click("Erase …")
        self.confirm("are erased.")
        self.click("Back up …")
        self.confirm("The backup is in")
        self.open("keys", "policies.activate")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", required=True, type=pathlib.Path)
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    parser.add_argument("--axe", type=pathlib.Path, help="axe.min.js of the npm package axe-core")
    parser.add_argument("--screenshots", type=pathlib.Path, help="a folder for pictures of every view")
    parser.add_argument("--assets", type=pathlib.Path, help="a folder whose files replace those of the build")
    parser.add_argument("--promoted", type=int, default=8)
    parser.add_argument("--timeout", type=int, default=420)
    arguments = parser.parse_args()
    if arguments.screenshots:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    axe = arguments.axe.read_text() if arguments.axe else None
    try:
        with daemon(arguments.binary, HERE / "console.toml", arguments.timeout, "--backend", "native") as url:
            wait_until_ready(url)
            began = time.monotonic()
            teach(url, arguments.promoted, 200)
            print(f"versions and a canary after {time.monotonic() - began:.0f} s", flush=True)
            with chromium(arguments.chromium) as port:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                    address = json.load(answer)[0]["webSocketDebuggerUrl"]
                console = Console(Page(address, arguments.assets), url, axe, arguments.screenshots)
                stop = threading.Event()
                traffic = threading.Thread(target=ask_until, args=(url, stop), daemon=True)
                traffic.start()
                for part in (console.start, console.views, console.plots, console.keyboard, console.actions):
                    if part == console.actions:
                        stop.set()
                        traffic.join()
                    part()
                    print(f"{part.__name__}: {console.checks} checks", flush=True)
                console.page.socket.close()
        if not arguments.axe:
            print("SKIPPED: accessibility of the console: axe-core is not available")
        if console.absent:
            print(f"{console.absent} requests for endpoints that this build lacks")
        print(f"ok: {console.checks} checks of the console")
    except Exception as error:  # noqa: BLE001
        print(f"failed: {type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
