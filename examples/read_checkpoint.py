"""A run's checkpoint without Paceline: the demo's model, by torch alone, on raw test images."""

import torch
from torch.nn.functional import batch_norm, conv2d, pad, relu

w = torch.load("checkpoint.pt", weights_only=True)["model"]
with open("test-minidb/data.minidb", "rb") as file:
    rows = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).view(-1, 8 + 19 + 277)
# A row: two sizes, a key, and a record of 12 bytes, 16 x 16 pixels, some more bytes, the label.
PARTS = "running_mean", "running_var", "weight", "bias"
images, labels = (rows[:, 39 : 39 + 256].view(-1, 1, 16, 16) - 128.0) / 128, rows[:, -1]


def unit(x, conv, bn, stride=1):
    x = conv2d(x, w[f"{conv}.weight"], stride=stride, padding=1)
    return batch_norm(x, *(w[f"{bn}.{name}"] for name in PARTS))


x = relu(unit(images, "conv1", "bn1"))
for stage, block in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)):
    at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
    y = relu(unit(x, f"{at}.conv1", f"{at}.bn1", stride))
    y = unit(y, f"{at}.conv2", f"{at}.bn2")
    x = relu(y + (x if stride == 1 else pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, x.shape[1]))))
right = (x.mean((2, 3)) @ w["fc.weight"].T + w["fc.bias"]).argmax(1) == labels
print(f"{right.double().mean():.8g}")
