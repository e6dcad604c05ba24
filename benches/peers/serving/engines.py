"""The engines that `serve.py` compares, each started for one measurement and ended after it."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from peer import MARK
from serving import client, machine

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
START_SECONDS, ASK_SECONDS = 300, 1800

CONFIG = """
server = {{ bind = "127.0.0.1:0" }}
data.dir = "{data}"
model.path = "{model}"
engine = {{ backend = "{backend}", queue = 1024, compute = "{compute}" }}
rollout.enabled = false
train.enabled = false
"""


class Process:
    """A child process, which is ended at the end of a `with` block."""

    def __init__(self, command, run, **options):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
        self.run = run
        self.child = subprocess.Popen(list(map(str, command)), stderr=run.log, env=environment, **options)

    def memory(self):
        return machine.memory(self.child.pid)

    @contextlib.contextmanager
    def limit(self, seconds):
        """Ends the process if the block takes longer, so that a read from its output returns."""
        timer = threading.Timer(seconds, self.child.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def wait_until_ready(self):
        """Returns when the process answers."""

    def __enter__(self):
        try:
            self.wait_until_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        self.child.terminate()
        try:
            self.child.wait(30)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe:
                # A write that was cut off by the end of the process is of no interest.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Server(Process):
    """A process that answers chat requests over HTTP at `address`, each with the fields `more`."""

    def ask(self, conversations, tokens):
        bodies = [{"model": "default", "messages": messages, "max_tokens": tokens, "stream": True,
                   "stream_options": {"include_usage": True}, **sampling(self.run.temperature), **self.more}
                  for messages in conversations]
        return client.ask(self.address, bodies, ASK_SECONDS)


def sampling(temperature):
    """Greedy, or from the plain softmax."""
    return {"temperature": temperature, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} if temperature else {})}


class HoneServer(Server):
    def __init__(self, run, scratch, backend, model, compute, flags):
        config = os.path.join(scratch, "hone.toml")
        with open(config, "w") as file:
            data = os.path.join(scratch, "data")
            file.write(CONFIG.format(data=data, model=model, backend=backend, compute=compute))
        super().__init__([run.hone, "serve", "--config", config, *flags], run, stdout=subprocess.PIPE, text=True)
        # Hone has no `ignore_eos`.
        self.more = {"logit_bias": {str(token): -100 for token in run.stop_tokens}}

    def wait_until_ready(self):
        with self.limit(START_SECONDS):
            line = self.child.stdout.readline()
        if not line.startswith("listening on http://"):
            raise client.Failure(f"hone serve did not start; see {self.run.log.name}")
        host, port = line.strip().removeprefix("listening on http://").rsplit(":", 1)
        self.address = (host, int(port))


class LlamaServer(Server):
    more = {"ignore_eos": True, "cache_prompt": True}

    def __init__(self, run, model, setting, slots, context):
        self.address = ("127.0.0.1", machine.free_port())
        host, port = self.address
        super().__init__(
            [run.llama_server, "-m", model, "-np", slots, "-c", slots * context,
             "-t", setting["threads"], "-tb", setting["threads"], "-fa", setting["flash_attention"],
             "-kvu" if setting["unified"] else "-no-kvu", "-b", 2048, "-ub", setting["batch"],
             "--cache-ram", 0, "--no-webui", "--offline", "--host", host, "--port", port],
            run, stdout=run.log)

    def wait_until_ready(self):
        host, port = self.address
        deadline = time.monotonic() + START_SECONDS
        while not healthy(f"http://{host}:{port}/health"):
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise client.Failure(f"llama-server did not start; see {self.run.log.name}")
            time.sleep(0.05)


def healthy(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


class Worker(Process):
    """A process of `worker.py`: transformers."""

    def __init__(self, run, model, setting):
        super().__init__([sys.executable, WORKER], run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.job = {"model": model, "setting": setting, "threads": setting["threads"], "temperature": run.temperature}

    def ask(self, conversations, tokens):
        job = {**self.job, "kind": "answer", "conversations": conversations, "tokens": tokens}
        with self.limit(ASK_SECONDS):
            self.child.stdin.write(json.dumps(job) + "\n")
            self.child.stdin.flush()
            found = next((line for line in self.child.stdout if line.startswith(MARK)), None)
        result = json.loads(found[len(MARK):]) if found else {"error": "the worker ended or took too long"}
        if "error" in result:
            raise client.Failure(result["error"])
        return [client.Answer(**one) for one in result["answers"]]


class Engine:
    """One engine with weights in one format.

    `label` and `weights` are for the tables, `size` is the bytes of weights that a token reads. `session`
    returns a running engine for `slots` requests at once of at most `context` tokens each; `settings` has
    what it can be started with.
    """

    def __init__(self, label, weights, size):
        self.label, self.weights, self.size = label, weights, size

    def settings(self, slots, first):
        """Settings to try: for `slots` requests at once, or for the time to the first token. The first one
        is a good guess."""
        return [{}]


class Hone(Engine):
    def __init__(self, backend, model, *flags, computes=("f32",), **described):
        super().__init__(**described)
        self.backend, self.model, self.flags, self.computes = backend, model, flags, computes

    def settings(self, slots, first):
        return [{"compute": compute} for compute in self.computes] if len(self.computes) > 1 else [{}]

    @contextlib.contextmanager
    def session(self, run, setting, slots, context):
        compute = setting.get("compute", self.computes[0])
        with run.scratch() as scratch:
            with HoneServer(run, scratch, self.backend, self.model, compute, self.flags) as server:
                yield server


class Llama(Engine):
    def __init__(self, model, threads, **described):
        super().__init__(**described)
        self.model, self.threads = model, threads

    def settings(self, slots, first):
        unified = [False, True] if slots > 1 else [False]
        batches = [512, 2048] if first else [512]
        # Its threads wait in loops, so that one fewer can be faster while others serve HTTP.
        threads = [self.threads, self.threads - 1] if self.threads > 1 else [1]
        return [{"flash_attention": flash, "unified": one, "batch": batch, "threads": count}
                for count in threads for batch in batches for one in unified for flash in ("on", "off")]

    def session(self, run, setting, slots, context):
        return LlamaServer(run, self.model, setting, slots, -(-context // 256) * 256)


class Transformers(Engine):
    def __init__(self, model, threads, **described):
        super().__init__(**described)
        self.model, self.threads = model, threads

    def settings(self, slots, first):
        caches = ["dynamic"] if first else ["dynamic", "static"]
        fewer = [self.threads // 2] if self.threads > 1 and (slots == 1 or first) else []
        return [{"dtype": dtype, "cache": cache, "attention": "sdpa", "threads": threads}
                for threads in (self.threads, *fewer) for cache in caches for dtype in ("bf16", "f32")]

    def session(self, run, setting, slots, context):
        return Worker(run, self.model, setting)


def batched_bench(run, model, setting, levels, shape):
    """Rates of llama.cpp without HTTP, by `llama-batched-bench`: by the number of sequences at once."""
    context = max(levels) * (-(-(shape["prompt"] + shape["tokens"]) // 256) * 256)
    command = [run.batched_bench, "-m", model, "-c", context, "-npp", shape["prompt"], "-ntg", shape["tokens"],
               "-npl", ",".join(map(str, levels)), "-t", run.threads, "-tb", run.threads,
               "-fa", setting["flash_attention"], "--output-format", "jsonl"]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=run.log, text=True, check=True)
    return bench_rates(done.stdout)


def bench_rates(output):
    """The lines of `llama-batched-bench`, by the number of sequences."""
    rates = {}
    for line in output.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            tokens = row["pl"] * row["tg"]
            rates[row["pl"]] = {"total": tokens / (row["t_pp"] + row["t_tg"]), "decode": tokens / row["t_tg"]}
    return rates
