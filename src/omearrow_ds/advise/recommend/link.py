"""`RemoteEstimate`: estimated epochs with parts in a bucket, the longer of transfer and decoding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from omearrow_ds.advise.recommend.choices import PlanCost, ReadBudget, plan_table, simplicity, tie_of
from omearrow_ds.errors import ArgumentError
from omearrow_ds.storage.remote_parts_source import AHEAD
from omearrow_ds.text import RATES, TIMES, as_rate, as_seconds, count, duration, size

_OPENING = 2  # Number of sequential requests before the first part.


@dataclass(frozen=True)
class NetworkLink:
    """Bandwidth in bytes/s and latency in seconds of the link to an object store."""

    bytes_s: float
    latency_s: float = 0.0

    @classmethod
    def parse(cls, bandwidth: str | float | None, latency: str | float | None) -> NetworkLink | None:
        """Parse bandwidth and latency, strings with units or numbers, into a link; return None without a bandwidth."""
        if bandwidth is None:
            if latency is not None:
                raise ArgumentError("needs bandwidth=", option="latency", value=latency, remedy="pass bandwidth= too")
            return None
        bytes_s = as_rate(bandwidth) if isinstance(bandwidth, str) else bandwidth
        latency_s = as_seconds(latency) if isinstance(latency, str) else latency or 0.0
        if bytes_s is None or not 0 < bytes_s < math.inf:
            raise ArgumentError("is not a rate", option="bandwidth", value=bandwidth, remedy=RATES)
        if latency_s is None or not 0 <= latency_s < math.inf:
            raise ArgumentError("is not a time", option="latency", value=latency, remedy=TIMES)
        return cls(bytes_s, latency_s)

    @property
    def text(self) -> str:
        latency = f" with a latency of {duration(self.latency_s)}" if self.latency_s else ""
        return f"{size(self.bytes_s)}/s ({self.bytes_s * 8 / 1e6:,.4g} Mbit/s){latency}"


@dataclass(frozen=True)
class RemoteCost:
    """Estimated times in seconds of a plan whose parts are fetched from an object store, while others are decoded."""

    row: PlanCost  # Measurement from a local disk.
    link_s: float  # Fetching all parts.
    decode_s: float  # Decoding meanwhile: an epoch on demand, or preloading.
    epoch_s: float  # First epoch.
    later_epoch_s: float  # With all parts in the cache, or pixels in memory.
    total_s: float  # All epochs.
    limit: Literal["link", "decoding"]  # The longer of fetching and decoding.

    @classmethod
    def over(cls, link: NetworkLink, row: PlanCost, task: ReadBudget) -> RemoteCost:
        """Return the times of a plan whose parts are fetched over ``link`` by several concurrent requests."""
        parts = math.ceil(task.decoded_bytes / row.plan.layout.format.part_bytes)
        link_s = row.size_bytes / link.bytes_s + link.latency_s * (_OPENING + math.ceil(parts / AHEAD))
        decode_s, after_s = (row.open_s, row.epoch_s) if row.plan.preload else (row.epoch_s, 0.0)
        first_s = max(link_s, decode_s) + after_s
        total_s = first_s + (task.epochs - 1) * row.epoch_s
        return cls(row, link_s, decode_s, first_s, row.epoch_s, total_s, "link" if link_s >= decode_s else "decoding")

    def as_dict(self) -> dict[str, Any]:
        times_s = {name: value for name, value in vars(self).items() if name != "row"}
        return {**self.row.plan.as_dict(), "size_bytes": self.row.size_bytes, **times_s}


@dataclass(frozen=True)
class RemoteEstimate:
    """Estimated times of the measured plans if their files are fetched over a link."""

    link: NetworkLink
    rows: tuple[RemoteCost, ...]  # Plans that can be read from a bucket, ordered by the first epoch.
    absent: tuple[str, ...]  # Labels of formats whose parts are folders, which a bucket cannot serve.
    chosen: RemoteCost  # Least total time among those tied for the fastest first epoch.
    in_all: RemoteCost  # Least total time of all.
    epochs: int
    command: str = ""  # Writes the parts of `chosen`.

    @classmethod
    def choose(
        cls, link: NetworkLink, rows: Iterable[PlanCost], task: ReadBudget, *, on_server: bool
    ) -> RemoteEstimate | None:
        """Return estimates for the plans that a bucket can serve, or None if it can serve no measured plan.

        ``on_server`` is whether the existing collection consists of parts on a server.
        """
        possible = [row for row in rows if row.why_not is None]
        absent = dict.fromkeys(row.plan.layout.format.label for row in possible if row.plan.layout.format.in_folder)
        possible = [row for row in possible if on_server or not row.plan.layout.as_it_is]
        costs = [RemoteCost.over(link, row, task) for row in possible if not row.plan.layout.format.in_folder]
        if not costs:
            return None
        costs.sort(key=lambda cost: cost.epoch_s)
        tied = [cost for cost in costs if cost.epoch_s <= costs[0].epoch_s * tie_of(costs[0].row, cost.row)]
        chosen, in_all = (min(some, key=lambda cost: (cost.total_s, simplicity(cost.row))) for some in (tied, costs))
        return cls(link, tuple(costs), tuple(absent), chosen, in_all, task.epochs)

    def as_lines(self) -> list[str]:
        """Return a table of the plans, and the recommendation."""
        header = ("stored", "over the link", "decoding", "first epoch", "from cache or memory", "limit")
        costs = []
        for cost in self.rows:
            times = map(duration, (cost.link_s, cost.decode_s, cost.epoch_s, cost.later_epoch_s))
            costs.append((cost.row.plan, [size(cost.row.size_bytes), *times, cost.limit], ""))
        chosen, in_all = self.chosen, self.in_all
        limits = {
            "link": f"The link is the limit; decoding takes {duration(chosen.decode_s)}",
            "decoding": f"Decoding is the limit; the link takes {duration(chosen.link_s)}",
        }
        lines = [
            f"In parts on a server, over {self.link.text}:",
            "",
            *plan_table(header, costs, chosen.row.plan),
            "",
            f"On the server: {chosen.row.plan.label}, one epoch in {duration(chosen.epoch_s)}. {limits[chosen.limit]}",
        ]
        if chosen.total_s > in_all.total_s * tie_of(chosen.row, in_all.row):
            less = f"{in_all.row.plan.label} takes {1 - in_all.total_s / chosen.total_s:.0%} less"
            lines.append(f"  If the cache holds all parts for {count(self.epochs, 'epoch')}, {less}.")
        if self.absent:
            lines.append(
                f"  Formats not supported on servers, because their parts are folders: {', '.join(self.absent)}."
            )
        return [*lines, *(["", f"  {self.command}"] if self.command else []), ""]

    def as_dict(self) -> dict[str, Any]:
        return {
            "bandwidth_bytes_s": self.link.bytes_s,
            "latency_s": self.link.latency_s,
            "recommended": {**self.chosen.as_dict(), "command": self.command},
            "least_in_all": self.in_all.as_dict(),
            "rows": [cost.as_dict() for cost in self.rows],
            "not_on_servers": list(self.absent),
        }
