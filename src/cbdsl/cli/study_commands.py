"""Commands that run many experiments: sweep, compare, arena, study, reproduce, tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from cbdsl.cli import interrupts, options
from cbdsl.cli.options import CONTINUES, Jobs, On, Out, Plugins, Settings
from cbdsl.cli.spec_options import SpecWords, takes_spec
from cbdsl.cli.study_tables import (
    print_arena,
    print_claims,
    print_comparison,
    print_results,
    print_study,
    print_sweep,
    print_tuning,
)
from cbdsl.errors import UserError, shown, unknown
from cbdsl.runs.resolve import refuse_idle
from cbdsl.spec import numbers, parse_setting, words
from cbdsl.studies import (
    arena as arena_job,
    benchmark_datasets as study_job,
    label_budget as budget_job,
    reproduce as reproduce_job,
)
from cbdsl.studies.compare import group_blocks, group_results, read_folders, sort_sweep
from cbdsl.studies.comparison_text import format_blocks
from cbdsl.studies.paper import FULL_PLAN, QUICK_PLAN, REGIMES
from cbdsl.studies.sweep import (
    OTHER_STUDIES,
    OnProgress,
    SweepPlan,
    Task,
    explain_failures,
    forecast,
    parse_axis,
    plan_sweep,
    read_sweep,
    refuse_other_results,
    run_tasks,
    write_table,
)
from cbdsl.util.console import ProgressLine

T = TypeVar("T")


def _show_progress(runs: int, out: Path, run: Callable[[OnProgress], T]) -> T:
    """Call `run` with a function that shows its progress, and return the result."""
    with ProgressLine("rounds", log_seconds=30.0) as line:
        line.print(f"{runs} runs, folder: {out}")
        return run(lambda played, total, share: line.show(played, total, f"{100 * played // max(1, total)} %", share))


@takes_spec()
def sweep(
    spec_words: SpecWords,
    over: Annotated[
        list[str], typer.Option(metavar="KEY=VALUES", help="seed=0..4, or swarm.inertia=0.5,0.9; may repeat.")
    ],
    out: Annotated[Path, typer.Option(help=CONTINUES)] = Path("sweep"),
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Run a grid of experiments in parallel. Finished runs are not repeated."""
    interrupts.advise_same_command()
    plan = resolve_grid(spec_words, [parse_axis(text) for text in over])
    refuse_other_results(out, "groups.csv", OTHER_STUDIES)
    if plan.note:
        typer.echo(plan.note, err=True)
    tasks = [Task(spec) for spec in plan.specs]
    _show_progress(len(tasks), out, lambda show: run_tasks(tasks, out, jobs, show, on))
    results, keys = sort_sweep(read_sweep(out, plan.specs), plan.axes, len(tasks))
    write_table(results, keys, out)
    print_sweep(results, keys, out)
    if len({result.summary.metric for result in results}) > 1:
        typer.echo("The runs have different main metrics: there is no page, and no comparison.")
        return
    if len({result.spec.seed for result in results}) > 1:
        typer.echo()
        print_comparison(group_results(results, keys))

    def write_page() -> Path:
        from cbdsl.report.comparison_page import write_sweep_index  # noqa: PLC0415 - it needs matplotlib

        return write_sweep_index(results, keys, out)

    options.write_page("index.html", write_page)


def resolve_grid(spec_words: SpecWords, axes: list[tuple[str, list[Any]]]) -> SweepPlan:
    """Return the runs of a grid, with resolved specs."""
    spec_words.refuse_varied([key for key, _ in axes])
    return plan_sweep(spec_words.spec(), axes, spec_words.fixed, spec_words.given)


def compare(  # noqa: PLR0913, PLR0917 - one parameter per option
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Folders of finished runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Also write a page with a figure, and the table as CSV, into this folder.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="GROUP=LABEL", help="New label for a group; may repeat.")
    ] = None,
    order: Annotated[str, typer.Option(help="Order of groups: given, best (best first) or label.")] = "given",
    against: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Test the others against this group; the best if not given.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Print the table alone: md, tex (booktabs) or csv.")
    ] = None,
    measures: Annotated[
        str | None,
        typer.Option(help="Columns of md and tex: final, best, uplink_bytes, macro-f1, ...; final if not given."),
    ] = None,
    within: Annotated[
        str | None,
        typer.Option(metavar="KEYS", help="Test only groups with the same value of these settings, as in: attack."),
    ] = None,
) -> None:
    """Compare finished runs: settings that differ, mean ± deviation over seeds, paired tests."""
    if out is not None:
        options.demand_pages("it draws the figure of the page")
    if measures is not None and to not in {"md", "tex"}:
        raise UserError("--measures is for --to md or --to tex; other tables have all measures.", code="no-effect")
    if within and out is not None:
        raise UserError("--out writes one page for all groups, --within prints tables. Leave one out.", code="conflict")
    labels = dict(_parse_label(text) for text in label or [])
    blocks = group_blocks(read_folders(folders), words(within or ""))
    blocks = {title: one.arranged(labels, order, against or "") for title, one in blocks.items()}
    if to is not None:
        typer.echo(format_blocks(blocks, to, words(measures or "final")), nl=False)
    else:
        for title, comparison in blocks.items():
            typer.echo(f"\n{title}" if title else "", nl=bool(title))
            print_comparison(comparison)
    if out is not None:
        from cbdsl.report.comparison_page import write_comparison  # noqa: PLC0415 - it needs matplotlib

        typer.echo(f"page: {write_comparison(blocks[''], out)}", err=to is not None)


def _parse_label(text: str) -> tuple[str, str]:
    group, equals, label = text.partition("=")
    if not equals or not label.strip():
        raise UserError(
            f"{shown(text)} is not a label. Write --label GROUP=LABEL, as in --label 'restart=rotation'.",
            code="wrong-type",
        )
    return group.strip(), label.strip()


def arena(  # noqa: PLR0913, PLR0917 - one parameter per option
    attacks: Annotated[
        str | None,
        typer.Option(help="Attacks, separated by commas, or families such as family:backdoor; all if not given."),
    ] = None,
    defences: Annotated[
        str | None,
        typer.Option(help="Defences, aggregators, selections, methods or family:NAME; all defences if not given."),
    ] = None,
    byzantine: Annotated[str | None, typer.Option(help="Numbers of attackers; 1,5,20 if not given.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of seeds, from 0; if not given 3 for our defences and FedAvg, 1 for the others."
        ),
    ] = None,
    presets: Annotated[
        str | None, typer.Option("--preset", help="Starting points; strong-iid,strong-noniid if not given.")
    ] = None,
    plugins: Plugins = None,
    settings: Settings = None,
    quick: Annotated[bool, typer.Option("--quick", help="Four attacks, six defences, few rounds: minutes.")] = False,
    out: Out = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Run every attack against every defence and write one report."""
    interrupts.advise_same_command()
    options.demand_pages("it draws the heatmaps")
    start = replace(arena_job.QUICK if quick else arena_job.ArenaPlan(), plugins=tuple(plugins or ()))
    given = dict(map(parse_setting, settings or []))
    chosen: dict[str, Any] = {
        "attacks": attacks and words(attacks),
        "defences": defences and words(defences),
        "byzantine": byzantine and numbers(byzantine, "--byzantine"),
        "seeds": seeds and tuple(range(seeds)),
        "other_seeds": seeds and tuple(range(seeds)),
        "presets": presets and words(presets),
        "settings": {**start.settings, **given} if given else None,
    }
    plan = replace(start, **{key: value for key, value in chosen.items() if value is not None})
    folder = out or Path("arena-quick" if quick else "arena")
    tasks = arena_job.list_tasks(plan)
    refuse_idle([task.spec for task in tasks], given)
    arena_job.require_classes(task.spec for task in tasks)
    if on is None:
        typer.echo(forecast(tasks, folder, jobs).describe(), err=True)
    result = _show_progress(len(tasks), folder, lambda show: arena_job.run_arena(plan, folder, jobs, show, on))
    from cbdsl.report.arena_page import write_arena_page  # noqa: PLC0415 - it needs matplotlib

    print_arena(result, write_arena_page(result, folder, interrupts.command_line()))
    if result.failed:
        raise explain_failures(result.failed, len(tasks), folder)


def study(  # noqa: PLR0913, PLR0917 - one parameter per option
    name: Annotated[str, typer.Argument(metavar="NAME", help="budget, or a preset: hapt, fashion or cifar10.")],
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, from 0; 3 if not given.")] = None,
    ways: Annotated[
        str | None,
        typer.Option(help="Some of fedavg, fedavg-tr, fedprox-tr, scaffold-tr, cb-dsl, rotation; all if not given."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Of budget: some of iid, noniid, fashion, hapt; all that are here if not given."),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Leave out the runs with attackers.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One seed and a fifth of the rounds: a first look.")] = False,
    settings: Settings = None,
    out: Out = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Compare methods on a data set, clean and attacked; or find where a swarm pays."""
    interrupts.advise_same_command()
    options.demand_pages("it draws the figure")
    given = dict(map(parse_setting, settings or []))
    if name == "budget":
        if clean or ways is not None:
            idle = "--clean" if clean else "--ways"
            raise UserError(f"{idle} has no effect on the study budget: it has five clean ways.", code="no-effect")
        _study_budget(seeds or (1 if quick else 3), data, quick, given, out, jobs, on)
        return
    if data is not None:
        raise UserError(f"--data is for the study budget; '{name}' has data of its own.", code="no-effect")
    plan = study_job.StudyPlan(
        name,
        tuple(range(seeds or (1 if quick else 3))),
        words(ways) if ways is not None else tuple(study_job.STUDY_METHODS),
        attacked=not clean,
        quick=quick,
        settings=given,
    )
    specs = plan.specs()
    refuse_idle(specs, given)
    folder = out or Path(f"study-{name}-quick" if quick else f"study-{name}")
    result = _show_progress(len(specs), folder, lambda show: study_job.run_study(plan, folder, jobs, show, on))
    from cbdsl.report.comparison_page import write_study_page  # noqa: PLC0415 - it needs matplotlib

    print_study(result, write_study_page(result, folder, interrupts.command_line()))


def _study_budget(
    seeds: int,
    data: str | None,
    quick: bool,
    given: Mapping[str, Any],
    out: Path | None,
    jobs: int | None,
    on: str | None,
) -> None:
    """Run the study `budget`; data: some of its data sets, all that are here if not given."""
    here, missing = budget_job.list_available(words(data) if data is not None else tuple(budget_job.BUDGET_DATA))
    for source in missing:
        typer.echo(f"{source} is left out: fetch it first (cbdsl data fetch {source}).", err=True)
    budgets = tuple(budget_job.BUDGETS)[:2] if quick else tuple(budget_job.BUDGETS)
    plan = budget_job.BudgetPlan(here, tuple(range(seeds)), budgets, given)
    refuse_idle([plan.spec(*point) for point in plan.points()], given)
    folder = out or Path("study-budget-quick" if quick else "study-budget")
    found = _show_progress(
        len(plan.points()), folder, lambda show: budget_job.run_budget_study(plan, folder, jobs, show, on)
    )
    from cbdsl.report.budget_page import write_budget_page  # noqa: PLC0415 - it needs matplotlib

    page = write_budget_page(found, folder, interrupts.command_line())
    print_results(budget_job.describe_budget_study(plan), *budget_job.budget_table(found), page)


def reproduce(  # noqa: PLR0913, PLR0917 - one parameter per option
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One seed, one regime, fewer rounds, no theorems, few claims judged: minutes."),
    ] = False,
    figure: Annotated[
        list[int] | None, typer.Option(min=1, max=5, help="Reproduce only this figure; may repeat.")
    ] = None,
    regime: Annotated[
        list[str] | None, typer.Option(help="paper (the text) or script (the authors' program); both if not given.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, from 0; 3 if not given.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of every run; the paper's if not given.")] = None,
    settings: Settings = None,
    out: Out = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Reproduce the paper's figures, claims and theorems as one report."""
    interrupts.advise_same_command()
    options.demand_pages("it draws the figures")
    given = tuple(map(parse_setting, settings or []))
    for name in regime or ():
        if name not in REGIMES:
            raise unknown("regime", name, REGIMES)
    chosen: dict[str, Any] = {
        "figures": figure and tuple(sorted(set(figure))),
        "regimes": regime and tuple(dict.fromkeys(regime)),
        "seeds": seeds and tuple(range(seeds)),
        "rounds": rounds,
    }
    chosen = {key: value for key, value in chosen.items() if value}
    plan = replace(QUICK_PLAN if quick else FULL_PLAN, settings=given, **chosen)
    parts = [f"figure{number}" for number in chosen.get("figures", ())] + list(chosen.get("regimes", ()))
    folder = out or Path("-".join(["reproduction", *["quick"] * quick, *parts]))
    tasks = reproduce_job.list_tasks(plan)
    refuse_idle([task.spec for task in tasks], [key for key, _ in given])
    result = _show_progress(
        len(tasks), folder, lambda show: reproduce_job.run_reproduction(plan, folder, jobs, show, on)
    )
    from cbdsl.report.paper_page import write_reproduction  # noqa: PLC0415 - it needs matplotlib

    print_claims(result.claims, write_reproduction(result, interrupts.command_line()))


@takes_spec()
def tune(  # noqa: PLR0913, PLR0917 - one parameter per option
    spec_words: SpecWords,
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=RANGE", help="swarm.inertia=0.1..1, or local.learning_rate=1e-3..1e-1:log."),
    ],
    budget: Annotated[int, typer.Option(help="Number of settings that each search tries.")] = 60,
    by: Annotated[str, typer.Option(help="swarm, random, tpe; several are compared.")] = "swarm",
    seeds: Annotated[int, typer.Option(help="Runs per trial, one per seed; their mean counts.")] = 1,
    repeat: Annotated[int, typer.Option(help="Searches of each kind, one per seed.")] = 1,
    confirm: Annotated[
        int, typer.Option(help="Number of extra seeds for comparing the best settings with the original spec.")
    ] = 3,
    whole: Annotated[bool, typer.Option("--whole", help="Do not stop unpromising trials early.")] = False,
    out: Annotated[Path, typer.Option(help=CONTINUES)] = Path("tuning"),
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Search for good settings. The server's hold-out decides, never the test set."""
    interrupts.advise_same_command()
    from cbdsl.studies import tune as job  # noqa: PLC0415 - it may need optuna

    start = spec_words.spec()
    axes = tuple(job.parse_range(text, start) for text in over)
    spec_words.refuse_varied(axis.key for axis in axes)
    space = job.Space(start, axes, spec_words.fixed)
    plan = job.SearchPlan(space, budget, words(by), repeat, seeds, confirm, early=not whole)
    if on is None:  # the machines of a cluster may have other files
        job.build_searched_parts(plan)
    runs = budget * seeds * repeat * len(plan.by) + 2 * confirm
    result = _show_progress(runs, out, lambda show: job.run_search(plan, out, jobs, show, on))
    print_tuning(result, job.describe_gain(result), out)

    def write_page() -> Path:
        from cbdsl.report.tune_page import write_tuning_page  # noqa: PLC0415 - it needs matplotlib

        return write_tuning_page(result, out, interrupts.command_line())

    options.write_page("tuning.html", write_page)
