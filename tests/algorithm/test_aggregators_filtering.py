from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from cbdsl import register
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.aggregation import CROWD, combine, trust
from support.refusals import refused_as


def test_mda_takes_the_tightest_of_the_subsets_with_the_least_diameter() -> None:
    # (0, 0) and (4, 0) with either other row; the squared distances add up to 16 + 13 + 13 and 16 + 8 + 8.
    rows = [[0.0, 0.0], [4.0, 0.0], [2.0, 3.0], [2.0, -2.0], [90.0, 0.0]]
    assert combine("mda", rows, 2) == pytest.approx([2.0, -2 / 3])


def test_mda_is_refused_where_it_would_compare_more_than_a_million_subsets() -> None:
    with refused_as("out-of-range", "2,118,760", "1,000,000", "defence.declared"):
        combine("mda", [[float(row)] for row in range(50)], 5)
    settings = {"method": "fedavg", "workers": 100, "participation": 0.5, "defence.aggregator": "mda"}
    resolve(Spec().with_settings({**settings, "defence.declared": 4}))
    with refused_as("out-of-range", "50 uploads", "2,118,760"):
        resolve(Spec().with_settings({**settings, "defence.declared": 5}))


def test_align_ins_keeps_usual_directions() -> None:
    # Three steps along w_t, of lengths 1, 2 and 3, and one against it: cosines 1, 1, 1 and -1, whose median is 1 and
    # whose standard deviation is 0.87. Signs agree with the majority's in 3, 3, 3 and 2 of the three largest changes.
    start = np.eye(1, 10, dtype=np.float32)[0]
    rows = [list(start + length * start) for length in (1, 2, 3)] + [list(start - 5 * start)]
    found = combine("align-ins", rows, 1, trust(start))
    assert found == pytest.approx([1 + (1 + 2 + 2) / 3, *[0.0] * 9])  # clipped to the median length of those kept, 2


def test_dnc_leaves_out_the_outliers_along_the_first_singular_vector() -> None:
    # All weights at once: centred at (20, 0), the first vector is (1, 0), and the squares are 400, 225, 225, 900, 6400.
    rows = np.array([[0.0, 1.0], [5.0, -1.0], [5.0, 1.0], [-10.0, -1.0], [100.0, 0.0]])
    rule = register.aggregator.make("dnc", {"times": 1, "share": 1.0})
    np.testing.assert_allclose(rule(rows, 1, trust()), [0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(rule(rows, 2, trust()), [10 / 3, 1 / 3], atol=1e-12)


def test_sign_guard_by_hand() -> None:
    # Lengths of about 5, but for 50 and 0.1, which are unusual. The signs of (-3, -4) are not those of the others.
    rows = [[3.0, 4.0], [4.0, 3.0], [5.0, 0.1], [-3.0, -4.0], [30.0, 40.0], [0.06, 0.08]]
    middle, longest = 5.0, float(np.hypot(5, 0.1))
    expected = [(3 + 4 + 5 * middle / longest) / 3, (4 + 3 + 0.1 * middle / longest) / 3]
    assert combine("sign-guard", rows, 2) == pytest.approx(expected)


def test_flame_keeps_the_largest_cluster_of_directions() -> None:
    # Four models near (1, 1), two near (-1, 1). The median length is 2.
    angles = np.array([44.0, 45.0, 45.5, 46.0, 135.0, 136.0]) * np.pi / 180
    rows = np.array([2, 2, 2, 6, 2, 2])[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    quiet = register.aggregator.make("flame", {"noise": 0.0})(rows, 2, trust())
    kept = angles[:4]
    np.testing.assert_allclose(quiet, [2 * np.cos(kept).mean(), 2 * np.sin(kept).mean()])
    noisy = register.aggregator.make("flame", {"noise": 0.5})(rows, 2, trust())
    np.testing.assert_allclose(noisy - quiet, 0.5 * 2 * np.random.default_rng(0).standard_normal(2))


HDBSCAN = [[0, 1, 3, 4, 5, 6, 7, 8], [1, 3, 5, 6, 7], [3, 5, 6, 7, 8], [3, 4, 5, 7, 8]]


@pytest.mark.parametrize(("seed", "kept"), list(enumerate(HDBSCAN)))
def test_flame_keeps_the_cluster_that_the_package_hdbscan_finds(seed: int, kept: list[int]) -> None:
    # Version 0.8.44 with min_samples=1, which does not count the point itself; scikit-learn's does.
    rng = np.random.default_rng(seed)
    rows = 1 + 0.5 * rng.normal(size=(9, 6))
    rows[:3] -= seed * 0.5
    rows = np.round(rows, 2)
    found = register.aggregator.make("flame", {"noise": 0.0})(rows, 3, trust(size=6))
    lengths = np.linalg.norm(rows, axis=1)
    clipped = rows * np.minimum(1, np.median(lengths) / lengths)[:, None]
    np.testing.assert_allclose(found, clipped[kept].mean(0))


def test_clustering_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with refused_as("missing-package", "flame", "cbdsl[cluster-defences]"):
        combine("flame", CROWD, 1)


@pytest.mark.parametrize("name", ["align-ins"])
def test_means_of_rows_are_weighted_by_the_samples_of_their_workers(name: str) -> None:
    rows = np.array([[1.0, 1.0], [1.0, 1.5]])
    equal, weighted = (replace(trust(), sizes=np.array(sizes)) for sizes in ([1.0, 1.0], [3.0, 1.0]))
    rule = register.aggregator.get(name)
    assert rule(rows, 0, equal)[1] > rule(rows, 0, weighted)[1]
