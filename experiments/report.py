"""Turns runs into a stability report: a page to open in a browser, and its tables as Markdown and CSV.

    python experiments/report.py runs/components

RUNS are run directories, or directories above them. Writes `index.html`, `table.md` and `table.csv` to `--output`, and
prints the tables.
"""

import argparse
from pathlib import Path

from reporting.events import group_variants, read_runs
from reporting.measures import summarise
from reporting.page import remarks, write_csv, write_markdown, write_page


def main(arguments: list[str] | None = None) -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUNS", help="run directories, or directories above them")
    parser.add_argument("--output", type=Path, help="directory to write to; report/ in the first of RUNS by default")
    given = parser.parse_args(arguments)
    try:
        variants = group_variants(read_runs(given.runs))
    except ValueError as error:
        parser.error(str(error))
    rows = summarise(variants)
    output = given.output or given.runs[0] / "report"
    output.mkdir(parents=True, exist_ok=True)
    title = "Stability report: " + ", ".join(path.resolve().name for path in given.runs)
    table = write_markdown(rows)
    for name, text in (
        ("index.html", write_page(title, variants, rows)),
        ("table.md", table),
        ("table.csv", write_csv(rows)),
    ):
        (output / name).write_text(text, encoding="utf-8")
    print("\n".join(remarks(variants)), end="\n\n")
    print(table)
    print(f"{output / 'index.html'}: open it in a browser")


if __name__ == "__main__":
    main()
