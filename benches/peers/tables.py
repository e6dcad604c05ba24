"""The generated tables: rows of results.json to Markdown, and into the documents."""

import os
import statistics

BEGIN, END = "<!-- generated: peers -->", "<!-- end -->"
MODELS = {"tiny": "embedded, 0.5 M", "100m": "random, 100 M", "smollm2": "SmolLM2-135M"}
KEPT, RECOMPUTED = "both keep activations", "both recompute activations"


def ratio(above, below):
    """Median and range over the turns; more than 1 is better for Hone."""
    values = [a / b for a, b in zip(above, below)]
    text = f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    if statistics.median(values) < 1:
        return f"{text}, **Hone is slower**"
    return text if min(values) >= 1 else f"{text}, not clear"


def duration(values):
    value = statistics.median(values)
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def computed(row, key, values):
    """A duration of Hone, with its arithmetic where that is not f32."""
    compute = row.get("compute", {}).get(key, "f32")
    return duration(values) if compute == "f32" else f"{duration(values)}, {compute}"


def mebibytes(value):
    return f"{value / (1 << 20):,.0f} MiB"


def rate(values):
    return f"{statistics.median(values):,.0f} tokens/s"


def mean(values):
    return f"{statistics.mean(values):.1f}"


def described(setting):
    parts = [f"micro-batch {setting['micro']}", "recomputing" if setting["checkpointing"] else ""] \
        if "micro" in setting else []
    if "cache" in setting:
        parts.append(f"{setting['cache']} cache")
    parts += ["compiled" if setting.get("compile") else "", setting["attention"],
              "bf16 autocast" if setting["dtype"] == "bf16" and "micro" in setting else setting["dtype"]]
    return ", ".join(part for part in parts if part)


def table(header, rows):
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(header), line(["---"] * len(header)), *map(line, rows), ""]


def training(row):
    """Rows by comparison."""
    seconds, peak = row["seconds"], row["peak_bytes"]
    fastest = {side: min(("kept", "recomputed"), key=lambda k: statistics.median(seconds[f"{side} {k}"]))
               for side in ("hone", "trl")}
    rows = {}
    for what, hone, trl in (("best against best", *fastest.values()), (KEPT, "kept", "kept"),
                            (RECOMPUTED, "recomputed", "recomputed")):
        mine, other = seconds[f"hone {hone}"], seconds[f"trl {trl}"]
        rows[what] = [computed(row, f"hone {hone}", mine), duration(other), described(row["settings"][trl]),
                      ratio(other, mine)]
    keys = [f"{side} {fastest[side]}" for side in ("hone", "trl")]
    lean = min(peak["hone kept"], peak["hone recomputed"])
    for what, hone, trl, setting in (
            ("peak memory, the fastest of each", *(peak[key] for key in keys), row["settings"][fastest["trl"]]),
            ("peak memory, the leanest of each", lean, row["lean"]["peak_bytes"], row["lean"])):
        rows[what] = [mebibytes(hone), mebibytes(trl), described(setting), f"{trl / hone:.1f}"]
    return rows


def sampling(row):
    hone, other = row["rates"]["hone"], row["rates"]["transformers"]
    return [rate(hone), rate(other), described(row["setting"]), ratio(hone, other)]


def whole(row):
    """Rows by measure. Lengths of completions differ, so times are compared per completion token."""
    seconds, lengths, peak = row["seconds"], row["lengths"], row["peak_bytes"]
    per_token = {key: [s / n for s, n in zip(seconds[key], lengths[key])] for key in seconds}
    work = f"{row['completions']} completions of up to {row['max_tokens']} tokens"
    return {
        work: [computed(row, "hone", seconds["hone"]), duration(seconds["trl"]), described(row["setting"]),
               f"{mean(lengths['hone'])}, {mean(lengths['trl'])}",
               f"{statistics.mean(row['staleness']):.2f}, 0", ratio(per_token["trl"], per_token["hone"])],
        "peak memory of the process": [mebibytes(peak["hone"]), mebibytes(peak["trl"]), "", "", "",
                                       f"{peak['trl'] / peak['hone']:.1f}"],
    }


def tried_training(row):
    """Seconds of every setting that TRL tried."""
    columns = [(on, attention, dtype) for on in (False, True) for attention in ("sdpa", "eager")
               for dtype in ("f32", "bf16")]
    cells = {(p["micro"], p["checkpointing"], p["attention"], p["dtype"]):
             duration([p["seconds"]]) if "seconds" in p else "" for p in row["probes"]}
    header = ["micro-batch", *(f"{a}, {d}{', recomputing' if on else ''}" for on, a, d in columns)]
    micros = sorted({probe["micro"] for probe in row["probes"]})
    return table(header, [[str(m), *(cells[m, *column] for column in columns)] for m in micros])


def tried_sampling(row):
    """Tokens per second by cache and type, with the faster attention."""
    cells = []
    for cache, compiled in (("dynamic", False), ("static", False), ("static", True)):
        for dtype in ("f32", "bf16"):
            found = [1 / p["seconds"] for p in row["probes"] if "seconds" in p
                     and (p["cache"], p["compile"], p["dtype"]) == (cache, compiled, dtype)]
            cells.append(f"{max(found):,.0f}" if found else "failed")
    return [str(row["batch"]), *cells]


def machines(rows):
    """One line for each environment; rows measured later, with `--only`, may have another one."""
    lines = {}
    for name, row in rows.items():
        e = row["environment"]
        line = (f"Hone {e['hone']} (rustc {e['rustc']}); TRL {e['trl']}, transformers {e['transformers']}, PEFT "
                f"{e['peft']}, torch {e['torch']}, Python {e['python']}; {e['processor']}, {e['cores']} cores, "
                f"{e['threads']} threads on as many CPUs for each side, {e['memory_gib']} GiB")
        lines.setdefault(f"{line}; {e['date']}, load {e['load']:.1f} before", []).append((name, e["others"]))
    for line, found in lines.items():
        names = "" if len(lines) == 1 else ": " + ", ".join(name for name, _ in found)
        others = max(share for _, share in found)
        yield f"{line}; other processes took at most {others:.0%} of the CPUs{names}."
        yield ""


def documents(rows):
    """The generated lines of each document."""
    of = lambda kind: {name: rows[f"{name} {kind}"] for name in MODELS if f"{name} {kind}" in rows}
    samples = {key: row for key, row in rows.items() if " sample " in key}
    lines, spread = list(machines(rows)), "ratio (range over the turns)"
    lines += ["**Training step** on given completions:", ""]
    for name, row in of("train").items():
        lines.append(f"- {MODELS[name]}: {row['completions']} completions of {row['completion']} tokens"
                     f"{' on average' if row['spread'] else ''}, prompts of {row['prompt']} tokens")
    lines.append("")
    lines += table(["model", "", "Hone", "TRL", "TRL's setting", spread], [
        [MODELS[name], what, *cells] for name, row in of("train").items()
        for what, cells in training(row).items()])
    lines += ["**Sampling**:", ""]
    lines += table(["model", "sequences at once", "Hone", "transformers", "transformers' setting", spread], [
        [MODELS[key.split()[0]], str(row["batch"]), *sampling(row)] for key, row in samples.items()])
    lines += ["**Whole step**: sampling, rewards, training and publication:", ""]
    lines += table(["model", "", "Hone", "TRL", "TRL's setting", "tokens per completion: Hone, TRL",
                    "staleness in versions: Hone, TRL", spread], [
        [MODELS[name], what, *cells] for name, row in of("whole").items()
        for what, cells in whole(row).items()])
    for name, row in of("train").items():
        lines += [f"TRL's settings, {MODELS[name]}: one training step, tried briefly; empty: far slower than "
                  "the best, given up:", "", *tried_training(row)]
    lines += ["transformers' settings: tokens/s, tried briefly:", ""]
    lines += table(["model", "sequences at once", *(f"{kind}, {dtype}" for kind in (
        "dynamic cache", "static cache", "static cache, compiled") for dtype in ("f32", "bf16"))],
        [[MODELS[key.split()[0]], *tried_sampling(row)] for key, row in samples.items()])
    return {"docs/benchmarks.md": lines[:-1], "README.md": summary(rows)}


def summary(rows):
    """The README's table: the largest model that was measured in full."""
    name = next((n for n in reversed(MODELS) if f"{n} whole" in rows and f"{n} train" in rows), None)
    if name is None:
        return []
    trained = training(rows[f"{name} train"])
    cells = {f"training step, {what}": trained[what] for what in (
        "best against best", RECOMPUTED, "peak memory, the fastest of each")}
    cells = {key.replace("training step, peak", "its peak"): value for key, value in cells.items()}
    for key, row in rows.items():
        if key.startswith(f"{name} sample"):
            cells[f"sampling, {row['batch']} at once"] = sampling(row)
    for what, row in whole(rows[f"{name} whole"]).items():
        cells[f"whole step, {what}" if "completions" in what else "its peak memory"] = row
    return table([MODELS[name], "Hone", "TRL or transformers", "ratio"],
                 [[what, row[0], row[1], row[-1]] for what, row in cells.items()])[:-1]


def write(root, documents, begin=BEGIN):
    for document, lines in documents.items():
        path = os.path.join(root, document)
        with open(path) as file:
            before, rest = file.read().split(begin + "\n")
        after = rest.split(END, 1)[1]
        with open(path, "w") as file:
            file.write("\n".join([before + begin, "", *lines, "", END]) + after)


def written(root, document, begin=BEGIN):
    """The generated lines in a document."""
    with open(os.path.join(root, document)) as file:
        return file.read().split(begin)[1].split(END)[0].strip("\n").split("\n")


def check(root, documents, recorded):
    """0 if results.json and the documents contain `documents`."""
    for document, lines in documents.items():
        if lines != recorded[document] or lines != written(root, document):
            print(f"{document} differs from results.json: run benches/peers/all.py --tables-only")
            return 1
    return 0
