"""What there is to choose from is listed, and every setting is explained."""

from __future__ import annotations

import compileall
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from settings_page import make_page

from cbdsl import register, spec
from cbdsl.cli.list_commands import KINDS, rows_of
from cbdsl.models.zoo import usual
from cbdsl.presets import DESCRIPTIONS, PRESETS
from cbdsl.spec import dotted_keys, from_toml, reference
from support.helpers import cbdsl

ROOT = Path(__file__).parents[2]


def test_every_setting_is_explained() -> None:
    assert all(line.meaning for group in reference() for line in group.lines)
    assert sorted(line.key for group in reference() for line in group.lines) == sorted(dotted_keys())


def test_settings_are_listed_without_source_files(tmp_path: Path) -> None:
    package = Path(spec.__file__).parent
    shutil.copytree(package, tmp_path / "cbdsl", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.cpp", "*.npz"))
    compileall.compile_dir(tmp_path / "cbdsl", quiet=2, legacy=True)
    for source in (tmp_path / "cbdsl").rglob("*.py"):
        source.unlink()
    program = "from cbdsl.cli.list_commands import rows_of; print([row['key'] for row in rows_of('settings')])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'local.batch_size'" in done.stdout


def test_every_preset_is_described() -> None:
    assert list(DESCRIPTIONS) == list(PRESETS)


def test_the_settings_page_is_what_would_be_generated() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == make_page()


def test_every_part_has_a_name_settings_and_a_line() -> None:
    for kind, parts in register.ALL.items():
        rows = rows_of(kind)
        assert [row["name"] for row in rows] == parts.names()
        own = [row for row in rows if parts.get(row["name"]).__module__.startswith("cbdsl.")]  # others are plugins
        assert all(row["summary"] for row in own)


def test_every_attack_has_a_family() -> None:
    own = [row for row in rows_of("attacks") if register.attack.get(row["name"]).__module__.startswith("cbdsl.")]
    assert all(row["family"] for row in own)


def test_every_kind_is_listed_and_readable_by_programs(tmp_path: Path) -> None:
    counts = {row["kind"]: row["count"] for row in json.loads(cbdsl("list", "--json", cwd=tmp_path).stdout)}
    assert tuple(counts) == KINDS
    for kind in KINDS:
        assert len(json.loads(cbdsl("list", kind, "--json", cwd=tmp_path).stdout)) == counts[kind]


def test_lists_are_tables_with_a_line_a_part(tmp_path: Path) -> None:
    said = cbdsl("list", "attacks", cwd=tmp_path).stdout.splitlines()
    assert any(line.split()[:2] == ["liar", "scale=10.0"] and "Sec. III.C" in line for line in said)
    assert any(line.split()[:3] == ["liar", "scale=10.0", "claims"] for line in said)
    said = cbdsl("list", "settings", cwd=tmp_path).stdout.splitlines()
    assert any(line.split()[:2] == ["local.batch_size", "10"] for line in said)
    assert "attacks" in cbdsl("list", cwd=tmp_path).stdout


def test_models_are_listed_with_their_sizes_on_the_samples_they_were_made_for(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in json.loads(cbdsl("list", "models", "--json", cwd=tmp_path).stdout)}
    assert (rows["cnn"]["parameters"], rows["cnn"]["multiply_adds"]) == (44_426, 281_640)
    assert rows["resnet8"]["samples"] == [3, 32, 32]
    built_in = {name: row for name, row in rows.items() if row["parameters"] is not None}  # others are plugins
    assert all(row["parameters"] == usual(name).size for name, row in built_in.items())
    said = cbdsl("list", "models", cwd=tmp_path).stdout.splitlines()
    assert any(line.split()[:6] == ["har-cnn", "6", "x", "128", "44,518", "647,552"] for line in said)


def test_a_model_of_a_plugin_is_listed_without_a_size(tmp_path: Path) -> None:
    plugin = str(ROOT / "examples" / "my_parts.py")
    rows = json.loads(cbdsl("list", "models", "--plugin", plugin, "--json", cwd=tmp_path).stdout)
    own = next(row for row in rows if row["name"] == "tanh-net")
    assert (own["samples"], own["parameters"], own["multiply_adds"]) == (None, None, None)
    assert "tanh-net" in cbdsl("list", "models", "--plugin", plugin, cwd=tmp_path).stdout


def test_presets_explain_themselves_and_are_printed_whole(tmp_path: Path) -> None:
    said = cbdsl("presets", cwd=tmp_path).stdout
    assert said.startswith("A preset is ")
    for name, words in DESCRIPTIONS.items():
        assert f"{name}: {words}" in said
    assert '  data.partition = "shards"' in said
    assert "cbdsl list settings" in said
    whole = cbdsl("presets", "strong-iid", cwd=tmp_path).stdout
    assert from_toml(whole) == PRESETS["strong-iid"]
    assert tomllib.loads(whole)["local"]["epochs"] == 3
