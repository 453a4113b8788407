"""`python -m benchmarks.report` (`make report`): write the generated tables into README.md."""

from __future__ import annotations

import argparse

from benchmarks import tables


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    before = tables.README.read_text()
    after = tables.render(before)
    tables.README.write_text(after)
    print("README.md was up to date" if after == before else "README.md is up to date now")


if __name__ == "__main__":
    main()
