"""The four-block convolutional network of the few-shot and online experiments."""

from collections import OrderedDict

from torch import Tensor, nn

from wheretolearn.errors import ConfigError


class Conv4(nn.Module):
    """Four blocks of 3x3 convolution, batch norm, ReLU and 2x2 max-pool, then a linear head.

    Input ``[N, channels, size, size]``: 84x84 leaves 5x5 positions of ``width`` features, 28x28 leaves one.
    ``bias=False`` leaves out every bias: of convolutions, of batch norm (its shift), and of the head.
    """

    def __init__(self, ways: int = 5, channels: int = 3, size: int = 84, width: int = 64, bias: bool = True) -> None:
        positions = (size // 16) ** 2
        if positions == 0:
            raise ConfigError(
                f"conv4 halves its input four times and needs images of at least 16x16, not {size}x{size}"
            )
        super().__init__()
        self.block1 = _block(channels, width, bias)
        self.block2 = _block(width, width, bias)
        self.block3 = _block(width, width, bias)
        self.block4 = _block(width, width, bias)
        self.head = nn.Linear(positions * width, ways, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block4(self.block3(self.block2(self.block1(x))))
        logits: Tensor = self.head(x.flatten(1))
        return logits


def _block(channels: int, width: int, bias: bool) -> nn.Sequential:
    norm = nn.BatchNorm2d(width)
    if not bias:
        norm.register_parameter("bias", None)
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(channels, width, 3, padding=1, bias=bias),
            norm=norm,
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(2),
        )
    )
