# Runs a solution against tests or inputs and reports on descriptor 4, one line per result:
#
#     MAC NAME TEXT      MAC = sha256("NONCE NAME TEXT"), in hexadecimal digits
#
# NAME is "count", "broken" or the number of a test. The nonce comes from the daemon, which ignores
# lines with a wrong MAC; reading one line does not help to forge another. The solution runs in this
# process and could search for the nonce, so functions that expose other code's frames are refused.


def refuse(*_):
    raise ValueError("not available in the sandbox")


def alarm(*_):
    raise KeyboardInterrupt("out of time")


def drive():
    import _signal
    import ast
    import builtins
    import hashlib
    import io
    import json
    import os
    import posix
    import signal
    import sys

    del globals()["drive"]
    write, sha256, run, parse = posix.write, hashlib.sha256, builtins.exec, builtins.compile
    timer, real = _signal.setitimer, _signal.ITIMER_REAL
    reader, writer, wrap = io.BytesIO, io.BytesIO, io.TextIOWrapper
    anything, nothing, text_of, encode = BaseException, None, str, json.dumps
    job = json.loads(sys.stdin.buffer.read())
    null = posix.open("/dev/null", os.O_RDONLY)
    posix.dup2(null, 0)
    posix.close(null)
    nonce, keep, seconds = job["nonce"].encode(), job["keep"], job["seconds"]

    def report(name, text):
        line = name + b" " + text
        rest = sha256(nonce + b" " + line).hexdigest().encode() + b" " + line + b"\n"
        while rest:
            rest = rest[write(4, rest):]

    # Top-level assertions and expressions are tests; other statements prepare them.
    parts, inputs, calls = [], job.get("inputs", []), job.get("calls", [])
    count = len(inputs) + len(calls)
    if "tests" in job:
        try:
            tree = ast.parse(job["tests"], "<tests>")
            tested = [isinstance(node, (ast.Assert, ast.Expr)) for node in tree.body]
            if any(tested):
                for node, is_test in zip(tree.body, tested):
                    module = ast.Module([node], [])
                    parts.append((parse(module, "<tests>", "exec"), is_test))
            else:
                parts.append((parse(tree, "<tests>", "exec"), True))
            count = sum(is_test for _, is_test in parts)
        except (SyntaxError, ValueError) as error:
            report(b"broken", text_of(error).encode("utf-8", "replace").replace(b"\n", b" "))
            return
    report(b"count", text_of(count).encode())

    _signal.signal(_signal.SIGALRM, alarm)
    _signal.signal = refuse
    frames = frozenset(("tb_frame", "gi_frame", "cr_frame", "ag_frame"))
    refused = frozenset((
        "sys._getframe", "sys._current_frames", "sys._current_exceptions", "sys.settrace",
        "sys.setprofile", "gc.get_objects", "gc.get_referrers", "gc.get_referents",
        "ctypes.dlopen", "ctypes.dlsym", "ctypes.cdata", "sys.monitoring.register_callback",
    ))
    wrong, look = ValueError, "object.__getattr__"

    def guard(event, arguments):
        if event in refused or (event == look and arguments[1] in frames):
            raise wrong("not available in the sandbox")

    sys.addaudithook(guard)

    def attempt(step, arguments):
        try:
            timer(real, seconds, seconds / 4)
            step(*arguments)
            timer(real, 0)
            return True
        except anything:
            timer(real, 0)
            return False

    def attempted(step, *arguments):
        # The alarm may arrive after the step has ended, before the timer is switched off.
        try:
            return attempt(step, arguments)
        except anything:
            timer(real, 0)
            return False

    try:
        solution = parse(job["solution"], "<solution>", "exec")
    except anything:
        return
    if parts:
        space = {"__name__": "solution", "__builtins__": builtins}
        # A solution that raises may have defined the tested names before.
        attempted(run, solution, space)
        number = 0
        for code, is_test in parts:
            passed = attempted(run, code, space)
            if is_test:
                report(text_of(number).encode(), b"1" if passed else b"0")
                number += 1
        return
    if calls:
        # A solution that raises passes no call, as in the guides to GRPO.
        space = {"__name__": "solution", "__builtins__": builtins}
        if not attempted(run, solution, space):
            return
        function, answers = space.get(job["function"]), {}

        def answer(number, given):
            answers[number] = encode(function(given)).encode()[:keep].hex().encode()

        for number, given in enumerate(calls):
            if attempted(answer, number, given):
                report(text_of(number).encode(), answers[number])
        return
    for number, given in enumerate(inputs):
        sys.stdin = wrap(reader(given.encode("utf-8", "surrogatepass")), "utf-8", "replace")
        written = writer()
        sys.stdout = printer = wrap(written, "utf-8", "backslashreplace", write_through=True)
        ended = attempted(run, solution, {"__name__": "__main__", "__builtins__": builtins})
        try:
            # Before the printer is deleted, which closes its buffer.
            output = written.getvalue()[:keep] if ended else nothing
        except anything:
            output = nothing
        sys.stdout = sys.__stdout__
        del printer
        if output is not nothing:
            report(text_of(number).encode(), output.hex().encode())


drive()
