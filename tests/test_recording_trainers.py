"""Where ``Recorder.step`` goes in other people's trainers: after backward and reduction, before clipping."""

import importlib.util
import warnings

import pytest
import torch
from torch import nn

import shardbook as sb

pytestmark = pytest.mark.peers
CLIP = 0.05
STEPS = 4


class Line(nn.Module):
    """A model as transformers wants one: a loss comes out where labels go in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, inputs, labels):
        return {"loss": nn.functional.mse_loss(self.inner(inputs), labels)}


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"inputs": torch.randn(4, generator=generator), "labels": torch.randn(2, generator=generator)} for _ in range(4 * STEPS)]


def batches() -> list[dict[str, torch.Tensor]]:
    return [{key: torch.stack([row[key] for row in rows()[i : i + 4]]) for key in ("inputs", "labels")} for i in range(0, 4 * STEPS, 4)]


def plain(path) -> list:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sb.record(model, optimizer, path) as recorder:
        for batch in batches():
            loss = model(**batch)["loss"]
            loss.backward()
            recorder.step(loss=loss, batch=batch)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return list(sb.Record.open(path).steps())


def same(one: list, other: list) -> None:
    assert len(one) == len(other) == STEPS + 1
    for a, b in zip(one, other, strict=True):
        assert a.data == b.data
        assert a.given == b.given
        assert [(one.inputs, one.output, one.output_gradient, one.evaluating) for one in a.micro_batches[0]] == [
            (one.inputs, one.output, one.output_gradient, one.evaluating) for one in b.micro_batches[0]
        ]
        assert len(a.micro_batches[0]) == (a.number > 0)
        for phase in ("before", "gradient", "stepped", "weight") if a.number else ("weight",):
            assert {name: one.hash for name, one in a.phases[phase].items()} == {name: one.hash for name, one in b.phases[phase].items()}
    assert one[1].norm("stepped") == pytest.approx(CLIP, rel=1e-4)
    assert one[1].norm() > CLIP


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed: make peers")
def test_lightning(tmp_path):
    warnings.simplefilter("ignore")  # its own
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = Line()

        def configure_optimizers(self):
            return torch.optim.SGD(self.line.parameters(), lr=0.1)

        def training_step(self, batch, _):
            return self.line(**batch)["loss"]

        def on_train_start(self):
            self.recording = sb.record(self.line, self.optimizers(), tmp_path / "a")
            self.recorder = self.recording.__enter__()

        def on_train_batch_start(self, batch, _):
            self.batch = batch

        def on_before_optimizer_step(self, _):  # gradients are there and not clipped yet
            self.recorder.step(loss=self.trainer.callback_metrics.get("loss", 0.0), batch=self.batch)

        def on_train_end(self):
            self.recording.__exit__(None, None, None)

    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", gradient_clip_val=CLIP, **options)
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=4))
    same(list(sb.Record.open(tmp_path / "a").steps()), plain(tmp_path / "b"))


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers and accelerate are not installed: make peers")
def test_transformers(tmp_path):
    warnings.simplefilter("ignore")  # its own
    import transformers

    class Recording(transformers.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            batch = {key: value.clone() for key, value in inputs.items()}
            loss = super().training_step(model, inputs, *args, **kwargs)
            if self.accelerator.sync_gradients:
                self.recorder.step(loss=loss, batch=batch)
            return loss

    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, num_train_epochs=1, max_grad_norm=CLIP, use_cpu=True,
        report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", dataloader_pin_memory=False,
    )  # fmt: skip

    class Ordered(Recording):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = Ordered(model=model, args=arguments, train_dataset=rows(), optimizers=(optimizer, None))
    with sb.record(model, optimizer, tmp_path / "a") as trainer.recorder:
        trainer.train()
    same(list(sb.Record.open(tmp_path / "a").steps()), plain(tmp_path / "b"))
