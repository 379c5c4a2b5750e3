"""Windows made by torch operations and by the Triton kernel equal NumPy's bit for bit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omearrow_ds.axes import AXES, SampleAxes
from omearrow_ds.dataset.crop_boxes import CropWindows
from omearrow_ds.dataset.cuda import device_cropper, triton_kernel_works
from omearrow_ds.dataset.windows import DeviceScaling, SampleLayout, crop_with_torch, kernel_layout
from omearrow_ds.kernels.crops import PADS, crops
from omearrow_ds.kernels.scaling import Scaling
from omearrow_ds.kernels.stacks import Stacks
from tests.support.devices import CUDA, examples
from tests.support.errors import warns
from tests.support.strategies import DTYPES, image_of

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton checks this variable when it is imported.
DEVICES = [
    pytest.param("cpu", id="stand-in"),
    pytest.param("cuda", marks=CUDA),
]
PICKS = {
    "T": [slice(None), [0]],
    "C": [slice(None), slice(None, None, -1), [1, 0], [0, 1, 1]],
    "Z": [slice(None), slice(None, None, -1), [0]],
    "Y": [slice(None), slice(None, None, -1), slice(1, None, 2)],
    "X": [slice(None), slice(None, None, -1), slice(0, -1)],
}
OUT_OF_ORDER = {"Y": [[0, 2, 1]], "X": [[1, 1, 0]]}


@st.composite
def cases(draw, picks):
    """Draw stored fields, windows of a cut of them, and a kind of scaling."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 3), st.integers(1, 2)))
    size = draw(st.tuples(st.integers(3, 7), st.integers(3, 20)))
    dtype = draw(st.sampled_from(DTYPES))
    stack = np.stack([image_of((*shape[1:], *size), dtype, number) for number in range(shape[0])])
    if dtype.kind != "f":
        stack.flat[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    select = {axis: draw(st.sampled_from(picks[axis])) for axis in picks}
    cut = SampleAxes(AXES, select).cut(stack.shape[1:], "a case")
    axes = draw(st.permutations(AXES).map("".join))
    window = draw(st.one_of(st.none(), st.tuples(st.integers(1, 9), st.integers(1, 25))))
    count = draw(st.integers(1, 5))
    fields = draw(st.lists(st.integers(0, shape[0] - 1), min_size=count, max_size=count))
    corners = draw(st.lists(st.tuples(st.integers(-12, 12), st.integers(-30, 30)), min_size=count, max_size=count))
    how = draw(st.sampled_from(["kept", "floating", "divided", "mean", "low", "lit", "lit and mean"]))
    if how == "floating" and dtype.kind != "f":
        how = "divided"
    return stack, cut, axes, window, fields, corners, how, draw(st.sampled_from(PADS))


def scaling_of(how, dtype, shape, number=0):
    """Return the divisor of pixels as `omearrow_ds.dataset.normalization` defines it."""
    if how in ("kept", "floating"):
        return None
    if how == "divided":
        return np.float32(np.iinfo(dtype).max) if dtype.kind != "f" else np.float32(1)
    channels = np.arange(shape[1], dtype=np.float32)[None, :, None, None, None] + number
    illumination = 1 + np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 7 if "lit" in how else None
    pair = (None, np.float32(3)) if how == "lit" else (channels / 3 + 1, channels + 2.5)
    pair = tuple(None if part is None else np.broadcast_to(part, shape) for part in pair)
    return Scaling(illumination, *pair, clip=how == "low")


def expected_of(stack, cut, axes, window, corners, divisors, groups, pad, dtype):
    """Return windows made one by one by the CPU loops."""
    fields = cut(stack)
    size = window or fields.shape[-2:]
    windows = []
    for field, top, left in corners:
        divisor = divisors[0 if groups is None else groups[field]]
        out = np.empty((1, *fields.shape[1:4], *size), dtype)
        crops(Stacks([fields]), np.array([[field], [top], [left]]), out, divisor, pad)
        windows.append(out[0].transpose([AXES.index(axis) for axis in axes]))
    return np.stack(windows)


def checked(case, device, write):
    """Compare the output of ``write`` on a device with the CPU's, bit for bit."""
    stack, cut, axes, window, fields, corners, how, pad = case
    several = len(stack) > 1 and how not in ("kept", "floating", "divided")
    divisors = [scaling_of(how, stack.dtype, cut.lengths, number) for number in range(1 + several)]
    groups = np.arange(len(stack)) % 2 if several else None
    locations = np.array(
        [(field, *(corner if window else (0, 0))) for field, corner in zip(fields, corners, strict=True)]
    )
    dtype = stack.dtype if how == "kept" else np.dtype(np.float32)
    expected = expected_of(stack, cut, axes, window, locations.tolist(), divisors, groups, pad, dtype)
    steps = np.array(stack.strides[1:]) // stack.itemsize
    crops_of_size = None if window is None else CropWindows(np.zeros((3, 1)), np.reshape(window, (2, 1)), pad)
    layout = SampleLayout.of(stack.shape[1:], steps.tolist(), cut, axes, crops_of_size)
    source = torch.from_numpy(stack).to(device).reshape(-1)
    scales = DeviceScaling.of(divisors, groups, cut.lengths, torch.from_numpy(expected).dtype, torch.device(device))
    if window is None:
        positions, boxes = torch.tensor(fields, device=device), None
    else:
        more = np.concatenate([locations, locations[:1] + 1])  # One window that is not requested.
        positions = torch.tensor(list(range(len(locations))), device=device)
        boxes = torch.from_numpy(more).to(device)
    out = torch.full(expected.shape, 7, dtype=torch.int64).to(scales.dtype).to(device)
    write(source, out, layout, scales, positions, boxes)
    assert out.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=examples(100))
@given(data=st.data())
def test_torch_makes_the_bits_of_the_cpu(device, data):
    picks = {axis: PICKS[axis] + OUT_OF_ORDER.get(axis, []) for axis in PICKS}
    checked(data.draw(cases(picks)), device, crop_with_torch)


def test_a_layout_counts_pixels():
    """The layout's pixel offsets equal NumPy's indexing."""
    stack = np.arange(2 * 3 * 4 * 5 * 6).reshape(1, 2, 3, 4, 5, 6)
    cut = SampleAxes(AXES, {"C": [2, 0], "Y": slice(None, None, -2), "X": [4, 1]}).cut(stack.shape[1:], "")
    layout = SampleLayout.of(stack.shape[1:], np.array(stack.strides[1:]) // 8, cut, "XCTYZ")
    actual = layout.planes[:, 0][:, None, None] + layout.rows[:, None] + layout.columns
    expected = cut(stack)[0]
    assert actual.reshape(expected.shape).tolist() == expected.tolist()
    assert layout.shape == expected.transpose(4, 1, 0, 3, 2).shape
    into = layout.planes[:, 1][:, None, None] + np.arange(3)[:, None] * layout.steps[3] + np.arange(2) * layout.steps[4]
    assert sorted(into.ravel().tolist()) == list(range(expected.size))
    plan = kernel_layout(layout, torch.device("cpu"))
    assert (plan.steps, plan.is_whole) == ([-12, -3], False)
    assert kernel_layout(SampleLayout.of_samples((2, 3, 4, 5, 6), "TCZYX"), torch.device("cpu")).is_whole


def test_no_windows_are_no_samples():
    layout = SampleLayout.of_samples((1, 4, 5), "CYX")
    make = device_cropper(layout, DeviceScaling(torch.float32, torch.tensor([[[0.0, 2.0]]])), torch.device("cpu"))
    assert make(torch.zeros(0), 0).shape == (0, 1, 4, 5)
    assert make(torch.arange(40, dtype=torch.uint8), 2).ravel().tolist() == [n / 2 for n in range(40)]


def test_no_kernel_is_asked_for_on_the_cpu():
    assert triton_kernel_works(torch.device("cpu")) is False


def test_where_triton_is_not_torch_makes_samples(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "omearrow_ds.dataset.windows_kernel", raising=False)
    with warns(UserWarning, mentions=("Triton", "cuda:77")):
        assert not triton_kernel_works(torch.device("cuda", 77))


@pytest.mark.skipif(not INTERPRETED, reason="Triton is interpreted where TRITON_INTERPRET=1 asks for it")
@settings(deadline=None, max_examples=examples(40))
@given(case=cases(PICKS))
def test_the_interpreted_kernel_makes_the_bits_of_the_cpu(case):
    from omearrow_ds.dataset.windows_kernel import launch

    def write(source, out, layout, *windows):
        launch(source, out, layout, *windows, kernel_layout(layout, torch.device("cpu")))

    checked(case, "cpu", write)


@pytest.mark.skipif(not INTERPRETED, reason="Triton is interpreted where TRITON_INTERPRET=1 asks for it")
def test_the_interpreted_kernel_passes_its_trial():
    from omearrow_ds.dataset.windows_kernel import works

    assert works(torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.skipif(INTERPRETED, reason="this is the process that interprets it")
def test_the_kernel_interpreted():
    """Run in a new process: Triton decides at import whether to compile or to interpret."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "interpreted_kernel"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout + done.stderr


@CUDA
@settings(deadline=None, max_examples=examples(60))
@given(case=cases(PICKS))
def test_the_compiled_kernel_makes_the_bits_of_the_cpu(case):
    pytest.importorskip("triton")
    from omearrow_ds.dataset.windows_kernel import launch

    assert triton_kernel_works(torch.device("cuda", 0))

    def write(source, out, layout, *windows):
        launch(source, out, layout, *windows, kernel_layout(layout, source.device))

    checked(case, "cuda:0", write)


@pytest.mark.skipif(INTERPRETED, reason="it is interpreted here")
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("how", ["kept", "floating", "divided"])
def test_the_kernel_is_compiled_for_a_device_that_is_not_here(how, placed, tmp_path, monkeypatch):
    """To machine code of sm_90: a compiler may reject code that the interpreter accepts."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from omearrow_ds.dataset.windows_kernel import _windows

    names, result_type = _windows.arg_names, "u16" if how == "kept" else "fp32"
    kinds = ["*u16", f"*{result_type}", "*i64", "*i64", "*i64", "*i64", "*fp32", "*fp32", "i32", "i32"]
    side = 64 if placed else 512  # Out of fields of 3 x 512 x 512.
    values = [3, 512, 512, side, side, 512, 1, side, 1, 16, 16, 2, True, not placed, 1024]
    fixed = dict(zip(names[10:], values, strict=True))
    fixed |= {} if placed else dict.fromkeys(["boxes", "groups", "illumination"])
    fixed |= {} if how == "divided" else {"factors": None}
    types = {name: "constexpr" if name in fixed else kind for name, kind in zip(names, kinds + names[10:], strict=True)}
    aligned = {(number,): [["tt.divisibility", 16]] for number in range(10) if names[number] not in fixed}
    source = ASTSource(_windows, types, {(names.index(name),): value for name, value in fixed.items()}, aligned)
    code = compiled(source, GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False}).asm["ptx"]
    assert ("div.rn.f32" in code) == (how == "divided")
    assert not any(word in code for word in ("div.full", "div.approx", "rcp.", "fma.rn.f32", ".ftz"))
    assert ("ld.global.v4.b32" in code) == (not placed)  # Loads of 16 bytes of pixels.
