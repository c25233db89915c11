import json
import types
from pathlib import Path
from typing import Any

import pytest

import headrace.machine.identity
from headrace.cli import run
from headrace.cli.jobfile import MODULE
from headrace.errors import PeerLost, WorkerFailed
from headrace.spec.cluster import Cluster, Host

Capture = pytest.CaptureFixture[str]


def test_the_engine_begins_before_the_job_is_read_and_ends(stage, job_file: Path) -> None:
    assert run(["train", "digits.py"]) == 0
    assert stage.seen == ["engine begins", "fit", "engine ends"]


def test_what_was_asked_reaches_fit(stage, job_file: Path, tmp_path: Path) -> None:
    arguments = ["--strategy", "mirrored", "--workers", "2", "--device", "cpu", "--run-dir", "a", "--timeout-s", "3"]
    arguments.append("--no-encrypt")
    assert run(["train", "digits.py", *arguments, "--set", "lr=0.5", "--set", "epochs=1"]) == 0
    assert (stage.chosen[0].name, stage.chosen[0].workers) == ("mirrored", 2)
    assert (stage.asked["device"], stage.asked["run_dir"], stage.asked["timeout_s"]) == ("cpu", Path("a"), 3.0)
    assert stage.asked["encrypt"] is False
    assert stage.asked["engine"] is not None
    assert (stage.job.data[0], stage.job.epochs) == (0.5, 1)


def test_each_worker_may_have_a_device_of_its_own(
    stage, job_file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["train", "digits.py", "--strategy", "mirrored", "--device", "cuda:0,cpu"]) == 0
    assert stage.asked["device"] == "cuda:0,cpu"
    assert run(["train", "digits.py", "--device", "cuda:0,gpu"]) == 2
    assert "'gpu' is not one of 'auto', 'cpu', 'cuda'" in capsys.readouterr().err
    assert run(["compare", "digits.py", "--device", "cuda:0,cpu"]) == 2
    assert "'cuda:0,cpu' is not one of" in capsys.readouterr().err
    mixed = Cluster((Host("a", 2, 2**30, worker_devices=("cuda:0", "cpu")),), device="cuda")
    monkeypatch.setattr(headrace.machine.identity, "detect", lambda device: mixed)
    assert run(["train", "digits.py", "--device", "cuda:0,cpu", "--predict", "profile.toml"]) == 2
    assert "--predict simulates devices of one kind, got --device cuda:0,cpu" in capsys.readouterr().err


def test_a_prediction_is_of_the_job_s_batch_and_micro_batches(
    stage, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def simulate(profile: Path, machines: Any, strategy: Any, **what: Any) -> Any:
        asked.extend([profile, machines, strategy.name, what])
        return types.SimpleNamespace(save=asked.append)

    monkeypatch.setattr("headrace.prediction.simulation.simulate.simulate", simulate)
    words = ["--cluster", "cluster.toml", "--predict", "model.json", "--set", "options.accumulate=4", "--run-dir", "a"]
    assert run(["train", "digits.py", *words]) == 0
    batch = {"global_batch_size": 8, "accumulate": 4}
    assert asked == [Path("model.json"), "cluster.toml", "one_device", batch, Path("a")]


def test_the_result_is_on_stdout_and_progress_on_stderr(stage, job_file: Path, capsys: Capture) -> None:
    stage.said = "a print of the user"
    assert run(["train", "digits.py", "--strategy", "mirrored", "--run-dir", "runs/a"]) == 0
    out, err = capsys.readouterr()
    assert "accuracy 0.875" in out
    assert "examples/s" in out
    assert out.splitlines()[-2:] == ["model: runs/a/model.safetensors", "next: headrace report runs/a"]
    assert max(len(line) for line in out.splitlines()) <= 80
    assert err == "a print of the user\n"


def test_all_that_is_known_is_asked_for(stage, job_file: Path, capsys: Capture) -> None:
    assert run(["train", "digits.py", "--run-dir", "runs/a", "-v"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-2:] == ["run dir: runs/a", "model: runs/a/model.safetensors"]
    assert "peak memory" in out


def test_the_result_as_json(stage, job_file: Path, capsys: Capture) -> None:
    assert run(["train", "digits.py", "--run-dir", "runs/a", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["metrics"] == {"accuracy": 0.875, "loss": 0.25}
    assert result["examples_per_s"] > 0
    assert (result["run_dir"], result["model"]) == ("runs/a", "runs/a/model.safetensors")


def test_a_run_directory_of_its_own(stage, job_file: Path) -> None:
    assert run(["train", "digits.py", "--strategy", "mirrored"]) == 0
    assert stage.asked["run_dir"].parent == Path("runs")
    assert stage.asked["run_dir"].name.startswith("digits-mirrored-2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digit.py"], "did you mean digits.py?"),
        (["digits.py", "--strategy", "mirored"], "did you mean 'mirrored'?"),
        (["digits.py", "--run-dir", ""], "it is empty, as an unset shell variable is; name a directory"),
    ],
)
def test_nothing_starts_when_the_command_line_is_wrong(
    stage, job_file: Path, arguments: list[str], words: str, capsys: Capture
) -> None:
    assert run(["train", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert stage.seen == []


def test_a_job_that_cannot_be_loaded_ends_the_engine(stage, job_file: Path, capsys: Capture) -> None:
    job_file.write_text("import math\n\ndef shape():\n    return math.sqrt(-1)\n\njob = shape()\n")
    assert run(["train", "digits.py"]) == 2
    err = capsys.readouterr().err
    assert stage.seen == ["engine begins", "engine ends"]
    assert err.startswith("error: the job file digits.py failed when it was loaded: ValueError: ")
    assert err.rstrip().splitlines()[-1].startswith("ValueError: ")
    assert "headrace/cli" not in err


def test_one_device_takes_no_other_number_of_workers(stage, job_file: Path, capsys: Capture) -> None:
    assert run(["train", "digits.py", "--workers", "2"]) == 2
    assert "--workers 2: one_device runs on 1; try --strategy mirrored" in capsys.readouterr().err
    assert run(["train", "digits.py", "--workers", "1"]) == 0


def test_a_number_of_workers_is_one_of_stages_and_devices(stage, job_file: Path, capsys: Capture) -> None:
    assert run(["train", "digits.py", "--strategy", "pipeline", "--workers", "2"]) == 0
    assert run(["train", "digits.py", "--strategy", "tensor_parallel(devices=2)", "--workers", "2"]) == 0
    assert run(["train", "digits.py", "--strategy", "pipeline(stages=3)", "--workers", "2"]) == 2
    assert "--workers 2: pipeline(stages=3) runs on 3; say it once" in capsys.readouterr().err


def test_a_worker_that_fails_has_the_last_word(stage, job_file: Path, capsys: Capture) -> None:
    shown = 'Traceback (most recent call last):\n  File "digits.py", line 3, in loss\nKeyError: 3'
    stage.error = WorkerFailed(1, "host", "KeyError: 3", shown)
    assert run(["train", "digits.py", "--run-dir", "runs/a", "--strategy", "mirrored"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(f"error: rank 1 on host failed: KeyError: 3\nevents and logs: runs/a\n\n{shown}\n")


def test_a_lost_peer_as_json(stage, job_file: Path, capsys: Capture) -> None:
    stage.error = PeerLost(1, "host", "killed by signal 9 (SIGKILL)")
    assert run(["train", "digits.py", "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["rank"], error["exit_code"]) == ("PeerLost", 1, 4)


def test_an_interrupted_run_shows_what_it_has(stage, job_file: Path, capsys: Capture) -> None:
    stage.status = "interrupted"
    assert run(["train", "digits.py", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["status"] == "interrupted"


def test_workers_see_the_folder_of_the_job(
    stage, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    paths: list[list[str]] = []
    module = sys.modules["headrace.engine.local.engine"]
    engine = module.LocalEngine
    monkeypatch.setattr(module, "LocalEngine", lambda forks: (paths.append(list(sys.path)), engine(forks))[1])
    assert run(["train", "digits.py"]) == 0
    assert str(tmp_path) in paths[0]
    assert MODULE in sys.modules


@pytest.mark.parametrize(("rank", "shown"), [("0", True), ("1", False)])
def test_under_a_launcher_its_processes_are_the_workers_and_rank_0_speaks(
    stage, job_file: Path, rank: str, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("headrace.engine.torchrun.agreement.require_same", lambda facts: None)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["train", "digits.py", "--strategy", "mirrored", "--run-dir", "runs/a"]) == 0
    assert stage.seen == ["fit"]
    assert stage.asked["engine"] is None
    assert bool(capsys.readouterr().out) is shown


@pytest.mark.slow
def test_curves_for_tensorboard(stage, job_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert run(["train", "digits.py", "--strategy", "mirrored", "--tensorboard", "tb"]) == 0
    assert [folder.name for folder in (tmp_path / "tb").iterdir()] == ["mirrored-2"]


def test_a_ray_cluster_is_an_engine_and_servers_mean_a_strategy_with_servers(stage, job_file: Path) -> None:
    assert run(["train", "digits.py", "--cluster", "ray://auto", "--workers", "4", "--servers", "2"]) == 0
    assert type(stage.asked["engine"]).__name__ == "RayEngine"
    assert stage.asked["cluster"] is None
    (chosen,) = stage.chosen
    assert (chosen.name, chosen.workers, chosen.servers) == ("parameter_server", 4, 2)
    # No local engine was made.
    assert stage.seen == ["fit"]


def test_what_a_ray_cluster_is_asked_for_reaches_its_engine(
    stage, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.engine.ray import engine

    asked: list[dict[str, object]] = []
    made = engine.RayEngine.__init__

    def noted(self: engine.RayEngine, address: str, **arguments: Any) -> None:
        asked.append({"address": address, **arguments})
        made(self, address, **arguments)

    monkeypatch.setattr(engine.RayEngine, "__init__", noted)
    (tmp_path / "env.json").write_text('{"pip": ["einops"]}')
    arguments = ["--runtime-env", "env.json", "--resources", '{"disk": 0.5}', "--placement", "strict_spread"]
    assert run(["train", "digits.py", "--cluster", "ray://auto", "--workers", "4", "--servers", "1", *arguments]) == 0
    expected = {"runtime_env": {"pip": ["einops"]}, "resources": {"disk": 0.5}, "placement": "STRICT_SPREAD"}
    assert asked == [{"address": "ray://auto", **expected}]


def test_servers_belong_to_the_strategy_that_is_named(stage, job_file: Path) -> None:
    assert run(["train", "digits.py", "--strategy", "downpour(push_every=2)", "--workers", "2", "--servers", "3"]) == 0
    (chosen,) = stage.chosen
    assert (chosen.name, chosen.servers, chosen.push_every) == ("downpour", 3, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--strategy", "mirrored", "--servers", "2"],
            "--servers 2: mirrored has none; try --strategy parameter_server",
        ),
        (
            ["--strategy", "downpour(servers=4)", "--servers", "2"],
            "--servers 2: downpour(servers=4) has 4; say it once",
        ),
        (["--cluster", "ray://auto", "--secret-file", "secret"], "makes a secret of its own for each run"),
        (["--placement", "spread"], "--placement is for a Ray cluster; say which by --cluster ray://auto"),
        (["--cluster", "ray://auto", "--runtime-env", "none.json"], "--runtime-env none.json is no file of JSON"),
        (
            ["--cluster", "ray://auto", "--runtime-env", "{pip: []}"],
            "--runtime-env is no JSON: Expecting property name",
        ),
        (["--cluster", "ray://auto", "--resources", "[1]"], "--resources is an object of JSON"),
        (["--cluster", "ray://auto", "--resources", '{"disk": 0}'], "a number above 0, got 'disk': 0"),
    ],
)
def test_what_does_not_fit_a_ray_cluster_or_servers(
    stage, job_file: Path, capsys: Capture, arguments: list[str], said: str
) -> None:
    assert run(["train", "digits.py", *arguments]) == 2
    assert said in capsys.readouterr().err
