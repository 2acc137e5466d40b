"""ResNets for images of some 200 pixels, and of some 32 (He et al. 2015, arXiv:1512.03385).

Where a stage halves the image, a bottleneck's stride is in its 3x3 convolution ("v1.5"), as in
fb.resnet.torch and Caffe2's resnet50_trainer: half a per cent more accurate than the paper's. Names
in the state dict are torchvision's, so that public weights load.

    image > 7x7 /2 > max pool /2 > stage 1 > stage 2 /2 > stage 3 /2 > stage 4 /2 > mean > fc

ResNet-20 and ResNet-56 are the paper's for small images: 6n + 2 layers in three stages of n basic
blocks. Initial weights are a pure function of torch's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions and a shortcut around them.

    Args:
        in_channels: number of input channels.
        channels: number of output channels, the same in both convolutions.
        stride: stride of the first convolution.
        downsample: module of the shortcut, which brings the block's input to the output's shape.
    """

    expansion: ClassVar[int] = 1

    def __init__(self, in_channels: int, channels: int, stride: int, downsample: nn.Module) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = convolution(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, in_channels, h, w) to (n, channels, h/stride, w/stride), rounded up."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions; its arguments are those of `BasicBlock`."""

    expansion: ClassVar[int] = 4

    def __init__(self, in_channels: int, channels: int, stride: int, downsample: nn.Module) -> None:
        super().__init__()
        self.conv1 = convolution(in_channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = convolution(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = convolution(channels, channels * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, in_channels, h, w) to (n, 4 * channels, h/stride, w/stride), rounded up."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x), inplace=True)


class ResNet(nn.Module):
    """ResNet: a stem, stages of residual blocks, and a linear classifier.

    Args:
        block: class of the residual blocks.
        depths: number of blocks in each stage; each stage doubles the channels of the one before.
        num_labels: number of classes.
        num_channels: number of channels of an image.
        small: whether to build the variant for images of about 32 pixels (section 4.2 of the
            paper): 16 channels in the first stage, a 3x3 stem without pooling, and shortcuts
            without parameters. Otherwise: 64 channels, a 7x7 stem with pooling, and projection
            shortcuts.

    Attributes:
        pools: whether the stem has a pooling.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        num_labels: int,
        num_channels: int,
        small: bool = False,
    ) -> None:
        super().__init__()
        width, shortcut = (16, PadShortcut) if small else (64, _projection)
        self.conv1 = convolution(num_channels, width, 3 if small else 7, 1 if small else 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.pools = not small
        self._stages = [f"layer{n + 1}" for n in range(len(depths))]
        channels = width
        for number, depth in enumerate(depths):
            layer = stage(block, channels, width << number, depth, min(number, 1) + 1, shortcut)
            self.add_module(self._stages[number], layer)
            channels = (width << number) * block.expansion
        self.fc = nn.Linear(channels, num_labels)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (n, num_channels, h, w) of any size to logits (n, num_labels)."""
        x = activated(self.bn1(self.conv1(x)), pools=self.pools)
        for name in self._stages:
            x = self.get_submodule(name)(x)
        logits: Tensor = self.fc(averaged(x))
        return logits


def activated(x: Tensor, *, pools: bool) -> Tensor:
    """Return what the stem makes of its normalised images, (n, channels, h, w)."""
    x = F.relu(x, inplace=True)
    return F.max_pool2d(x, kernel_size=3, stride=2, padding=1) if pools else x


def averaged(x: Tensor) -> Tensor:
    """Return the mean of each channel: (n, channels, h, w) to (n, channels)."""
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


class PadShortcut(nn.Module):
    """Shortcut without parameters: halves height and width, and appends channels of zeros.

    It is option A of the paper: it takes every other pixel, and is used where the shape changes.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        assert stride == 2, "a shortcut without parameters halves the image"
        self.new_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, h, w) to (n, channels + new_channels, h/2, w/2), rounded up."""
        # As x[:, :, ::2, ::2], which would lose the channels-last layout.
        halved = F.avg_pool2d(x, kernel_size=1, stride=2)
        return F.pad(halved, (0, 0, 0, 0, 0, self.new_channels))


def convolution(in_channels: int, channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Make a convolution that keeps height and width at stride 1; BatchNorm has the bias."""
    return nn.Conv2d(in_channels, channels, size, stride, padding=size // 2, bias=False)


def initialise(model: nn.Module) -> None:
    """Draw the convolutions' weights for ReLUs (He et al. 2015, arXiv:1502.01852, fan out)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    channels: int,
    depth: int,
    stride: int,
    new_shape: Callable[[int, int, int], nn.Module],
) -> nn.Sequential:
    """Make a stage of blocks.

    Args:
        block: the kind of block.
        in_channels: channels that come in.
        channels: channels of the convolutions inside.
        depth: the number of blocks.
        stride: of the first block.
        new_shape: makes the first block's shortcut of (in_channels, out_channels, stride), where
            the shape changes; elsewhere shortcuts have no parameters.
    """
    out_channels = channels * block.expansion
    same = stride == 1 and in_channels == out_channels
    shortcut = nn.Identity() if same else new_shape(in_channels, out_channels, stride)
    first = block(in_channels, channels, stride, shortcut)
    rest = [block(out_channels, channels, 1, nn.Identity()) for _ in range(depth - 1)]
    return nn.Sequential(first, *rest)


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Make a shortcut that projects to another shape, the paper's option B."""
    return nn.Sequential(
        convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels)
    )
