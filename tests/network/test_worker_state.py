"""What a worker keeps: whatever happens to its files, it starts again and takes no more memory than its state."""

from __future__ import annotations

import io
import json
import random
import stat
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cbdsl.algorithm.messages import Claim
from cbdsl.algorithm.worker_round import initial_particles
from cbdsl.arrays import Samples
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Linear
from cbdsl.network.device_worker import DeviceWorker, parse_announcement
from cbdsl.network.samples import pack_shared
from cbdsl.network.wire import Announcement, OrderMessage, digest_of
from cbdsl.network.worker_state import StateSummary, WorkerState, WorkerStateFolder
from support.stateful_parts import momentum  # noqa: F401 - a fixture

RUN, SIZE = b"run-0001", 50


def saved(folder: Path) -> bytes:
    particles = initial_particles(np.arange(SIZE, dtype=np.float32)[None], 1)
    WorkerStateFolder(folder).save(WorkerState(RUN, 3, 7, particles, Claim(0.25, b"c" * 16), 5, b"d" * 16))
    return (folder / "state.npz").read_bytes()


def test_a_state_comes_back_to_its_run_and_its_worker_alone(tmp_path: Path) -> None:
    saved(tmp_path)
    keeper = WorkerStateFolder(tmp_path)
    found = keeper.load(RUN, 3, SIZE, 0)
    assert found is not None
    assert (found.round, found.claim) == (7, Claim(0.25, b"c" * 16))
    assert np.array_equal(found.particles.positions[0], np.arange(SIZE))
    assert keeper.last() == StateSummary(RUN, 7, 5, b"d" * 16)
    assert keeper.load(b"run-0002", 3, SIZE, 0) is None
    assert keeper.load(RUN, 4, SIZE, 0) is None
    assert keeper.load(RUN, 3, SIZE + 1, 0) is None
    assert keeper.load(RUN, 3, SIZE, 5) is None


@pytest.mark.slow
def test_no_flip_and_no_cut_of_a_state_is_an_error(tmp_path: Path) -> None:
    good, rng, usable = saved(tmp_path), random.Random(1), 0
    keeper = WorkerStateFolder(tmp_path)
    damaged = [good[:length] for length in range(0, len(good), 29)]
    for place in range(0, len(good), 3):
        flipped = bytearray(good)
        flipped[place] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    for content in damaged:
        (tmp_path / "state.npz").write_bytes(content)
        keeper.last()
        found = keeper.load(RUN, 3, SIZE, 0)
        if found is not None:  # the flip was where nobody reads, such as a time
            usable += 1
            assert np.array_equal(found.particles.positions[0], np.arange(SIZE))
            assert found.round == 7
    assert usable < len(damaged) / 3


def npy(shape: str, kind: str = "<f4", data: bytes = b"") -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize("how", ["deflated", "a header that lies", "a large entry", "pickles", "a large meta"])
def test_a_state_that_is_a_bomb_takes_no_memory(how: str, tmp_path: Path) -> None:
    good = saved(tmp_path)
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    deflate = how == "deflated"
    if how in {"deflated", "a large entry"}:
        entries["positions.npy"] = npy("(1, 10000000)", data=bytes(40_000_000))
    if how == "a header that lies":
        entries["positions.npy"] = npy("(1, 500000000000)", data=bytes(200))
    if how == "pickles":
        entries["positions.npy"] = npy("(1, 50)", "|O", b"cos\nsystem\n(S'false'\ntR.")
    if how == "a large meta":
        entries["meta.npy"] = npy("()", "<U10000000", bytes(40_000_000))
    with zipfile.ZipFile(
        tmp_path / "state.npz", "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
    ) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    del entries
    tracemalloc.start()
    try:
        assert WorkerStateFolder(tmp_path).load(RUN, 3, SIZE, 0) is None
        WorkerStateFolder(tmp_path).last()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 20_000_000  # threads of other tests may have allocated something meanwhile


def test_files_are_for_their_owner_alone_even_over_older_ones(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    saved(folder)
    (folder / ".shared.bin.partial").symlink_to(tmp_path / "elsewhere")
    WorkerStateFolder(folder).save_shared(b"samples")
    assert not (tmp_path / "elsewhere").exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_shared_samples_are_known_by_hash_and_size(tmp_path: Path) -> None:
    WorkerStateFolder(tmp_path).save_shared(b"samples")
    keeper = WorkerStateFolder(tmp_path)
    assert keeper.load_shared(digest_of(b"samples"), 7) == b"samples"
    assert keeper.load_shared(digest_of(b"samples"), 8) is None
    assert keeper.load_shared(digest_of(b"other"), 7) is None
    (tmp_path / "shared.bin").write_bytes(b"sAmples")
    assert keeper.load_shared(digest_of(b"samples"), 7) is None


@pytest.mark.parametrize("codec", ["none", "q4"])
@pytest.mark.parametrize(
    "attack", ["", "copycat", "fifth", "memoriser", "momentum", "poisoned-fl", "sign-flip", "staller"]
)
@pytest.mark.usefixtures("momentum")
def test_a_restarted_worker_uploads_and_claims_what_it_would_have(attack: str, codec: str, tmp_path: Path) -> None:
    network = Architecture((8,), (Linear(8, 3),))
    rng = np.random.default_rng(3)
    own, public = (
        Samples(rng.normal(size=(count, 8)).astype(np.float32), (np.arange(count) % 3).astype(np.int32))
        for count in (12, 30)
    )
    shared = pack_shared(public)
    spec = f'shared = "both"\n[codec]\nup = "{codec}"\n[defence]\ncommitment = true\n'
    assignment = parse_announcement(
        Announcement(
            RUN, spec, json.dumps(network.to_dict()), network.size, 1, "[8]", 3, 10, 20, digest_of(shared), len(shared)
        )
    )
    models = rng.normal(size=(3, network.size)).astype(np.float32)

    def order(number: int) -> OrderMessage:
        return OrderMessage(RUN, number, "swarm", b"\1", 0.5, 0.05, number, digest_of(models[number - 1].tobytes()))

    steady = DeviceWorker(assignment, 0, own, shared, 1, attack)
    steady.start(rng.normal(size=network.size).astype(np.float32))
    steady.carry_out(order(1), models[0])
    keeper = WorkerStateFolder(tmp_path)
    keeper.save(steady.carry_out(order(2), models[1]))
    pack = assignment.codecs.up.longest_pack(network.size) if codec != "none" else 0
    saved_state = keeper.load(RUN, 0, network.size, pack)
    assert saved_state is not None
    assert (saved_state.received is None) == (attack == "")
    restarted = DeviceWorker(assignment, 0, own, shared, 1, attack)
    restarted.restore(saved_state)
    assert restarted.upload() == steady.upload()
    assert restarted.carry_out(order(3), models[2]).claim == steady.carry_out(order(3), models[2]).claim
    assert restarted.upload() == steady.upload()
