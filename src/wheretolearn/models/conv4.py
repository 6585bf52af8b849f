"""The four-block convolutional network of the few-shot and online experiments."""

from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn

from wheretolearn.errors import ConfigError

Init = Literal["default", "kaiming"]


class Conv4(nn.Module):
    """Four blocks of 3x3 convolution, batch norm, ReLU and 2x2 max-pool, then a linear head.

    Input ``[N, channels, size, size]``: 84x84 leaves 5x5 positions of ``width`` features, 28x28 leaves one.
    ``bias=False`` leaves out every bias: of convolutions, of batch norm (its shift), and of the head.
    ``t_net=True`` adds a linear transformation, at first the identity, to what each convolution and the head give
    (Lee and Choi, 2018): no inner loop is to change these ``transform_names()``.
    ``init`` is how convolutions and head start: PyTorch's way, or Kaiming-uniform, whose weights are 2.4 times larger.
    """

    def __init__(
        self,
        ways: int = 5,
        channels: int = 3,
        size: int = 84,
        width: int = 64,
        bias: bool = True,
        t_net: bool = False,
        init: Init = "default",
    ) -> None:
        positions = (size // 16) ** 2
        if positions == 0:
            raise ConfigError(
                f"conv4 halves its input four times and needs images of at least 16x16, not {size}x{size}"
            )
        super().__init__()
        self.image_size = size
        self.block1 = _block(channels, width, bias, t_net)
        self.block2 = _block(width, width, bias, t_net)
        self.block3 = _block(width, width, bias, t_net)
        self.block4 = _block(width, width, bias, t_net)
        # Before the head, which stays the last layer by name.
        self.head_transform = _identity(nn.Linear, ways, ways) if t_net else None
        self.head = nn.Linear(positions * width, ways, bias=bias)
        if init == "kaiming":
            for name, parameter in self.named_parameters():
                if name.endswith(("conv.weight", "head.weight")):
                    nn.init.kaiming_uniform_(parameter, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.block4(self.block3(self.block2(self.block1(x))))
        logits: Tensor = self.head(x.flatten(1))
        return logits if self.head_transform is None else self.head_transform(logits)

    def transform_names(self) -> set[str]:
        """The parameters that ``t_net`` adds."""
        return {name for name, _ in self.named_parameters() if name.split(".")[-2].endswith("transform")}


def unchanged(model: nn.Module) -> bool:
    """Whether a network is a Conv4 as it was made, without ``t_net``: no other layers, no hooks, no shared weights.

    Statistics that batch norm keeps, or not, do not count.
    """
    if type(model) is not Conv4:
        return False
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if not {"block1.conv.weight", "head.weight"} <= shapes.keys():
        return False
    (width, channels, *_), (ways, _) = shapes["block1.conv.weight"], shapes["head.weight"]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        new = Conv4(ways, channels, model.image_size, width, bias="head.bias" in shapes)
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or "forward" in vars(module):
            return False
    layers = str(model).replace("track_running_stats=False", "track_running_stats=True")
    return layers == str(new) and shapes == {name: parameter.shape for name, parameter in new.named_parameters()}


def _block(channels: int, width: int, bias: bool, t_net: bool) -> nn.Sequential:
    norm = nn.BatchNorm2d(width)
    if not bias:
        norm.register_parameter("bias", None)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(channels, width, 3, padding=1, bias=bias))
    if t_net:
        layers["transform"] = _identity(nn.Conv2d, width, width, 1)
    # Pooling first: the maximum and ReLU commute, in the gradient too, and ReLU then has a quarter of the work.
    layers.update(norm=norm, pool=nn.MaxPool2d(2), relu=nn.ReLU())
    return nn.Sequential(layers)


def _identity(layer: type[nn.Linear | nn.Conv2d], *sizes: int) -> nn.Module:
    """A layer without bias that starts as the identity."""
    # Drawing no random numbers, it leaves the other weights what they are without it.
    made: nn.Module = nn.utils.skip_init(layer, *sizes, bias=False)  # type: ignore[no-untyped-call]
    weight = made.get_parameter("weight")
    if weight.dim() == 2:
        nn.init.eye_(weight)
    else:
        nn.init.dirac_(weight)
    return made
