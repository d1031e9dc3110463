"""From activations to vectors: against NumPy, and errors for what is ambiguous."""

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
        ((2, 7, 7, 7), None, "gap"),
        ((2, 197, 768), "cls", "cls"),
    ],
)
def test_auto_chooses_by_shape_and_family(
    shape: tuple[int, ...], tokens: str | None, expected: str
) -> None:
    assert pooling.choose(torch.zeros(shape), tokens=tokens) == expected


@pytest.mark.parametrize("shape", [(2, 197, 768), (2, 7, 7, 768), (2, 3, 4, 5, 6)])
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


def test_names_are_one_for_all_or_one_each() -> None:
    assert pooling.per_point("gap", n_points=2) == ["gap", "gap"]
    assert pooling.per_point(["gap", "auto"], n_points=2) == ["gap", "auto"]
    with pytest.raises(ConfigError, match="lists 1 names for 2 layers"):
        pooling.per_point(["gap"], n_points=2)
    with pytest.raises(ConfigError, match="'gpa' is not known; choose one of: auto, none"):
        pooling.per_point("gpa", n_points=1)
