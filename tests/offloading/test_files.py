"""Files of offloaded models that other libraries write and read, and transformers' Trainer."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.utils.data import Dataset

import optimus
from tests.offloading import models
from tests.offloading.models import assert_equal, tokens, train, weights
from tests.offloading.test_offload import MODELS_AND_SHARES, OPTIONS, SHARES, hostile_memory, pair

__all__ = ["hostile_memory"]


@pytest.mark.parametrize(("name", "share"), [p for p in MODELS_AND_SHARES if p[0] != "fast_olmoe"])
def test_save_pretrained_writes_the_files_of_a_plain_model(name, share, tmp_path):
    ours, optimizer, theirs, reference = pair(name, share)
    train(ours, optimizer, (2, 1))
    train(theirs, reference, (2, 1))
    for model, path in ((ours, "ours"), (theirs, "theirs")):
        model.save_pretrained(tmp_path / path)
    files = [(tmp_path / path / "model.safetensors").read_bytes() for path in ("ours", "theirs")]
    assert files[0] == files[1]
    again = type(ours).from_pretrained(tmp_path / "ours")
    assert_equal(weights(again), weights(theirs))
    assert train(ours, optimizer, (1,)) == train(theirs, reference, (1,))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_files_of_safetensors_and_accelerate_have_all_weights(share, tmp_path):
    """safetensors and accelerate save only one tensor of each storage. Different weights must
    therefore have different storages, and tied weights must have the same storage."""
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    ours, optimizer, theirs, _ = pair("gpt2", share)
    train(ours, optimizer, (1,))
    before, saved = weights(ours), ours.state_dict()
    storages = {tensor.untyped_storage()._cdata for tensor in saved.values()}
    assert len(storages) == len(saved) - 1
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in saved.values())
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(ours, optimizer)
    accelerator.save_state(tmp_path)
    safetensors.load_model(theirs, tmp_path / "model.safetensors")
    assert_equal(weights(theirs), before)
    safetensors.save_model(ours, tmp_path / "alone.safetensors")
    assert (tmp_path / "alone.safetensors").stat().st_size > ours.num_parameters() * 4
    after = train(prepared[0], optimizer, (1,))
    accelerator.load_state(tmp_path)
    assert_equal(weights(ours), before)
    assert train(prepared[0], optimizer, (1,)) == after


class Texts(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = tokens(index, (1, 8))[0]
        return {"input_ids": text, "labels": text}


def trainer_of(model, optimizer, folder, **arguments):
    arguments = models.transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        num_train_epochs=2, logging_steps=1, report_to=[], use_cpu=True, save_steps=2,
        disable_tqdm=True, **arguments,
    )  # fmt: skip
    return models.transformers.Trainer(
        model, arguments, train_dataset=Texts(), eval_dataset=Texts(),
        optimizers=(optimizer, None),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("share", "arguments"),
    [(1.0, {}), (0.5, {"max_grad_norm": 0.0, "gradient_checkpointing": True})],
)
def test_trainer_trains_saves_and_resumes_with_the_bits_of_torch(share, arguments, tmp_path):
    """Trainer clips with torch's function, accumulates a varying number of microbatches, clears
    gradients by `model.zero_grad()`, and changes the learning rate."""
    pytest.importorskip("accelerate")
    ours, optimizer, theirs, reference = pair("llama", share)
    histories = []
    for model, of_model, folder in ((ours, optimizer, "ours"), (theirs, reference, "theirs")):
        trainer = trainer_of(model, of_model, tmp_path / folder, **arguments)
        trainer.train()
        trainer.evaluate()
        keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
        histories.append([{k: r[k] for k in keys if k in r} for r in trainer.state.log_history])
    assert histories[0] == histories[1] and len(histories[0]) > 6
    assert_equal(weights(ours), weights(theirs))
    again = models.llama()
    trainer = trainer_of(
        again, optimus.offload(again, host_share=share, **OPTIONS), tmp_path / "2", **arguments
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_equal(weights(again), weights(theirs))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_keep_their_values_after_the_model(share, dtype):
    """After the model and the optimizer are deleted, memory to which their state dicts refer must
    not be used for other tensors."""
    model = models.llama().to(dtype)
    optimizer = optimus.offload(model, host_share=share, **OPTIONS)
    train(model, optimizer, (1,))
    sizes = [chunk.params.nbytes for chunk in optimizer._offloaded.engine.chunks]
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    expected = copy.deepcopy(states)
    del model, optimizer
    gc.collect()
    others = [torch.full((size // 4,), torch.nan) for size in sizes for _ in range(8)]
    assert_equal(states["model"], expected["model"])
    for number, state in states["optimizer"]["state"].items():
        assert_equal(state, expected["optimizer"]["state"][number])
    assert all(other.isnan().all() for other in others)


@pytest.mark.parametrize("early_adam", ["off", "on", "auto"])
def test_state_dict_after_each_step_has_the_updated_weights(early_adam):
    """If a step uses an early update, the weights move to other memory. `state_dict` must return
    the values in the new memory."""
    ours, optimizer, theirs, reference = pair("llama", 1.0, early_adam=early_adam)
    for step in range(4):
        for model, of_model in ((ours, optimizer), (theirs, reference)):
            models.loss_of(model, step).backward()
            of_model.step()
            of_model.zero_grad()
        assert_equal(ours.state_dict(), theirs.state_dict())
