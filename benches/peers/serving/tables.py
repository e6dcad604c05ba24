"""The generated tables: the results of `serve.py` to Markdown."""

from serving import measures
from tables import table

NONE = ["No measurement is recorded yet."]
# Hone's rows with the same weights as llama.cpp's, and what they are compared with.
RATIOS = [("native-q8_0", "llama-q8_0"), ("native-bf16", "llama-bf16"), ("native-q8_0", "mistralrs"),
          ("native-bf16", "transformers")]
FIRST = "first token"


def lines(results):
    if not results.get("rows"):
        return NONE
    rows, shape = results["rows"], results["shape"]
    made = [environment(results), ""]
    made += levels(rows, shape, results["in_process"])
    made += bound(rows, results["bandwidth"])
    made += first_token(rows)
    made += memory(rows, shape)
    made += settings(rows)
    return made[:-1]


def environment(results):
    e = results["environment"]
    llama = f"llama.cpp {e['llama.cpp']}; " if "llama.cpp" in e else ""
    drawn = f"temperature {results['temperature']:g}" if results["temperature"] else "greedy"
    return (f"Hone {e['hone']} (rustc {e['rustc']}); {llama}transformers {e['transformers']}, torch {e['torch']}, "
            f"Python {e['python']}; {e['processor']}, {e['cores']} cores, {e['threads']} threads on as many CPUs for "
            f"each, {e['memory_gib']} GiB; {drawn}; {e['date']}, load {e['load']:.1f} before; other processes took at "
            f"most {e['others']:.0%} of the CPUs.")


def each_turn(row, phase, key):
    """A value in each turn; empty if the phase was not measured."""
    return [turn[key] for turn in row["phases"].get(str(phase), {"turns": []})["turns"]]


def median_of(row, phase, key, shown):
    value = measures.middle(each_turn(row, phase, key))
    return "" if value is None else shown(value)


def name_of(row):
    return [row["label"], row["weights"]]


def rate(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def seconds(value):
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def mebibytes(value):
    return f"{value / (1 << 20):,.0f} MiB"


def spread(above, below):
    """Median and range of the ratios over the turns; empty without values."""
    values = measures.ratios(above, below) if above and None not in [*above, *below] else []
    return f"{measures.middle(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


def pairs(rows):
    """Each compared pair of rows, with its name."""
    for one, other in RATIOS:
        if one in rows and other in rows:
            left, right = rows[one], rows[other]
            yield f"{left['label']} ({left['weights']}) to {right['label']} ({right['weights']})", left, right


def levels(rows, shape, in_process):
    """Tokens per second by number of requests at once."""
    counts = [count for count in shape["levels"] if any(str(count) in row["phases"] for row in rows.values())]
    made, heads = [], [f"{count} at once" for count in counts]
    prompts = measures.middle(value for row in rows.values() for count in counts
                              for value in each_turn(row, count, "prompt_tokens"))
    if not counts:
        return made
    for key, title in (("total", f"**Tokens per second together**, from the requests to the last token: prompts of "
                                 f"{prompts:.0f} tokens, answers of {shape['tokens']}"),
                       ("decode", "**Decoded tokens per second together**, while all requests decode")):
        cells = [[*name_of(row), *(median_of(row, count, key, rate) for count in counts)] for row in rows.values()]
        found = [turn for turn in in_process if turn]
        if found:
            cells.append(["llama.cpp, without HTTP", "Q8_0", *(
                rate(measures.middle(turn[count][key] for turn in map(by_number, found))) for count in counts)])
        cells += [[f"ratio: {name}", "", *(spread(each_turn(left, count, key), each_turn(right, count, key))
                                          for count in counts)] for name, left, right in pairs(rows)]
        made += [f"{title}:", "", *table(["engine", "weights", *heads], cells)]
    return made


def by_number(turn):
    """JSON has the numbers of sequences as text."""
    return {int(count): rates for count, rates in turn.items()}


def bound(rows, bandwidth):
    """One sequence relative to reading the weights once for each token."""
    cells = []
    for row in rows.values():
        rates = each_turn(row, 1, "decode")
        if rates and None not in rates:
            shares = [measures.bound_share(r, row["size"], b) for r, b in zip(rates, bandwidth)]
            limit = measures.middle(bandwidth) / row["size"]
            cells.append([*name_of(row), f"{row['size'] / 1e6:,.0f} MB", rate(limit),
                          rate(measures.middle(rates)), f"{measures.middle(shares):.0%}"])
    if not cells:
        return []
    head = f"**One request and the memory bound**: {measures.middle(bandwidth) / 1e9:.1f} GB/s are read at best:"
    return [head, "", *table(["engine", "weights", "read per token", "bound, tokens/s", "decoded tokens/s",
                              "share of the bound"], cells)]


def first_token(rows):
    measured = {name: row for name, row in rows.items() if row["phases"].get(FIRST, {}).get("turns")}
    if not measured:
        return []
    prompt = measures.middle(value for row in measured.values() for value in each_turn(row, FIRST, "prompt_tokens"))
    cells = [[*name_of(row), median_of(row, FIRST, "cold", seconds), median_of(row, FIRST, "cached", seconds)]
             for row in measured.values()]
    cells += [[f"ratio: {name}", "", *(spread(each_turn(right, FIRST, key), each_turn(left, FIRST, key))
                                      for key in ("cold", "cached"))] for name, left, right in pairs(measured)]
    return [f"**Time to the first token** of a prompt of {prompt:.0f} tokens:", "",
            *table(["engine", "weights", "cold", "prefix served before"], cells)]


def memory(rows, shape):
    counts = [shape["levels"][0], shape["levels"][-1]]
    heads = ["model loaded", *(f"{count} at once: after, peak" for count in counts), "long prompt: peak"]

    def pair(row, count):
        found = [median_of(row, count, key, mebibytes) for key in ("resident_bytes", "peak_bytes")]
        return ", ".join(value for value in found if value)

    cells = [[*name_of(row), median_of(row, counts[0], "loaded_bytes", mebibytes),
              *(pair(row, count) for count in counts), median_of(row, FIRST, "peak_bytes", mebibytes)]
             for row in rows.values()]
    return ["**Resident memory** of the process:", "", *table(["engine", "weights", *heads], cells)]


def settings(rows):
    """The settings that were timed, of engines with more than one."""
    cells = [[*name_of(row), phase, described(found["setting"]), str(len(found["probes"]))]
             for row in rows.values() for phase, found in row["phases"].items() if found["setting"]]
    return ["Settings that were timed:", "", *table(["engine", "weights", "requests at once", "setting", "tried"],
                                                    cells)] if cells else []


def described(setting):
    return ", ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in setting.items())


def shown(value):
    return {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else str(value)
