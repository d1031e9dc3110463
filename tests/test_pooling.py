"""From activations to vectors: against NumPy, and errors for what is ambiguous."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from embedx import pooling
from embedx.errors import ConfigError, ShapeError


def test_each_pooling_equals_numpy() -> None:
    maps, tokens = torch.randn(2, 3, 4, 5), torch.randn(2, 7, 3)
    np.testing.assert_allclose(
        pooling.gap(maps).numpy(), maps.numpy().mean((2, 3)), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        pooling.gap_last(maps).numpy(), maps.numpy().mean((1, 2)), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(pooling.flatten(maps).numpy(), maps.numpy().reshape(2, -1))
    np.testing.assert_array_equal(pooling.cls(tokens).numpy(), tokens.numpy()[:, 0])
    np.testing.assert_allclose(
        pooling.mean_token(tokens).numpy(), tokens.numpy().mean(1), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(
        pooling.none(maps.flatten(1)).numpy(), maps.numpy().reshape(2, -1)
    )
    assert pooling.flatten(torch.zeros(3)).shape == (3, 1)


@pytest.mark.parametrize(
    ("shape", "tokens", "expected"),
    [
        ((2, 5), None, "none"),
        ((2, 5, 1, 1), None, "gap"),
        ((2, 5, 7, 7), None, "gap"),
        ((2, 5, 7, 9), None, "gap"),
        ((2, 197, 768), "cls", "cls"),
    ],
)
def test_auto_chooses_by_shape_and_family(
    shape: tuple[int, ...], tokens: str | None, expected: str
) -> None:
    picture = (shape[2] * 4, shape[3] * 4) if len(shape) == 4 else None
    assert pooling.choose(torch.zeros(shape), tokens=tokens, picture=picture) == expected
    laid_out = torch.zeros(shape)
    if len(shape) == 4:  # as convolutions do
        laid_out = laid_out.contiguous(memory_format=torch.channels_last)
    assert pooling.choose(laid_out, tokens=tokens) == expected


@pytest.mark.parametrize(
    "shape", [(2, 197, 768), (2, 7, 7, 768), (2, 3, 4, 5, 6), (2, 7, 11, 32), (2, 7, 7, 7)]
)
def test_auto_refuses_what_could_mean_several_things(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"cannot tell what .* means; choose pooling="):
        pooling.choose(torch.zeros(shape))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("none", (2, 3, 4, 4)), ("gap", (2, 3)), ("gap", (2, 3, 4)), ("cls", (2, 3))],
)
def test_a_pooling_refuses_a_shape_it_does_not_mean(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=f"pooling={name} takes .* choose pooling="):
        pooling.POOLINGS[name](torch.zeros(shape))


def test_four_axes_that_no_picture_led_to_may_have_channels_first_or_last() -> None:
    with pytest.raises(ShapeError, match=r"choose pooling=gap_last .* or pooling=gap \("):
        pooling.choose(torch.zeros(2, 7, 11, 32))


def test_what_may_be_channels_last_is_not_told_to_average_width_and_channels() -> None:
    with pytest.raises(ShapeError, match="choose pooling=gap_last or pooling=flatten$"):
        pooling.choose(torch.zeros(2, 7, 7, 768))


@pytest.mark.parametrize("shape", [(2, 2, 3, 768), (2, 64, 96, 96), (2, 7, 7, 768), (2, 9, 9, 9)])
def test_maps_that_are_a_picture_with_channels_last_are_not_averaged_over_them(
    shape: tuple[int, ...],
) -> None:
    picture = (64, 96) if shape[1] != shape[2] else (96, 96)
    with pytest.raises(ShapeError, match="cannot tell what .* means; choose pooling=gap_last"):
        pooling.choose(torch.zeros(shape), picture=picture)


@pytest.mark.parametrize("shape", [(2, 768, 2, 3), (2, 32, 58, 90), (2, 512, 1, 1)])
def test_maps_in_the_proportion_of_the_picture_are_averaged(shape: tuple[int, ...]) -> None:
    assert pooling.choose(torch.zeros(shape), picture=(64, 96)) == "gap"
    laid_out = torch.zeros(2, 9, 9, 9).contiguous(memory_format=torch.channels_last)
    assert pooling.choose(laid_out, picture=(96, 96)) == "gap"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_whole_numbers_have_averages(dtype: torch.dtype) -> None:
    values = torch.arange(2 * 4 * 5 * 6).reshape(2, 4, 5, 6) % 3
    for name, axes in (("gap", (2, 3)), ("gap_last", (1, 2))):
        pooled = pooling.POOLINGS[name](values.to(dtype))
        assert torch.allclose(pooled.double(), values.to(dtype).double().mean(axes))
    pooled = pooling.mean_token(values[0].to(dtype))
    assert torch.allclose(pooled.double(), values[0].to(dtype).double().mean(1))


@pytest.mark.parametrize("shape", [(2, 512, 7, 7), (2, 512, 1, 26), (2, 4, 49, 256)])
def test_maps_in_another_proportion_are_averaged_where_their_layer_is_known(
    shape: tuple[int, ...],
) -> None:
    assert pooling.choose(torch.zeros(shape), picture=(64, 96), channels="first") == "gap"
    for channels in (None, "last"):
        with pytest.raises(ShapeError, match="cannot tell what .* means; choose pooling=gap_last"):
            pooling.choose(torch.zeros(shape), picture=(64, 96), channels=channels)  # type: ignore[arg-type]


def test_names_are_one_for_all_or_one_each() -> None:
    def names(given: object) -> list[str]:
        return [one.name for one in pooling.per_point(given, n_points=2)]  # type: ignore[arg-type]

    assert names("gap") == ["gap", "gap"]
    assert names(["gap", "auto"]) == ["gap", "auto"]
    assert names([functools.partial(pooling.gem, p=4), "max"]) == ["gem(p=4)", "max"]
    with pytest.raises(ConfigError, match="lists 1 names for 2 layers"):
        pooling.per_point(["gap"], n_points=2)
    with pytest.raises(ConfigError, match="'gpa' is not known; choose one of: auto, none"):
        pooling.per_point("gpa", n_points=1)
    with pytest.raises(ConfigError, match="must be a name or a function, not a int"):
        pooling.per_point([3], n_points=1)  # type: ignore[list-item]


def test_a_function_of_ones_own_is_told_by_what_it_does() -> None:
    def halves(activation: torch.Tensor) -> torch.Tensor:
        return activation.flatten(1) / 2

    (one,) = pooling.per_point(halves, n_points=1)
    assert one.name.endswith("halves")
    first = one.code

    def halves(activation: torch.Tensor) -> torch.Tensor:  # type: ignore[no-redef]
        return activation.flatten(1) / 2.0

    (other,) = pooling.per_point(halves, n_points=1)
    assert other.name == one.name
    assert "" != first != other.code
    assert pooling.per_point("gap", n_points=1)[0].code == ""
    assert pooling.per_point(pooling.gap, n_points=1) == pooling.per_point("gap", n_points=1)


def column(k: int, activation: torch.Tensor) -> torch.Tensor:
    return activation[:, k : k + 1]


class Column(torch.nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        return activation[:, self.k : self.k + 1] * self.weight


def test_a_function_of_ones_own_is_told_by_what_it_holds() -> None:
    def closed(k: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda activation: activation[:, k : k + 1]

    def with_default(k: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def pool(activation: torch.Tensor, k: int = k) -> torch.Tensor:
            return activation[:, k : k + 1]

        return pool

    def weighted(k: int) -> torch.nn.Module:
        module = Column(0)
        module.weight.data.fill_(k)
        return module

    for make in (
        closed,
        with_default,
        lambda k: functools.partial(column, k),
        Column,
        weighted,
        lambda k: Column(k).forward,
    ):
        one, again, other = (pooling.per_point(make(k), n_points=1)[0] for k in (1, 1, 2))
        assert (one.name, one.code) == (again.name, again.code)
        assert one.code != other.code
        assert "0x" not in one.name


def test_largest_values_and_generalized_means_equal_numpy() -> None:
    maps = torch.rand(2, 3, 4, 5) * 9
    numpy = maps.numpy().astype(np.float64)
    np.testing.assert_array_equal(pooling.max(maps).numpy(), maps.numpy().max((2, 3)))
    for p in (1.0, 3.0, 7.5):
        wanted = (numpy**p).mean((2, 3)) ** (1 / p)
        np.testing.assert_allclose(pooling.gem(maps, p=p).numpy(), wanted, rtol=1e-5)
    np.testing.assert_allclose(pooling.gem(maps, p=1).numpy(), pooling.gap(maps).numpy(), rtol=1e-5)
    np.testing.assert_allclose(
        pooling.gem(maps, p=400).numpy(), pooling.max(maps).numpy(), rtol=2e-2
    )
    # What is below eps counts as eps, and neither large nor half-precision numbers overflow.
    np.testing.assert_allclose(pooling.gem(-maps, eps=0.25).numpy(), 0.25, rtol=1e-5)
    np.testing.assert_allclose(
        pooling.gem(maps * 1e30).numpy(), (numpy**3).mean((2, 3)) ** (1 / 3) * 1e30, rtol=1e-4
    )
    half = pooling.gem((maps * 1000).half())
    assert half.dtype == torch.float32
    assert torch.isfinite(half).all()
    for arguments in ({"p": 0}, {"eps": 0.0}, {"p": float("nan")}):
        with pytest.raises(ConfigError, match="must be above 0"):
            pooling.gem(maps, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_length_of_very_small_and_very_large_numbers_is_right(dtype: torch.dtype) -> None:
    far = 1e-30 if dtype == torch.float32 else 1e-200
    x = torch.randn(5, 3, 4, dtype=dtype)
    x *= torch.tensor([1, far, 1 / far / 1e5, 0, 1], dtype=dtype)[:, None, None]
    x[4, 0, 0] = torch.inf
    wanted = [np.linalg.norm(np.longdouble(row).ravel()) for row in x.numpy()]
    np.testing.assert_allclose(pooling.norm(x)[:, 0].numpy(), np.array(wanted, float), rtol=1e-6)
    assert pooling.norm(x[:, :0]).tolist() == [[0.0]] * 5


def test_a_sample_of_padding_alone_has_no_length_no_mean_and_no_largest_value() -> None:
    tokens, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [0, 0, 0]])
    for reduce in (pooling.norm, pooling.mean_token, pooling.max_token):
        assert reduce(tokens, mask=mask).isfinite().all(1).tolist() == [True, False]


def test_padding_is_left_out_of_the_mean_whatever_it_holds() -> None:
    tokens = torch.randn(3, 5, 4)
    lengths = [5, 2, 1]
    mask = torch.tensor([[i < n for i in range(5)] for n in lengths])
    wanted = np.stack([tokens[i, :n].numpy().mean(0) for i, n in enumerate(lengths)])
    for spelling in (mask, mask.long(), mask.float()):
        padded = torch.where(mask.unsqueeze(2), tokens, torch.nan)
        got = pooling.mean_token(padded, mask=spelling).numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert pooling.mean_token(tokens, mask=torch.zeros(3, 5)).isnan().all()
    with pytest.raises(ShapeError, match=r"the mask has shape \(3, 4\)"):
        pooling.mean_token(tokens, mask=mask[:, :4])
    assert pooling.choose(tokens, is_masked=True) == "mean_token"
    assert pooling.choose(tokens, tokens="cls", is_masked=True) == "cls"
    half = torch.full((1, 512, 2), 200.0).half()  # whose sum is above what half precision holds
    assert pooling.mean_token(half, mask=torch.ones(1, 512)).tolist() == [[200.0, 200.0]]


@pytest.mark.parametrize(
    ("shape", "picture", "may_be_last"),
    [
        ((23, 48, 96), (95, 192), True),  # swin_t: maps of 23 x 48, or 23 channels of 48 x 96
        ((24, 48, 96), (95, 192), True),
        ((24, 47, 96), (95, 190), True),
        ((96, 24, 48), (96, 192), False),
        ((64, 56, 56), (224, 224), False),
        ((6, 7, 7), (224, 224), False),  # 7 is a whole part of the picture, and 6 is none
        ((32, 26, 26), (28, 28), False),
        ((256, 13, 13), (224, 224), False),
        ((512, 1, 1), (32, 32), False),
        ((8, 1, 1), (32, 32), False),
    ],
)
def test_a_map_that_is_nearer_the_picture_by_rounding_alone_is_asked_about(
    shape: tuple[int, ...], picture: tuple[int, int], may_be_last: bool
) -> None:
    found = pooling.may_be_channels_last(torch.zeros(2, *shape), picture=picture)
    assert found == may_be_last
