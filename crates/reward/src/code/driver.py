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
    import json
    import os
    import posix
    import signal
    import sys

    del globals()["drive"]
    write, sha256, run, parse = posix.write, hashlib.sha256, builtins.exec, builtins.compile
    timer, real = _signal.setitimer, _signal.ITIMER_REAL
    anything, text_of, encode = BaseException, str, json.dumps
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

    # Assertions of the tests are counted where they stand: the value of each one, and each call whose
    # name begins with `assert`, goes through a function of the driver. It is a constant of the compiled
    # code, because the solution can replace names. A failure counts even if the solution catches it.
    counts = {"checked": 0, "failed": 0}

    def record(value):
        counts["checked"] += 1
        if value:
            return True
        counts["failed"] += 1
        return False

    def checking(function):
        def checked(*arguments, **named):
            counts["checked"] += 1
            try:
                return function(*arguments, **named)
            except anything:
                counts["failed"] += 1
                raise

        return checked

    marks = {"\0record": record, "\0checking": checking}

    def marked(name, value):
        mark = ast.Constant("\0" + name)
        return ast.copy_location(ast.Call(ast.copy_location(mark, value), [value], []), value)

    def called(node):
        function = node.func if isinstance(node, ast.Call) else None
        return getattr(function, "attr", getattr(function, "id", ""))

    def runs_all(node):
        return any(
            called(n) == "main" and isinstance(n.func, ast.Attribute)
            and isinstance(n.func.value, ast.Name) and n.func.value.id in ("unittest", "pytest")
            for n in ast.walk(node)
        )

    def signals(statements):
        return any(isinstance(n, (ast.Assert, ast.Raise)) for s in statements for n in ast.walk(s))

    class Rewriter(ast.NodeTransformer):
        def visit_Assert(self, node):
            self.generic_visit(node)
            node.test = marked("record", node.test)
            return node

        def visit_Call(self, node):
            name = called(node)
            self.generic_visit(node)
            if name.lower().startswith("assert") or name == "fail":
                node.func = marked("checking", node.func)
            return node

        def visit_Expr(self, node):
            # The driver itself runs the tests that these calls would find.
            if runs_all(node):
                return ast.copy_location(ast.Pass(), node)
            return self.generic_visit(node)

        def reached(self, node):
            holds = ast.copy_location(ast.Constant(True), node)
            return ast.copy_location(ast.Expr(marked("record", holds)), node)

        def visit_If(self, node):
            # `if add(2, 3) != 5: raise …` is an assertion in other words.
            raises = any(isinstance(n, ast.Raise) for n in node.body)
            self.generic_visit(node)
            return [self.reached(node), node] if raises else node

        def visit_Try(self, node):
            # `try: …; assert False` checks that an exception is raised.
            checks = signals(node.body)
            self.generic_visit(node)
            for handler in node.handlers if checks else ():
                handler.body.insert(0, self.reached(handler))
            return node

    def filled(code):
        constants = [
            marks.get(c, c) if isinstance(c, str) else filled(c) if isinstance(c, type(code)) else c
            for c in code.co_consts
        ]
        return code.replace(co_consts=tuple(constants))

    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    setup = definitions + (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign)
    found, inputs, parts = [], job.get("calls", []), []
    count, check, patched = len(inputs), False, ()
    if "tests" in job:
        try:
            import traceback
            import warnings

            warnings.simplefilter("ignore")
            tree = ast.parse(job["tests"], "<tests>")
            tried = {id(n) for t in ast.walk(tree) if isinstance(t, ast.Try) for n in ast.walk(t)}
            for node in ast.walk(tree):
                if id(node) in tried:
                    continue
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        __import__(alias.name)
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    __import__(node.module)
            # It reads frames, which are refused.
            traceback.clear_frames = lambda _: None
            top = [node for node in tree.body if not isinstance(node, definitions)]
            used = {called(n) for node in top for n in ast.walk(node)}
            for node in tree.body:
                if not isinstance(node, definitions) or node.name in used:
                    continue
                if isinstance(node, ast.ClassDef):
                    tests, own = [n for n in node.body if isinstance(n, definitions[:2])], 1
                    tests = [n for n in tests if n.name.startswith("test")]
                    found += [(node.name, n.name) for n in tests]
                elif node.name == "check" and node.args.args:
                    check = True
                    found.append(("check", ""))
                    tests = []
                else:
                    tests, own = [node] if node.name.startswith("test") else [], 0
                    found += [(n.name, "") for n in tests]
                for n in tests:
                    if len(n.args.args) - len(n.args.defaults) > own:
                        raise ValueError(f"{n.name} needs arguments, which only pytest can give")
            for node in tree.body:
                is_test = not isinstance(node, setup)
                rewritten = Rewriter().visit(node)
                nodes = rewritten if isinstance(rewritten, list) else [rewritten]
                module = ast.fix_missing_locations(ast.Module(nodes, []))
                parts.append((filled(parse(module, "<tests>", "exec")), is_test))
            count = sum(is_test for _, is_test in parts) + len(found)
            if "unittest" in sys.modules:
                classes = sys.modules["unittest"].TestCase.__mro__[:-1]
                patched = tuple((c, dict(vars(c))) for c in classes)
        except (SyntaxError, ValueError, ImportError) as error:
            report(b"broken", text_of(error).encode("utf-8", "replace").replace(b"\n", b" "))
            return
    report(b"count", text_of(count).encode())

    # Taken before the solution can replace them.
    originals, names_of, copied, every = dict(vars(builtins)), vars, dict, all
    has, attribute, put = hasattr, getattr, setattr
    builtins.exit = builtins.quit = sys.exit

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
    if "tests" in job:
        functions = [n.name for n in ast.parse(job["solution"]).body if isinstance(n, definitions)]
        chosen = job["function"] if job["function"] in functions else functions and functions[-1]
        entry = job.get("entry") or chosen
        space = {"__name__": "solution", "__builtins__": builtins}
        # A solution that raises may have defined the tested names before.
        attempted(run, solution, space)
        for name in originals:
            put(builtins, name, originals[name])
        space["__name__"] = "__main__"

        def finished(value):
            if has(value, "__await__"):
                import asyncio

                class Loop(asyncio.SelectorEventLoop):
                    # The sockets by which other threads wake the loop; the sandbox has no sockets.
                    _csock = None

                    def _make_self_pipe(self):
                        pass

                    def _close_self_pipe(self):
                        pass

                loop = Loop()
                asyncio.set_event_loop(loop)
                loop.run_until_complete(value)

        def run_found(name, method):
            if not method:
                finished(space[name](*((space[entry],) if name == "check" and check else ())))
                return
            kind = space[name]
            is_case = has(kind, "doCleanups")
            case = kind(method) if is_case else kind()

            def step(owner, *names):
                for each in names:
                    finished(attribute(owner, each, lambda: None)())

            step(kind, "setUpClass", "setup_class")
            step(case, "asyncSetUp", "setUp", "setup_method")
            try:
                step(case, method)
            finally:
                step(case, "tearDown", "asyncTearDown", "teardown_method", "doCleanups")
                step(kind, "tearDownClass", "teardown_class")

        units = [(run, (code, space), is_test) for code, is_test in parts]
        units += [(run_found, names, True) for names in found]
        number = 0
        for step, arguments, is_test in units:
            counts["checked"] = counts["failed"] = 0
            passed = attempted(step, *arguments) and not counts["failed"]
            # A solution that changes the assertions of unittest passes no test.
            passed = passed and every([copied(names_of(c)) == kept for c, kept in patched])
            if is_test:
                checked = counts["checked"] > 0
                report(text_of(number).encode(), b"0" if not passed else b"1" if checked else b"-")
                number += 1
        return
    if inputs:
        # A solution that raises passes no call, as in the guides to GRPO.
        space = {"__name__": "solution", "__builtins__": builtins}
        if not attempted(run, solution, space):
            return
        function, answers = space.get(job["function"]), {}

        def answer(number, given):
            answers[number] = encode(function(given)).encode()[:keep].hex().encode()

        for number, given in enumerate(inputs):
            if attempted(answer, number, given):
                report(text_of(number).encode(), answers[number])
        return


drive()
