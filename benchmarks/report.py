"""`python -m benchmarks.report` (`make report`): write the tables of README.md and BENCHMARKS.md."""

from __future__ import annotations

import argparse

from benchmarks import tables


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for document in tables.DOCUMENTS:
        before = document.read_text()
        after = tables.render(before)
        document.write_text(after)
        print(document.name, "was up to date" if after == before else "is up to date now")


if __name__ == "__main__":
    main()
