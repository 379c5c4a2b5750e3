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
    files: dict[str, dict[str, Path]] = {}
    for file in sorted(plate.glob("*.tif")):
        well, _, _, site, channel, _ = file.stem.split("_")
        files.setdefault(f"NF1_{well}_{site}", {})[channel] = file
    return files


def main(url: str, folder: Path, plate: Path) -> None:
    torch.distributed.init_process_group("gloo")
    files, cache = fields(plate), folder / socket.gethostname()
    dataset = OMEArrowDataset(url, preload=False, return_ids=True, part_cache=cache, part_cache_bytes=2**26)
    loader = OMEArrowDataLoader(dataset, batch_size=1, shuffle=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Conv2d(dataset.shape[0], 2, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    ids_by_epoch: list[list[str]] = []
    for _ in range(EPOCHS):
        ids_by_epoch.append([])
        for images, ids in loader:
            for image, name in zip(images.numpy(), ids, strict=True):
                stored = np.stack([tifffile.imread(file) for file in files[name].values()])
                np.testing.assert_array_equal(image, stored.astype(np.float32) / np.float32(65535))
            ids_by_epoch[-1] += ids
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
    weights = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    part_names = sorted(path.name for path in cache.glob("*.arrow"))
    rank = torch.distributed.get_rank()
    report = {"host": socket.gethostname(), "ids": ids_by_epoch, "weights": weights, "kept": part_names}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
