"""`cbdsl flower new`: writes the folder of a Flower app. Does not need flwr."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from cbdsl.errors import UserError
from cbdsl.util.files import is_free

OLDEST_FLWR = "1.41.0"

_SERVER = '''"""The server: runs CB-DSL with the nodes of a federation."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from cbdsl.flower.server import play

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the configuration describes."""
    play(grid, context)
'''

_CLIENT = '''"""A worker: trains, claims a score, and uploads its model if it is invited."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from cbdsl.flower import client

app = ClientApp()


@app.query("join")
def join(message: Message, context: Context) -> Message:
    """Prepare for a run and answer which worker this is."""
    return client.join(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Move, score, and claim that score."""
    return client.train(message, context)


@app.query()
def upload(message: Message, context: Context) -> Message:
    """Send the model behind the claim."""
    return client.upload(message, context)


@app.query("finish")
def finish(message: Message, context: Context) -> Message:
    """The run is over."""
    return client.finish(message, context)
'''

_README = """# CB-DSL as a Flower app

Every worker is a node. A round asks each of them for one number and the best of them for its model; claims are
verified, attackers banned. The numbers are those of `cbdsl run` with the same spec.

    pip install 'flwr[simulation]' cbdsl        # an environment of its own: flwr pins another Ray
    flwr run . --stream --federation-config "num-supernodes=8 client-resources-num-cpus=1"
    flwr run . --stream --federation-config "num-supernodes=8 client-resources-num-cpus=1" \\
        -c 'settings="workers=8 attack.name=sign-flip attack.byzantine=2"'

The run's folder is under `runs`; `cbdsl watch DIR`, `cbdsl predict` and `cbdsl export` read it like any other.
`[tool.flwr.app.config]` in pyproject.toml is the configuration of a run; `-c 'key=value'` sets it for one run:

| key | meaning |
|---|---|
| spec | a preset (`cbdsl presets`), or a spec's file on the server's machine |
| rounds | how many; 0: as the spec says |
| settings | any settings of a spec (`cbdsl list settings`), with spaces between them |
| runs, out | where runs go, and this run's folder in it; with the same `out` an interrupted run continues |
| own-data | true: nodes work on samples of their own, not on the spec's data set dealt to them |
| join-seconds, round-seconds, upload-seconds | how long the server waits for nodes |

On real machines, one SuperLink and a SuperNode for every worker:

    flower-superlink --insecure                 # rather with --ssl-ca-certfile and the others: see Flower's pages
    flower-supernode --insecure --superlink HOST:8000 --node-config 'partition-id=0 num-partitions=8'
    flwr run . my-federation --stream           # [superlink.my-federation] in ~/.flwr/config.toml has the address

Keys of `--node-config`: `partition-id` (which worker it is, from 0 on), `num-partitions`, `data-path` (own samples: an
.npz file with features (N, ...) and labels (N,), for own-data), `state-path` (where it keeps its particle).
Parts of your own (methods, codecs, models) may be registered in server_app.py and client_app.py.
"""


def write_app(folder: Path, spec: str, workers: int) -> None:
    """Write the app into a folder that does not exist or is empty."""
    if not is_free(folder):
        raise UserError(
            f"{folder} exists and is not an empty folder; nothing was overwritten. Give another one.",
            code="exists-already",
        )
    files = {
        "pyproject.toml": tomli_w.dumps(_project(folder, spec, workers)),
        "cbdsl_app/__init__.py": '"""CB-DSL as a Flower app."""\n',
        "cbdsl_app/server_app.py": _SERVER,
        "cbdsl_app/client_app.py": _CLIENT,
        "README.md": _README,
        ".gitignore": "/runs/\n__pycache__/\n",
    }
    try:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"The folder {folder} cannot be written: {error.strerror}. Give another one.", code="unreadable-file"
        ) from error


def _project(folder: Path, spec: str, workers: int) -> dict[str, object]:
    config = {
        "spec": spec,
        "rounds": 0,
        "settings": f"workers={workers}",
        "runs": str(folder.resolve() / "runs"),
        "out": "",
        "own-data": False,
        "join-seconds": 300.0,
        "round-seconds": 600.0,
        "upload-seconds": 60.0,
    }
    app = {
        "publisher": "cbdsl",
        "components": {"serverapp": "cbdsl_app.server_app:app", "clientapp": "cbdsl_app.client_app:app"},
        "config": config,
    }
    return {
        "project": {
            "name": "cbdsl-app",
            "version": "1.0.0",
            "description": "CB-DSL as a Flower app",
            "license": "Apache-2.0",
            "dependencies": [f"flwr[simulation]>={OLDEST_FLWR}"],  # not cbdsl: flwr would look for it in a register
        },
        "tool": {"flwr": {"app": app}},
    }
