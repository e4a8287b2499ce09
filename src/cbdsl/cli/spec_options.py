"""The options of a spec, which many commands share."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cbdsl import register
from cbdsl.errors import UserError
from cbdsl.presets import PRESETS, TASKS, preset, preset_or_file, read_start
from cbdsl.runs.resolve import refuse_idle, resolve
from cbdsl.spec import Spec, describe_setting, parse_setting

DEFAULT_PRESET = "paper-iid"

_PANEL = "Spec: what to run"


@dataclass(frozen=True)
class SpecWords:
    """The spec as the options of a command line give it, before names are looked up."""

    start: str = ""  # a preset's name or a file; empty: not given
    from_file: bool = False  # the start is a file for certain, because it was given with --spec
    plugins: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # by dotted keys

    @property
    def is_file(self) -> bool:
        """Whether the starting point is a file."""
        return self.from_file or bool(self.start and self.start not in PRESETS and Path(self.start).exists())

    @property
    def given(self) -> tuple[str, ...]:
        """The keys that were set by options."""
        return tuple(self.options)

    @property
    def fixed(self) -> dict[str, Any]:
        """The settings given by options that no axis of a sweep resets; `spec` has merged the plugins."""
        return {key: value for key, value in self.options.items() if key != "plugins"}

    def spec(self, start: Spec | None = None) -> Spec:
        """Return the starting point, or `start` instead of it, with the options set; import plugins first."""
        loaded = register.load(self.plugins)
        task = {} if start else self._task_of_file()
        start = start or self._beginning()
        whole = start.with_settings({**task, **self.options})
        return replace(whole, plugins=tuple(dict.fromkeys((*whole.plugins, *loaded))))

    def resolved(self, start: Spec | None = None) -> Spec:
        """Return the spec resolved; an option without effect is an error."""
        whole = resolve(self.spec(start))
        refuse_idle([whole], self.given)
        return whole

    def refuse_varied(self, keys: Iterable[str]) -> None:
        """Refuse options for settings that a sweep or a search varies."""
        for key in keys:
            if key in self.given:
                raise UserError(f"{key} is set by an option and varied by --over. Leave one out.", code="conflict")

    def _task_of_file(self) -> dict[str, str]:
        """Return the preset's task for a file that does not state one. A table with targets is a regression anyway."""
        task, suffix = TASKS.get(self.start, ""), Path(self.options.get("data.source", "")).suffix
        inferred = task == "regression" and suffix != ".npz"
        return {"data.task": task} if task and suffix in {".npz", ".csv", ".parquet"} and not inferred else {}

    def _beginning(self) -> Spec:
        if self.from_file:
            return read_start(Path(self.start))
        return preset_or_file(self.start) if self.start else preset(DEFAULT_PRESET)


def _setting(key: str, **more: Any) -> Any:  # noqa: ANN401 - as below
    return _option(describe_setting(key), **more)


def _option(text: str, *names: str, **more: Any) -> Any:  # noqa: ANN401 - typer's description of an option
    return typer.Option(*names, help=text, rich_help_panel=_PANEL, **more)


def read_words(  # noqa: PLR0913, PLR0917 - one parameter an option
    start: Annotated[
        str | None, typer.Argument(metavar="[SPEC]", help=f"A preset or a TOML file; {DEFAULT_PRESET} if not given.")
    ] = None,
    preset_name: Annotated[
        str | None, _option(f"Instead of SPEC: {', '.join(PRESETS)}.", "--preset", metavar="NAME")
    ] = None,
    spec_file: Annotated[
        Path | None, _option("Instead of SPEC: a TOML file, such as a run's spec.toml.", "--spec", metavar="FILE")
    ] = None,
    method: Annotated[str | None, _setting("method")] = None,
    use: Annotated[
        str | None,
        _option("What server-only trains on: training (D_tr), shared (D_sc, too), all (the hold-out, too)."),
    ] = None,
    shared: Annotated[
        str | None, _option("Shared data: none, score (D_sc), train (D_tr) or both (D_G). Each method has a default.")
    ] = None,
    rounds: Annotated[int | None, _setting("rounds")] = None,
    workers: Annotated[int | None, _setting("workers")] = None,
    participation: Annotated[float | None, _setting("participation")] = None,
    byzantine: Annotated[int | None, _setting("attack.byzantine")] = None,
    attack: Annotated[str | None, _setting("attack.name")] = None,
    aggregator: Annotated[
        str | None, _option("How averaging methods combine models: krum, nnm+median, ...; see: cbdsl list aggregators.")
    ] = None,
    guard: Annotated[
        bool, _option("Also check uploads on a private hold-out; claims come with commitments.", "--guard")
    ] = False,
    soup: Annotated[
        int | None, _option("Average up to K verified models instead of taking the best one.", metavar="K", min=1)
    ] = None,
    select: Annotated[
        str | None, _option("Which uploads become the global model; see: cbdsl list selections.", metavar="NAME")
    ] = None,
    codec: Annotated[
        str | None,
        _option("How models are compressed, up and down: q4, q3, ...; see: cbdsl list codecs.", metavar="NAME"),
    ] = None,
    seed: Annotated[int | None, _setting("seed")] = None,
    model: Annotated[
        str | None, _option("The network; see: cbdsl list models. Or a class in a file of your own: my_net.py:Net.")
    ] = None,
    data: Annotated[str | None, _setting("data.source", metavar="SOURCE")] = None,
    init: Annotated[str | None, _setting("init", metavar="MODEL")] = None,
    engine: Annotated[str | None, _setting("engine")] = None,
    device: Annotated[
        str | None, _option("Where torch runs: auto, cpu, cuda or mps. A GPU means the torch engine.")
    ] = None,
    plugin: Annotated[
        list[str] | None,
        _option("Python code that registers parts of your own; may repeat.", "--plugin", metavar="FILE_OR_MODULE"),
    ] = None,
    settings: Annotated[
        list[str] | None, _option("Any setting; may repeat. See: cbdsl list settings.", "--set", metavar="KEY=VALUE")
    ] = None,
) -> SpecWords:
    """Collect what the options of a command line say about the spec."""
    starts = {"SPEC": start, "--preset": preset_name, "--spec": None if spec_file is None else str(spec_file)}
    said = {name: text for name, text in starts.items() if text is not None}
    if len(said) > 1:
        raise UserError(
            f"{' and '.join(said)} are given ({', '.join(said.values())}); each is a whole spec. Give one.",
            code="conflict",
        )
    if preset_name is not None:
        preset(preset_name)  # a file of that name will not do
    if soup is not None and select not in {None, "soup"}:
        raise UserError(f"--soup {soup} and --select {select} are given. Give one of them.", code="conflict")
    named: dict[str, dict[str, Any]] = {
        "--method": {"method": method},
        "--use": {"options.server-only.use": use},
        "--shared": {"shared": shared},
        "--rounds": {"rounds": rounds},
        "--workers": {"workers": workers},
        "--participation": {"participation": participation},
        "--byzantine": {"attack.byzantine": byzantine},
        "--attack": {"attack.name": attack},
        "--aggregator": {"defence.aggregator": aggregator},
        "--guard": {"defence.guard": guard or None, "defence.commitment": guard or None},
        "--select": {"selection.name": select},
        "--soup": {"selection.name": soup and "soup", "selection.k": soup},
        "--codec": {"codec.up": codec, "codec.down": codec},
        "--seed": {"seed": seed},
        "--model": {"model": model},
        "--data": {"data.source": data},
        "--init": {"init": init},
        "--engine": {"engine": engine},
        "--device": {"device": device},
    }
    options: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for option, values in named.items():
        for key, value in values.items():
            if value is not None:
                options[key], owners[key] = value, option
    for text in settings or []:
        key, value = parse_setting(text)
        if key in owners and options[key] != value:
            raise UserError(
                f"{key} is given twice: by {owners[key]} and by --set {text}. Leave one out.", code="conflict"
            )
        options[key] = value
    files = list(plugin or ())
    if model is not None and register.split_plugin_name(model)[1]:
        files.append(model)
        options["model"] = register.split_plugin_name(model)[1]
    return SpecWords(next(iter(said.values()), ""), spec_file is not None, tuple(files), options)


_PARAMETERS = tuple(inspect.signature(read_words, eval_str=True).parameters.values())


Command = Callable[..., None]


def takes_spec(**helps: str) -> Callable[[Command], Command]:
    """Decorate a command with the options of a spec; its first parameter gets them as `SpecWords`.

    helps: other help texts for some of the options, by the parameters' names.
    """
    shared = [_explained(each, helps[each.name]) if each.name in helps else each for each in _PARAMETERS]
    names = {each.name for each in shared}

    def add(command: Command) -> Command:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:  # noqa: ANN401 - what typer parsed
            words = read_words(**{name: value for name, value in values.items() if name in names})
            command(words, **{name: value for name, value in values.items() if name not in names})

        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*shared, *own)]
        vars(wrapper)["__signature__"] = inspect.Signature(parameters)
        wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
        return wrapper

    return add


def _explained(parameter: inspect.Parameter, text: str) -> inspect.Parameter:
    """Return a parameter with another help text."""
    kind, info = parameter.annotation.__origin__, copy.copy(parameter.annotation.__metadata__[0])
    info.help = text
    return parameter.replace(annotation=Annotated[kind, info])
