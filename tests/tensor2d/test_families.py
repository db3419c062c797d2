# SPDX-License-Identifier: Apache-2.0
"""Models of `transformers` on a mesh: GPT-2 and Llama, made small, with random weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.oracles.tensor2d import drawn, serial_gradients
from tests.rules import for_each, refusals
from tests.tensor2d.helpers import gradients, run
from thinwire import CheckpointError, ConfigError
from thinwire.tensor2d import Mesh2D, cross_entropy_2d, parallelize_2d, read_safetensors_, whole_activation, whole_state
from thinwire.tensor2d.plan import Dense, Head, Norm, Site, Untouched

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.utils.logging.disable_progress_bar()  # its bars leave a thread behind


def seeded(model: Any) -> Any:
    for number, parameter in enumerate(model.parameters()):
        parameter.data = 0.2 * drawn(*parameter.shape, seed=number)
    return model.double()


def gpt2(vocabulary: int = 31, **settings: Any) -> Any:
    usual = {"vocab_size": vocabulary, "n_positions": 8, "n_embd": 24, "n_layer": 2, "n_head": 6}
    usual |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng():
        return seeded(transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**usual, **settings})))


def llama(key_heads: int = 6, tied: bool = False, family: str = "Llama", **settings: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=36,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=key_heads,
        max_position_embeddings=8,
        tie_word_embeddings=tied,
        **settings,
    )
    with torch.random.fork_rng():
        return seeded(getattr(transformers, f"{family}ForCausalLM")(config))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(31, (6, 8), generator=torch.Generator().manual_seed(1))
    attention, labels = torch.ones_like(ids), ids.clone()
    attention[4:, 5:] = 0
    labels[4:, 5:] = -100
    return ids, attention, labels


@pytest.mark.parametrize(
    ("make", "meshes", "tolerance"),  # Llama forms its norms and angles in single precision, whatever its dtype
    [
        (gpt2, [(1, 1), (2, 2), (2, 3), (3, 2)], 1e-10),
        (lambda: llama(6), [(2, 2), (2, 3), (3, 2)], 1e-6),
        (lambda: llama(2, tied=True), [(1, 4), (2, 2)], 1e-6),
        (lambda: llama(1), [(2, 2)], 1e-6),
        (lambda: llama(6, family="Mistral"), [(2, 2)], 1e-6),
        (lambda: llama(6, family="Qwen2"), [(2, 2)], 1e-6),
    ],
    ids=["gpt2", "llama", "llama with shared heads and a tied head", "llama with one key head", "mistral", "qwen2"],
)
@pytest.mark.slow
def test_a_model_of_transformers_is_laid_out(
    make: Callable[[], Any], meshes: list[tuple[int, int]], tolerance: float
) -> None:
    ids, attention, labels = batch()
    serial = make()
    logits = serial(ids, attention_mask=attention).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    grads = serial_gradients(serial)

    def work(mesh: Mesh2D) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = parallelize_2d(make(), mesh)
        own_ids, own_attention, own_labels = (mesh.rows_of(x) for x in (ids, attention, labels))
        ours = model(own_ids, attention_mask=own_attention, labels=own_labels)
        ours.loss.backward()
        whole = whole_activation(ours.logits, mesh, size=logits.shape[-1])
        return ours.loss.detach(), whole, gradients(model, mesh)

    for rows, columns in meshes:
        for our_loss, our_logits, found in run(rows, columns, work):
            torch.testing.assert_close(our_loss, loss.detach(), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(our_logits, logits.detach(), rtol=tolerance, atol=tolerance)
            assert found.keys() >= grads.keys()
            for name in grads:
                torch.testing.assert_close(found[name], grads[name], rtol=tolerance, atol=tolerance)


@for_each(["Gemma", "Granite", "Olmo"])
def test_other_families_are_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"{family}\w+: Untouched\(\)"):
        run(2, 2, lambda mesh: parallelize_2d(llama(family=family, pad_token_id=0), mesh))


class Doubled(Dense):
    """Makes a mistake on purpose."""

    def lay_out(self, site: Site) -> Any:
        made: Any = super().lay_out(site)
        made.weight.data.mul_(2)
        return made


@pytest.mark.parametrize("make", [gpt2, lambda: llama(2)], ids=["gpt2", "llama"])
def test_the_check_compares_the_loss_and_the_logits_of_a_model_of_transformers(make: Callable[[], Any]) -> None:
    ids, attention, labels = batch()
    batched = {"input_ids": ids, "attention_mask": attention, "labels": torch.where(labels < 0, 1, labels)}

    def work(mesh: Mesh2D) -> str:
        model = make()
        parallelize_2d(model, mesh, check=batched)
        model = make()
        before = model.loss_function
        with pytest.raises(ConfigError) as caught:
            parallelize_2d(model, mesh, {"*.mlp.*_proj": Doubled()}, check=batched)
        assert model.loss_function is before
        return str(caught.value)

    for message in run(2, 2, work):
        assert "check: the output 'loss' is" in message
        assert re.search(r"The first module to differ is \S+\.0\.mlp", message)


@pytest.mark.parametrize("make", [gpt2, lambda: llama(2)], ids=["gpt2", "llama"])
def test_published_files_are_read_block_by_block(make: Callable[[], Any], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: p.detach().contiguous() for name, p in make().named_parameters()}, path)
    state = make().state_dict()

    def work(mesh: Mesh2D) -> tuple[int, dict[str, Tensor]]:
        model = make()
        for parameter in model.parameters():
            parameter.data.zero_()
        parallelize_2d(model, mesh)
        read = read_safetensors_(model, path, mesh)
        return read, whole_state(model, mesh)

    size = path.stat().st_size
    for read, found in run(2, 2, work):
        assert read < 0.45 * size
        for name in state:
            assert torch.equal(found[name], state[name])


test_what_cannot_be_laid_out_is_refused_by_name = refusals(
    [
        (lambda: gpt2(attn_pdrop=0.1), "attn_pdrop=0 in its config"),
        (lambda: llama(attention_dropout=0.1), "attention_dropout=0 in its config"),
        (lambda: gpt2(n_head=8), r"transformer.h.0.attn with num_heads=8: 8 % 3 must be 0"),
        (lambda: gpt2(add_cross_attention=True), "cross attention"),
    ],
    lambda make: run(2, 3, lambda mesh: parallelize_2d(make(), mesh)),
)


def test_hidden_dropout_of_a_published_model_is_the_same_on_every_mesh() -> None:
    ids, _, labels = batch()

    def work(mesh: Mesh2D) -> Tensor:
        model = parallelize_2d(gpt2(resid_pdrop=0.2, embd_pdrop=0.2), mesh, seed=3).train()
        return model(mesh.rows_of(ids), labels=mesh.rows_of(labels)).loss.detach()

    losses = [run(rows, columns, work)[0] for rows, columns in ((1, 1), (2, 2), (2, 3))]
    torch.testing.assert_close(losses[1:], losses[:1] * 2, rtol=1e-6, atol=1e-6)


def headed(kind: str, labels: int = 4, **settings: Any) -> Any:
    """A Llama with another head, or a EuroBERT, which is a Llama that sees both sides."""
    family = "EuroBert" if kind == "ForMaskedLM" else "Llama"
    sizes = {"vocab_size": 36, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 8}
    ids = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "mask"))}
    config = getattr(transformers, f"{family}Config")(**sizes, **ids, num_labels=labels, **settings)
    with torch.random.fork_rng():
        return seeded(getattr(transformers, family + kind)(config)).eval()


def plan_for(model: Any) -> dict[Any, Any]:
    norms = {type(module): Norm() for module in model.modules() if type(module).__name__ == "EuroBertRMSNorm"}
    without = {type(module): Untouched() for module in model.modules() if type(module).__name__.startswith("EuroBert")}
    return {"score": Head(), **without, type(model): Untouched(), **norms} if not norms else {**without, **norms}


CLASSES = torch.tensor([0, 3, 2, 1, 1, 0])
LOSSES: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "masked": (lambda: headed("ForMaskedLM"), lambda: batch()[2]),
    "one class": (lambda: headed("ForSequenceClassification"), lambda: CLASSES),
    "one of three classes": (lambda: headed("ForSequenceClassification", 3), lambda: CLASSES % 3),
    "a number": (lambda: headed("ForSequenceClassification", 1), lambda: drawn(6, seed=3)),
    "several numbers": (
        lambda: headed("ForSequenceClassification", 3, problem_type="regression"),
        lambda: drawn(6, 3, seed=3),
    ),
    "several classes": (lambda: headed("ForSequenceClassification"), lambda: (drawn(6, 4, seed=3) > 0).double()),
    "a class per token": (lambda: headed("ForTokenClassification"), lambda: batch()[0] % 4),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.slow
def test_heads_of_other_tasks_have_the_serial_loss_and_gradients(name: str) -> None:
    make, labels = LOSSES[name]
    ids, serial = batch()[0].clamp(4), make()
    loss = serial(ids, labels=labels()).loss
    loss.backward()

    def work(mesh: Mesh2D) -> tuple[Tensor, dict[str, Tensor]]:
        model = make()
        checked = {"input_ids": ids, "labels": labels()}
        parallelize_2d(model, mesh, plan_for(model), check=checked)
        ours = model(mesh.rows_of(ids), labels=mesh.rows_of(labels())).loss
        ours.backward()
        return ours.detach(), gradients(model, mesh)

    for ours, found in run(2, 2, work):
        torch.testing.assert_close(ours.double(), loss.detach().double(), rtol=1e-6, atol=1e-6)
        for parameter, whole in serial_gradients(serial).items():
            torch.testing.assert_close(found[parameter], whole, rtol=1e-5, atol=1e-6)


def test_tokens_that_are_shifted_already_are_not_shifted_again() -> None:
    ids, _, labels = batch()
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]

    def work(mesh: Mesh2D) -> Tensor:
        model, own = parallelize_2d(gpt2(), mesh), [mesh.rows_of(x) for x in (ids, labels, shifted)]
        usual = model(own[0], labels=own[1]).loss
        given = model(own[0], labels=own[1], shift_labels=own[2]).loss
        return (usual - given).abs()

    assert run(2, 2, work) == [0] * 4


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.5)


def test_a_loss_that_needs_whole_logits_is_refused_by_name() -> None:
    ids, _, labels = batch()
    serial = llama()
    serial.loss_function = smoothed
    expected = serial(ids, labels=labels).loss.detach()

    def own(mesh: Mesh2D) -> Any:
        model = llama()
        model.loss_function = smoothed
        return parallelize_2d(model, mesh)

    with pytest.raises(ConfigError, match=r"loss function smoothed, which needs whole logits.*loss_function to None"):
        run(2, 2, own)
    torch.testing.assert_close(run(1, 1, lambda mesh: own(mesh)(ids, labels=labels).loss.detach()), [expected])
    answers = headed("ForQuestionAnswering")
    with pytest.raises(ConfigError, match=r"LlamaForQuestionAnswering.*ForQuestionAnsweringLoss"):
        run(2, 2, lambda mesh: parallelize_2d(answers, mesh, {type(answers): Untouched(), "qa_outputs": Head()}))


def test_a_model_without_a_loss_gives_logits_and_refuses_labels() -> None:
    ids, _, labels = batch()

    def work(mesh: Mesh2D) -> None:
        model = llama()
        model.loss_function = None
        parallelize_2d(model, mesh)
        own = mesh.rows_of(ids)
        cross_entropy_2d(model(own).logits, own, mesh).backward()
        model(own, labels=mesh.rows_of(labels))

    with pytest.raises(ConfigError, match="loss_function is None"):
        run(2, 2, work)


def test_a_model_that_computes_its_loss_in_its_forward_refuses_labels() -> None:
    ids = batch()[0]
    config = gpt2().config
    config.num_labels, config.pad_token_id = 4, 0
    models = [transformers.GPT2ForSequenceClassification(config) for _ in range(4)]

    def work(mesh: Mesh2D) -> None:
        model = parallelize_2d(models[mesh.whole.rank], mesh, {type(models[0]): Untouched()})
        assert model(mesh.rows_of(ids)).logits.shape == (3, 2)
        model(mesh.rows_of(ids), labels=mesh.rows_of(CLASSES))

    with pytest.raises(ConfigError, match="GPT2ForSequenceClassification computes its loss in its own forward"):
        run(2, 2, work)


@pytest.mark.parametrize("make", [gpt2, lambda: llama(2, tied=True)], ids=["gpt2", "llama"])
def test_save_pretrained_saves_the_whole_model(make: Callable[[], Any], tmp_path: Path) -> None:
    serial = make()
    occupied = tmp_path / "file"
    occupied.write_text("")

    def work(mesh: Mesh2D) -> None:
        model = parallelize_2d(make(), mesh)
        model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
        with pytest.raises(CheckpointError, match="rank 0 of the mesh cannot write it"):
            model.save_pretrained(occupied / "model")
        with pytest.raises(ConfigError, match="Leave state_dict out"):
            model.save_pretrained(tmp_path / "model", state_dict=model.state_dict())

    run(2, 2, work)
    again = type(serial).from_pretrained(tmp_path / "model", dtype=torch.float64)
    for name, value in serial.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_a_model_from_the_meta_device_gets_its_rotary_frequencies(tmp_path: Path) -> None:
    ids, _, labels = batch()
    serial = llama().float()
    serial.save_pretrained(tmp_path)
    expected = serial(ids, labels=labels).loss.detach()

    def work(mesh: Mesh2D) -> Tensor:
        with torch.device("meta"):
            model = type(serial)(serial.config)
        parallelize_2d(model, mesh)
        read_safetensors_(model, tmp_path.glob("*.safetensors"), mesh)
        return model(mesh.rows_of(ids), labels=mesh.rows_of(labels)).loss.detach()

    for loss in run(2, 2, work):
        torch.testing.assert_close(loss, expected)
