# Calls grade(sample, item) of a grader's source and writes the value to descriptor 4 as JSON.
import json
import os
import sys

job = json.loads(sys.stdin.buffer.read())
space = {"__name__": "grader"}
exec(compile(job["source"], "<grader>", "exec"), space)
if not callable(space.get("grade")):
    raise NameError("the source defines no function grade(sample, item)")
value = float(space["grade"](job["sample"], job["item"]))
sys.stdout.flush()
os.write(4, json.dumps(repr(value)).encode())
