"""A machine on which nothing is wrong, and a recipe that asks for little of it."""

from __future__ import annotations

from asyncrl.doctor.machine import Import, Machine, Needs, Place

GB = 10**9
VERSIONS = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "tokenizers": "0.23.3", "safetensors": "0.8.0", "wandb": "0.31.0"}
IMPORTS = {"torch": Import(seconds=3.0, facts={"cuda_build": "", "cuda": False, "devices": 0}), "transformers": Import(seconds=9.0)}
WELL = Machine(
    python=(3, 11, 7), system="Linux 6.8", death_signal_error="", versions=VERSIONS, imports=IMPORTS, machine_cores=4, usable_cores=4,
    threads_variable="", memory_bytes=16 * GB, shared=Place("/dev/shm", 8 * GB), temporary=Place("/tmp", 50 * GB),
    runs=Place("runs", 50 * GB), gpus=(), loopback_error="", open_files=20_000, processes=-1, wandb_mode="online")
NEEDS = Needs(engine="transformers", threads=2, disk_bytes=GB, shared_bytes=GB, memory_bytes=GB, wandb=False)
