"""The peer of `paceline predict` in `predict.py`: Pillow and torch's DataLoader.

    find photos | python benchmarks/predict_plain.py weights.pt resnet20 32 2 > rows.csv

Its arguments: weights, model, size of the images, processes. Of Paceline it has the model alone.
"""

import csv
import sys

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from paceline.models.zoo import build_model

BATCH, MEAN, STD = 64, 128.0, 128.0  # of `paceline predict`, and Paceline's defaults


class Images(Dataset[torch.Tensor]):
    def __init__(self, paths: list[str], size: int) -> None:
        self.paths = paths
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = Image.open(self.paths[index]).convert("RGB").resize((self.size, self.size))
        return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() - MEAN) / STD


if __name__ == "__main__":
    weights, name, size, workers = sys.argv[1:]
    paths = sys.stdin.read().splitlines()
    model = build_model(name, num_labels=10, num_channels=3).eval()
    model.load_state_dict(torch.load(weights))
    rows = csv.writer(sys.stdout)
    with torch.no_grad():
        done = 0
        for images in DataLoader(Images(paths, int(size)), BATCH, num_workers=int(workers)):
            best = model(images).softmax(1).topk(3)
            for values, labels in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                rows.writerow([paths[done], *labels, *values])
                done += 1
