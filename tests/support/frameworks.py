"""Programs that train under frameworks on several ranks.

``python -m tests.support.frameworks FOLDER`` runs those of the frameworks that are installed, on two ranks, and prints
for each how many images the ranks saw, how often one was repeated, and in how many different orders.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.emulated_frameworks import (
    BATCH_SIZE,
    COUNT,
    EMULATED,
    EPOCHS,
    RANKS,
    STORES,
    Epochs,
    Loader,
    make,
    numbers_of,
    plainly,
    store,
)

EARLY = ("Lightning", "Lightning, loader as argument", "Fabric", "Accelerate")  # Also with one of before the group.


def _trainer_of_lightning(**options: Any) -> Any:
    import lightning

    quiet = ("progress_bar", "model_summary", "checkpointing")
    return lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=False,
        **{f"enable_{name}": False for name in quiet},
        **options,
    )


def lightning_module(make_loader: Callable[[], Loader] | None) -> Any:
    """Return a module that collects the numbers of each epoch, in ``epochs``."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.epochs: dict[int, list[list[int]]] = {}

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            self.epochs.setdefault(self.current_epoch, []).append(numbers_of(batch))
            loss: torch.Tensor = self.layer(torch.ones(1, 1)).sum()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    if make_loader is not None:
        Module.train_dataloader = lambda self: make_loader()
    return Module()


def by_lightning(make_loader: Callable[[], Loader], *, hook: bool = True, **options: Any) -> Epochs:
    """Train with the Trainer of Lightning, given the loader or a hook that makes it."""
    module = lightning_module(make_loader if hook else None)
    _trainer_of_lightning(**options).fit(module, None if hook else make_loader())
    yield from module.epochs.values()


def by_fabric(make_loader: Callable[[], Loader], **options: Any) -> Epochs:
    """Iterate over a loader that Fabric has set up."""
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    yield from plainly(fabric.setup_dataloaders(make_loader(), **options))


def by_accelerate(make_loader: Callable[[], Loader], *, prepare: bool = True, **options: Any) -> Epochs:
    """Iterate over a loader that Accelerate has prepared."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = make_loader()
    yield from plainly(accelerator.prepare(loader) if prepare else loader)


def by_transformers(make_loader: Callable[[], Loader], folder: Path, *, prepare: bool) -> Epochs:
    """Train with the Trainer of transformers, whose loader is prepared or not."""
    from transformers import Trainer, TrainingArguments

    epochs: dict[int, list[list[int]]] = {}

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = make_loader()
            return self.accelerator.prepare(loader) if prepare else loader

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            epochs.setdefault(int(self.state.epoch or 0), []).append(numbers_of(inputs))
            return model(torch.ones(1, 1)).sum()

    settings = {
        "use_cpu": True,
        "num_train_epochs": EPOCHS,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(str(folder), remove_unused_columns=False, logging_strategy="no", **settings)
    Own(torch.nn.Linear(1, 1), arguments, train_dataset=make_loader().dataset).train()
    yield from epochs.values()


def real(folder: Path) -> dict[str, Callable[[Callable[[], Loader]], Epochs]]:
    """Return the programs with the frameworks that are installed."""
    part = functools.partial
    programs: dict[str, Callable[[Callable[[], Loader]], Epochs]] = {
        "torchrun": lambda make_loader: plainly(make_loader())
    }
    if importlib.util.find_spec("lightning"):
        programs |= {
            "Lightning": by_lightning,
            "Lightning, loader as argument": part(by_lightning, hook=False),
            "Lightning, use_distributed_sampler=False": part(by_lightning, use_distributed_sampler=False),
            "Fabric": by_fabric,
            "Fabric, use_distributed_sampler=False": part(by_fabric, use_distributed_sampler=False),
        }
    if importlib.util.find_spec("accelerate"):
        programs |= {
            "Accelerate, not prepared": part(by_accelerate, prepare=False),
            "Accelerate": by_accelerate,
            "Accelerate, split_batches": part(by_accelerate, split_batches=True),
            "Accelerate, even_batches=False": part(by_accelerate, even_batches=False),
            "Accelerate, dispatch_batches": part(by_accelerate, dispatch_batches=True),
        }
    if importlib.util.find_spec("transformers"):
        programs |= {
            "Trainer of transformers, not prepared": part(by_transformers, folder=folder, prepare=False),
            "Trainer of transformers": part(by_transformers, folder=folder, prepare=True),
        }
    return programs


def run_rank(folder: Path, *, with_frameworks: bool, **group: Any) -> None:
    """Run all programs on this rank, and write the numbers of each batch and epoch, and the warnings."""
    combinations = [(path, drop_last) for path in STORES for drop_last in (False, True)]
    early = {
        combination: make(folder / combination[1], drop_last=combination[2])
        for combination in ((n, *c) for n in EARLY for c in combinations)
    }
    dist.init_process_group("gloo", **group)
    if with_frameworks:
        programs = real(folder)
    else:
        programs = {name: lambda maker, use=use: use(maker()) for name, use in EMULATED.items()}
    results = {}
    for name, program in programs.items():
        for path, drop_last in combinations:
            maker = functools.partial(make, folder / path, drop_last=drop_last)
            results[f"{name}: {path}, {drop_last=}"] = _watched(program, maker)
            if name in EARLY:
                maker = functools.partial(early.__getitem__, (name, path, drop_last))
                results[f"{name}, loader made early: {path}, {drop_last=}"] = _watched(program, maker)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _watched(program: Callable[[Any], Epochs], maker: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epochs = list(program(maker))
    own = [str(warning.message) for warning in caught if "divide" in str(warning.message)]
    return {"epochs": epochs, "warnings": own}


def summary(folder: Path) -> dict[str, dict[str, Any]]:
    """Return for each program how many images all ranks saw, how often one was repeated, and the numbers of orders."""
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    totals = {}
    for name in ranks[0]:
        epochs = list(zip(*(rank[name]["epochs"] for rank in ranks), strict=True))
        counted = [Counter(number for rank in epoch for batch in rank for number in batch) for epoch in epochs]
        totals[name] = {
            "epochs": len(epochs),
            "seen": [len(counts) for counts in counted],
            "repeats": [counts.total() - len(counts) for counts in counted],
            "orders": len({json.dumps(epoch) for epoch in epochs}),
            "warnings": [len(rank[name]["warnings"]) for rank in ranks],
        }
    return totals


def check_rows(rows: dict[str, dict[str, Any]]) -> None:
    """Check that the ranks saw each image in each epoch, and repeats only as the framework pads."""
    most = RANKS * BATCH_SIZE - 1
    for name, row in rows.items():
        assert (row["epochs"], row["orders"]) == (EPOCHS, EPOCHS), name
        if name.endswith("drop_last=True"):
            assert row["repeats"] == [0] * EPOCHS, name
            assert min(row["seen"]) >= COUNT - most, name
        else:
            assert row["seen"] == [COUNT] * EPOCHS, name
            assert max(row["repeats"]) <= most, name


def launch(folder: Path) -> None:
    """Run the programs with the frameworks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, "-m", "tests.support.frameworks", str(folder), "--rank"], env=env, check=True)


def main() -> None:
    """Print the table, or run a rank of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", action="store_true")
    options = parser.parse_args()
    if options.rank:
        with contextlib.redirect_stdout(sys.stderr):
            run_rank(options.folder, with_frameworks=True)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    store(options.folder)
    launch(options.folder)
    print(f"| program: collection of {COUNT} images | images seen | repeats | orders of {EPOCHS} epochs | warnings |")
    print("|---|---|---|---|---|")
    for name, row in summary(options.folder).items():
        print("|", name, "|", *(f"{row[key]} |" for key in ("seen", "repeats", "orders", "warnings")))


if __name__ == "__main__":
    main()
