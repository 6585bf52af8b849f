"""The convolutional network of La-MAML's CIFAR experiments."""

import torch.nn.functional as F
from torch import Tensor, nn

from wheretolearn.models.mlp import kaiming_normal


class CifarNet(nn.Module):
    """Three 3x3 convolutions of stride 2, two hidden linear layers and a linear head, ReLU throughout.

    The paper speaks of four convolutional layers. La-MAML uses three for 32x32 images, and four only for
    64x64: this is the former. Its padding of 1 turns 32x32 into 4x4 positions, 16 x 160 = 2,560 features.
    Kaiming-normal weights, zero biases, no batch norm.
    """

    def __init__(self, ways: int = 10, width: int = 160, hidden: int = 320, channels: int = 3, size: int = 32) -> None:
        side = -(-size // 8)  # each convolution halves the side, rounding up
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.layer1 = nn.Linear(side * side * width, hidden)
        self.layer2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, ways)
        kaiming_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        x = F.relu(self.layer1(x.flatten(1)))
        x = F.relu(self.layer2(x))
        logits: Tensor = self.head(x)
        return logits
