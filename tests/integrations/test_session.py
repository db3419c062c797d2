# SPDX-License-Identifier: Apache-2.0
"""The end of a session that fails, without any trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.small import Net, optimizer_of
from thinwire import CommTimeoutError
from thinwire.integrations.session import Session


def test_a_model_is_let_go_where_the_last_agreement_fails() -> None:
    model = Net()
    optimizer, trainer = optimizer_of(model), SimpleNamespace(teardown=lambda: None)
    session = Session(model, optimizer, "LocalSGD(period=2)", {})
    session.call_before(trainer, "teardown", lambda: None)

    def fails() -> Any:
        raise CommTimeoutError("rank 1 is not answering")

    session.worker.consensus = fails  # type: ignore[method-assign]
    own = trainer.teardown
    with pytest.raises(CommTimeoutError, match="not answering"):
        session.finish()
    assert getattr(trainer, "teardown", None) is not own
    Session(model, optimizer, "LocalSGD(period=2)", {}).finish()


def test_an_abandoned_session_puts_the_workers_own_parameters_back() -> None:
    model = Net()
    session = Session(model, optimizer_of(model), "LocalSGD(period=2)", {})
    own = [x.detach().clone() for x in model.parameters()]
    session.hold()
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    session.abandon()
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), own, strict=True))
