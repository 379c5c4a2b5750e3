"""Tests that need a GPU, and costs of samples there, compared with ceilings of the same run.

``make cuda`` (``python -m benchmarks.support.cuda``) takes at most 8 minutes and needs neither network nor a virtual
environment. It reports missing requirements, and writes ``results/cuda.md`` and ``.json``. ``--rehearse`` runs the same
steps on the CPU with few and small images, and writes nothing: its figures are meaningless.

Ceilings are copies by torch: from a pinned tensor to the device, and from one tensor on the device to another. Their
bytes are counted read and written, as for a batch: stored pixels are read, samples are written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("numpy", "pyarrow", "torch", "click", "cloudpickle", "filelock", "psutil", "tqdm", "xxhash")
TESTERS = ("pytest", "hypothesis", "pandas", "tifffile")
BESIDE = ("triton", "numba", "torchvision", "nvidia.dali", "pytest_timeout")
TESTS = (
    "tests/unit/dataset/test_windows.py",
    "tests/unit/dataset/test_cuda.py",
    "tests/unit/loader/test_device.py",
    "tests/unit/loader/test_settings.py",
)
_SEED = 42
_ROUND_S, _ROUNDS = 0.3, 5


@dataclass(frozen=True)
class Figure:
    """Named figure with its unit and target; without a value, ``note`` states the reason."""

    name: str
    value: float | None
    unit: str
    target: str = ""
    note: str = ""


@dataclass(frozen=True)
class Sizes:
    """Number of images per side length, batch size, and sizes of copies, crops and training steps."""

    images: dict[int, int]
    batch: int
    copied_bytes: int
    crop: int
    steps: int


FULL = Sizes({512: 1024, 100: 10_000}, 256, 2**28, 64, 30)
SMALL = Sizes({48: 24, 20: 40}, 8, 2**20, 8, 2)


def missing(names: tuple[str, ...]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # The parent package is not installed.
        return False


class Bench:
    """Measurements on one device; figures begun after the deadline (of `monotonic`) are noted as out of time."""

    def __init__(self, device: str, sizes: Sizes, folder: Path, deadline_s: float) -> None:
        import torch  # noqa: PLC0415  # Missing packages are reported before.

        self.device, self.sizes, self._folder, self._deadline_s = torch.device(device), sizes, folder, deadline_s
        self.figures: list[Figure] = []
        self._paths: dict[int, Path] = {}
        self._round_s = _ROUND_S if self.device.type == "cuda" else 0.01

    def add(self, name: str, unit: str, measure: Callable[[], float], target: str = "", note: str = "") -> float | None:
        """Measure and record a figure. Return its value, or None if the time is up."""
        if monotonic() > self._deadline_s:
            self.figures.append(Figure(name, None, unit, target, "out of time"))
            return None
        value = measure()
        self.figures.append(Figure(name, value, unit, target, note))
        print(f"{name}: {value:,.4g} {unit}", flush=True)
        return value

    def ratio(self, name: str, over: float | None, under: float | None, target: str) -> None:
        """Record the ratio ``over / under``."""
        value = None if over is None or not under else over / under
        self.figures.append(Figure(name, value, "x", target, "" if value is not None else "not measured"))

    def wait(self) -> None:
        """Synchronize with the device."""
        import torch  # noqa: PLC0415

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def best_s(self, act: Callable[[], object], units: int = 1) -> float:
        """Return seconds per unit of the fastest round of calls; each round ends with a device synchronization."""
        act()
        self.wait()
        start = perf_counter()
        act()
        self.wait()
        calls = max(1, int(self._round_s / max(perf_counter() - start, 1e-6)))
        seconds_per_unit = []
        for _ in range(_ROUNDS):
            start = perf_counter()
            for _ in range(calls):
                act()
            self.wait()
            seconds_per_unit.append((perf_counter() - start) / (calls * units))
        return min(seconds_per_unit)

    def path(self, side: int) -> Path:
        """Return the collection of distinct square images with this side length, created on the first call."""
        import numpy as np  # noqa: PLC0415

        from omearrow_ds import write_images  # noqa: PLC0415

        if side not in self._paths:
            noise = np.random.default_rng(_SEED).integers(0, 2**16, (2 * side, side), np.uint16)
            first = (noise[number % side :][:side] ^ np.uint16(number) for number in range(self.sizes.images[side]))
            self._paths[side] = self._folder / f"{side}.arrow"
            write_images(first, self._paths[side], checksum=False)
        return self._paths[side]


def measure(bench: Bench) -> None:
    """Measure all figures of this module except the tests."""
    link, memory = _ceilings(bench)
    large, small = bench.sizes.images
    _resident(bench, large, memory, small=False)
    _resident(bench, small, memory, small=True)
    _streamed(bench, large, link)
    _crops(bench, large)
    for preload in ("cuda", True, False):
        _model_loop(bench, small, preload)


def _ceilings(bench: Bench) -> tuple[float | None, float | None]:
    """Return GB/s of a pinned copy to the device, and of a copy on the device (bytes read plus bytes written)."""
    import torch  # noqa: PLC0415

    size = bench.sizes.copied_bytes
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    on_device, other_on_device = (torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    pageable = torch.zeros(size, dtype=torch.uint8)

    def rate(act: Callable[[], object], counted: int) -> Callable[[], float]:
        return lambda: counted / bench.best_s(act) / 1e9

    bench.add("copy to the device, pageable memory", "GB/s", rate(lambda: on_device.copy_(pageable), size))
    link = bench.add(
        "ceiling: copy to the device, pinned memory",
        "GB/s",
        rate(lambda: on_device.copy_(pinned, non_blocking=True), size),
    )
    return link, bench.add(
        "ceiling: copy on the device", "GB/s", rate(lambda: other_on_device.copy_(on_device), 2 * size)
    )


def _resident(bench: Bench, side: int, memory: float | None, *, small: bool) -> None:
    """Measure batches of pixels stored on the device, by our loader there and on the CPU, and by float32 indexing."""
    import torch  # noqa: PLC0415

    from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset  # noqa: PLC0415

    size, path, label = bench.sizes.batch, bench.path(side), f"batch of {bench.sizes.batch} of {side} x {side}"
    start = perf_counter()
    dataset = OMEArrowDataset(path, preload="cuda", max_bytes=2**36)
    bench.wait()
    seconds = perf_counter() - start
    bench.add(f"preload='cuda', {side} x {side}", "GB/s", lambda: dataset.nbytes / seconds / 1e9)
    cpu = OMEArrowDataset(path)
    order = torch.randperm(len(cpu), generator=torch.Generator().manual_seed(_SEED))[:size]
    batch = torch.stack(dataset.__getitems__(order.tolist()))
    assert torch.equal(batch.cpu(), torch.stack(cpu.__getitems__(order.tolist()))), "other pixels than the CPU's"
    counted = batch.numel() * (2 + 4)

    def epochs(data: Any, **options: Any) -> Callable[[], float]:
        loader = OMEArrowDataLoader(data, size, shuffle=True, num_workers=0, drop_last=True, **options)
        return lambda: bench.best_s(lambda: [None for _ in loader], len(loader)) * 1e6

    ours = bench.add(f"{label}, loader, preload='cuda'", "us", epochs(dataset), "<= 60" if small else "")
    theirs = bench.add(f"{label}, loader on the CPU", "us", epochs(cpu))
    if small:
        bench.ratio(f"{label}: the loader on the CPU takes", theirs, ours, ">= 20")
    elif ours is not None and memory is not None:
        bench.ratio(f"{label}, loader: of the copy on the device", counted / ours / 1e3, memory, ">= 0.5")
    images = torch.stack(cpu.__getitems__(range(len(cpu)))).to(bench.device)
    device_order = order.to(bench.device)
    bench.add(
        f"{label}, peer: float32 tensor there, indexed", "us", lambda: bench.best_s(lambda: images[device_order]) * 1e6
    )


def _streamed(bench: Bench, side: int, link: float | None) -> None:
    """Measure batches that are copied to the device as stored pixels."""
    from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset  # noqa: PLC0415

    label = f"batch of {bench.sizes.batch} of {side} x {side}, sent as stored"
    dataset = OMEArrowDataset(bench.path(side))
    loader = OMEArrowDataLoader(
        dataset, bench.sizes.batch, shuffle=True, num_workers=0, drop_last=True, device=bench.device
    )
    for how, setting in loader.settings.items():
        if how in ("transfer", "pin_memory"):
            print(f"  {how}={setting.value}: {setting.why}")
    batch_bytes = bench.sizes.batch * side * side * 2

    def rate() -> float:
        return batch_bytes / bench.best_s(lambda: [None for _ in loader], len(loader)) / 1e9

    ours = bench.add(label, "GB/s", rate, note="stored pixels; gathered by this process")
    bench.ratio(f"{label}: of the pinned copy", ours, link, ">= 0.85")


def _crops(bench: Bench, side: int) -> None:
    """Measure crops of pixels stored on the device, and torchvision crops of float32 images there."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from omearrow_ds import OMEArrowDataset  # noqa: PLC0415

    size, count = bench.sizes.crop, bench.sizes.batch
    path, label = bench.path(side), f"{count} crops of {size} x {size} of {side} x {side}"
    dataset = OMEArrowDataset(path, preload="cuda", crop="grid", crop_size=(size, size), max_bytes=2**36)
    order = np.random.default_rng(_SEED).integers(0, len(dataset), count).tolist()
    bench.add(f"{label}, preload='cuda'", "us", lambda: bench.best_s(lambda: dataset.__getitems__(order)) * 1e6)
    if not _is_installed("torchvision"):
        bench.figures.append(Figure(f"{label}, peer: torchvision", None, "us", "", "torchvision is not installed"))
    else:
        from torchvision.transforms.functional import crop  # noqa: PLC0415

        cpu = OMEArrowDataset(path)
        images = torch.stack(cpu.__getitems__(range(len(cpu)))).to(bench.device)
        per_side = side // size
        tiles = [divmod(index, per_side**2) for index in order if index < len(cpu) * per_side**2]
        corners = [(image, *(size * position for position in divmod(tile, per_side))) for image, tile in tiles]

        def crops() -> torch.Tensor:
            return torch.stack([crop(images[image], top, left, size, size) for image, top, left in corners])

        bench.add(f"{label}, peer: torchvision of float32 there", "us", lambda: bench.best_s(crops) * 1e6)
    why = "not measured: nothing is written for it yet" if _is_installed("nvidia.dali") else "DALI is not installed"
    bench.figures.append(Figure(f"{label}, peer: DALI", None, "us", "", why))


def _model_loop(bench: Bench, side: int, preload: Any) -> None:
    """Measure training steps of track 3, and the share of their time spent waiting for data."""
    from benchmarks.support.model import Trainer  # noqa: PLC0415
    from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset  # noqa: PLC0415

    dataset = OMEArrowDataset(bench.path(side), preload=preload, max_bytes=2**36)
    size = bench.sizes.batch
    loader = OMEArrowDataLoader(dataset, size, shuffle=True, num_workers=0, drop_last=True, device=bench.device)
    assert dataset.shape is not None
    trainer = Trainer(dataset.shape, size, str(bench.device), _SEED)
    label = f"training, batches of {size} of {side} x {side}, preload={preload!r}"

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    def steps(source: Iterator[Any], count: int) -> tuple[float, float]:
        waited, begin = 0.0, perf_counter()
        for _ in range(count):
            start = perf_counter()
            batch = next(source)
            bench.wait()
            waited += perf_counter() - start
            trainer.train(batch)
            bench.wait()
        return waited, perf_counter() - begin

    source = batches()
    steps(source, 3)
    waited, total = steps(source, bench.sizes.steps)
    bench.add(f"{label}: images", "images/s", lambda: bench.sizes.steps * size / total)
    bench.add(f"{label}: waiting for data", "% of a step", lambda: 100 * waited / total)


def run_tests(seconds: float) -> Figure:
    """Run the test files with GPU tests, and return the result as a figure."""
    absent = missing(TESTERS)
    if absent:
        return Figure("tests", None, "", "passed", f"not run: {', '.join(absent)} not installed")
    plain = ["-o", "addopts=", "-o", "filterwarnings="]  # The configured plugins may be missing.
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", *plain, *TESTS]
    env = {**os.environ, "EXAMPLES": "20"}
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False, env=env)  # noqa: S603
    except subprocess.TimeoutExpired:
        return Figure("tests", None, "", "passed", f"not done in {seconds:.0f} s")
    print(done.stdout[-6000:] + done.stderr[-2000:], flush=True)
    return Figure("tests", float(done.returncode == 0), "", "passed", (done.stdout.strip().splitlines() or ["?"])[-1])


def machine() -> dict[str, str]:
    """Return date, device, versions and missing packages."""
    import torch  # noqa: PLC0415

    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": "no CUDA device",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        facts["device"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    if _is_installed("triton"):
        import triton  # noqa: PLC0415

        facts["triton"] = triton.__version__
    return {**facts, "missing": ", ".join(missing(NEEDED + TESTERS + BESIDE)) or "nothing"}


def table(about: dict[str, str], figures: list[Figure]) -> str:
    """Return the figures as a Markdown table."""
    summary = "; ".join(f"{name}: {value}" for name, value in about.items())
    rows = ["# On a GPU", "", summary, "", "| what | figure | target | |", "|---|---|---|---|"]
    for figure in figures:
        value = "-" if figure.value is None else f"{figure.value:,.4g} {figure.unit}".strip()
        rows.append(f"| {figure.name} | {value} | {figure.target} | {figure.note} |")
    return "\n".join(rows) + "\n"


def _as_on_a_gpu(stack: ExitStack) -> None:
    """Patch the package so that ``"cuda"`` means the CPU, for a rehearsal."""
    import torch  # noqa: PLC0415

    devices = {"cuda": torch.device("cpu")}
    stack.enter_context(patch("omearrow_ds.dataset.samples.device_of", devices.get))
    stack.enter_context(patch("omearrow_ds.dataset.cuda.free_bytes", lambda _: 2**40))


def main(arguments: list[str] | None = None) -> int:
    """Run tests and benchmarks; return 1 if tests fail, time is up or packages are missing, 2 without a GPU, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="at most; default: %(default)s")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--rehearse", action="store_true", help="go the same way on the CPU, and write nothing")
    options = parser.parse_args(arguments)
    begin_s = monotonic()
    absent = missing(NEEDED)
    if absent:
        print(f"cannot run: {', '.join(absent)} not installed; needed are {', '.join(NEEDED)}")
        return 1
    about = machine()
    print("; ".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    if about["device"] == "no CUDA device" and not options.rehearse:
        print("no CUDA device: nothing was checked or measured (--rehearse goes the same way on the CPU)")
        return 2
    figures = [run_tests(options.minutes * 60 * 0.5)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omearrow-ds-cuda-")))
        if options.rehearse:
            _as_on_a_gpu(stack)
        deadline_s = begin_s + options.minutes * 60 * 0.9
        bench = Bench("cpu" if options.rehearse else "cuda:0", SMALL if options.rehearse else FULL, folder, deadline_s)
        measure(bench)
        figures += bench.figures
    text = table(about, figures)
    print(text)
    if not options.rehearse:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "cuda.md").write_text(text, encoding="utf-8")
        report = {"machine": about, "figures": [asdict(figure) for figure in figures]}
        (options.results / "cuda.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        print(f"written to {options.results / 'cuda.md'} and .json, after {monotonic() - begin_s:.0f} s")
    return int(any(figure.value is None and figure.note == "out of time" for figure in figures) or not figures[0].value)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT / "src"))
    sys.exit(main())
