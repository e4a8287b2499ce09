"""D_G from a generator: what was asked for, and the folder with what came out.

Learns in `generate_learn`, measures in `generate_privacy`; how it looks is `report.generated_page`'s affair.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cbdsl.arrays import Samples
from cbdsl.codecs.travel import codecs_of
from cbdsl.data.shared import SharedSet, write_shared
from cbdsl.engines.native import default_threads
from cbdsl.errors import UserError
from cbdsl.files import is_free, read_json, read_text, write_atomically, write_json
from cbdsl.rng import seed_of, stream
from cbdsl.runs.folder import RunFolder
from cbdsl.spec import Spec
from cbdsl.spec_groups import at_least
from cbdsl.study.generate_learn import SERVER, WORKERS, Learning, Material, Pass, gather
from cbdsl.study.generate_privacy import Membership, Privacy, measured
from cbdsl.text import size

PASSES = {SERVER: 60, WORKERS: 120}
_COMPARED = 2000  # members and unseen samples at most, in the measures of privacy
_KEPT_EVERY = 5  # passes

OnPass = Callable[[int, int, float], None]
"""Hears of a pass: its number, how many there are, and the generator's loss on unseen samples."""

README = """This folder was made by `cbdsl generate`.

shared.npz       D_tr and D_sc, and a hold-out if one was asked for: --set data.shared_source=.../shared.npz
privacy.json     distances between generated and real samples, and tests for membership; docs/generate.md explains them
generated.html   the same as a page, with a picture of samples (samples.png)
generate.json    what was asked for
passes.jsonl     a line for every pass: the generator's loss on unseen samples, and bytes sent
checkpoint.npz   the generator; the same command goes on from it

The generator's weights (checkpoint.npz) tell more of the samples that it learned from than shared.npz does. Give the
latter away, not the former; and a hold-out is of use only while workers do not have it.
"""


@dataclass(frozen=True)
class Plan:
    """What to make, and from what."""

    spec: Spec  # resolved: data, who holds what, seed; and for workers who takes part, and the codecs
    source: str  # `server`, `workers`, or data that the server may use
    training: int  # samples of D_tr
    scoring: int  # samples of D_sc
    holdout: int = 0  # samples of a hold-out for the guard
    passes: int = 0  # over everybody's samples: rounds, if they are the workers'; 0: as many as usual

    def __post_init__(self) -> None:
        at_least(1, "--samples", self.training, 1_000_000)
        at_least(1, "--scoring", self.scoring, 1_000_000)
        at_least(0, "--holdout", self.holdout, 1_000_000)
        at_least(0, "--passes", self.passes, 10_000)
        if not self.source.strip():
            raise UserError("--from is empty. Say server, workers, or name a data set, a folder or an .npz file.")
        if self.holdout and self.source == WORKERS:
            raise UserError(
                f"--holdout {self.holdout:,} is given, and the generator learns from the workers: each of them has it "
                "and the seed, and could make the same hold-out, which has to be the server's secret. Leave --holdout "
                "out: a run then uses the server's own samples (data.holdout). Or learn from those (--from server)."
            )
        if self.spec.attack.byzantine:
            raise UserError(
                f"{self.spec.attack.byzantine} workers are attackers; a generator learns from honest ones alone, by "
                "plain averages. Leave --byzantine out."
            )
        codecs = codecs_of(self.spec)
        if codecs.up.measures or codecs.down.measures:
            raise UserError("The codec 'adaptive' measures on D_sc, which is to be made here. Use q4, or none.")
        if self.spec.data.shared_source:
            raise UserError("data.shared_source names D_G, which is to be made here. Leave it out.")

    @property
    def rounds(self) -> int:
        """How many passes."""
        return self.passes or PASSES.get(self.source, PASSES[SERVER])

    def key(self, material: Material) -> str:
        """What the generator's weights depend on, the samples themselves included: not how many of them it makes."""
        asked = f"{self.spec.key()}/{self.source}/{self.rounds}/{material.digest}"
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Made:
    """What came out."""

    plan: Plan
    material: Material
    shared: SharedSet  # as a network is given them
    passes: tuple[Pass, ...]
    privacy: Privacy
    folder: Path

    @property
    def whose(self) -> str:
        """Whose samples it learned from."""
        named = {WORKERS: f"{len(self.material.holders)} workers", SERVER: "the server"}
        return named.get(self.plan.source, self.plan.source)

    @property
    def file(self) -> Path:
        """What a run takes."""
        return self.folder / "shared.npz"


def gathered(plan: Plan) -> Material:
    """What a plan's generator learns from; what is wrong with it is found here, before there is a folder."""
    material = gather(plan.spec, plan.source)
    if max(plan.training, plan.scoring) < material.kind.classes:
        raise UserError(
            f"--samples {plan.training} and --scoring {plan.scoring} cannot have all {material.kind.classes} classes, "
            "and runs take no file that leaves one out. Ask for more."
        )
    return material


def make(
    plan: Plan,
    out: Path,
    threads: int | None = None,
    on_pass: OnPass | None = None,
    material: Material | None = None,
) -> Made:
    """Learn what is left to learn in a folder, then make samples and measure them; the same plan, the same file.

    material: that of the plan, if it was gathered already.
    """
    if threads is not None:
        at_least(1, "threads", threads)
    material = material or gathered(plan)
    key = plan.key(material)
    folder = _opened(plan, key, out)
    try:
        return _made(plan, key, material, folder, threads or default_threads(), on_pass)
    finally:
        folder.close()


def _made(plan: Plan, key: str, material: Material, folder: RunFolder, threads: int, on_pass: OnPass | None) -> Made:
    out = folder.path
    learning = Learning(material, plan.spec, plan.rounds, threads)
    passes: list[Pass] = []
    checkpoint = folder.load_checkpoint(key)
    if checkpoint is not None:
        learning.restore(checkpoint)
        passes = _read_passes(out / "passes.jsonl", checkpoint.state.round)
    for one in learning.rounds():
        passes.append(one)
        if one.number % _KEPT_EVERY == 0 or one.number == plan.rounds:
            lines = "".join(json.dumps(asdict(each)) + "\n" for each in passes)
            write_atomically(out / "passes.jsonl", lines.encode())
            folder.save_checkpoint(learning.state, learning.kept, key)
        if on_pass is not None:
            on_pass(one.number, plan.rounds, one.loss)
    if not np.isfinite(learning.weights).all() or not np.isfinite(passes[-1].loss):
        raise UserError("The generator diverged: its weights are not finite. Features should have deviations near 1.")
    sizes = {"training": plan.training, "scoring": plan.scoring, "holdout": plan.holdout}
    made = {
        part: learning.engine.made(learning.weights, count, seed_of(plan.spec.seed, "generator", place))
        for place, (part, count) in enumerate(sizes.items())
        if count
    }
    shared = SharedSet(**{part: material.rescaled(samples) for part, samples in made.items()})
    write_shared(out / "shared.npz", shared, material.scaling)
    privacy = _privacy(plan, material, learning, Samples.joined([made["training"], made["scoring"]]))
    write_json(out / "privacy.json", asdict(privacy))
    return Made(plan, material, shared, tuple(passes), privacy, out)


def _privacy(plan: Plan, material: Material, learning: Learning, made: Samples) -> Privacy:
    count = min(_COMPARED, len(material.samples), len(material.unseen))
    rng = stream(plan.spec.seed, "generator", 3)
    members, unseen = (
        part.taken(rng.permutation(len(part))[:count].astype(np.int32)) for part in (material.samples, material.unseen)
    )
    everything = np.arange(count, dtype=np.int32)
    losses = [learning.engine.sample_losses(learning.weights, part, everything) for part in (members, unseen)]
    rows = made.features.reshape(len(made), -1)
    return measured(rows, members.features, unseen.features, (losses[0], losses[1]))


def _opened(plan: Plan, key: str, out: Path) -> RunFolder:
    """A new folder, or that of the same plan, for this process alone; samples may be more or fewer than last time."""
    asked: dict[str, Any] = {**asdict(plan), "spec": plan.spec.to_tree(), "passes": plan.rounds, "key": key}
    path = out / "generate.json"
    if not path.exists() and not is_free(out):
        raise UserError(f"{out} exists and is not an empty folder; nothing was overwritten. Give another --out.")
    folder = RunFolder.take(out)
    try:
        if path.exists():
            _compare(key, path)
        write_json(path, asked)
        write_atomically(out / "README.txt", README.encode())
    except OSError as error:
        folder.close()
        raise UserError(f"The folder {out} cannot be written: {error.strerror}. Give another --out.") from error
    except UserError:
        folder.close()
        raise
    return folder


def _compare(key: str, path: Path) -> None:
    """Refuse a folder that was made by another plan, or from other samples."""
    try:
        stored = read_json(read_text(path))["key"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}). Give another --out.") from error
    if stored != key:
        raise UserError(
            f"{path.parent} holds another generator, or one that learned from other samples: see {path}. Nothing was "
            "changed. Give another --out."
        )


def _read_passes(path: Path, count: int) -> list[Pass]:
    try:
        passes = [Pass(**read_json(line)) for line in read_text(path).splitlines()][:count]
        if len(passes) < count:
            raise ValueError(f"{count} passes were made, {len(passes)} are there")
        return passes
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}). Remove {path.parent} and start again.") from error


def sentences(made: Made) -> list[str]:
    """What was measured, in words."""
    found, last = made.privacy, made.passes[-1]
    sent = sum(one.uplink_bytes for one in made.passes), sum(one.downlink_bytes for one in made.passes)
    federated = made.plan.source == WORKERS
    traffic = f"; sent up {size(sent[0])}, down {size(sent[1])}, no sample among it" if federated else ""
    near = found.generated_to_members, found.generated_to_unseen, found.unseen_to_members
    medians, hundredths = [f"{one.median:.3f}" for one in near], [f"{one.hundredth:.3f}" for one in near]
    return [
        f"learned from {len(made.material.samples):,} samples of {made.whose} in {last.number} passes{traffic}",
        f"nearest neighbours of {found.generated:,} generated samples among {found.compared:,} learned from and as "
        f"many unseen ({made.material.unseen_are}):",
        f"  generated to learned-from {medians[0]} (nearest hundredth {hundredths[0]}), generated to unseen "
        f"{medians[1]} ({hundredths[1]}), unseen to learned-from {medians[2]} ({hundredths[2]})",
        f"  nearer to a learned-from sample than to an unseen one: {found.closer_to_members:.1%} "
        f"± {found.closer_error:.1%} of the generated (chance: 50 %)",
        "membership tests (area 0.5 and advantage 0 are guessing):",
        f"  with the generated samples: {_words(found.by_samples)}",
        f"  with the generator itself: {_words(found.by_generator)}",
        "These measure two simple attacks on average; they prove no privacy (docs/generate.md).",
    ]


def _words(found: Membership) -> str:
    return (
        f"area {found.area:.3f} ± {found.area_error:.3f}, advantage {100 * found.advantage:.1f} "
        f"± {100 * found.advantage_error:.1f} points"
    )
