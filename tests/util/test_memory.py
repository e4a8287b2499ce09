"""How much memory is left, by machine, control group and limit of the process."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from cbdsl.util import memory
from support.refusals import refused_as


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 7 kB left, whose control group has no limit."""
    (tmp_path / "meminfo").write_text("MemTotal:  90 kB\nMemAvailable:  5 kB\nSwapFree:      2 kB\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    return tmp_path


def test_what_does_not_fit_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    memory.require_memory(1000, "Ten workers take", "Ask for less.")
    with refused_as("too-large", "Ten workers take about 5.0 kB", "1.0 kB", "Ask for less."):
        memory.require_memory(5000, "Ten workers take", "Ask for less.")


def test_free_memory_is_the_least_of_what_limits_it(machine: Path) -> None:
    assert memory.free_memory() == 7 * 1024
    (machine / "memory.max").write_text("3000\n")
    assert memory.free_memory() == 2000


def test_the_page_cache_of_a_control_group_is_free(machine: Path) -> None:
    (machine / "memory.max").write_text("3000\n")
    (machine / "memory.current").write_text("2900\n")
    (machine / "memory.stat").write_text("anon 900\nfile 2000\ninactive_file 1500\nactive_file 300\nshmem 200\n")
    assert memory.free_memory() == 100 + 1800


def test_what_is_mapped_counts_against_the_limit_of_the_process(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = 3
    (machine / "statm").write_text(f"{pages} 1 1 1 0 1 0\n")
    limit = pages * resource.getpagesize() + 500
    monkeypatch.setattr(memory, "_MAPPED", machine / "statm")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    assert memory.free_memory() == 500
