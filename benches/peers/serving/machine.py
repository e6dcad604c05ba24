"""What the machine does: its read bandwidth, the memory of a process, a free port."""

import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time

# Reads `words` 64-bit words in independent sums, which a compiler turns into vector loads.
READER = """
#include <stddef.h>
#include <stdint.h>

uint64_t read_all(const uint64_t *data, size_t words) {
    uint64_t sums[64] = {0};
    for (size_t i = 0; i + 64 <= words; i += 64)
        for (int lane = 0; lane < 64; lane++) sums[lane] += data[i + lane];
    uint64_t total = 0;
    for (int lane = 0; lane < 64; lane++) total += sums[lane];
    return total;
}
"""


class Bandwidth:
    """Measures how fast all threads together read a block of memory that is too large for the caches."""

    def __init__(self, scratch, size, threads):
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if not compiler:
            raise SystemExit("no C compiler was found: install cc, which measures the memory's bandwidth")
        library = os.path.join(scratch, "reader.so")
        subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", "-x", "c", "-", "-o", library],
                       input=READER.encode(), check=True)
        self.read = ctypes.CDLL(library).read_all
        self.read.argtypes, self.read.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
        self.threads, self.words = threads, max(size, 1 << 27) // 8 // threads

    def measure(self, seconds=1.0):
        """Bytes per second: the best of the passes that begin within `seconds`."""
        # Written, because pages that were never written share one page of zeros.
        blocks = [(ctypes.c_uint64 * self.words)() for _ in range(self.threads)]
        for block in blocks:
            ctypes.memset(block, 1, ctypes.sizeof(block))
        best, began = 0.0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            best = max(best, self.threads * self.words * 8 / self.one_pass(blocks))
        return best

    def one_pass(self, blocks):
        """Seconds in which every thread reads its block several times."""
        repeats, gate, spans = 4, threading.Barrier(self.threads), []

        def work(block):
            gate.wait()
            began = time.perf_counter()
            for _ in range(repeats):
                self.read(block, self.words)
            spans.append((began, time.perf_counter()))

        threads = [threading.Thread(target=work, args=(block,)) for block in blocks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (max(end for _, end in spans) - min(begin for begin, _ in spans)) / repeats


def memory(process_id):
    """Present and peak resident memory of a process in bytes."""
    with open(f"/proc/{process_id}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {"resident": kibibytes(fields["VmRSS"]), "peak": kibibytes(fields["VmHWM"])}


def kibibytes(text):
    """`"  1024 kB"` in bytes."""
    return int(text.split()[0]) * 1024


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
