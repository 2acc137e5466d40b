"""Model card of a run: data, figures, and how to use the model, as a README.md in its folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.observe.run_summary import RunSummary

CARD_NAME = "README.md"
_MOST = 40  # classes that are named


def model_card(
    summary: RunSummary,
    about: Mapping[str, Any],
    weights: Sequence[Path],
    *,
    parameters: int | None,
    data: Mapping[str, str],
) -> str:
    """Return the text of a model card, in Markdown.

    Args:
        summary: of the run.
        about: the model's description, as its weights have it.
        weights: the files of the weights, the best ones last.
        parameters: the number of the model's parameters; None: this process has a stage alone.
        data: the paths of the databases, by what they are for.
    """
    form = about["evaluation"]
    best = weights[-1]
    rows = {
        "model": f"`{about['model']}` for {about['num_labels']:,} classes",
        "parameters": "" if parameters is None else f"{parameters:,}",
        **{f"{use} data": f"`{path}`" for use, path in data.items() if path},
        "epochs": f"{summary.epochs or 0:,}, {summary.steps:,} steps",
        "test accuracy": "" if summary.accuracy is None else f"{summary.accuracy:.2%}, the best",
        "training loss": "" if summary.loss is None else f"{summary.loss:.4f}, of the last epoch",
        "time": "" if summary.seconds is None else f"{summary.seconds:,.0f} s",
        "cost": "" if summary.cost is None else ", ".join(summary.cost.texts),
        "image": f"{form['channels']}, short side {form['resize']} pixels, "
        f"centre {form['crop']} × {form['crop']}",
        "normalisation": f"(pixel − {_list(form['mean'])}) / {_list(form['std'])}, of 0 to 255",
        "classes": _classes(about.get("classes")),
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value)
    run = shlex.quote(str(best.parent))
    arguments = ", ".join(f"{name}={about[name]}" for name in ("num_labels", "num_channels"))
    return f"""\
# {summary.run}

Trained by `paceline train`; `config.toml` has all flags.

| | |
| --- | --- |
{table}
## Use

```sh
paceline predict {run} IMAGE_OR_FOLDER
paceline evaluate {run}
paceline export {run} --format onnx
```

```python
import torch
from paceline.models.zoo import build_model

state = torch.load("{best.name}", weights_only=True)
model = build_model("{about["model"]}", {arguments})
model.load_state_dict(state)
model.eval()
print(state.about)  # size and normalisation of images, names of classes
```

{_files(weights)}
"""


def _list(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def _classes(names: Sequence[str] | None) -> str:
    if names is None:
        return ""
    more = f", … ({len(names):,})" if len(names) > _MOST else ""
    return ", ".join(name.replace("|", r"\|") for name in names[:_MOST]) + more


def _files(weights: Sequence[Path]) -> str:
    if len(weights) == 1:
        return f"`{weights[0].name}` has the weights after the last epoch."
    last, best = weights
    return f"`{best.name}` has the weights of the best epoch, `{last.name}` those of the last one."
