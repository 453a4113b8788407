"""`python -m fusionrt`: the command line."""

from fusionrt.cli import main

main(prog_name="fusionrt")
