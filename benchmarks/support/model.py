"""The model of track 3: small enough that 50 steps take about a second on one core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

EMBEDDING = 64


class Embedder(nn.Module):
    """Three strided convolutions, each normalized over groups, then a mean over the image and a linear layer.

    A sample is (..., Y, X) of three axes or more; all but the last two are channels to it.
    """

    def __init__(self, sample_shape: Sequence[int]) -> None:
        super().__init__()
        planes = torch.Size(sample_shape[:-2]).numel()
        self.layers = nn.Sequential(
            nn.Flatten(1, -3),
            *_block(planes, 8),
            *_block(8, 16),
            *_block(16, 32),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, EMBEDDING),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Embed images (batch, ..., Y, X) as (batch, 64)."""
        embedded: torch.Tensor = self.layers(images)
        return embedded


class Trainer:
    """Model, optimizer and target of a training that pulls embeddings towards fixed random vectors.

    The seed is that of weights and target; ``make`` makes the model of the shape of a sample.
    """

    def __init__(
        self,
        sample_shape: Sequence[int],
        batch_size: int,
        device: str,
        seed: int,
        make: Callable[[Sequence[int]], nn.Module] = Embedder,
    ) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = make(sample_shape).to(device)
            with torch.inference_mode():
                embedded = self.model(torch.zeros(batch_size, *sample_shape, device=device))
            self._target = torch.randn(embedded.shape).to(device)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def train(self, images: torch.Tensor) -> None:
        """Forward, backward and optimizer step."""
        self._optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(images), self._target)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def inference(self, images: torch.Tensor) -> None:
        """Forward pass without gradients."""
        with torch.inference_mode():
            self.model(images)


def _block(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1)
    return convolution, nn.GroupNorm(4, channels_out), nn.ReLU()
