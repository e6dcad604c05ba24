#!/usr/bin/env python3
"""Runs the release binary with a real OpenTelemetry collector, Prometheus and MLflow, and checks what they receive.

    python3 tests/services/run.py --binary target/release/hone --environments target/services

The collector is Rotel, a package of PyPI that contains the program, MLflow is a package of PyPI, and Prometheus is
Debian's. They are installed in the folder of environments. A service that cannot be had is skipped with a counted line.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SECRET = "xylophone-4711"
ROTEL = "rotel==0.0.1a15"
MLFLOW = "mlflow==3.17.2"


def get(url, data=None, **headers):
    body = None if data is None else json.dumps(data).encode()
    headers["content-type"] = "application/json"
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read().decode()


def until(what, check, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            found = check()
            if found:
                return found
        time.sleep(0.2)
    raise SystemExit(f"not within {seconds} s: {what}")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def running(command, log, **variables):
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
        )
    try:
        yield child
    except BaseException:
        print(pathlib.Path(log).read_text(errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=30)
        if child.poll() is None:
            child.kill()
            child.wait()


def collector(environments):
    """The path of Rotel's program, or None."""
    venv = environments / "rotel"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    find = lambda: next(iter(venv.glob("lib/python*/site-packages/rotel/rotel-agent")), None)
    if not find():
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120, **quiet)
            pip = [venv / "bin/pip", "install", "-q", "--only-binary=:all:", ROTEL]
            subprocess.run(pip, check=True, timeout=300, **quiet)
    program = find()
    if program:
        program.chmod(0o755)
        if subprocess.run([program, "--version"], **quiet).returncode == 0:
            return program
    return None


def prometheus(environments):
    """The path of Prometheus, or None."""
    found = shutil.which("prometheus")
    program = environments / "prometheus/usr/bin/prometheus"
    if found or program.exists():
        return found or program
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 180}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(
        subprocess.SubprocessError, OSError
    ):
        subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=folder, check=True, **quiet)
        package = next(pathlib.Path(folder).glob("prometheus_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package, environments / "prometheus"], check=True, **quiet)
    return program if program.exists() else None


def mlflow(environments):
    """The path of MLflow's program, or None."""
    program = environments / "mlflow/bin/mlflow"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if not program.exists():
        with contextlib.suppress(subprocess.SubprocessError):
            venv = environments / "mlflow"
            subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120, **quiet)
            pip = [venv / "bin/pip", "install", "-q", "--only-binary=:all:", MLFLOW]
            subprocess.run(pip, check=True, timeout=400, **quiet)
    return program if program.exists() else None


CONFIG = """
[rollout]
group_size = 4
[train]
samples_per_step = 8
[policy]
promotion = "direct"
publish_every = 1
[[route]]
name = "default"
[[route.reward]]
name = "length"
kind = "length_range"
min = 1
max = 4
fade = 8
"""


@contextlib.contextmanager
def hone(binary, folder, **variables):
    """Runs the daemon; yields its URL and process."""
    config = folder / "hone.toml"
    config.write_text(CONFIG)
    log = folder / "hone.log"
    command = [binary, "serve", "--bind", "127.0.0.1:0", "--config", config]
    command += ["--backend", "native", "--data", folder / "data"]
    with running(command, log, **variables) as child:
        pattern = r"listening on (http://\S+)"
        line = until("the address", lambda: re.search(pattern, log.read_text()))
        yield line[1], child


def ask(url, **headers):
    question = {"model": "default", "messages": [{"role": "user", "content": f"What is 2 + 3? {SECRET}"}]}
    return json.loads(get(f"{url}/v1/chat/completions", {**question, "max_tokens": 8}, **headers))


def check_collector(program, binary, folder):
    port, grpc, log = free_port(), free_port(), folder / "rotel.log"
    command = [program, "start", "--otlp-http-endpoint", f"127.0.0.1:{port}"]
    command += ["--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--exporter", "blackhole"]
    command += ["--pid-file", folder / "rotel.pid", "--debug-log", "traces", "--debug-log", "metrics"]
    with running([*command, "--debug-log-verbosity", "detailed"], log):
        with hone(binary, folder, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}") as (url, _):
            ask(url, traceparent=f"00-{TRACE}-{PARENT}-01")
            for _ in range(8):
                ask(url)
            metrics = f"{url}/metrics"
            until("a step", lambda: re.search(r"hone_train_steps_total [1-9]", get(metrics)), 120)
            until("a version", lambda: re.search(r"hone_policy_version [1-9]", get(metrics)), 120)
        text = until("the last spans", lambda: "publication" in log.read_text() and log.read_text())
    assert SECRET not in text, "the collector got the text of a prompt"
    pattern = r"Trace ID *: (\w+)\s+Parent ID *: (\w*)\s+ID *: (\w+)\s+Name *: (.+)\n"
    spans = re.findall(pattern, text)
    children = lambda of: {name for _, parent, _, name in spans if parent == of}
    one = lambda of: next(span for span in spans if span[3] == of)
    trace, parent, request, _ = one("POST /v1/chat/completions")
    assert (trace, parent) == (TRACE, PARENT), "the trace is not continued"
    assert children(request) == {"prepare", "queue", "generate", "record"}, children(request)
    step, publication = one("step")[2], one("publication")
    assert children(step) == {"advantages", "forward_backward", "record", "publication"}, children(step)
    assert publication[1] == step and children(publication[2]) >= {"write", "stage", "gate", "activate"}
    attributes = set(re.findall(r"-> ((?:http|hone|gen_ai)[.][\w.]+):", text))
    assert attributes == {
        "http.route", "http.request.method", "http.response.status_code", "hone.request_id", "hone.policy_version",
        "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "hone.step", "hone.groups", "hone.samples",
        "hone.reward_mean", "hone.kl", "hone.outcome",
    }, attributes
    units = dict(re.findall(r"-> Name: (hone_\w+)\n.*\n *-> Unit: (\S+)", text))
    wanted = {
        "hone_http_requests_total": "1", "hone_train_steps_total": "1", "hone_memory_resident_bytes": "By",
        "hone_http_request_duration_seconds": "s",
    }
    assert wanted.items() <= units.items(), units
    for resource in ["service.name: Str(hone)", "service.version"]:
        assert resource in text, f"the collector did not get {resource}"
    print(f"collector: {len(spans)} spans, {len(units)} metrics")


def check_outage(binary, folder):
    nowhere = f"http://127.0.0.1:{free_port()}"
    services = {"OTEL_EXPORTER_OTLP_ENDPOINT": nowhere, "MLFLOW_TRACKING_URI": nowhere, "HONE_RUN_TRACKER": "mlflow"}
    with hone(binary, folder, **services) as (url, child):
        for _ in range(8):
            ask(url)
        lost = r"hone_otlp_dropped_spans_total [1-9]"
        until("dropped spans", lambda: re.search(lost, get(f"{url}/metrics")))
        until("a step", lambda: re.search(r"hone_train_steps_total [1-9]", get(f"{url}/metrics")), 120)
        until("failed requests", lambda: re.search(
            r"hone_tracker_failed_requests_total ([2-9]|\d\d)", get(f"{url}/metrics")))
        log = (folder / "hone.log").read_text()
        assert log.count("does not take data") == 1, log
        assert log.count("does not take the steps") == 1, log
        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == 0
    print(f"outage: requests are answered and trained on, the end took {time.monotonic() - started:.1f} s")


def check_prometheus(program, binary, folder):
    port, config = free_port(), folder / "prometheus.yml"
    rules = pathlib.Path(__file__).resolve().parents[2] / "dashboards/alerts.yml"
    with hone(binary, folder) as (url, _):
        target = url.removeprefix("http://")
        config.write_text(
            f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{rules}]\n"
            f"scrape_configs: [{{job_name: hone, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        command = [program, f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
        with running([*command, f"--storage.tsdb.path={folder / 'tsdb'}"], folder / "prometheus.log"):
            ask(url)
            api = f"http://127.0.0.1:{port}/api/v1"
            query = lambda q: json.loads(get(f"{api}/query?query={urllib.parse.quote(q)}"))
            wanted = "hone_http_requests_total{route='/v1/chat/completions'}"
            until("the request", lambda: query(wanted)["data"]["result"])
            until("open files", lambda: query("hone_process_open_files > 0")["data"]["result"])
            groups = json.loads(get(f"{api}/rules"))["data"]["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            until("healthy rules", lambda: all(
                rule["health"] == "ok"
                for group in json.loads(get(f"{api}/rules"))["data"]["groups"]
                for rule in group["rules"]
            ))
    print(f"prometheus: scraped, {len(rules)} rules evaluated")


def check_mlflow(program, binary, folder):
    port = free_port()
    command = [program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    server = f"http://127.0.0.1:{port}"
    api = lambda path, data=None: json.loads(get(f"{server}/api/2.0/mlflow/{path}", data))
    variables = {
        "MLFLOW_TRACKING_URI": server, "MLFLOW_EXPERIMENT_NAME": "services", "HONE_RUN_TRACKER": "mlflow",
        "MLFLOW_TRACKING_TOKEN": SECRET, "HONE_SERVER_CLIENT_KEYS": SECRET,
    }
    key = {"authorization": f"Bearer {SECRET}"}
    with running([*command, "--default-artifact-root", folder / "artifacts"], folder / "mlflow.log"):
        until("MLflow", lambda: get(f"{server}/health"), 120)

        def serve(steps):
            """Learns until there are so many steps."""
            with hone(binary, folder, **variables) as (url, _):
                done = lambda: int(re.search(r"hone_train_steps_total (\d+)", get(f"{url}/metrics"))[1])
                while done() < steps:
                    ask(url, **key)

        def run():
            experiment = api("experiments/get-by-name?experiment_name=services")["experiment"]
            body = {"experiment_ids": [experiment["experiment_id"]]}
            runs = api("runs/search", body)["runs"]
            assert len(runs) == 1, runs
            return runs[0]

        def history(name):
            query = f"metrics/get-history?run_id={run()['info']['run_id']}&metric_key={name}"
            return {point["step"] for point in api(query)["metrics"]}

        serve(3)
        first = run()
        assert first["info"]["status"] == "FINISHED", first["info"]
        assert len(history("reward_mean")) >= 3, history("reward_mean")
        serve(2)
        second = run()
        assert second["info"]["run_id"] == first["info"]["run_id"]
        steps = history("reward_mean")
        assert steps == set(range(1, max(steps) + 1)) and len(steps) >= 5, steps
        for name in [
            "kl", "entropy", "grad_norm", "completion_length", "loss", "part/length", "version/number",
            "version/passed", "version/parity/rollout",
        ]:
            assert history(name), f"MLflow did not get {name}"
        parameters = {entry["key"]: entry["value"] for entry in second["data"]["params"]}
        wanted = {"train.samples_per_step": "8", "rollout.group_size": "4", "run.tracker": "mlflow"}
        assert wanted.items() <= parameters.items(), parameters
        assert parameters["route.default.length"] == "length_range, weight 1", parameters
        tags = {entry["key"]: entry["value"] for entry in second["data"]["tags"]}
        assert tags["mlflow.source.name"] == "hone serve" and int(tags["hone.policy_version"]) > 0, tags
        assert SECRET.encode() not in (folder / "mlflow.db").read_bytes(), "MLflow got a secret"
        check_train(binary, folder, variables)
        names = {entry["key"] for entry in run_of(api, "train")["data"]["metrics"]}
        assert {"held_out_reward", "reward_mean"} <= names, names
    print(f"mlflow: steps {min(steps)} to {max(steps)} in one run, {len(parameters)} parameters")


def run_of(api, experiment):
    found = api(f"experiments/get-by-name?experiment_name={experiment}")["experiment"]
    return api("runs/search", {"experiment_ids": [found["experiment_id"]]})["runs"][0]


def check_train(binary, folder, variables):
    rows = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    config = folder / "train.toml"
    config.write_text(f'{CONFIG}[dataset]\npath = "{folder / "rows.jsonl"}"\nheld_out = 4\n')
    command = [binary, "train", "--config", config, "--steps", "3", "--data", folder / "train"]
    variables = {**variables, "MLFLOW_EXPERIMENT_NAME": "train"}
    with running(command, folder / "train.log", **variables) as child:
        assert child.wait(timeout=240) == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--environments", type=pathlib.Path, required=True)
    options = parser.parse_args()
    options.environments.mkdir(parents=True, exist_ok=True)
    binary, environments = options.binary.resolve(), options.environments.resolve()
    services = [
        ("an OpenTelemetry collector (rotel)", collector, check_collector),
        ("Prometheus", prometheus, check_prometheus),
        ("MLflow", mlflow, check_mlflow),
        (None, lambda _: True, lambda _, binary, folder: check_outage(binary, folder)),
    ]
    for name, find, check in services:
        program = find(environments)
        if not program:
            print(f"SKIPPED: tests/services/run.py: {name} is not available")
            continue
        with tempfile.TemporaryDirectory(prefix="hone-services-") as folder:
            check(program, binary, pathlib.Path(folder))


if __name__ == "__main__":
    main()
