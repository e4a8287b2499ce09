"""Data sets that `cbdsl data fetch` puts in the user's cache folder, by name. Nothing is fetched here."""

from __future__ import annotations

from functools import cache as remembered

from cbdsl import register
from cbdsl.data import cache
from cbdsl.data.catalogue import ENTRIES
from cbdsl.data.sources import Dataset


@register.dataset("hapt")
def hapt() -> Dataset:
    """Activities of people, fetched: 10,017 sensor windows (6 x 128); 21 people are clients, nine others the test."""
    return _read("hapt", str(cache.folder()))


@register.dataset("cifar10")
def cifar10() -> Dataset:
    """CIFAR-10, fetched: 50,000 training and 10,000 test images (3 x 32 x 32), ten kinds of things."""
    return _read("cifar10", str(cache.folder()))


@register.dataset("fashion-mnist")
def fashion_mnist() -> Dataset:
    """Fashion-MNIST, fetched: 60,000 training and 10,000 test images (1 x 28 x 28), ten kinds of clothes."""
    return _read("fashion-mnist", str(cache.folder()))


@remembered
def _read(name: str, _folder: str) -> Dataset:
    return cache.read(ENTRIES[name])
