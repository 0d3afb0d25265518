"""The training loop, top to bottom."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from kernelguard_train import compiled, isolation, recompute
from kernelguard_train.checkpoint import Checkpoints, Progress, complete
from kernelguard_train.config import Config
from kernelguard_train.errors import DataError, Interrupted
from kernelguard_train.export import export
from kernelguard_train.metrics import (
    WORST,
    Amounts,
    Health,
    Meter,
    attention_width,
    matmul_parameters,
    memory,
    peak_tflops,
    worst_of,
)
from kernelguard_train.model import Built, build, text_config
from kernelguard_train.optim import (
    NonFiniteGuard,
    clip_gradients,
    gradient_norm,
    learning_rate,
    make_optimizer,
    set_rate,
)
from kernelguard_train.profiling import Recorder
from kernelguard_train.ranks import Ranks, StopRequest
from kernelguard_train.report import Report
from kernelguard_train.sharding import make_mesh
from kernelguard_train.stream import Position, Step, batches_per_step, load_steps

log = logging.getLogger("kernelguard_train")
WARMUP_STEPS = 2
"""Steps that the summary leaves out: kernels are compiled and tuned in them."""


def train(config: Config, ranks: Ranks, report: Report, stop: StopRequest) -> Progress:
    """Trains as configured, from the newest checkpoint if there is one, and returns how far it came.

    Raises:
        TrainError: when it cannot start or go on; Interrupted after a SIGTERM, with a checkpoint saved.
    """
    torch.manual_seed(config.train.seed)
    torch.use_deterministic_algorithms(config.train.deterministic)
    batches_per_step(config, ranks.world)

    vocabulary = text_config(config).vocab_size

    def steps_from(position: Position) -> Iterator[Step]:
        return load_steps(config, vocabulary, rank=ranks.rank, world=ranks.world, start=position, device=ranks.device)

    # The process that prepares samples imports for seconds: in a new run it does so while this one makes the model. Not
    # while a checkpoint is read: should that process die, torch raises it here, and a good checkpoint would be called
    # unreadable.
    steps = None if complete(config) else steps_from(Position())

    # The model, on all ranks together, and its optimizer.
    mesh = make_mesh(ranks.device, ranks.world, config.parallel.shard)
    compiled.load()
    built = build(config, mesh, ranks.device)
    network = built.network
    optimizer = make_optimizer(network, config.optim, ranks.device)
    guard = NonFiniteGuard(config.optim.nonfinite_limit)
    _describe(built, ranks)
    report.built(built.facts(ranks.device))

    # Nothing is trained before it is certain that packed samples do not see each other.
    if config.batch.mode == "packed" and config.model.check_isolation:
        isolation.check(network, built.parts.embedding, vocabulary, ranks.device, config.batch.tokens)
        log.info("isolation: no gradient crosses a sample boundary on this model")

    # Go on where an earlier run stopped.
    checkpoints = Checkpoints(config, ranks, network, optimizer)
    resumed = checkpoints.resume()
    progress = resumed or Progress()
    if resumed:
        log.info("resumed at step %d", progress.step)
    if steps is None or resumed:
        steps = steps_from(progress.position)

    name = torch.cuda.get_device_name() if ranks.device.type == "cuda" else ""
    meter = Meter(
        matmul_parameters(built.network.lm, built.text),
        attention_width(built.parts.layers, built.text),
        peak=peak_tflops(name, config.report.peak_tflops),
        world=ranks.world,
        warmup=WARMUP_STEPS,
    )
    health = Health(ranks.device)
    if health.note and ranks.device.type == "cuda":
        log.info("note: %s", health.note)
    ended = time.perf_counter()
    while not config.train.steps or progress.step < config.train.steps:
        begun = ended
        step = next(steps, None)
        waited = time.perf_counter() - begun
        amounts, stopping = _agree(step, ranks, checkpoints, stop)
        if step is None:
            break
        if progress.step == (resumed.step if resumed else 0) and config.model.recompute == "auto":
            _choose_rungs(built, step, ranks)

        # Forward and backward. FSDP averages over ranks, so the sum over all of them is `world` times that.
        progress.done = (progress.step + 1) / config.train.steps if config.train.steps else step.progress or 0.0
        rate = learning_rate(config.optim, progress.done)
        set_rate(optimizer, rate)
        loss = torch.zeros((), device=ranks.device)
        watched = ranks.first and progress.step + 1 == config.report.profile
        recorder = Recorder(report.folder / "profile.json" if watched else None)
        with network.computing():
            for number, batch in enumerate(step.batches):
                if number >= len(step.batches) - 2:
                    recorder.start()
                part = network(batch.to(ranks.device), ranks.world / max(1, amounts.trained))
                part.backward()
                loss += part.detach()

        # The update, unless a number in it is not finite; all ranks see the same loss and norm.
        norm = gradient_norm(network.parameters())
        dist.all_reduce(loss)
        queued = time.perf_counter()
        mean_loss, norm_value = (torch.stack([loss / ranks.world, norm])).tolist()
        if guard.accepts(mean_loss, norm_value):
            clip_gradients(network.parameters(), norm_value, config.optim.clip)
            optimizer.step()
        else:
            progress.skipped += 1
            log.warning("step %d: loss %s, norm %s: not finite, skipped", progress.step + 1, mean_loss, norm_value)
        optimizer.zero_grad(set_to_none=True)
        recorder.finish(batches=min(2, len(step.batches)), tokens=sum(batch.size for batch in step.batches[-2:]))

        # Book-keeping.
        progress.step += 1
        progress.position = step.after
        progress.tokens += amounts.valid
        progress.trained += amounts.trained
        ended = time.perf_counter()
        values = {
            "loss": mean_loss,
            "norm": norm_value,
            "lr": rate,
            **meter.add(amounts, ended - begun, waited, counted=not watched),
        }
        values["queue_s"] = queued - begun - waited
        values |= {"tokens": progress.tokens, "samples": amounts.samples, "skipped": progress.skipped}
        values |= {f"rows_{k}": getattr(step.counts, k) for k in ("bad", "truncated", "split", "dropped")}
        # NVML takes milliseconds to answer, so it is asked as often as a person looks: on every rank.
        extra = _worst_rank(ranks, health, waited) if progress.step % config.report.every == 0 else {}
        report.step(progress.step, progress.done, {**values, **memory(), **extra})

        # Saving.
        if stopping:
            checkpoints.save(progress, wait=True)
            raise Interrupted(f"asked to stop: saved at step {progress.step}; the same command goes on from there")
        if config.checkpoint.every and progress.step % config.checkpoint.every == 0:
            checkpoints.save(progress)
            ended = time.perf_counter()

    if config.checkpoint.at_end:
        checkpoints.save(progress, wait=True)
    checkpoints.finish()
    report.summary(meter.summary())
    if config.checkpoint.export:
        log.info("exported to %s", export(network.lm, built.text, config, ranks))
    return progress


def _agree(step: Step | None, ranks: Ranks, checkpoints: Checkpoints, stop: StopRequest) -> tuple[Amounts, bool]:
    """What the step holds on all ranks together, and whether any rank was asked to stop.

    Raises:
        DataError: when the ranks are at different places in the data.
        CheckpointError: when a background save failed on any rank.
    """
    own = Amounts.of(step.batches if step else ())
    place = step.after.epoch + step.after.row + step.after.batches if step else 0
    trained, valid, computed, squared, samples, ended, places, failed, stopping = ranks.total(
        own.trained, own.valid, own.computed, own.squared, own.samples,
        step is None, place, checkpoints.poll(), stop.asked,
    )  # fmt: skip
    if failed:
        checkpoints.raise_failure()
    if ended not in (0, ranks.world) or places != place * ranks.world:
        raise DataError(
            f"the ranks are at different places in the data ({ended} of {ranks.world} have none left): "
            "they do not read the same source, or a read went wrong on some"
        )
    amounts = Amounts(trained=trained, valid=valid, computed=computed, squared=squared, samples=samples)
    return amounts, bool(stopping)


def _worst_rank(ranks: Ranks, health: Health, waited: float) -> dict[str, float]:
    """GPU health, memory and waiting for data, each of the rank where it is worst."""
    own = {**health.read(), "data_wait_max_s": waited, "peak_max_gib": memory().get("peak_gib", math.nan)}
    worst = worst_of(ranks.gather([own.get(name, math.nan) for name in WORST]))
    if worst.get("gpu_ecc_uncorrected", 0) > 0:
        log.warning(
            "the GPU of rank %d has uncorrected memory errors: %d since boot; numbers may be wrong",
            worst.get("gpu_ecc_uncorrected_rank", 0), worst["gpu_ecc_uncorrected"],
        )  # fmt: skip
    return worst


def _choose_rungs(built: Built, step: Step, ranks: Ranks) -> None:
    """Sets what each layer recomputes, from measured memory; on a CPU all of them stay fully recomputed."""
    if ranks.device.type != "cuda":
        return
    batch = step.batches[0].to(ranks.device)
    # AdamW's two moments, in float32, come with the first update.
    own = (p.to_local() if isinstance(p, DTensor) else p for p in built.network.parameters())
    reserve = sum(8 * p.numel() for p in own)

    def run() -> None:
        with built.network.computing():
            built.network(batch, 0.0).backward()

    rungs = recompute.choose(built.parts.layers, run, ranks.device, reserve, ranks.worst)
    built.network.zero_grad(set_to_none=True)
    log.info("recompute: %s", ", ".join(f"{rungs.count(rung)} layers {rung}" for rung in recompute.RUNGS))


def _describe(built: Built, ranks: Ranks) -> None:
    """What was decided, once, before the first step."""
    count = sum(parameter.numel() for parameter in built.network.parameters())
    log.info("%s: %.3f B parameters on %d x %s", built.text.model_type, count / 1e9, ranks.world, ranks.device.type)
    log.info("attention: %s", built.attention)
    for bound in built.bound:
        log.info("kernel: %s", bound)
    for note in built.notes:
        log.info("note: %s", note)
