"""What `help` says of the ops, and of the packages: which file has which idea."""

import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch

import fusionrt
from fusionrt import catalogue
from fusionrt.catalogue import OPS
from fusionrt.op_names import MODULE
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


@pytest.mark.parametrize("name", OPS)
def test_says_once_what_is_raised(name):
    assert len(re.findall(r"\bRaises\b", inspect.getdoc(OPS[name]))) == 1


# Shapes of what the examples of a family do not define themselves.
MATRICES = dict.fromkeys(("x", "y", "z", "w", "residual", "mask", "gate"), (8, 4))
SHAPES = {
    "pointwise": MATRICES | {"bias": (4,), "scale": (4,), "up": (8, 8)}, "quantize": MATRICES,
    "reduction": {"x": (3, 4, 5)}, "softmax": {"scores": (2, 4, 8, 8)},
    "loss": MATRICES | {"log_probabilities": (8, 4), "probabilities": (8, 4)},
    "norm": {**dict.fromkeys(("x", "hidden", "residual"), (8, 512)), "weight": (512,), "bias": (512,)},
    "batch_norm": {"x": (4, 64, 8, 8), **dict.fromkeys(
        ("weight", "bias", "running_mean", "running_var", "mean", "var"), (64,))},
    "linear": {"x": (8, 64), "weight": (32, 64), "bias": (32,), "residual": (8, 32)}, "ffn": {"x": (8, 64)},
    "embedding": {"weight": (9, 8), "position_weight": (7, 8), "gamma": (8,), "beta": (8,)},
    "rotary": {"q": (2, 5, 5, 8), "k": (2, 5, 5, 8), "cos": (5, 4), "sin": (5, 4)},
    "qkv": {"x": (2, 5, 64), "weight": (48 * 8, 64), "bias": (48 * 8,)},
    "attention": {**dict.fromkeys("qkv", (2, 4, 8, 16)), "mask": (8, 8), "x": (2, 5, 64),
                  "wq": (64, 64), "wk": (64, 64), "wv": (64, 64)},
    "convolution": {"x": (2, 64, 8, 8), "weight": (64, 64, 3, 3), "w3x3": (64, 1, 3, 3),
                    "w1x1": (32, 64, 1, 1), **dict.fromkeys(("gamma", "beta", "mean", "var", "bias"), (64,))},
}


def names_of_examples(op):
    """What stands in the example of an op."""
    shapes = SHAPES.get(MODULE[op], {}) | ({"weight": (64, 1, 3, 3)} if op == "depthwise_conv2d" else {})
    linear = {"linear1": (64, 32), "linear2": (32, 64), "gate": (64, 32), "up": (64, 32), "down": (32, 64),
              "gate_up": (64, 64)} if MODULE[op] == "ffn" else {"model": (4, 4)}
    return {**{name: getattr(fusionrt, name) for name in OPS}, "torch": torch, "fusionrt": fusionrt,
            "tokens": torch.tensor([[1, 0, 8]]), "cached": 3,
            **{name: torch.rand(shape) for name, shape in shapes.items()},
            **{name: torch.nn.Linear(*sizes) for name, sizes in linear.items()},
            **{f"norm{k}": tuple(torch.rand(n) for _ in range(4)) for k, n in ((1, 64), (2, 32))}}


@pytest.mark.parametrize("name", OPS)
def test_the_example_runs_and_gives_what_it_says(name):
    code = textwrap.dedent("    " + inspect.getdoc(OPS[name]).rsplit("\n\n    ", 1)[1])
    results = re.findall(r"^(.*)  # (\[.*\])$", code, re.MULTILINE)
    for call, result in results:
        found, expected = eval(call, names_of_examples(name)), torch.tensor(eval(result))
        torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=6e-5)
    if not results:
        with torch.device("meta"):  # which compiles nothing
            exec(code, names_of_examples(name))


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
