from __future__ import annotations

import pytest

from cbdsl.report.figures import accuracy_curves, new_figure, plot_curves, spread_labels
from support.finished_runs import make_run


def test_accuracy_by_round_and_by_the_mean_of_what_was_sent() -> None:
    runs = [make_run([0.1, 0.4], uplink=100).rounds, make_run([0.3, 0.6], uplink=300).rounds]
    by_round, by_byte = accuracy_curves("name", "#000000", "o", runs)
    assert (by_round.x, by_byte.x) == ([1, 2], [200, 400])
    assert by_round.rows == by_byte.rows == [[0.1, 0.4], [0.3, 0.6]]
    assert by_round.mean == pytest.approx([0.2, 0.5])


def test_a_band_is_drawn_for_several_runs_alone() -> None:
    one, two = make_run([0.1, 0.4]).rounds, make_run([0.3, 0.6]).rounds
    for runs, bands in (([one], 0), ([one, two], 1)):
        axes = new_figure(4, 3).subplots()
        plot_curves(axes, [accuracy_curves("name", "#000000", "o", runs)[0]], gap=0.05, labels=False)
        assert len(axes.collections) == bands
        assert not axes.texts


def test_labels_are_kept_within_a_span() -> None:
    placed = spread_labels([0.99, 1.0, 0.98], 0.1, (0.0, 1.0))
    assert placed == pytest.approx([0.9, 1.0, 0.8])
    assert spread_labels([0.01, 0.02], 0.1, (0.0, 1.0)) == pytest.approx([0.0, 0.1])
    assert spread_labels([0.3, 0.8], 0.1, (0.0, 1.0)) == [0.3, 0.8]
