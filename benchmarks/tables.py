# SPDX-License-Identifier: Apache-2.0
"""Markdown tables from the JSON of measure.py.

python benchmarks/tables.py FILE                    prints them
python benchmarks/tables.py FILE --into PAGE NAME   puts them between `<!-- NAME -->` and
                                                    `<!-- /NAME -->` of a page
--brief                                             only the kernel's medians against eager
"""

import argparse
import json
from pathlib import Path


def rows_to_markdown(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def time_of(ms):
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms" if ms >= 1 else f"{ms * 1e3:.1f} us"


def speedup(record, records, style):
    """How many times faster than the eager record of one style, from the medians."""
    if not record["who"].startswith("kernel"):
        return ""
    in_place = "in place" in record["who"]
    for other in records:
        same = all(other[key] == record[key] for key in ("shape", "op", "threads"))
        name = other["who"].split(", ")[0]
        same = same and name == style and ("in place" in other["who"]) == in_place
        if same and "median_ms" in other:
            return f"{other['median_ms'] / record['median_ms']:.1f}x"
    return ""


def time_table(records):
    if any("target_ms" in record for record in records):
        return gpu_time_table(records)
    head = ["shape", "what", "who", "threads", "median", "lowest", "repeats", "than eager",
            "than eager bags", "GB/s", "of copy"]  # fmt: skip
    rows = []
    for record in records:
        row = [record["shape"], record["op"], record["who"], record["threads"] or "-"]
        if "error" in record:
            rows.append([*row, record["error"], *[""] * 6])
            continue
        row += [time_of(record["median_ms"]), time_of(record["min_ms"]), record["repeats"]]
        row += [speedup(record, records, style) for style in ("eager", "eager bags")]
        row.append(f"{record['gb_s']:.1f}" if "gb_s" in record else "")
        row.append(f"{record['share']:.0%}" if "share" in record else "")
        if "items_per_s" in record:
            row[1] += f" ({record['items_per_s']:,.0f} rows/s)"
        rows.append(row)
    return rows_to_markdown(head, rows)


def gpu_time_table(records):
    head = ["shape", "what", "who", "median", "lowest", "repeats", "host", "target", "peer",
            "GB/s that must move", "of copy"]  # fmt: skip
    rows = []
    for record in records:
        row = [record["shape"], record["op"], record["who"]]
        if "error" in record:
            rows.append([*row, record["error"], *[""] * 7])
            continue
        row += [time_of(record["median_ms"]), time_of(record["min_ms"]), record["repeats"]]
        row.append(time_of(record["host_ms"]))
        ours = record["who"].startswith("kernel")
        for key in ("target_ms", "peer_ms"):
            known = ours and key in record
            row.append(time_of(record[key]) if known else "")
        row.append(f"{record['gb_s']:.0f}" if "gb_s" in record else "")
        row.append(f"{record['share']:.0%}" if "share" in record else "")
        rows.append(row)
    return rows_to_markdown(head, rows)


def brief_table(report):
    """The kernel against the eager yardsticks, one line each."""
    records = report["results"]
    head = ["shape", "what", "threads", "median", "than eager", "than eager bags"]
    rows = []
    for record in records:
        if record["who"].startswith("kernel") and "median_ms" in record:
            detail = record["who"].partition(", ")[2]
            what = record["op"] + (f", {detail}" if detail else "")
            ratios = [speedup(record, records, style) for style in ("eager", "eager bags")]
            time = time_of(record["median_ms"])
            rows.append([record["shape"], what, record["threads"] or "", time, *ratios])
    facts = report["machine"]
    where = facts.get("gpu") or facts["cpu"]
    return f"{where}, torch {facts['torch']}:\n\n{rows_to_markdown(head, rows)}"


def memory_table(records):
    def mib(size):
        return f"{size / 2**20:.1f}"

    head = ["shape", "call", "peak, MiB", "of it results, MiB", "kept for backward, MiB"]
    known = any("peer_peak_gib" in record for record in records)
    if known:
        head += ["target kept, MiB", "peer's peak, MiB", "peer's kept, MiB"]
    rows = []
    for record in records:
        row = [record["shape"], record["mode"]]
        if "error" in record:
            rows.append([*row, record["error"], *[""] * (len(head) - 3)])
            continue
        row += [mib(record[key]) for key in ("peak_bytes", "result_bytes", "kept_bytes")]
        if known:
            keys = ("target_kept_gib", "peer_peak_gib", "peer_kept_gib")
            training = record["mode"].startswith("training")
            row += [mib(record[k] * 2**30) if training and k in record else "" for k in keys]
        rows.append(row)
    return rows_to_markdown(head, rows)


def facts_line(report):
    facts = report["machine"]
    where = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
    ceilings = ", ".join(
        f"{c['gb_s']:.1f} GB/s" + (f" on {c['threads']} threads" if c["threads"] else "")
        for c in report["ceilings"]
    )
    return (
        f"{where}; torch {facts['torch']}; commit {facts['commit']}; {facts['date']}; "
        f"load {facts['load']} before, {facts['load_at_end']} after; {facts['clock']} clock. "
        f"Copy (read + write): {ceilings}."
    )


def markdown(report):
    parts = [facts_line(report), f"`{report['machine']['command']}`", time_table(report["results"])]
    if report["memory"]:
        parts.append(memory_table(report["memory"]))
    passed = sum(check["ok"] for check in report["checks"])
    parts.append(f"{passed} of {len(report['checks'])} checks passed.")
    for failure in report.get("failures", ()):
        parts.append(f"{failure['shape']}: {failure['error']}")
    return "\n\n".join(parts)


def put_into(page, name, text):
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no {begin} ... {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--into", nargs=2, metavar=("PAGE", "NAME"))
    options = parser.parse_args()
    report = json.loads(options.file.read_text())
    text = brief_table(report) if options.brief else markdown(report)
    if options.into:
        put_into(Path(options.into[0]), options.into[1], text)
    else:
        print(text)


if __name__ == "__main__":
    main()
