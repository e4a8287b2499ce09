"""`cbdsl generate`: D_tr and D_sc from a generator, as a file that runs take instead of anybody's samples."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cbdsl.cli import extras, interrupts
from cbdsl.cli.options import Threads
from cbdsl.cli.spec_options import DEFAULT_PRESET, SpecWords, takes_spec
from cbdsl.errors import UserError

if TYPE_CHECKING:
    from cbdsl.study.generate import Made

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
    extras.demand("torch", "the generator learns with it")
    from cbdsl.cli.progress import PassDisplay  # noqa: PLC0415
    from cbdsl.study import generate as job  # noqa: PLC0415 - torch loads slowly

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
    plan = job.Plan(
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
        made = job.make(plan, folder, threads, display.show, material)
    if extras.is_installed("matplotlib"):
        from cbdsl.report import generated_page  # noqa: PLC0415 - matplotlib loads slowly

        generated_page.write(made, interrupts.command_line())
    else:
        how = extras.how_to_install("matplotlib")
        typer.echo(f"generated.html is left out: matplotlib is not installed ({how}).", err=True)
    if as_json:
        typer.echo(json.dumps({"file": str(made.file), **asdict(made.privacy)}, indent=2))
        return
    _print(made, words)


def _print(made: Made, words: SpecWords) -> None:
    from cbdsl.study.generate import sentences  # noqa: PLC0415

    for line in sentences(made):
        typer.echo(line)
    typer.echo(f"file: {made.file}. Use it with: {_command(made, words)}")
    page = made.folder / "generated.html"
    if page.exists():
        typer.echo(f"page: {page}")


def _command(made: Made, words: SpecWords) -> str:
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
