"""PaCMAP as a projection of one's own, by the authors' package: ``pip install pacmap``.

From this folder, over the newest run below ``../outputs``::

    python -m embedx project --config-dir conf projection=pacmap embeddings=../outputs/demo

``conf/projection/pacmap.yaml`` names the function. Nothing else is needed: the command line knows
its parameters and what this page says of them, and the map is scored, drawn and exported as others.
"""

import logging

import numpy as np

from embedx.methods import Result


def pacmap(
    x: np.ndarray,
    *,
    n_components: int = 2,
    n_neighbors: int = 10,
    mn_ratio: float = 0.5,
    fp_ratio: float = 2.0,
    random_state: int = 0,
) -> Result:
    """Pairwise controlled manifold approximation projection.

    Args:
        x: Shape ``(n, d)``, finite.
        n_components: m, 2 or more.
        n_neighbors: Pairs of near rows for each row; fewer where there are fewer rows.
        mn_ratio: Pairs of rows at middle distance for each near pair: they keep the whole together.
        fp_ratio: Pairs of rows far apart for each near pair.
        random_state: Seed.

    References:
        Wang, Huang, Rudin, Shaposhnik 2021, JMLR 22(201).
    """
    from pacmap import PaCMAP

    logging.getLogger("pacmap").setLevel(logging.ERROR)  # it warns of every seed
    k = min(n_neighbors, len(x) - 1)
    fit = PaCMAP(
        n_components=n_components,
        n_neighbors=k,
        MN_ratio=mn_ratio,
        FP_ratio=fp_ratio,
        random_state=random_state,
    )
    return Result(coords=fit.fit_transform(x, init="pca"), used={"n_neighbors": k})
