"""The report in a browser: headless Chromium, from PATH or from the environment variable CHROMIUM."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks.report.__main__ import main
from tests.benchmarks.test_report import colours, store, write
from tests.support.html_page import parse

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
QUIET = ("--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update")
QUIET += ("--disable-sync", "--disable-extensions", "--hide-scrollbars", "--virtual-time-budget=5000")
WIDE, PHONE = 1200, 360
# A copy of the report has a policy that allows a script, which measures the page.
PROBE = """<script>addEventListener("load", () => {
  document.querySelectorAll("details").forEach(each => each.open = true);
  const shown = each => each.getBoundingClientRect().height > 0;
  const outside = each => each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".scroll");
  parent.postMessage(JSON.stringify({
    width: innerWidth, needed: document.documentElement.scrollWidth,
    outside: [...document.querySelectorAll("body *")].filter(outside).map(each => each.outerHTML.slice(0, 200)),
    images: [...document.images].filter(each => each.complete && each.naturalWidth && shown(each)).length,
    tables: [...document.querySelectorAll("table")].filter(shown).length,
    charts: [...document.querySelectorAll("svg")].filter(shown).length,
  }), "*")})</script></body>"""
# A window cannot be as narrow as a phone; a frame can.
FRAMES = """<!doctype html><title>[]</title>
<script>
const texts = [];
addEventListener("message", event => { texts.push(event.data); document.title = `[${texts}]`; });
</script>""" + "".join(f'<iframe src="probed.html" width="{width}" height="2000"></iframe>' for width in (WIDE, PHONE))

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} on PATH, and CHROMIUM names none"),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    write(folder)
    for number in (1, 2, 3):
        store(folder / "stored", number, number * 1e-3)
    assert main([str(folder), "--history", str(folder / "stored")]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    probed = text.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';", 1)
    (folder / "probed.html").write_text(probed.replace("</body>", PROBE), encoding="utf-8")
    return folder


def browse(page, *words):
    """Open a page; return its elements after loading, and the lines of its console."""
    words = [CHROMIUM, "--headless", *QUIET, *words, "--enable-logging=stderr", page.as_uri()]
    if os.geteuid() == 0:
        words.insert(1, "--no-sandbox")  # root needs this option.
    profile = page.with_name("profile")
    try:
        done = subprocess.run(
            [*words[:-1], f"--user-data-dir={profile}", words[-1]],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    finally:
        shutil.rmtree(profile, ignore_errors=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_the_page_is_whole_and_the_console_silent(folder):
    text, console = browse(folder / "report.html", "--dump-dom")
    assert console == []
    source, rendered = parse((folder / "report.html").read_text(encoding="utf-8")), parse(text)
    for tag in ("table", "tr", "td", "img", "svg", "section", "details"):
        assert len(rendered.all(tag)) == len(source.all(tag)) > 0


def test_the_policy_refuses_what_is_not_inside_the_page(folder):
    page = folder / "fetching.html"
    page.write_text((folder / "report.html").read_text().replace("</main>", '<img src="other.png" alt=""></main>'))
    _, console = browse(page, "--dump-dom")
    assert any("Content Security Policy" in line for line in console)


def test_everything_is_drawn_and_nothing_is_wider_than_the_screen(folder):
    frames = folder / "frames.html"
    frames.write_text(FRAMES)
    text, console = browse(frames, "--dump-dom", "--window-size=1400,2200")
    assert console == []
    screens = json.loads(
        re.search("<title>(.*?)</title>", text, re.DOTALL)[1].replace("&lt;", "<").replace("&gt;", ">")
    )
    page = parse((folder / "report.html").read_text(encoding="utf-8"))
    assert {measured["width"] for measured in screens} == {WIDE, PHONE}
    for measured in screens:
        assert measured.pop("needed") <= measured.pop("width")
        assert measured == {
            "outside": [],
            "images": len(page.all("img")),
            "tables": len(page.all("table")),
            "charts": len(page.all("svg")),
        }


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_light_or_dark_as_its_reader_prefers(folder, dark):
    shot = folder / f"{'dark' if dark else 'light'}.png"
    words = ("--blink-settings=preferredColorScheme=0",) if dark else ()
    _, console = browse(folder / "report.html", f"--screenshot={shot}", f"--window-size={WIDE},800", *words)
    assert console == []
    style = parse((folder / "report.html").read_text(encoding="utf-8")).one("style").text
    paper = colours(style.partition("@media (prefers-color-scheme: dark)")[2 if dark else 0])["paper"]
    pixels = (imread(shot)[..., :3] * 255).round().astype(np.uint8)
    assert "#" + bytes(pixels[5, 5]).hex() == paper
    assert len(np.unique(pixels[::2, ::2].reshape(-1, 3), axis=0)) > 50  # The page has text and figures.
