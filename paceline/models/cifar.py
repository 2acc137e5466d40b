"""ResNet-20 and ResNet-56 for images of some 32 pixels (He et al. 2015, arXiv:1512.03385, 4.2).

6n + 2 layers: a 3x3 convolution, three stages of n basic blocks with 16, 32 and 64 channels, a
linear classifier. Shortcuts have no parameters (option A): where the shape changes, every other
pixel is taken and the new channels are zero.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.resnet import BasicBlock, convolution, initialise, stage


class CifarResNet(nn.Module):
    """ResNet for small images: three stages of basic blocks, a linear classifier.

    Args:
        depth: blocks in each stage, the paper's n.
        num_labels: classes.
        num_channels: channels of an image.
    """

    def __init__(self, depth: int, *, num_labels: int, num_channels: int) -> None:
        super().__init__()
        self.conv1 = convolution(num_channels, 16, 3)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = stage(BasicBlock, 16, 16, depth, 1, PadShortcut)
        self.layer2 = stage(BasicBlock, 16, 32, depth, 2, PadShortcut)
        self.layer3 = stage(BasicBlock, 32, 64, depth, 2, PadShortcut)
        self.fc = nn.Linear(64, num_labels)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (n, num_channels, h, w) of any size to logits (n, num_labels)."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class PadShortcut(nn.Module):
    """Shortcut without parameters: halves height and width, and appends channels of zeros."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        assert stride == 2, "a shortcut without parameters halves the image"
        self.new_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, h, w) to (n, channels + new_channels, h/2, w/2), rounded up."""
        # As x[:, :, ::2, ::2], which would lose the channels-last layout.
        halved = F.avg_pool2d(x, kernel_size=1, stride=2)
        return F.pad(halved, (0, 0, 0, 0, 0, self.new_channels))
