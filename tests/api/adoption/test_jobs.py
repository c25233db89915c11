"""Scripts that become jobs: the steps of the job are those of the script, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from api.adoption.scripts import FUNCTIONS, METHODS, NOISE, PLAIN, dry
from headrace.api.adoption.facts import Facts
from headrace.api.adoption.job_file import JobFile, write_job
from headrace.api.adoption.loop import Unfit
from headrace.api.adoption.proof import prove
from headrace.cli.jobfile import load_job
from headrace.spec.job import Job


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def adopted(folder: Path, source: str, arguments: tuple[str, ...] = ()) -> tuple[Job, JobFile, Facts]:
    facts = dry(folder, source, arguments=arguments)
    assert not facts.problem
    made = write_job("train.py", source, facts)
    (folder / "train_job.py").write_text(made.text)
    return load_job(folder / "train_job.py"), made, facts


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(FUNCTIONS, id="functions"),
        pytest.param(PLAIN, id="plain"),
        pytest.param(METHODS, id="methods"),
        pytest.param(NOISE, id="noise, groups, a schedule, dicts"),
    ],
)
def test_a_job_makes_the_steps_of_its_script(tmp_path: Path, source: str) -> None:
    job, _, facts = adopted(tmp_path, source)
    prove(job, facts, tmp_path)
    assert facts.steps == 5


@pytest.mark.slow
def test_arguments_are_parameters_and_what_is_left_out_is_named(tmp_path: Path) -> None:
    job, made, _ = adopted(tmp_path, FUNCTIONS, ("--rate", "0.05", "--epochs", "2"))
    assert "def job(clip=0.5, smooth=0.1, rate=0.05, epochs=2):" in made.text
    assert "parse_args" not in made.text
    assert [line.split(maxsplit=1)[1] for line in made.left_out] == [
        "if number % args.log == 0:",
        "test(net, device, held_out)",
        "torch.save(net.state_dict(), 'net.pt')",
    ]
    assert (job.epochs, job.global_batch_size, job.options.clip_norm, job.options.schedule_every) == (
        2,
        8,
        0.5,
        "epoch",
    )
    assert job.eval_data is not None
    assert len(job.eval_data) == 9  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        pytest.param("optimizer.zero_grad()", "pass", "what step 1 makes", id="gradients that are kept"),
        pytest.param("lr=0.1, m", "lr=0.2, m", "what step 0 makes", id="another rate"),
        pytest.param("manual_seed(3)", "manual_seed(4)", "the weights that it begins with", id="another start"),
        pytest.param("inputs, labels = torch.randn", "inputs, labels = 2 * torch.randn", "example 0", id="other data"),
    ],
)
def test_a_job_of_another_script_is_not_proved(tmp_path: Path, old: str, new: str, says: str) -> None:
    job, _, _ = adopted(tmp_path, PLAIN)
    other = tmp_path / "other"
    other.mkdir()
    assert old in PLAIN
    facts = dry(other, PLAIN.replace(old, new))
    with pytest.raises(Unfit, match=says):
        prove(job, facts, other)


@pytest.mark.slow
def test_the_loss_is_that_of_the_script_also_where_forward_draws(tmp_path: Path) -> None:
    job, made, facts = adopted(tmp_path, NOISE)
    assert "hr.optimizer_like(optimizer, step)" in made.text
    wrong = made.text.replace("SCALE = 0.1", "SCALE = 0.2")
    (tmp_path / "wrong.py").write_text(wrong)
    with pytest.raises(Unfit, match="the loss of step 0"):
        prove(load_job(tmp_path / "wrong.py"), facts, tmp_path)
    prove(job, facts, tmp_path)
