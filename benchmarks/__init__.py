"""Benchmarks: each module measures one thing and writes one file of `benchmarks/results/`.

    python -m benchmarks.pointwise_large --quick     # a few rows, nothing is written
    python -m benchmarks.run                         # all that this machine can run
    python -m benchmarks.report                      # the tables of README.md and BENCHMARKS.md
"""
