"""Feature maps of any network, against reshapes written by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from embedx import grids, hooks
from embedx.grids import Grid, grid_of


def last_of(name: str, picture: tuple[int, int]) -> nn.Module:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    if name.startswith("torchvision."):
        return torchvision.models.get_model(name.partition(".")[2], weights=None).eval()
    sized = {"img_size": picture} if "vit" in name or "deit" in name else {}
    return timm.create_model(name, pretrained=False, **sized).eval()


# The layer, and its maps (n, c, h, w) by hand.
BY_HAND: list[tuple[str, tuple[int, int], str, Callable[[Tensor], Tensor]]] = [
    (
        "vit_tiny_patch16_224",
        (64, 96),
        "blocks.5",
        lambda a: a[:, 1:].reshape(2, 4, 6, 192).permute(0, 3, 1, 2),
    ),
    (
        "deit_tiny_distilled_patch16_224",
        (64, 64),
        "blocks.5",
        lambda a: a[:, 2:].reshape(2, 4, 4, 192).permute(0, 3, 1, 2),
    ),
    (
        "vit_small_patch14_reg4_dinov2",
        (56, 84),
        "blocks.0",
        lambda a: a[:, 5:].reshape(2, 4, 6, 384).permute(0, 3, 1, 2),
    ),
    ("torchvision.swin_t", (64, 128), "features.1", lambda a: a.permute(0, 3, 1, 2)),
    ("torchvision.swin_t", (128, 64), "permute", lambda a: a),
    ("convnext_atto", (64, 96), "stages.2", lambda a: a),
    ("torchvision.resnet18", (96, 64), "layer3", lambda a: a),
]


@pytest.mark.parametrize(("name", "picture", "layer", "by_hand"), BY_HAND)
def test_the_maps_of_a_layer_are_those_of_a_reshape_by_hand(
    name: str, picture: tuple[int, int], layer: str, by_hand: Callable[[Tensor], Tensor]
) -> None:
    module = last_of(name, picture)
    x = torch.randn(2, 3, *picture)
    fired: list[tuple[str, object]] = []
    note = hooks.watched(module, left=lambda name, output: fired.append((name, output)))
    with note, torch.no_grad():
        module(x)
    with hooks.capture(module, layer) as got, torch.no_grad():
        module(x)
        activation = got[layer]
    patches = grids.patches_in(module, fired, n=2, picture=picture)
    grid = grid_of(activation, n=2, picture=picture, patches=patches)
    assert grid is not None
    maps = grid.maps(activation)
    assert torch.equal(maps, by_hand(activation))
    # The grid lies on the picture: what changes in a corner of it changes the same corner of maps.
    assert abs(maps.shape[2] / maps.shape[3] - picture[0] / picture[1]) < 0.2


def test_patches_that_are_not_square_are_those_of_the_convolution_that_cuts_them() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, (16, 4), (16, 4)), nn.Flatten(2))
    x = torch.randn(1, 3, 64, 64)
    fired: list[tuple[str, Any]] = []
    with hooks.watched(net, left=lambda name, output: fired.append((name, output))):
        net(x)
    patches = grids.patches_in(net, fired, n=1, picture=(64, 64))
    assert patches == {8: (4, 16)}
    tokens = net(x).transpose(1, 2)
    assert grid_of(tokens, n=1, picture=(64, 64), patches=patches) == Grid("tokens", 4, 16)


def test_flat_maps_with_channels_first_are_no_tokens() -> None:
    flat, patches = torch.zeros(2, 256, 196), {256: (14, 14)}  # 16 x 16 by chance
    assert grid_of(flat, n=2, picture=(224, 224), patches=patches) is None
    turned = grid_of(flat.transpose(1, 2), n=2, picture=(224, 224), patches=patches)
    assert turned == Grid("tokens", 14, 14)


@pytest.mark.parametrize(
    ("shape", "picture", "grid"),
    [
        ((2, 64, 7, 7), (224, 224), Grid("first", 7, 7)),
        ((2, 7, 7, 64), (224, 224), Grid("last", 7, 7)),
        ((2, 7, 5, 64), (224, 160), Grid("last", 7, 5)),
        ((2, 64, 7, 5), (224, 160), Grid("first", 7, 5)),
        ((2, 64, 147, 147), (299, 299), Grid("first", 147, 147)),
        ((2, 197, 8), (224, 224), Grid("tokens", 14, 14, 1)),
        ((2, 201, 8), (224, 224), Grid("tokens", 14, 14, 5)),
        ((2, 141, 8), (224, 160), Grid("tokens", 14, 10, 1)),
        ((2, 49, 8), (224, 224), Grid("tokens", 7, 7)),
        ((2, 64, 1, 1), (224, 224), None),
        ((2, 64), (224, 224), None),
        ((3, 64, 7, 7), (224, 224), None),  # its first axis is not that of the samples
        ((2, 12, 197, 64), (224, 224), None),  # heads of attention
        ((2, 33, 8), (224, 224), None),
        ((2, 17, 1, 40), (224, 224), None),
    ],
)
def test_a_shape_has_the_grid_of_the_picture_or_none(
    shape: tuple[int, ...], picture: tuple[int, int], grid: Grid | None
) -> None:
    assert grid_of(torch.zeros(shape), n=2, picture=picture) == grid


def test_what_is_no_tensor_of_floats_has_no_grid() -> None:
    for value in (None, (torch.zeros(2, 3, 4, 4),), torch.zeros(2, 3, 4, 4, dtype=torch.int64)):
        assert grid_of(value, n=2, picture=(8, 8)) is None


def seen(name: str, picture: tuple[int, int]) -> list[grids.Seen]:
    module = last_of(name, picture)
    fired: list[tuple[str, object]] = []
    note = hooks.watched(module, left=lambda name, output: fired.append((name, output)))
    with note, torch.no_grad():
        module(torch.randn(1, 3, *picture))
    return grids.seen_in(module, fired, n=1, picture=picture)


@pytest.mark.parametrize(
    ("name", "picture", "layers"),
    [
        ("torchvision.resnet18", (64, 64), ["relu", "layer1", "layer2", "layer3", "layer4"]),
        (
            "torchvision.swin_t",
            (64, 64),
            ["features.1", "features.3", "features.5", "permute"],
        ),
        (
            "vit_tiny_patch16_224",
            (64, 64),
            ["blocks.0", "blocks.3", "blocks.6", "blocks.8", "blocks.11", "norm"],
        ),
    ],
)
def test_layers_through_the_depth_are_one_of_each_size_or_blocks(
    name: str, picture: tuple[int, int], layers: list[str]
) -> None:
    assert grids.through_depth(seen(name, picture)) == layers


def test_pooled_maps_are_not_the_last_ones() -> None:
    found = seen("torchvision.vgg11", (64, 64))
    assert found[-1].name == "avgpool"
    last = [one for one in found if not one.is_pooled][-1]
    assert last.name == "features.19"  # the ReLU before the last pooling
    assert (last.grid.h, last.grid.w) == (4, 4)
