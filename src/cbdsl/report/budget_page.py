"""The page of the study `budget`: where a swarm pays."""

from __future__ import annotations

from pathlib import Path

from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from cbdsl.report.figures import INK, MARKERS, SHADES, SMALL, Curve, new_figure, plot_curves, style_axes
from cbdsl.report.pages import Drawing, Table, capitalise, keep_together, save_drawing, write_page
from cbdsl.studies.label_budget import (
    BUDGET_DATA,
    LABELS,
    SERVER_ALONE,
    SWARM,
    BudgetStudy,
    budget_table,
    describe_budget_study,
)

# The look of each way; the server alone is dashed, as on the other pages, and so is the ceiling.
_LOOKS = {way: way for way in LABELS} | {SERVER_ALONE: "cb-dsl-equal", SWARM: "cb-dsl-g", "central": "fedavg"}
_DASHED = {SERVER_ALONE, "central"}


def write_budget_page(study: BudgetStudy, out: Path, command: str) -> Path:
    """Write figures/ and study.html into the study's folder; return the page."""
    heads, rows = budget_table(study)
    data, budget = study.plan.data[0], min(study.plan.budgets)
    figure = save_drawing(
        draw_budget(study), out / "figures" / "budget", "Accuracy over labelled samples at the server"
    )
    return write_page(
        out / "study.html",
        "budget.html.j2",
        title="Where a swarm pays",
        command=command,
        description=describe_budget_study(study.plan),
        first=BUDGET_DATA[data].title,
        budget=budget,
        gain=100 * study.gain(data, budget).mean,
        figure=figure,
        results=Table(tuple(map(capitalise, heads)), [tuple(map(keep_together, row)) for row in rows]),
        runs=len(study.runs),
    )


def draw_budget(study: BudgetStudy) -> Drawing:
    """Draw a panel per data set: accuracy over labelled samples, a line per way."""
    plan = study.plan
    columns = min(2, len(plan.data))
    lines = -(-len(plan.data) // columns)
    canvas = new_figure(3.9 * columns + 1.9, 3.5 * lines + 0.4)
    panels = canvas.subplots(lines, columns, squeeze=False)
    for axes in panels.flat[len(plan.data) :]:
        axes.set_axis_off()
    for place, (axes, data) in enumerate(zip(panels.flat, plan.data, strict=False)):
        curves = []
        for way, label in LABELS.items():
            rows = list(zip(*(study.accuracies(data, way, budget) for budget in plan.budgets), strict=True))
            look, line = _LOOKS[way], "--" if way in _DASHED else "-"
            curves.append(Curve(label, SHADES[look][0], MARKERS[look], plan.budgets, rows, line))
        values = [value for curve in curves for row in curve.rows for value in row]
        low, high = min(values), max(values)
        margin = max(0.01, 0.06 * (high - low))
        axes.set_xscale("log")
        span = (low - margin, high + margin)
        plot_curves(
            axes,
            curves,
            0.06 * (high - low),
            labels=place % columns == columns - 1 or data == plan.data[-1],
            within=span,
        )
        style_axes(axes, BUDGET_DATA[data].title)
        axes.set_ylim(*span)
        axes.set_xlabel("labelled samples at the server")
        axes.xaxis.set_major_locator(FixedLocator(plan.budgets))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="x", labelsize=SMALL, colors=INK)
        axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in panels[:, 0]:
        axes.set_ylabel("test accuracy")
    rows = [
        (data, LABELS[way], budget, seed, run.summary.final_accuracy)
        for (data, way, budget, seed), run in study.runs.items()
    ]
    return Drawing(canvas, ("data", "way", "labelled", "seed", "test_accuracy"), rows)
