"""Resolves a spec: looks up names, writes out what the method decides, refuses settings without effect.

Names, contradictions and settings without effect are found here, before data is read or a folder is made; ranges of
single settings are checked in `spec.py`. What a change of one setting means for others is in `Spec.with_settings`,
because only there it is known what is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cbdsl import register
from cbdsl.algorithm.aggregators import check_majority, count_rows, parse_aggregator
from cbdsl.algorithm.aggregators_filtering import check_rule
from cbdsl.algorithm.methods import Method
from cbdsl.attacks.attack import make_attack
from cbdsl.codecs.envelope import Codecs, make_codecs
from cbdsl.engines.choose import check_device
from cbdsl.engines.engine import WARMUP_SHARE
from cbdsl.engines.loss import make_loss
from cbdsl.errors import UserError, unknown
from cbdsl.presets import preset
from cbdsl.register import CUSTOM
from cbdsl.runs.build import build_method, build_selection, part_not_given, verifies_uploads
from cbdsl.spec import LOSSES, Spec, write_out

_PARTITION_KEYS = {
    "data.samples_per_worker": ("iid", "dirichlet", "similarity", "quantile", "cluster", "quantity", "feature"),
    "data.shard_size": ("shards",),
    "data.shards_per_worker": ("shards", "quantile", "cluster"),
    "data.dirichlet_alpha": ("dirichlet",),
    "data.similarity": ("similarity",),
    "data.overlap": ("iid", "shards", "dirichlet", "similarity", "quantile", "cluster", "quantity"),
}
_BUILT_IN_PARTITIONS = (
    "iid", "shards", "dirichlet", "similarity", "quantile", "cluster", "quantity", "feature", "by-client",
)  # fmt: skip


def resolve(spec: Spec, given_method: Method | None = None) -> Spec:
    """Return the spec with everything written out that its method decides; check every name and combination.

    given_method: a method given in Python instead of by name.
    """
    spec = replace(spec, plugins=register.load(spec.plugins))
    method = given_method or _method(spec)
    whole = write_out(spec, method)
    check_device(whole.engine, whole.device)
    _check_engine(whole, method)
    _check_names(whole, method)
    _check_scoring(whole)
    _check_local(whole, method)
    _check_batchnorm(whole, method)
    _check_defence(whole, method)
    return whole


def _method(spec: Spec) -> Method:
    if spec.method == CUSTOM:
        raise part_not_given("method")
    return build_method(spec)


def _check_names(spec: Spec, method: Method) -> None:
    if spec.preset:
        preset(spec.preset)
    if spec.attack.byzantine and spec.attack.name != CUSTOM:
        make_attack(spec)
    if spec.selection.name != CUSTOM:
        build_selection(spec)
    if spec.defence.aggregator != CUSTOM:
        name = spec.defence.aggregator
        before, rule = parse_aggregator(name)
        register.aggregator.make(rule, spec.options.of(rule))
        for part in before:
            register.preaggregation.make(part, spec.options.of(part))
        if method.conversation == "average":
            check_majority(name, spec.workers, spec.defence.declared, spec.options.of)
            check_rule(rule, count_rows(name, spec.participants, spec.options.of), spec.defence.declared)
    for kind, name in ((register.partition, spec.data.partition), (register.model, spec.model)):
        if name != CUSTOM:
            kind.make(name, spec.options.of(name)) if kind is register.partition else kind.get(name)
    if spec.local.augment not in {"", CUSTOM}:
        register.augmentation.make(spec.local.augment, spec.options.of(spec.local.augment))
    codecs = make_codecs(spec)
    used = {
        spec.codec.up, spec.codec.down, spec.method,
        spec.attack.name, spec.selection.name, *spec.defence.aggregator.split("+"),
        spec.data.partition, spec.data.source, spec.model, *register.metric.names(), *_check_loss(spec),
        *filter(None, [spec.local.augment]),
    }  # fmt: skip
    _check_codecs(spec, codecs, method)
    for part in spec.options:
        if part not in used:
            known = any(part in kind for kind in register.ALL.values())
            raise UserError(
                f"options.{part} sets something of a part that {'this run does not use' if known else 'is not known'}. "
                f"It uses: {', '.join(sorted(used))}.",
                code="no-effect" if known else "unknown-name",
            )


def _check_scoring(spec: Spec) -> None:
    if spec.shares_scoring and not spec.data.shared_scoring:
        raise UserError(
            f"shared is {spec.shared}: workers score on D_sc, but data.shared_scoring is 0. Set it to 1 or more, or "
            "use --shared none (or train).",
            code="conflict",
        )


def _check_local(spec: Spec, method: Method) -> None:
    within = spec.local.schedule if spec.local.schedule_over == "round" else "constant"
    if method.counts_steps and (spec.local.optimiser, within) != ("sgd", "constant"):
        raise UserError(
            f"The method '{spec.method}' computes a mean gradient from how far a worker moved, which takes SGD at one "
            f"learning rate per round; given local.optimiser={spec.local.optimiser}, local.schedule="
            f"{spec.local.schedule}. Use sgd and constant, or a schedule with local.schedule_over=run (local.decay and "
            "local.clip work), or another method.",
            code="conflict",
        )


def _check_engine(spec: Spec, method: Method) -> None:
    if method.adds_loss and spec.engine == "native":
        raise UserError(
            f"The method '{spec.method}' adds a term to the loss, which needs the torch engine; given engine=native. "
            "Use --engine torch (or auto).",
            code="conflict",
        )


def _check_batchnorm(spec: Spec, method: Method) -> None:
    if spec.local.batchnorm == "shared" or method.conversation == "alone":
        return
    if method.conversation == "swarm":
        raise UserError(
            f"In '{spec.method}' a worker claims the score of its model, and the server verifies the claim on the "
            "upload. With BatchNorm layers that stay on the worker (local.batchnorm=own) it could not reproduce the "
            "score. Use a method in which all workers upload, such as fedavg.",
            code="conflict",
        )
    if method.vectors > 1 or method.remembers:
        raise UserError(
            f"The workers of '{spec.method}' already keep a value of their own for every weight, so local.batchnorm="
            "own is not defined for it. Use fedavg, fedprox, fedavgm or fedadam.",
            code="conflict",
        )


def _check_loss(spec: Spec) -> tuple[str, ...]:
    """Return the losses that the run may have; refuse one that is unknown, or not of the task if that is known."""
    task = spec.data.task
    if spec.loss == CUSTOM:
        return ()
    if spec.loss and spec.loss not in LOSSES:
        raise unknown("loss", spec.loss, LOSSES)
    if task != "auto":
        return (make_loss(spec, task).name,)
    return (spec.loss,) if spec.loss else LOSSES


def _check_codecs(spec: Spec, codecs: Codecs, method: Method) -> None:
    if method.vectors > 1 and (codecs.up.relative or codecs.down.relative):
        raise UserError(
            f"The method '{spec.method}' sends more than a model, and codecs are for models alone; given codec.up="
            f"{spec.codec.up}, codec.down={spec.codec.down}. Use none, or another method.",
            code="conflict",
        )
    if (codecs.up.measures or codecs.down.measures) and not (method.verifies and spec.shares_scoring):
        raise UserError(
            "The codec 'adaptive' measures on D_sc what a bit costs, and this run's workers or server have none. Use "
            "q4, or cb-dsl with --shared both.",
            code="conflict",
        )


def _check_defence(spec: Spec, method: Method) -> None:
    if method.conversation == "swarm" and method.vectors > 1:
        raise UserError(
            f"The method '{spec.method}' sends {method.vectors} vectors, but in a swarm an upload is one model: "
            'the one that was scored. Set vectors = 1, or use the conversation "average".',
            code="conflict",
        )
    if not verifies_uploads(spec, method) and (spec.defence.guard or spec.selection.name == "soup"):
        raise UserError(
            "The guard and the soup need a method that verifies uploads on a shared D_sc; this one does not. "
            "Use cb-dsl with --shared both (or score); FedAvg's defences are its aggregators.",
            code="conflict",
        )
    if spec.defence.aggregator != "mean" and not method.combines:
        raise UserError(
            f"defence.aggregator has no effect here: '{spec.method}' adds up the uploads itself, because its privacy "
            f"depends on how; given {spec.defence.aggregator}. Leave it out, or use another method.",
            code="no-effect",
        )
    if method.conversation != "swarm" and spec.selection.name != "best":
        raise UserError(explain_no_effect("selection.name", spec, method), code="no-effect")
    if spec.defence.aggregator != "mean":
        if method.conversation != "average":
            raise UserError(explain_no_effect("defence.aggregator", spec, method), code="no-effect")
        *before, rule = spec.defence.aggregator.split("+")
        if rule == "fltrust" and not spec.data.shared_training:
            raise UserError(
                f"The aggregator '{spec.defence.aggregator}' trains on D_tr at the server; data.shared_training is 0.",
                code="conflict",
            )
        if rule == "bant" and "bucketing" in before:
            raise UserError(
                "The aggregator 'bant' keeps a memory per worker, and a bucket is not a worker. Use bant or nnm+bant.",
                code="conflict",
            )
        if method.vectors > 1:
            raise UserError(
                f"The method '{spec.method}' sends more than a model, and robust aggregators are for models alone; "
                f"given defence.aggregator={spec.defence.aggregator}. Use mean, or another method.",
                code="conflict",
            )


def resolve_all(points: Iterable[Spec], given: Iterable[str]) -> list[Spec]:
    """Resolve all points of a grid or of a search, so that errors are found before the first one is run.

    given: dotted keys that a user set or varies; see `refuse_idle`.
    """
    found = [resolve(point) for point in points]
    refuse_idle(found, given)
    return found


def refuse_idle(points: Sequence[Spec], given: Iterable[str]) -> None:
    """Refuse settings that a user gave and that change nothing in any of the runs.

    points: resolved specs; one for a run, all of a grid for a sweep. given: dotted keys.
    """
    for key in given:
        reasons = [explain_no_effect(key, spec) for spec in points]
        if reasons and all(reasons):
            raise UserError(reasons[0], code="no-effect")


def find_schedules(spec: Spec, method: Method) -> list[str]:
    """Return the settings that depend on the number of rounds, so that a longer run has other first rounds."""
    inertia = method.conversation == "swarm" and bool(method.remembers) and len(set(spec.swarm.inertia)) > 1
    rate = spec.local.schedule_over == "run" and spec.local.schedule != "constant" and method.gradients
    return ["swarm.inertia"] * inertia + ["local.schedule"] * rate


def explain_no_effect(key: str, spec: Spec, method: Method | None = None) -> str:
    """Return why a setting changes nothing in a run; empty if it changes something."""
    if method is None:
        if spec.method == CUSTOM:
            return ""
        method = build_method(spec)
    group, _, leaf = key.partition(".")
    for rule in _RULES:
        if rule.is_about(key) and rule.is_idle(spec, method):
            return f"{key} has no effect here: {rule.why.format(method=spec.method, partition=spec.data.partition)}"
    if group == "swarm" and leaf in method.fixes:
        return f"{key} has no effect here: the method '{spec.method}' fixes it to {method.fixes[leaf]!r}."
    part = leaf.partition(".")[0]
    if group == "options" and part == spec.attack.name and part in register.attack and not spec.attack.byzantine:
        return f"{key} has no effect here: no worker is an attacker. Say how many are: --byzantine 5."
    partitions = _PARTITION_KEYS.get(key)
    if partitions and spec.data.partition in _BUILT_IN_PARTITIONS and spec.data.partition not in partitions:
        return (
            f"{key} has no effect here: the partition is '{spec.data.partition}'. It is for: {', '.join(partitions)} "
            f"(--set data.partition={partitions[0]})."
        )
    return ""


def _is_one_of(*keys: str) -> Callable[[str], bool]:
    return lambda key: key in keys


@dataclass(frozen=True)
class _Rule:
    """A reason why settings have no effect in a run."""

    is_about: Callable[[str], bool]  # a setting's key
    is_idle: Callable[[Spec, Method], bool]
    why: str


_OF_WORKERS = (
    "attack.",
    "codec.",
    "defence.",
    "dropout.",
    "selection.",
    "swarm.",
    "verification.",
)  # no message, no use

_RULES = (
    _Rule(
        lambda key: key.startswith(_OF_WORKERS) or key == "participation",
        lambda _, method: method.conversation == "alone",
        "in '{method}' nobody sends anything.",
    ),
    _Rule(
        _is_one_of("shared"),
        lambda spec, method: method.conversation == "alone" and spec.method != "local-only",
        "'{method}' trains on samples of its own choice. See: cbdsl list methods.",
    ),
    _Rule(
        _is_one_of("device"),
        lambda spec, _: spec.engine == "native",
        "the native engine runs on the CPU alone. Leave it out, or use --engine torch.",
    ),
    _Rule(
        _is_one_of("defence.aggregator"),
        lambda _, method: method.conversation != "average",
        "'{method}' takes verified models one by one and has nothing to aggregate. Aggregators are for methods in "
        "which everybody uploads: add --method fedavg.",
    ),
    _Rule(
        _is_one_of("attack.name", "attack.scale"),
        lambda spec, _: spec.attack.byzantine == 0,
        "no worker is an attacker. Say how many are: --byzantine 5.",
    ),
    _Rule(
        lambda key: key.startswith("swarm."),
        lambda _, method: method.conversation != "swarm",
        "in '{method}' workers do not move as a swarm. It is for cb-dsl, fedpso and pso.",
    ),
    _Rule(
        lambda key: key.startswith("local."),
        lambda _, method: not method.gradients,
        "'{method}' does not train with gradients.",
    ),
    _Rule(
        lambda key: key.startswith("selection.") or key in {"defence.invitations", "defence.commitment"},
        lambda _, method: method.conversation != "swarm",
        "in '{method}' everybody uploads and nobody is invited. It is for cb-dsl.",
    ),
    _Rule(
        _is_one_of("defence.guard", "defence.false_alarm", "verification.tolerance"),
        lambda spec, method: not verifies_uploads(spec, method),
        "uploads are not verified in this run: that takes a method that verifies and a shared D_sc. Use cb-dsl with "
        "--shared both.",
    ),
    _Rule(
        _is_one_of("defence.false_alarm"),
        lambda spec, _: not spec.defence.guard,
        "there is no guard. Add --guard.",
    ),
    _Rule(
        _is_one_of("selection.k"),
        lambda spec, _: spec.selection.name == "best",
        "the selection 'best' takes one model. Use --select soup.",
    ),
    _Rule(
        _is_one_of("server.momentum"),
        lambda spec, _: "momentum" not in register.selection.settings(spec.selection.name),
        "only a selection that averages has momentum. Use --select rotation.",
    ),
    _Rule(
        _is_one_of("shared"),
        lambda spec, method: spec.shared == "score" and method.conversation == "average",
        "in '{method}' nobody scores, so D_sc is not used. Use --shared train, or leave it out.",
    ),
    _Rule(
        _is_one_of("shared"),
        lambda spec, method: spec.shared == "train" and not method.gradients,
        "in '{method}' nobody trains, so D_tr is not used. Use --shared score, or leave it out.",
    ),
    _Rule(
        _is_one_of("data.shared_source"),
        lambda spec, _: spec.shared == "none" and spec.defence.aggregator == "mean",
        "nobody uses D_G in this run. Add --shared both (or train, or score).",
    ),
    _Rule(
        _is_one_of("defence.declared"),
        lambda spec, method: method.conversation == "average" and spec.defence.aggregator == "mean",
        "a mean takes every model as it is. Use a robust aggregator, such as --aggregator krum.",
    ),
    _Rule(
        _is_one_of("local.momentum"),
        lambda spec, _: spec.local.optimiser != "sgd",
        "it is SGD's; Adam and AdamW have 0.9 and 0.999 instead. Leave it out, or use local.optimiser=sgd.",
    ),
    _Rule(
        _is_one_of("local.batchnorm"),
        lambda _, method: method.conversation == "alone",
        "in '{method}' no weights are averaged.",
    ),
    _Rule(
        _is_one_of("data.local_test_every"),
        lambda spec, _: spec.data.local_test == 0,
        "workers hold back no samples. Set the share: --set data.local_test=0.2.",
    ),
    _Rule(
        _is_one_of("local.schedule_over"),
        lambda spec, _: spec.local.schedule == "constant",
        "the learning rate is constant. Set a schedule: --set local.schedule=cosine (or decay, or warmup).",
    ),
    _Rule(
        _is_one_of("local.schedule_over"),
        lambda spec, _: (
            spec.local.schedule_over == "run" and spec.local.schedule == "warmup" and spec.rounds <= WARMUP_SHARE
        ),
        "a warmup is a tenth of the rounds, which here is one round or less. Use local.schedule_over=round, or "
        "more rounds.",
    ),
    _Rule(
        _is_one_of("local.epochs"),
        lambda spec, _: spec.local.steps > 0,
        "local.steps says how many batches a worker trains on, and comes first. Leave one out.",
    ),
)
