from __future__ import annotations

import gzip
import hashlib
import resource
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import ArrayLike

from cbdsl.data import dataset
from cbdsl.data.dataset import Dataset, load, measure_scale, read_idx, read_idx_folder
from cbdsl.errors import UserError
from support.refusals import refused_as

SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_folder(
    folder: Path, train: int = 6, test: int = 3, labels: int | None = None, compress: bool = False
) -> None:
    rng = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        images = idx(rng.integers(0, 256, (count, 4, 5)))
        truth = idx(np.arange(count if labels is None or name == "t10k" else labels) % 3)
        for kind, content in (("images-idx3", images), ("labels-idx1", truth)):
            path = folder / f"{name}-{kind}-ubyte{'.gz' if compress else ''}"
            path.write_bytes(gzip.compress(content) if compress else content)


@pytest.mark.parametrize("name", SHA256)
def test_the_embedded_files_are_the_original_ones(name: str) -> None:
    packed = (resources.files("cbdsl.data") / "mnist" / f"{name}.gz").read_bytes()
    assert hashlib.sha256(gzip.decompress(packed)).hexdigest() == SHA256[name]


def test_mnist_is_whole_and_scaled(mnist: Dataset) -> None:
    assert mnist.train.features.shape == (60_000, 1, 28, 28)
    assert mnist.test.features.shape == (10_000, 1, 28, 28)
    assert (mnist.classes, mnist.shape, mnist.train.labels[0]) == (10, (1, 28, 28), 5)
    assert abs(float(mnist.train.features.mean(dtype=np.float64))) < 1e-4
    assert float(mnist.train.features.std(dtype=np.float64)) == pytest.approx(1.0, abs=1e-4)


def written_out(train: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Scaled pixels in the plainest way, and the way it was always done: every bit of them is part of a run."""
    counts = np.bincount(train.reshape(-1), minlength=256)
    shades = np.arange(256) / 255.0
    mean = np.average(shades, weights=counts)
    deviation = np.sqrt(np.average((shades - mean) ** 2, weights=counts))
    scaled = np.asarray((shades - mean) / max(deviation, 1e-6), dtype=np.float32)
    return np.asarray(scaled[images[:, None]])


@pytest.mark.slow
def test_every_bit_of_mnist_is_what_the_files_say(mnist: Dataset) -> None:
    folder = Path(str(resources.files("cbdsl.data") / "mnist"))
    train, test = (read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3) for part in ("train", "t10k"))
    assert measure_scale(train) == dataset._EMBEDDED_SCALE
    np.testing.assert_array_equal(mnist.train.features, written_out(train, train))
    np.testing.assert_array_equal(mnist.test.features, written_out(train, test))
    for samples in (mnist.train, mnist.test):
        assert (samples.features.dtype.name, samples.labels.dtype.name) == ("float32", "int32")
        assert samples.features.flags.c_contiguous


@given(st.binary(min_size=1, max_size=300), st.integers(1, 9))
def test_pixels_are_scaled_as_written_out_whatever_their_number(pixels: bytes, at_once: int) -> None:
    images = np.frombuffer(pixels, np.uint8).reshape(1, 1, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "_AT_ONCE", at_once)
        mean, deviation = measure_scale(images)
        scaling = dataset.Scaling((mean,), (max(deviation, 1e-6),), shades=True)
        np.testing.assert_array_equal(scaling.apply(images[:, None]), written_out(images, images))


@pytest.mark.parametrize("compress", [False, True])
def test_a_folder_is_scaled_by_its_own_training_set(tmp_path: Path, compress: bool) -> None:
    write_folder(tmp_path, compress=compress)
    train, test = (read_idx(next(tmp_path.glob(f"{part}-images*")), 3) for part in ("train", "t10k"))
    data = read_idx_folder(tmp_path, "own")
    np.testing.assert_array_equal(data.train.features, written_out(train, train))
    np.testing.assert_array_equal(data.test.features, written_out(train, test))


@pytest.mark.parametrize("compress", [False, True])
def test_a_folder_of_idx_files_is_read_compressed_or_not(tmp_path: Path, compress: bool) -> None:
    write_folder(tmp_path, compress=compress)
    data = load(str(tmp_path))
    assert data.train.features.shape == (6, 1, 4, 5)
    assert data.test.labels.tolist() == [0, 1, 2]
    assert data.classes == 3


def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-7])
    with refused_as("damaged-file", "train-images-idx3-ubyte has the shape (6, 4, 5)", "truncated"):
        load(str(tmp_path))


def test_a_truncated_gzip_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_folder(tmp_path, compress=True)
    path = tmp_path / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with refused_as("damaged-file", "t10k-labels-idx1-ubyte.gz cannot be read"):
        load(str(tmp_path))


def test_a_packed_file_may_hold_several_streams(tmp_path: Path) -> None:
    content, path = idx(np.arange(100)), tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(content[:40]) + gzip.compress(content[40:]))
    np.testing.assert_array_equal(read_idx(path, 1), np.arange(100))
    path.write_bytes(gzip.compress(content[:54]) + gzip.compress(content[54:]))  # of equal length
    np.testing.assert_array_equal(read_idx(path, 1), np.arange(100))
    path.write_bytes(gzip.compress(content) + bytes(8))  # padding, as tapes have it
    np.testing.assert_array_equal(read_idx(path, 1), np.arange(100))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_packed_file_is_never_read_as_something_else(position: int, change: int) -> None:
    values = np.random.default_rng(0).integers(0, 4, 3000)
    packed = bytearray(gzip.compress(idx(values), mtime=0))
    packed[position % len(packed)] ^= change
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.gz"
        path.write_bytes(packed)
        try:
            np.testing.assert_array_equal(read_idx(path, 1), values)  # where gzip keeps a name, time or system
        except UserError as error:
            assert "labels.gz" in str(error)


def test_a_file_that_promises_too_much_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx(np.arange(9)))[:-4] + b"\xff\xff\xff\xff")
    with refused_as("damaged-file", "labels.gz cannot be read"):
        read_idx(path, 1)


def test_swapped_files_are_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    content = images.read_bytes()
    images.write_bytes(labels.read_bytes())
    labels.write_bytes(content)
    with refused_as("wrong-shape", "1 dimension(s); 3 expected", "swapped"):
        load(str(tmp_path))


def test_labels_that_do_not_match_the_images_are_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path, labels=5)
    with refused_as("wrong-shape", "5 labels for 6 images"):
        load(str(tmp_path))


def test_something_else_than_idx_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(b"PNG, perhaps")
    with refused_as("unreadable-file", "not an IDX file"):
        read_idx(path, 3)


def test_a_missing_or_ambiguous_file_is_an_error(tmp_path: Path) -> None:
    with refused_as("missing-file", "exactly one IDX file of train images", "found: none"):
        load(str(tmp_path))
    write_folder(tmp_path)
    (tmp_path / "emnist-train-images-idx3-ubyte").write_bytes(b"")
    with refused_as("missing-file", "found: emnist-train-images-idx3-ubyte, train-images"):
        load(str(tmp_path))
    with refused_as("unknown-name", "neither a data set by name (mnist, hapt, ", " nor a folder"):
        load(str(tmp_path / "nothing"))


def test_an_npz_file_is_read_as_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(9, 5)), np.arange(9) % 3
    path = tmp_path / "sensors.npz"

    def write(**test: ArrayLike) -> None:
        np.savez(path, train_features=features[:6], train_labels=labels[:6], **test)  # type: ignore[arg-type]

    write(test_features=features[6:], test_labels=labels[6:])
    data = load(str(path))
    np.testing.assert_array_equal(data.train.features, features[:6].astype(np.float32))
    assert (data.test.labels.tolist(), data.classes, data.name) == ([0, 1, 2], 3, str(path))

    write()
    with refused_as("unreadable-file", "test_features", "Give an .npz file with the arrays train_features, train_lab"):
        load(str(path))
    write(test_features=[["a"]], test_labels=[0])
    with refused_as("wrong-type", "test_features in ", " has the type <U1; give numbers"):
        load(str(path))
    path.write_bytes(b"PK, perhaps")
    with refused_as("unreadable-file", "cannot be read"):
        load(str(path))


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (np.zeros((3, 2)), [0, 1], r"given \(3, 2\) and \(2,\)"),
        (np.zeros((2, 2)), [0.5, 1], "must be integers"),
        (np.zeros((2, 2)), [-1, 1], "integers from 0"),
        (np.array([[np.nan, 0], [0, 0]]), [0, 1], "NaN or infinite"),
        (np.zeros((0, 2)), [], r"N > 0"),
        (np.zeros((2, 2)), [0, 0], "at least two classes"),
    ],
)
def test_arrays_that_are_no_dataset_are_an_error(features: np.ndarray, labels: list[float], message: str) -> None:
    test = np.zeros((1, 2)), [0]
    with pytest.raises(UserError, match=message):
        Dataset.from_arrays(features, labels, *test)


def test_a_gzip_that_unpacks_to_more_than_it_announces_is_not_unpacked_whole(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    bomb = gzip.compress(path.read_bytes() + bytes(10**6), mtime=0) + gzip.compress(bytes(10**8)) * 100  # 10 GB
    path.unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(bomb)
    with (
        limited(2 * 2**30),
        refused_as("damaged-file", "has the shape (6, 4, 5)", "136 bytes, but has more"),
    ):
        load(str(tmp_path))


def test_a_file_that_announces_more_than_the_memory_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    header = b"\x00\x00\x08\x03" + (2**31).to_bytes(4, "big") * 3
    (tmp_path / "train-images-idx3-ubyte").unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header))
    with pytest.raises(UserError, match=r"has the shape .* in its header.* of memory"):
        load(str(tmp_path))


def test_a_gzip_of_several_streams_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path, expected = tmp_path / "train-images-idx3-ubyte", load(str(tmp_path))
    content = path.read_bytes()
    path.unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content[:5]) + gzip.compress(content[5:]))
    np.testing.assert_array_equal(load(str(tmp_path)).train.features, expected.train.features)


@contextmanager
def limited(size: int) -> Iterator[None]:
    """At most so many bytes of memory more than now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "change",
    [
        {"train_features": np.full((9, 2), np.nan)}, {"test_features": np.full((9, 2), 1e300)},
        {"train_labels": np.full(9, 2**40)}, {"train_labels": np.array(["a"] * 9)},
        {"train_features": np.zeros((9, 0))},
        {"train_features": np.zeros(9)}, {"train_clients": np.full(9, 2**40)}, {"train_labels": np.zeros(9)},
        {"train_features": np.zeros((9, 2), complex)}, {"train_clients": np.array(["a"] * 9)},
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_learned_from_are_refused_and_their_file_is_named(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    good = {
        "train_features": np.zeros((9, 2)), "test_features": np.zeros((9, 2)), "train_labels": np.arange(9),
        "test_labels": np.arange(9),
    }  # fmt: skip
    np.savez(tmp_path / "some.npz", **{**good, **change})
    with pytest.raises(UserError, match=r"some\.npz"):
        load(str(tmp_path / "some.npz"))


@given(st.binary(max_size=60), st.booleans(), st.booleans())
def test_whatever_the_bytes_of_an_idx_file_it_is_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, headed: bool, zipped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-idx1"
    content = b"\x00\x00\x08\x01" + content if headed else content
    path.write_bytes(b"\x1f\x8b" + content if zipped else content)
    try:
        read_idx(path, 1)
    except UserError as error:
        assert "fuzzed-idx1" in str(error)
