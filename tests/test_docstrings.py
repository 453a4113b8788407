"""What `help` says of the ops, and of the packages: which file has which idea."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import fusionrt
from fusionrt import catalogue
from fusionrt.catalogue import OPS
from fusionrt.op_names import OPS as FAMILIES

ALIKE = [name for family in ("activations", "pointwise", "dropout", "quantize", "reduction", "loss")
         for name in FAMILIES[family]]


@pytest.mark.parametrize("name", ALIKE)
def test_says_formula_shapes_dtypes_errors_and_an_example(name):
    said = inspect.getdoc(OPS[name])
    assert all(word in said for word in ("hape", "float16", "float32", "Raises"))
    formula, *_, example = said.split("\n\n")
    assert example.lstrip().startswith(f"{name}(")
    assert example.startswith("    ")
    assert formula


@pytest.mark.parametrize("name", OPS)
def test_begins_with_a_sentence_and_ends_with_an_example(name):
    first, *_, example = inspect.getdoc(OPS[name]).split("\n\n")
    assert first.split("\n")[0].rstrip()
    assert f"{name}(" in example and example.startswith("    ")
    assert all(word in inspect.getdoc(OPS[name]).lower() for word in ("raises", "float", "shape"))


PUBLIC = [(f"{package.__name__}.{name}", getattr(package, name))
          for package in (fusionrt.ops, fusionrt.nn, fusionrt.optim, fusionrt.data, fusionrt.bench,
                          fusionrt.convert)
          for name in package.__all__ if callable(getattr(package, name))]


@pytest.mark.parametrize(("name", "one"), PUBLIC, ids=[name for name, _ in PUBLIC])
def test_names_in_a_docstring_are_found_after_importing_the_package(name, one):
    """`fusionrt.deferred.examine` was not, until something else had imported its module."""
    for said in re.findall(r"\bfusionrt((?:\.[a-zA-Z_]\w*)+)", inspect.getdoc(one)):
        found, first = fusionrt, said.split(".")[1]
        assert first in fusionrt.__all__
        for part in said.split(".")[1:]:
            found = getattr(found, part)


def test_what_all_elementwise_ops_say_stands_behind_the_text():
    """Also where no example ends it."""
    for said in ("relu(a - b).", "relu(a - b).\n\n    Source: none.\n\n        sub_relu(x, y)\n    "):
        def sub_relu(a, b):
            return a

        sub_relu.__doc__ = said
        catalogue._say(catalogue.ELEMENTWISE, sub_relu)
        text, *example = inspect.getdoc(sub_relu).split("\n\n    ")
        assert text.startswith("relu(a - b).\n\n") and text.endswith(f"\n\n{catalogue.ELEMENTWISE}")
        assert example == (["sub_relu(x, y)"] if "x" in said else [])


@pytest.mark.parametrize("package", [
    "fusionrt", "fusionrt.ops", "fusionrt.runtime", "fusionrt.cpu", "fusionrt.nn", "fusionrt.optim",
    "fusionrt.data", "fusionrt.convert", "fusionrt.bench"])
def test_a_package_names_each_of_its_files_once(package):
    """The list of files is the map of a newcomer: none is missing, none is there twice."""
    folder = Path(fusionrt.__file__).parent.joinpath(*package.split(".")[1:])
    there = {path.stem for path in folder.iterdir() if path.suffix == ".py"} - {"__init__"}
    there |= {path.parent.name for path in folder.glob("*/__init__.py")}
    said = inspect.getdoc(importlib.import_module(package))
    listed = said[said.lower().index("one file an idea"):]
    named = re.findall(r"`(\w+)`", listed)
    assert there - set(named) == set()
    assert [name for name in there if named.count(name) != 1] == []
