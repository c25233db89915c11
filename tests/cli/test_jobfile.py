import sys
from pathlib import Path

import cloudpickle
import pytest

from headrace.cli.jobfile import MODULE, find_job, load_job
from headrace.errors import DataError, JobError, UnknownName, UsageError, user_traceback
from headrace.spec.job import Job

HEAD = "from headrace.spec.job import Job\n"
MAKE = "Job(model=dict, optimizer=dict, data=DATA, global_batch_size=8, loss=dict, epochs=1)\n"


def write(folder: Path, text: str, name: str = "job.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_value_and_a_function_give_a_job(tmp_path: Path) -> None:
    value = load_job(write(tmp_path, f"{HEAD}DATA = 1\njob = {MAKE}", "a.py"))
    made = load_job(write(tmp_path, f"{HEAD}DATA = 2\ndef job():\n    return {MAKE}", "b.py"))
    assert isinstance(value, Job)
    assert (value.data, made.data) == (1, 2)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr=0.05", 0.05),
        ("lr=1e-3", 1e-3),
        ("lr=1", 1.0),
        ("lr=None", None),
        ("count=3", 3),
        ("count=0.5", 0.5),
        ("on=False", False),
        ("text=007", "007"),
        ("text=None", None),
        ("text='a b'", "a b"),
        ("text=a=b", "a=b"),
        ("free=adam", "adam"),
        ("free=[1, 2]", [1, 2]),
        ("keyword=2", 2),
    ],
)
def test_settings_are_literals_read_in_the_light_of_the_default(tmp_path: Path, setting: str, value: object) -> None:
    file = write(
        tmp_path,
        f"{HEAD}def job(lr=0.1, count=1, on=True, text='x', free=None, *, keyword=1):\n    DATA = locals()\n"
        f"    return {MAKE}",
    )
    got = load_job(file, [setting]).data[setting.partition("=")[0]]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("setting", "kind", "words"),
    [
        ("lrr=1", UnknownName, "did you mean 'lr'"),
        ("lr", UsageError, "key=value, got 'lr'"),
        ("=1", UsageError, "key=value, got '=1'"),
        ("lr=fast", UsageError, "give a number (the default is 0.1)"),
        ("lr=...", UsageError, "give a number (the default is 0.1)"),
        ("lr=[0.1]", UsageError, "lr=[0.1]: give a number (the default is 0.1)"),
        ("on=true", UsageError, "give True or False (the default is True)"),
        ("on=1", UsageError, "give True or False"),
    ],
)
def test_settings_that_cannot_be_meant(tmp_path: Path, setting: str, kind: type, words: str) -> None:
    file = write(tmp_path, f"{HEAD}DATA = 1\ndef job(lr=0.1, on=True):\n    return {MAKE}")
    with pytest.raises(kind) as caught:
        load_job(file, [setting])
    assert words in str(caught.value)


def test_a_setting_twice_and_a_missing_one(tmp_path: Path) -> None:
    file = write(tmp_path, f"{HEAD}DATA = 1\ndef job(lr, depth):\n    return {MAKE}")
    with pytest.raises(UsageError, match="lr is given twice"):
        load_job(file, ["lr=1", "lr=2"])
    with pytest.raises(UsageError, match=r"needs depth; give --set depth=\.\.\."):
        load_job(file, ["lr=1"])


def test_options_of_the_job_are_set_in_a_value_and_in_a_function(tmp_path: Path) -> None:
    value = write(tmp_path, f"{HEAD}DATA = 1\njob = {MAKE}", "a.py")
    made = write(tmp_path, f"{HEAD}def job(lr=0.1):\n    DATA = lr\n    return {MAKE}", "b.py")
    assert load_job(value, ["options.accumulate=4"]).options.accumulate == 4
    both = load_job(made, ["options.clip_norm=1", "lr=0.5", "options.precision=bf16"])
    assert (both.data, both.options.clip_norm, both.options.precision) == (0.5, 1, "bf16")
    assert both.source is not None
    assert both.source.settings == ("options.clip_norm=1", "lr=0.5", "options.precision=bf16")


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        (["options.acumulate=2"], UnknownName, "no option 'acumulate' of Options; did you mean 'accumulate'"),
        (["options.schedule=StepLR"], UnknownName, "no option 'schedule'"),
        (["options.accumulate"], UsageError, "key=value, got 'options.accumulate'"),
        (["options.accumulate=2", "options.accumulate=4"], UsageError, "options.accumulate is given twice"),
        (["options.accumulate=0"], UsageError, "accumulate must be a whole number of at least 1, got 0"),
        (["options.accumulate=two"], UsageError, "give a number (the default is 1)"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path: Path, settings: list[str], kind: type, words: str) -> None:
    file = write(tmp_path, f"{HEAD}DATA = 1\njob = {MAKE}")
    with pytest.raises(kind) as caught:
        load_job(file, settings)
    assert words in str(caught.value)


def test_numbers_of_the_job_and_how_its_data_is_read_are_set_without_a_change_of_the_file(tmp_path: Path) -> None:
    text = """
import torch, headrace as hr
def job(lr=0.1):
    data = hr.data.from_arrays(torch.zeros(8, 2), torch.zeros(8)).map(lambda each: each)
    return hr.Job(lambda: torch.nn.Linear(2, 1), torch.optim.SGD, data, 4, loss=torch.nn.MSELoss(), epochs=3)
"""
    path = write(tmp_path, text)
    job = load_job(path, ["job.steps=5", "job.global_batch_size=2", "data.parallel=threads", "data.cache=memory"])
    assert (job.steps, job.epochs, job.global_batch_size) == (5, None, 2)
    assert job.data.reading.parallel == "threads"
    assert [step.name.partition("(")[0] for step in job.data.steps] == ["map", "cache"]
    assert load_job(path, ["job.epochs=7"]).epochs == 7
    assert load_job(path, ["data.parallel=3", "data.prefetch=2"]).data.reading.count == 3
    for setting, told in (
        ("job.model=1", "no setting 'model' of the job"),
        ("job.steps=0", "steps"),
        ("data.readers=2", "no setting 'readers'"),
        ("data.parallel=twice", "parallel must be one of"),
        ("data.cache=5", 'cache is "memory" or a folder, got 5'),
        ("job.global_batch_size=None", "global_batch_size must be a whole number of at least 1, got None"),
    ):
        with pytest.raises(UsageError, match=told):
            load_job(path, [setting])


def test_any_key_where_the_function_takes_any(tmp_path: Path) -> None:
    file = write(tmp_path, f"{HEAD}def job(**settings):\n    DATA = settings\n    return {MAKE}")
    assert load_job(file, ["anything=3"]).data == {"anything": 3}


def test_a_job_that_is_a_value_has_no_parameters(tmp_path: Path) -> None:
    file = write(tmp_path, f"{HEAD}DATA = 1\njob = {MAKE}")
    with pytest.raises(UsageError, match=r"--set lr=1: `job` in .* is a value"):
        load_job(file, ["lr=1"])


def test_a_file_that_is_not_there_names_what_is_near(tmp_path: Path) -> None:
    write(tmp_path, "", "train_cnn.py")
    with pytest.raises(JobError, match=r"does not exist; did you mean \S*train_cnn\.py\?"):
        find_job(tmp_path / "train_cn.py")
    with pytest.raises(JobError, match=r"Python files in that folder: train_cnn\.py"):
        find_job(tmp_path / "zzz")
    with pytest.raises(JobError, match="nor does the folder"):
        find_job(tmp_path / "nowhere" / "job.py")
    with pytest.raises(JobError, match=r"is a folder; name one of the Python files in it: train_cnn\.py"):
        find_job(tmp_path)


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"must end in \.py"):
        load_job(write(tmp_path, "", "job.txt"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{HEAD}DATA = 1\nmy_job = {MAKE}", "it defines DATA, my_job; rename `my_job` to `job`"),
        (f"{HEAD}DATA = 1\ndef Job_(): ...\nclass Net: ...", "it defines DATA, Job_, Net; rename `Job_` to `job`"),
        ("import os\nfrom pathlib import Path\n_hidden = 1", "it defines nothing; end it with `job = hr.Job(...)`"),
        ("job = 3", "`job` in FILE is 3 (int); it must be a Job or a function"),
        ("job = dict", "`job` in FILE is <class 'dict'> (type); it must be a Job or a function"),
        ("def job(): ...", "returned None and not a Job; end it with `return hr.Job(...)`"),
    ],
)
def test_a_file_without_a_job(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(JobError) as caught:
        load_job(file)
    assert words.replace("FILE", str(file)) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def deep():\n    raise KeyError('shape')\ndeep()", "failed when it was loaded: KeyError: 'shape'"),
        ("def job(lr=1):\n    1 / 0", "failed in job(): ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "failed when it was loaded: SystemExit: 3"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_what_user_code_raises_carries_their_frames_alone(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(JobError) as caught:
        load_job(file)
    assert words in str(caught.value)
    assert caught.value.__cause__ is not None
    shown = user_traceback(caught.value.__cause__)
    assert str(file) in shown
    assert "importlib" not in shown
    assert "jobfile.py" not in shown


def test_a_syntax_error_shows_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, "job = (\n")
    with pytest.raises(JobError, match="SyntaxError") as caught:
        load_job(file)
    assert caught.value.__cause__ is not None
    shown = user_traceback(caught.value.__cause__)
    assert f'File "{file}", line 1' in shown
    assert "jobfile.py" not in shown


def test_what_headrace_refuses_inside_the_file_keeps_its_class_and_says_where(tmp_path: Path) -> None:
    file = write(tmp_path, "from headrace.errors import DataError\n\nraise DataError('3 inputs, 2 targets')")
    with pytest.raises(DataError, match="3 inputs, 2 targets") as caught:
        load_job(file)
    assert caught.value.__notes__ == [f"at {file}, line 3"]

    file = write(tmp_path, f"{HEAD}DATA = 1\njob = {MAKE.replace('epochs=1', 'epochs=0')}", "other.py")
    with pytest.raises(UsageError, match="epochs must be") as refused:
        load_job(file)
    assert refused.value.__notes__ == [f"at {file}, line 3"]


def test_a_failed_file_leaves_no_module(tmp_path: Path) -> None:
    with pytest.raises(JobError):
        load_job(write(tmp_path, "1 / 0"))
    assert MODULE not in sys.modules


def test_the_file_imports_its_neighbours_and_its_classes_know_their_module(tmp_path: Path) -> None:
    write(tmp_path, "WIDTH = 64\n", "a_neighbour_of_the_job.py")
    file = write(
        tmp_path,
        f"from __future__ import annotations\n{HEAD}from dataclasses import dataclass\n"
        "from a_neighbour_of_the_job import WIDTH\n"
        f"@dataclass\nclass Net:\n    width: int = WIDTH\nDATA = Net()\njob = {MAKE}",
    )
    try:
        job = load_job(file)
    finally:
        sys.modules.pop("a_neighbour_of_the_job", None)
    assert job.data.width == 64
    assert type(job.data).__module__ == MODULE


def test_what_the_file_defines_travels_by_value(tmp_path: Path) -> None:
    file = write(tmp_path, f"{HEAD}def double(x):\n    return 2 * x\nDATA = double\njob = {MAKE}")
    sent = cloudpickle.dumps(load_job(file).data)
    sys.modules.pop(MODULE)
    file.unlink()
    assert cloudpickle.loads(sent)(21) == 42
