"""Tests of the functions that need no engine: `python3 -m unittest serving.tests` in `benches/peers`."""

import contextlib
import json
import os
import sys
import tempfile
import threading
import tomllib
import types
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import serve
from serving import client, engines, measures, tables


def answer(sent, times, tokens=None):
    return client.Answer(sent, times, 100, tokens or len(times), "text")


def stream(pieces, start=0.0):
    """A response of which a piece comes every second."""
    made = client.Stream(start)
    for number, piece in enumerate(pieces, 1):
        made.data += piece
        made.arrivals.append((start + number, len(made.data)))
    return made


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content):
    return event(choices=[{"delta": {"content": content}}])


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})


def chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class Streams(unittest.TestCase):
    def test_each_piece_of_text_has_the_time_of_its_event(self):
        role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        end = chunk(text("b") + USAGE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        found = client.answer(stream([HEAD, chunk(role), chunk(text("a")), end]))
        self.assertEqual((found.times, found.text, found.tokens, found.prompt_tokens), ([3.0, 4.0], "ab", 2, 7))

    def test_an_event_is_complete_when_its_last_byte_comes(self):
        one = chunk(text("abc"))
        found = client.answer(stream([HEAD + one[:9], one[9:20], one[20:], chunk(USAGE), b"0\r\n\r\n"]))
        self.assertEqual(found.times, [3.0])

    def test_an_event_can_span_chunks(self):
        one = text("abc")
        found = client.answer(stream([HEAD, chunk(one[:8]), chunk(one[8:]), chunk(USAGE), b"0\r\n\r\n"]))
        self.assertEqual(found.times, [3.0])

    def test_a_response_without_chunks(self):
        found = client.answer(stream([b"HTTP/1.1 200 OK\r\n\r\n", text("a"), USAGE]))
        self.assertEqual((found.times, found.tokens), ([2.0], 2))

    def test_incomplete_and_refused_requests_fail(self):
        for pieces in ([], [b"HTTP/1.1 200 OK\r\n"], [b"HTTP/1.1 429 Too Many\r\n\r\nfull"], [HEAD, chunk(text("a"))],
                       [HEAD, chunk(text("a")), b"0\r\n\r\n"], [HEAD, chunk(event(error="broken")), b"0\r\n\r\n"],
                       [HEAD, b"ff\r\nshort"]):
            with self.assertRaises(client.Failure, msg=pieces):
                client.answer(stream(pieces))

    def test_requests_run_at_the_same_time(self):
        together = threading.Barrier(3)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                together.wait(10)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text(asked["name"]) + USAGE)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = client.ask(server.server_address, [{"name": name} for name in "abc"], 10)
        server.shutdown()
        server.server_close()
        self.assertEqual([one.text for one in found], ["a", "b", "c"])


class Measures(unittest.TestCase):
    def test_prompts_differ_from_their_first_word_on_and_shared_ones_at_the_end(self):
        self.assertEqual(measures.prompt(100, "a"), measures.prompt(100, "a"))
        self.assertNotEqual(measures.prompt(100, "a"), measures.prompt(100, "b"))
        [one], [other] = measures.prompts_with_prefix(500, "a")
        one, other = one["content"].split(), other["content"].split()
        same = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
        self.assertEqual(same, 500 - measures.TEMPLATE_TOKENS - measures.ENDING_WORDS)
        self.assertEqual(len(one), len(other))

    def test_the_total_rate_includes_prompts(self):
        self.assertEqual(measures.total_rate([answer(0, [2, 3, 4]), answer(0, [1, 2, 3])]), 6 / 4)

    def test_one_sequence_decodes_between_its_tokens(self):
        self.assertEqual(measures.decode_rate([answer(0, [2, 2.5, 3])]), 2)

    def test_sequences_decode_together_after_the_last_prompt(self):
        one, other = answer(0, [1, 2, 3, 4, 5, 6, 7, 8]), answer(0, [3, 4, 5, 6, 7, 8, 9, 10])
        # From 3 to 8: five tokens of each.
        self.assertEqual(measures.decode_rate([one, other]), 10 / 5)

    def test_sequences_in_turns_decode_while_any_does(self):
        one, other = answer(0, [10, 11, 12]), answer(0, [22, 23, 24])
        self.assertEqual(measures.decode_rate([one, other]), 4 / 4)

    def test_a_piece_of_text_can_have_several_tokens(self):
        self.assertEqual(measures.decode_rate([answer(0, [1, 2, 3], tokens=6)]), 2)

    def test_one_token_has_no_decode_rate(self):
        self.assertIsNone(measures.decode_rate([answer(0, [1])]))

    def test_covered(self):
        self.assertEqual(measures.covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]), 4)

    def test_a_separate_input_embedding_is_not_read(self):
        tied = [("token_embd.weight", 100), ("blk.0.attn_q.weight", 10)]
        self.assertEqual(measures.bytes_per_token(tied), 110)
        self.assertEqual(measures.bytes_per_token([*tied, ("output.weight", 100)]), 110)

    def test_the_bound_is_one_reading_of_the_weights_for_each_token(self):
        self.assertEqual(measures.bound_share(50, 2e8, 2e10), 0.5)


# A program with the arguments and the first line of `hone serve`, which answers with its configuration.
FAKE_HONE = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

assert sys.argv[1:3] == ["serve", "--config"] and sys.argv[4:] == ["--quantize", "q8_0"], sys.argv
config = open(sys.argv[3]).read()

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        text = config + json.dumps(asked)
        for event in (
            {{"choices": [{{"delta": {{"content": text}}}}]}},
            {{"choices": [], "usage": {{"prompt_tokens": 1, "completion_tokens": 1}}}},
        ):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")

server = HTTPServer(("127.0.0.1", 0), Handler)
print(f"listening on http://127.0.0.1:{{server.server_port}}", flush=True)
server.serve_forever()
"""


class Engines(unittest.TestCase):
    def test_hone_is_started_asked_and_ended(self):
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as log:
            path = os.path.join(folder, "hone")
            with open(path, "w") as file:
                file.write(FAKE_HONE.format(python=sys.executable))
            os.chmod(path, 0o755)
            run = types.SimpleNamespace(hone=path, log=log, temperature=0.0, stop_tokens=[2], threads=1,
                                        scratch=lambda: tempfile.TemporaryDirectory(dir=folder))
            engine = engines.Hone("native", "a.gguf", "--quantize", "q8_0", label="", weights="", size=1)
            with engine.session(run, {}, 1, 64) as session:
                [reply] = session.ask([[{"role": "user", "content": "hello"}]], 5)
                self.assertGreater(session.memory()["resident"], 1 << 20)
            self.assertIsNotNone(session.child.returncode)
        config, asked = reply.text.rsplit("\n", 1)
        found = tomllib.loads(config)
        self.assertEqual((found["engine"]["backend"], found["model"]["path"]), ("native", "a.gguf"))
        asked = json.loads(asked)
        self.assertEqual((asked["logit_bias"], asked["max_tokens"], asked["stream"]), ({"2": -100}, 5, True))

    def test_an_engine_that_cannot_start_fails(self):
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as log:
            run = types.SimpleNamespace(hone="/bin/false", log=log, temperature=0.0, stop_tokens=[], threads=1,
                                        scratch=lambda: tempfile.TemporaryDirectory(dir=folder))
            engine = engines.Hone("native", "a.gguf", label="", weights="", size=1)
            with self.assertRaises(client.Failure), engine.session(run, {}, 1, 64):
                pass

    def test_settings_are_distinct_and_the_first_is_a_guess(self):
        for engine in (engines.Llama("m", 2, label="", weights="", size=1),
                       engines.Transformers("m", 2, label="", weights="", size=1)):
            for slots, first in ((1, False), (4, False), (1, True)):
                found = engine.settings(slots, first)
                self.assertEqual(len({json.dumps(setting) for setting in found}), len(found))
                self.assertGreater(len(found), 1)


class Phases(unittest.TestCase):
    class Fake(engines.Engine):
        """Decodes a token per second and request, and needs a second for a prompt."""

        @contextlib.contextmanager
        def session(self, run, setting, slots, context):
            self.asked = []
            yield self

        def ask(self, conversations, tokens):
            self.asked.append((conversations, tokens))
            return [client.Answer(0, [1 + i for i in range(tokens)], 100, tokens, "4") for _ in conversations]

        def memory(self):
            return {"resident": 10, "peak": 20}

    def test_a_level_sends_its_requests_at_once(self):
        engine = self.Fake("", "", 1)
        found = serve.measure_level(None, engine, {}, 16, 0, {"prompt": 100, "tokens": 5, "seconds": 0})
        # 16 times 5 tokens in 5 seconds; after the first ones, 16 times 4 tokens in 4 seconds.
        self.assertEqual((found["total"], found["decode"], found["peak_bytes"]), (16, 16, 20))
        conversations, tokens = engine.asked[-1]
        self.assertEqual((len({json.dumps(one) for one in conversations}), tokens), (16, 5))

    def test_the_first_token_is_timed_cold_and_with_a_served_prefix(self):
        engine = self.Fake("", "", 1)
        found = serve.measure_first(None, engine, {}, 0, {"first_prompt": 200, "seconds": 0})
        self.assertEqual((found["cold"], found["cached"], found["rounds"]), (1, 1, 1))
        [[cold]], [[cached]] = (asked for asked, _ in engine.asked[1:])
        self.assertEqual(cold["content"][:500], cached["content"][:500])


class Benches(unittest.TestCase):
    def test_lines_of_llama_batched_bench(self):
        line = {"pl": 4, "tg": 32, "t_pp": 1.0, "t_tg": 3.0}
        found = engines.bench_rates(f"noise\n{json.dumps(line)}\n")
        self.assertEqual(found, {4: {"total": 32.0, "decode": 128 / 3}})


class Tables(unittest.TestCase):
    def results(self):
        def row(label, rate, first):
            turn = {"total": rate / 2, "decode": rate, "prompt_tokens": 100, "tokens": 64, "loaded_bytes": 1 << 28,
                    "resident_bytes": 1 << 28, "peak_bytes": 1 << 29}
            long = {"cold": first, "cached": first / 20, "prompt_tokens": 1999, "resident_bytes": 1,
                    "peak_bytes": 1 << 30}
            setting = {"flash_attention": "on", "unified": False}
            phases = {"1": {"setting": setting, "probes": [{}, {}], "turns": [turn]},
                      "first token": {"setting": {}, "probes": [], "turns": [long]}}
            return {"label": label, "weights": "Q8_0", "size": 10**8, "phases": phases}

        machine = {"hone": "abc", "rustc": "1", "llama.cpp": "2", "transformers": "5", "torch": "2", "python": "3",
                   "processor": "P", "cores": 2, "threads": 2, "memory_gib": 24, "date": "D", "load": 0.1,
                   "others": 0.01}
        return {"environment": machine, "shape": {"levels": [1], "tokens": 64}, "temperature": 0.0,
                "bandwidth": [4e10], "in_process": [{"1": {"total": 90.0, "decode": 100.0}}], "failed": {},
                "rows": {"native-q8_0": row("Hone, native", 300, 1.0), "llama-q8_0": row("llama.cpp", 150, 2.0)}}

    def test_rates_ratios_and_shares(self):
        text = "\n".join(tables.lines(self.results()))
        for expected in ("| Hone, native | Q8_0 | 150 |", "| llama.cpp, without HTTP | Q8_0 | 90.0 |",
                         "| ratio: Hone, native (Q8_0) to llama.cpp (Q8_0) |  | 2.00 (2.00 to 2.00) |",
                         "| Hone, native | Q8_0 | 100 MB | 400 | 300 | 75% |", "| llama.cpp | Q8_0 | 2.00 s | 100 ms |",
                         "| ratio: Hone, native (Q8_0) to llama.cpp (Q8_0) |  | 2.00 (2.00 to 2.00) | 2.00",
                         "| Hone, native | Q8_0 | 256 MiB | 256 MiB, 512 MiB | 256 MiB, 512 MiB | 1,024 MiB |",
                         "| llama.cpp | Q8_0 | 1 | flash attention on, unified no | 2 |"):
            self.assertIn(expected, text)

    def test_without_results_there_is_a_line_that_says_so(self):
        self.assertEqual(tables.lines({}), tables.NONE)


if __name__ == "__main__":
    unittest.main()
