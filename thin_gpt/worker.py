# SPDX-License-Identifier: Apache-2.0
"""One worker's process: computes the loss of each batch that the referee sends and gives it to the racer.

The worker never has the text. It gets one batch at a time, reports after each step, and sends its parameters when the
referee asks. The referee keeps the time.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from thin_gpt.sandbox import enclose, set_limits
from thin_gpt.task import SIZES, loss_of, model_of, tokens_of

_DEATH_SIGNAL, _NEW_NETWORK = 1, 0x40000000


class Passes(TorchDispatchMode):
    """Counts forward and backward passes of the model by the operations of its embedding, whoever calls them."""

    forward = backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call the operation."""
        name = str(func)
        self.forward += name == "aten.embedding.default"
        self.backward += name == "aten.embedding_dense_backward.default"
        return func(*args, **(kwargs or {}))


def load_racer(path: str, settings: dict[str, Any]) -> Any:
    """An instance of the class `Racer` of a file."""
    spec = importlib.util.spec_from_file_location("thin_gpt_submission", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Racer(**settings)


def flat_bytes(tensors: list[Tensor]) -> bytearray:
    """The elements of tensors as fp32, in order."""
    buffer = bytearray(4 * sum(each.numel() for each in tensors))
    view, place = torch.frombuffer(buffer, dtype=torch.float32), 0
    for each in tensors:
        view[place : place + each.numel()].copy_(each.detach().reshape(-1))
        place += each.numel()
    return buffer


def load_flat(buffer: bytes, tensors: list[Tensor]) -> None:
    """Copy elements from `flat_bytes` back."""
    view, place = torch.frombuffer(bytearray(buffer), dtype=torch.float32), 0
    for each in tensors:
        each.detach().copy_(view[place : place + each.numel()].view_as(each))
        place += each.numel()


def checkpoint_tensors(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Parameters and the tensors of the optimizer's state, in a fixed order."""
    states = [optimizer.state.get(p, {}) for p in model.parameters()]
    return [*model.parameters(), *(s[key] for s in states for key in sorted(s) if isinstance(s[key], Tensor))]


def main(pipe: Connection, config: dict[str, Any]) -> None:
    """Run one worker, and report an exception to the referee."""
    try:
        _Worker(pipe, config).run()
    except BaseException as error:
        last = traceback.format_exc().strip().splitlines()
        pipe.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"[:500], "trace": last[-12:]}).encode())
    # A racer's threads and processes must not keep this one alive.
    pipe.close()
    os._exit(0)


class _Worker:
    def __init__(self, pipe: Connection, config: dict[str, Any]) -> None:
        self.pipe, self.config, self.size = pipe, config, SIZES[config["size"]]
        self.violations: list[str] = []
        self.forwards = self.updates = 0

    def run(self) -> None:
        system, config = ctypes.CDLL(None, use_errno=True), self.config
        system.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.setpgid(0, 0)
        if config["namespace"]:
            place = os.open(config["namespace"], os.O_RDONLY)
            if system.setns(place, _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"setns {config['namespace']}")
            os.close(place)
        os.environ.update(config["environment"])
        # Output would be a write, and compiled bytecode too.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        sys.dont_write_bytecode = "disk" not in config["allow"]
        torch.set_num_threads(1)
        set_limits(self.size.memory, config["cpu_seconds"], config["allow"])
        if not config["elastic"]:
            dist.init_process_group("gloo", timeout=timedelta(seconds=config["patience"]))
        enforced = enclose(config["held"], config["allow"], self.violations)
        racer = load_racer(config["file"], config["settings"])
        self.model = model_of(self.size, config["seed"])
        make = getattr(racer, "optimizer", None)
        optimizer = make(self.model, config["rate"]) if make else self._adamw()
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        if config["restored"]:
            self._restore(optimizer)
        self.model.register_forward_pre_hook(self._count_forward)
        optimizer.register_step_post_hook(self._count_update)
        module = racer.setup(self.model, optimizer) or self.model
        self._send({"ready": True, "sandbox": enforced, **self._report(racer)})
        self._serve(racer, module, optimizer)

    def _adamw(self) -> Optimizer:
        return AdamW(self.model.parameters(), lr=self.config["rate"], betas=(0.9, 0.95), weight_decay=0.1)

    def _serve(self, racer: Any, module: nn.Module, optimizer: Optimizer) -> None:
        passes = Passes()
        while True:
            asked = json.loads(self.pipe.recv_bytes())
            if "finish" in asked:
                before = flat_bytes(list(self.model.parameters()))
                racer.finish()
                report = self._report(racer) | {"finished": True, "forward": passes.forward}
                self._send(report | {"backward": passes.backward, "violations": self.violations})
                self.pipe.send_bytes(before)
                self.pipe.send_bytes(flat_bytes(list(self.model.parameters())))
                # Until all have finished: connections that close early would fail the others.
                self.pipe.poll(None)
                return
            tokens = tokens_of(self.pipe.recv_bytes(), self.size)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * asked["factor"]
            if asked["sleep"]:
                time.sleep(asked["sleep"])
            optimizer.zero_grad(set_to_none=True)
            if self.config["audit"]:
                with passes:
                    loss = loss_of(module, tokens)
                    racer.step(loss)
            else:
                loss = loss_of(module, tokens)
                racer.step(loss)
            self._send({**self._report(racer), "step": asked["step"], "loss": loss.item()})
            if asked["snapshot"]:
                self.pipe.send_bytes(flat_bytes(list(self.model.parameters())))
                if self.config["checkpoints"]:
                    self.pipe.send_bytes(flat_bytes(checkpoint_tensors(self.model, optimizer)))

    def _report(self, racer: Any) -> dict[str, Any]:
        progress = racer.progress if self.config["elastic"] else None
        return {"sent": float(racer.sent), "forwards": self.forwards, "updates": self.updates, "progress": progress}

    def _restore(self, optimizer: Optimizer) -> None:
        # A step with zero gradients makes the optimizer's state, which is then overwritten like the parameters.
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        load_flat(self.pipe.recv_bytes(), checkpoint_tensors(self.model, optimizer))

    def _count_forward(self, *_: Any) -> None:
        self.forwards += 1

    def _count_update(self, *_: Any) -> None:
        self.updates += 1

    def _send(self, report: dict[str, Any]) -> None:
        self.pipe.send_bytes(json.dumps(report).encode())
