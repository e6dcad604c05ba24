"""TensorBoard's reading of the files that src/runs/tensorboard.rs writes:
tests/reference/runs/tensorboard_read.json, with the files' bytes in hexadecimal.

Run from the repository root, with the package `tensorboard` installed, after
    cargo test --lib tensorboard -- --ignored
as
    python tests/reference/runs/tensorboard_read.py [FOLDER, target/tensorboard unless named]
"""

import json
import math
import pathlib
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from provenance import made_by  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parent / "tensorboard_read.json"


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
    files = {path.name: path.read_bytes().hex() for path in sorted(folder.iterdir())}
    reference = {"made_by": made_by("tensorboard"), "files": files, "scalars": scalars}
    OUT.write_text(json.dumps(reference, indent=1) + "\n")


if __name__ == "__main__":
    main()
