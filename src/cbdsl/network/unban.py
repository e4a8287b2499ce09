"""Lifts bans of a served run: `cbdsl unban` leaves a request in the run's folder, the server carries it out."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from cbdsl.algorithm.messages import ServerState
from cbdsl.errors import UserError, unknown
from cbdsl.network.journal import Events
from cbdsl.network.roster import Roster
from cbdsl.spec import read as read_spec
from cbdsl.util.files import private_folder, read_json, write_atomically

_log = logging.getLogger("cbdsl.network")

_FOLDER = "unban"


def request_unban(out: Path, name: str) -> None:
    """Leave a request to lift a worker's ban; UserError if it is not banned."""
    if not (out / "deployment.json").is_file():
        raise UserError(
            f"{out} is not the folder of a served run. Give the --out of `cbdsl serve` or `cbdsl swarm`.",
            code="missing-file",
        )
    if (out / "summary.json").exists():
        raise UserError(f"The run in {out} is finished, and its bans ended with it.", code="no-effect")
    roster = Roster(out / "roster.json", read_spec(out / "spec.toml").workers)
    number = roster.number(name)
    if number is None:
        raise unknown("worker", name, roster.names)
    banned = _last_banned(out / "rounds.jsonl")
    if number not in banned:
        names = ", ".join(map(roster.name, banned)) or "none"
        raise UserError(f"{name} is not banned in {out}. Banned: {names}.", code="no-effect")
    private_folder(out / _FOLDER)
    write_atomically(out / _FOLDER / name, b"", private=True)


def _last_banned(path: Path) -> list[int]:
    """Return the numbers of the workers that are banned after the last complete round."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines[-2:] if line.endswith(b"\n")]  # the last one may be half written
    try:
        return [int(worker) for worker in read_json(whole[-1].decode())["banned"]] if whole else []
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}). Restore it.", code="damaged-file") from error


class UnbanRequests:
    """The requests in a run's folder. A request stays until a checkpoint without the ban is written."""

    def __init__(self, out: Path, roster: Roster, events: Events) -> None:
        self._folder, self._roster, self._events = out / _FOLDER, roster, events
        self._carried_out: list[Path] = []

    def apply(self, state: ServerState) -> ServerState:
        """Return the state without the bans that are to be lifted."""
        self._carried_out = sorted(self._folder.glob("[!.]*"))
        numbers = {self._roster.number(path.name): path.name for path in self._carried_out}
        lifted = sorted(worker for worker in numbers if worker in state.banned)
        for worker in lifted:
            _log.info("the ban of worker %s is lifted", numbers[worker])
            self._events.note("unbanned", round=state.round + 1, worker=numbers[worker])
        return replace(state, banned=state.banned.difference(lifted)) if lifted else state

    def clear(self) -> None:
        """Delete the requests that were carried out; call this once a checkpoint is written."""
        for path in self._carried_out:
            path.unlink(missing_ok=True)
