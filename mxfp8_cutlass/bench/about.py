"""Where a run took place: GPU, driver, clocks, versions."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess

import torch

QUERY = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
PACKAGES = (
    "mxfp8_cutlass",
    "torch",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cutlass",
    "sgl-deep-gemm",
    "deep-gemm",
)


def nvidia_smi(device: torch.device, fields: tuple[str, ...] = CLOCKS) -> dict[str, str]:
    """What nvidia-smi reports of a device; empty without one, and {"nvidia-smi": reason} if it cannot say."""
    if device.type != "cuda":
        return {}
    uuid = torch.cuda.get_device_properties(device).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": str(error)}
    return dict(zip(fields, (value.strip() for value in out.strip().split(",")), strict=False))


def about(device: torch.device) -> dict[str, str]:
    """Facts by name."""
    facts = {"device": "CPU, reference", "python": platform.python_version(), "torch's CUDA": str(torch.version.cuda)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = properties.name
        facts["multiprocessors"] = str(properties.multi_processor_count)
        facts["L2 bytes"] = str(properties.L2_cache_size)
        facts["memory bytes"] = str(properties.total_memory)
        facts.update(nvidia_smi(device, QUERY))
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts
