"""Models of every family, small, with random weights, and inputs for them: `ZOO[name]()` makes both.

torchvision, timm and transformers are imported when a model of theirs is asked for.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from fusionrt.convert.registry import randomise


@functools.cache
def torchvision() -> ModuleType:
    """Also where its compiled operators do not load, as those of its CUDA build beside torch's CPU build:
    no classifier needs them, but the package cannot be imported without two of them."""
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torchvision_library.append(library)
        import torchvision
    return torchvision


torchvision_library: list[torch.library.Library] = []  # lives as long as its operators


def timm() -> ModuleType:
    torchvision()
    import timm
    return timm


def transformers() -> ModuleType:
    torchvision()  # which it imports where it is installed
    import transformers
    return transformers


class Case(NamedTuple):
    model: nn.Module
    inputs: Any  # a tuple of arguments, or keyword arguments


def _vision(model: nn.Module, size: int = 32, batch: int = 2) -> Case:
    randomise(model)
    return Case(model.eval(), (torch.randn(batch, 3, size, size),))


def _torchvision(name: str, size: int = 32, **changes: Any) -> Case:
    return _vision(getattr(torchvision().models, name)(num_classes=10, **changes), size)


def _resnet(block: str) -> Case:
    resnet = torchvision().models.resnet
    return _vision(resnet.ResNet(getattr(resnet, block), [1, 1, 1, 1], num_classes=10), 64)


def _densenet() -> Case:
    return _vision(torchvision().models.DenseNet(8, (2, 2, 2), 16, num_classes=10))


def _vgg() -> Case:
    vgg = torchvision().models.vgg
    model = vgg.VGG(vgg.make_layers([16, "M", 32, 32, "M"], batch_norm=True), num_classes=10)
    model.classifier = nn.Sequential(nn.Linear(32 * 49, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 10))
    return _vision(model)


def _vit() -> Case:
    return _vision(torchvision().models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10))


def _deit() -> Case:
    name = "deit_small_patch16_224"
    return _vision(timm().create_model(name, img_size=32, depth=2, embed_dim=64, num_heads=4, num_classes=10))


def _swin() -> Case:
    swin = torchvision().models.SwinTransformer
    return _vision(swin([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=10), 64)


def _convnext() -> Case:
    convnext = torchvision().models.convnext
    blocks = [convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)]
    return _vision(convnext.ConvNeXt(blocks, num_classes=10))


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
         "vocab_size": 100}


def _language(head: str, config: str, inputs: tuple[str, ...] = ("input_ids",), **changes: Any) -> Case:
    package = transformers()
    model = getattr(package, head)(getattr(package, config)(**changes))
    randomise(model)
    tokens = {name: torch.randint(3, 100, (2, 16)) for name in inputs}
    return Case(model.eval(), tokens | {"use_cache": False})


ZOO = {
    "resnet18": lambda: _resnet("BasicBlock"), "resnet50": lambda: _resnet("Bottleneck"),
    "densenet": _densenet, "vgg": _vgg,
    "efficientnet": lambda: _torchvision("efficientnet_b0"),
    "mobilenet_v2": lambda: _torchvision("mobilenet_v2"),
    "mobilenet_v3": lambda: _torchvision("mobilenet_v3_small"),
    "vit": _vit, "deit": _deit, "swin": _swin, "convnext": _convnext,
    "bert": lambda: _language("BertModel", "BertConfig", **SMALL),
    "roberta": lambda: _language("RobertaModel", "RobertaConfig", **SMALL),
    "gpt2": lambda: _language("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=4, vocab_size=100,
                              bos_token_id=1, eos_token_id=2),
    "t5": lambda: _language("T5ForConditionalGeneration", "T5Config", ("input_ids", "decoder_input_ids"),
                            d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100,
                            decoder_start_token_id=0),
    "llama": lambda: _language("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **SMALL),
}
