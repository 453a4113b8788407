"""`fusionrt convert`, and the models that it knows by name."""

import json
import math
import subprocess
import sys
from pathlib import Path

import model_zoo
import pytest
import torch
from click.testing import CliRunner, Result
from convert_net import one_thread  # noqa: F401  (a fixture)
from torch import nn

from fusionrt.cli import main
from fusionrt.convert import model as convert_model
from fusionrt.convert import registry
from fusionrt.convert.registry import Entry, ModelUnavailable

ROOT = Path(__file__).parents[1]


def call(*words: object) -> Result:
    """The command in this process; a traceback is never an answer."""
    result = CliRunner().invoke(main, ["convert", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of a package that everybody has; one of them cannot be loaded."""
    def build(package, name, entry, random_init):
        assert package is math
        if name == "broken":
            raise OSError("no network\nand more")
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                             nn.Linear(144, 5))

    monkeypatch.setitem(registry._BUILDERS, "math", build)
    for name in ("tiny", "other", "broken"):
        monkeypatch.setitem(registry.MODELS, name, Entry("Tiny", "math", (3, 8, 8)))
    # What passes do is tested elsewhere.
    monkeypatch.setattr(convert_model, "DEFAULT", convert_model.DEFAULT._replace(passes=()))


# --- what it says ---------------------------------------------------------------------------------


def test_help_and_list_need_nothing() -> None:
    absent = dict.fromkeys(("torch", "torchvision", "timm", "transformers", "safetensors"))
    for words, expected in ((["--help"], "Usage: fusionrt convert [OPTIONS]"),
                            (["--list-models"], "absent: pip install 'fusionrt[models]'")):
        code = (f"import sys; sys.modules |= {absent}; from fusionrt.cli import main; "
                f"main(['convert', *{words}], 'fusionrt')")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_list_as_json() -> None:
    found = {row["name"]: row for row in json.loads(call("--list-models", "--json").stdout)}
    assert list(found) == list(registry.MODELS)
    assert found["gpt2"] == {"name": "gpt2", "family": "GPT-2", "package": "transformers", "installed": True,
                             "weights": True}
    families = {row["family"] for row in found.values()}
    assert families == {"ResNet", "DenseNet", "EfficientNet", "VGG", "MobileNet", "ViT", "DeiT", "Swin",
                        "ConvNeXt", "BERT", "RoBERTa", "GPT-2", "T5", "Llama"}


@pytest.mark.parametrize(("words", "message"), [
    ((), "no model given: --models NAME ..., or --list-models to see which there are"),
    (("--models", "nope"), "no model 'nope'; there are resnet18, resnet50, "),
    (("--models", "resnet18", "keras:x"), "no model 'keras:x'"),
    (("--models", "resnet18", "--dtype", "int8"), "'int8' is not one of 'float32', 'float16', 'bfloat16'"),
    (("--models", "resnet18", "--batch", "0"), "0 is not in the range x>=1"),
])
def test_what_is_asked_wrongly(words, message) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = call("--models", "gpt2", "--device", "cuda")
    assert "there is no CUDA GPU; fusionrt doctor says why" in result.stderr


# --- what it does ---------------------------------------------------------------------------------


def test_models_are_converted_validated_measured_and_saved(tiny, tmp_path: Path) -> None:
    result = call("--models", "tiny", "other", "--save-path", tmp_path / "out", "--device", "cpu",
                  "--random-init", "--batch", 3)
    assert result.exit_code == 0, result.stderr
    assert "Conversion summary" in result.stdout
    assert result.stdout.count("accepted") == 2
    assert f"wrote 6 files and conversion_summary.json to {tmp_path / 'out'}" in result.stdout
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "conversion_summary.json",
        *(f"{name}.{kind}" for name in ("other", "tiny") for kind in ("html", "json", "safetensors"))]
    first, second = json.loads((tmp_path / "out/conversion_summary.json").read_text())
    assert (first["name"], second["name"], first["batch"]) == ("tiny", "other", 3)
    assert first["validation"]["accepted"] is True
    assert first["benchmark"]["inputs"] == "(float32 [3, 3, 8, 8])"
    assert first["stats"]["speedup_achieved"] > 0
    assert json.loads((tmp_path / "out/tiny.json").read_text())["stats"] == first["stats"]


def test_one_that_fails_leaves_the_others(tiny, tmp_path: Path) -> None:
    result = call("broken,tiny", "--no-validate", "--json", "--dtype", "bfloat16", "--device", "cpu",
                  "--save-path", tmp_path)
    assert result.exit_code == 1
    broken, good = json.loads(result.stdout)
    assert broken["error"].startswith("the weights of broken cannot be loaded (OSError: no network); connect "
                                      "this machine to the network once, ")
    assert broken["error"].endswith("or use --random-init (random_init=True)")
    assert (good["name"], good["dtype"], good["validation"]) == ("tiny", "bfloat16", None)
    assert sorted(Path(file).suffix for file in good["files"]) == [".html", ".json", ".safetensors"]
    assert "failed: broken: the weights of broken cannot" in call("broken", "--device", "cpu").stderr


@pytest.mark.parametrize(("taken", "message"), [
    ("in", "{out} cannot be written: Not a directory"),
    ("in/out/conversion_summary.json/x", "{out}/conversion_summary.json cannot be written: it is a folder"),
    ("in/out/tiny.safetensors/x", "{out}/tiny.safetensors cannot be written: it is a folder"),
])
def test_where_nothing_can_be_saved_is_known_before_anything_is_converted(
        tiny, taken: str, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(registry, "build", lambda *args: pytest.fail("it converted"))
    (tmp_path / taken).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / taken).write_text("")
    out = tmp_path / "in" / "out"
    result = call("--models", "tiny", "--save-path", out, "--device", "cpu")
    assert result.exit_code == 2
    assert message.format(out=out) in result.stderr


def test_safetensors_is_named_when_it_is_absent(tiny, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = call("tiny", "--save-path", tmp_path / "out")
    assert result.exit_code == 1
    assert "--save-path needs safetensors: pip install 'fusionrt[models]'" in result.stderr
    assert not (tmp_path / "out").exists()


# --- models by name -------------------------------------------------------------------------------

PARAMETERS = {
    "resnet18": 11_689_512, "resnet50": 25_557_032, "resnet101": 44_549_160, "densenet121": 7_978_856,
    "efficientnet_b0": 5_288_548, "vgg16": 138_357_544, "mobilenet_v2": 3_504_872,
    "mobilenet_v3_small": 2_542_856, "mobilenet_v3_large": 5_483_032, "vit_b_16": 86_567_656,
    "vit_base_patch16_224": 86_567_656, "deit_small_patch16_224": 22_050_664, "swin_t": 28_288_354,
    "convnext_tiny": 28_589_128, "bert-base-uncased": 109_482_240, "bert-large-uncased": 335_141_888,
    "roberta-base": 124_645_632, "gpt2": 124_439_808, "t5-small": 60_506_624, "llama-small": 124_668_672}


@pytest.fixture(scope="module")
def packages() -> dict[str, object]:
    return {"torchvision": model_zoo.torchvision(), "timm": model_zoo.timm(),
            "transformers": model_zoo.transformers()}


@pytest.mark.parametrize("name", registry.MODELS)
def test_random_models_are_those_that_were_published(packages, name: str) -> None:
    own, entry = registry.find(name)
    with torch.device("meta"):
        model = registry._BUILDERS[entry.package](packages[entry.package], own, entry, True)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_random_models_begin_with_no_constants(packages) -> None:
    model = registry.build("resnet18", random_init=True)
    assert not model.training
    assert [n for n, p in model.named_parameters() if (p == p.flatten()[0]).all()] == []
    norm = model.layer2[0].bn1
    assert norm.running_mean.std() > 0.05
    assert 0.5 <= norm.running_var.min() < norm.running_var.max() <= 1.5
    again = registry.build("resnet18", random_init=True)
    assert torch.equal(again.bn1.weight, model.bn1.weight)
    inputs = registry.example_inputs("resnet18", model.half(), 2)
    assert [(t.dtype, t.shape) for t in inputs.args] == [(torch.float16, (2, 3, 224, 224))]


def test_token_inputs(packages) -> None:
    model = model_zoo.ZOO["t5"]().model
    inputs = registry.example_inputs("t5-small", model, 3)
    assert {name: tuple(t.shape) for name, t in inputs.kwargs.items() if name != "use_cache"} == {
        "input_ids": (3, 128), "decoder_input_ids": (3, 128)}
    assert inputs.kwargs["use_cache"] is False
    assert 0 <= inputs.kwargs["input_ids"].min() < inputs.kwargs["input_ids"].max() < 100


def test_other_names() -> None:
    assert registry.find("timm:resnet26d") == ("resnet26d", Entry("resnet26d", "timm"))
    assert registry.find("transformers:./bert") == (
        "./bert", Entry("./bert", "transformers", (128,), ("AutoModel", "")))


def test_what_cannot_be_had(monkeypatch) -> None:
    with pytest.raises(ModelUnavailable, match=r"llama-small has no published weights; use --random-init"):
        registry.build("llama-small")
    with pytest.raises(ValueError, match=r"no model 'x'; there are resnet18, "):
        registry.build("x")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelUnavailable, match=r"^deit_small_patch16_224 needs timm, which is not installed: "
                                               r"pip install 'fusionrt\[models\]'$"):
        registry.build("deit_small_patch16_224", True)

    def unfit(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(registry.importlib, "import_module", unfit)
    with pytest.raises(ModelUnavailable, match=r"which cannot be imported \(RuntimeError: operator "
                                               r"torchvision::nms does not exist\); install builds of torch"):
        registry.build("resnet18", True)


# --- examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "examples").glob("convert_*.py")))
def test_examples_run(packages, name: str, monkeypatch, capsys) -> None:
    import runpy
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert "as fast" in capsys.readouterr().out


def test_the_command_line_can_be_imported(capsys: pytest.CaptureFixture[str]) -> None:
    """As pydoc and multiprocessing do: no command runs."""
    import importlib
    module = importlib.reload(importlib.import_module("fusionrt.__main__"))
    assert module.main.name == "main" and capsys.readouterr() == ("", "")
