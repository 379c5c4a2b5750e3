"""Commands on collections in parts at a URL: their output equals that of the local folder; errors are one line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import tifffile
from click.testing import CliRunner

from omearrow_ds import ArgumentError, Storage, convert, open_images, write_images
from omearrow_ds.advise.recommend import choices, sample
from omearrow_ds.advise.recommend.choices import StorageLayout
from omearrow_ds.cli import failures, main, options
from omearrow_ds.cli.parts import describe_share, target_storage
from omearrow_ds.storage import remote
from omearrow_ds.storage.formats import get_format
from omearrow_ds.storage.formats._urls import url_of
from omearrow_ds.storage.manifest import MANIFEST, PARTS
from omearrow_ds.storage.masks import open_masks
from omearrow_ds.storage.part_cache import PartCache
from tests.support.errors import raises
from tests.support.objects import serving
from tests.support.parts import publish
from tests.support.strategies import METADATA
from tests.unit.cli.test_cli import run

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'omearrow-ds[remote]'")
IMAGES = [np.arange(i * 800, i * 800 + 800, dtype=np.uint16).reshape(1, 2, 1, 20, 20) for i in range(12)]
NAMES = [f"{number:05d}-{'a' * 32}.arrow" for number in range(4)]
_HOLDER = """
import sys
from omearrow_ds import open_images
source = open_images(sys.argv[1], part_cache=sys.argv[2], part_cache_bytes=2**24)
source.read(0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served" / "bucket"
    folder.mkdir(parents=True)
    columns = {"well": [f"A{index // 4}" for index in range(12)]}
    write_images(IMAGES, tmp_path / "plate.arrow", metadata=[METADATA] * 12, columns=columns)
    convert(tmp_path / "plate.arrow", folder / "plate.parts", part_bytes=3 * IMAGES[0].nbytes)
    with serving(tmp_path / "served") as served:
        yield served


@pytest.fixture
def url(server):
    return f"{server.url}/bucket/plate.parts"


@pytest.fixture
def cache_options(tmp_path):
    return ["--part-cache", tmp_path / "cache", "--part-cache-bytes", "20MB"]


def parts_of(server):
    return sorted((server.folder / "bucket" / "plate.parts" / PARTS).iterdir())


def asked_for_parts(server):
    return {path: times for path, times in server.requests.items() if f"/{PARTS}/" in path}


def test_info_says_what_it_says_of_the_folder_and_fetches_no_part(server, url, tmp_path):
    described = json.loads(run("info", url, "--json").stdout)
    assert sum(server.requests.values()) <= 3
    assert not asked_for_parts(server)
    assert not (tmp_path / "home").exists()
    local = json.loads(run("info", server.folder / "bucket" / "plate.parts", "--json").stdout)
    assert described.pop("path") == url
    for of_disk_and_moment in ("path", "allocated_bytes", "available_bytes", "pixel_range"):
        local.pop(of_disk_and_moment), described.pop(of_disk_and_moment, None)
    assert described == local
    assert described["channels"] == ["DNA & <ER>", "Mito"]
    assert described["physical_sizes"]["x"] == {"size": 0.5, "unit": "µm"}
    assert "4 parts, the first:" in run("info", url).stdout


def test_info_says_what_it_does_not_know_of_parts_that_nobody_looked_at(server):
    publish(server.folder / "old.parts", IMAGES, [5, 7])
    server.requests.clear()
    output = run("info", f"{server.url}/old.parts").stdout
    assert sum(server.requests.values()) <= 3
    assert not asked_for_parts(server)
    assert "2, names unknown until a part is fetched" in output
    assert "compression" in output
    assert json.loads(run("info", f"{server.url}/old.parts", "--json").stdout)["channels"] is None


@pytest.mark.parametrize("outline", [{"stored": 1}, {"stored": {}, "metadata": []}, {"metadata": "x"}, 5])
def test_info_of_a_damaged_manifest_is_an_error(server, url, outline):
    file = server.folder / "bucket" / "plate.parts" / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "outline": outline}))
    assert MANIFEST in run("info", url, code=1).stderr


def test_commands_take_urls(server, url, tmp_path, cache_options):
    local = server.folder / "bucket" / "plate.parts"
    run("convert", url, tmp_path / "copy.parquet", *cache_options)
    with open_images(tmp_path / "copy.parquet", verify=True) as copy:
        for index, image in enumerate(copy.take(range(12))):
            np.testing.assert_array_equal(image, IMAGES[index])
        assert copy.columns["well"].to_pylist() == [f"A{index // 4}" for index in range(12)]
    reported = json.loads(run("convert", url, tmp_path / "again.arrow", "--json", *cache_options).stdout)
    assert reported["src"] == url
    target, folder = (
        run("stats", path, "--by", "well", "--json", *more) for path, more in ((url, cache_options), (local, []))
    )
    assert {**json.loads(target.stdout), "path": ""} == {**json.loads(folder.stdout), "path": ""}
    run("show", url, "--out", tmp_path / "a.png", "--sample", 4, *cache_options)
    run("show", local, "--out", tmp_path / "b.png", "--sample", 4)
    assert (tmp_path / "a.png").stat().st_size > 0
    with open_images(local) as source:
        cells = pa.table({"image_id": list(source.image_ids), "y": [9.0] * 12, "x": [8.0] * 12})
    pa.csv.write_csv(cells, tmp_path / "cells.csv")
    run("crops", url, tmp_path / "cells.csv", tmp_path / "crops.arrow", "--crop", 7, "--center", "y,x", *cache_options)
    with open_images(tmp_path / "crops.arrow") as crops:
        np.testing.assert_array_equal(crops.read(7), IMAGES[7][..., 6:13, 5:12])
    assert set(asked_for_parts(server).values()) == {1}  # Over all of these commands.


def test_profile_and_recommend_take_urls(server, url, tmp_path, cache_options, monkeypatch):
    monkeypatch.setattr(sample, "_READING_PART", math.inf)  # A busy machine would read fewer images.
    actual = json.loads(run("profile", url, "--seconds", 0.1, "--no-trials", "--json", *cache_options).stdout)
    assert (actual["path"], actual["images"]) == (url, 12)
    words = ["recommend", url, "--formats", "arrow", "--seconds", 1, "--epochs", 1000, *cache_options]
    actual = json.loads(run(*words, "--json", "--bandwidth", "1Gb").stdout)
    assert (actual["path"], actual["looked_at"]["images"]) == (url, 12)
    assert {item["format"] for item in actual["over_link"]["rows"]} == {"arrow"}
    assert "Recommended:" in run(*words).stdout


def test_options_say_how_a_server_is_reached(server, tmp_path, cache_options):
    reach = ["--anonymous", "--endpoint", server.url, "--region", "eu-west-1"]
    actual = json.loads(run("info", "s3://bucket/plate.parts", "--json", *reach).stdout)
    assert (actual["path"], actual["images"]) == ("s3://bucket/plate.parts", 12)
    run("verify", "s3://bucket/plate.parts", *reach)
    storage = Storage(anonymous=True, endpoint=server.url, region="eu-west-1")
    layout, plate = StorageLayout(get_format("arrow")), url_of("s3://bucket/plate.parts")
    command = choices.conversion(plate, tmp_path / "b.arrow", layout, {"storage": storage})
    run(*command.split()[1:], *cache_options)
    options = {"format": "arrow", "storage": storage, "part_cache": str(tmp_path / "cache"), "preload": False}
    code = choices.loading_code(plate, options, {"batch_size": 4})
    names = {}
    exec(code, names)
    assert len(names["dataset"]) == 12
    assert choices.unused_path_near(url_of("s3://bucket/plate.parts"), ".arrow") == Path("plate.arrow")
    assert not (tmp_path / "home").exists()


def test_what_is_wrong_is_told_in_one_line_without_a_secret(server, url, tmp_path, monkeypatch):
    message = run("info", url, "--anonymous", "--profile", "lab", code=1).stderr
    assert "--profile 'lab': conflicts with --anonymous" in message
    for secret in (
        ["s3://key:SECRET@b/a.parts"],
        ["http://h/a.parts?sig=SECRET"],
        [url, "--endpoint", "http://a:SECRET@b"],
    ):
        assert "SECRET" not in run("info", *secret, code=1).stderr
    assert "--endpoint" in run("info", url, "--endpoint", "http://a:SECRET@b", code=1).stderr
    for words in (["--anonymous"], ["--part-cache-bytes", "5"]):
        assert (
            f"{' '.join(words)}: applies only to URLs, not to {tmp_path / 'plate.arrow'}"
            in run("info", tmp_path / "plate.arrow", *words, code=1).stderr
        )
    assert "--region" in run("info", url, "--region", "x", code=1).stderr
    assert MANIFEST in run("info", f"{server.url}/bucket/none.parts", code=1).stderr
    assert "--part-cache-bytes" in run("convert", url, tmp_path / "x.arrow", "--part-cache-bytes", 50, code=1).stderr
    assert "not a number of bytes" in run("info", url, "--part-cache-bytes", "much", code=2).stderr
    server.status = 403
    (tmp_path / "keys").write_text("[lab]\naws_access_key_id=a\naws_secret_access_key=b\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    message = run("verify", url, code=1).stderr
    assert "make it public" in message
    message = run("verify", "s3://bucket/plate.parts", "--endpoint", server.url, "--profile", "lab", code=1).stderr
    assert "or --anonymous for a public bucket" in message
    assert "--profile with another profile" in message
    assert "SECRET" not in message
    monkeypatch.setattr(remote, "_SILENT_S", 0.5)
    server.status = 503
    assert "no data for" in run("info", url, code=1).stderr
    assert not (tmp_path / "x.arrow").exists()


def test_no_command_has_another_option_of_these_names():
    for name in main.list_commands(click.Context(main)):
        command = main.get_command(click.Context(main), name)
        for option in (parameter for parameter in command.params if isinstance(parameter, click.Option)):
            if {"--profile", "--endpoint", "--region", "--anonymous"} & set(option.opts):
                assert option.opts == [f"--{option.name}"]
                assert "Do not sign requests" in option.help or option.name != "anonymous"


def test_options_of_another_server_have_a_prefix():
    @click.command()
    @options.storage_options()
    @options.storage_options("target-")
    def copy(storage, target_storage):
        click.echo(repr((storage, target_storage)))

    words = ["--anonymous", "--target-endpoint", "http://b:1", "--target-profile", "lab"]
    output = CliRunner().invoke(copy, words).stdout
    assert output == f"({Storage(anonymous=True)!r}, {Storage(endpoint='http://b:1', profile='lab')!r})\n"
    assert output == "(Storage(anonymous=True), Storage(endpoint='http://b:1', profile='lab'))\n"
    wrong = CliRunner().invoke(copy, ["--target-endpoint", "b:1"])
    assert (wrong.exit_code, wrong.stderr.split(": expected")[0]) == (1, "error: --target-endpoint")
    assert isinstance(wrong.exception, SystemExit | failures.Failure)


# Verify


def test_verify_asks_the_server_whatever_the_cache_has(server, url, tmp_path, cache_options):
    run("stats", url, *cache_options)
    report = json.loads(run("verify", url, "--json", *cache_options).stdout)
    assert (report["path"], report["images"]) == (url, 12)
    assert set(asked_for_parts(server).values()) == {2}
    assert [part_path.name for part_path in (tmp_path / "cache").iterdir() if part_path.is_dir()] == []
    part = parts_of(server)[2]
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    run("stats", url, *cache_options)
    assert (
        f"{PARTS}/{part.name}: the content does not match the hash" in run("verify", url, *cache_options, code=1).stderr
    )
    assert [part_path.name for part_path in (tmp_path / "cache").iterdir() if part_path.is_dir()] == []


def test_verify_names_what_is_missing_or_cut(server, url):
    part = parts_of(server)[3]
    data = part.read_bytes()
    part.write_bytes(data[:-5])
    message = run("verify", url, code=1).stderr
    assert part.name in message
    assert "bytes, expected" in message
    part.unlink()
    assert f"{part.name}: does not exist" in run("verify", url, code=1).stderr


def test_verify_compares_each_image_too(server, url, tmp_path):
    folder = server.folder / "bucket" / "wrong.parts"
    publish(folder, IMAGES, [12])
    index = pq.read_table(folder / "index.parquet")
    names = index.schema.names
    images = index.column(0).combine_chunks()
    sums = images.field("checksum").to_pylist()
    sums[7] = sums[6]
    fields = [images.type.field(position) for position in range(images.type.num_fields)]
    arrays = [pa.array(sums) if part_path.name == "checksum" else images.field(part_path.name) for part_path in fields]
    table = pa.table([pa.StructArray.from_arrays(arrays, fields=fields), *index.columns[1:]], names=names)
    pq.write_table(table, folder / "index.parquet")
    manifest = json.loads((folder / MANIFEST).read_text())
    hashed = subprocess.check_output(["b2sum", "-l", "128", folder / "index.parquet"], text=True)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "index": hashed.split()[0]}))
    message = run("verify", f"{server.url}/bucket/wrong.parts", code=1).stderr
    assert "image 7 ('id-7') differs from the original" in message


# Cache


def filled(folder, sizes=(40, 40, 40, 40)):
    folder.mkdir(exist_ok=True)
    cache = PartCache(folder, 10**6)
    for age, (name, size) in enumerate(zip(NAMES, sizes, strict=True)):
        cache.acquire(name, size, lambda descriptor, size=size: os.write(descriptor, b"x" * size)).close()
        os.utime(folder / name, (time.time() - 1000 * (len(sizes) - age), (folder / name).stat().st_mtime))
    return cache


def listed(folder, *words, code=0):
    done = run("cache", folder, *words, "--json", code=code)
    return json.loads(done.stdout) if code == 0 else done.stderr


def test_cache_lists_what_is_there_and_what_is_used(tmp_path):
    pinned = filled(tmp_path / "cache").get(NAMES[1])
    listing = listed(tmp_path / "cache")
    assert (listing["bytes"], listing["held_bytes"], listing["removed_bytes"]) == (160, 40, 0)
    assert [(file["name"], file["held"]) for file in listing["parts"]] == [
        (NAMES[1], True), (NAMES[3], False), (NAMES[2], False), (NAMES[0], False)
    ]  # fmt: skip
    pinned.close()
    output = run("cache", tmp_path / "cache").stdout
    assert "4 files, 160 bytes, 0 bytes of it in use" in output
    assert f"{NAMES[0]}  40 bytes" in output
    assert "used 66.7 min ago" in output


def test_cache_leaves_what_is_being_fetched(tmp_path):
    cache, before = filled(tmp_path / "cache"), []
    name = f"00009-{'b' * 32}.arrow"

    def fetch(descriptor):
        before.append(listed(tmp_path / "cache", "--clear"))
        before.append(run("cache", tmp_path / "cache").stdout)
        os.write(descriptor, b"y" * 50)

    pinned = cache.acquire(name, 50, fetch)
    assert pinned.path.read_bytes() == b"y" * 50
    assert [(file["name"], file["held"]) for file in before[0]["parts"]] == [(f".{name}.partial", True)]
    assert before[1].endswith("being fetched\n")
    pinned.close()


def test_cache_is_limited_from_the_oldest_on_and_leaves_what_is_used(tmp_path):
    cache = filled(tmp_path / "cache")
    (tmp_path / "cache" / "notes.txt").write_text("not ours")
    (tmp_path / "cache" / f".{NAMES[2]}.partial").write_bytes(b"x" * 7)  # Left by a killed process.
    assert listed(tmp_path / "cache", "--limit", "120")["removed_bytes"] == 47
    assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == [".lock", *NAMES[1:], "notes.txt"]
    pinned = cache.get(NAMES[1])
    assert {file["name"] for file in listed(tmp_path / "cache", "--limit", "0.1kB")["parts"]} == {NAMES[1], NAMES[3]}
    assert "running processes use 40 bytes" in listed(tmp_path / "cache", "--limit", "30", code=1)
    assert (tmp_path / "cache" / NAMES[1]).exists()
    listing = listed(tmp_path / "cache", "--clear")
    assert [file["name"] for file in listing["parts"]] == [NAMES[1]]
    pinned.close()
    listing = listed(tmp_path / "cache", "--clear")
    assert (listing["bytes"], listing["held_bytes"], listing["removed_bytes"], listing["parts"]) == (0, 0, 40, [])
    assert (tmp_path / "cache" / "notes.txt").read_text() == "not ours"
    assert "pass only one of them" in run("cache", tmp_path / "cache", "--clear", "--limit", "1", code=2).stderr


def test_cache_leaves_what_is_none(server, tmp_path):
    plate = server.folder / "bucket" / "plate.parts"
    before = {entry: entry.read_bytes() for entry in plate.rglob("*") if entry.is_file()}
    (tmp_path / "empty").mkdir()
    for folder in (plate, plate / PARTS, tmp_path / "served"):
        for words in ([], ["--clear"], ["--limit", "0"]):
            assert "files that are not from a part cache" in listed(folder, *words, code=1)
    assert "is not a folder" in listed(tmp_path / "none", "--clear", code=1)
    assert listed(tmp_path / "empty", "--clear")["parts"] == []
    assert list((tmp_path / "empty").iterdir()) == []
    assert {entry: entry.read_bytes() for entry in plate.rglob("*") if entry.is_file()} == before
    content = run("stats", f"{server.url}/bucket/plate.parts", "--part-cache", plate / PARTS, code=1).stderr
    assert "contains the parts of a collection" in content
    (tmp_path / "linked").mkdir()
    filled(tmp_path / "cache")
    (tmp_path / "linked" / ".lock").symlink_to(tmp_path / "cache" / ".lock")
    (tmp_path / "linked" / NAMES[0]).write_bytes(b"theirs")
    assert "files that are not from a part cache" in listed(tmp_path / "linked", "--clear", code=1)
    assert (tmp_path / "linked" / NAMES[0]).exists()


def test_cache_can_be_cleared_beside_a_reader(server, url, tmp_path):
    folder = tmp_path / "cache"
    with subprocess.Popen([sys.executable, "-c", _HOLDER, url, str(folder)], stdin=-1, stdout=-1, text=True) as reader:
        assert reader.stdout.readline() == "held\n"
        with open_images(url, part_cache=folder, part_cache_bytes=2**24) as source:
            source.take(range(12))
        names = {part["name"] for part in listed(folder, "--clear")["parts"]}
        index = next(name for name in names if "index" in name)
        assert names == {index, parts_of(server)[0].name}
        reader.stdin.close()
    assert reader.returncode == 0
    assert listed(folder, "--clear")["parts"] == []
    with open_images(url, part_cache=folder, part_cache_bytes=2**24) as source:
        np.testing.assert_array_equal(source.read(11), IMAGES[11])


def test_cache_is_the_default_one_if_none_is_named(server, url, tmp_path):
    run("stats", url)
    listing = json.loads(run("cache", "--json").stdout)
    assert listing["path"] == str(tmp_path / "home" / "omearrow_ds" / "parts")
    assert len(listing["parts"]) == len(parts_of(server)) + 1
    assert Path(listing["path"]).stat().st_mode & 0o077 == 0


def test_a_bucket_to_bucket_copy_has_one_server_unless_another_is_named(server, tmp_path):
    src, dst = url_of("s3://a/x.parts"), url_of("s3://b/y.parts")
    of_source, of_target = Storage(anonymous=True, endpoint=server.url), Storage(region="x")
    # Writing requires signed requests.
    assert target_storage(src, dst, of_source, None) == Storage(endpoint=server.url)
    assert target_storage(src, url_of("gs://b/y.parts"), of_source, None) is None
    assert target_storage(src, dst, None, None) is None
    assert target_storage(src, dst, of_source, of_target) == of_target
    reach = ["--endpoint", server.url, "--region", "eu-west-1"]
    server.requests.clear()
    message = run("convert", tmp_path / "plate.arrow", "s3://other/c.parts", *reach, code=1).stderr
    assert f"--endpoint {server.url} --region eu-west-1: only valid for a source URL" in message
    assert not server.requests
    message = run(
        "convert", tmp_path / "plate.arrow", tmp_path / "c.parts", "--target-endpoint", server.url, code=1
    ).stderr
    assert f"--target-endpoint {server.url}: applies only to URLs, not to {tmp_path / 'c.parts'}" in message


def test_a_target_that_cannot_be_reached_names_its_option(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_UNHEARD_S", {"refused": 0.2})
    reach = ["--target-endpoint", "http://127.0.0.1:9", "--target-anonymous"]
    errors = run("convert", tmp_path / "plate.arrow", "s3://other/b.parts", *reach, code=1).stderr
    assert "http://127.0.0.1:9 cannot be reached" in errors
    assert "pass --target-endpoint, or set AWS_ENDPOINT_URL" in errors


def test_the_command_printed_after_a_share_publishes_and_may_be_run_again(tmp_path, server):
    path = tmp_path / "b.parts"
    output = run("convert", tmp_path / "plate.arrow", path, "--task", "1/1").stdout
    assert "1 of 1 part is written" in output
    words = output.partition("publish it: omearrow-ds ")[2].split()
    assert "12 images" in run(*words).stdout
    assert "is published already; 12 images" in run(*words).stdout
    _, (line,) = describe_share(path, (1, 1), Storage(endpoint=server.url), 1.0)
    assert line.endswith(f"omearrow-ds publish {path} --endpoint {server.url}")
    (next((path / PARTS).iterdir())).unlink()
    message = run("info", path, code=1).stderr
    assert "does not exist" in message
    assert "changed" not in message


@pytest.mark.filterwarnings("default")
def test_convert_warns_when_file_names_suggest_channels_and_pattern_is_missing(tmp_path):
    (tmp_path / "plate").mkdir()
    for channel in ("DAPI", "GFP"):
        tifffile.imwrite(tmp_path / "plate" / f"B07_01_1_1_{channel}_001.tif", np.zeros((8, 8), np.uint8))
    stderr = run("convert", tmp_path / "plate", tmp_path / "a.arrow").stderr
    assert "names suggest 1 field x 2 channels" in stderr
    assert stderr.endswith("pass --pattern 'cytation'\n")
    assert not run("convert", tmp_path / "plate", tmp_path / "b.arrow", "--pattern", "cytation").stderr


def test_one_file_at_a_url_is_told_to_be_copied_as_one(tmp_path, server):
    errors = run(
        "crops", tmp_path / "plate.arrow", "s3://b/cells.csv", tmp_path / "c.arrow", "--crop", 4, code=1
    ).stderr
    assert "(aws s3 cp s3://b/cells.csv ...)" in errors


def test_masks_at_a_url_are_reached_as_the_images_are(server):
    storage = Storage(anonymous=True, endpoint=server.url, region="x")
    with open_images("s3://bucket/plate.parts", storage=storage) as source:
        images, options = source.images, {"storage": storage}
        _, mask_of = open_masks(images, "s3://bucket/plate.parts", options, skip_nulls=False)
        assert mask_of.tolist() == list(range(12))
        masks, _ = open_masks(images, {"path": "s3://bucket/plate.parts"}, options, skip_nulls=False)
        np.testing.assert_array_equal(masks.read([3])[0], IMAGES[3])
        with raises(ArgumentError, option="masks", path="s3://bucket/masks/{field}.tif"):
            open_masks(images, "s3://bucket/masks/{field}.tif", options, skip_nulls=False)
