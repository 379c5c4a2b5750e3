"""`Stage`: the stages of an epoch and their meaning."""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType

from omearrow_ds.errors import ArgumentError


class Stage(IntEnum):
    """Stage of a training loop; the value of a member is the index of the stage in `Counts`."""

    OPEN = 0
    READ = 1
    READ_DECODE = 2
    DECODE = 3
    SELECT = 4
    NORMALIZE = 5
    TRANSFORM = 6
    COLLATE = 7
    HAND_OVER = 8
    TRANSFER = 9
    FORWARD = 10
    BACKWARD = 11
    OPTIMIZER = 12
    OTHER = 13
    WAIT = 14  # The main process waits for workers, or a worker waits for indices. It has no row in the table.

    @property
    def label(self) -> str:
        return _LABELS.get(self, self.name.lower().replace("_", "-"))

    @classmethod
    def labelled(cls, label: str, origin: str) -> Stage:
        """Return the stage with this label; ``where`` names the source of the label in an error."""
        known = {stage.label: stage for stage in cls}
        if label not in known:
            raise ArgumentError(f"{origin}: {label!r} is not a stage; choose one of {', '.join(known)}")
        return known[label]

    @property
    def note(self) -> str:
        return _NOTES.get(self, "")


_LABELS = MappingProxyType({Stage.READ_DECODE: "read+decode", Stage.OPTIMIZER: "optimizer step"})
_NOTES = MappingProxyType(
    {
        Stage.OPEN: "the store is opened again, in another process",
        Stage.READ: "stored bytes are found and fetched",
        Stage.READ_DECODE: "one pass of the format's library",
        Stage.DECODE: "stored bytes to pixels",
        Stage.SELECT: "gathered if small and in memory, else cut in normalize",
        Stage.NORMALIZE: "one pass: cut, convert, put into the batch",
        Stage.COLLATE: "memory for the batch; stacking what is not stacked",
        Stage.HAND_OVER: "from workers to the program",
        Stage.FORWARD: "model and loss",
        Stage.OTHER: "the loop, torch's loader, the order of samples",
    }
)

DATA = (
    Stage.OPEN,
    Stage.READ,
    Stage.READ_DECODE,
    Stage.DECODE,
    Stage.SELECT,
    Stage.NORMALIZE,
    Stage.TRANSFORM,
    Stage.COLLATE,
    Stage.HAND_OVER,
    Stage.TRANSFER,
)
COMPUTE = (Stage.FORWARD, Stage.BACKWARD, Stage.OPTIMIZER)
