"""Where the numbers go, and what happens when a place they go to is away; GPU health of all ranks."""

from __future__ import annotations

import math
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from kernelguard_train import metrics
from kernelguard_train.config import Config
from kernelguard_train.errors import ConfigError, OutputError
from kernelguard_train.ranks import Ranks
from kernelguard_train.report import Report


def configured(model_folder: Path, output: Path, *overrides: str) -> Config:
    return tiny.configured(model_folder, f"train.output={output}", "train.steps=2", "report.every=1", *overrides)


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real client on a store of files."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    mlflow.set_experiment("tiny")
    yield mlflow
    while mlflow.active_run():
        mlflow.end_run()
    mlflow.set_tracking_uri(None)


def test_mlflow_is_told_every_number(model_folder: Path, tmp_path: Path, alone: Ranks, mlflow: Any) -> None:
    config = configured(model_folder, tmp_path, "report.mlflow=true")
    lines = tiny.run(config, alone)
    assert mlflow.active_run() is None, "the run is ended"
    (run,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("tiny").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == str(config.optim.lr)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(line["step"], line["loss"]) for line in lines]


def test_a_log_server_that_goes_away_is_said_once_and_costs_nothing(
    model_folder: Path, tmp_path: Path, alone: Ranks, mlflow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Vanishing(Report):
        def step(self, number: int, done: float, values: dict[str, Any]) -> None:
            if number == 2:
                for folder in (tmp_path / "store").rglob("metrics"):
                    folder.rename(folder.with_name("gone"))
                    folder.write_text("no folder any more")
            super().step(number, done, values)

    config = configured(model_folder, tmp_path, "report.mlflow=true", "train.steps=3")
    lines = tiny.run(config, alone, Vanishing(config, first=True))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert caplog.text.count("mlflow is not told any more") == 1
    for file in (tmp_path / "store").rglob("metrics"):
        file.unlink()
        file.with_name("gone").rename(file)
    mlflow.end_run()


def test_mlflow_that_cannot_begin_is_a_configuration_error(
    model_folder: Path, tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    mlflow.set_tracking_uri((tmp_path / "file" / "store").as_uri())
    config = configured(model_folder, tmp_path / "out", "report.mlflow=true")
    with pytest.raises(ConfigError, match=r"report\.mlflow: \w+"):
        Report(config, first=True)
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        Report(config, first=True)


def test_a_log_that_cannot_be_written_ends_the_run_with_its_path(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"train\.output: .*file"):
        Report(configured(model_folder, tmp_path / "file" / "out"), first=True)
    report = Report(configured(model_folder, tmp_path), first=True)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    try:
        with pytest.raises(OutputError, match=r"steps\.jsonl cannot be written: .*File too large"):
            report.step(1, 0.5, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, before)
    report.__exit__()


def test_each_reported_step_says_which_rank_waited_longest(model_folder: Path, tmp_path: Path, alone: Ranks) -> None:
    for line in tiny.run(configured(model_folder, tmp_path), alone):
        assert line["data_wait_max_s"] == pytest.approx(line["data_wait_s"])
        assert not [key for key in line if key.startswith("gpu_")], "there is none here"


def test_the_worst_of_all_ranks_is_reported_with_its_rank() -> None:
    unknown = math.nan
    names = list(metrics.WORST)
    readings = [[float(10 * rank + place) for place in range(len(names))] for rank in range(3)]
    readings[1][names.index("gpu_temperature")] = 95.0
    readings[2][names.index("gpu_sm_mhz")] = 210.0
    readings[0][names.index("gpu_sm_mhz")] = 1980.0
    readings[1][names.index("gpu_sm_mhz")] = unknown
    for own in readings:
        own[names.index("gpu_ecc_corrected")] = unknown
    found = metrics.worst_of(readings)
    assert (found["gpu_temperature"], found["gpu_temperature_rank"]) == (95.0, 1)
    assert (found["gpu_sm_mhz"], found["gpu_sm_mhz_rank"]) == (210.0, 2)
    assert (found["gpu_utilization"], found["gpu_utilization_rank"]) == (0.0, 0), "the idlest"
    assert found["data_wait_max_s_rank"] == 2
    assert "gpu_ecc_corrected" not in found, "what no GPU tells is not made up"
    assert "gpu_temperature_rank" not in metrics.worst_of(readings[:1])


def test_health_is_what_nvml_says_as_far_as_it_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client library; only the driver below it is stood in for."""
    pynvml = pytest.importorskip("pynvml")

    class Properties:
        uuid = "1b2c"

    def ecc(handle: str, kind: int, counter: int) -> int:
        assert (handle, counter) == ("handle of GPU-1b2c", pynvml.NVML_VOLATILE_ECC)
        if kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 7

    def clock(_handle: str, _kind: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Properties)
    stand_ins = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"handle of {uuid}",
        "nvmlDeviceGetUtilizationRates": lambda _: type("Rates", (), {"gpu": 98})(),
        "nvmlDeviceGetTemperature": lambda _, kind: 61 if kind == pynvml.NVML_TEMPERATURE_GPU else -1,
        "nvmlDeviceGetPowerUsage": lambda _: 643_210,
        "nvmlDeviceGetClockInfo": clock,
        "nvmlDeviceGetTotalEccErrors": ecc,
    }
    for name, function in stand_ins.items():
        monkeypatch.setattr(pynvml, name, function)
    health = metrics.Health(torch.device("cuda", 0))
    assert health.note == ""
    assert health.read() == {
        "gpu_utilization": 98.0,
        "gpu_temperature": 61.0,
        "gpu_power_w": 643.21,
        "gpu_ecc_uncorrected": 7.0,
    }
    assert health.note.startswith("gpu_sm_mhz: "), "what went wrong is kept; what is not supported is not"


def test_health_says_why_it_has_nothing_to_say() -> None:
    """NVML's library is not on a machine without a driver, and the real client says so."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        health = metrics.Health(torch.device("cuda", 0))
        assert health.note.startswith("GPU health is not reported: NVML says")
        assert health.read() == {}
