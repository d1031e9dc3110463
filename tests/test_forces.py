"""The forces of t-SNE, and its gradient, against the sum over all pairs."""

from typing import Any

import numpy as np
import pytest
import scipy.sparse

from embedx import forces as module
from embedx import methods
from embedx.forces import attraction, repulsion
from embedx.methods import _gradient_on_grid


def points(n: int, *, span: float) -> Any:
    y = np.random.default_rng(0).normal(size=(n, 2)) * span / 8
    y[: n // 2] += span / 4
    return y


def affinities(n: int, m: int) -> Any:
    made = scipy.sparse.random(n, m, 0.05, format="csr", random_state=0)
    if n == m:
        made = made + made.T
        made.setdiag(0)
        made.eliminate_zeros()
    return (made / made.sum()).tocsr()


def over_all_pairs(y: Any, p: Any, *, to: Any = None) -> tuple[float, Any, Any]:
    """Divergence, attraction and repulsion, written out."""
    others = y if to is None else to
    between = y[:, None] - others[None]
    q = 1 / (1 + (between**2).sum(axis=2))
    if to is None:
        np.fill_diagonal(q, 0)
    total = q.sum() if to is None else q.sum(axis=1, keepdims=True)
    repelled = ((q**2)[:, :, None] * between).sum(axis=1) / total
    dense = p.toarray()
    attracted = ((dense * q)[:, :, None] * between).sum(axis=1)
    has = dense > 0
    divergence = float((dense[has] * np.log(dense[has] / (q / q.sum())[has])).sum())
    return divergence, attracted, repelled


def away(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(
    ("n", "span", "tolerance"),
    [(60, 1e-4, 1e-5), (300, 1.0, 1e-5), (500, 30.0, 0.03), (800, 150.0, 0.05)],
)
def test_repulsion_and_gradient_are_those_of_all_pairs(
    n: int, span: float, tolerance: float
) -> None:
    y, p = points(n, span=span), affinities(n, n)
    divergence, attracted, repelled = over_all_pairs(y, p)
    found = repulsion(y)
    assert found is not None
    assert away(found[0], repelled) < tolerance
    kl, gradient = _gradient_on_grid(y, p, should_eval_error=True, n_jobs=2)
    assert kl == pytest.approx(divergence, rel=2e-3)
    np.testing.assert_allclose(gradient, attracted - found[0], rtol=1e-9, atol=1e-15)


def test_the_repulsion_of_all_rows_together_is_none() -> None:
    found = repulsion(points(400, span=60.0))
    assert found is not None
    assert np.abs(found[0]).max() > 1e-4
    assert np.abs(found[0].sum(axis=0)).max() < 1e-5 * np.abs(found[0]).sum()


@pytest.mark.parametrize("span", [2.0, 80.0])
def test_rows_to_place_are_repelled_by_the_map_alone_each_for_itself(span: float) -> None:
    fixed, new = points(400, span=span), points(50, span=span)[::-1] * 0.9
    p = affinities(50, 400)
    _, attracted, repelled = over_all_pairs(new, p, to=fixed)
    found, some = repulsion(new, fixed=fixed), repulsion(new[:7], fixed=fixed)
    assert found is not None
    assert some is not None
    assert away(found[0], repelled) < 0.05
    assert np.array_equal(some[0], found[0][:7])
    gradient = _gradient_on_grid(new, p, reference_embedding=fixed)[1]
    np.testing.assert_allclose(gradient, attracted - found[0], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("y", [np.zeros((5, 2)), np.c_[np.arange(50.0), np.zeros(50)]])
def test_equal_points_and_points_on_a_line_have_finite_forces(y: Any) -> None:
    found = repulsion(y)
    assert found is not None
    assert np.isfinite(found[0]).all()
    assert np.abs(found[0][:, 1]).max() < 1e-6


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_map_flung_too_far_for_a_grid_is_summed_by_the_tree(
    is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a grid of a million units was filled")

    y = points(200, span=20.0)
    y[0] = 1e6, -1e6
    new, to = (y[:20], y) if is_fixed else (y, None)
    p = affinities(len(new), len(y))
    monkeypatch.setattr(module, "_field", refuse)
    assert repulsion(new, fixed=to) is None
    _, attracted, repelled = over_all_pairs(new, p, to=to)
    gradient = _gradient_on_grid(new, p, reference_embedding=to, bh_params={"theta": 0.5})[1]
    assert away(attracted - gradient, repelled) < 0.1


@pytest.mark.parametrize("n_jobs", [1, 2, 7])
@pytest.mark.parametrize("span", [1e-4, 1.0, 150.0])
def test_attraction_is_that_of_all_pairs_and_the_same_bytes_on_any_number_of_threads(
    span: float, n_jobs: int
) -> None:
    y, p = points(300, span=span), affinities(300, 300)
    p.data[p.indptr[5] : p.indptr[6]] = 0
    p.eliminate_zeros()  # a row without a neighbour
    found = attraction(p, y, n_jobs=n_jobs)
    assert away(found, over_all_pairs(y, p)[1]) < 1e-5
    assert not found[5].any()
    assert np.array_equal(found, attraction(p, y))


def test_the_gradient_of_many_points_takes_the_compiled_attraction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y, p = points(600, span=30.0), affinities(600, 600)
    _, slow = _gradient_on_grid(y, p)
    monkeypatch.setattr(methods, "_is_large", lambda n: n == 600)
    called = []
    monkeypatch.setattr(
        methods, "attraction", lambda *a, **k: called.append(1) or attraction(*a, **k)
    )
    divergence, fast = _gradient_on_grid(y, p, n_jobs=2)
    assert away(fast, slow) < 1e-5
    assert (divergence, called) == (0, [1])
    divergence, exact = _gradient_on_grid(y, p, should_eval_error=True)
    assert divergence > 0
    assert np.array_equal(exact, slow)
    assert called == [1]
