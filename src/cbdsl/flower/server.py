"""The server's side: plays a spec's rounds over the nodes of a Grid, and leaves a run's folder. For a ServerApp.

The folder is like any other's. A checkpoint follows every round before the next order is given, so a run that was
stopped goes on when the app is started again with the same `out`.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cbdsl.deploy.deadlines import Deadlines
from cbdsl.deploy.secret import keep_secret, secret_of
from cbdsl.deploy.serving import OpenRun, announce, open_run, run_of, shared_of
from cbdsl.errors import UserError
from cbdsl.flower.client import dealt_spec
from cbdsl.flower.letters import Context, Grid
from cbdsl.flower.swarm import FlowerSwarm, NobodyError
from cbdsl.presets import preset_or_file
from cbdsl.protocol.fedavg import averaging
from cbdsl.runs.folder import free_folder
from cbdsl.runs.play import conclude, rounds
from cbdsl.runs.resolve import refuse_idle, resolve
from cbdsl.runs.result import Result
from cbdsl.runs.stage import Stage
from cbdsl.settings import parse_setting
from cbdsl.spec import Spec

_log = logging.getLogger("flwr.cbdsl")


@dataclass(frozen=True)
class Wishes:
    """What a run's configuration asks for, by the keys of `[tool.flwr.app.config]`."""

    spec: str = "paper-iid"  # a preset, or a spec's TOML file on the server's machine
    rounds: int = 0  # 0: as many as the spec says
    settings: str = ""  # any settings of a spec: "workers=8 attack.byzantine=1"
    runs: str = "runs"  # where runs go
    out: str = ""  # the run's folder, there or elsewhere; empty: a new one
    own_data: bool = False  # the nodes' own samples, rather than the spec's data set dealt to them
    round_seconds: float = 600.0
    upload_seconds: float = 60.0
    join_seconds: float = 300.0

    @staticmethod
    def of(config: Mapping[str, Any]) -> Wishes:
        """Read a run's configuration; keys that are not known here are somebody else's."""
        given: dict[str, Any] = {}
        for key, default in vars(Wishes()).items():
            value = config.get(key.replace("_", "-"), default)
            value = float(value) if type(default) is float and type(value) is int else value
            if type(value) is not type(default):
                raise UserError(
                    f"The run's configuration has {key.replace('_', '-')}={value!r}; give a {type(default).__name__}, "
                    f"such as {default!r}."
                )
            given[key] = value
        return Wishes(**given)

    def resolved(self) -> Spec:
        """The spec that is asked for."""
        try:
            words = shlex.split(self.settings)
        except ValueError as error:
            raise UserError(
                f"The run's configuration has settings={self.settings!r}, which cannot be read ({error}). Give "
                "settings with spaces between them, such as 'workers=8 attack.byzantine=1', and close every quote."
            ) from error
        options = dict(parse_setting(text) for text in words)
        if self.rounds:
            options["rounds"] = self.rounds
        spec = resolve(preset_or_file(self.spec).with_settings(options))
        if spec.plugins:
            raise UserError(
                f"The spec names plugins ({', '.join(spec.plugins)}), which nodes do not have. Register such parts in "
                "client_app.py and server_app.py instead, and leave plugins out."
            )
        refuse_idle([spec], options)
        return spec

    def folder(self, spec: Spec) -> Path:
        """Where the run goes."""
        runs = Path(self.runs).expanduser()
        return (runs / self.out).resolve() if self.out else free_folder(f"flower-{spec.method}", runs.resolve())


def play(grid: Grid, context: Context) -> Result:
    """Play the run that a context describes with the nodes of a grid."""
    try:
        return _play(grid, Wishes.of(context.run_config))
    except UserError as error:
        _log.error("cbdsl: %s", error)
        raise


def _play(grid: Grid, wishes: Wishes) -> Result:
    spec = wishes.resolved()
    out = wishes.folder(spec)
    secret = secret_of(out) if wishes.own_data else 0
    stage = Stage.prepare(spec, deal=not wishes.own_data, secret=secret)
    if stage.note:
        _log.warning("%s", stage.note)
    opened = open_run(stage, out)
    try:
        if secret:
            keep_secret(out, secret)
        return _play_in(opened, stage, grid, wishes)
    except NobodyError as error:
        raise UserError(
            f"{error} Rounds that were played are kept: `flwr run` with the same configuration and "
            f"-c 'out=\"{out}\"' goes on, to the same numbers."
        ) from error
    finally:
        opened.folder.close()


def _play_in(opened: OpenRun, stage: Stage, grid: Grid, wishes: Wishes) -> Result:
    spec, out = stage.spec, opened.folder.path
    shared = shared_of(stage)
    swarm = FlowerSwarm(
        grid,
        spec.workers,
        announce(stage, run_of(out / "flower.json"), shared),
        shared,
        "" if wishes.own_data else dealt_spec(spec),
        Deadlines(
            round_seconds=wishes.round_seconds,
            upload_seconds=wishes.upload_seconds,
            join_seconds=wishes.join_seconds,
        ),
        list(stage.initial) if len(stage.initial) > 1 else [],
    )
    state = opened.checkpoint.state if opened.checkpoint else stage.first_state()
    if state.round < spec.rounds:
        message = stage.server.method.broadcast(state.global_best, state.memory)
        swarm.recall(message, state.version, state.updates, state.references)
        swarm.gather([worker for worker in range(spec.workers) if worker not in state.banned], state.round > 0)
        if wishes.own_data and spec.defence.aggregator == "mean":
            stage = replace(stage, server=replace(stage.server, combine=averaging(swarm.samples, stated=True)))
        _log.info("cbdsl: %s, %d workers, %d rounds; %s", spec.method, spec.workers, spec.rounds, out)
    swarm.exclude(state.banned)
    for played in rounds(stage, state, swarm):
        swarm.exclude(played.state.banned)
        state, line = played.state, played.record
        opened.records.append(line)
        opened.folder.append(line)
        opened.folder.save_checkpoint(state, None, stage.key)
        _log.info(
            "round %d of %d: accuracy %.4f, %d bytes up, refuted %s, declined %s, silent %s, %.2f s",
            line.round, spec.rounds, line.test_accuracy, line.uplink_bytes, line.refuted, line.declined,
            line.silent, line.seconds,
        )  # fmt: skip
    swarm.finish()
    return conclude(stage, opened.folder, opened.records, state)
