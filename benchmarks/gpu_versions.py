"""Say on what a run on a CUDA GPU was made; fail where something that the tests need is missing or too old.

Run: ``python -m benchmarks.gpu_versions``.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
TOOLS = ("expecttest", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
"""What the tests need beside the dependencies."""


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *TOOLS)]
    print(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    print(f"Python {platform.python_version()}, {platform.platform()}")
    missing = [problem for requirement in wanted if (problem := _problem(requirement))]
    if missing:
        sys.exit(f"this Python cannot run dtckpt's tests: {'; '.join(missing)}; carry wheels, see docs/measuring.md")
    _print_gpus()


def _problem(requirement: Requirement) -> str | None:
    """Print the version of a distribution; return its faults."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"got no {requirement.name}, expected {requirement}"
    print(f"{requirement.name} {version}")
    return None if requirement.specifier.contains(version, prereleases=True) else f"got {version} of {requirement}"


def _print_gpus() -> None:
    import torch

    print(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, git {torch.version.git_version}")
    if not torch.cuda.is_available():
        print("no GPU")
        return
    num_by_nvml = torch.cuda._device_count_nvml()
    print(f"GPUs: {torch.cuda.device_count()}, by NVML {num_by_nvml}")
    if num_by_nvml < 0:
        # PyTorch then asks the driver, which starts CUDA; a process that was forked after that cannot use it.
        sys.exit(
            "NVML does not tell the number of GPUs: the tests ask for it in a process that is forked later, and only "
            "NVML makes that safe; look whether libnvidia-ml.so.1 loads, and whether CUDA_VISIBLE_DEVICES names a MIG "
            "instance, about which PyTorch does not ask NVML"
        )
    for number in range(torch.cuda.device_count()):
        print(f"GPU {number}: {torch.cuda.get_device_name(number)}, {torch.cuda.mem_get_info(number)[1] >> 30} GiB")
    print(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, driver {_driver()}")


def _driver() -> str:
    """Return the driver's version as the kernel tells it."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        try:
            told = Path("/proc/driver/nvidia/version").read_text()
        except OSError:
            return "unknown"
    found = re.search(r"\d+\.\d+(\.\d+)?", told)
    return found[0] if found else "unknown"


if __name__ == "__main__":
    main()
