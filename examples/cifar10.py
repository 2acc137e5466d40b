"""Train a ResNet-20 on folders of images, DATA/{train,test}/CLASS/NAME.jpg, such as CIFAR-10's.

paceline launch -n 2 -- python examples/cifar10.py DATA --run runs/cifar10
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import paceline
from paceline.models.zoo import build_model


class Folders(torch.utils.data.Dataset):
    def __init__(self, root: Path, *, mirror: bool = False) -> None:
        self.classes = sorted(folder.name for folder in root.iterdir())
        self.files, self.mirror = sorted(root.glob("*/*.jpg")), mirror

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = np.array(Image.open(self.files[index]).convert("RGB").resize((32, 32)))
        image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 128 - 1
        image = image.flip(2) if self.mirror and torch.rand(()) < 0.5 else image
        return image, self.classes.index(self.files[index].parent.name)


parser = argparse.ArgumentParser()
parser.add_argument("data", type=Path)
parser.add_argument("--run", help="folder: the same command again goes on where it was stopped")
parser.add_argument("--epochs", type=int, default=20)
options = parser.parse_args()

world = paceline.join(options.run)
model = build_model("resnet20", num_labels=10, num_channels=3).to(world.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
paceline.parallelize(model, optimizer, world)
train = paceline.loader(Folders(options.data / "train", mirror=True), 128, world)
test = paceline.loader(Folders(options.data / "test"), 500, world, train=False)
schedule = OneCycleLR(optimizer, 0.2, epochs=options.epochs, steps_per_epoch=len(train))
world.track(schedule)
for epoch in range(train.epoch, options.epochs):
    for x, y in train:
        with world.step():
            F.cross_entropy(model.train()(x.to(world.device)), y.to(world.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        right = [(model(x.to(world.device)).cpu().argmax(1) == y).sum() for x, y in test]
    total = world.total(torch.stack([torch.tensor(0), *right]).sum())
    if world.rank == 0:
        print(f"epoch {epoch}: {int(total) / test.samples:.1%} of the test images", flush=True)
