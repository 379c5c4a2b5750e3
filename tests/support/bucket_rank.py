"""Program of each rank that trains from a bucket under ``torchrun``: two epochs, every image compared.

``python -m tests.support.bucket_rank URL FOLDER PLATE`` writes ``FOLDER/RANK.json``. Parts are kept in
``FOLDER/HOST``; PLATE is the folder of the TIFF files that the collection was made of.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import numpy as np
import tifffile
import torch
import torch.distributed

from omearrow_ds import OMEArrowDataLoader, OMEArrowDataset

EPOCHS = 2


def fields(plate: Path) -> dict[str, dict[str, Path]]:
    """Return the files of each field of NF1 by its id, with channels in order."""
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(plate.glob("*.tif")):
        well, _, _, site, channel, _ = file.stem.split("_")
        found.setdefault(f"NF1_{well}_{site}", {})[channel] = file
    return found


def main(url: str, folder: Path, plate: Path) -> None:
    torch.distributed.init_process_group("gloo")
    files, cache = fields(plate), folder / socket.gethostname()
    dataset = OMEArrowDataset(url, preload=False, return_ids=True, part_cache=cache, part_cache_bytes=2**26)
    loader = OMEArrowDataLoader(dataset, batch_size=1, shuffle=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Conv2d(dataset.shape[0], 2, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    said: list[list[str]] = []
    for _ in range(EPOCHS):
        said.append([])
        for images, ids in loader:
            for image, name in zip(images.numpy(), ids, strict=True):
                stored = np.stack([tifffile.imread(file) for file in files[name].values()])
                np.testing.assert_array_equal(image, stored.astype(np.float32) / np.float32(65535))
            said[-1] += ids
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
    weights = [float(each.detach().double().sum()) for each in model.parameters()]
    kept = sorted(each.name for each in cache.glob("*.arrow"))
    rank = torch.distributed.get_rank()
    told = {"host": socket.gethostname(), "ids": said, "weights": weights, "kept": kept}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
