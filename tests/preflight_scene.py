"""A recipe that would start, and all the ways to spoil it that preflight knows."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from asyncrl import place_check

TASK = '''"""A task."""
from asyncrl.types import Prompt


def questions(count=3, text="1+1=", messages=()):
    return [Prompt(text=text, messages=tuple(messages)) for _ in range(count)]


def nothing():
    return iter(())


def endless():
    while True:
        yield Prompt(text="1+1=")


def numbers():
    return [1, 2]


def an_object():
    return [Prompt(text="1", columns={"answer": {1, 2}})]


def one_prompt():
    return 7


def raises():
    raise RuntimeError("the data set is away")


def leaves():
    raise SystemExit(3)


def reward(prompt, completion):
    return 1.0


def reward_of_three(prompt, completion, answer):
    return 1.0


def tiny(folder, layers=1):
    """Makes a model."""


def no_pairs(seed):
    return iter(())


def no_texts(seed):
    return iter([(1, 2)])


NUMBER = 3
'''


class Scene:
    """A recipe that would start, its files, and the means to spoil one."""

    def __init__(self, folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.path: Path | None = None
        """Given instead of the recipe."""
        self.model = folder / "model"
        shutil.copytree(model, self.model)
        self.task = folder / "task.py"
        self.task.write_text(TASK, encoding="utf-8")
        self.tree: dict[str, Any] = {
            "model": {"kind": "folder", "path": str(self.model)}, "prompts": {"kind": "function", "function": "task.py:questions"},
            "engine": {"kind": "inline"}, "sampling": {"max_new_tokens": 4}, "env": {"reward": "task.py:reward"},
            "buffer": {"groups_per_step": 2, "group_size": 2, "max_staleness": 0}, "advantages": "grpo", "loss": "decoupled_ppo",
            "trainer": {"learning_rate": 1e-3}, "run": {"name": "r", "steps": 1, "folder": str(folder / "runs")}}

    def set(self, place: str, value: object) -> None:
        *parents, leaf = place.split(".")
        node = self.tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value

    def config(self, **changes: object) -> None:
        """Change what the model's config.json says."""
        path = self.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def weights(self, change: Callable[[bytes], bytes]) -> None:
        path = self.model / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    def jsonl(self, data: bytes) -> None:
        path = self.folder / "data.jsonl"
        path.write_bytes(data)
        self.tree["prompts"] = {"kind": "jsonl", "path": str(path)}

    def shards(self, *names: str) -> None:
        (self.model / "model.safetensors").unlink()
        (self.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))

    def warm_up(self, examples: str) -> None:
        self.tree["warm_up"] = {"kind": "cross_entropy", "examples": examples, "held_out": "task.py:no_texts", "until_accuracy": 0.5}

    def recipe(self) -> Path:
        if self.path is not None:
            return self.path
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(self.tree), encoding="utf-8")
        return path


Spoil = Callable[[Scene], object]


def pushed(scene: Scene, place: str, value: object) -> None:
    scene.set("weights", {"transport": "nccl"})
    scene.set("engine", {"kind": "transformers"})
    scene.set("trainer.processes", 1)
    scene.set(place, value)


def lost(scene: Scene, name: str) -> None:
    (scene.model / name).unlink()


def refuse_loopback(scene: Scene) -> None:
    def create_server(*given: object, **named: object) -> socket.socket:
        raise OSError(99, "Cannot assign requested address")
    scene.patch.setattr(place_check.socket, "create_server", create_server)


def long_socket_folder(scene: Scene) -> None:
    scene.patch.setattr("asyncrl.preflight.require_vllm", lambda: None)
    scene.patch.setattr("asyncrl.preflight._check_engine", lambda config, folder: 256)
    scene.patch.setenv("VLLM_RPC_BASE_PATH", "/tmp/" + "x" * 80)
    scene.set("engine", {"kind": "vllm"})


def experts_in_vllm(scene: Scene) -> None:
    for module in ("preflight", "rollout.vllm_engine"):
        scene.patch.setattr(f"asyncrl.{module}.require_vllm", lambda: None)
    scene.set("engine", {"kind": "vllm"})
    scene.config(num_experts=8, num_experts_per_tok=2)


def mixed(scene: Scene, **second: object) -> None:
    """Two sources, the second with something of its own."""
    source = {"kind": "function", "function": "task.py:questions"}
    scene.tree["prompts"] = {"kind": "mixture", "sources": {"one": source, "two": source | second}}


def add_token(scene: Scene, text: str) -> None:
    """To the tokenizer alone: the embedding has no row for it."""
    path = scene.model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([text])
    tokenizer.save(str(path))


def lock(scene: Scene, locked: Path) -> None:
    """What a user who is not root meets below a folder, or at a file, of somebody else's."""
    def refused(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *given: Any, **named: Any) -> Any:
            asked = Path("/") if isinstance(path, int) else Path(os.fsdecode(path))
            if asked.is_relative_to(locked) and (real is not stat or asked != locked):  # what it is, its folder says
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *given, **named)
        return call

    stat = os.stat
    for module, name in ((os, "stat"), (os, "listdir"), (os, "scandir"), (os, "open"), (io, "open")):
        scene.patch.setattr(module, name, refused(getattr(module, name)))


TURNS = {"kind": "turns"}
LORA = {"kind": "lora", "rank": 2}


def without(scene: Scene, package: str) -> None:
    """As if it were not installed."""
    find = importlib.util.find_spec
    scene.patch.setattr("asyncrl.lora_config.importlib.util.find_spec", lambda name, *rest: None if name == package else find(name, *rest))


CASES: dict[str, Spoil] = {
    "a place for versions that cannot be written": lambda s: s.set("weights", {"transport": {"kind": "store", "root": "/proc/nowhere"}}),
    "ranks that cannot share the heads": lambda s: s.set("engine", {"kind": "vllm", "tensor_parallel_size": 3}),
    "packed versions without the package": lambda s: (s.patch.setitem(sys.modules, "asyncrl.weights.planes", None),
                                                      s.set("weights", {"transport": {"kind": "store", "compression": "zstd"}})),
    "a shuffle of what is no list": lambda s: s.tree["prompts"].update(function="task.py:endless", shuffle="full"),
    "pass rates of what never comes again": lambda s: s.tree["prompts"].update(function="task.py:endless", curriculum="pass_rate"),
    "a source whose reward is not there": lambda s: mixed(s, env={"reward": "task.py:away"}),
    "a source without a prompt": lambda s: mixed(s, function="task.py:nothing"),
    "a source that cannot be shuffled": lambda s: mixed(s, function="task.py:endless", shuffle="full"),
    "a source that writes more than the context holds": lambda s: (s.set("engine.context_tokens", 32),
                                                                   mixed(s, sampling={"max_new_tokens": 32})),
    "a source whose reward may take too long": lambda s: mixed(s, env={"timeout_s": 1e5}),
    "a recipe that is not there": lambda s: setattr(s, "path", s.folder / "away.yaml"),
    "a recipe that is a folder": lambda s: setattr(s, "path", s.folder),
    "a recipe that is no YAML": lambda s: setattr(s, "path", s.task),
    "truncated sampling that is not recorded": lambda s: (s.set("engine", {"kind": "vllm"}), s.set("sampling.top_p", 0.9)),
    "sampling with a penalty": lambda s: s.set("sampling.repetition_penalty", 1.1),
    "experts that are not recorded": lambda s: (s.set("engine", {"kind": "vllm"}), s.set("trainer.routing_replay", True)),
    "experts of a dense model": lambda s: s.set("trainer.routing_replay", True),
    "experts that vLLM should update": experts_in_vllm,
    "experts inside compiled layers": lambda s: (s.set("trainer.routing_replay", True), s.set("trainer.compile", True)),
    "a model folder that is not there": lambda s: s.set("model.path", "nowhere"),
    "a model path longer than any can be": lambda s: s.set("model.path", "x" * 5000),
    "a model in the home of nobody": lambda s: s.set("model.path", "~nobody-here/models/one"),
    "a recipe path longer than any can be": lambda s: setattr(s, "path", Path("x" * 5000)),
    "a data path longer than any can be": lambda s: s.set("prompts", {"kind": "jsonl", "path": "x" * 5000}),
    "a run folder longer than any can be": lambda s: s.set("run.folder", "x" * 5000),
    "a model folder without config.json": lambda s: lost(s, "config.json"),
    "a model without a tokenizer": lambda s: lost(s, "tokenizer.json"),
    "a model without weights": lambda s: lost(s, "model.safetensors"),
    "a model whose weights are a pickle": lambda s: (s.model / "model.safetensors").rename(s.model / "pytorch_model.bin"),
    "config.json that is no JSON": lambda s: (s.model / "config.json").write_text("{"),
    "tokenizer.json that is no tokenizer": lambda s: (s.model / "tokenizer.json").write_text("{}"),
    "weights that were cut off": lambda s: s.weights(lambda data: data[:-100]),
    "weights with bytes behind them": lambda s: s.weights(lambda data: data + b"x"),
    "weights of zero bytes": lambda s: s.weights(lambda data: b""),
    "weights whose header is longer than the file": lambda s: s.weights(lambda data: b"\xff" * 7 + b"\x00" + data[8:]),
    "weights whose header is garbage": lambda s: s.weights(lambda data: data[:8] + b"x" * (len(data) - 8)),
    "weights whose header is not of tensors": lambda s: s.weights(lambda data: (2).to_bytes(8, "little") + b"[]"),
    "an index that names missing shards": lambda s: s.shards("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    "an index that is no JSON": lambda s: (s.shards(), (s.model / "model.safetensors.index.json").write_text("x")),
    "a tokenizer of another vocabulary": lambda s: s.config(vocab_size=8),
    "a token the model has not": lambda s: (add_token(s, "<image>"), s.set("prompts.arguments", {"text": "1<image>"})),
    "a recipe that may not be read": lambda s: (setattr(s, "path", s.recipe()), lock(s, s.folder / "recipe.yaml")),
    "an architecture nobody has": lambda s: s.config(model_type="perceptron"),
    "an encoder": lambda s: s.config(model_type="t5"),
    "a context longer than the model's": lambda s: s.set("engine.context_tokens", 100_000),
    "a warm-up of a model that is not there": lambda s: (s.warm_up("task.py:no_texts"), s.set("model.path", "some/id"),
                                                        s.patch.setattr("asyncrl.preflight._check_functions", lambda config: None)),
    "a task file that is not there": lambda s: s.set("env.reward", "away.py:reward"),
    "a reward that is not there": lambda s: s.set("env.reward", "task.py:rewrad"),
    "a reward that is no function": lambda s: s.set("env.reward", "task.py:NUMBER"),
    "a reward of another signature": lambda s: s.set("env.reward", "task.py:reward_of_three"),
    "a task file with a syntax error": lambda s: s.task.write_text("def"),
    "a task file that raises": lambda s: s.task.write_text("1 / 0"),
    "a module that is not there": lambda s: s.set("env.reward", "no_such_package.rewards:score"),
    "a prompts function that raises": lambda s: s.set("prompts.function", "task.py:raises"),
    "a prompts function that exits": lambda s: s.set("prompts.function", "task.py:leaves"),
    "a prompts function that yields nothing": lambda s: s.set("prompts.function", "task.py:nothing"),
    "a prompts function that yields no prompts": lambda s: s.set("prompts.function", "task.py:numbers"),
    "a prompts function that returns no iterable": lambda s: s.set("prompts.function", "task.py:one_prompt"),
    "arguments the function does not take": lambda s: s.set("prompts.arguments", {"cuont": 3}),
    "a held-out set that is empty": lambda s: s.set("eval", {
        "kind": "sets", "sets": {"hard": {"prompts": {"kind": "function", "function": "task.py:nothing"}}}}),
    "a row of a held-out set that is no JSON": lambda s: (s.jsonl(b"{\n"), s.set("eval", {
        "kind": "sets", "sets": {"far": {"prompts": s.tree["prompts"]}}}), s.set("prompts", {
            "kind": "function", "function": "task.py:questions"})),
    "a held-out set that does not end": lambda s: s.set("eval", {
        "kind": "sets", "sets": {"hard": {"prompts": {"kind": "function", "function": "task.py:endless"}}}}),
    "prompts that are empty texts": lambda s: s.set("prompts.arguments", {"text": ""}),
    "prompts longer than the context": lambda s: s.set("prompts.arguments", {"text": "1+" * 200}),
    "messages for a model without a chat template": lambda s: s.set("prompts.arguments", {
        "text": "", "messages": [{"role": "user", "content": "1"}]}),
    "a data file that is not there": lambda s: s.set("prompts", {"kind": "jsonl", "path": "away.jsonl"}),
    "a data file that is a folder": lambda s: s.set("prompts", {"kind": "jsonl", "path": str(s.folder)}),
    "a data file of zero bytes": lambda s: s.jsonl(b""),
    "a data file of blank lines": lambda s: s.jsonl(b"\n \n\n"),
    "a data file of bytes": lambda s: s.jsonl(b'{"prompt": "1"}\n\xff\xfe\x00'),
    "a row that is no JSON, far behind": lambda s: s.jsonl(b'{"prompt": "1"}\n' * 500 + b"{\n"),
    "a row that is a list": lambda s: s.jsonl(b"[1, 2]\n"),
    "a row without a prompt": lambda s: s.jsonl(b'{"question": "1"}\n'),
    "a row whose prompt is a number": lambda s: s.jsonl(b'{"prompt": 3}\n'),
    "a row of 17 MB": lambda s: s.jsonl(b'{"prompt": "' + b"1" * (17 << 20) + b'"}\n'),
    "a column that cannot travel": lambda s: s.jsonl(b'{"prompt": "1", "number": 99999999999999999999}\n'),
    "a column of a function's that cannot travel": lambda s: s.set("prompts.function", "task.py:an_object"),
    "a run's name that cannot be shown": lambda s: s.set("run.name", "a\0b"),
    "a row with a message without content": lambda s: s.jsonl(b'{"prompt": [{"role": "user"}]}\n'),
    "examples without a pair": lambda s: s.warm_up("task.py:no_pairs"),
    "examples that are no texts": lambda s: s.warm_up("task.py:no_texts"),
    "a setting of another type": lambda s: s.set("trainer.learning_rate", "fast"),
    "a setting nobody knows": lambda s: s.set("trainer.learnig_rate", 1e-3),
    "a run folder that cannot be written": lambda s: s.set("run.folder", "/proc/runs"),
    "a run folder below a file": lambda s: s.set("run.folder", str(s.task)),
    "a full disk": lambda s: s.patch.setattr(place_check, "free_bytes", lambda path: 1000),
    "shared memory that is too small": lambda s: s.patch.setattr(place_check, "free_bytes", lambda path: 10**12 * ("shm" not in str(path))),
    "shared memory that cannot be written": lambda s: s.patch.setattr(place_check, "shared_place", lambda: Path("/proc")),
    "a machine without loopback": refuse_loopback,
    "a temporary folder with a long name": long_socket_folder,
    "tensor parallelism": lambda s: s.set("trainer.tensor_parallel", 2),
    "context parallelism": lambda s: s.set("trainer.context_parallel", 2),
    "compiled layers that keep a choice of results": lambda s: (s.set("trainer.compile", True),
                                                               s.set("trainer.activation_checkpointing", "selective")),
    "sharding without a rank": lambda s: (s.set("trainer.processes", 0), s.set("trainer.sharding", {"prefetch_layers": 2})),
    "a cut that nothing written before a publish can meet": lambda s: (
        s.set("buffer.policy", {"kind": "drop", "cut_staleness": 0}), s.set("buffer.max_staleness", 2), s.set("correction", "token_tis"),
        s.set("weights.publish_every_steps", 2)),
    "turns of an asynchronous run": lambda s: (s.set("colocation", TURNS), s.set("buffer.max_staleness", 2),
                                               s.set("correction", "token_tis")),
    "turns with anchors between": lambda s: (s.set("colocation", TURNS), s.set("weights.anchor_every_versions", 2)),
    "turns with an engine that cannot sleep": lambda s: (s.set("colocation", TURNS), s.set("engine", {"kind": "vllm"})),
    "versions pushed by a trainer in this process": lambda s: pushed(s, "trainer.processes", 0),
    "versions pushed to an engine in this process": lambda s: pushed(s, "engine", {"kind": "inline"}),
    "versions pushed to engines that sleep": lambda s: pushed(s, "colocation", TURNS),
    "versions pushed to engines that drain": lambda s: pushed(s, "weights.interruption", "drain"),
    "a transport that waits longer than a fetch": lambda s: pushed(s, "weights.fetch_timeout_s", 60.0),
    "adapters and frozen parameters": lambda s: (s.set("lora", LORA), s.set("trainer.frozen", ["embed"])),
    "adapters with dropout": lambda s: s.set("lora", LORA | {"dropout": 0.1}),
    "adapters of a pattern that cannot be read": lambda s: s.set("lora", LORA | {"targets": ["("]}),
    "adapters that vLLM should keep": lambda s: (s.set("lora", LORA), s.set("engine", {"kind": "vllm"})),
    "adapters without peft": lambda s: (s.set("lora", LORA), without(s, "peft")),
    "a machine without torch": lambda s: s.patch.setattr("asyncrl.preflight.importlib.util.find_spec", lambda name: None),
}
