"""TensorBoard's reading of the files that src/runs/tensorboard.rs writes:
tests/reference/runs/tensorboard_read.json, with the files' bytes in hexadecimal.

Run from the repository root, with the package `tensorboard` installed, after
    cargo test --release --lib tensorboard -- --ignored
as
    python tests/reference/runs/tensorboard_read.py [FOLDER, target/tensorboard unless named]
"""

import json
import math
import pathlib
import sys

from tensorboard import data_compat
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto import summary_pb2
from tensorboard.util import tensor_util

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parent / "tensorboard_read.json"


def buckets(tag: str, histogram) -> list[list[float]]:
    """`[left, right, count]` of each bucket that is not empty, as TensorBoard's page shows them."""
    names = ["min", "max", "num", "sum", "sum_squares", "bucket_limit", "bucket"]
    proto = summary_pb2.HistogramProto(**{name: getattr(histogram, name) for name in names})
    shown = data_compat.migrate_value(summary_pb2.Summary.Value(tag=tag, histo=proto))
    rows = tensor_util.make_ndarray(shown.tensor).tolist()
    return [[round(x, 6) for x in row] for row in rows if row[2] > 0]


def main() -> None:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/tensorboard")
    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {
        tag: [
            [e.step, e.wall_time, e.value if math.isfinite(e.value) else str(e.value)]
            for e in events.Scalars(tag)
        ]
        for tag in events.Tags()["scalars"]
    }
    histograms = {
        tag: [[e.step, buckets(tag, e.histogram_value)] for e in events.Histograms(tag)]
        for tag in events.Tags()["histograms"]
    }
    files = {path.name: path.read_bytes().hex() for path in sorted(folder.iterdir())}
    reference = {"made_by": made_by("tensorboard"), "files": files, "scalars": scalars}
    reference["histograms"] = histograms
    OUT.write_text(json.dumps(reference, indent=1) + "\n")


if __name__ == "__main__":
    main()
