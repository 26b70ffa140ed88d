"""Time of the optimizer's update against torch.optim.AdamW(fused=True) with as many elements.

    python -m scripts.bench.optimizer --threads 1

There is one process, so nothing is reduced or gathered. Both optimizers run in every round. The
table shows medians over the rounds; the ratio is the median of the ratios per round. Both clip
within the update, by a divisor that is a tensor on the device (torch's ``grad_scale``).
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from olmo_shard.config import OptimConfig, RunConfig, load_config
from olmo_shard.distributed.mesh import build_mesh
from olmo_shard.distributed.runtime import runtime
from olmo_shard.nn.transformer import Transformer
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.optim.update_rule import StepScalars
from olmo_shard.parallel.apply import parallelize
from scripts.bench import tables
from scripts.bench.stopwatch import now

PROGRAM = "scripts.bench.optimizer"


def main() -> None:
    """Measure the update alone, with clipping, and the whole step; print the table."""
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=summary)
    parser.add_argument("--config", default="configs/cpu-bench.yaml")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    config = load_config(arguments.config, [])
    run = RunConfig(device=config.run.device, threads=arguments.threads)
    with runtime(None, run) as here:
        # Model and optimizer as in training, with random gradients.
        with torch.device("meta"):
            model = Transformer(config.model)
        mesh = build_mesh(here)
        parallel_model = parallelize(model, mesh, config.parallel)
        ours = DistributedOptimizer(parallel_model, mesh, config.optim)
        parallel_model.begin_window()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.normal_(std=1e-3)
        # torch's optimizer, on copies of the weights.
        theirs = _torch_adamw(model, config.optim)
        clip = config.optim.max_grad_norm or 1.0
        parameters = [p for group in theirs.param_groups for p in group["params"]]

        def clipped() -> None:
            nn.utils.clip_grad_norm_(parameters, clip, foreach=True)
            theirs.step()

        print(f"{tables.origin(PROGRAM)}\n")
        print(f"{sum(p.numel() for p in parameters):,} FP32 elements, {here.threads} thread(s)\n")
        what = "olmo_shard / torch.optim.AdamW(fused=True)"
        print("\n".join(tables.header(what, "olmo_shard", "torch", "ratio")))
        one, rounds = torch.ones((), device=here.device), arguments.rounds
        _compare("update / step()", _update(ours, None), theirs.step, rounds)
        # What torch.amp.GradScaler sets on a fused optimizer.
        vars(theirs).update(grad_scale=one, found_inf=torch.zeros_like(one))
        _compare(
            "update, clipped / step() with grad_scale", _update(ours, one), theirs.step, rounds
        )
        vars(theirs).update(grad_scale=None, found_inf=None)
        whole = "norm, clip, update / clip_grad_norm_, step()"
        _compare(whole, lambda: ours.step(1e-4), clipped, rounds)


def _update(optimizer: DistributedOptimizer, divisor: Tensor | None) -> Callable[[], object]:
    """The function that updates this rank's slices, without reduction, norm and gather."""
    rule, count = optimizer.rule, torch.zeros_like(optimizer.step_count)

    def run() -> None:
        count.add_(1)
        skip = torch.zeros_like(count)
        scalars = StepScalars(lr=1e-4, divisor=divisor, skip=skip, step=count)
        rule.begin_step(scalars)
        for part in optimizer.slices:
            rule.update(part, scalars)

    return run


def _torch_adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """torch's optimizer on copies of a model's parameters, with random gradients."""
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    for copy in copies.values():
        copy.grad = torch.randn_like(copy) * 1e-3
    matrices = [p for p in copies.values() if p.ndim > 1]
    vectors = [p for p in copies.values() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(
        groups, lr=1e-4, betas=betas, weight_decay=config.weight_decay, fused=True
    )


def _compare(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> None:
    pairs = []
    for round_ in range(rounds + 1):
        # The second function runs with the caches as the first one left them: alternate the order.
        order = (ours, theirs) if round_ % 2 else (theirs, ours)
        seconds = {function: _seconds(function) for function in order}
        pairs.append((seconds[ours], seconds[theirs]))
    pairs = pairs[1:]  # the first round allocates
    own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    times = (f"{seconds * 1e3:.1f} ms" for seconds in (own, other))
    print(tables.line(name, *times, f"{ratio:.2f}"))


def _seconds(function: Callable[[], object]) -> float:
    begun = now()
    function()
    return now() - begun


if __name__ == "__main__":
    main()
