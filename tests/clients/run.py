"""Runs sessions of the client libraries that applications use against `hone serve`, with both engines.

    python3 tests/clients/run.py --binary target/release/hone --environments target/clients

Starts a daemon for each engine, with the embedded model and `sessions.toml`, and runs the sessions of
`python/` and `node/`. Then `openai_client.py` checks that a daemon learns, `examples/agent.py` works through
some conversations, and schemathesis sends another daemon requests that it makes from the OpenAPI document.
The packages are installed in the folder of `--environments`. Sessions whose packages cannot be installed are
skipped.

Prints a table, each failure, and the counts in the last line. Exits with 1 if anything failed.
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from daemon import Failure, daemon, wait_until_ready
from environments import HERE, Node, NotAvailable, Python, variables

BACKENDS = ("mistralrs", "native")
# Sessions by environment.
SESSIONS = {
    "openai": (
        "openai_chat",
        "openai_tools",
        "openai_responses",
        "openai_errors",
        "anthropic_messages",
        "langchain_chat",
        "pydantic_ai_agent",
        "openai_agents_loop",
    ),
    "litellm": ("litellm_chat", "instructor_objects"),
    "node": ("openai_node", "vercel_ai"),
}
# Seconds for a session, and for everything with one daemon.
SESSION_SECONDS = 150
DAEMON_SECONDS = 600
# Enough rated turns for a step of training. That takes seconds; the example trains for minutes.
AGENT = ("--smoke", "--sessions=120", "--questions=24")
# A fixed seed and few examples, so that a run takes less than a minute and repeats. The excluded check
# requires that everything is accepted which follows the schemas. They cannot express which fields
# contradict each other, nor what depends on the model.
SCHEMATHESIS = (
    "--checks=all",
    "--exclude-checks=positive_data_acceptance",
    # A stream of ten minutes.
    "--exclude-path=/admin/events",
    "--generation-database=none",
    "--header=Authorization: Bearer every-right-key",
    "--max-examples=40",
    "--no-color",
    "--phases=examples,coverage,fuzzing,stateful",
    "--request-timeout=30",
    "--seed=1",
)


@dataclass
class Outcome:
    """What became of a session with one engine."""

    session: str
    backend: str
    passed: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def cell(self):
        failed = f", {len(self.failures)} FAILED" if self.failures else ""
        return f"{self.passed} passed{failed}, {self.seconds:.1f} s"


def run_program(outcome, command, folder=HERE, **more):
    """The lines that a program prints. If it fails, the outcome has its last lines."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SESSION_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        outcome.failures.append(str(error))
        return []
    finally:
        outcome.seconds = time.monotonic() - began
    if done.returncode != 0:
        tail = (done.stdout + done.stderr).strip()[-6000:]
        outcome.failures.append(f"exit code {done.returncode}\n{tail}")
    return done.stdout.splitlines()


def run_session(session, environment, backend, url):
    outcome = Outcome(session, backend)
    command = environment.command(session)
    lines = run_program(outcome, command, HONE_URL=url, HONE_KEY="session-key")
    for line in lines:
        # Libraries print lines of their own.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            check = json.loads(line)
            name, error = check["check"], check["error"]
            if error is None:
                outcome.passed += 1
            else:
                outcome.failures.append(f"{name}: {error}")
    if not outcome.passed and not outcome.failures:
        outcome.failures.append("no check ran")
    return outcome


def run_sessions(binary, environments, only):
    """All sessions with both engines, two at a time."""
    wanted = [
        (session, environments[name])
        for name, sessions in SESSIONS.items()
        for session in sessions
        if name in environments and (not only or session in only)
    ]
    if not wanted:
        return []
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        urls = {}
        for backend in BACKENDS:
            options = ("--backend", backend)
            started = daemon(binary, HERE / "sessions.toml", DAEMON_SECONDS, *options)
            urls[backend] = stack.enter_context(started)
            wait_until_ready(urls[backend])
        running = [
            pool.submit(run_session, session, environment, backend, urls[backend])
            for session, environment in wanted
            for backend in BACKENDS
        ]
        return [session.result() for session in running]


def run_learning(binary, environment, backend):
    """The session in which the daemon learns."""
    outcome = Outcome("openai_client", backend)
    command = [environment.program, HERE / "openai_client.py"]
    command += ["--binary", binary, "--backend", backend]
    lines = run_program(outcome, command)
    outcome.passed = 0 if outcome.failures else 1
    print(*lines, sep="\n")
    return outcome


def run_agent(binary, environment, backend):
    """The agent of the examples with few conversations. That more questions are solved is not checked."""
    outcome = Outcome("agent", backend)
    command = [environment.program, HERE.parents[1] / "examples" / "agent.py", *AGENT]
    lines = run_program(outcome, [*command, "--hone", binary, "--backend", backend])
    outcome.passed = 0 if outcome.failures else 1
    print(*lines, sep="\n")
    return outcome


def run_schemathesis(binary, environment, backend):
    """Requests that schemathesis makes from the OpenAPI document."""
    outcome = Outcome("schemathesis", backend)
    options = ("--backend", backend)
    with contextlib.ExitStack() as stack:
        # For the files that it writes.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hone-client-"))
        started = daemon(binary, HERE / "sessions.toml", DAEMON_SECONDS, *options)
        url = stack.enter_context(started)
        wait_until_ready(url)
        document = f"{url}/openapi.json"
        command = [environment.program.with_name("schemathesis"), "run", document, *SCHEMATHESIS]
        lines = run_program(outcome, command, folder)
        wait_until_ready(url)
    print(*[line.strip() for line in lines if "generated" in line], sep="\n")
    outcome.passed = 0 if outcome.failures else 1
    return outcome


def install(names, folder):
    """The environments that can be installed, and why the others cannot."""
    environments = {name: Node(folder) if name == "node" else Python(name, folder) for name in names}
    reasons = {}

    def install_one(name):
        try:
            environments[name].install()
        except (NotAvailable, OSError) as error:
            reasons[name] = error

    with ThreadPoolExecutor(len(environments)) as pool:
        list(pool.map(install_one, environments))
    available = {name: env for name, env in environments.items() if name not in reasons}
    return available, reasons


def print_table(outcomes):
    rows = {}
    for outcome in outcomes:
        rows.setdefault(outcome.session, {})[outcome.backend] = outcome.cell()
    print(f"{'session':<22}" + "".join(f"{backend:<28}" for backend in BACKENDS))
    for session, cells in rows.items():
        print(f"{session:<22}" + "".join(f"{cells.get(b, '-'):<28}" for b in BACKENDS))
    for outcome in outcomes:
        for failure in outcome.failures:
            print(f"FAILED: {outcome.session} with {outcome.backend}: {failure}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=pathlib.Path, required=True, help="the hone binary")
    parser.add_argument("--environments", type=pathlib.Path, required=True, help="for the packages")
    parser.add_argument("--only", nargs="+", default=[], help="names of sessions")
    arguments = parser.parse_args()
    binary, only = arguments.binary.resolve(), arguments.only
    folder = arguments.environments.resolve()
    environments, reasons = install([*SESSIONS, "schemathesis"], folder)
    outcomes = run_sessions(binary, environments, only)
    for name, environment, action, backend in (
        ("openai_client", "openai", run_learning, "mistralrs"),
        ("openai_client", "openai", run_learning, "native"),
        ("agent", "openai", run_agent, "native"),
        ("schemathesis", "schemathesis", run_schemathesis, "native"),
    ):
        if environment in environments and (not only or name in only):
            outcomes.append(action(binary, environments[environment], backend))
    print_table(outcomes)
    for name, reason in reasons.items():
        print(f"SKIPPED: the clients of tests/clients with the packages of {name}: {reason}")
    failed = sum(len(outcome.failures) for outcome in outcomes)
    passed = sum(outcome.passed for outcome in outcomes)
    print(f"clients: {passed} passed, {failed} failed, {len(reasons)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, OSError) as error:
        print(f"FAILED: {error}")
        sys.exit(1)
