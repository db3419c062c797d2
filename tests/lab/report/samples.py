# SPDX-License-Identifier: Apache-2.0
"""Run folders as a training run would leave them, made of formulas and a seeded generator."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

MODEL_BYTES = 4 * 812_544


@dataclass(frozen=True)
class Sample:
    """One made-up run: how often it communicates, how much, how long its messages take, how well it learns."""

    folder: str
    strategy: str
    period: int = 1
    traffic: float = 2.0
    overlap: float = 0.0
    pace: float = 1.0
    paper: str | None = None


SAMPLES = (
    Sample("ddp", "ddp", traffic=1.5, overlap=0.35),
    Sample("all-reduce", "AllReduce(codec=None, bucket_megabytes=4)", traffic=1.5, overlap=0.4),
    Sample(
        "local-sgd",
        "LocalSGD(period=8)",
        period=8,
        traffic=1.5,
        pace=0.96,
        paper="arXiv:1805.09767",
    ),
    Sample(
        "slow-mo",
        "SlowMo(base=PushSum(topology=OnePeerExponential()), period=48, momentum=0.7, lr=1.0)",
        period=1,
        traffic=0.5,
        overlap=0.2,
        pace=1.02,
        paper="arXiv:1910.00643",
    ),
    Sample("push-sum", "PushSum(topology=OnePeerExponential())", traffic=1.0, overlap=0.3, pace=0.93),
)


def write_comparison(folder: Path, samples: tuple[Sample, ...] = SAMPLES, *, steps: int = 300) -> Path:
    """A comparison folder with a run folder for each sample."""
    for place, sample in enumerate(samples):
        write_run(folder / sample.folder, sample, steps=steps, seed=place)
    names = [sample.folder for sample in samples]
    _write(folder / "comparison.json", {"runs": names, "title": "Five strategies on text over 100 Mbit/s"})
    return folder


def write_run(folder: Path, sample: Sample = SAMPLES[0], *, steps: int = 300, workers: int = 4, seed: int = 0) -> Path:
    """One run folder; the files are what the command line writes."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    compute, bits_per_second = 0.11, 1e8
    rounds = [sample.traffic * MODEL_BYTES if (step + 1) % sample.period == 0 else 0.0 for step in range(steps)]
    transfers = [8 * nbytes / bits_per_second for nbytes in rounds]
    metrics, spans = [], []
    clock = payload = 0.0
    for step in range(steps):
        times = [compute * generator.uniform(0.9, 1.15) for _ in range(workers)]
        slowest = max(times)
        exposed = max(0.0, transfers[step] - sample.overlap * compute)
        spans += _step_spans(step, clock, times, transfers[step], exposed)
        seconds = slowest + exposed + 0.004
        clock += seconds
        payload += rounds[step]
        metrics.append(_step_line(step + 1, clock, payload, exposed, seconds, sample, generator))
        if (step + 1) % 50 == 0:
            metrics.append(_evaluation_line(step + 1, clock, payload, sample))
    _lines(folder / "metrics.jsonl", metrics)
    _lines(folder / "timeline.jsonl", [span for span in spans if span["step"] < 120])
    _write(folder / "config.json", _config(sample, steps, workers))
    _write(folder / "summary.json", _summary(sample, metrics, steps, workers))
    return folder


def loss_at(step: int, pace: float) -> float:
    """A curve that falls like a language model's."""
    return 1.55 + 4.0 * math.exp(-step * pace / 55) * 0.6 + 1.6 / (1 + step * pace / 40)


def _step_line(step, clock, payload, exposed, seconds, sample, generator):
    return {
        "step": step,
        "seconds": clock,
        "loss": loss_at(step, sample.pace) + generator.gauss(0, 0.07),
        "payload_bytes": round(payload),
        "compute_seconds": seconds - exposed,
        "exposed_seconds": exposed,
        "step_seconds": seconds,
    }


def _evaluation_line(step, clock, payload, sample):
    loss = loss_at(step, sample.pace) + 0.06
    return {
        "step": step,
        "seconds": clock,
        "payload_bytes": round(payload),
        "eval_loss": loss,
        "eval_metric": loss / math.log(2),
    }


def _step_spans(step, clock, times, transfer, exposed):
    spans = []
    for rank, seconds in enumerate(times):
        done = clock + seconds
        end = clock + max(times) + exposed
        spans.append({"rank": rank, "kind": "compute", "name": "forward backward", "start": clock, "end": done})
        if transfer:
            half = (end - transfer + end) / 2
            spans.append(
                {"rank": rank, "kind": "communication", "name": "bucket 1", "start": end - transfer, "end": half}
            )
            spans.append({"rank": rank, "kind": "communication", "name": "bucket 0", "start": half - 0.002, "end": end})
            spans.append({"rank": rank, "kind": "wait", "name": "mean", "start": done, "end": end})
    return [{**span, "step": step} for span in spans]


def _config(sample, steps, workers):
    config = {
        "thinwire": "0.1.0",
        "torch": "2.13.0+cpu",
        "python": "3.12.8",
        "task": "text",
        "model": "gpt-0.8m",
        "strategy": sample.strategy,
        "workers": workers,
        "link": "100mbit",
        "steps": steps,
        "batch_size": 16,
        "seed": 0,
        "optimizer": "AdamW",
        "lr": 0.001,
        "command": f"thinwire train --task text --strategy '{sample.strategy}' --workers {workers} --link 100mbit",
        "parameters": MODEL_BYTES // 4,
        "host": {"cores": 2, "cpu": "AMD EPYC 7B13"},
    }
    return {**config, "paper": sample.paper} if sample.paper else config


def _summary(sample, metrics, steps, workers):
    lines = [line for line in metrics if "loss" in line]
    last, evaluation = lines[-1], metrics[-1]
    payload = last["payload_bytes"] / steps
    to_target = next((line["seconds"] for line in lines if loss_at(line["step"], sample.pace) <= 2.0), None)
    return {
        "strategy": sample.strategy,
        "task": "text",
        "workers": workers,
        "link": "100mbit",
        "steps": steps,
        "seconds": last["seconds"],
        "seconds_per_step": last["seconds"] / steps,
        "payload_bytes_per_worker_per_step": payload,
        "wire_bytes_per_worker_per_step": payload * 1.034,
        "compute_seconds_per_step": sum(line["compute_seconds"] for line in lines) / steps,
        "exposed_seconds_per_step": sum(line["exposed_seconds"] for line in lines) / steps,
        "train_loss": sum(line["loss"] for line in lines[-max(1, steps // 10) :]) / max(1, steps // 10),
        "eval_loss": evaluation.get("eval_loss"),
        "eval_metric": evaluation.get("eval_metric"),
        "metric": "bits per byte",
        "seconds_to_target": to_target,
        "target_loss": 2.0,
    }


def _write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def _lines(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
