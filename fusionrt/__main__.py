"""`python -m fusionrt`: the command line."""

from fusionrt.cli import main

if __name__ == "__main__":
    main(prog_name="fusionrt")
