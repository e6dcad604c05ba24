"""Installs the packages of the sessions, each set in its own environment, and runs programs in it.

An environment is installed once and again when its pinned versions change.
"""

import contextlib
import filecmp
import os
import pathlib
import shutil
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
INSTALL_SECONDS = 240
# Keeps libraries from the network and from settings of the machine's user.
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1,localhost",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
USERS = ("ANTHROPIC_", "LANGCHAIN_", "LITELLM_", "OPENAI_")


class NotAvailable(Exception):
    """The packages of an environment cannot be installed; the text is the reason."""


def variables(**more):
    """The variables of a program in an environment."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(USERS)}
    return {**kept, **ENVIRONMENT, **more}


class Python:
    """A virtual environment with the packages of `requirements/NAME.txt`."""

    def __init__(self, name, folder):
        self.folder = folder / name
        self.pins = HERE / "requirements" / f"{name}.txt"
        self.program = self.folder / "bin" / "python"

    def install(self):
        installed = self.folder / "installed.txt"
        if is_same(self.pins, installed):
            return
        must_run("python3", "-m", "venv", "--clear", self.folder)
        options = ["-q", "--disable-pip-version-check", "-r", self.pins]
        must_run(self.program, "-m", "pip", "install", *options)
        shutil.copy(self.pins, installed)

    def command(self, session):
        return [self.program, HERE / "python" / f"{session}.py"]


class Node:
    """A copy of `node/` with its packages, because Node looks for packages beside a program."""

    def __init__(self, folder):
        self.folder = folder / "node"

    def install(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        for program in (HERE / "node").glob("*.mjs"):
            shutil.copy(program, self.folder)
        lock = "package-lock.json"
        if is_same(HERE / "node" / lock, self.folder / "installed.json"):
            return
        for file in ("package.json", lock):
            shutil.copy(HERE / "node" / file, self.folder)
        options = ["--ignore-scripts", "--no-audit", "--no-fund"]
        must_run("npm", "ci", *options, folder=self.folder)
        shutil.copy(self.folder / lock, self.folder / "installed.json")

    def command(self, session):
        return ["node", self.folder / f"{session}.mjs"]


def is_same(pins, installed):
    with contextlib.suppress(OSError):
        return filecmp.cmp(pins, installed, shallow=False)
    return False


def must_run(*command, folder=None):
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailable(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if "error" in line.lower()]
        program, reason = pathlib.Path(command[0]).name, (lines or ["no reason"])[0]
        raise NotAvailable(f"{program} failed with {done.returncode}: {reason}")
