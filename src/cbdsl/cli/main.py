"""The command line: reads words, calls `experiment`, shows what happens. No logic of its own."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cbdsl import __version__
from cbdsl import settings as settings_text
from cbdsl import spec as specs
from cbdsl.errors import UserError
from cbdsl.presets import PRESETS, preset, preset_or_file

if TYPE_CHECKING:
    from cbdsl.runs.result import Result

app = typer.Typer(
    help="Distributed swarm learning: communication-efficient, Byzantine-robust (CB-DSL, arXiv 2208.05578).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEFAULT_PRESET = "paper-iid"

_Threads = Annotated[int | None, typer.Option(help="Threads to use; all cores if not given. Changes no number.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, alone on standard output.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]


@app.callback()
def common(version: _Version = False) -> None:
    """Distributed swarm learning: communication-efficient, Byzantine-robust (CB-DSL, arXiv 2208.05578)."""


@app.command(no_args_is_help=False)
def run(  # noqa: PLR0913, PLR0917 - one parameter an option
    preset_name: Annotated[str | None, typer.Option("--preset", help=f"Starting point: {', '.join(PRESETS)}.")] = None,
    spec_file: Annotated[
        Path | None, typer.Option("--spec", help="Starting point: a TOML file, such as a run's.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="cb-dsl, fedavg, fedpso or pso.")] = None,
    shared: Annotated[
        str | None, typer.Option(help="Shared data: none, score (D_sc), train (D_tr) or both (D_G).")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of workers, U.")] = None,
    byzantine: Annotated[int | None, typer.Option(help="How many workers are attackers.")] = None,
    attack: Annotated[
        str | None, typer.Option(help="What the attackers do: liar, memoriser, alie, ...; `cbdsl attacks` lists them.")
    ] = None,
    aggregator: Annotated[
        str | None, typer.Option(help="How FedAvg combines models: mean, median, krum, nnm+median, ...")
    ] = None,
    guard: Annotated[
        bool, typer.Option("--guard", help="Check uploads on a private hold-out, too; claims come with commitments.")
    ] = False,
    soup: Annotated[int | None, typer.Option(help="Average up to K verified models instead of taking one.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    model: Annotated[str | None, typer.Option(help="cnn, mlp or softmax.")] = None,
    data: Annotated[str | None, typer.Option(help="A folder of IDX files, or an .npz file, instead of MNIST.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, native or torch.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the spec.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for the run; runs/<name> if not given.")] = None,
    threads: _Threads = None,
    as_json: _Json = False,
) -> None:
    """Run one experiment and leave a folder that explains itself."""
    if preset_name and spec_file:
        raise UserError("Give --preset or --spec, not both: each is a whole starting point.")
    start = specs.read(spec_file) if spec_file else preset(preset_name or DEFAULT_PRESET)
    options: dict[str, Any] = {
        "method": method,
        "shared": shared,
        "rounds": rounds,
        "workers": workers,
        "attack.byzantine": byzantine,
        "attack.name": attack,
        "defence.aggregator": aggregator,
        "selection.name": "soup" if soup else None,
        "selection.k": soup,
        "defence.guard": guard or None,
        "defence.commitment": guard or None,
        "seed": seed,
        "model": model,
        "data.source": data,
        "engine": engine,
    }
    chosen = {key: value for key, value in options.items() if value is not None}
    chosen |= dict(settings_text.parse_setting(text) for text in settings or [])
    if method is not None and "shared" not in chosen:
        chosen["shared"] = "default"  # another method than the spec's brings its own default
    spec = start.with_settings(chosen)

    from cbdsl.cli.progress import Display, folder_name  # noqa: PLC0415
    from cbdsl.runs import play  # noqa: PLC0415
    from cbdsl.runs.folder import free_folder  # noqa: PLC0415
    from cbdsl.runs.resolve import resolve  # noqa: PLC0415

    folder = out or free_folder(folder_name(resolve(spec)))
    with Display() as display:
        result = play.run(spec, out=folder, threads=threads, callbacks=[display])
    _conclude(result, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    threads: _Threads = None,
    as_json: _Json = False,
) -> None:
    """Go on with a run that was stopped, as if it had never been."""
    from cbdsl.cli.progress import Display  # noqa: PLC0415
    from cbdsl.runs import play  # noqa: PLC0415

    with Display() as display:
        result = play.resume(folder, threads=threads, callbacks=[display])
    _conclude(result, as_json)


@app.command()
def theory(
    subject: Annotated[
        str, typer.Argument(metavar="RUN", help="The folder of a run, a preset, or a spec's TOML file.")
    ],
    threads: _Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON, alone on standard output.")
    ] = False,
) -> None:
    """Play a run again and put the paper's two theorems beside it."""
    from cbdsl.cli.theory import examine  # noqa: PLC0415

    examine(subject, threads, as_json)


@app.command()
def presets() -> None:
    """List the presets and print what each one says."""
    for name, spec in PRESETS.items():
        typer.echo(f"# {name}\n{spec.to_toml()}")


@app.command()
def sweep(
    start: Annotated[str, typer.Argument(metavar="SPEC", help="A preset, or a TOML file.")],
    over: Annotated[
        list[str], typer.Option(metavar="KEY=VALUES", help="seed=0..4, or swarm.inertia=0.5,0.9; may repeat.")
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the spec.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the sweep; the same one continues it.")] = Path("sweep"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; as many as cores if not given.")] = None,
) -> None:
    """Run a grid of experiments in parallel; finished ones are not run again."""
    from cbdsl.cli.progress import SweepDisplay, print_sweep  # noqa: PLC0415
    from cbdsl.study.sweep import grid, parse_axis, run_all, write_table  # noqa: PLC0415

    axes = [parse_axis(text) for text in over]
    points = grid(preset_or_file(start).with_settings(dict(map(settings_text.parse_setting, settings or []))), axes)
    with SweepDisplay(len(points), out) as display:
        results = run_all(points, out, jobs, display.show)
    write_table(results, [key for key, _ in axes], out)
    print_sweep(results, [key for key, _ in axes], out)


@app.command()
def reproduce(
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, one regime, fewer rounds: minutes instead of most of an hour.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another setting for every run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; the same one continues a job that was stopped.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; as many as cores if not given.")] = None,
) -> None:
    """Make the paper's figures from fresh runs, judge its claims, measure its theorems: one page."""
    from cbdsl.cli.progress import SweepDisplay, print_claims  # noqa: PLC0415
    from cbdsl.study import reproduce as job  # noqa: PLC0415
    from cbdsl.study.paper import FULL, QUICK  # noqa: PLC0415

    plan = replace(QUICK if quick else FULL, settings=tuple(map(settings_text.parse_setting, settings or [])))
    folder = out or Path("reproduction-quick" if quick else "reproduction")
    with SweepDisplay(len(job.tasks_of(plan)), folder) as display:
        words = ["cbdsl reproduce", *(["--quick"] if quick else []), *(f"--set {text}" for text in settings or [])]
        made = job.reproduce(plan, folder, " ".join(words), jobs, display.show)
    print_claims(made.claims, made.page)


@app.command()
def arena(  # noqa: PLR0913, PLR0917 - one parameter an option
    attacks: Annotated[str | None, typer.Option(help="Attacks, separated by commas; all if not given.")] = None,
    defences: Annotated[str | None, typer.Option(help="Defences, separated by commas; all if not given.")] = None,
    byzantine: Annotated[str | None, typer.Option(help="Numbers of attackers; 1,5,10,20 if not given.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, from 0.")] = None,
    preset_name: Annotated[str | None, typer.Option("--preset", help="Starting point of every run.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another setting for every run.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A taste: four attacks, six defences, five rounds.")] = False,
    out: Annotated[Path | None, typer.Option(help="The folder; the same one continues what was stopped.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at a time; as many as cores if not given.")] = None,
) -> None:
    """Set every attack on every defence: heatmaps, worst cases, detection, cost: one page."""
    from cbdsl.cli.progress import SweepDisplay, print_arena  # noqa: PLC0415
    from cbdsl.study import arena as job  # noqa: PLC0415

    start = job.QUICK if quick else job.Contest()
    chosen: dict[str, Any] = {
        "attacks": attacks and settings_text.words(attacks),
        "defences": defences and settings_text.words(defences),
        "byzantine": byzantine and settings_text.numbers(byzantine, "--byzantine"),
        "seeds": seeds and tuple(range(seeds)),
        "preset": preset_name,
        "settings": {**start.settings, **dict(map(settings_text.parse_setting, settings))} if settings else None,
    }
    contest = replace(start, **{key: value for key, value in chosen.items() if value is not None})
    folder = out or Path("arena-quick" if quick else "arena")
    with SweepDisplay(len(job.tasks_of(contest)), folder) as display:
        held = job.hold(contest, folder, " ".join(["cbdsl", *sys.argv[1:]]), jobs, display.show)
    print_arena(held, contest)


@app.command()
def attacks() -> None:
    """List the attacks, the aggregators and the defences of the arena."""
    from cbdsl import register  # noqa: PLC0415
    from cbdsl.study.arena import DEFENCES  # noqa: PLC0415

    for title, entries in (
        ("attacks (--attack)", register.attack),
        ("aggregators (--aggregator, nnm+...)", register.aggregator),
    ):
        typer.echo(f"{title}:")
        for name in entries.names():
            typer.echo(f"  {name:17} {entries.summary(name)}")
    typer.echo(f"defences of the arena: {', '.join(DEFENCES)}")


@app.command()
def bench(  # noqa: PLR0913, PLR0917 - one parameter an option
    models: Annotated[str, typer.Option(help="Models to measure, separated by commas.")] = "cnn,mlp,softmax",
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "50",
    batch: Annotated[int, typer.Option(min=1, help="Samples in a training batch.")] = 10,
    scoring: Annotated[int, typer.Option(min=1, help="Samples that every worker scores.")] = 2000,
    threads: _Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns each contender takes; its fastest counts.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Two turns, 500 samples to score.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, alone on standard output.")] = False,
) -> None:
    """Measure the native engine against torch, in one run: trust the ratios."""
    from rich.console import Console  # noqa: PLC0415

    from cbdsl.study.bench import measure, table  # noqa: PLC0415

    try:
        counts = [int(word) for word in workers.split(",")]
        with Console(stderr=True).status("starting") as status:
            rows = measure(
                models.split(","), counts, batch, threads, repeats, scoring=scoring, quick=quick,
                progress=lambda done, total, what: status.update(f"{done}/{total}  {what}"),
            )  # fmt: skip
    except ValueError as error:
        raise UserError(f"{error}.") from error
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        Console().print(table(rows))


@app.command()
def provision(  # noqa: PLR0913, PLR0917 - one parameter an option
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for keys and certificates.")],
    workers: Annotated[int | None, typer.Option(help="For how many workers: worker-1, worker-2 and so on.")] = None,
    names: Annotated[str | None, typer.Option(help="The workers' names instead, separated by commas.")] = None,
    swarm: Annotated[str | None, typer.Option(help="The swarm's name, which begins every topic.")] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of the broker's machine; may repeat.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The broker's port; 8883 if not given.")] = None,
    days: Annotated[int | None, typer.Option(help="How long certificates last; 825 days if not given.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Add workers to a folder that is there.")] = False,
    revoke: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Shut a worker out; may repeat.")] = None,
    renew: Annotated[bool, typer.Option("--renew", help="New keys for everybody who is not shut out.")] = False,
) -> None:
    """Make certificates for a swarm on real machines, and the broker's rules that go with them."""
    from cbdsl.cli.provision import provision_command  # noqa: PLC0415

    provision_command(folder, workers, names, swarm, host or [], port, days, add, revoke or [], renew)


@app.command()
def doctor() -> None:
    """Say what this installation can do: engine, threads, vector width, data, versions."""
    from cbdsl.cli.doctor import examine  # noqa: PLC0415

    for name, finding in examine():
        typer.echo(f"{name:12} {finding}")


def _deployment() -> None:
    """Register the commands of a deployment; they load what they need when they are called."""
    from cbdsl.cli import deployment as command  # noqa: PLC0415

    for function in (command.serve, command.work, command.swarm):
        app.command()(function)


_deployment()


def _conclude(result: Result, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(result.summary), indent=2))
    else:
        from cbdsl.cli.progress import print_summary  # noqa: PLC0415

        print_summary(result)


def main() -> None:
    """Entry point: what a user can mend is one message and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"cbdsl: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        where = f" at {error.filename}" if error.filename else ""
        print(
            f"cbdsl: the disk is full{where}. What was recorded before is safe: make room and go on.", file=sys.stderr
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ncbdsl: interrupted. A run with a folder goes on with: cbdsl resume DIR", file=sys.stderr)
        sys.exit(130)
