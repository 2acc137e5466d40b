"""What a wire's arithmetic costs: each kernel, and torch's operation of its kind.

    python benchmarks/wires.py [--quick]

25.6 million values, a ResNet-50's gradients, on one thread. What stands beside a kernel is torch's
nearest operation, which does less: a cast keeps no error, weighs nothing and adds nothing. In the
last column are pieces as small as a layer's, where what counts is the call. int4 and topk are
codecs of merges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from command_line import Options, run_script
from rounds import interleaved
from torch import Tensor

from paceline.codecs.kernels.compiled import add_up
from paceline.codecs.merge_codecs import merge_codec

NUMEL, SMALL, CALLS = 25_600_000, 64, 500

Work = dict[str, Callable[[], object]]


def main() -> None:
    parser = Options(__doc__, quick="few values, to see that it runs")
    parser.add("--rounds", type=int, default=11)
    options = parser.parse_args()
    numel, rounds = (256_000, 3) if options.quick else (NUMEL, options.rounds)
    torch.set_num_threads(1)
    values, few = ([torch.randn(n) for _ in range(5)] for n in (numel, SMALL))
    large = {"kernel": kernels_work(values), "torch": torch_work(values)}
    small = {"call": kernels_work(few), "torch's call": torch_work(few)}
    times = run(large, rounds, calls=1, unit=1e-3) | run(small, rounds, calls=CALLS, unit=1e-6)
    print(f"{numel} values, one thread, medians of {rounds} rounds\n")
    heads = ("kernel, ms", "torch, ms", "call, µs", "torch's call, µs")
    print(f"{'':22}" + "".join(f"{head:>18}" for head in heads))
    for name in large["kernel"]:
        row = [times.get((column, name)) for column in (*large, *small)]
        print(f"{name:22}" + "".join(f"{'' if t is None else f'{t:.2f}':>18}" for t in row))


def kernels_work(values: Sequence[Tensor]) -> Work:
    """Name what the kernels and codecs do, with five tensors of values."""
    *parts, out = values
    numel, error, missed, sums = len(out), parts[-1], torch.empty_like(out), torch.empty_like(out)
    work: Work = {}
    for name in ("bf16", "int8", "int4", "topk:0.02"):
        codec = merge_codec(name)
        assert codec is not None
        data = torch.zeros(codec.size(numel), dtype=torch.uint8)
        work[f"{name} encode"] = partial(
            codec.encode, [(0, numel, parts[0])], 0.5, error, data, missed
        )
        work[f"{name} decode"] = partial(codec.decode, data, out)
        work[f"{name} add"] = partial(codec.decode, data, out, add=True)
        coded, ours = torch.zeros_like(data), [(0, numel, parts[0])]
        work[f"{name} reduce"] = partial(
            codec.reduce, [coded, None], ours, 0.5, error, data, missed, sums
        )
    for count in (1, 2, 4):
        added = [[(0, numel, part)] for part in parts[:count]]
        weights = [0.5, 0.25, 1.0, 0.1][:count]
        work[f"sum of {count}"] = partial(add_up, added, weights, out)
        if count < 4:
            work[f"sum of {count} past caches"] = partial(
                add_up, added, weights, out, past_caches=True
            )
    return work


def torch_work(values: Sequence[Tensor]) -> Work:
    """Name torch's operations as what they stand beside."""
    first, second, *_, out = values
    half = first.bfloat16()
    return {
        "bf16 encode": partial(half.copy_, first),
        "bf16 decode": partial(out.copy_, half),
        "bf16 add": partial(out.add_, half),
        "sum of 1": partial(torch.mul, first, 0.5, out=out),
        "sum of 2": partial(torch.add, first, second, alpha=0.5, out=out),
    }


def run(
    columns: dict[str, Work], rounds: int, *, calls: int, unit: float
) -> dict[tuple[str, str], float]:
    """Time all work in turns; return medians of a call, after one that isn't timed."""
    contenders = {
        (column, name): partial(timed, function, calls)
        for column, work in columns.items()
        for name, function in work.items()
    }
    for contender in contenders.values():
        contender()
    names = {" / ".join(key): key for key in contenders}
    results = interleaved({name: contenders[key] for name, key in names.items()}, rounds)
    return {names[name]: median(values) / unit for name, values in results.items()}


def timed(function: Callable[[], object], calls: int) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    run_script(main)
