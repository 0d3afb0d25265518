"""Which interpreter is looked at, what is in it, and one clear line for what is no interpreter."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import crafted
from kernelguard.errors import InputError, KernelguardError, UndeterminedError
from kernelguard.observe import interpreter
from kernelguard.observe.interpreter import ask_gpu, find_interpreter, observe
from kernelguard.observe.values import Gpu, GpuState
from observed import environment, make_venv, torch_base, transformers_base


def _executable(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# --- which one ---------------------------------------------------------------------------------------------------


def test_the_active_environment_comes_before_path(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    other = make_venv(tmp_path / "other")
    environ = {"VIRTUAL_ENV": str(venv.prefix), "PATH": str(other.python.parent)}
    assert find_interpreter(None, environ) == str(venv.python)
    del environ["VIRTUAL_ENV"]
    assert find_interpreter(None, environ) == str(other.python)


def test_it_is_never_silently_the_one_that_runs_kernelguard(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no interpreter to observe"):
        find_interpreter(None, {"PATH": str(tmp_path)})
    (tmp_path / "python3").symlink_to(sys.executable)
    with pytest.raises(InputError, match="no interpreter to observe") as caught:
        find_interpreter(None, {"PATH": str(tmp_path)})
    assert caught.value.hint == f"--python {tmp_path / 'python3'}, or the one that will train"
    with pytest.raises(InputError, match="there is no"):
        find_interpreter(None, {"VIRTUAL_ENV": str(tmp_path / "gone"), "PATH": str(Path(sys.executable).parent)})


def test_an_explicit_one_is_taken_as_it_is(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    assert venv.python.is_symlink()
    assert find_interpreter(venv.python, {}) == str(venv.python)
    assert find_interpreter(Path("python"), {"PATH": str(venv.python.parent)}) == str(venv.python)


def test_a_missing_path_a_folder_and_a_plain_file(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    with pytest.raises(InputError, match="there is no interpreter at"):
        find_interpreter(tmp_path / "missing", {})
    with pytest.raises(InputError, match="is a folder") as caught:
        find_interpreter(venv.prefix, {})
    assert caught.value.hint == f"--python {venv.python}"
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="is not executable"):
        find_interpreter(tmp_path / "text", {})


# --- what is no interpreter --------------------------------------------------------------------------------------


def _error(python: Path, timeout: float = 30.0) -> KernelguardError:
    with pytest.raises(KernelguardError) as caught:
        observe(find_interpreter(python, {}), timeout=timeout)
    assert "\n" not in caught.value.message
    assert str(python) in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", ["ls", "true", "cat"])
def test_another_program(name: str) -> None:
    path = shutil.which(name)
    assert path
    error = _error(Path(path))
    assert isinstance(error, InputError)
    assert "is not a Python interpreter" in error.message


def test_another_program_is_not_given_our_files(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tool = _executable(tmp_path / "remove", f'#!/bin/sh\necho "$@" >> {log}\n')
    assert isinstance(_error(tool), InputError)
    # Nor by any other command that takes one: they all find their interpreter here.
    with pytest.raises(InputError, match="is not a Python interpreter"):
        find_interpreter(tool, {})
    assert ".py" not in log.read_text()


def test_a_program_named_python_that_is_none(tmp_path: Path) -> None:
    assert "is not a Python interpreter" in _error(_executable(tmp_path / "python", "#!/bin/sh\necho 3.12\n")).message


def test_a_text_file_with_the_executable_bit(tmp_path: Path) -> None:
    error = _error(_executable(tmp_path / "python", "just text\n"))
    assert isinstance(error, InputError)
    assert "cannot be run" in error.message


def test_a_script_whose_interpreter_is_gone(tmp_path: Path) -> None:
    assert isinstance(_error(_executable(tmp_path / "python", "#!/nonexistent/python\n")), InputError)


def test_a_binary_for_another_platform(tmp_path: Path) -> None:
    binary = bytearray(Path(sys.executable).resolve().read_bytes()[:4096])
    binary[18:20] = (243).to_bytes(2, "little")  # e_machine
    error = _error(_executable(tmp_path / "python", bytes(binary)))
    assert isinstance(error, InputError)
    assert "is a program for riscv64; this machine is" in error.message


def test_one_that_crashes(tmp_path: Path) -> None:
    error = _error(_executable(tmp_path / "python", "#!/bin/sh\nkill -SEGV $$\n"))
    assert isinstance(error, InputError)
    assert "SIGSEGV" in error.message


@pytest.mark.parametrize("name", ["python", "other"])
def test_one_that_hangs_cannot_be_determined(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelguard.observe.interpreter._PROBE_TIMEOUT_S", 1.0)
    error = _error(_executable(tmp_path / name, "#!/bin/sh\nexec sleep 600\n"), timeout=1.0)
    assert isinstance(error, UndeterminedError)
    assert "did not answer within 1 s" in error.message


@pytest.mark.parametrize("version", ["2.7.18", "3.8.19"])
def test_a_python_that_is_too_old(tmp_path: Path, version: str) -> None:
    # What an old interpreter does: fails on our syntax, and answers the plain question.
    body = f'#!/bin/sh\n[ "$1" = -c ] && printf "python {version}" && exit 0\necho "SyntaxError" >&2; exit 1\n'
    error = _error(_executable(tmp_path / "python", body))
    assert isinstance(error, InputError)
    assert f"is Python {version}; 3.9 or newer is needed" in error.message


# --- what is in it -----------------------------------------------------------------------------------------------


def test_without_torch_and_transformers(tmp_path: Path) -> None:
    env = make_venv(tmp_path / "venv")
    seen = observe(str(env.python))
    assert seen.live
    assert seen.origin == str(env.python)
    assert seen.python == Version("{}.{}.{}".format(*sys.version_info[:3]))
    assert seen.machine == os.uname().machine
    assert seen.glibc is not None
    assert (seen.torch, seen.torch_is_cpu, seen.transformers_root, seen.transformers_version) == (None,) * 4
    assert seen.distributions == {}
    assert seen.problems == ()


def test_a_real_torch_and_transformers() -> None:
    env = transformers_base("5.24.0")
    seen = observe(str(env.python))
    assert seen.torch is not None
    assert seen.torch.public == "2.13.0"
    assert seen.cxx11_abi is True
    assert seen.transformers_version == Version("5.24.0")
    assert seen.transformers_root == str((env.site / "transformers").resolve())
    assert seen.distributions is not None
    assert seen.distributions["transformers"].version == "5.24.0"
    assert seen.distributions["torch"].top_level[:1] == ("functorch",)
    assert "torch" in seen.distributions["torch"].top_level
    assert seen.distributions["pyyaml"].top_level == ("_yaml", "yaml")
    assert seen.problems == ()


def test_what_torch_is_built_for_is_read_from_its_files() -> None:
    is_cpu = "+cpu" in next(torch_base().site.glob("torch-*.dist-info")).name
    seen = observe(str(torch_base().python), gpu=False)
    assert seen.torch_is_cpu is is_cpu
    assert (seen.torch_cuda is None) is is_cpu
    assert (seen.gpu_state is GpuState.CPU_TORCH) is is_cpu


_CUDA_TORCH = "__version__ = '2.6.0+cu124'\ncuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"


def test_facts_are_read_from_files_and_nothing_is_imported(tmp_path: Path) -> None:
    bomb = "raise SystemExit('imported')\n"
    files = {
        "torch/__init__.py": bomb,
        "torch/version.py": _CUDA_TORCH,
        "torch/lib/libc10.so": "..._ZN3c105ErrorC1ENS_14SourceLocationESs...",
        "triton/__init__.py": bomb + "__version__ = '3.2.0'\n",
        "transformers/__init__.py": bomb + '__version__ = "5.24.0"\n',
        **crafted.fla(),
    }
    env = make_venv(tmp_path / "venv")
    for name, text in files.items():
        path = env.site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ptxas = env.site / "triton/backends/nvidia/bin/ptxas"
    ptxas.parent.mkdir(parents=True)
    _executable(ptxas, "#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.99'\n")
    seen = observe(str(env.python), gpu=False)
    assert (seen.torch, seen.torch_cuda, seen.torch_is_cpu) == (Version("2.6.0+cu124"), Version("12.4"), False)
    assert seen.cxx11_abi is False
    assert (seen.triton, seen.ptxas) == (Version("3.2.0"), Version("12.4.99"))
    assert seen.distributions is not None
    assert seen.distributions["flash-linear-attention"].top_level == ("fla",)
    assert seen.distributions["fla-core"].version == "0.6.0"


def test_the_new_abi_and_an_unreadable_one(tmp_path: Path) -> None:
    new = {"torch/__init__.py": "", "torch/version.py": _CUDA_TORCH}
    library = "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_string"
    env = make_venv(tmp_path / "venv")
    for name, text in {**new, "torch/lib/libc10.so": library}.items():
        (env.site / name).parent.mkdir(parents=True, exist_ok=True)
        (env.site / name).write_text(text)
    assert observe(str(env.python), gpu=False).cxx11_abi is True
    (env.site / "torch/lib/libc10.so").write_text("nothing of the kind")
    assert observe(str(env.python), gpu=False).cxx11_abi is None


def test_problems_are_sentences_and_not_guesses(tmp_path: Path) -> None:
    env = environment(
        tmp_path / "venv",
        None,
        {
            "transformers/models/x.py": "",  # a leftover folder without __init__
            "triton/__init__.py": "__version__ = 'main-branch'\n",
            "broken-1.0.dist-info/METADATA": "Metadata-Version: 2.1\n",
            **crafted.metadata("fla-core", "0.5.0", "fla"),
            **crafted.metadata("fla-core", "0.6.0", "fla"),
            **crafted.metadata("triton", "3.2.0", "triton"),
        },
    )
    seen = observe(str(env.python), gpu=False)
    assert (seen.transformers_root, seen.triton) == (None, None)
    text = "\n".join(seen.problems)
    assert "transformers is not a regular package" in text
    assert "'main-branch'" in text
    assert "no name or version" in text
    assert "fla-core is installed 2 times: " in text
    assert "its metadata" in text
    assert len(seen.problems) == 5


@pytest.mark.parametrize(
    ("text", "is_cpu", "problem"),
    [
        pytest.param("__version__ = '2.9.0'\ncuda = None\nhip = '6.4'\n", False, "ROCm 6.4", id="rocm"),
        pytest.param("__version__ = '2.9.0'\n", None, "does not say", id="says-nothing-of-cuda"),
        pytest.param("", None, "does not say", id="empty"),
        pytest.param("__version__ = 'main'\ncuda = None\n", True, "'main'", id="no-version"),
    ],
)
def test_a_torch_of_another_kind(tmp_path: Path, text: str, is_cpu: bool | None, problem: str) -> None:
    env = make_venv(tmp_path / "venv")
    (env.site / "torch").mkdir()
    (env.site / "torch/__init__.py").touch()
    (env.site / "torch/version.py").write_text(text)
    seen = observe(str(env.python), gpu=False)
    assert (seen.torch_is_cpu, seen.torch_cuda) == (is_cpu, None)
    assert [problem in text for text in seen.problems] == [True]


def test_blackwell_has_an_assembler_of_its_own() -> None:
    both = {"ptxas": "12.8.93", "ptxas-blackwell": "12.9.86"}
    hopper, blackwell = Gpu(name="H", capability=(9, 0)), Gpu(name="B", capability=(10, 3))
    assert interpreter._ptxas(both, (hopper,)) == interpreter._ptxas(both, ()) == "12.8.93"
    assert interpreter._ptxas(both, (hopper, blackwell)) == "12.9.86"
    assert interpreter._ptxas({"ptxas": "12.8.93"}, (blackwell,)) == "12.8.93"
    assert interpreter._ptxas({}, (hopper,)) is None


def test_variables_are_the_relevant_ones_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("USE_HUB_KERNELS", "NO")
    monkeypatch.setenv("FLA_TILELANG", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setenv("FLA_API_KEY", "very-secret")
    monkeypatch.setenv("TRITON_CACHE_DIR", "https://user:pass@host/cache")
    monkeypatch.setenv("KERNELS_CACHE", "hf_abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setenv("HOME_ADDRESS", "private")
    seen = observe(str(make_venv(tmp_path / "venv").python)).variables
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["USE_HUB_KERNELS"] == "NO"
    assert seen["FLA_TILELANG"] == "1"
    assert seen["TRITON_CACHE_DIR"] == seen["KERNELS_CACHE"] == "(masked)"
    assert not {"HF_TOKEN", "FLA_API_KEY", "HOME_ADDRESS"} & seen.keys()
    assert not [value for value in seen.values() if "hf_" in value or "secret" in value]


def test_it_sees_what_a_training_script_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = tmp_path / "extra"
    (extra / "transformers").mkdir(parents=True)
    (extra / "transformers/__init__.py").write_text('__version__ = "4.57.6"\n')
    (tmp_path / "cwd/torch").mkdir(parents=True)
    (tmp_path / "cwd/torch/__init__.py").write_text("")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("PYTHONPATH", str(extra))
    seen = observe(str(make_venv(tmp_path / "venv").python))
    # PYTHONPATH counts; the current folder does not.
    assert seen.transformers_version == Version("4.57.6")
    assert seen.torch is None


def test_a_wrapper_is_gone_through_again(tmp_path: Path) -> None:
    """Module systems and containers put a script in front that sets what the libraries need."""
    env = make_venv(tmp_path / "venv")
    script = f'#!/bin/sh\nexport CUDA_HOME=/opt/cuda\nexec {env.python} "$@"\n'
    wrapper = _executable(tmp_path / "python-with-cuda", script)
    seen = observe(str(wrapper))
    assert seen.variables["CUDA_HOME"] == "/opt/cuda"
    assert seen.executable == str(wrapper)


# --- what torch says about the GPU -------------------------------------------------------------------------------

_CUDA = """
__version__ = "2.12.1+cu130"
class version: cuda = "13.0"
class _Device:
    name, major, minor, total_memory = "NVIDIA H200", 9, 0, 2**37
class cuda:
    is_available = staticmethod(lambda: {available})
    device_count = staticmethod(lambda: {count})
    @staticmethod
    def init(): {init}
    @staticmethod
    def get_device_properties(index): return _Device()
"""


@pytest.mark.parametrize(
    ("text", "available", "gpus", "error"),
    [
        pytest.param(_CUDA.format(available=True, count=2, init="pass"), True, 2, "", id="two"),
        pytest.param(
            _CUDA.format(available=False, count=0, init="raise RuntimeError('No CUDA GPUs are available')"),
            False,
            0,
            "RuntimeError: No CUDA GPUs are available",
            id="none",
        ),
        pytest.param(
            # PYTORCH_NVML_BASED_CUDA_CHECK: available by NVML's word, while CUDA itself does not come up.
            _CUDA.format(available=True, count=1, init="raise RuntimeError('CUDA unknown error')"),
            False,
            0,
            "RuntimeError: CUDA unknown error",
            id="nvml-alone",
        ),
        pytest.param("raise OSError('libcudnn.so.9: cannot open')", None, 0, "OSError: libcudnn.so.9", id="broken"),
        pytest.param("import os; os.abort()", None, 0, "was killed by SIGABRT at stage 'import torch'", id="crash"),
        pytest.param(
            _CUDA.format(available="__import__('time').sleep(600)", count=1, init="pass"),
            None,
            0,
            "did not end within its time limit at stage 'torch.cuda.is_available()'",
            id="hang",
        ),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(
    tmp_path: Path, text: str, available: bool | None, gpus: int, error: str
) -> None:
    env = make_venv(tmp_path / "venv")
    (env.site / "torch.py").write_text(text)
    report = ask_gpu(str(env.python), timeout=3.0)
    assert report.available is available
    assert report.gpus == (Gpu(name="NVIDIA H200", capability=(9, 0), memory_bytes=2**37),) * gpus
    assert error in report.error
    assert bool(report.error) is bool(error)
