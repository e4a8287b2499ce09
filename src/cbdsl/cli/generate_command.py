"""The command generate."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cbdsl.cli import interrupts, options
from cbdsl.cli.options import Out, Threads
from cbdsl.cli.spec_options import DEFAULT_PRESET, SpecWords, takes_spec
from cbdsl.errors import UserError
from cbdsl.models.network import network_of
from cbdsl.util.console import ProgressLine

if TYPE_CHECKING:
    from cbdsl.studies.generate import GeneratedSet

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
    """Train a generator and write a synthetic shared set (D_tr, D_sc)."""
    interrupts.advise_same_command()
    options.demand("torch", "the generator learns with it")
    from cbdsl.studies import generate as job  # noqa: PLC0415 - it needs torch

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
    with ProgressLine("pass") as line:
        line.print(f"folder: {folder}")
        line.show(0, passes or 1, "first pass")
        result = job.run_generation(
            plan, folder, threads, lambda done, total, loss: line.show(done, total, f"loss {loss:.2f}"), data
        )
    if not as_json:
        for sentence in job.describe_result(result):
            typer.echo(sentence)
        typer.echo(f"file: {result.file}. Use it with: {_run_command(result, spec_words)}")

    def write_page() -> Path:
        from cbdsl.report.generated_page import write_generated_page  # noqa: PLC0415 - it needs matplotlib

        return write_generated_page(result, interrupts.command_line())

    options.write_page("generated.html", write_page, quiet=as_json)
    if as_json:
        typer.echo(json.dumps({"file": str(result.file), **asdict(result.privacy)}, indent=2))


def _run_command(result: GeneratedSet, spec_words: SpecWords) -> str:
    """Return the command of a run that uses the file, with the given options about data and workers."""
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
