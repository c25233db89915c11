"""`headrace launch-files`: what it writes, and what it refuses."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from headrace.cli import run
from headrace.cli.launch_files.kubernetes import yaml_of

Capture = pytest.CaptureFixture[str]

KUBERNETES = ("--image", "registry/digits:1", "--claim", "runs")
TRAIN = ["headrace", "train", "job.py", "--strategy", "mirrored", "--run-dir"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a job file, named as a scheduler does not take it."""
    here = tmp_path / "My_digits"
    here.mkdir()
    (here / "job.py").write_text("job = None\n")
    monkeypatch.chdir(here)
    return here


def written(name: str, *arguments: str) -> str:
    assert run(["launch-files", *arguments]) == 0
    return Path(name).read_text()


def documents(*arguments: str) -> dict[str, Any]:
    """The documents of a file for Kubernetes, by kind."""
    text = written("my-digits.kubernetes.yaml", "kubernetes", "job.py", *KUBERNETES, *arguments)
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_a_script_for_sbatch(capsys: Capture) -> None:
    text = written(
        *("my-digits.slurm.sh", "slurm", "job.py", "--workers", "6", "--hosts", "3", "--cores", "4"),
        *("--memory-gb", "8", "--save-s", "120", "--time", "2-00", "--", "--set", "name=a b"),
    )
    assert capsys.readouterr().out == "wrote my-digits.slurm.sh; start it: sbatch my-digits.slurm.sh\n"
    options = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert options == {
        *("job-name=my-digits", "nodes=3", "ntasks=6", "cpus-per-task=4", "mem-per-cpu=2048M", "time=2-00"),
        *("output=my-digits-%j.log", "open-mode=append", "signal=TERM@120", "requeue"),
    }
    assert "run_dir=runs/my-digits-$SLURM_JOB_ID\n" in text
    # What bash makes of it, with SLURM's programs replaced.
    said, secret = executed(text, code=0)
    train = ["--strategy", "mirrored", "--set", "name=a b", "--run-dir", "runs/my-digits-7", "--resume-if-saved"]
    assert said == [["srun", "--cpus-per-task=4", "--kill-on-bad-exit=0", "headrace", "train", "job.py", *train]]
    assert len(secret) == 64


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [(0, "RUNNING", False), (143, "RUNNING", True), (143, "COMPLETING", False), (4, "RUNNING", False)],
)
def test_only_a_run_that_slurm_has_asked_to_end_is_requeued(code: int, state: str, requeued: bool) -> None:
    said, _ = executed(written("my-digits.slurm.sh", "slurm", "job.py"), code, state, ends_with=0 if requeued else code)
    assert (["scontrol", "requeue", "7"] in said) == requeued


def executed(script: str, code: int, state: str = "RUNNING", ends_with: int = 0) -> tuple[list[list[str]], str]:
    """Runs a script of sbatch; returns the commands that it has started, and the run's secret."""
    programs = Path("programs").absolute()
    programs.mkdir()
    for name, does in (
        ("srun", f'echo "$HEADRACE_SECRET" >{programs}/secret; exit {code}'),
        ("squeue", f"echo {state}"),
        ("scontrol", ":"),
    ):
        tell = f'{{ printf "%s\\0" {name} "$@"; echo; }} >>{programs}/said\n' if name != "squeue" else ""
        (programs / name).write_text(f"#!/bin/bash\n{tell}{does}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    ended = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (ends_with, "")
    said = [line.split("\0")[:-1] for line in (programs / "said").read_text().splitlines()]
    return said, (programs / "secret").read_text().strip()


def test_backups_are_put_on_other_nodes() -> None:
    text = written("a.sh", "slurm", "job.py", "--output", "a.sh", "--", "--strategy", "parameter_server(backups=1)")
    assert "#SBATCH --distribution=cyclic\n" in text
    assert "--strategy 'parameter_server(backups=1)'" in text


def test_a_script_with_torchrun() -> None:
    one = written("my-digits.torchrun.sh", "torchrun", "job.py", "--workers", "3", "--run-dir", "/shared/a")
    begin = ["exec", "torchrun", "--standalone", "--nproc-per-node", "3", "--no-python"]
    assert shlex.split(one.replace("\\\n", " "), comments=True) == [*begin, *TRAIN, "/shared/a", "--resume-if-saved"]
    two = written("b.sh", "torchrun", "job.py", "--workers", "4", "--hosts", "2", "--output", "b.sh")
    assert "--nnodes 2" in two
    assert "--nproc-per-node 2" in two
    lacking = subprocess.run(["sh", "b.sh"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert "NODE_RANK: is the number of this host, from 0 to 1" in lacking.stderr


def test_an_indexed_job() -> None:
    found = documents("--workers", "4", "--cores", "2", "--memory-gb", "1.5", "--save-s", "60")
    for document in found.values():
        kubernetes_validate.validate(document, "1.31", strict=True)
    pod = found["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == [*TRAIN, "/runs/my-digits", "--resume-if-saved"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert (variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == ("4", "my-digits-0.my-digits")
    assert found["Job"]["spec"]["completions"] == found["Job"]["spec"]["parallelism"] == 4
    # Time for the checkpoint, and for what comes after it.
    assert pod["terminationGracePeriodSeconds"] == 90
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "1536Mi"}
    # Names by which pods and secret are found.
    service = found["Service"]["spec"]
    assert service["selector"] == found["Job"]["spec"]["template"]["metadata"]["labels"]
    assert (pod["subdomain"], service["clusterIP"]) == (found["Service"]["metadata"]["name"], "None")
    assert container["env"][-1]["valueFrom"]["secretKeyRef"] == {"name": "my-digits", "key": "secret"}
    assert len(found["Secret"]["stringData"]["secret"]) == 64


def test_the_file_with_the_secret_is_for_its_user_alone() -> None:
    Path("my-digits.kubernetes.yaml").touch(0o644)
    secrets = {documents("--force")["Secret"]["stringData"]["secret"] for _ in range(2)}
    assert len(secrets) == 2
    assert stat.S_IMODE(Path("my-digits.kubernetes.yaml").stat().st_mode) == 0o600


def test_a_job_set() -> None:
    found = documents("--form", "jobset", "--workers", "3")
    check(found["JobSet"], "jobset")
    (job,) = found["JobSet"]["spec"]["replicatedJobs"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job["template"]}
    kubernetes_validate.validate(whole, "1.31", strict=True)
    variables = {
        each["name"]: each.get("value") for each in job["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert variables["MASTER_ADDR"] == "my-digits-worker-0-0.my-digits"


def test_a_train_job() -> None:
    found = documents("--form", "trainjob", "--workers", "4", "--hosts", "2")
    check(found["TrainJob"], "trainjob")
    trainer = found["TrainJob"]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["command"] == ["torchrun", "--no-python", *TRAIN, "/runs/my-digits", "--resume-if-saved"]


def check(document: dict[str, Any], name: str) -> None:
    """Checks a document by the published definition, of which schemas/ has what our manifests use."""
    import jsonschema

    schema = yaml.safe_load((Path(__file__).parent / "schemas" / f"{name}.yaml").read_text())
    jsonschema.validate(document, schema)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["slrum", "job.py"],
            "there is no scheduler 'slrum'; did you mean 'slurm'? known: kubernetes, slurm, torchrun",
        ),
        (["slurm", "jub.py"], "jub.py"),
        (["slurm", "job.py", "--workers", "0"], "--workers"),
        (
            ["slurm", "job.py", "--workers", "2", "--hosts", "3"],
            "--workers 2 on 3 hosts: every host needs at least one",
        ),
        (["slurm", "job.py", "--", "--run-dir", "a"], "the file gives `headrace train` its --run-dir; name it before"),
        (["torchrun", "job.py", "--workers", "5", "--hosts", "2"], "5 workers on 2 hosts are not; take 4 or 6 workers"),
        (["kubernetes", "job.py"], "name an image with headrace and the job file by --image"),
        (["kubernetes", "job.py", "--image", "a"], "name a PersistentVolumeClaim (ReadWriteMany) for it by --claim"),
        (["kubernetes", "job.py", *KUBERNETES, "--hosts", "2"], "chooses its host; leave --hosts out"),
        (
            ["slurm", "job.py", "--output", "job.py"],
            "job.py exists; name another by --output, or replace it by --force",
        ),
        (["slurm", "job.py", "--output", "no/a"], "no/a cannot be written: No such file or directory; name another"),
    ],
)
def test_what_is_refused(arguments: list[str], error: str, capsys: Capture) -> None:
    assert run(["launch-files", *arguments]) in (2, 3)
    assert error in capsys.readouterr().err
    assert os.listdir() == ["job.py"]
    assert Path("job.py").read_text() == "job = None\n"


def test_yaml_says_what_json_does() -> None:
    value = {
        "texts": ["a", "", "no", "Null", "1", "1e3", "a: b", "- a", "a-", "#", "é\n", "0x1", ".5", "~", "a #b", "/x.y"],
        "others": [1, 1.5, True, False, None, {}, [], [[1, 2], {"a": [{"b": {"c": []}}]}]],
        "on": {"y": "y", "a b": "2026-01-01"},
    }
    assert list(yaml.safe_load_all(yaml_of([value, {"a": 1}]))) == [value, {"a": 1}]
