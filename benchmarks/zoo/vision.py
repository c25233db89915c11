"""Models of torchvision with random weights: 25 that classify, 3 that segment; photographs of 64 x 64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# It also declares the operators that torchvision may lack, before torchvision is imported.
from models import CLASSES

SIDE = {"inception_v3": 96}
"""Pixels, where 64 are too few."""

CLASSIFIERS = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3"),
    *("maxvit_t", "mnasnet0_5", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small"),
    *("regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5"),
    *("squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "vit_small"),
)
SEGMENTERS = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")


def _classifier(name: str) -> nn.Module:
    from torchvision import models as zoo

    if name == "vit_small":
        return zoo.VisionTransformer(64, 16, 4, 4, 64, 128, num_classes=CLASSES)  # type: ignore[no-any-return]
    more: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if name == "inception_v3":
        # Its auxiliary classifier wants 299 pixels.
        more["aux_logits"] = False
    if name == "maxvit_t":
        # Its windows divide what is left of 64 pixels.
        return zoo.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)  # type: ignore[no-any-return]
    return zoo.get_model(name, weights=None, num_classes=CLASSES, **more)  # type: ignore[no-any-return]


def _segmenter(name: str) -> nn.Module:
    from torchvision import models as zoo

    more = {} if name.startswith("lraspp") else {"aux_loss": True}
    return zoo.get_model(name, weights=None, weights_backbone=None, num_classes=3, **more)  # type: ignore[no-any-return]


def _images(name: str, count: int) -> tuple[Tensor, Tensor]:
    side = SIDE.get(name, 64)
    return torch.randn(count, 3, side, side), torch.randint(0, CLASSES, (count,))


def _maps(_: str, count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 64, 64), torch.randint(0, 3, (count, 64, 64))


def loss(output: Any, target: Tensor) -> Tensor:
    """The mean cross entropy; auxiliary outputs, whatever the model names them, count 0.4."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output, target)
    parts = list(output.values()) if isinstance(output, dict) else [part for part in output if part is not None]
    main = parts[-1] if type(output).__name__ == "GoogLeNetOutputs" else parts[0]
    others = [part for part in parts if part is not main]
    return F.cross_entropy(main, target) + 0.4 * sum(
        (F.cross_entropy(part, target) for part in others), torch.zeros(())
    )


def entries() -> Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]]:
    """Returns by name how a model and so many examples are made."""
    return {
        **{name: (partial(_classifier, name), partial(_images, name)) for name in CLASSIFIERS},
        **{name: (partial(_segmenter, name), partial(_maps, name)) for name in SEGMENTERS},
    }
