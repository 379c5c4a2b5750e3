"""The plots: the position of every format, units on the axes, and no overlaps."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.image import imread

from benchmarks.report.plots import colours, draw, figure
from benchmarks.tracks import TRACKS
from benchmarks.tracks.stages import STAGES
from tests.benchmarks.test_results import CONTEXT, LABELS, RANDOM, bench, gone, of_track_9, tidy

SPEED = dict(zip(LABELS, (62e-6, 9e-3, 4e-4, 1.7e-3, 9.5e-3, 9e-6, 10e-6, 1e-4, 1.1e-4), strict=True))
PARAMETERS = {
    0: [{"encoding": encoding, "size_bytes": 10**7, "raw_bytes": 2 * 10**7} for encoding in ("bytes", "list")],
    1: [
        {**RANDOM, "access": access, "order": order}
        for access in ("on_demand", "preloaded")
        for order in ("random", "b")
    ],
    2: [
        {"batch_size": 16, "workers": n, "access": "on_demand", "images": 48, "first_batch_ms": 1.0} for n in (0, 2, 4)
    ],
    3: [{"access": access, "device": "cpu", "images": 48} for access in ("on_demand", "preloaded")],
    4: [{"alone": {"from_numpy_p50_us": 0.9, "copy_p50_us": 8.0, "batch_p50_us": 0.06}}],
    5: [{"access": access, "images": 48} for access in ("on_demand", "preloaded")],
    6: [
        {"sample": sample, "access": access, "batch_size": 64}
        for sample in ("crop", "mask")
        for access in ("on_demand", "preloaded")
    ],
}
OPERATIONS = {
    0: ("write", "preload", "preload_cold"),
    1: ("getitem", "first_touch", "first_touch_cold"),
    2: ("load",),
    3: ("train", "inference"),
    4: ("sample",),
    5: ("epoch", "preload"),
    6: ("cells",),
}


def table_of(track, absent=("lance",)):
    """Return a track's table with every format except those that are missing."""
    finished, missing = [], []
    for operation in OPERATIONS[track]:
        for name, speed in SPEED.items():
            if name in absent:
                missing.append(gone(track, operation, name))
                continue
            data = [speed, 2 * speed, 1.5 * speed]
            per_round = {3: {"wait_s": [speed * 0.4] * 3}, 4: {"numpy_s": [speed * 0.9] * 3}}.get(track, {})
            if operation == "epoch":
                per_round = {"stage_s": {stage: [speed * (index + 1)] * 3 for index, stage in enumerate(STAGES)}}
            elif track == 5:
                pays = None if name == "arrow" else 3
                per_round = {"on_demand_s": [speed] * 3, "preloaded_s": [speed / 2] * 3, "break_even_epochs": pays}
            finished += [bench(track, operation, data, name, **extra, **per_round) for extra in PARAMETERS[track]]
    if track == 4:
        finished += [
            bench(4, "convert", [1e-6, 3e-6], "memory", dtype=dtype, how=how)
            for dtype in ("float16", "float32", "uint8", "int8")
            for how in ("from_numpy", "copy", "batch")
        ]
    return tidy(finished, missing)[track]


def laid_out(drawn):
    """Return a figure after its layout is computed, which takes half of the time of drawing."""
    FigureCanvasAgg(drawn)
    drawn.draw_without_rendering()
    return drawn


@cache
def drawn_of(track):
    """Return a track's figure, laid out, which tests must not change."""
    return laid_out(figure(track, table_of(track), CONTEXT))


def texts(axes):
    return [text.get_text() for text in axes.texts]


def of_formats(drawn):
    return [axes for axes in drawn.axes if len(axes.get_yticks()) == len(LABELS)]


def test_any_number_of_formats_has_colours_that_differ():
    names = [*LABELS, *map(str, range(40))]
    assert list(colours(names)) == names
    assert len(set(colours(names).values())) == len(names)
    assert list(colours(LABELS).items()) == list(colours(names).items())[: len(LABELS)]  # more formats change none


@pytest.mark.parametrize("track", [0, pytest.param(1, marks=pytest.mark.slow), 9])
def test_a_ninth_format_has_its_place_and_a_track_without_panels_is_drawn(track):
    labels = {**LABELS, "papyrus": "Papyrus", "clay": "Clay tablets"}
    if track == 9:
        table = tidy(*of_track_9(), labels)[9]
    else:
        extra = {"encoding": "bytes"} if track == 0 else RANDOM
        operations = ("write", "preload", "preload_cold") if track == 0 else ("getitem",)
        measured = [bench(track, name, [1.0], "papyrus", **extra) for name in operations]
        table = tidy(measured, [], labels)[track]
    drawn = laid_out(figure(track, table, CONTEXT))
    for axes in drawn.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == list(labels.values())
        assert "not run" in texts(axes)
    shade = colours(labels)["papyrus"]
    assert any(to_hex(line.get_color()) == shade for line in drawn.axes[0].lines)
    assert_no_text_over_another(drawn)


@pytest.mark.parametrize("track", range(len(TRACKS)))
@pytest.mark.share(4, "track")
def test_panels_title_units_the_fixed_order_of_formats_and_no_text_over_another(track):
    drawn = drawn_of(track)
    assert_no_text_over_another(drawn)
    assert len(drawn.axes) == len(TRACKS[track].panels)
    assert drawn.get_suptitle().startswith(f"Track {track}: ")
    assert drawn.get_suptitle().endswith(CONTEXT["workload"])
    for axes in drawn.axes:
        assert axes.get_title(loc="left")
        assert any(
            unit in axes.get_xlabel()
            for unit in ("(ms)", "(us)", "(MB)", "(samples/s)", "(images/s)", "(crops/s)", "(% of", "(%;", "(epochs)")
        )
    assert of_formats(drawn)
    for axes in of_formats(drawn):
        assert [label.get_text() for label in axes.get_yticklabels()] == list(LABELS.values())
        assert any(text.startswith("missing: pylance") for text in texts(axes))


def assert_no_text_over_another(drawn):
    renderer = drawn.canvas.get_renderer()
    for axes in drawn.axes:
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes._left_title, *axes.texts]
        legend = axes.get_legend()
        low, high = sorted(axes.get_xlim())
        outside = {
            label
            for position, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
            if not low <= position <= high
        }
        visible = [
            text
            for text in [*ticks, *(legend.get_texts() if legend else ())]
            if text.get_text() and text not in outside
        ]
        boxes = [text.get_window_extent(renderer) for text in visible]
        for (one, a), (two, b) in combinations(zip(visible, boxes, strict=True), 2):
            assert not a.overlaps(b), f"{one.get_text()!r} lies over {two.get_text()!r}"
        assert all(box.x0 >= 0 and box.y0 >= 0 for box in boxes)


@pytest.mark.parametrize("track", range(len(TRACKS)))
@pytest.mark.share(2, "track")
def test_without_a_row_every_format_is_not_run(track):
    drawn = figure(track, tidy([], [])[track], {})
    assert all(texts(axes) == ["not run"] * len(axes.get_yticks()) for axes in drawn.axes)


# The file does not depend on the track; track 6 has the fewest panels.
@pytest.mark.parametrize("track", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in range(len(TRACKS)) if n != 6)])
def test_png_is_a_picture(track, tmp_path):
    path = tmp_path / "any.tmp"
    draw(track, table_of(track), path, CONTEXT)
    assert path.stat().st_size > 20_000
    pixels = imread(path, format="png")
    assert min(pixels.shape[:2]) > 600
    assert pixels.std() > 0.05


def test_log_scale_where_the_span_needs_it():
    throughput = figure(1, table_of(1), CONTEXT).axes[0]
    assert throughput.get_xscale() == "log"
    near = tidy([bench(1, "getitem", [speed], name, **RANDOM) for name, speed in (("arrow", 1), ("tiff", 2))], [])[1]
    throughput = figure(1, near, CONTEXT).axes[0]
    assert (throughput.get_xscale(), throughput.get_xlim()[0]) == ("linear", 0)
    assert texts(throughput) == ["not run"] * (len(LABELS) - 2)


def test_marks_lie_at_their_values_in_their_colours():
    latency = figure(1, table_of(1, absent=()), CONTEXT).axes[1]
    marks = {(line.get_marker(), to_hex(line.get_color()).upper()): line.get_xdata()[0] for line in latency.lines}
    for name, speed in SPEED.items():
        colour = colours(LABELS)[name].upper()
        assert marks["o", colour] == pytest.approx(1.5e3 * speed)
        assert ("^", colour) not in marks  # Three rounds have no p99.


def test_a_failed_configuration_is_named_beside_those_that_worked():
    failed = gone(0, "preload", "vortex", "failed", "boom", encoding="list")
    table = tidy(
        [bench(0, "preload", [1.0], "vortex", encoding="bytes"), bench(0, "preload", [1.0], encoding="list")], [failed]
    )
    assert "list: failed" in texts(figure(0, table[0], CONTEXT).axes[0])


def test_what_is_in_memory_has_places_of_its_own_beside_formats_or_alone():
    *beside, alone = figure(4, table_of(4), CONTEXT).axes
    assert [label.get_text() for label in alone.get_yticklabels()] == ["float16", "float32", "uint8", "int8"]
    in_memory = bench(4, "sample", [1e-5] * 3, "memory", numpy_s=[1.1e-5] * 3)
    drawn = laid_out(figure(4, tidy([bench(4, "sample", [1e-5] * 3, numpy_s=[1.1e-5] * 3), in_memory], [])[4], CONTEXT))
    assert [label.get_text() for label in drawn.axes[0].get_yticklabels()] == [*LABELS.values(), "in memory"]
    assert "-10.0" in texts(drawn.axes[1])
    assert_no_text_over_another(drawn)
    assert len(beside) == 5


def test_a_result_without_data_says_so():
    table = tidy([bench(1, "getitem", [1.0], **RANDOM) | {"stats": {}}], [])[1]
    assert texts(figure(1, table, CONTEXT).axes[0]).count("no data") == 1


def test_headline_falls_back_to_what_was_run():
    table = tidy([bench(1, "getitem", [1.0], **RANDOM | {"order": "sequential", "access": "preloaded"})], [])[1]
    throughput, latency, *_ = figure(1, table, CONTEXT).axes
    assert throughput.get_title(loc="left") == "Throughput · sequential · normalize"
    assert latency.get_title(loc="left") == "Latency · preloaded · sequential · normalize"
