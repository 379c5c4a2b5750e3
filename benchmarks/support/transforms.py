"""The transforms that are measured: plain torch callables."""

from __future__ import annotations

import torch


class Augment:
    """Random flip and 90-degree rotation of the last two axes; two with equal seeds do the same."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Return the image flipped and rotated; a new tensor or the image itself."""
        flip, turns = divmod(int(torch.randint(8, (), generator=self._generator)), 4)
        turned = torch.rot90(image, turns, (-2, -1))
        return turned.flip(-1) if flip else turned
