# Calls a reward function with the arguments that TRL's GRPOTrainer passes, once for all samples of the
# job on standard input. A job without samples only loads the source and finds the function. Writes one
# JSON object to descriptor 4: {"values": [0.5, null]}, {"function": WHY} if the source has no such
# function, or {"failed": WHY}.
import inspect
import json
import math
import os
import sys
import types

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class NoFunction(Exception):
    pass


def find(module, name):
    space = vars(module)
    if callable(space.get(name)):
        return space[name]
    own = [n for n, f in space.items() if isinstance(f, types.FunctionType) and f.__module__ == module.__name__]
    if name:
        found = f"only {', '.join(own)}" if own else "and no other"
        raise NoFunction(f"is {json.dumps(name)}: the source has no such function, {found}")
    rewards = [n for n in own if "completions" in inspect.signature(space[n]).parameters]
    if len(rewards) == 1:
        return space[rewards[0]]
    if rewards:
        raise NoFunction(f"is missing: the source defines {', '.join(rewards)}, so name one of them")
    raise NoFunction("is missing: no function of the source has an argument `completions`, so name one")


def arguments(function, samples):
    ignore = lambda *_: None
    given = {
        **samples.pop("columns"),
        **samples,
        "trainer_state": None,
        "log_extra": ignore,
        "log_metric": ignore,
    }
    parameters = inspect.signature(function).parameters.values()
    absent = [p.name for p in parameters if p.kind in NAMED and p.default is p.empty and p.name not in given]
    if absent:
        raise TypeError(f"the function has the argument `{absent[0]}`, and the prompt has no such column")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    return {p.name: given[p.name] for p in parameters if p.name in given}


def number(value):
    if isinstance(value, str):
        raise TypeError(f"the function returned the text {value!r} instead of a number")
    value = math.nan if value is None else float(value)
    return value if math.isfinite(value) else None


def awaited(coroutine):
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
    return loop.run_until_complete(coroutine)


def call(function, samples):
    count = len(samples["completions"])
    values = function(**arguments(function, samples))
    if inspect.isawaitable(values):
        values = awaited(values)
    if values is None:
        raise TypeError("the function returned None instead of a list")
    values = [number(value) for value in values]
    if len(values) != count:
        raise ValueError(f"the function returned {len(values)} values for {count} completions")
    return values


def explained(error, file):
    is_syntax = isinstance(error, SyntaxError)
    line, trace = error.lineno if is_syntax else None, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error.msg if is_syntax else error}".removesuffix(": ")
    if isinstance(error, ModuleNotFoundError):
        text += " (the sandbox has the standard library only)"
    return text if line is None else f"line {line}: {text}"


def answer(job):
    module = types.ModuleType("rewards")
    sys.modules["rewards"] = module
    try:
        exec(compile(job["source"], job["file"], "exec"), vars(module))
        function = find(module, job["function"])
        return {"values": call(function, job["samples"]) if job["samples"] else []}
    except NoFunction as error:
        return {"function": str(error)}
    except BaseException as error:
        return {"failed": explained(error, job["file"])[:500].encode("utf-8", "replace").decode()}


rest = json.dumps(answer(json.loads(sys.stdin.buffer.read()))).encode()
sys.stdout.flush()
while rest:
    rest = rest[os.write(4, rest):]
