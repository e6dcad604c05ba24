# Compiles programs without running them. Writes the result of each one to descriptor 4 as soon as it is
# known, because a program may end the interpreter: b"1" if it compiles, b"0" if not.
import json
import os
import sys
import warnings

warnings.simplefilter("ignore")
for code in json.loads(sys.stdin.buffer.read()):
    try:
        compile(code, "<completion>", "exec")
        os.write(4, b"1")
    except Exception:
        os.write(4, b"0")
