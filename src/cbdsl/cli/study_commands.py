"""Commands that make many runs: sweep, compare, arena, study, reproduce, theory, tune, generate, bench."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cbdsl.cli import interrupts, options
from cbdsl.cli.options import DEFAULT_PRESET, Jobs, On, Plugins, Settings, SpecWords, Threads, takes_spec
from cbdsl.errors import UserError
from cbdsl.spec import Spec, numbers, parse_setting, words
from cbdsl.spec import words as split_words

if TYPE_CHECKING:
    from cbdsl.spec import Spec
if TYPE_CHECKING:
    from cbdsl.theory.genie import Divergence
    from cbdsl.theory.measure import TheoryResult
if TYPE_CHECKING:
    from cbdsl.studies.generate import GeneratedSet

Axes = list[tuple[str, list[Any]]]


@takes_spec()
def sweep(
    words: SpecWords,
    over: Annotated[
        list[str], typer.Option(metavar="KEY=VALUES", help="seed=0..4, or swarm.inertia=0.5,0.9; may repeat.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the sweep; the same one continues it.")] = Path("sweep"),
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Run a grid of experiments in parallel; finished ones are not run again."""
    interrupts.go_on_with(interrupts.command_line())
    from cbdsl.cli.display import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_comparison, print_sweep  # noqa: PLC0415
    from cbdsl.studies.compare import group_results  # noqa: PLC0415
    from cbdsl.studies.sweep import parse_axis, refuse_others, run_all, write_table  # noqa: PLC0415

    axes = [parse_axis(text) for text in over]
    keys = [key for key, _ in axes]
    points = checked_points(words, axes)
    refuse_others(out, "groups.csv", ("tuning.json", "contest.json", "plan.json", "study.json", "spec.toml"))
    with SweepDisplay(len(points), out) as display:
        results = run_all(points, out, jobs, display.show, on)
    write_table(results, keys, out)
    print_sweep(results, keys, out)
    if len({result.spec.seed for result in results}) > 1:
        typer.echo()
        print_comparison(group_results(results, keys))
    if options.is_installed("matplotlib"):
        from cbdsl.report.comparison_page import write_sweep_index  # noqa: PLC0415 - matplotlib loads slowly

        typer.echo(f"page: {write_sweep_index(results, keys, out)}")
    else:
        how = options.how_to_install("matplotlib")
        typer.echo(f"index.html is left out: matplotlib is not installed ({how}).", err=True)


def checked_points(words: SpecWords, axes: Axes) -> list[Spec]:
    """Every point of a grid, resolved: what is wrong with any of them is found before the first one is run."""
    from cbdsl.runs.resolve import resolve_all  # noqa: PLC0415
    from cbdsl.studies.sweep import grid  # noqa: PLC0415

    keys = [key for key, _ in axes]
    words.refuse_varied(keys)
    return resolve_all(grid(words.spec(), axes, words.fixed), [*keys, *words.given])


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Folders of finished runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Also write a page with a figure, and the table as CSV, into this folder.")
    ] = None,
) -> None:
    """Put finished runs side by side: what they differ in, and what came out; mean ± deviation over seeds."""
    if out is not None:
        options.demand("matplotlib", "it draws the figure of the page")
    from cbdsl.cli.tables import print_comparison  # noqa: PLC0415
    from cbdsl.studies import compare as job  # noqa: PLC0415

    print_comparison(job.compare(folders))
    if out is not None:
        from cbdsl.report.comparison_page import write_comparison  # noqa: PLC0415 - matplotlib loads slowly

        typer.echo(f"page: {write_comparison(folders, out)}")


def arena(  # noqa: PLR0913, PLR0917 - one parameter an option
    attacks: Annotated[str | None, typer.Option(help="Attacks, separated by commas; all if not given.")] = None,
    defences: Annotated[
        str | None, typer.Option(help="Defences, aggregators, selections or methods; all defences if not given.")
    ] = None,
    byzantine: Annotated[str | None, typer.Option(help="Numbers of attackers; 1,5,20 if not given.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="How many seeds, from 0; if not given 3 for our defences and FedAvg, 1 for the rest."),
    ] = None,
    presets: Annotated[
        str | None, typer.Option("--preset", help="Starting points; strong-iid,strong-noniid if not given.")
    ] = None,
    plugins: Plugins = None,
    settings: Settings = None,
    quick: Annotated[bool, typer.Option("--quick", help="A taste, in minutes: four attacks, six defences.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder; the same one continues what was stopped.")] = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Set every attack on every defence: heatmaps, worst cases, detection, cost: one page."""
    interrupts.go_on_with(interrupts.command_line())
    options.demand("matplotlib", "it draws the heatmaps")
    from cbdsl.cli.display import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_arena  # noqa: PLC0415
    from cbdsl.runs.resolve import refuse_idle  # noqa: PLC0415
    from cbdsl.studies import arena as job  # noqa: PLC0415
    from cbdsl.studies.sweep import forecast  # noqa: PLC0415

    start = replace(job.QUICK, plugins=tuple(plugins or ())) if quick else job.ArenaPlan(plugins=tuple(plugins or ()))
    own = dict(map(parse_setting, settings or []))
    chosen: dict[str, Any] = {
        "attacks": attacks and words(attacks),
        "defences": defences and words(defences),
        "byzantine": byzantine and numbers(byzantine, "--byzantine"),
        "seeds": seeds and tuple(range(seeds)),
        "other_seeds": seeds and tuple(range(seeds)),
        "presets": presets and words(presets),
        "settings": {**start.settings, **own} if own else None,
    }
    contest = replace(start, **{key: value for key, value in chosen.items() if value is not None})
    folder = out or Path("arena-quick" if quick else "arena")
    tasks = job.tasks_of(contest)
    refuse_idle([task.spec for task in tasks], own)
    if on is None:
        typer.echo(forecast(tasks, folder, jobs).words(), err=True)
    with SweepDisplay(len(tasks), folder) as display:
        held = job.run_arena(contest, folder, jobs, display.show, on)
    from cbdsl.report import arena_page  # noqa: PLC0415 - matplotlib loads slowly

    print_arena(held, arena_page.write(contest, held.bouts, folder, interrupts.command_line()))


def study(  # noqa: PLR0913, PLR0917 - one parameter an option
    name: Annotated[str, typer.Argument(metavar="NAME", help="hapt, fashion or cifar10: a preset of that name.")],
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from 0; 3 if not given.")] = None,
    ways: Annotated[
        str | None,
        typer.Option(help="Of fedavg, fedavg-tr, fedprox-tr, scaffold-tr, cb-dsl, rotation; all if not given."),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Leave the runs with attackers out.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the rounds, one seed: a look, no result.")] = False,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The folder; the same one continues what was stopped.")] = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Compare ways of learning on hapt, fashion or cifar10, clean and attacked: a table and a page."""
    interrupts.go_on_with(interrupts.command_line())
    options.demand("matplotlib", "it draws the figure")
    from cbdsl.cli.display import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_study  # noqa: PLC0415
    from cbdsl.runs.resolve import refuse_idle  # noqa: PLC0415
    from cbdsl.studies import benchmark_datasets as job  # noqa: PLC0415

    own = dict(map(parse_setting, settings or []))
    plan = job.StudyPlan(
        name,
        tuple(range(seeds or (1 if quick else 3))),
        words(ways) if ways is not None else tuple(job.STUDY_METHODS),
        attacked=not clean,
        quick=quick,
        settings=own,
    )
    specs = plan.specs()
    refuse_idle(specs, own)
    folder = out or Path(f"study-{name}-quick" if quick else f"study-{name}")
    with SweepDisplay(len(specs), folder) as display:
        held = job.run_study(plan, folder, jobs, display.show, on)
    from cbdsl.report import datasets_page  # noqa: PLC0415 - matplotlib loads slowly

    print_study(held, datasets_page.write(held, folder, interrupts.command_line()))


def reproduce(
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, one regime, fewer rounds: minutes instead of most of an hour.")
    ] = False,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The folder; the same one continues a job that was stopped.")] = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Run what is behind the paper's figures, judge its claims, measure its theorems: one page."""
    interrupts.go_on_with(interrupts.command_line())
    options.demand("matplotlib", "it draws the figures")
    from cbdsl.cli.display import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_claims  # noqa: PLC0415
    from cbdsl.runs.resolve import refuse_idle  # noqa: PLC0415
    from cbdsl.studies import reproduce as job  # noqa: PLC0415
    from cbdsl.studies.paper import FULL_PLAN, QUICK_PLAN  # noqa: PLC0415

    chosen = tuple(map(parse_setting, settings or []))
    plan = replace(QUICK_PLAN if quick else FULL_PLAN, settings=chosen)
    folder = out or Path("reproduction-quick" if quick else "reproduction")
    tasks = job.tasks_of(plan)
    refuse_idle([task.spec for task in tasks], [key for key, _ in chosen])
    with SweepDisplay(len(tasks), folder) as display:
        words = ["cbdsl reproduce", *(["--quick"] if quick else []), *(f"--set {text}" for text in settings or [])]
        made = job.reproduce(plan, folder, jobs, display.show, on)
    from cbdsl.report import paper_page  # noqa: PLC0415 - matplotlib loads slowly

    print_claims(made.claims, paper_page.write_reproduction(made, " ".join(words)))


_LOG_SECONDS = 10.0  # without a terminal, a line at most this often
_SUBJECT = f"A preset, a TOML file, or the folder of a run; {DEFAULT_PRESET} if not given."


@takes_spec(start=_SUBJECT)
def theory(
    words: SpecWords,
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON, alone on standard output.")
    ] = False,
) -> None:
    """Play a run again and put the paper's two theorems beside it.

    In a run's folder the findings are kept as theory.json, unless options make it another run.
    """
    interrupts.start_again()
    path = Path(words.start)
    if not words.start or not path.is_dir():
        _show(_watched(words.resolved(), threads), as_json, None)
        return
    from cbdsl.runs.folder import RunFolder  # noqa: PLC0415

    folder, spec = RunFolder.open(path)  # and nobody else goes on with the run meanwhile
    try:
        result = _watched(words.resolved(spec), threads)
        kept = None if words.given or words.plugins else path / "theory.json"
        if kept is not None:
            _keep(kept, result)
    finally:
        folder.close()
    _show(result, as_json, kept)


def _watched(spec: Spec, threads: int | None) -> TheoryResult:
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from cbdsl.cli.display import headline  # noqa: PLC0415
    from cbdsl.cli.tables import plain_console  # noqa: PLC0415
    from cbdsl.theory.measure import measure  # noqa: PLC0415

    console = plain_console(stderr=True)
    console.print(headline(spec), highlight=False, soft_wrap=True)
    columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=16), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("played again beside the genie", total=spec.rounds)

        last = time.monotonic()

        def show(found: Divergence) -> None:
            nonlocal last
            if not console.is_terminal and (time.monotonic() - last > _LOG_SECONDS or found.round == spec.rounds):
                last = time.monotonic()
                console.print(f"round {found.round}/{spec.rounds}  model divergence {found.mean:.3f}", highlight=False)
            bar.update(task, completed=found.round, description=f"model divergence {found.mean:.3f}")

        return measure(spec, threads, show)


def _keep(path: Path, result: TheoryResult) -> None:
    """Whole or not at all: a crash leaves the old file."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(result.to_text(), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def _show(result: TheoryResult, as_json: bool, kept: Path | None) -> None:
    if as_json:
        typer.echo(result.to_text(), nl=False)
        return
    from cbdsl.cli.tables import plain_console  # noqa: PLC0415
    from cbdsl.theory.measure import constants_table, table_of, verdict  # noqa: PLC0415

    console = plain_console(soft_wrap=True)
    console.print(constants_table(result.constants), highlight=False)
    console.print()
    console.print(table_of(result), highlight=False)
    console.print()
    for sentence in verdict(result):
        console.print(sentence, highlight=False)
    if kept is not None:
        console.print(f"kept: {kept}", highlight=False)


@takes_spec()
def tune(  # noqa: PLR0913, PLR0917 - one parameter an option
    words: SpecWords,
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=RANGE", help="swarm.inertia=0.1..1, or local.learning_rate=1e-3..1e-1:log."),
    ],
    budget: Annotated[int, typer.Option(help="How many settings each search tries.")] = 60,
    by: Annotated[str, typer.Option(help="swarm, random, tpe (with optuna); several are compared.")] = "swarm",
    seeds: Annotated[int, typer.Option(help="Runs of each try, a seed each; their mean counts.")] = 1,
    repeat: Annotated[int, typer.Option(help="Searches of each kind, a seed each.")] = 1,
    confirm: Annotated[int, typer.Option(help="Other seeds, on which the best meets the spec as it is.")] = 3,
    whole: Annotated[bool, typer.Option("--whole", help="Play hopeless tries to their end, too.")] = False,
    out: Annotated[Path, typer.Option(help="The folder; the same one goes on with a search.")] = Path("tuning"),
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Search for good settings with a particle swarm, judged on the server's hold-out and never on the test set."""
    interrupts.go_on_with(interrupts.command_line())
    from cbdsl.cli.display import SweepDisplay  # noqa: PLC0415
    from cbdsl.cli.tables import print_tuning  # noqa: PLC0415
    from cbdsl.studies import tune as job  # noqa: PLC0415
    from cbdsl.studies.tune import Space, parse_range  # noqa: PLC0415

    start = words.spec()
    axes = tuple(parse_range(text, start) for text in over)
    words.refuse_varied(axis.key for axis in axes)
    plan = job.SearchPlan(
        Space(start, axes, words.fixed), budget, split_words(by), repeat, seeds, confirm, early=not whole
    )
    if on is None:  # a cluster's machines may have other files
        job.rehearse(plan)
    runs = budget * seeds * repeat * len(plan.by) + 2 * confirm
    with SweepDisplay(runs, out) as display:
        held = job.run_search(plan, out, jobs, display.show, on)
    print_tuning(held, out)
    if options.is_installed("matplotlib"):
        from cbdsl.report import tune_page  # noqa: PLC0415 - matplotlib loads slowly

        typer.echo(f"page: {tune_page.write(held, out, interrupts.command_line())}")
    else:
        how = options.how_to_install("matplotlib")
        typer.echo(f"tuning.html is left out: matplotlib is not installed ({how}).", err=True)


USUAL = 2000  # samples
_OF_WORKERS = {"participation", "codec"}
_GROUPS = {"data", "workers", "participation", "seed", "codec", "options"}


@takes_spec()
def generate(  # noqa: PLR0913, PLR0917 - one parameter an option
    words: SpecWords,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHAT",
            help="server: the samples set aside for D_G; workers: everybody's, federated; or a data set, folder, .npz.",
        ),
    ] = "server",
    samples: Annotated[int | None, typer.Option(help=f"Samples of D_tr; {USUAL:,} if not given.")] = None,
    scoring: Annotated[int | None, typer.Option(help=f"Samples of D_sc; {USUAL:,} if not given.")] = None,
    holdout: Annotated[
        int, typer.Option(help="Samples of a hold-out for the guard, instead of real ones; not from workers.")
    ] = 0,
    passes: Annotated[
        int, typer.Option(help="Passes over the samples; rounds, if workers hold them. 0: 60, or 120 rounds.")
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="The folder; the same one continues what was stopped.")] = None,
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the measures as JSON, alone on standard output.")
    ] = False,
) -> None:
    """Make a D_G of nobody's samples: a generator learns, writes D_tr and D_sc, and its privacy is measured."""
    interrupts.go_on_with(interrupts.command_line())
    options.demand("torch", "the generator learns with it")
    from cbdsl.cli.display import PassDisplay  # noqa: PLC0415
    from cbdsl.studies import generate as job  # noqa: PLC0415 - torch loads slowly

    idle = [key for key in words.given if key.partition(".")[0] not in _GROUPS and key != "attack.byzantine"]
    if idle:
        raise UserError(
            f"{idle[0]} has no effect here: a generator has its own network and its own training (--passes). Of a spec "
            f"it uses {', '.join(sorted(_GROUPS))}."
        )
    alone = [key for key in words.given if key.partition(".")[0] in _OF_WORKERS and source != "workers"]
    if alone:
        raise UserError(
            f"{alone[0]} has no effect here: the generator learns in one place, and no model is sent. Leave it out, or "
            "add --from workers."
        )
    spec = words.resolved()
    wanted = [max(USUAL, size) for size in (spec.data.shared_training, spec.data.shared_scoring)]
    plan = job.GenerationPlan(
        spec,
        source,
        wanted[0] if samples is None else samples,
        wanted[1] if scoring is None else scoring,
        holdout,
        passes,
    )
    folder = out or Path(
        f"generated-{Path(source).stem}-{Path(spec.data.source).stem}-{spec.data.partition}-seed{spec.seed}"
    )
    material = job.gathered(plan)
    with PassDisplay(folder) as display:
        made = job.make_generated_set(plan, folder, threads, display.show, material)
    if options.is_installed("matplotlib"):
        from cbdsl.report import generated_page  # noqa: PLC0415 - matplotlib loads slowly

        generated_page.write(made, interrupts.command_line())
    else:
        how = options.how_to_install("matplotlib")
        typer.echo(f"generated.html is left out: matplotlib is not installed ({how}).", err=True)
    if as_json:
        typer.echo(json.dumps({"file": str(made.file), **asdict(made.privacy)}, indent=2))
        return
    _print(made, words)


def _print(made: GeneratedSet, words: SpecWords) -> None:
    from cbdsl.studies.generate import sentences  # noqa: PLC0415

    for line in sentences(made):
        typer.echo(line)
    typer.echo(f"file: {made.file}. Use it with: {_command(made, words)}")
    page = made.folder / "generated.html"
    if page.exists():
        typer.echo(f"page: {page}")


def _command(made: GeneratedSet, words: SpecWords) -> str:
    """A run that takes the file, with what was said of its data and its workers."""
    import shlex  # noqa: PLC0415

    from cbdsl.models.network import network_of  # noqa: PLC0415

    plan, kind = made.plan, made.material.kind
    have = {"shared_training": plan.training, "shared_scoring": plan.scoring, "holdout": plan.holdout}
    few = {f"data.{part}": count for part, count in have.items() if 0 < count < getattr(plan.spec.data, part)}
    said = {key: value for key, value in words.options.items() if key.partition(".")[0] not in _OF_WORKERS}
    source = said.pop("data.source", None)
    settings = {**said, "data.shared_source": str(made.file), **few}
    line = ["cbdsl", "run", *(["--spec"] if words.from_file else []), words.start or DEFAULT_PRESET]
    line += [word for plugin in words.plugins for word in ("--plugin", plugin)]
    line += ["--data", source] if source else []
    try:
        network_of(plan.spec, kind.shape, kind.classes)
    except UserError:  # such as the paper's CNN for what is no image
        line += ["--model", "mlp"]
    for key, value in settings.items():
        line += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(line)


_BATCH, _SCORING, _REPEATS = 10, 2000, 5


def bench(  # noqa: PLR0913, PLR0917 - one parameter per option
    models: Annotated[
        str, typer.Option(help="Models to measure, separated by commas; all built-in models if not given.")
    ] = "",
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "50",
    batch: Annotated[int | None, typer.Option(min=1, help=f"Samples per training batch; {_BATCH}.")] = None,
    scoring: Annotated[int | None, typer.Option(min=1, help=f"Samples that every worker scores; {_SCORING:,}.")] = None,
    threads: Threads = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help=f"Turns per contender, of which the fastest counts; {_REPEATS}.")
    ] = None,
    codecs: Annotated[str | None, typer.Option(help="Removed: see benchmarks/codecs.py.", hidden=True)] = None,
    on: Annotated[str | None, typer.Option(help="Removed: see benchmarks/ray_rounds.py.", hidden=True)] = None,
    shards: Annotated[int | None, typer.Option(help="Removed, with --on.", hidden=True)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two turns, 500 samples to score.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, alone on standard output.")] = False,
) -> None:
    """Measure the native engine against torch in one run: trust the ratios, not the times."""
    interrupts.start_again()
    _refuse_moved("--codecs", codecs, "benchmarks/codecs.py")
    _refuse_moved("--on", on, "benchmarks/ray_rounds.py")
    _refuse_moved("--shards", shards, "benchmarks/ray_rounds.py")
    counts = numbers(workers, "--workers")
    options.demand("torch", "the native engine is measured against it")
    from rich.console import Console  # noqa: PLC0415

    interrupts.INTERRUPTS.hold()
    from cbdsl.studies.bench import ZOO, make_table, measure  # noqa: PLC0415 - it loads torch

    interrupts.INTERRUPTS.release()
    try:
        with Console(stderr=True).status("starting") as status:
            rows = measure(
                words(models) or ZOO,
                counts,
                batch or _BATCH,
                threads,
                repeats or _REPEATS,
                scoring=scoring or _SCORING,
                quick=quick,
                progress=lambda done, total, what: status.update(f"{done}/{total}  {what}"),
            )
    except ValueError as error:
        raise UserError(f"{error}.") from error
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        Console().print(make_table(rows))


def _refuse_moved(option: str, value: object, script: str) -> None:
    if value is not None:
        raise UserError(
            f"{option} is no longer an option of cbdsl bench. Use python {script} in a copy of the source.",
            code="not-supported",
        )
