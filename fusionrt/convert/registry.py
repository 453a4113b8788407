"""Models by name: which package has them, how they are built, what they take. It imports no package before
a model is built."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fusionrt.errors import one_line

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from fusionrt.convert.inputs import Inputs

IMAGE, TOKENS = (3, 224, 224), (128,)
PACKAGES = ("torchvision", "timm", "transformers")


class ModelUnavailable(RuntimeError):
    """A model of the registry cannot be had: its package or its weights are missing."""


class Entry(NamedTuple):
    """`shape`: of one input, without the batch. `architecture`: in transformers, the class that loads it and
    that of its configuration; `config`: what differs from that configuration's defaults, which are the
    published ones of the model. `published`: whether there are weights under this name."""

    family: str
    package: str
    shape: tuple[int, ...] = IMAGE
    architecture: tuple[str, str] = ("", "")
    config: Mapping[str, Any] = {}
    published: bool = True


def _language(family: str, head: str, config: str, published: bool = True, **changes: Any) -> Entry:
    return Entry(family, "transformers", TOKENS, (head, config), changes, published)


MODELS: dict[str, Entry] = {
    **{name: Entry("ResNet", "torchvision") for name in ("resnet18", "resnet50", "resnet101")},
    "densenet121": Entry("DenseNet", "torchvision"),
    "efficientnet_b0": Entry("EfficientNet", "torchvision"),
    "vgg16": Entry("VGG", "torchvision"),
    **{name: Entry("MobileNet", "torchvision")
       for name in ("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large")},
    "vit_b_16": Entry("ViT", "torchvision"),
    "vit_base_patch16_224": Entry("ViT", "timm"),
    "deit_small_patch16_224": Entry("DeiT", "timm"),
    "swin_t": Entry("Swin", "torchvision"),
    "convnext_tiny": Entry("ConvNeXt", "torchvision"),
    "bert-base-uncased": _language("BERT", "AutoModel", "BertConfig"),
    "bert-large-uncased": _language("BERT", "AutoModel", "BertConfig", hidden_size=1024, num_hidden_layers=24,
                                    num_attention_heads=16, intermediate_size=4096),
    "roberta-base": _language("RoBERTa", "AutoModel", "RobertaConfig", vocab_size=50265, type_vocab_size=1,
                              max_position_embeddings=514),
    "gpt2": _language("GPT-2", "AutoModelForCausalLM", "GPT2Config"),
    "t5-small": _language("T5", "AutoModelForSeq2SeqLM", "T5Config", decoder_start_token_id=0),
    "llama-small": _language("Llama", "AutoModelForCausalLM", "LlamaConfig", published=False, hidden_size=768,
                             num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
                             intermediate_size=2048, max_position_embeddings=2048)}


def find(name: str) -> tuple[str, Entry]:
    """A model's name for its package, and its entry: of the table, or as "timm:resnet26d",
    "torchvision:NAME", "transformers:NAME-OR-FOLDER". Raises ValueError for any other name.
    """
    if name in MODELS:
        return name, MODELS[name]
    package, _, rest = name.partition(":")
    if package in PACKAGES and rest:
        if package == "transformers":
            return rest, Entry(rest, package, TOKENS, ("AutoModel", ""))
        return rest, Entry(rest, package)
    raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}, and {', '.join(PACKAGES)} with a "
                     "name of theirs, as timm:resnet26d")


def build(name: str, random_init: bool = False) -> Module:
    """The model in evaluation mode, with its published weights or random ones (see
    `randomise`).

    Raises:
        ValueError: there is no such model.
        ModelUnavailable: its package is not installed, or its weights cannot be loaded.
    """
    own, entry = find(name)
    if not random_init and not entry.published:
        raise ModelUnavailable(f"{name} has no published weights; use --random-init (random_init=True)")
    package = _imported(name, entry.package)
    try:
        model: Module = _BUILDERS[entry.package](package, own, entry, random_init)
    except ImportError as error:  # transformers imports a model's code when it is asked for
        raise _misfit(name, entry.package, error) from error
    except Exception as error:  # each package has its own
        if random_init:
            raise ModelUnavailable(f"{name} cannot be built: {one_line(error, 200)}") from error
        raise ModelUnavailable(
            f"the weights of {name} cannot be loaded ({one_line(error, 200)}); connect this machine to "
            "the network once, copy the package's cache from one that was, or use --random-init "
            "(random_init=True)"
        ) from error
    if random_init:
        randomise(model)
    return model.eval()


def missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def _imported(name: str, package: str) -> Any:
    if missing(package):
        raise ModelUnavailable(f"{name} needs {package}, which is not installed: pip install "
                               "'fusionrt[models]'")
    try:
        return importlib.import_module(package)
    except Exception as error:  # not an ImportError where torchvision was built for another torch
        raise _misfit(name, package, error) from error


def _misfit(name: str, package: str, error: BaseException) -> ModelUnavailable:
    while error.__cause__ is not None:
        error = error.__cause__
    return ModelUnavailable(f"{name} needs {package}, which cannot be imported ({one_line(error, 200)}); "
                            "install builds of torch and torchvision that fit each other")


def _torchvision(torchvision: Any, name: str, entry: Entry, random_init: bool) -> Any:
    return torchvision.models.get_model(name, weights=None if random_init else "DEFAULT")


def _timm(timm: Any, name: str, entry: Entry, random_init: bool) -> Any:
    return timm.create_model(name, pretrained=not random_init)


def _transformers(transformers: Any, name: str, entry: Entry, random_init: bool) -> Any:
    head, config = entry.architecture
    if not random_init:
        return getattr(transformers, head).from_pretrained(name)
    if config:
        made = getattr(transformers, config)(**entry.config)
    else:
        made = transformers.AutoConfig.from_pretrained(name)
    return getattr(transformers, head).from_config(made)


_BUILDERS: dict[str, Callable[[Any, str, Entry, bool], Any]] = {
    "torchvision": _torchvision, "timm": _timm, "transformers": _transformers}


def randomise(model: Module, seed: int = 0) -> None:
    """What a new model begins with as a constant becomes random, as in a trained one: running statistics,
    weights and biases of norms, scales of layers, heads of zeros. They would hide what is computed."""
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm
    random = torch.Generator().manual_seed(seed)

    def vary(t: torch.Tensor, deviation: float) -> None:
        t.add_((torch.randn(t.shape, generator=random, device="cpu") * deviation).to(t.device, t.dtype))

    with torch.no_grad():
        for p in model.parameters():
            if p.numel() > 1 and bool((p == p.flatten()[0]).all()):
                vary(p, 0.1)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                mean, variance = module.running_mean, module.running_var
                if mean is not None and variance is not None:
                    vary(mean, 0.1)
                    variance.copy_(0.5 + torch.rand(variance.shape, generator=random, device="cpu"))


def example_inputs(name: str, model: Module, batch: int, device: torch.device | str = "cpu") -> Inputs:
    """Random images in the model's dtype, or token ids; without the cache that generation would need."""
    import torch

    from fusionrt.convert.inputs import Inputs
    _, entry = find(name)
    random = torch.Generator().manual_seed(0)
    if entry.package != "transformers":
        dtype = next(p.dtype for p in model.parameters())
        return Inputs((torch.randn(batch, *entry.shape, generator=random, device="cpu").to(device, dtype),))
    config: Any = model.config
    ids = torch.randint(config.vocab_size, (batch, *entry.shape), generator=random, device="cpu").to(device)
    more: dict[str, Any] = {"decoder_input_ids": ids.clone()} if config.is_encoder_decoder else {}
    return Inputs((), {"input_ids": ids, **more, "use_cache": False})
