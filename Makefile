# Each target sets itself up in .venv; after that only a change of pyproject.toml or constraints.txt installs again.
#   make test ARGS="tests/test_import.py -x"     what pytest gets
#   make test EXTRAS=test                        where CuPy has no wheel (macOS)
PYTHON ?= python3
EXTRAS ?= cuda13,test,bench
ARGS   ?=
BIN    := .venv/bin
STAMP  := .venv/installed

.PHONY: test demo bench report clean

test: $(STAMP)
	@$(BIN)/ruff check --quiet --output-format=concise .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/pytest --no-header -n auto --dist worksteal $(ARGS)

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

bench: $(STAMP)
	@$(BIN)/python -m benchmarks.run $(ARGS)

report: $(STAMP)
	@$(BIN)/python -m benchmarks.report $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up .venv: about a minute, longer where torch's CUDA build has to be downloaded."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check -qq -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

clean:
	@rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
