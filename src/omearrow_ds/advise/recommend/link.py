"""`RemoteEstimate`: estimated epochs with parts in a bucket, the longer of transfer and decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omearrow_ds.advise.recommend.choices import LoadingPlan
from omearrow_ds.advise.recommend.estimate import PlanCost, ReadBudget, simplicity, tie_of
from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.remote_parts import AHEAD
from omearrow_ds.text import RATES, TIMES, as_rate, as_seconds, count, duration, size, table

_OPENING = 2  # Number of sequential requests before the first part.


@dataclass(frozen=True)
class NetworkLink:
    """Bandwidth in bytes/s and latency in seconds of the link to an object store."""

    bytes_s: float
    latency_s: float = 0.0

    @classmethod
    def parse(cls, bandwidth: str | float | None, latency: str | float | None) -> NetworkLink | None:
        """Parse bandwidth and latency, strings with units or numbers, into a link; return None without a bandwidth.

        Raises `ArgumentError` if a value is invalid, or if ``latency`` is passed without ``bandwidth``.
        """
        if bandwidth is None:
            if latency is not None:
                raise ArgumentError("it goes with bandwidth=", option="latency", value=latency, remedy="pass that too")
            return None
        bytes_s = as_rate(bandwidth) if isinstance(bandwidth, str) else bandwidth
        latency_s = as_seconds(latency) if isinstance(latency, str) else latency or 0.0
        if bytes_s is None or not 0 < bytes_s < math.inf:
            raise ArgumentError(option="bandwidth", value=bandwidth, remedy=RATES)
        if latency_s is None or not 0 <= latency_s < math.inf:
            raise ArgumentError(option="latency", value=latency, remedy=TIMES)
        return cls(bytes_s, latency_s)

    def fetch_s(self, stored_bytes: int, decoded_bytes: int, part_bytes: int) -> float:
        """Return the seconds to fetch all parts of a collection with several concurrent requests."""
        parts = math.ceil(decoded_bytes / part_bytes) or 1
        return stored_bytes / self.bytes_s + self.latency_s * (_OPENING + math.ceil(parts / AHEAD))

    @property
    def text(self) -> str:
        latency = f" with a latency of {duration(self.latency_s)}" if self.latency_s else ""
        return f"{size(self.bytes_s)}/s ({self.bytes_s * 8 / 1e6:,.4g} Mbit/s){latency}"


@dataclass(frozen=True)
class RemoteCost:
    """Estimated times of a plan whose parts are fetched from an object store."""

    row: PlanCost  # Measurement from a local disk.
    fetch_s: float  # Seconds of fetching all parts.
    decode_s: float  # Seconds of decoding meanwhile: an epoch on demand, or preloading.
    # Seconds of the first epoch, and of each later one with all parts in the cache or pixels in memory.
    epoch_s: float
    later_s: float

    @classmethod
    def over(cls, link: NetworkLink, row: PlanCost, decoded_bytes: int) -> RemoteCost:
        """Return the times of the plan of ``row`` if parts are fetched over ``link`` while others are decoded."""
        fetch_s = link.fetch_s(row.size_bytes, decoded_bytes, row.plan.layout.format.part_bytes)
        decode_s, after_s = (row.open_s, row.epoch_s) if row.plan.preload else (row.epoch_s, 0.0)
        return cls(row, fetch_s, decode_s, max(fetch_s, decode_s) + after_s, row.epoch_s)

    @property
    def limit(self) -> str:
        """``"link"`` if fetching takes longer than decoding, else ``"decoding"``."""
        return "link" if self.fetch_s >= self.decode_s else "decoding"

    def total_s(self, epochs: int) -> float:
        """Return the seconds of ``epochs`` epochs, of which only the first fetches parts."""
        return self.epoch_s + (epochs - 1) * self.later_s


@dataclass(frozen=True)
class RemoteEstimate:
    """Estimated times of the measured plans if their files are fetched over a link."""

    link: NetworkLink
    rows: tuple[RemoteCost, ...]  # Plans that can be read from a bucket, ordered by the first epoch.
    absent: tuple[str, ...]  # Labels of formats that cannot be, as their parts are folders.
    # chosen: the plan with the least total time among those tied for the fastest first epoch. in_all: the plan with the
    # least total time.
    chosen: RemoteCost
    in_all: RemoteCost
    # Number of epochs, and the command that writes the parts.
    epochs: int
    command: str

    @classmethod
    def choose(
        cls,
        link: NetworkLink,
        rows: Sequence[PlanCost],
        task: ReadBudget,
        command_of: Callable[[LoadingPlan], str],
        *,
        on_server: bool,
    ) -> RemoteEstimate | None:
        """Return estimates for the plans that a bucket can serve, or None if it can serve no measured plan.

        ``on_server`` is whether the existing collection consists of parts on a server.
        """
        measured = [row for row in rows if row.why_not is None]
        absent = dict.fromkeys(row.plan.layout.format.label for row in measured if row.plan.layout.format.in_folder)
        costs = [
            RemoteCost.over(link, row, task.decoded_bytes)
            for row in measured
            if not row.plan.layout.format.in_folder and (on_server or not row.plan.layout.as_it_is)
        ]
        if not costs:
            return None
        costs.sort(key=lambda cost: cost.epoch_s)
        tied = [cost for cost in costs if cost.epoch_s <= costs[0].epoch_s * tie_of(costs[0].row, cost.row)]
        chosen, in_all = (
            min(some, key=lambda cost: (cost.total_s(task.epochs), simplicity(cost.row))) for some in (tied, costs)
        )
        return cls(link, tuple(costs), tuple(absent), chosen, in_all, task.epochs, command_of(chosen.row.plan))

    def as_lines(self) -> list[str]:
        """Return a table of the best plan and the best default plan per format, and the recommendation."""
        best_costs: dict[tuple[str, bool], RemoteCost] = {}
        for cost in (self.chosen, *self.rows):
            layout = cost.row.plan.layout
            best_costs.setdefault((layout.format.name, False), cost)
            if layout.is_default:
                best_costs.setdefault((layout.format.name, True), cost)
        rows = [["", "stored", "over the link", "decoding", "first epoch", "from cache or memory", "limit"]]
        for cost in (cost for cost in self.rows if cost in best_costs.values()):
            name = f"{'>' if cost is self.chosen else ' '} {cost.row.plan.label}"
            times = map(duration, (cost.fetch_s, cost.decode_s, cost.epoch_s, cost.later_s))
            rows.append([name, size(cost.row.size_bytes), *times, cost.limit])
        lines = [
            f"In parts on a server, over {self.link.text}, each format's best and its default:",
            "",
            *table(rows),
            "",
            f"There: {self.chosen.row.plan.label}, an epoch in {duration(self.chosen.epoch_s)}; {_why(self.chosen)}",
        ]
        ratio = self.chosen.total_s(self.epochs) / self.in_all.total_s(self.epochs)
        if ratio > tie_of(self.chosen.row, self.in_all.row):
            takes = f"{self.in_all.row.plan.label} takes {1 - 1 / ratio:.0%} less"
            lines.append(f"  For {count(self.epochs, 'epoch')} whose parts all stay in the cache {takes}.")
        if self.absent:
            lines.append(f"  Not read from servers, as their parts are folders: {', '.join(self.absent)}.")
        return [*lines, *(["", f"  {self.command}"] if self.command else []), ""]

    def as_dict(self) -> dict[str, Any]:
        return {
            "bandwidth_bytes_s": self.link.bytes_s,
            "latency_s": self.link.latency_s,
            "recommended": {**_as_json(self.chosen, self.epochs), "command": self.command},
            "least_in_all": _as_json(self.in_all, self.epochs),
            "rows": [_as_json(cost, self.epochs) for cost in self.rows],
            "not_on_servers": list(self.absent),
        }


def _why(fetched: RemoteCost) -> str:
    if fetched.limit == "link":
        return f"the link is the limit, decoding takes {duration(fetched.decode_s)}"
    return f"decoding is the limit, the link takes {duration(fetched.fetch_s)}"


def _as_json(fetched: RemoteCost, epochs: int) -> dict[str, Any]:
    return {
        **fetched.row.plan.as_dict(),
        "size_bytes": fetched.row.size_bytes,
        "link_s": fetched.fetch_s,
        "decode_s": fetched.decode_s,
        "epoch_s": fetched.epoch_s,
        "later_epoch_s": fetched.later_s,
        "total_s": fetched.total_s(epochs),
        "limit": fetched.limit,
    }
