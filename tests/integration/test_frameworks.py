"""Jobs as frameworks start and step them, where those are installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from crossrank.recording import CommsFile
from tests.integration import jobs
from tests.integration.traces import execution_trace_ids, load

ITERATIONS = 10
RUNNER = ("-m", "crossrank.instrument")

LIGHTNING = f"""
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps={ITERATIONS}, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn({8 * ITERATIONS}, 8)), batch_size=4))
"""

DEEPSPEED = f"""
import sys
import deepspeed, torch

model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)])
weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
optimizer = torch.optim.AdamW([{{"params": weights}}, {{"params": biases, "weight_decay": 0.0}}])
steps = []
optimizer.register_step_post_hook(lambda *_: steps.append(1))
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={{
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {{"enabled": True}},
    "zero_optimization": {{"stage": int(sys.argv[1]), "sub_group_size": 1500}},
    "zero_allow_untested_optimizer": True,
}})
for _ in range({ITERATIONS}):
    engine.backward(engine(torch.randn(4, 32, dtype=torch.bfloat16)).float().mean())
    engine.step()
assert len(steps) > {ITERATIONS}, "the inner optimizer steps several times an iteration"
torch.distributed.destroy_process_group()
"""


def needs(framework: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(framework) is None, reason=f"{framework} is not installed")


def _check_iterations(recording: Path) -> None:
    """Both ranks have all iterations, and the window holds exactly the calls of number 5."""
    for rank in (0, 1):
        comms = CommsFile(str(recording / f"rank-{rank}.comms.jsonl.zst"))
        records = list(comms.records())
        assert [line["step"] for line in comms.steps] == list(range(1, ITERATIONS + 1))
        wanted = {record.id for record in records if record.step == 5}
        assert wanted
        assert set(execution_trace_ids(load(recording, "et", rank))) == wanted


@needs("lightning")
def test_every_step_of_lightnings_own_launcher_is_recorded(tmp_path: Path) -> None:
    script = jobs.write_script(tmp_path, LIGHTNING)
    result = jobs.run([sys.executable, *RUNNER, script], tmp_path, 200, TRACING_WINDOW="5:6")
    assert result.returncode == 0, result.stderr
    _check_iterations(tmp_path / "crossrank-recording")


@needs("deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_step_of_zero_with_two_parameter_groups_is_recorded(stage: int, tmp_path: Path) -> None:
    script = jobs.write_script(tmp_path, DEEPSPEED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = jobs.run(
        [*torchrun, *RUNNER, script, str(stage)], tmp_path, 200, TRACING_WINDOW="5:6", DS_ACCELERATOR="cpu"
    )
    assert result.returncode == 0, result.stderr
    _check_iterations(tmp_path / "crossrank-recording")
