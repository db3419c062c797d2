# SPDX-License-Identifier: Apache-2.0
"""A replica knows where each parameter tensor lies in its vector, and so do its parts."""

from __future__ import annotations

import torch

import thinwire
from thinwire import CountingComm, Local, Replica
from thinwire.core.replica.flat import Segment, cut_out, lay_out, views


def replica(*shapes: tuple[int, ...]) -> Replica:
    segments = lay_out([(f"tensor {i}", torch.empty(shape)) for i, shape in enumerate(shapes)])
    x = torch.arange(float(segments[-1].stop))
    return Replica(x, x.new_empty(0), CountingComm(0, 2), lr=lambda: 0.1, segments=segments)


def test_a_worker_gives_its_replica_the_names_and_shapes_of_the_models_parameters() -> None:
    model = torch.nn.Linear(3, 2)
    worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), Local(), comm=CountingComm(0, 2))
    segments = worker.replicas[0].segments
    assert [(s.name, s.start, s.stop, s.shape) for s in segments] == [("weight", 0, 6, (2, 3)), ("bias", 6, 8, (2,))]


def test_a_vector_without_names_is_one_segment() -> None:
    r = Replica(torch.zeros(5), torch.zeros(0), CountingComm(0, 2), lr=lambda: 0.1)
    assert r.segments == (Segment("", 0, (5,), (1,)),)


def test_a_part_of_the_whole_vector_has_the_same_segments() -> None:
    r = replica((2, 3), (4,))
    assert r.part("base").segments == r.segments


def test_a_slice_has_the_tensors_in_it_and_vectors_for_those_that_are_cut() -> None:
    r = replica((2, 3), (4,), (2, 2))
    part = r.part("fragment", slice(4, 12))
    assert [(s.name, s.start, s.shape) for s in part.segments] == [
        ("tensor 0", 0, (2,)),
        ("tensor 1", 2, (4,)),
        ("tensor 2", 6, (2,)),
    ]
    assert torch.equal(torch.cat([view.flatten() for view in views(part.x, part.segments)]), r.x[4:12])


def test_slices_of_slices_and_open_ends_have_no_gaps() -> None:
    inner = replica((5,), (3, 2), (4,)).part("half", slice(3, None)).part("rest", slice(-7, None))
    assert inner.x.tolist() == [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    assert [(s.name, s.start, s.stop) for s in inner.segments] == [("tensor 1", 0, 3), ("tensor 2", 3, 7)]
    assert cut_out(inner.segments, slice(0, 0)) == ()
