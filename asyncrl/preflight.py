"""What can be known to be wrong before anything starts: one message each, before the warm-up and the first process. Needs no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import RunConfig, Wandb
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.functions import check_arguments, load_function
from asyncrl.lora_config import adapters_of, require_peft
from asyncrl.model_check import ModelSize, check_model
from asyncrl.model_folder import model_folder, reading
from asyncrl.observe.wandb_writer import require_wandb
from asyncrl.place_check import check_loopback, check_run_folder, check_shared_memory, check_socket_folder
from asyncrl.rollout.by_source import check_sampling
from asyncrl.rollout.config import TransformersEngineConfig, VLLMEngineConfig
from asyncrl.rollout.data_config import DataSettings
from asyncrl.rollout.data_set import DataSet
from asyncrl.rollout.engine import Interruption
from asyncrl.rollout.judge import named_rewards
from asyncrl.rollout.model_files import read_facts
from asyncrl.rollout.prompt_rows import complete_prompt, jsonl_prompts, pack_prompts, require_prompt
from asyncrl.rollout.task_config import FunctionData, JsonlData, KeepBest, SetsEval
from asyncrl.rollout.transformers_engine import require_transformers
from asyncrl.rollout.vllm_engine import require_vllm
from asyncrl.run_state import Resume
from asyncrl.task import build_sampling, env_sections, eval_sections, held_out, load_rewards, most_new_tokens, placed, prompt_sections
from asyncrl.tokenizer import Tokenizer
from asyncrl.train.advantages_config import GAE
from asyncrl.train.history import KEPT_CHECKPOINTS
from asyncrl.train.prepare import cache_key
from asyncrl.train.prepare_config import CrossEntropyWarmUp, ModelFolder, ModelFunction
from asyncrl.train.reference_config import NoReference
from asyncrl.training import build_engine
from asyncrl.types import Prompt
from asyncrl.weights.config import StoreConfig
from asyncrl.weights.ends import TransportSpec, log_of

_PROMPTS_LOOKED_AT = 64
"""Of data a function yields, which may have no end, and for the length of all: when each of so many is too long, the context is wrong."""
_MASTER_BYTES, _OPTIMIZER_BYTES, _GRADIENT_BYTES = 4, 8, 4
"""A parameter in the trainer: float32, two float32 of AdamW, its gradient."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_TOKEN_BYTES = 32
"""Of a batch in shared memory: id, mask, logprob, turn, version and what is derived from them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a run takes of the machine, by its model and settings; a model that is not made yet counts 0."""

    disk_bytes: int
    """The exported model, the best one, twice while it changes, and the checkpoints: as many as are kept and the one being written."""
    shared_bytes: int
    """Two versions of the published weights, and the batches since a checkpoint: a rank that dies is given them again. Kept sets, whose
    sizes are not known before, come on top."""
    memory_bytes: int
    """Parameters, gradients and optimizer of the policy and its critic, the reference, parameters and cache of the engine."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The model as far as its prompts are concerned."""

    tokenizer: Tokenizer
    context_tokens: int
    vocab_size: int

    def prompt_tokens(self, prompt: Prompt, *, number: int) -> int:
        """How long the prompt is, made whole. Raises ConfigError when it cannot be, or holds a token that the model has not."""
        whole = complete_prompt(prompt, prompt_id=str(number), tokenizer=self.tokenizer)
        if max(whole.tokens) >= self.vocab_size:
            raise ConfigError("prompts", value=f"token {max(whole.tokens)} in {whole.text[:80]!r}",
                              allowed=f"token ids below the model's vocab_size {self.vocab_size}",
                              remedy="Where it was added to the tokenizer, make room: model.resize_token_embeddings(len(tokenizer)), then "
                                     "save both. Else leave it out of the prompts.")
        return len(whole.tokens)


def check_environment(config: RunConfig, *, resume: Resume = None) -> None:
    """Raise ConfigError for what a recipe needs and is not there, not whole, or too small. Starts no process and leaves no file.

    A JSONL file is read through once, a row at a time; of what a function yields the first 64 prompts are made, all for a held-out set
    that has no limit. A run that resumes has room already where its older checkpoints and weights lie: newer ones replace them.
    """
    _check_packages(config)
    _check_functions(config)
    folder = _model_at_hand(config)
    size = ModelSize(0, 0) if folder is None else check_model(folder)
    asked = None if folder is None else _Asked(Tokenizer(folder), _check_engine(config, folder), read_facts(folder).vocab_size)
    for field, section, source in _data_sections(config):
        with placed(field):
            prompts = _prompts(section, field=field, source=source)
            _check_first_prompts(prompts, field=field, asked=asked)
            if isinstance(section, JsonlData):
                for _ in prompts:
                    """Each row is checked as it is read."""
    for name, held in eval_sections(config).items():
        if held.limit is None:
            with placed(f"eval.sets.{name}.prompts") as field:
                held_out(_prompts(held.prompts, field=field, source=name), name=name, limit=None)
    sizes = _sizes(config, size, folder=folder)
    place = Path(config.run.folder) / config.run.name
    check_run_folder(place, need_bytes=sizes.disk_bytes - (_held_bytes(place) if resume else 0))
    check_shared_memory(sizes.shared_bytes)
    _check_store(config)
    check_loopback()
    if isinstance(config.engine, VLLMEngineConfig):
        check_socket_folder(Path(os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()))


def needs_of(config: RunConfig) -> Sizes:
    """What the run takes. Raises ConfigError for a model that is not whole."""
    folder = _model_at_hand(config)
    return _sizes(config, ModelSize(0, 0) if folder is None else check_model(folder), folder=folder)


def _held_bytes(folder: Path) -> int:
    """What lies in the folder of a run and will be replaced."""
    return sum(path.stat().st_size for name in ("checkpoints", "model", ".best-0", ".best-1")
               for path in (folder / name).rglob("*") if path.is_file())


def _sizes(config: RunConfig, size: ModelSize, *, folder: Path | None) -> Sizes:
    every = config.trainer.checkpoint_every_steps
    checkpoints = min(KEPT_CHECKPOINTS, config.run.steps // every if every else 0) + 1
    token_bytes = _TOKEN_BYTES + (read_facts(folder).route_bytes if config.trainer.routing_replay and folder is not None else 0)
    batch = config.buffer.groups_per_step * config.buffer.group_size * most_new_tokens(config) * token_bytes
    lora = adapters_of(config.lora)
    # at most: as if every matrix had adapters
    trained = size.parameters if lora is None else min(size.parameters, lora.rank * size.matrix_sides)
    trained += size.parameters if isinstance(config.advantages, GAE) else 0
    # with adapters the reference is the policy without them
    beside = int(lora is not None or not isinstance(config.reference, NoReference))
    saved = _MASTER_BYTES + _OPTIMIZER_BYTES
    exports = 3 if isinstance(config.eval, SetsEval) and isinstance(config.eval.best, KeepBest) else 1
    return Sizes(disk_bytes=exports * size.weights_bytes + checkpoints * trained * saved,
                 shared_bytes=2 * size.parameters * _ITEM_BYTES[config.weights.dtype] + _kept_batches(config) * batch,
                 memory_bytes=trained * (saved + _GRADIENT_BYTES) + getattr(config.engine, "kv_cache_bytes", 0)
                 + size.parameters * (beside * _MASTER_BYTES + _ITEM_BYTES[config.engine.dtype]))


def _kept_batches(config: RunConfig) -> int:
    """Most batches in shared memory at once: those since the newest whole checkpoint, the next one being written beside two more."""
    if config.trainer.processes == 0:
        return 1
    return min(config.run.steps, (config.trainer.checkpoint_every_steps or config.run.steps) + 2)


def _check_store(config: RunConfig) -> None:
    """Raise ConfigError when published versions cannot lie where, or as, the settings say."""
    transport = config.weights.transport
    if isinstance(transport, StoreConfig) and transport != StoreConfig(keep_bytes=transport.keep_bytes):
        with tempfile.TemporaryDirectory() as folder:
            log_of(TransportSpec(folder=Path(folder), run=config.run.name, config=transport))


def _check_packages(config: RunConfig) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("torch", value="not installed", allowed="torch, which trainer and engines run on",
                          remedy="pip install -c constraints.txt torch.")
    if isinstance(config.engine, VLLMEngineConfig):
        require_vllm()
    if isinstance(config.engine, TransformersEngineConfig):
        require_transformers()
    if adapters_of(config.lora):
        require_peft()
    if isinstance(config.run.wandb, Wandb):
        require_wandb()


def _check_functions(config: RunConfig) -> None:
    """Every function of the user's can be imported and takes what it will be given; examples of a warm-up yield a pair."""
    for field, section in env_sections(config).items():
        with _user_code(f"{field}.reward", section.reward):
            rewards = load_rewards(section, field=field)
        named_rewards(rewards if isinstance(rewards, Mapping) else [rewards])
    if isinstance(config.model, ModelFunction):
        with _user_code("model.function", config.model.function):
            function = load_function(config.model.function, field="model.function")
        check_arguments(function, Path(), field="model", arguments=config.model.arguments)
    if isinstance(config.warm_up, CrossEntropyWarmUp):
        for name in ("examples", "held_out"):
            field, reference, given = f"warm_up.{name}", getattr(config.warm_up, name), config.warm_up.arguments
            with _user_code(field, reference):
                function = load_function(reference, field=field)
                check_arguments(function, field="warm_up", arguments=given, seed=config.warm_up.seed)
                pair = next(iter(function(seed=config.warm_up.seed, **given)), None)
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
                raise ConfigError(field, value=pair, allowed="an iterator of (prompt text, completion text)",
                                  remedy="Yield at least one pair.")


def _model_at_hand(config: RunConfig) -> Path | None:
    """The folder RL will start from, or one of the same model before its warm-up; None when it is yet to be made.

    Raises ConfigError for a model that is neither a folder nor, without a warm-up, an id that can be fetched.
    """
    if not isinstance(config.model, ModelFolder):
        prepared = Path(config.run.folder) / ".cache" / cache_key(config.model, config.warm_up)
        return prepared if prepared.is_dir() else None
    with reading(config.model.path):
        if os.path.isdir(config.model.path):
            return Path(config.model.path)
        if not isinstance(config.warm_up, CrossEntropyWarmUp):
            return model_folder(config.model.path)
    raise ConfigError("model.path", value=config.model.path, allowed="an existing Hugging Face model folder, where there is a warm-up",
                      remedy="Download the model first; a recipe's paths are looked for beside it, then in the working folder.")


def _check_engine(config: RunConfig, folder: Path) -> int:
    """The context of the engine, in tokens. Raises ConfigError for what it cannot do."""
    engine = build_engine(config, model=folder)
    if config.trainer.routing_replay and not read_facts(folder).has_experts:
        raise ConfigError("trainer.routing_replay, model", value=(True, str(folder)), allowed="a mixture of experts",
                          remedy="config.json names no experts: leave trainer.routing_replay out.")
    check_sampling(build_sampling(config, others=()), engines=[engine], interruption=Interruption(config.weights.interruption))
    return engine.capabilities.context_tokens


def _data_sections(config: RunConfig) -> list[tuple[str, FunctionData | JsonlData, str]]:
    """Every section that gives prompts: its field, itself, and the source its rows are of."""
    prompts = [(field, section, field.rpartition(".")[2]) for field, section in prompt_sections(config).items()]
    return [*prompts, *((f"eval.sets.{name}.prompts", asked.prompts, name) for name, asked in eval_sections(config).items())]

def _prompts(section: FunctionData | JsonlData, *, field: str, source: str) -> Iterator[Prompt]:
    """The prompts of a section, one by one. Whatever reading or making them fails with is a ConfigError."""
    if isinstance(section, JsonlData):
        yield from jsonl_prompts(Path(section.path), source=source)
        return
    with _user_code(f"{field}.function", section.function):
        function = load_function(section.function, field=f"{field}.function")
        check_arguments(function, field=field, arguments=section.arguments)
        made = function(**section.arguments)
        if not isinstance(made, Iterable):
            raise ConfigError(f"{field}.function", value=made, allowed="a function that returns or yields asyncrl.Prompt",
                              remedy="Return a list, or yield the prompts.")
        if isinstance(section, DataSettings):
            DataSet(lambda: made, settings=section, seed=0)
        yield from made


def _check_first_prompts(prompts: Iterator[Prompt], *, field: str, asked: _Asked | None) -> None:
    """Raise ConfigError unless there is a prompt, the first ones can be made whole, and one of them leaves room for an answer."""
    lengths = []
    for number, prompt in enumerate(itertools.islice(prompts, _PROMPTS_LOOKED_AT)):
        require_prompt(prompt)
        pack_prompts([prompt])
        lengths.append(0 if asked is None else asked.prompt_tokens(prompt, number=number))
    if not lengths:
        raise ConfigError(field, value="no prompt", allowed="at least one prompt",
                          remedy="Check the data set, or the arguments of the function that makes it.")
    if asked is not None and min(lengths) >= asked.context_tokens:
        raise ConfigError(field, value=f"prompts of {min(lengths)} tokens and more, the first {len(lengths)} of them",
                          allowed=f"prompts that leave room for an answer in a context of {asked.context_tokens} tokens",
                          remedy="Shorten the prompts, or raise engine.context_tokens where the model allows it.")


@contextlib.contextmanager
def _user_code(field: str, reference: object) -> Iterator[None]:
    """What the user's own code raises, with its place, as a ConfigError."""
    try:
        yield
    except AsyncRLError:
        raise
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(field, value=reference, allowed="code that runs", remedy=f"It raised {type(error).__name__}: {error} "
                          f"({place.filename}, line {place.lineno}, in {place.name}).") from error
