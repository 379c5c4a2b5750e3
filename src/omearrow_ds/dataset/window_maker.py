"""`DeviceCropper`: batches of windows on a device, by the Triton kernel or by torch operations."""

from __future__ import annotations

import functools
import subprocess
import warnings

import torch

from omearrow_ds.dataset.windows import DeviceCropBoxes, DeviceScaling, SampleLayout, crop_with_torch, fused
from omearrow_ds.kernels.crops import PADS


class DeviceCropper:
    def __init__(self, layout: SampleLayout, scales: DeviceScaling, device: torch.device) -> None:
        self.layout, self.scales, self._device = layout, scales, device
        self._fused = fused(layout, device) if triton_kernel_works(device) else None

    def __call__(self, source: torch.Tensor, count: int, windows: DeviceCropBoxes) -> torch.Tensor:
        out = torch.empty((count, *self.layout.shape), dtype=self.scales.dtype, device=self._device)
        if not out.numel():
            return out
        if self._fused is None:
            crop_with_torch(source, out, self.layout, self.scales, windows)
        else:
            from omearrow_ds.dataset.windows_kernel import launch  # noqa: PLC0415  # Triton is optional.

            launch(source, out, self.layout, self._fused, self.scales, windows, PADS.index(windows.pad))
        return out


@functools.cache
def triton_kernel_works(device: torch.device) -> bool:
    """Whether the Triton kernel works on a device, which requires a driver and a C compiler; tested once per device."""
    if device.type != "cuda":
        return False
    try:
        from omearrow_ds.dataset.windows_kernel import works  # noqa: PLC0415

        why = None if works(device) else "its kernel returned other pixels than torch"
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        why = f"{type(error).__name__}: {error}"
    if why is not None:
        msg = f"{device}: Triton is unusable, so torch creates samples, which is slower: {why}"
        warnings.warn(msg, UserWarning, stacklevel=2)
    return why is None
