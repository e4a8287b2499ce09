"""Keys of a small swarm for tests, and members of it as an address knows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cbdsl.network.certificates import Authority, IssuedCertificate, identity_of
from cbdsl.network.mqtt import Address
from cbdsl.network.tls import IDENTITY
from cbdsl.util.serialize import to_plain


def authority(keys: Path) -> Authority:
    return Authority.load((keys / "ca" / "ca.crt").read_bytes(), (keys / "ca" / "ca.key").read_bytes())


def put(folder: Path, stem: str, issued: IssuedCertificate) -> None:
    (folder / f"{stem}.crt").write_bytes(issued.certificate)
    (folder / f"{stem}.key").write_bytes(issued.key)
    (folder / f"{stem}.key").chmod(0o600)
    (folder / IDENTITY).write_text(json.dumps(to_plain(identity_of(issued.certificate))))


def member(keys: Path, port: int, name: str = "anna", **changes: object) -> Address:
    home = keys / "workers" / name
    made = Address("localhost", port, True, home / "ca.crt", home / "worker.crt", home / "worker.key")
    return replace(made, **changes)  # type: ignore[arg-type]


def options(keys: Path, name: str = "anna") -> list[str]:
    home = keys / "workers" / name
    return ["--ca", str(home / "ca.crt"), "--cert", str(home / "worker.crt"), "--key", str(home / "worker.key")]
