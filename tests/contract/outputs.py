"""Records of machine-readable output: keys of JSON, columns of Parquet tables, names of files."""

from __future__ import annotations

import functools
import json
import os
import re
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.gate.report import Comparison, Row, Times, as_json
from benchmarks.report import files as result_files
from benchmarks.report.ratios import SCHEMAS
from benchmarks.report.results import summarise
from benchmarks.report.tables import tidy
from benchmarks.support.recorder import Recorder
from benchmarks.support.workload import Workload
from benchmarks.tracks import TRACKS
from omearrow_ds import FORMATS, convert, recommend, stats, write_crops, write_embeddings
from omearrow_ds.storage.part_cache import PartCache
from tests.contract import files
from tests.contract.command_line import run

_CUT = ("--crop", 8, "--center", "y,x")
_PROFILE = ("--seconds", 0.01, "--no-trials", "--workers", 0, "--model", "torch.nn:Flatten", "--optimizer", "none")


def shape_of(value: Any) -> Any:
    """Return a JSON value with types in place of values, and one item in each list."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [functools.reduce(_merged, map(shape_of, value))] if value else []
    if value is None:
        return "null"
    return "boolean" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"


def _merged(first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: _merged(first.get(key, second.get(key)), second.get(key, first[key])) for key in first | second}
    if isinstance(first, list) and isinstance(second, list):
        return [functools.reduce(_merged, first + second)] if first + second else []
    if first == second:
        return first
    return " | ".join(sorted({*str(first).split(" | "), *str(second).split(" | ")}))


def record_json(folder: Path) -> dict[str, Any]:
    """Return keys and types of the output of each command with ``--json``, and of other JSON files."""
    images, objects = files.write(folder / "images.parquet"), files.write_tables(folder)["objects"]
    planes = files.write_planes(folder / "planes", [f"r01c01f01p01-ch{channel}sk1fk1fl1.tiff" for channel in (1, 2)])
    cache = folder / "cache"
    cache.mkdir()
    PartCache(cache, 10**6).acquire(f"00000-{'a' * 32}.arrow", 1, lambda file: os.write(file, b"x")).close()
    calls = {
        "info": ["info", images],
        "info of a folder with planes": ["info", planes],
        "convert": ["convert", images, folder / "copy.arrow"],
        "convert --task": ["convert", images, folder / "copy.parts", "--task", "1/1"],
        "publish": ["publish", folder / "copy.parts"],
        "crops": ["crops", images, objects, folder / "crops.arrow", *_CUT],
        "crops --task": ["crops", images, objects, folder / "crops.parts", *_CUT, "--task", "1/1"],
        "cache": ["cache", cache],
        "verify": ["verify", images],
        "stats --by": ["stats", images, "--by", "Metadata_Plate", "--out", folder / "stats.json"],
        "show": ["show", images, "--out", folder / "images.png"],
        "show --by": ["show", images, "--out", folder / "wells.png", "--by", "Metadata_Well"],
        "profile": ["profile", images, *_PROFILE],
    }
    outputs = {name: shape_of(json.loads(run(*words, "--json").stdout)) for name, words in calls.items()}
    outputs["recommend"] = shape_of(_recommendation(images))
    for name in ("stats.json", "copy.parts/parts.json"):
        outputs[name] = shape_of(json.loads((folder / name).read_text()))
    outputs["benchmarks: summary"] = shape_of(json.loads(json.dumps(_summary(), default=str)))
    outputs["benchmarks: gate"] = shape_of(json.loads(json.dumps(_comparison())))
    return outputs


def _recommendation(images: Path) -> dict[str, Any]:
    """Return a recommendation by a clock that advances by 10 ms per look, so that the same layouts are tried."""
    looks = iter(range(10**6))
    small = {"formats": ["parquet"], "seconds": 1.0, "bandwidth": "1Gb", "latency": "20ms"}
    return recommend(images, **small, clock=lambda: next(looks) / 100).as_dict()


def _summary() -> dict[str, Any]:
    """Return the summary of benchmarks with one result and one absent format."""
    parameters = {"order": "random", "transform": "normalize", "access": "on_demand"}
    about = {"track": 1, "operation": "getitem", "format": "arrow", "label": "Arrow IPC"}
    times = {"rounds": 1, "data": [0.5], "min": 0.5, "max": 0.5, "mean": 0.5, "median": 0.5, "stddev": 0.0}
    measured = {"name": "getitem[arrow]", "extra_info": {**about, **parameters}, "stats": times}
    absent = {**about, "format": "lance", "params": parameters, "name": "getitem[lance]", "fullname": "f::n"}
    absent |= {"status": "missing", "reason": "pylance is not installed"}
    arguments = types.SimpleNamespace(args=("benchmarks",))
    config: Any = types.SimpleNamespace(getoption=lambda name, default=None: None, invocation_params=arguments)
    config.rootpath = Path(__file__).parent
    context = Recorder(config, Workload(8))._context()
    context |= {"versions": {}, "git": {}}  # They depend on the environment.
    context["setting"]["machine"] = {}
    return summarise(tidy([measured], [absent]), context)


def _comparison() -> dict[str, Any]:
    times = [Times(1e-3, 2e-3, 3e-3, 8, [1e-3, 1.1e-3], [1e-3, 1.1e-3])] * 5
    rows = [
        Row.from_times(f"benchmarks/test_gate.py::test_{name}", times, times) for name in ("control", "work[arrow]")
    ]
    others: dict[str, dict[str, str]] = {"new": {"test_new": ""}, "gone": {}, "skipped": {}}
    return as_json(Comparison("main (abc)", "def", 0.05, (rows[0],), (rows[1],), seconds=1.0, **others))


def record_tables(folder: Path) -> dict[str, Any]:
    """Return columns and types of the tables that the package and the benchmarks write."""
    images, objects = files.write(folder / "images.parquet"), files.write_tables(folder)["objects"]
    write_crops(images, objects, folder / "crops.parquet", crop_size=(8, 8), center=("y", "x"))
    write_embeddings(folder / "embeddings.parquet", ["a", "b"], np.zeros((2, 3), np.float32))
    stats(images, by="Metadata_Plate").write(folder / "stats.parquet")
    convert(images, folder / "copy.parts", part_bytes=1000)
    convert(images, folder / "copy.tiffs")
    tables = {
        "write_images: IMAGES.parquet": pq.read_schema(images),
        "write_images: FOLDER.tiffs/columns.parquet": pq.read_schema(folder / "copy.tiffs" / "columns.parquet"),
        "convert: COPY.parts/index.parquet": pq.read_schema(folder / "copy.parts" / "index.parquet"),
        "write_crops: CROPS.parquet": pq.read_schema(folder / "crops.parquet"),
        "write_embeddings: FILE.parquet": pq.read_schema(folder / "embeddings.parquet"),
        "stats: FILE.parquet": pq.read_schema(folder / "stats.parquet"),
        "Stats.columns": stats(images, by="Metadata_Plate").columns.schema,
        **{f"benchmarks: {result_files.table_file(track.number)}": track.schema for track in TRACKS},
        **{f"benchmarks: {result_files.table_file(name)}": schema for name, schema in SCHEMAS.items()},
    }
    return {name: {field.name: _type_of(field.type) for field in schema} for name, schema in tables.items()}


def _type_of(dtype: pa.DataType) -> Any:
    """Return the name of a type, with fields of structs as a dict and items of lists in a list."""
    if pa.types.is_struct(dtype):
        return {field.name: _type_of(field.type) for field in dtype}
    return [_type_of(dtype.value_type)] if pa.types.is_list(dtype) else str(dtype)


def record_files(folder: Path) -> dict[str, Any]:
    """Return the names of files that the package and the benchmarks write; ``*`` is a number or a hash."""
    written: dict[str, Any] = {}
    for fmt in FORMATS:
        target = files.write(folder / f"images{fmt.suffix}")
        written[f"write_images: {fmt.name}"] = _names(folder, target.name)
    source = folder / "images.parquet"
    convert(source, folder / "one.parts", "parquet")
    written["convert: parts"] = _names(folder, "one.parts")
    damaged = files.write_damaged(source, folder / "damaged.parquet")
    with warnings.catch_warnings(action="ignore"):  # One image is left out.
        convert(damaged, folder / "left-out.parts", on_error="skip")
    written["convert: parts with images left out"] = _names(folder, "left-out.parts")
    convert(source, folder / "share.parts", part_bytes=1000, task=(1, 2))
    written["convert: a share of parts"] = _names(folder, "share.parts")
    tracks = [
        name
        for track in TRACKS
        for name in (result_files.table_file(track.number), result_files.figure_file(track.number))
    ]
    limits = [result_files.table_file(name) for name in SCHEMAS]
    written["benchmarks"] = sorted(
        [*tracks, *limits, result_files.SUMMARY, result_files.GATE, result_files.SELFTEST, result_files.DRIFT]
    )
    return written


def _names(folder: Path, stem: str) -> list[str]:
    """Return distinct names of files whose path starts with a name, with ``*`` for digits and hashes."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = {str(path) for path in paths if str(path).startswith(stem)}
    return sorted({re.sub(r"[0-9a-f-]{16,}|\d+", "*", name) for name in names})
