"""python -m dist_amp.verify --bit_exact: the same bits of each way of running, on your own task.

Each combination of ranks, strategy and precision takes the first steps of an epoch and its last
ones with parallel.bit_exact=true. Their losses, module outputs, gradients and parameters are
compared by hash with those of the first combination in the same precision.
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_amp.config.load import load_config
from dist_amp.data import Padding
from dist_amp.diagnostics.nonfinite import class_name, clean_name
from dist_amp.errors import ConfigError, DataError
from dist_amp.run import Run, build_run
from dist_amp.settings import Config
from dist_amp.step import train_step
from dist_amp.verify.cells import Row, full, rows_on_ranks
from dist_amp.world import World

# Of a step: {"output 3": a module's of micro-batch 3, ...}, in the order of the computation.
Hashes = dict[str, str]


def verify_bits(argv: Sequence[str], rows: list[Row]) -> int:
    """Print each row's hash and what differs first; return 1 if any row differs."""
    began = time.perf_counter()
    given = any(word.startswith("--parallel.bit_exact") for word in argv)
    if not load_config(argv).parallel.bit_exact and given:
        raise ConfigError("parallel.bit_exact=false: verify --bit_exact turns it on; leave it out")
    if wrong := [size for size, _, _ in rows if size & (size - 1)]:
        lower = 2 ** (wrong[0].bit_length() - 1)
        raise ConfigError(
            f"--world_sizes has {wrong[0]}, and bit-exact training takes powers of two; use "
            f"{lower} or {2 * lower}"
        )
    if len(rows) < 2:
        raise ConfigError(
            f"nothing to compare: {len(rows)} combinations of ranks, strategy and precision exist "
            "for these options; give more, as in --world_sizes 1,2"
        )
    expected: dict[str, list[Hashes]] = {}  # by precision
    compared: Counter[str] = Counter()  # by precision
    same = 0
    refused = 0
    print("ranks  strategy  precision  bits              result", flush=True)
    for size in sorted({size for size, _, _ in rows}):
        largest = max(size for size, _, _ in rows)
        of_size = [row for row in rows if row[0] == size]
        for row, result in rows_on_ranks(size, argv, of_size, partial(prepare, largest)):
            text = result
            bits = "-"
            if isinstance(result, list):
                bits = hash_of(json.dumps(result).encode())
                text = first_difference(expected.setdefault(row[2], result), result)
                compared[row[2]] += 1
                same += text == ""
            else:
                refused += text.startswith("refused:")
            print(f"{size:>5}  {row[1]:<8}  {row[2]:<9}  {bits:<16}  {text or 'same'}", flush=True)
    if compared.total() > same:
        print(
            "\nusual causes: random numbers that dist_amp does not seed, such as a generator of the"
        )
        print("task, and what the task or the forward keeps from one micro-batch to the next")
    failed = same + refused < len(rows)
    why = ""
    if max(compared.values(), default=0) < 2:
        failed = True
        why = "; nothing was compared, since no precision has two combinations that run"
    print(
        f"\n{'failed' if failed else 'passed'}: {same} of {len(rows)} have the same bits in their "
        f"precision, {refused} refused{why} ({time.perf_counter() - began:.0f} s)"
    )
    return int(failed)


def prepare(
    largest: int,
    world: World,
    config: Config,
) -> Callable[[Row], list[Hashes] | str]:
    """On each rank: what takes a row's steps. largest: the highest number of ranks."""
    batch = config.train.global_batch_size
    if batch == "auto":
        batch = 2 * largest * config.train.micro_batch_size
    config = replace(
        config,
        run=replace(config.run, dir="unused", resume="never"),
        train=replace(config.train, steps=4, global_batch_size=batch, accumulation_steps="auto"),
        eval=replace(config.eval, every="off"),
        checkpoint=replace(config.checkpoint, every="off"),
    )
    return partial(hashes_of_row, world, config)


def hashes_of_row(
    world: World,
    config: Config,
    row: Row,
) -> list[Hashes] | str:
    """Each step's hashes, on every rank; or why training refuses this way of running."""
    strategy: Any = row[1]
    precision = row[2]
    kind: dict[str, Any] = {"use_amp": precision != "fp32"}
    if precision != "fp32":
        kind["dtype"] = precision
    parallel: Any = replace(config.parallel, strategy=strategy, bit_exact=True)
    config = replace(config, parallel=parallel, precision=replace(config.precision, **kind))
    with ExitStack() as stack:
        try:
            run = build_run(config, world)
            stack.callback(run.close)
            size = run.data.plan.global_batch_size
            last = math.ceil(run.data.plan.length / size)
            steps = {0, 1, max(0, last - 2), last - 1}  # an epoch's last one may be partial
            return [hashes_of_step(run, step * size) for step in sorted(steps)]
        except (ConfigError, DataError) as error:
            return f"refused: {error}"


def hashes_of_step(run: Run, position: int) -> Hashes:
    """Take the step that begins at this sample; return its hashes, the same on every rank."""
    micro_batches = [batch for batch, _ in run.data.at(position)]
    outputs: list[Hashes] = []  # of each of this rank's micro-batches
    gradients: Hashes = {}
    handles = [run.optimizer.register_step_pre_hook(partial(hash_gradients, run, gradients))]
    for name, module in run.parallel.module.named_modules():
        what = f"{clean_name(name) or 'the model'} ({class_name(module)})"
        handles.append(module.register_forward_hook(partial(hash_output, outputs, what)))
    synchronised = run.parallel.gradient_sync
    run.parallel.gradient_sync = partial(micro_batch, synchronised, outputs)
    report = train_step(run, micro_batches)
    run.parallel.gradient_sync = synchronised
    for handle in handles:
        handle.remove()
    for number, batch in enumerate(micro_batches):
        outputs[number]["the loss"] = hash_tensor(report.losses[number])
        if isinstance(batch, Padding):
            outputs[number] = {}
    ranks = [json.loads(text) for text in run.world.gather_texts(json.dumps(outputs))]
    step: Hashes = {}
    for number, of_ranks in enumerate(zip(*ranks, strict=True)):
        for rank, hashes in enumerate(of_ranks):
            where = f"of micro-batch {number * run.world.world_size + rank}"
            step |= {f"{what} {where}": one for what, one in hashes.items()}
    step |= gradients
    step["the gradient norm"] = hash_tensor(report.norm)
    for name, parameter in run.parallel.module.named_parameters():
        step[f"the updated parameter {clean_name(name)}"] = hash_tensor(full(parameter))
    return step


@contextmanager
def micro_batch(
    synchronised: Callable[[bool], AbstractContextManager[Any]],
    outputs: list[Hashes],
    is_last: bool,
) -> Iterator[None]:
    outputs.append({})
    with synchronised(is_last):
        yield


def hash_output(
    hashes: list[Hashes],
    what: str,
    module: nn.Module,
    _: Any,
    output: Any,
) -> None:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    of_call = hashes[-1]
    call = f"the output of {what}"
    if call in of_call:
        call = f"{call}, call {len(of_call)},"
    of_call[call] = " ".join(map(hash_tensor, tensors))


def hash_gradients(
    run: Run,
    hashes: Hashes,
    *_: Any,
) -> None:
    """From the last parameter to the first: the order of the backward."""
    for name, parameter in reversed(list(run.parallel.module.named_parameters())):
        if parameter.grad is not None:
            hashes[f"the gradient of {clean_name(name)}"] = hash_tensor(full(parameter.grad))


def hash_tensor(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().flatten()
    return hash_of(flat.view(torch.uint8).numpy())


def hash_of(content: Any) -> str:
    """64 bits, as hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def first_difference(expected: Sequence[Hashes], hashes: Sequence[Hashes]) -> str:
    """What differs first, in words; "" if nothing does. Micro-batches of padding are left out."""
    for step, (theirs, ours) in enumerate(zip(expected, hashes, strict=True), start=1):
        for what, one in theirs.items():
            if ours.get(what) != one:
                return f"FAIL: {what} differs first, in step {step}"
    return ""
