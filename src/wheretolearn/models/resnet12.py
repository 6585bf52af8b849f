"""ResNet-12 in the block design of the few-shot literature (MetaOptNet, BOIL)."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from wheretolearn.errors import ConfigError

WIDTHS: Mapping[str, tuple[int, int, int, int]] = {
    "small": (64, 128, 256, 512),
    "large": (64, 160, 320, 640),
}
SLOPE = 0.1  # of the leaky ReLU


class Block(nn.Module):
    """Three 3x3 convolutions with batch norm beside a 1x1 shortcut, then 2x2 max-pool.

    The third activation follows the sum. Batch norm shifts, so the convolutions carry no bias.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.shortcut_conv = nn.Conv2d(channels, width, 1, bias=False)
        self.shortcut_norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.norm1(self.conv1(x)), SLOPE)
        hidden = F.leaky_relu(self.norm2(self.conv2(hidden)), SLOPE)
        hidden = self.norm3(self.conv3(hidden)) + self.shortcut_norm(self.shortcut_conv(x))
        return F.max_pool2d(F.leaky_relu(hidden, SLOPE), 2)


class ResNet12(nn.Module):
    """Four residual blocks, global average pooling, and a linear head; any input from 16x16 up.

    ``size`` chooses the channels: ``small`` 64-128-256-512, ``large`` 64-160-320-640. Xavier-uniform weights,
    zero head bias, no DropBlock.
    """

    def __init__(self, ways: int = 5, size: str = "small", channels: int = 3) -> None:
        if size not in WIDTHS:
            raise ConfigError(f"unknown resnet12 size {size!r}; choose one of {', '.join(WIDTHS)}")
        super().__init__()
        first, second, third, fourth = WIDTHS[size]
        self.block1 = Block(channels, first)
        self.block2 = Block(first, second)
        self.block3 = Block(second, third)
        self.block4 = Block(third, fourth)
        self.head = nn.Linear(fourth, ways)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block4(self.block3(self.block2(self.block1(x))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits
