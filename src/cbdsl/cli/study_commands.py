"""Commands that run or measure a lot: sweep, compare, arena, study, reproduce, theory, tune, generate, bench."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cbdsl.cli import interrupts, options
from cbdsl.cli.options import DEFAULT_PRESET, Jobs, On, Plugins, Settings, SpecWords, Threads, takes_spec
from cbdsl.errors import UserError
from cbdsl.spec import Spec, numbers, parse_setting, words

if TYPE_CHECKING:
    from cbdsl.studies.generate import GeneratedSet
    from cbdsl.studies.sweep import OnProgress
    from cbdsl.theory.genie import Divergence
    from cbdsl.theory.measure import TheoryResult

T = TypeVar("T")

_CONTINUES = "Output folder. The same folder continues a stopped command."
Out = Annotated[Path | None, typer.Option(help=_CONTINUES)]


def _show_progress(runs: int, out: Path, run: Callable[[OnProgress], T]) -> T:
    """Call `run` with a function that shows its progress, and return the result."""
    from cbdsl.cli.display import SweepDisplay  # noqa: PLC0415

    with SweepDisplay(runs, out) as display:
        return run(display.show)


def _write_page(name: str, write: Callable[[], Path], *, quiet: bool = False) -> None:
    """Write a page and print its path; without matplotlib, print how to install it."""
    if options.is_installed("matplotlib"):
        page = write()
        if not quiet:
            typer.echo(f"page: {page}")
    else:
        how = options.how_to_install("matplotlib")
        typer.echo(f"{name} was not written: matplotlib is not installed ({how}).", err=True)


@takes_spec()
def sweep(
    spec_words: SpecWords,
    over: Annotated[
        list[str], typer.Option(metavar="KEY=VALUES", help="seed=0..4, or swarm.inertia=0.5,0.9; may repeat.")
    ],
    out: Annotated[Path, typer.Option(help=_CONTINUES)] = Path("sweep"),
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Run a grid of experiments in parallel. Finished runs are not repeated."""
    interrupts.go_on_with(interrupts.command_line())
    from cbdsl.cli.tables import print_comparison, print_sweep  # noqa: PLC0415
    from cbdsl.studies.compare import group_results  # noqa: PLC0415
    from cbdsl.studies.sweep import parse_axis, refuse_other_results, run_all, write_table  # noqa: PLC0415

    axes = [parse_axis(text) for text in over]
    keys = [key for key, _ in axes]
    points = resolve_grid(spec_words, axes)
    refuse_other_results(out, "groups.csv", ("tuning.json", "contest.json", "plan.json", "study.json", "spec.toml"))
    results = _show_progress(len(points), out, lambda show: run_all(points, out, jobs, show, on))
    write_table(results, keys, out)
    print_sweep(results, keys, out)
    if len({result.spec.seed for result in results}) > 1:
        typer.echo()
        print_comparison(group_results(results, keys))

    def write_page() -> Path:
        from cbdsl.report.comparison_page import write_sweep_index  # noqa: PLC0415 - matplotlib loads slowly

        return write_sweep_index(results, keys, out)

    _write_page("index.html", write_page)


def resolve_grid(spec_words: SpecWords, axes: list[tuple[str, list[Any]]]) -> list[Spec]:
    """Return every point of a grid, resolved, so that errors are found before the first run."""
    from cbdsl.runs.resolve import resolve_all  # noqa: PLC0415
    from cbdsl.studies.sweep import grid  # noqa: PLC0415

    keys = [key for key, _ in axes]
    spec_words.refuse_varied(keys)
    return resolve_all(grid(spec_words.spec(), axes, spec_words.fixed), [*keys, *spec_words.given])


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Folders of finished runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Also write a page with a figure, and the table as CSV, into this folder.")
    ] = None,
) -> None:
    """Compare finished runs: the settings in which they differ, and the results as mean ± deviation over seeds."""
    if out is not None:
        options.demand("matplotlib", "it draws the figure of the page")
    from cbdsl.cli.tables import print_comparison  # noqa: PLC0415
    from cbdsl.studies import compare as job  # noqa: PLC0415

    print_comparison(job.compare(folders))
    if out is not None:
        from cbdsl.report.comparison_page import write_comparison  # noqa: PLC0415 - matplotlib loads slowly

        typer.echo(f"page: {write_comparison(folders, out)}")


def arena(  # noqa: PLR0913, PLR0917 - one parameter per option
    attacks: Annotated[str | None, typer.Option(help="Attacks, separated by commas; all if not given.")] = None,
    defences: Annotated[
        str | None, typer.Option(help="Defences, aggregators, selections or methods; all defences if not given.")
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
    """Run every attack against every defence and write one report: heatmaps, worst cases, detection, cost."""
    interrupts.go_on_with(interrupts.command_line())
    options.demand("matplotlib", "it draws the heatmaps")
    from cbdsl.cli.tables import print_arena  # noqa: PLC0415
    from cbdsl.runs.resolve import refuse_idle  # noqa: PLC0415
    from cbdsl.studies import arena as job  # noqa: PLC0415
    from cbdsl.studies.sweep import forecast  # noqa: PLC0415

    start = replace(job.QUICK, plugins=tuple(plugins or ())) if quick else job.ArenaPlan(plugins=tuple(plugins or ()))
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
    tasks = job.list_tasks(plan)
    refuse_idle([task.spec for task in tasks], given)
    if on is None:
        typer.echo(forecast(tasks, folder, jobs).describe(), err=True)
    result = _show_progress(len(tasks), folder, lambda show: job.run_arena(plan, folder, jobs, show, on))
    from cbdsl.report.arena_page import write_arena_page  # noqa: PLC0415 - matplotlib loads slowly

    print_arena(result, write_arena_page(result, folder, interrupts.command_line()))


def study(  # noqa: PLR0913, PLR0917 - one parameter per option
    name: Annotated[str, typer.Argument(metavar="NAME", help="hapt, fashion or cifar10: a preset of that name.")],
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, from 0; 3 if not given.")] = None,
    ways: Annotated[
        str | None,
        typer.Option(help="Some of fedavg, fedavg-tr, fedprox-tr, scaffold-tr, cb-dsl, rotation; all if not given."),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Leave out the runs with attackers.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One seed and a fifth of the rounds: a first look.")] = False,
    settings: Settings = None,
    out: Out = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Compare methods on hapt, fashion or cifar10, clean and attacked: a table and a page."""
    interrupts.go_on_with(interrupts.command_line())
    options.demand("matplotlib", "it draws the figure")
    from cbdsl.cli.tables import print_study  # noqa: PLC0415
    from cbdsl.runs.resolve import refuse_idle  # noqa: PLC0415
    from cbdsl.studies import benchmark_datasets as job  # noqa: PLC0415

    given = dict(map(parse_setting, settings or []))
    plan = job.StudyPlan(
        name,
        tuple(range(seeds or (1 if quick else 3))),
        words(ways) if ways is not None else tuple(job.STUDY_METHODS),
        attacked=not clean,
        quick=quick,
        settings=given,
    )
    specs = plan.specs()
    refuse_idle(specs, given)
    folder = out or Path(f"study-{name}-quick" if quick else f"study-{name}")
    result = _show_progress(len(specs), folder, lambda show: job.run_study(plan, folder, jobs, show, on))
    from cbdsl.report.comparison_page import write_study_page  # noqa: PLC0415 - matplotlib loads slowly

    print_study(result, write_study_page(result, folder, interrupts.command_line()))


def reproduce(
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, one regime, fewer rounds: minutes instead of most of an hour.")
    ] = False,
    settings: Settings = None,
    out: Out = None,
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Reproduce the paper's figures, claims and theorems as one report."""
    interrupts.go_on_with(interrupts.command_line())
    options.demand("matplotlib", "it draws the figures")
    from cbdsl.cli.tables import print_claims  # noqa: PLC0415
    from cbdsl.runs.resolve import refuse_idle  # noqa: PLC0415
    from cbdsl.studies import reproduce as job  # noqa: PLC0415
    from cbdsl.studies.paper import FULL_PLAN, QUICK_PLAN  # noqa: PLC0415

    given = tuple(map(parse_setting, settings or []))
    plan = replace(QUICK_PLAN if quick else FULL_PLAN, settings=given)
    folder = out or Path("reproduction-quick" if quick else "reproduction")
    tasks = job.list_tasks(plan)
    refuse_idle([task.spec for task in tasks], [key for key, _ in given])
    result = _show_progress(len(tasks), folder, lambda show: job.run_reproduction(plan, folder, jobs, show, on))
    from cbdsl.report.paper_page import write_reproduction  # noqa: PLC0415 - matplotlib loads slowly

    command = ["cbdsl reproduce", *(["--quick"] if quick else []), *(f"--set {text}" for text in settings or [])]
    print_claims(result.claims, write_reproduction(result, " ".join(command)))


_LOG_SECONDS = 10.0  # without a terminal, a line at most this often
_SUBJECT = f"A preset, a TOML file, or the folder of a run; {DEFAULT_PRESET} if not given."


@takes_spec(start=_SUBJECT)
def theory(
    spec_words: SpecWords,
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON, alone on standard output.")
    ] = False,
) -> None:
    """Repeat a run and compare it with the paper's two theorems.

    In the folder of a run the findings are written to theory.json, unless options change the run.
    """
    interrupts.start_again()
    path = Path(spec_words.start)
    if not spec_words.start or not path.is_dir():
        _print_theory(_measure_theory(spec_words.resolved(), threads), as_json, None)
        return
    from cbdsl.runs.folder import RunFolder  # noqa: PLC0415
    from cbdsl.util.files import write_atomically  # noqa: PLC0415

    folder, spec = RunFolder.open(path)  # the lock keeps others from resuming the run meanwhile
    try:
        result = _measure_theory(spec_words.resolved(spec), threads)
        saved = None if spec_words.given or spec_words.plugins else path / "theory.json"
        if saved is not None:
            write_atomically(saved, result.to_text().encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.", code="unwritable-file") from error
    finally:
        folder.close()
    _print_theory(result, as_json, saved)


def _measure_theory(spec: Spec, threads: int | None) -> TheoryResult:
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
        task = bar.add_task("repeating the run beside the genie", total=spec.rounds)

        last = time.monotonic()

        def show(found: Divergence) -> None:
            nonlocal last
            if not console.is_terminal and (time.monotonic() - last > _LOG_SECONDS or found.round == spec.rounds):
                last = time.monotonic()
                console.print(f"round {found.round}/{spec.rounds}  model divergence {found.mean:.3f}", highlight=False)
            bar.update(task, completed=found.round, description=f"model divergence {found.mean:.3f}")

        return measure(spec, threads, show)


def _print_theory(result: TheoryResult, as_json: bool, saved: Path | None) -> None:
    if as_json:
        typer.echo(result.to_text(), nl=False)
        return
    from cbdsl.cli.tables import plain_console  # noqa: PLC0415
    from cbdsl.theory.measure import constants_table, describe_result, make_table  # noqa: PLC0415

    console = plain_console(soft_wrap=True)
    console.print(constants_table(result.constants), highlight=False)
    console.print()
    console.print(make_table(result), highlight=False)
    console.print()
    for sentence in describe_result(result):
        console.print(sentence, highlight=False)
    if saved is not None:
        console.print(f"saved: {saved}", highlight=False)


@takes_spec()
def tune(  # noqa: PLR0913, PLR0917 - one parameter per option
    spec_words: SpecWords,
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=RANGE", help="swarm.inertia=0.1..1, or local.learning_rate=1e-3..1e-1:log."),
    ],
    budget: Annotated[int, typer.Option(help="Number of settings that each search tries.")] = 60,
    by: Annotated[str, typer.Option(help="swarm, random, tpe (with optuna); several are compared.")] = "swarm",
    seeds: Annotated[int, typer.Option(help="Runs per trial, one per seed; their mean counts.")] = 1,
    repeat: Annotated[int, typer.Option(help="Searches of each kind, one per seed.")] = 1,
    confirm: Annotated[
        int, typer.Option(help="Number of extra seeds for comparing the best settings with the original spec.")
    ] = 3,
    whole: Annotated[bool, typer.Option("--whole", help="Do not stop unpromising trials early.")] = False,
    out: Annotated[Path, typer.Option(help=_CONTINUES)] = Path("tuning"),
    jobs: Jobs = None,
    on: On = None,
) -> None:
    """Search for good settings with a particle swarm. The server's hold-out decides, never the test set."""
    interrupts.go_on_with(interrupts.command_line())
    from cbdsl.cli.tables import print_tuning  # noqa: PLC0415
    from cbdsl.studies import tune as job  # noqa: PLC0415

    start = spec_words.spec()
    axes = tuple(job.parse_range(text, start) for text in over)
    spec_words.refuse_varied(axis.key for axis in axes)
    space = job.Space(start, axes, spec_words.fixed)
    plan = job.SearchPlan(space, budget, words(by), repeat, seeds, confirm, early=not whole)
    if on is None:  # the machines of a cluster may have other files
        job.build_searched_parts(plan)
    runs = budget * seeds * repeat * len(plan.by) + 2 * confirm
    result = _show_progress(runs, out, lambda show: job.run_search(plan, out, jobs, show, on))
    print_tuning(result, out)

    def write_page() -> Path:
        from cbdsl.report.tune_page import write_tuning_page  # noqa: PLC0415 - matplotlib loads slowly

        return write_tuning_page(result, out, interrupts.command_line())

    _write_page("tuning.html", write_page)


_SAMPLES = 2000
_WORKER_GROUPS = {"participation", "codec"}
_USED_GROUPS = {"data", "workers", "participation", "seed", "codec", "options"}


@takes_spec()
def generate(  # noqa: PLR0913, PLR0917 - one parameter per option
    spec_words: SpecWords,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="server: its own samples for D_G; workers: all their samples, federated; or a data set, folder, .npz.",
        ),
    ] = "server",
    samples: Annotated[int | None, typer.Option(help=f"Samples of D_tr; {_SAMPLES:,} if not given.")] = None,
    scoring: Annotated[int | None, typer.Option(help=f"Samples of D_sc; {_SAMPLES:,} if not given.")] = None,
    holdout: Annotated[
        int, typer.Option(help="Samples of a hold-out for the guard, instead of real ones; not with --from workers.")
    ] = 0,
    passes: Annotated[
        int, typer.Option(help="Passes over the samples; rounds with --from workers. 0: 60, or 120 rounds.")
    ] = 0,
    out: Out = None,
    threads: Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the measures as JSON, alone on standard output.")
    ] = False,
) -> None:
    """Train a generator and write a synthetic shared set (D_tr, D_sc), with measures of its privacy."""
    interrupts.go_on_with(interrupts.command_line())
    options.demand("torch", "the generator learns with it")
    from cbdsl.cli.display import PassDisplay  # noqa: PLC0415
    from cbdsl.studies import generate as job  # noqa: PLC0415 - torch loads slowly

    groups = {key: key.partition(".")[0] for key in spec_words.given if key != "attack.byzantine"}
    unused = [key for key, group in groups.items() if group not in _USED_GROUPS]
    if unused:
        raise UserError(
            f"{unused[0]} has no effect here: a generator has its own network and its own training (--passes). Of a "
            f"spec it uses {', '.join(sorted(_USED_GROUPS))}.",
            code="no-effect",
        )
    federated = [key for key, group in groups.items() if group in _WORKER_GROUPS]
    if federated and source != "workers":
        raise UserError(
            f"{federated[0]} has no effect here: the generator is trained in one place, and no model is sent. Leave it "
            "out, or add --from workers.",
            code="no-effect",
        )
    spec = spec_words.resolved()
    plan = job.GenerationPlan(
        spec,
        source,
        max(_SAMPLES, spec.data.shared_training) if samples is None else samples,
        max(_SAMPLES, spec.data.shared_scoring) if scoring is None else scoring,
        holdout,
        passes,
    )
    folder = out or Path(
        f"generated-{Path(source).stem}-{Path(spec.data.source).stem}-{spec.data.partition}-seed{spec.seed}"
    )
    data = job.load_generator_data(plan)
    with PassDisplay(folder) as display:
        result = job.run_generation(plan, folder, threads, display.show, data)
    if not as_json:
        for line in job.describe_result(result):
            typer.echo(line)
        typer.echo(f"file: {result.file}. Use it with: {_run_command(result, spec_words)}")

    def write_page() -> Path:
        from cbdsl.report.generated_page import write_generated_page  # noqa: PLC0415 - matplotlib loads slowly

        return write_generated_page(result, interrupts.command_line())

    _write_page("generated.html", write_page, quiet=as_json)
    if as_json:
        typer.echo(json.dumps({"file": str(result.file), **asdict(result.privacy)}, indent=2))


def _run_command(result: GeneratedSet, spec_words: SpecWords) -> str:
    """Return the command of a run that uses the file, with the given options about data and workers."""
    import shlex  # noqa: PLC0415

    from cbdsl.models.network import network_of  # noqa: PLC0415

    plan, kind = result.plan, result.data.kind
    sizes = {"shared_training": plan.training, "shared_scoring": plan.scoring, "holdout": plan.holdout}
    fewer = {f"data.{part}": count for part, count in sizes.items() if 0 < count < getattr(plan.spec.data, part)}
    given = {key: value for key, value in spec_words.options.items() if key.partition(".")[0] not in _WORKER_GROUPS}
    source = given.pop("data.source", None)
    settings = {**given, "data.shared_source": str(result.file), **fewer}
    command = ["cbdsl", "run", *(["--spec"] if spec_words.from_file else []), spec_words.start or DEFAULT_PRESET]
    command += [word for plugin in spec_words.plugins for word in ("--plugin", plugin)]
    command += ["--data", source] if source else []
    try:
        network_of(plan.spec, kind.shape, kind.classes)
    except UserError:  # such as the paper's CNN for samples that are not images
        command += ["--model", "mlp"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(command)


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
        raise UserError(f"{error}.", code="out-of-range") from error
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
